"""What the engine does per second: concurrency, first token by kind of start, cost by context.

    python bench/engine.py --preset nano [--parts concurrency first context] [--contexts 1024 4096]

Weights are random (hashed) or of `--model FOLDER`; prompts are random ids. One thread.
concurrency  decode tokens/s of 1 to 32 requests on one engine, so with equal settings, and the
             ratio to one; with batch invariance and without
first        time to the first token of a 1,024-token prompt: cold, on a hit with saved windows, on
             a hit that has to replay, and under the bounded approximation
context      prefill tokens/s along a long prompt, and the cost of a decoded token at each length
Speeds come by the wall and by the processor time of this one-threaded process (`cpu_`), which a
busy neighbour disturbs less. A random model spreads its routing and its indexer evenly; a trained
one may read fewer experts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from record import RESULTS, write_result

from finwhale.checkpoint.hashed_weights import fill_hashed
from finwhale.checkpoint.load import load_model
from finwhale.config import preset
from finwhale.engine import Engine, EngineConfig, SamplingParams
from finwhale.model import Backbone, Numerics
from finwhale.ops import FAST

PARTS = ("concurrency", "first", "context")
PROMPT_TOKENS = 64
FIRST_TOKENS, SERVED_BEFORE = 1024, 1000
BEHIND = 1024


def random_model(name: str, positions: int = 0) -> Backbone:
    """Return the preset with hashed weights and an Engram id map that compresses.

    positions  longest context, if the preset's own is shorter; its speed is all that then counts
    """
    config = preset(name)
    c = config.text_config
    if positions > c.max_position_embeddings:
        c = replace(c, max_position_embeddings=positions)
        config = replace(config, text_config=c)
    token_map = torch.arange(c.vocab_size) % c.engram_compressed_vocab_size
    model = Backbone(config, token_map, Numerics(), FAST)
    fill_hashed(model, 0)
    return model.eval()


class Prompts:
    """Random ids that no earlier prompt began with."""

    def __init__(self, model: Backbone):
        self.vocab = model.config.text_config.vocab_size
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, num_tokens: int) -> list[int]:
        shape = (num_tokens,)
        return torch.randint(3, self.vocab - 1, shape, generator=self.generator).tolist()


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, temperature=0)


class Clock(NamedTuple):
    """Seconds by the wall and of this process's work."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Clock:
        return cls(time.perf_counter(), time.process_time())

    def since(self, began: Clock) -> Clock:
        return Clock(self.wall - began.wall, self.cpu - began.cpu)


def median(clocks: Iterable[Clock]) -> Clock:
    return Clock(*(statistics.median(column) for column in zip(*clocks, strict=True)))


