"""Decode and prefill of the engine beside the other engines that run on this CPU, and the floor.

    python bench/engine_peers.py [--prompts 256 1024] [--new-tokens 32] [--floors FILE]

One checkpoint (`mini`, random, BF16 files) is loaded by finwhale.Engine, ftllm and nemo-automodel;
transformers has DeepSeek-V4 only, so it gets a random model of the same widths. One thread each,
one after the other, rounds interleaved. Environments: ORACLE_FTLLM_VENV, ORACLE_NEMO_VENV,
ORACLE_HF_VENV (folders that hold bin/python); a peer without one is listed as missing. `_cpu` is
by the process's own time instead of the wall's, which a busy neighbour disturbs less; threads that
spin count in it.

The floor is the larger of bytes at the copy bandwidth and FLOPs at the matrix rate, both measured
here: weights in fp32 as the engine computes, cache rows as it stores them. `--floors` names a
file with functions `floors(c, n, ...)` and `prefill(c, n)` that give bytes and FLOPs; without it
the floor is the activated weights and the FLOPs that `finwhale.config.accounting` counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from engine import Clock, greedy, print_table
from record import copy_bandwidth_gbps, write_result

from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.tiny import write_tiny
from finwhale.config import ModelConfig, build_layer_specs, preset
from finwhale.config.accounting import account, flops_per_token
from finwhale.engine import Engine, EngineConfig
from finwhale.model import Backbone
from finwhale.ops import FAST

# Name, variable of its environment, script, package whose version is told, most tokens drawn.
PEERS = (
    ("ftllm", "ORACLE_FTLLM_VENV", "ftllm_decode.py", "ftllm", None),
    ("nemo-automodel, no cache", "ORACLE_NEMO_VENV", "nemo_decode.py", "nemo-automodel", 2),
    ("transformers V4, its own model", "ORACLE_HF_VENV", "hf_v4_decode.py", "transformers", None),
)
FP32_BYTES = 4


def matrix_gflops() -> float:
    """Return GFLOP/s of an fp32 product of two 1,024 squared matrices, best of ten."""
    a, b, best = torch.randn(1024, 1024), torch.randn(1024, 1024), float("inf")
    for _ in range(10):
        began = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - began)
    return 2 * 1024**3 / best / 1e9


class Ours:
    """Two engines on one model: each has settings under which a prompt is read in one way."""

    def __init__(self, model: Backbone, longest: int, new_tokens: int, settings: dict):
        blocks = -(-(longest + new_tokens) // 64) + 1
        config = EngineConfig(
            num_blocks=blocks, max_sequences=1, prefix_cache=False, snapshot_bytes=0, **settings
        )
        self.engine = Engine(model, config)

    def measure(self, ids: list[int], new_tokens: int) -> dict:
        began, stamps, tokens = Clock.now(), [], []
        self.engine.add(ids, greedy(new_tokens + 1))
        while self.engine.has_work:
            for output in self.engine.step():
                tokens += [result.token for result in output.new]
                stamps += [Clock.now().since(began)] * len(output.new)
        decode = stamps[-1].since(stamps[0])
        return {
            "prefill_s": stamps[0].wall,
            "prefill_cpu_s": stamps[0].cpu,
            "decode_s": decode.wall,
            "decode_cpu_s": decode.cpu,
            "decoded": len(stamps) - 1,
            "tokens": tokens,
        }


def run_peer(python: str, script: str, first: Path, ids: list[int], new_tokens: int) -> dict:
    """Return the seconds that a peer's script prints, or {"error": its last line}."""
    path = Path(__file__).parent / "peers" / script
    command = [python, "-W", "ignore", str(path), str(first), json.dumps(ids), str(new_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        return {"error": (done.stderr or done.stdout).strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def version_of(python: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def floor_shape(config: ModelConfig) -> dict:
    """Return a config in the short names of the floor file."""
    t = config.text_config
    specs = build_layer_specs(t)
    return {
        "d": t.hidden_size,
        "L": t.num_hidden_layers,
        "enc": t.candidate_source_layer_id,
        "H": t.num_attention_heads,
        "hd": t.head_dim,
        "q": t.q_lora_rank,
        "og": t.o_groups,
        "ol": t.o_lora_rank,
        "E": t.n_routed_experts,
        "k": t.num_experts_per_tok,
        "ff": t.moe_intermediate_size,
        "V": t.vocab_size,
        "hc": t.hc_mult,
        "win": t.sliding_window,
        "topk": t.index_topk,
        "ih": t.index_n_heads,
        "ihd": t.index_head_dim,
        "kv": {spec.layer_id: spec.ratio for spec in specs if spec.owns_kv},
        "idx": list(t.index_source_layer_ids),
        "cand": t.candidate_source_layer_id,
        "pool": t.candidate_topk_blocks * t.candidate_block_size,
        "ratio0": 2,
        "eng": len(t.engram_layer_ids),
        "erows": (t.engram_max_ngram_size - 1) * t.engram_n_heads,
        "ed": t.engram_head_dim,
        "vit": None,
    }


def floor_tps(
    config: ModelConfig, num_tokens: int, bandwidth: float, rate: float, file: Path | None
) -> tuple[float, float, dict]:
    """Return tokens/s of decode behind `num_tokens` and of their prefill that nothing can beat.

    bandwidth  GB/s
    rate       GFLOP/s
    """
    told = {"copy_gbps": round(bandwidth, 2), "matrix_gflops": round(rate, 1)}
    if file is None:
        num_bytes = FP32_BYTES * sum(account(config).activated_decode.values())
        flops = flops_per_token(config, "decode")(num_tokens).raw
        prefill_flops = flops_per_token(config, "prefill")(num_tokens // 2).raw
        decode_s = max(num_bytes / bandwidth, flops / rate) / 1e9
        return 1 / decode_s, rate * 1e9 / prefill_flops, {**told, "floor": "accounting"}
    found = importlib.util.spec_from_file_location("floors", file)
    if found is None or found.loader is None:
        raise ValueError(f"--floors: got {file}, expected a Python file")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    shape = floor_shape(config)
    parts = module.floors(shape, num_tokens, 1, dense=FP32_BYTES, routed=FP32_BYTES)
    decode_s = sum(max(b / bandwidth, f / rate) for b, f in parts.values()) / 1e9
    prefill_flops = sum(module.prefill(shape, num_tokens))
    return 1 / decode_s, rate * 1e9 / prefill_flops, {**told, "floor": file.name}


def measure(folder: Path, num_tokens: int, new_tokens: int, repeats: int, floors) -> dict:
    """Return all rows for prompts of one length."""
    loaded = load_model(folder, ops=FAST)
    config = loaded.config
    vocab = config.text_config.vocab_size
    ids = torch.randint(3, vocab - 1, (num_tokens,), generator=torch.Generator().manual_seed(1))
    prompt = ids.tolist()
    text = folder.parent / "text.json"
    text.write_text(json.dumps(config.to_json()["text_config"]), encoding="utf-8")
    ours = {
        "finwhale": {},
        "finwhale, not batch invariant": {"batch_invariant": False},
        "finwhale, prompt in one step": {"max_batch_tokens": max(num_tokens, 2)},
        "finwhale, bounded prefill": {"prefill": "bounded"},
    }
    engines = {
        name: Ours(loaded.model, num_tokens, new_tokens, settings)
        for name, settings in ours.items()
    }
    for engine in engines.values():
        engine.measure(prompt[:16], 2)
    found: dict[str, list[dict]] = {}
    versions: dict[str, str] = {}
    bandwidth = rate = 0.0
    for _ in range(repeats):
        bandwidth = max(bandwidth, copy_bandwidth_gbps())
        rate = max(rate, matrix_gflops())
        for name, engine in engines.items():
            found.setdefault(name, []).append(engine.measure(prompt, new_tokens))
        for name, variable, script, package, most in PEERS:
            venv = os.environ.get(variable)
            if not venv or not Path(venv, "bin", "python").exists():
                found[name] = [{"error": f"missing: {variable} names no environment"}]
                continue
            python = f"{venv}/bin/python"
            versions[name] = version_of(python, package)
            first = text if script.startswith("hf") else folder
            drawn = new_tokens if most is None else min(most, new_tokens)
            found.setdefault(name, []).append(run_peer(python, script, first, prompt, drawn))
    decode_floor, prefill_floor, rates = floor_tps(config, num_tokens, bandwidth, rate, floors)
    rows = [as_row(name, versions.get(name), own, num_tokens) for name, own in found.items()]
    for row in rows:
        for kind, floor in (("decode", decode_floor), ("prefill", prefill_floor)):
            speed = row[f"{kind}_tps"]
            row[f"{kind}_of_floor"] = None if speed is None else round(speed / floor, 4)
    told = {name: own[0].get("tokens") for name, own in found.items()}
    for row, own in zip(rows, told.values(), strict=True):
        first = told["finwhale"][: len(own or ())]
        row["same_tokens"] = None if own is None else own == first
    return {
        "prompt_tokens": num_tokens,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "floor_decode_tps": round(decode_floor, 1),
        "floor_prefill_tps": round(prefill_floor, 1),
        **rates,
        "kernels": next(iter(engines.values())).engine.kernels,
        "rows": rows,
    }


def as_row(name: str, version: str | None, measured: list[dict], num_tokens: int) -> dict:
    """Return medians and bests of the rounds of one engine, or its first error."""
    row: dict = {"engine": name, "version": version}
    errors = [own["error"] for own in measured if "error" in own]
    for kind in ("prefill", "decode"):
        tokens = [num_tokens if kind == "prefill" else own.get("decoded") for own in measured]
        for clock in ("", "_cpu"):
            speeds = []
            if not errors:
                seconds = [own[f"{kind}{clock}_s"] for own in measured]
                speeds = [n / took for n, took in zip(tokens, seconds, strict=True)]
            row[f"{kind}{clock}_tps"] = round(statistics.median(speeds), 2) if speeds else None
            row[f"{kind}{clock}_best"] = round(max(speeds), 2) if speeds else None
    row["decoded"] = measured[0].get("decoded")
    row["error"] = errors[0] if errors else ""
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--floors", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "mini"
        write_tiny(preset("mini"), folder, quantized=False, prompt_tokens=4)
        (folder / "expected.safetensors").unlink()  # some loaders read every such file
        for num_tokens in args.prompts:
            result = measure(folder, num_tokens, args.new_tokens, args.repeats, args.floors)
            rows = result["rows"]
            print_table(f"prompt of {num_tokens}, mini, one thread", rows)
            print({name: value for name, value in result.items() if name != "rows"})
            print("written to", write_result("engine_peers", result).name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
