"""Tokens per second of generation with state and without, beside ftllm and the memory floor.

    python bench/decode.py [--model DIR] [--prompt-tokens 256] [--new-tokens 32]
Without --model a random `mini` is written (BF16 files, which both engines read). One thread. ftllm
joins if ORACLE_FTLLM_VENV names its environment (see tests/oracles/regenerate.sh).

The floor is the time to read the activated fp32 weights once, at the copy bandwidth measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from record import copy_bandwidth_gbps, write_result

from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.tiny import write_tiny
from finwhale.config import preset
from finwhale.config.accounting import account
from finwhale.engine.generate import GenerationStats, generate, generate_uncached
from finwhale.ops import FAST


def measure(folder: Path, prompt_tokens: int, new_tokens: int) -> dict:
    loaded = load_model(folder, ops=FAST)
    model, vocab = loaded.model, loaded.config.text_config.vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab - 1, (prompt_tokens,), generator=generator).tolist()
    list(generate(model, ids[:8], max_new_tokens=2))
    stats = GenerationStats()
    cached = list(generate(model, ids, max_new_tokens=new_tokens, stats=stats))
    start = time.perf_counter()
    uncached = list(generate_uncached(model, ids, max_new_tokens=new_tokens))
    uncached_s = time.perf_counter() - start
    bandwidth = copy_bandwidth_gbps()
    active = sum(account(loaded.config).activated_decode.values())
    floor_tps = bandwidth * 1e9 / (4 * active)
    result = {
        "model": str(folder.name),
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(cached),
        "same_tokens": cached == uncached,
        "prefill_tps": round(prompt_tokens / stats.prefill_s, 1),
        "decode_tps": round(stats.decode_tps, 2),
        "uncached_tps": round(new_tokens / uncached_s, 3),
        "speedup": round(stats.decode_tps * uncached_s / new_tokens, 1),
        "copy_gbps": round(bandwidth, 2),
        "floor_tps": round(floor_tps, 1),
        "share_of_floor": round(stats.decode_tps / floor_tps, 4),
    }
    venv = os.environ.get("ORACLE_FTLLM_VENV")
    if venv:
        peer = Path(__file__).parent / "peers" / "ftllm_decode.py"
        command = [f"{venv}/bin/python", str(peer), str(folder), json.dumps(ids), str(new_tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        seconds = json.loads(done.stdout.strip().splitlines()[-1])
        result["ftllm_prefill_tps"] = round(prompt_tokens / seconds["prefill_s"], 1)
        result["ftllm_decode_tps"] = round(seconds["decoded"] / seconds["decode_s"], 2)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model
        if folder is None:
            folder = Path(scratch) / "mini"
            write_tiny(preset("mini"), folder, quantized=False, prompt_tokens=4)
            (folder / "expected.safetensors").unlink()  # some loaders read every such file
        result = measure(folder, args.prompt_tokens, args.new_tokens)
    for name, value in result.items():
        print(f"{name:20} {value}")
    print("written to", write_result("decode", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
