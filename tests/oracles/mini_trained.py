"""The trained mini before two oracles: fixed prompts, nemo-automodel's answers, ftllm's logits.

Each part runs in the environment of its engine; DIR is scratch space that holds copies of the
checkpoints, since ftllm leaves files beside the weights it reads.

    python -m tests.oracles.mini_trained prompts --model models/finwhale-mini
    python -m tests.oracles.mini_trained copies --model models/finwhale-mini \\
        --bf16-model runs/mini/chat/checkpoint-bf16 --work DIR
    python -m tests.oracles.mini_trained nemo --model DIR/shipped --work DIR --golden tests/golden
    python -m tests.oracles.mini_trained ftllm --model DIR/shipped --work DIR
    python -m tests.oracles.mini_trained compare --work DIR

What a newcomer gets wrong: text of 128 tokens selects everything, and tests no selection. The long
prompt passes the top-k of both ratios; the candidate pool holds 1,024 entries and never binds here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.oracles.golden_file import GOLDEN, write_golden

if TYPE_CHECKING:
    from torch import Tensor

NAME = "finwhale-mini"
PROMPTS = GOLDEN / f"{NAME}-prompts.json"
SHORT_TEXT = (
    "The keeper of the lighthouse counted the ships each evening and wrote their names in a book, "
    "with the hour, the weather and the colour of the flag that every one of them carried."
)
LONG_TOKENS = 700
QUESTION = "Sort these words: pear, apple, fig. Then say which of them is the shortest."
# Tokens whose logits and streams are stored; the last one has read everything.
POSITIONS = {"short": (39,), "long": (350, 699), "chat": (-1,)}
STREAM_LAYERS = (4, 12)
# Every so many tokens a projection of the streams and a row of each selection are stored.
STEP = {"short": 4, "long": 20, "chat": 4}
MARGIN = 1e-5
# Beginnings that ftllm answers; of another prompt the whole.
FTLLM_LENGTHS = {"long": (128, 350, 700)}
FTLLM_STEPS = 8


def read_prompts() -> dict[str, list[int]]:
    """Return the stored ids of each prompt, begin marker first."""
    stored = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return {name: prompt["ids"] for name, prompt in stored.items()}


def direction(streams: int, channels: int) -> Tensor:
    """Return the fixed unit vector [N, C] fp64 on which streams are projected.

    Two streams project at most as far apart as they are, so right streams stay within their
    tolerance, and a wrong one would have to be wrong at right angles to this vector.
    """
    import torch

    wave = torch.cos(0.7 * torch.arange(streams * channels, dtype=torch.float64) + 0.3)
    return (wave / wave.norm()).view(streams, channels)


def write_prompts(model: Path) -> None:
    """Encode the prompts with the checkpoint's tokenizer and store text and ids."""
    from finwhale.text.prompt import encode_prompt
    from finwhale.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(model)
    text = (Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")
    ids = {
        "short": [tokenizer.bos_id, *tokenizer.encode(SHORT_TEXT)][:40],
        "long": [tokenizer.bos_id, *tokenizer.encode(text)][:LONG_TOKENS],
        "chat": encode_prompt(tokenizer, [{"role": "user", "content": QUESTION}]),
    }
    stored = {name: {"text": tokenizer.decode(row), "ids": row} for name, row in ids.items()}
    lines = [f" {json.dumps(name)}: {json.dumps(prompt)}" for name, prompt in stored.items()]
    PROMPTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print({name: len(row) for name, row in ids.items()})


def run_nemo(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return everything that nemo-automodel computes for each prompt: fp32, rounding off."""
    import torch
    from nemo_automodel.components.models.deepseek_v41 import attention as nemo_attention

    from tests.oracles.geometries import GoldenRun
    from tests.oracles.nemo import CacheRecorder, Capture, load_model

    model, found = load_model(folder), {}
    for name, ids in read_prompts().items():
        nemo_attention.quantize_cache = recorder = CacheRecorder(rounding=False)
        run = GoldenRun(
            name=name,
            geometry="mini",
            quantized=True,
            rounding=False,
            batch=1,
            length=len(ids),
            positions=tuple(range(len(ids))),
            keep=("streams", "selection"),
            margin=MARGIN,
        )
        hooks = Capture(model, run, recorder)
        row = torch.tensor([ids])
        with torch.no_grad():
            hidden, _ = model.model(row)
            logits = model.lm_head(hidden.float())
        hooks.stop()
        tensors = hooks.collect()
        tensors["logits"] = logits
        tensors["engram_hash_ids"] = model.model.engram_hash(row).to(torch.int32)
        found[name] = {key: value.contiguous() for key, value in tensors.items()}
    return found


def cut(name: str, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the golden keeps of one prompt, names prefixed with the prompt's.

    `rows.L` are tokens whose selection at L leaves nothing open, and `topk.L` their entries as
    bits; `clear` says where the lead of the chosen experts is above the margin.
    """
    import torch

    length = full["logits"].shape[1]
    positions = [p % length for p in POSITIONS[name]]
    steps = torch.arange(STEP[name] - 1, length, STEP[name])
    layers = sum(key.startswith("streams.") for key in full)
    streams = torch.stack([full[f"streams.{n}"][0] for n in range(layers)])  # [L + 1, T, N, C]
    unit = direction(*streams.shape[2:])
    gates = sorted(int(k.split(".")[1]) for k in full if k.startswith("gate_ids."))
    kept = {
        "positions": torch.tensor(positions, dtype=torch.int16),
        "logits": full["logits"][0, positions],
        "steps": steps.to(torch.int16),
        "projections": (streams[:, steps].double() * unit).sum((2, 3)).float(),
        "streams": streams[list(STREAM_LAYERS)][:, positions],
        # One sum per Engram layer and token: a wrong row of 24 would have to be made up for.
        "engram_sums": full["engram_hash_ids"][0].sum(-1).to(torch.int32),
        "gate_ids": torch.stack([full[f"gate_ids.{n}"][0] for n in gates]).to(torch.uint8),
    }
    margins = torch.stack([full[f"gate_margin.{n}"][0] for n in gates])  # [L, T]
    clear = np.packbits((margins > MARGIN).numpy(), axis=-1, bitorder="little")
    kept["clear"] = torch.from_numpy(clear)
    if name == "long":
        for key in [k for k in full if k.startswith("topk_sure.")]:
            layer = key.split(".")[1]
            sure, possible = full[key][0], full[f"topk_possible.{layer}"][0]
            rows = steps[(sure[steps] == possible[steps]).all(-1)]
            kept[f"rows.{layer}"] = rows.to(torch.int16)
            kept[f"topk.{layer}"] = sure[rows]
    return {f"{name}.{key}": value.contiguous() for key, value in kept.items()}


def nemo_part(folder: Path, work: Path, golden: Path | None) -> None:
    """Store all that nemo-automodel computes in `work`, and the golden if it is asked for."""
    from safetensors.torch import save_file

    from finwhale.evals.figures import folder_digest

    found = run_nemo(folder)
    for name, tensors in found.items():
        save_file(tensors, work / f"nemo-{folder.name}-{name}.safetensors")
    if golden is None:
        return
    tensors = {}
    for name, full in found.items():
        tensors |= cut(name, full)
    write_golden(
        NAME,
        tensors,
        out=golden,
        package="nemo-automodel",
        command="python -m tests.oracles.mini_trained nemo --model DIR/shipped --work DIR "
        "--golden tests/golden",
        seed="none: trained weights",
        commit=commit(),
        checkpoint="models/finwhale-mini",
        checkpoint_digest=folder_digest(folder),
        stream_layers=list(STREAM_LAYERS),
        margin=MARGIN,
        notes="fp32, FP8 and FP4 weights dequantised, cache rounding off; ids of the prompts are "
        f"in {PROMPTS.name}",
    )


def copies_part(model: Path, bf16_model: Path, work: Path) -> None:
    """Write DIR/shipped, DIR/bf16 and DIR/dequantised: the shipped weights as BF16, exactly."""
    from finwhale.checkpoint.load import load_model
    from finwhale.checkpoint.save import save_checkpoint

    shutil.copytree(model, work / "shipped")
    shutil.copytree(bf16_model, work / "bf16")
    save_checkpoint(
        load_model(model).model,
        work / "dequantised",
        quantized=False,
        tokenizer_file=model / "tokenizer.json",
    )
    # ftllm asks for the file, and reads nothing from it that ids need.
    shutil.copy(work / "dequantised" / "tokenizer_config.json", work / "bf16")


def commit() -> str:
    """Return the commit of this checkout."""
    import subprocess

    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def ask_ftllm(folder: Path, ids: list[int], steps: int, out: Path, dump: Path | None = None):
    """Write ftllm's logits and greedy ids to `out`, and its tensors to `dump` if it is given.

    In a process of its own: a second model in one process does not start, and the engine's threads
    do not end by themselves.
    """
    os.environ["FASTLLM_SKIP_WARMUP"] = "1"
    os.environ["FASTLLM_DSV41_DISABLE_FAKE_QUANT"] = "1"  # cache rounding off
    child = os.fork()
    if not child:
        from tests.oracles.ftllm_peer import run_engine

        if dump is not None:
            dump.mkdir(exist_ok=True)
            os.environ["FASTLLM_DSV41_DUMP_DIR"] = str(dump)
        vocab = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
        rows, chosen = run_engine(folder, ids, vocab, steps, "auto")
        np.savez(out, logits=rows, ids=np.array(chosen, dtype=np.int32))
        os._exit(0)
    os.waitpid(child, 0)
    if not out.exists():
        raise RuntimeError(f"{out.name}: ftllm wrote no logits; read its output above")


def ftllm_part(folder: Path, work: Path) -> None:
    """Store ftllm's answers after the beginnings of each prompt, and the tensors of the short one.

    A later step writes over the tensors of the prompt, so these come from a run of one step.
    """
    for name, ids in read_prompts().items():
        for length in FTLLM_LENGTHS.get(name, (len(ids),)):
            out = work / f"ftllm-{folder.name}-{name}-{length}.npz"
            steps = FTLLM_STEPS if length == len(ids) else 1
            ask_ftllm(folder, ids[:length], steps, out)
    dump = work / f"dump-{folder.name}"
    ask_ftllm(folder, read_prompts()["short"], 1, work / f"one-{folder.name}.npz", dump)


def compare_exact(work: Path, checkpoint: str) -> list[dict]:
    """Return our fp32 against all that nemo-automodel stored in `work`, one record per prompt."""
    import torch
    from safetensors.torch import load_file

    from finwhale.checkpoint.load import load_model
    from finwhale.model import Numerics
    from finwhale.ops import FAST
    from tests.oracles.golden_file import unpack_bits
    from tests.parity.compare import relative_errors
    from tests.parity.ours import chosen_mask

    ours = load_model(work / checkpoint, numerics=Numerics(cache_rounding=False), ops=FAST).model
    records = []
    for name, ids in read_prompts().items():
        theirs, trace = load_file(work / f"nemo-{checkpoint}-{name}.safetensors"), {}
        with torch.no_grad():
            logits = ours(torch.tensor([ids]), trace=trace)
        errors = {
            key: float(relative_errors(trace[key], theirs[key]).max())
            for key in theirs
            if key.startswith("streams.")
        }
        record = {
            "part": "nemo",
            "checkpoint": checkpoint,
            "prompt": name,
            "tokens": len(ids),
            "streams_worst": max(errors.values()),
            "streams_worst_layer": max(errors, key=lambda key: errors[key]),
            "logits_worst": float(relative_errors(logits, theirs["logits"]).max()),
            "engram_rows_equal": all(
                torch.equal(trace[f"engram_rows.{layer}"], theirs["engram_hash_ids"][:, :, n])
                for n, layer in enumerate(ours.config.text_config.engram_layer_ids)
            ),
        }
        rows = free = wrong = dropping = 0
        for key in theirs:
            if key.startswith("topk_sure."):
                layer = int(key.split(".")[1])
                width = len(ids) // ours.specs[layer].ratio
                own = chosen_mask(trace[f"topk.{layer}"], width)[0]
                sure = unpack_bits(theirs[key], width)[0]
                possible = unpack_bits(theirs[f"topk_possible.{layer}"], width)[0]
                rows += len(own)
                free += int((sure != possible).any(-1).sum())
                wrong += int(((sure & ~own) | (own & ~possible)).any(-1).sum())
                visible = (torch.arange(len(ids)) + 1) // ours.specs[layer].ratio
                dropping += int((visible > ours.config.text_config.index_topk).sum())
        record |= {
            "selections": rows,
            "dropping": dropping,
            "free": free,
            "selections_wrong": wrong,
        }
        choices = unclear = differ = 0
        for key in theirs:
            if key.startswith("gate_ids."):
                layer = key.split(".")[1]
                own = trace[key].view(theirs[key].shape).sort(-1).values
                clear = theirs[f"gate_margin.{layer}"] > MARGIN
                choices += clear.numel()
                unclear += int((~clear).sum())
                differ += int((clear & (own != theirs[key]).any(-1)).sum())
        record |= {"routes": choices, "routes_below_margin": unclear, "routes_wrong": differ}
        records.append(record)
    return records


def compare_ftllm(work: Path) -> list[dict]:
    """Return ftllm's logits against ours in fp32 on the same ids, beside our own bf16 and release.

    ftllm chooses its own next token, so our models read its choices too. Figures of a step are
    relative differences; the first step is the one after the prompt.
    """
    import torch

    from finwhale.checkpoint.load import load_model
    from finwhale.model import Numerics
    from finwhale.ops import FAST

    numerics = {
        "fp32": Numerics(cache_rounding=False),
        "bf16": Numerics(cache_rounding=False, dtype=torch.bfloat16),
        "release": Numerics(mode="release", cache_rounding=False, dtype=torch.bfloat16),
    }
    prompts, records = read_prompts(), []
    for name in ("bf16", "dequantised", "shipped"):
        kinds = ("fp32", "bf16") if name != "shipped" else ("fp32", "bf16", "release")
        ours = {
            kind: load_model(work / name, numerics=numerics[kind], ops=FAST).model for kind in kinds
        }
        for path in sorted(work.glob(f"ftllm-{name}-*.npz")):
            prompt, length = path.stem.split("-")[2], int(path.stem.split("-")[3])
            with np.load(path) as stored:
                theirs = torch.from_numpy(stored["logits"]).double()
                chosen = stored["ids"].tolist()
            ids = torch.tensor([prompts[prompt][:length] + chosen[:-1]])
            rows = {"ftllm": theirs}
            for kind, model in ours.items():
                with torch.no_grad():
                    hidden = model.hidden(ids)[0, length - 1 :]
                    rows[kind] = model.logits(hidden).double()
            record = {"part": "ftllm", "checkpoint": name, "prompt": prompt, "tokens": length}
            record["steps"] = len(chosen)
            pairs = [("ftllm", "fp32"), ("ftllm", "bf16"), ("bf16", "fp32")]
            if name == "shipped":
                pairs += [("release", "fp32"), ("ftllm", "release")]
            for one, other in pairs:
                a, b = rows[one], rows[other]
                # One shift of all logits changes no probability.
                a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
                relative = (a - b).norm(dim=-1) / b.norm(dim=-1)
                record[f"{one} from {other}"] = [round(float(r), 4) for r in relative]
            same = theirs.argmax(-1) == rows["fp32"].argmax(-1)
            record["same_first_choice"] = int(same.sum())
            records.append(record)
    return records


def trace_ftllm(work: Path) -> list[dict]:
    """Return how far each product of ftllm is from ours, input rounded to FP8 and as it is.

    Both read ftllm's own input, so no error is carried from one product to the next, and what is
    left is the bf16 of the output, 0.0016. The product of an expert is silu(w1 x) * w3 x times
    its routing weight, through w2; each step is bf16 and both inputs are rounded, or neither is.
    """
    import torch

    from finwhale.checkpoint.load import load_model
    from finwhale.ops.moe import clamped_swiglu
    from finwhale.ops.rounding import round_fp8

    model = load_model(work / "shipped").model
    state, total = model.state_dict(), len(read_prompts()["short"])
    limit = model.config.text_config.swiglu_limit
    sites = {"wq_a": ("attn_in", "qr"), "wkv": ("attn_in", "kv_proj")}
    sites |= {"wq_b": ("qnorm", "qproj"), "wo_b": ("woa", "attn")}

    def half(x):
        return x.bfloat16().float()

    def expert(x, name, rounding, weight):
        w1, w2, w3 = (state[f"{name}.{w}.weight"].float() for w in ("w1", "w2", "w3"))
        x = rounding(x)
        inner = clamped_swiglu(half(x @ w1.T), half(x @ w3.T), weight, limit)
        return half(rounding(half(inner)) @ w2.T)

    records = []
    for name in ("dequantised", "shipped"):
        for layer in range(len(model.specs)):

            def read(what, name=name, layer=layer):
                path = work / f"dump-{name}" / f"fl_layer{layer}_{what}.bin"
                return torch.from_numpy(np.fromfile(path, dtype=np.float32)).view(total, -1)

            if not (work / f"dump-{name}" / f"fl_layer{layer}_ffn.bin").exists():
                continue
            record = {"part": "trace", "checkpoint": name, "layer": layer}
            for kind, rounding in (("rounded", round_fp8), ("as it is", lambda x: x)):
                found = {}
                for site, (given, made) in sites.items():
                    weight = state[f"layers.{layer}.attn.{site}.weight"].float()
                    found[site] = (rounding(read(given)) @ weight.T, read(made))
                x, prefix = read("ffn_in"), f"layers.{layer}.ffn"
                y = expert(x, f"{prefix}.shared_experts", rounding, None)
                ids, weights = read("expert_idx").long(), read("expert_score")
                for e in range(model.config.text_config.n_routed_experts):
                    own = (weights * (ids == e)).sum(-1, keepdim=True)
                    routed = expert(x, f"{prefix}.experts.{e}", rounding, own)
                    y = y + torch.where(own > 0, routed, 0)
                found["ffn"] = (y, read("ffn"))
                record[kind] = {
                    site: round(float((a - b).norm() / b.norm()), 5)
                    for site, (a, b) in found.items()
                }
            records.append(record)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("prompts", "nemo", "ftllm", "copies", "compare"))
    parser.add_argument("--model", type=Path, help="a checkpoint folder")
    parser.add_argument("--bf16-model", type=Path, help="the training weights as BF16")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--golden", type=Path)
    args = parser.parse_args()
    if args.part == "prompts":
        write_prompts(args.model)
    elif args.part == "nemo":
        nemo_part(args.model, args.work, args.golden)
    elif args.part == "copies":
        copies_part(args.model, args.bf16_model, args.work)
    elif args.part == "compare":
        root = Path(__file__).parents[2]
        sys.path.insert(0, str(root / "bench"))
        # The command of the record, without this machine's folders.
        sys.argv[0] = "-m tests.oracles.mini_trained"
        from record import write_result

        records = [r for name in ("shipped", "bf16") for r in compare_exact(args.work, name)]
        for record in [*records, *compare_ftllm(args.work), *trace_ftllm(args.work)]:
            print(record, flush=True)
            write_result("mini_oracles", record)
    elif args.part == "ftllm":
        ftllm_part(args.model, args.work)


if __name__ == "__main__":
    main()
