"""Decode steps of transformers' DeepSeek-V4 on a GPU, batch by batch; `gpu_mini.py` runs it.

    python bench/peers/hf_v4_gpu.py TEXT_JSON BATCHES PROMPT_TOKENS STEPS DEVICE
Prints one JSON object per batch as it is done. V4, not V4.1, of the same widths and depth with
random weights (`hf_v4_decode.py`): what a plain torch decode of such a model takes, nothing about
its text. bf16 where that runs, else fp32, and the line says which.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from hf_v4_decode import build

RUNS = 3


def timed(model, batch: int, prompt: int, steps: int, device: str) -> list[float]:
    """Return the seconds per step of three runs behind a prefill, after one that does not count."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    vocab = model.config.vocab_size
    tokens = torch.randint(0, vocab, (batch, prompt), device=device)
    out = model(tokens, use_cache=True, logits_to_keep=1)
    cache, times = out.past_key_values, []
    for run in range(RUNS + 1):
        wait()
        began = time.perf_counter()
        for _ in range(steps):
            tokens = out.logits[:, -1:].argmax(-1)
            out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        wait()
        if run:
            times.append((time.perf_counter() - began) / steps)
    return times


def main() -> None:
    text = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    batches, prompt, steps, device = json.loads(sys.argv[2]), *map(int, sys.argv[3:5]), sys.argv[5]
    model, dtype = build(text).to(device), "fp32"
    with torch.no_grad():
        try:
            half = build(text).to(device, torch.bfloat16)
            timed(half, 1, 9, 1, device)
            model, dtype = half, "bf16"
        except RuntimeError as error:
            print(f"bf16: {error}"[:300], file=sys.stderr)
        for batch in batches:
            times = timed(model, batch, prompt, steps, device)
            found = {
                "batch": batch, "dtype": dtype, "prompt_tokens": prompt,
                "step_us": round(statistics.median(times) * 1e6, 1),
                "runs_us": [round(x * 1e6, 1) for x in times],
                "tokens_per_s": round(batch / statistics.median(times), 1),
                "transformers": importlib.metadata.version("transformers"),
            }  # fmt: skip
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
