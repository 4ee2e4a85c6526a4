"""Checkpoint folders that the oracles read: hashed weights through finwhale's own writer.

Weights are never stored; the same call makes the same bytes anywhere. `tests/parity` writes the
same folders again and loads them with finwhale's loader.

    python -m tests.oracles.checkpoint --out DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import Tensor

from finwhale.checkpoint.hashed_weights import hashed_source
from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.save import TensorSource, save_checkpoint, save_tensors
from finwhale.checkpoint.toy_tokenizer import toy_tokenizer_json
from finwhale.config.inventory import TensorSpec
from tests.oracles.geometries import RUNS, SEED, GoldenRun


def oracle_source(run: GoldenRun) -> TensorSource:
    """Return the hashed weights, with the combine logits of the hyper-connections 8 times wider.

    With the plain draw Sinkhorn converges long before its 20 steps, and a golden could not tell
    where it ends. The released weights leave row errors of up to 8.5e-2 (section 6).
    """
    plain = hashed_source(SEED)
    combine = 2 * run.config().text_config.hc_mult  # after pre and post

    def rows(spec: TensorSpec, part: slice) -> Tensor:
        values = plain(spec, part)
        if spec.name.endswith(("hc_attn_base", "hc_ffn_base")):
            values[max(0, combine - part.start) :] *= 8
        return values

    return rows


def write_checkpoint(run: GoldenRun, out: Path) -> Path:
    """Write the checkpoint of `run`: FP8 and FP4 if it is quantised, else BF16."""
    config = run.config()
    tokenizer = toy_tokenizer_json(config.text_config.vocab_size)
    save_tensors(
        config,
        oracle_source(run),
        out,
        quantized=run.quantized,
        extra_files={"tokenizer.json": tokenizer.encode()},
        overwrite=True,
    )
    return out


def export_bf16(folder: Path, out: Path) -> Path:
    """Write the dequantised weights of `folder` as BF16, which holds them exactly."""
    extra = {"tokenizer_config.json": folder / "tokenizer_config.json"}
    save_checkpoint(
        load_model(folder).model,
        out,
        quantized=False,
        tokenizer_file=folder / "tokenizer.json",
        extra_files=extra,
        overwrite=True,
    )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of all checkpoints")
    args = parser.parse_args()
    for name, run in {run.checkpoint: run for run in RUNS.values()}.items():
        folder = write_checkpoint(run, args.out / name)
        if run.quantized and run.greedy:
            export_bf16(folder, args.out / f"{name}-as-bf16")
        print(f"checkpoint: {name}", flush=True)


if __name__ == "__main__":
    main()
