"""Runs ftllm, a C++ engine with a real cache, on a checkpoint and stores its logits per step.

Runs inside its own environment. ftllm picks its own next token, so a step is comparable as long
as all tokens before it were the same; the stored ids say how far that is.

    python -m tests.oracles.ftllm_peer --run mini --export fp8 --checkpoint DIR \\
        --golden DIR --out DIR
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from pathlib import Path

import numpy as np

from tests.oracles.geometries import RUNS, SEED
from tests.oracles.golden_file import write_golden


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=sorted(RUNS), required=True)
    parser.add_argument("--export", choices=("bf16", "fp8"), required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--golden", type=Path, required=True, help="folder of the NeMo goldens")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args()


def run_engine(folder: Path, ids: list[int], vocab: int, steps: int, dtype: str):
    """Return logits [steps, V] and chosen ids of a greedy run with a cache, prompt first."""
    from ftllm import llm
    from ftllm.util import make_normal_llm_model, make_normal_parser

    argv = ["--path", str(folder), "--device", "cpu", "--moe_device", "cpu", "-t", "1"]
    argv += ["--cuda_shared_expert", "false", "--dtype", dtype]
    options = make_normal_parser("peer").parse_args(argv)
    options.max_batch, options.tokens = 1, max(4096, len(ids) + steps)
    model = make_normal_llm_model(options)
    library = llm.fastllm_lib
    prompt = (ctypes.c_int * len(ids))(*ids)
    handle = library.launch_response_llm_model(
        model.model,
        len(ids),
        prompt,
        ctypes.c_int(steps),
        ctypes.c_int(0),
        ctypes.c_bool(False),  # no sampling
        ctypes.c_float(1.0),
        ctypes.c_int(1),
        ctypes.c_float(1.0),
        ctypes.c_float(1.0),
        ctypes.c_bool(True),  # hand out logits
        ctypes.c_int(0),
        None,
    )
    buffer = (ctypes.c_float * vocab)()
    rows, chosen = [], []
    while True:
        token = library.fetch_response_logits_llm_model(model.model, handle, buffer)
        if token < 0:
            break
        chosen.append(int(token))
        rows.append(np.ctypeslib.as_array(buffer).copy())
    return np.stack(rows).astype(np.float32), chosen


def compare(rows: np.ndarray, chosen: list[int], gold: np.ndarray) -> list[dict]:
    """Return relative difference, cosine and both first choices per comparable step."""
    result = []
    for step, (ours, theirs) in enumerate(zip(rows.astype(np.float64), gold, strict=False)):
        theirs = theirs.astype(np.float64)
        scale = np.linalg.norm(theirs)
        result.append(
            {
                "step": step,
                "relative": round(float(np.linalg.norm(ours - theirs) / scale), 5),
                "cosine": round(float(ours @ theirs / (np.linalg.norm(ours) * scale)), 6),
                "top1": [int(theirs.argmax()), chosen[step]],
            }
        )
        if theirs.argmax() != chosen[step]:
            break  # from here on the two read different tokens
    return result


def main() -> None:
    args = _arguments()
    run = RUNS[args.run]
    os.environ["FASTLLM_SKIP_WARMUP"] = "1"
    if not run.rounding:
        os.environ["FASTLLM_DSV41_DISABLE_FAKE_QUANT"] = "1"
    from safetensors import safe_open

    with safe_open(args.golden / f"{run.name}.safetensors", "np") as file:
        ids = file.get_tensor("input_ids")[0].tolist()
        gold = file.get_tensor("greedy_logits")
    rows, chosen = run_engine(args.checkpoint, ids, gold.shape[1], len(gold), args.dtype)
    steps = compare(rows, chosen, gold)
    name = f"ftllm-{run.name}-{args.export}"
    write_golden(
        name,
        {"logits": rows[: len(steps)], "ids": np.array(chosen[: len(steps)], dtype=np.int32)},
        out=args.out,
        package="ftllm",
        command=f"python -m tests.oracles.ftllm_peer --run {run.name} --export {args.export}",
        seed=SEED,
        notes=f"cache rounding {'on' if run.rounding else 'off'}; steps: against nemo-automodel",
        steps=steps,
    )
    print(json.dumps({"name": name, "steps": steps}, indent=1))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads do not end by themselves


if __name__ == "__main__":
    main()
