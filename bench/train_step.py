"""Training throughput at a preset's shape: tokens/s, share of peak, memory, time by operation.

    python bench/train_step.py --preset mini --rows 16 --tokens 2048
On a GPU, nemo-automodel's V4.1 of the same config and batch joins if it can be imported (--peer).
Rows are random tokens, one document each. The floor is the model's arithmetic, three times the
forward products at half the row as context, at the matrix rate measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from record import write_result

from finwhale.config import preset
from finwhale.config.accounting import flops_per_token
from finwhale.config.presets import with_compressed_vocab
from finwhale.config.run import RunConfig, with_overrides
from finwhale.data.packing import PackedRows
from finwhale.train.loop import _repeatable, build_model, build_optimizers
from finwhale.train.loss import Batch
from finwhale.train.step import TrainStep


def matrix_rate_tflops(device: str) -> float:
    """Return TFLOP/s of a large product of random matrices: bf16 on a GPU, fp32 on a CPU."""
    size = 8192 if device == "cuda" else 1024
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(8):
        synchronize(device)
        began = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(times[3:]) / 1e12


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def random_rows(vocab: int, rows: int, tokens: int, seed: int = 0) -> PackedRows:
    """Return rows of random ids, one document each: what the peer gets."""
    drawn = np.random.default_rng(seed)
    inputs = drawn.integers(3, vocab - 1, (rows, tokens)).astype(np.int32)
    lengths = [(tokens,)] * rows
    targets = np.roll(inputs, -1, axis=1)
    return PackedRows(inputs=inputs, targets=targets, lengths=tuple(lengths))


def by_operation(step, batch: Batch) -> dict[str, float]:
    """Return milliseconds of the dozen most expensive kernels of one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step(batch)
        torch.cuda.synchronize()
    table = [(e.key, e.self_device_time_total / 1e3, e.count) for e in profiler.key_averages()]
    table = sorted((t for t in table if t[1] > 0), key=lambda t: -t[1])[:40]
    return {f"{name[:70]} x{count}": round(ms, 3) for name, ms, count in table}


def measure(run: RunConfig, steps: int, profile: bool) -> dict:
    device = run.device
    vocab = run.model.text_config.vocab_size
    rate = matrix_rate_tflops(device)
    with _repeatable(run):
        began = time.perf_counter()
        model = build_model(run, run.model, torch.arange(vocab))
        training = TrainStep(run, model, build_optimizers(run, model))
        number = 0

        def one(batch: Batch) -> float:
            nonlocal number
            measured = training.gradients(batch, number)
            training.update(1e-4)
            number += 1
            return measured.loss

        rows, tokens = run.batch_rows, run.sequence_length
        drawn = [random_rows(vocab, rows, tokens, seed) for seed in range(4)]
        batches = [Batch.of(packed, np.arange(rows)) for packed in drawn]
        losses, took = [one(batches[0]), one(batches[1]), one(batches[2])], []
        synchronize(device)
        ready_s = time.perf_counter() - began
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for n in range(steps):
            began = time.perf_counter()
            losses.append(one(batches[n % 4]))
            synchronize(device)
            took.append(time.perf_counter() - began)
        kernels = by_operation(one, batches[0]) if profile and device == "cuda" else {}
    tokens = run.batch_rows * run.sequence_length
    step_s = statistics.median(took)
    context = run.sequence_length // 2
    flops = 3 * tokens * flops_per_token(run.model, "decode")(context).raw
    return {
        "tokens_per_s": round(tokens / step_s),
        "step_ms": round(step_s * 1e3, 2),
        "spread_ms": round((max(took) - min(took)) * 1e3, 2),
        "ready_s": round(ready_s, 1),
        "matrix_tflops": round(rate, 3),
        "floor_ms": round(flops / rate / 1e9, 3),
        "share_of_floor": round(flops / rate / 1e12 / step_s, 4),
        # Reserved, not allocated: the pools of captured graphs count as free in the latter.
        "memory_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "kernels_ms": kernels,
    }


def peer(run: RunConfig, steps: int) -> dict:
    text = run.model.to_json()["text_config"]
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "text.json"
        config.write_text(json.dumps(text), encoding="utf-8")
        script = Path(__file__).parent / "peers" / "nemo_train.py"
        sizes = [str(x) for x in (run.batch_rows, run.sequence_length, steps)]
        command = [sys.executable, "-W", "ignore", str(script), str(config), *sizes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--set", nargs="*", default=[])
    args = parser.parse_args()
    config = preset(args.preset)
    config = with_compressed_vocab(config, config.text_config.vocab_size)
    run = RunConfig(
        model=config,
        device=args.device,
        precision="bf16" if args.device == "cuda" else "fp32",
        batch_rows=args.rows,
        micro_batch_rows=args.rows,
        sequence_length=args.tokens,
    )
    run = with_overrides(run, args.set)
    result = {"preset": args.preset, "rows": args.rows, "tokens": args.tokens, "set": args.set}
    result |= measure(run, args.steps, args.profile)
    if args.peer:
        torch.cuda.empty_cache()
        result["nemo"] = found = peer(run, args.steps)
        if "step_s" in found:
            found["tokens_per_s"] = round(run.batch_rows * run.sequence_length / found["step_s"])
            result["times_nemo"] = round(result["tokens_per_s"] / found["tokens_per_s"], 2)
    for name, value in result.items():
        if name == "kernels_ms":
            for kernel, ms in value.items():
                print(f"  {ms:9.3f} ms  {kernel}")
        else:
            print(f"{name:16} {value}")
    print("written to", write_result("train_step", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