def decode_steps(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[Clock]:
    """Return the time of each step in which all requests draw one token, and serve them out."""
    for prompt in prompts:
        engine.add(prompt, greedy(new_tokens))
    steps = []
    while engine.has_work:
        began = Clock.now()
        outputs = engine.step()
        took = Clock.now().since(began)
        drawn = sum(len(output.new) for output in outputs)
        # The first full step read the prompts; it is none of the decoding ones.
        if drawn == len(prompts):
            steps.append(took)
    return steps[1:]


def concurrency(
    model: Backbone, counts: list[int], new_tokens: int, repeats: int, kernels: str
) -> dict:
    """Decode speed by number of requests, medians over interleaved repeats."""
    widest = max(counts)
    settings = EngineConfig(
        num_blocks=2 * widest * (-(-(PROMPT_TOKENS + new_tokens) // 64) + 1),
        max_sequences=widest,
        # All prompts in one step: every later step is pure decoding with all requests.
        max_batch_tokens=widest * PROMPT_TOKENS + widest + 1,
        kernels=kernels,
    )
    engines = {
        "invariant": Engine(model, settings),
        "variant": Engine(model, replace(settings, batch_invariant=False)),
    }
    prompts, found = Prompts(model), {}
    for engine in engines.values():
        decode_steps(engine, [prompts.draw(8), prompts.draw(8)], 3)
    for _ in range(repeats):
        for count in counts:
            for name, engine in engines.items():
                drawn = [prompts.draw(PROMPT_TOKENS) for _ in range(count)]
                steps = decode_steps(engine, drawn, new_tokens)
                # A neighbour on the machine stalls single steps; the median step is ours.
                found.setdefault((name, count), []).append(median(steps))
    rows = []
    for count in counts:
        row: dict[str, float] = {"requests": count}
        for name in engines:
            step, one = median(found[name, count]), median(found[name, 1])
            spread = max(found[name, count]).wall - min(found[name, count]).wall
            row[f"{name}_tps"] = round(count / step.wall, 2)
            row[f"{name}_ratio"] = round(count * one.wall / step.wall, 2)
            row[f"{name}_spread"] = round(spread / step.wall, 3)
            row[f"{name}_cpu_tps"] = round(count / step.cpu, 2)
            row[f"{name}_cpu_ratio"] = round(count * one.cpu / step.cpu, 2)
        rows.append(row)
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "kernels": engines["invariant"].kernels,
        "broken": engines["invariant"].broken,
        "rows": rows,
    }


def first_token(engine: Engine, prompt: list[int]) -> Clock:
    began = Clock.now()
    engine.add(prompt, greedy(1))
    while engine.has_work:
        if any(output.new for output in engine.step()):
            took = Clock.now().since(began)
            while engine.has_work:
                engine.step()
            return took
    raise RuntimeError("no token")


def first(model: Backbone, repeats: int, kernels: str) -> dict:
    """Time to the first token by kind of start."""
    settings = EngineConfig(
        num_blocks=(2 * repeats + 3) * 2 * (FIRST_TOKENS // 64 + 1), kernels=kernels
    )
    kinds = {
        "full": replace(settings, prefill="full"),
        "exact": settings,
        "exact without windows": replace(settings, snapshot_bytes=0),
        "bounded": replace(settings, prefill="bounded"),
    }
    engines = {name: Engine(model, config) for name, config in kinds.items()}
    prompts, found = Prompts(model), {}
    starts = [(name, hit) for name in engines for hit in (False, True)]
    starts = [start for start in starts if start != ("full", True)]
    for number in range(repeats + 1):
        for name, is_hit in starts:
            engine, stats = engines[name], engines[name].scheduler.stats
            prompt = prompts.draw(FIRST_TOKENS)
            if is_hit:
                first_token(engine, prompt[:SERVED_BEFORE])
            before = stats.cached_tokens, stats.replayed_tokens, stats.restored_windows
            took = first_token(engine, prompt)
            after = stats.cached_tokens, stats.replayed_tokens, stats.restored_windows
            reused = tuple(b - a for a, b in zip(before, after, strict=True))
            # The first round compiles and fills the caches of the processor.
            if number:
                found.setdefault((name, is_hit), []).append((took, reused))
    cold = median(took for took, _ in found["exact", False])
    rows = []
    for (name, is_hit), measured in found.items():
        took = median(took for took, _ in measured)
        cached, replayed, restored = measured[-1][1]
        rows.append(
            {
                "prefill": name,
                "start": "hit" if is_hit else "cold",
                "first_token_ms": round(took.wall * 1e3, 1),
                "cpu_ms": round(took.cpu * 1e3, 1),
                "cold_over_this": round(cold.cpu / took.cpu, 2),
                "cached_tokens": cached,
                "replayed_tokens": replayed,
                "restored_windows": restored,
            }
        )
    return {"prompt_tokens": FIRST_TOKENS, "repeats": repeats, "rows": rows}


def speed(begin: tuple[int, Clock], end: tuple[int, Clock]) -> float:
    """Return tokens per second of work between two stamps."""
    return round((end[0] - begin[0]) / end[1].since(begin[1]).cpu, 1)


def context(model: Backbone, contexts: list[int], new_tokens: int, kernels: str) -> dict:
    """Prefill speed along the longest prompt and cost per decoded token at each length."""
    limit = model.config.text_config.max_position_embeddings - max(new_tokens, BEHIND + 1)
    lengths = sorted({min(length, limit) for length in contexts})
    # The decoder reads the last rows of a prompt; behind the longest length it disturbs no rate.
    whole = lengths[-1] + BEHIND
    settings = EngineConfig(
        num_blocks=-(-(whole + new_tokens) // 64) + 4, max_sequences=1, kernels=kernels
    )
    engine = Engine(model, settings)
    decode_steps(engine, [Prompts(model).draw(8)], 3)
    ids = Prompts(model).draw(whole)
    stamps = [(0, Clock.now())]
    engine.add(ids, greedy(1))
    while engine.has_work:
        engine.step()
        rows = min(stamps[-1][0] + settings.max_batch_tokens, whole)
        stamps.append((rows, Clock.now()))
        if rows % 4096 == 0:
            print(
                f"  prefilled {rows:6} in {stamps[-1][1].wall - stamps[0][1].wall:.1f} s",
                flush=True,
            )
    rows = []
    for length in lengths:
        # The prefix is cached, so only the new tokens and their windows are computed.
        steps = decode_steps(engine, [ids[:length]], new_tokens)
        read = [stamp for stamp in stamps if stamp[0] <= length]
        near = [stamp for stamp in read if stamp[0] >= length - 1024]
        rows.append(
            {
                "context_tokens": length,
                "decode_ms": round(median(steps).wall * 1e3, 2),
                "decode_cpu_ms": round(median(steps).cpu * 1e3, 2),
                "prefill_cpu_tps_here": speed(near[0], near[-1]),
                "prefill_cpu_tps_so_far": speed(stamps[0], read[-1]),
            }
        )
        over = rows[-1]["decode_cpu_ms"] / rows[0]["decode_cpu_ms"]
        rows[-1]["over_shortest"] = round(over, 2)
    return {"new_tokens": new_tokens, "kernels": engine.kernels, "rows": rows}


def draw_contexts(rows: list[dict], name: str) -> None:
    """Write a picture of cost against context, if matplotlib is at hand."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    axes.semilogx(
        [r["context_tokens"] for r in rows], [r["decode_cpu_ms"] for r in rows], marker="o"
    )
    axes.set(xlabel="context in tokens", ylabel="ms per decoded token", ylim=(0, None), title=name)
    figure.savefig(RESULTS / f"engine_context_{name}.png", dpi=120)


def print_table(title: str, rows: list[dict]) -> None:
    print(f"\n{title}")
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in rows[0]}
    for row in ({name: name for name in rows[0]}, *rows):
        print("  ".join(f"{row[name]!s:>{width}}" for name, width in widths.items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = (
        random_model(args.preset) if args.model is None else load_model(args.model, ops=FAST).model
    )
    name = args.preset if args.model is None else args.model.name
    measures: dict[str, Callable[[], dict]] = {
        "concurrency": lambda: concurrency(
            model, sorted({1, *args.counts}), args.new_tokens, args.repeats, args.kernels
        ),
        "first": lambda: first(model, args.repeats, args.kernels),
        "context": lambda: context(model, args.contexts, args.new_tokens, args.kernels),
    }
    for part in args.parts:
        result = measures[part]()
        print_table(f"{part}, {name}", result["rows"])
        if part == "context":
            draw_contexts(result["rows"], name)
        file = write_result("engine", {"part": part, "model": name, **result})
        print("written to", file.name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
