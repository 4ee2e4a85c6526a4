"""Thousands of short requests through one small engine, each checked against itself alone.

    python bench/engine_soak.py [--requests 2000] [--preset unit] [--poison] [--corrupt]

Prompts share prefixes, blocks are few, and requests are cancelled, preempted and rolled back at
random. A request's answer alone, from a fresh engine, is kept per case, so a wrong token is found
whoever stood beside it. Fails (exit 1) on a wrong token, on growing memory, on a leaked block or
slot. `--corrupt` overwrites cached rows half way and must fail: the control that the check sees.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from engine import random_model
from record import write_result

from finwhale.engine import Engine, EngineConfig, SamplingParams
from finwhale.model import Backbone

NUM_CASES = 60
# Chance per step; a request lives for about as many steps as it has tokens.
CANCEL, PREEMPT, ROLLBACK = 0.05, 0.15, 0.08
# What an allocator may take later than a quarter of the run, with every array bounded.
GROWTH_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A request that can be asked again: prompt and options decide every token."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(kw_only=True, slots=True)
class Served:
    """A request in flight and what came back of it."""

    case: Case
    tokens: list[int] = field(default_factory=list)
    is_cancelled: bool = False


def draw_cases(rng: random.Random, vocab: int, block_size: int) -> list[Case]:
    """Return cases whose prompts share prefixes of lengths around block ends."""
    stems = [[rng.randrange(3, vocab - 1) for _ in range(8 * block_size)] for _ in range(6)]
    cases = []
    for _ in range(NUM_CASES):
        ends = [0, 1, block_size - 1, block_size, block_size + 1, rng.randrange(8 * block_size)]
        prompt = list(rng.choice(stems)[: rng.choice([*ends, 3 * block_size, 5 * block_size + 3])])
        prompt += [rng.randrange(3, vocab - 1) for _ in range(rng.randrange(1, 20))]
        params = SamplingParams(
            max_new_tokens=rng.randrange(1, 17),
            temperature=rng.choice([0.0, 0.9]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(1 << 30),
            stop_ids=(rng.randrange(vocab),),
        )
        cases.append(Case(prompt=tuple(prompt), params=params))
    return cases


def alone(model: Backbone, config: EngineConfig, case: Case) -> list[int]:
    """Return the tokens of one request on an engine that has served nothing before."""
    results = Engine(model, config).generate([case.prompt], case.params)
    return [result.token for result in results[0][0]]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


class Soak:
    """Drives one engine and remembers what was wrong."""

    def __init__(self, model: Backbone, config: EngineConfig, seed: int):
        self.model, self.config, self.rng = model, config, random.Random(seed)
        text = model.config.text_config
        self.cases = draw_cases(self.rng, text.vocab_size, config.block_size)
        self.expected: dict[Case, list[int]] = {}
        self.engine = Engine(model, config)
        self.live: dict[str, Served] = {}
        self.wrong: list[str] = []
        self.counts = {"finished": 0, "cancelled": 0, "preempt_calls": 0, "rollbacks": 0}
        self.tokens = 0

    def expect(self) -> None:
        """Answer every case alone, before memory is watched."""
        for case in self.cases:
            self.expected[case] = alone(self.model, self.config, case)

    def add(self, name: str) -> None:
        case = self.rng.choice(self.cases)
        self.engine.add(case.prompt, case.params, request_id=name)
        self.live[name] = Served(case=case)

    def disturb(self) -> None:
        """Cancel, preempt or roll back a request now and then."""
        for rate, act in (
            (CANCEL, self._cancel),
            (PREEMPT, self._preempt),
            (ROLLBACK, self._rollback),
        ):
            if self.live and self.rng.random() < rate:
                act(self.rng.choice(list(self.live)))

    def _cancel(self, name: str) -> None:
        self.live[name].is_cancelled = True
        self.engine.cancel(name)

    def _preempt(self, name: str) -> None:
        self.counts["preempt_calls"] += self.engine.preempt(name)

    def _rollback(self, name: str) -> None:
        served = self.live[name]
        if served.tokens and not served.is_cancelled:
            count = self.rng.randrange(1, len(served.tokens) + 1)
            self.engine.rollback(name, count)
            del served.tokens[-count:]
            self.counts["rollbacks"] += 1

    def step(self) -> None:
        for output in self.engine.step():
            served = self.live[output.request_id]
            served.tokens += [result.token for result in output.new]
            self.tokens += len(output.new)
            if output.is_last:
                del self.live[output.request_id]
                self._judge(output.request_id, served, output)

    def _judge(self, name: str, served: Served, output) -> None:
        self.counts["cancelled" if output.finish_reason == "cancelled" else "finished"] += 1
        expected = self.expected[served.case]
        if output.finish_reason == "cancelled":
            expected = expected[: len(served.tokens)]
        if output.error is not None or served.tokens != expected:
            self.wrong.append(
                f"{name}: prompt of {len(served.case.prompt)}, {output.finish_reason}, "
                f"error {output.error}, got {served.tokens}, alone {expected}"
            )

    def leaks(self) -> list[str]:
        """Return what an idle engine still holds; empty is right."""
        engine, found = self.engine, []
        if len(engine.scheduler.free_slots) != self.config.max_sequences:
            found.append(f"slots free: {len(engine.scheduler.free_slots)}")
        if engine.index is not None:
            engine.index.clear()
        engine.allocator.check()
        if engine.allocator.num_free != self.config.num_blocks:
            found.append(f"blocks free: {engine.allocator.num_free} of {self.config.num_blocks}")
        if engine.has_work or self.live:
            found.append(f"requests left: {sorted(self.live)}")
        return found


def run(soak: Soak, num_requests: int, corrupt: bool) -> dict:
    began, added, steps, samples = time.perf_counter(), 0, 0, []
    crowd = 2 * soak.config.max_sequences
    tell = max(1, num_requests // 20)
    while added < num_requests or soak.live:
        while added < num_requests and len(soak.live) < crowd:
            soak.add(f"r{added}")
            added += 1
            if corrupt and added == num_requests // 2:
                for pool in soak.engine.pools.main.values():
                    pool.random_(0, 120)
            if added % tell == 0:
                samples.append(resident_bytes())
                print(
                    f"{added:6} requests  {steps:7} steps  {soak.tokens:8} tokens  "
                    f"{samples[-1] / 2**20:8.1f} MiB  {soak.engine.scheduler.stats.preemptions:5} "
                    f"preempted  {len(soak.wrong)} wrong  {time.perf_counter() - began:6.0f} s",
                    flush=True,
                )
        soak.disturb()
        soak.step()
        steps += 1
    quarter = len(samples) // 4
    growth = max(samples[-quarter:]) - max(samples[quarter : 2 * quarter]) if quarter else 0
    stats = soak.engine.scheduler.stats
    return {
        "requests": num_requests,
        "cases": len(soak.cases),
        **soak.counts,
        "steps": steps,
        "tokens": soak.tokens,
        "preemptions": stats.preemptions,
        "cached_tokens": stats.cached_tokens,
        "replayed_tokens": stats.replayed_tokens,
        "restored_windows": stats.restored_windows,
        "wrong": len(soak.wrong),
        "leaks": soak.leaks(),
        "resident_mib": [round(s / 2**20, 1) for s in samples],
        "growth_bytes": growth,
        "seconds": round(time.perf_counter() - began, 1),
        "kernels": soak.engine.kernels,
        "is_corrupted": corrupt,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="unit")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--snapshot-bytes", type=int, default=1 << 18)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--poison", action="store_true")
    parser.add_argument("--corrupt", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = EngineConfig(
        block_size=args.block_size,
        num_blocks=args.blocks,
        max_sequences=args.sequences,
        max_batch_tokens=6 * args.sequences,
        snapshot_bytes=args.snapshot_bytes,
        kernels=args.kernels,
        poison=args.poison,
    )
    soak = Soak(random_model(args.preset), config, args.seed)
    began = time.perf_counter()
    soak.expect()
    print(
        f"{len(soak.cases)} cases answered alone in {time.perf_counter() - began:.0f} s", flush=True
    )
    result = {"preset": args.preset, **run(soak, args.requests, args.corrupt)}
    for line in soak.wrong[:5]:
        print(line)
    for name, value in result.items():
        print(f"{name:18} {value}")
    if not args.corrupt:
        print("written to", write_result("engine_soak", result))
    is_flat = result["growth_bytes"] <= GROWTH_BYTES
    return 0 if not soak.wrong and not result["leaks"] and is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
