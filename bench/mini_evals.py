"""Long-context metrics of finwhale-mini and of what it is compared with, on one GPU.

    python bench/mini_evals.py --model mini=runs/mini/chat --model window=runs/mini-window/long \\
        --what positions grid selection --data data --out runs/evals
A model is a folder of `recipes.train_mini`, or of a checkpoint. A phase in the deployed formats is
read from its checkpoint, any other from its training state. Everything goes to OUT/NAME as JSON
lines and plots; a measure that the limit of seconds leaves no time for is said to be missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from finwhale.baselines.dense_baseline import dense_baseline
from finwhale.checkpoint.load import load_model
from finwhale.config.presets import window_only, with_compressed_vocab
from finwhale.data.packing import PackedRows, pack
from finwhale.data.shards import read_shards
from finwhale.evals.failing_inputs import failing_inputs
from finwhale.evals.figures import cell_record, provenance, write_report
from finwhale.evals.position_bits import added, position_bits, token_bytes
from finwhale.evals.recall_grid import recall_grid, selection_limits
from finwhale.evals.selection_errors import plots, selection_errors
from finwhale.kernels.select import training_ops
from finwhale.model import Backbone, Numerics
from finwhale.text.engram_map import token_map
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import NUM_FIRST_MARKERS
from finwhale.train.state import load_weights
from recipes import mini

HELD_OUT = ("postgresql-doc", "sphinx")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Length: examples of each cell.
LENGTHS = {512: 64, 1024: 64, 2048: 64, 4096: 64, 8192: 32, 16_384: 32, 32_768: 16, 65_536: 8}


def loaded(folder: Path, tokenizer: Tokenizer, device: str):
    """Return the model of a phase's folder, or of a checkpoint's."""
    kept = folder if (folder / "config.json").exists() else folder / "checkpoint"
    facts: dict = {}
    if kept != folder:
        facts = json.loads((folder / "run.json").read_text())["config"]
    deployed = kept == folder or facts["quantization"]["start"] < 1
    numerics = Numerics(
        cache_rounding=deployed,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        weight_dtype=torch.float32,
    )
    ops = training_ops(device)
    if deployed:
        model = load_model(kept, ops=ops, numerics=numerics).model
    else:
        ids = token_map(tokenizer)
        config = with_compressed_vocab(mini.model(), int(ids.max()) + 1)
        if facts["baseline"] == "dense":
            model = dense_baseline(config, numerics=numerics, ops=ops)
        else:
            if facts["baseline"] == "window":
                config = window_only(config)
            model = Backbone(config, token_map=torch.from_numpy(ids), numerics=numerics, ops=ops)
    model.to_device(device)
    if device == "cuda":
        model.stack_experts()
    if not deployed:
        load_weights(folder, model)
    return model


class Texts:
    """Held-out packages of the validation side, and long documents that no side trains on."""

    def __init__(self, data: Path, tokenizer: Tokenizer) -> None:
        shards = read_shards(data / "shards", "validation", tokenizer=tokenizer)
        self.held_out = [d for name in HELD_OUT for d in shards.documents(name)]
        long = np.load(data / "long.npz")
        self.long = np.split(long["ids"], np.cumsum(long["lengths"])[:-1])


def positions(model, texts: Texts, tokenizer: Tokenizer) -> dict:
    """Return bits by position of the held-out packages and of long documents."""
    options = {"num_bytes": token_bytes(tokenizer), "pad_id": tokenizer.pad_id}
    return {
        "held-out packages": position_bits(
            model, texts.held_out[:600], sequence_length=16_384, batch_rows=2, **options
        ),
        "long documents": position_bits(
            model, texts.long[:24], sequence_length=32_768, batch_rows=1, **options
        ),
    }


def grids(
    model, tokenizer: Tokenizer, args: argparse.Namespace, stop_at: float, kept: Path, about: dict
) -> list:
    """Return a grid per kind and length, in order, until there is no time left.

    Each is added to the file `kept` at once: a killed run keeps what it measured.
    """
    found = []
    lengths = args.lengths
    for length in lengths:
        for kind in args.kinds:
            if time.time() > stop_at:
                print(f"no time for {kind} at {length:,}", flush=True)
                continue
            began = time.time()
            grid = recall_grid(
                model,
                kind=kind,
                lengths=[length],
                depths=DEPTHS,
                num_examples=args.examples or LENGTHS[length],
                vocab=range(NUM_FIRST_MARKERS, model.config.text_config.vocab_size - 1),
                bos_id=tokenizer.bos_id,
                batch_tokens=16_384,
                seed=77,
            )
            found.append(grid)
            with kept.open("a") as file:
                for cell in grid.cells:
                    file.write(json.dumps({**cell_record(grid, cell), **about}) + "\n")
            shares = [round(grid.cell(length, depth).accuracy, 3) for depth in DEPTHS]
            print(f"{kind} {length:,}: {shares}, {time.time() - began:.0f} s", flush=True)
    return found


def merged(found: list) -> list:
    """Return one grid per kind from grids of one length each."""
    by_kind: dict[str, list] = {}
    for grid in found:
        by_kind.setdefault(grid.kind, []).append(grid)
    return [
        dataclasses.replace(
            own[0],
            lengths=tuple(n for grid in own for n in grid.lengths),
            cells=tuple(cell for grid in own for cell in grid.cells),
        )
        for own in by_kind.values()
    ]


def selection(model, texts: Texts, tokenizer: Tokenizer, folder: Path, about: dict) -> None:
    """Write the selection errors on long text and the inputs on which selection fails."""
    rows = pack(
        [d[:16_385] for d in texts.long if len(d) > 16_384][:16],
        sequence_length=16_384,
        pad_id=tokenizer.pad_id,
    )
    single = PackedRows(inputs=rows.inputs, targets=rows.targets, lengths=rows.lengths)
    is_cpu = model.embed.weight.device.type == "cpu"
    records = selection_errors(model, single, sampled=128, num_rows=8, batch_rows=1, sliced=is_cpu)
    plots(records, folder)
    vocab = range(NUM_FIRST_MARKERS, model.config.text_config.vocab_size - 1)
    failures = failing_inputs(
        model, vocab=vocab, length=4097, batch_rows=8, examples=8, sliced=False
    )
    with (folder / "selection.jsonl").open("w") as file:
        for record in (*records, *failures):
            line = {"record": type(record).__name__, **dataclasses.asdict(record), **about}
            file.write(json.dumps(line) + "\n")
    worst = [(f.kind, f.copies, f.depth, f.recall, f.accuracy) for f in failures[:5]]
    print("worst inputs:", *worst, sep="\n  ", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--what", nargs="*", default=["positions", "grid", "selection"])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/evals"))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    kinds = ("associative_recall", "needle")
    parser.add_argument("--kinds", nargs="*", default=kinds, choices=kinds)
    parser.add_argument("--examples", type=int, help="of each cell; else by length")
    parser.add_argument("--limit-s", type=float, default=1e9)
    args = parser.parse_args()
    stop_at = time.time() + args.limit_s
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(args.data / "tokenizer.json")
    texts = Texts(args.data, tokenizer) if set(args.what) != {"grid"} else None
    for item in args.model:
        name, _, folder = item.partition("=")
        out = args.out / name
        out.mkdir(parents=True, exist_ok=True)
        model = loaded(Path(folder), tokenizer, args.device)
        own = Path(folder)
        kept = own if (own / "config.json").exists() else own / "checkpoint"
        command = " ".join(sys.argv)
        if kept.exists():
            about = provenance(kept, model.config, command=command, device=args.device)
        else:
            about = {"command": command, "device": args.device, "phase": Path(folder).name}
        about["model"] = name
        bits = {}
        if "positions" in args.what and time.time() < stop_at:
            began = time.time()
            bits = positions(model, texts, tokenizer)
            for series, buckets in bits.items():
                shown = [(b.label, b.bits_per_byte, b.num_targets) for b in buckets]
                print(name, series, shown, f"{time.time() - began:.0f} s", flush=True)
            bits["all"] = added(list(bits.values()))
        found = []
        if "grid" in args.what:
            found = merged(grids(model, tokenizer, args, stop_at, out / "cells.jsonl", about))
        write_report(
            out,
            about=about,
            positions=bits,
            grids=found,
            trained_length=16_384,
            limits=selection_limits(model),
        )
        if "selection" in args.what and time.time() < stop_at:
            began = time.time()
            selection(model, texts, tokenizer, out, about)
            print(f"{name}: selection {time.time() - began:.0f} s", flush=True)
        del model
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
