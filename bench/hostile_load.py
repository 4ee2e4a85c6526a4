"""Thousands of hostile bodies at `finwhale serve`, mixed with honest requests that are checked.

    python bench/hostile_load.py [--tree DIR] [--bodies 5000] [--parts gap load] [--seed 0]

Part `load`: all kinds of hostile_kinds.py and hostile_connections.py in a random order. Part
`gap`: large bodies one at a time beside a stream of honest requests, and before it the honest
requests alone, as control; the longest time that the event loop, another thread and a small
request waited. --tree runs another checkout's server with the same bodies. The server's clocks
are those of watched_server.py. Exit status 1 after a fault: a status of 500 to 599 other than 503
and 504, a status that the kind does not have, a connection broken without an answer or left open
for ever, an honest answer that differs from the one before the attack, a sequence still running
at the end, a connection to a place that a schema names, a traceback in the log, an ended server.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hostile_bodies as bodies
import hostile_kinds
from hostile_connections import (
    ALONE,
    ANSWERED,
    BEHAVIOURS,
    BROKEN,
    HONEST,
    LEFT,
    LEFT_OPEN,
    NOT_ANSWERED,
    Behaviour,
    exchange,
    said,
)
from hostile_gaps import run_gap, show_gap
from hostile_server import WatchedServer

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 180.0
OPEN_PATIENCE_S = 75.0


@dataclass
class Tally:
    """Outcomes by kind, honest answers, and the faults in words with counts."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    slowest_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    faults: Counter[str] = field(default_factory=Counter)
    honest: Counter[str] = field(default_factory=Counter)
    honest_s: list[float] = field(default_factory=list)
    running: Counter[str] = field(default_factory=Counter)
    num_bodies: int = 0

    def add(self, name: str, outcome: str, seconds: float) -> None:
        self.num_bodies += 1
        self.outcomes[name][outcome] += 1
        self.slowest_s[name] = max(self.slowest_s[name], seconds)


class Attack:
    """One server, and everything that is sent to it."""

    def __init__(self, start: Callable[[], WatchedServer], seed: int, log_bytes: int) -> None:
        self.start, self.draw, self.tally = start, random.Random(seed), Tally()
        self.server = start()
        self.deaths: list[dict[str, Any]] = []
        self.log_bytes = log_bytes
        self.expected: list[str] = []
        self.up = asyncio.Event()
        self.up.set()
        self.floods = 0
        self.flood_ended_s = 0.0
        self.is_over = False

    # --- honest requests

    async def honest(self, number: int) -> tuple[str, str]:
        path, body = HONEST[number]
        word, answer = await exchange(self.server.port, bodies.post(path, body), PATIENCE_S)
        if word == ANSWERED and answer is not None and answer.status == 200:
            return "200", said(answer.content)
        return (str(answer.status) if answer and answer.status else word), ""

    async def learn(self) -> None:
        """Take the answers before the attack, twice: they have to be equal."""
        for number in range(len(HONEST)):
            first, again = await self.honest(number), await self.honest(number)
            if first != again or first[0] != "200" or not first[1]:
                raise RuntimeError(f"honest request {number}: got {first} and then {again}")
            self.expected.append(first[1])

    async def ask_honestly(self, first: int) -> None:
        """Ask until the attack is over, one request after the other."""
        number = first
        while not self.is_over:
            await self.up.wait()
            deaths, began_s = len(self.deaths), time.monotonic()
            word, text = await self.honest(number)
            took_s = time.monotonic() - began_s
            in_flood = self.floods or self.flood_ended_s > began_s - 5
            if word == "200":
                is_same = text == self.expected[number]
                self.tally.honest["same" if is_same else "different"] += 1
                self.tally.honest_s.append(took_s)
                if not is_same:
                    self.tally.faults[f"honest request {number}: another answer"] += 1
            elif not self.server.is_alive or len(self.deaths) > deaths:
                self.tally.honest["server ended"] += 1
            elif word in ("429", "503", "504") or in_flood:
                self.tally.honest[f"turned away, {word}{' in a flood' * bool(in_flood)}"] += 1
            else:
                self.tally.honest[word] += 1
                self.tally.faults[f"honest request {number}: {word}"] += 1
            number = (number + 1) % len(HONEST)
            await asyncio.sleep(0.3)

    # --- hostile ones

    async def body(self, kind: hostile_kinds.Kind, number: int) -> None:
        await self.up.wait()
        request = kind.make(self.draw, number)
        deaths, began_s = len(self.deaths), time.monotonic()
        self.tally.running[kind.name] += 1
        word, answer = await exchange(self.server.port, request, kind.patience_s or PATIENCE_S)
        self.tally.running[kind.name] -= 1
        outcome, fault = word, None
        status = answer.status if answer else None
        in_flood = self.floods or self.flood_ended_s > began_s - 5
        if status is not None and word in (ANSWERED, NOT_ANSWERED):
            outcome = f"{status}" if word == ANSWERED else f"{status}, {LEFT}"
            is_right = status < 500 or status in (503, 504)
            if kind.expected is not None and status not in (503, 504):
                is_right = status in kind.expected
            if not is_right or (word == NOT_ANSWERED and kind.patience_s is None):
                fault = outcome
        elif not self.server.is_alive or len(self.deaths) > deaths:
            outcome = "server ended"
        elif word == NOT_ANSWERED:
            outcome = LEFT if kind.patience_s else NOT_ANSWERED
            fault = None if kind.patience_s else NOT_ANSWERED
        elif not (kind.may_close or in_flood):
            fault = word
        if fault:
            self.tally.faults[f"{kind.name}: {fault}"] += 1
        self.tally.add(kind.name, outcome, time.monotonic() - began_s)

    async def behave(self, behaviour: Behaviour) -> None:
        await self.up.wait()
        deaths, began_s = len(self.deaths), time.monotonic()
        is_flood = behaviour.name.startswith("flood")
        self.floods += is_flood
        self.tally.running[behaviour.name] += 1
        try:
            outcome = await behaviour.run(self.server.port, self.draw, OPEN_PATIENCE_S)
        except OSError as error:
            outcome = f"{BROKEN}, {type(error).__name__}"
        finally:
            self.floods -= is_flood
            self.tally.running[behaviour.name] -= 1
        if is_flood:
            self.flood_ended_s = time.monotonic()
        if not self.server.is_alive or len(self.deaths) > deaths:
            outcome = "server ended"
        elif outcome.endswith(LEFT_OPEN) and behaviour.has_to_close:
            self.tally.faults[f"{behaviour.name}: {outcome} after {OPEN_PATIENCE_S:g} s"] += 1
        self.tally.add(behaviour.name, outcome, time.monotonic() - began_s)

    async def guard(self) -> None:
        """Start another server when this one ends, and note what was being sent."""
        while not self.is_over:
            await asyncio.sleep(0.2)
            if self.server.log.exists() and self.server.log.stat().st_size > self.log_bytes:
                self.tally.faults[f"log over {self.log_bytes} bytes"] += 1
                self.server.process.kill()
            if not self.server.is_alive:
                await self.restart()

    async def restart(self) -> None:
        self.up.clear()
        running = {name: count for name, count in self.tally.running.items() if count}
        returned = self.server.process.wait()
        figures = {**self.server.memory(), "log": self.server.log_figures()}
        self.deaths.append({"returned": returned, "while": running, **figures})
        self.tally.faults["server ended"] += 1
        print(f"server ended with {returned} while it got {running}", flush=True)
        self.server.close()
        self.server = await asyncio.to_thread(self.start)
        self.up.set()

    async def run(self, num_bodies: int, closed_port: int, num_alone: int) -> None:
        await self.learn()
        plan = planned(hostile_kinds.kinds(closed_port), num_bodies - num_alone, self.draw)
        self.draw.shuffle(plan)
        small, large, slow = asyncio.Semaphore(8), asyncio.Semaphore(2), asyncio.Semaphore(40)
        waiting = asyncio.Semaphore(64)

        async def one(kind: hostile_kinds.Kind | Behaviour, number: int) -> None:
            is_body = isinstance(kind, hostile_kinds.Kind)
            is_slow = not is_body and kind.name != "leaver"
            room = slow if is_slow else large if is_body and kind.is_large else small
            async with room:
                await (self.body(kind, number) if is_body else self.behave(kind))
            waiting.release()

        honest = [asyncio.create_task(self.ask_honestly(first)) for first in (0, 5)]
        guard = asyncio.create_task(self.guard())
        sent, told_s = [], time.monotonic()
        for kind, number in plan:
            # Few wait for room at a time, so that all kinds stay mixed.
            await waiting.acquire()
            sent.append(asyncio.create_task(one(kind, number)))
            if time.monotonic() > told_s + 30:
                told_s = time.monotonic()
                print(
                    f"{self.tally.num_bodies} bodies, {self.server.rss[-1][1] >> 20} MiB",
                    flush=True,
                )
        await asyncio.gather(*sent)
        self.is_over = True
        await asyncio.gather(*honest)
        await self.settle("after the mixed bodies")
        for _ in range(num_alone):
            await self.behave(ALONE)
            await asyncio.sleep(0.05)
        await self.settle("after the leavers")
        for number, expected in enumerate(self.expected):
            if await self.honest(number) != ("200", expected):
                self.tally.faults[f"honest request {number}: another answer at the end"] += 1
        guard.cancel()

    async def settle(self, when: str) -> None:
        """Wait until nothing runs; what still runs after a minute is a fault."""
        value = float("nan")
        for _ in range(60):
            value = await asyncio.to_thread(self.server.figure, "finwhale_requests_in_flight")
            if value == 0:
                return
            await asyncio.sleep(1)
        self.tally.faults[f"in flight {when}: {value:g}"] += 1


def planned(
    kinds: tuple[hostile_kinds.Kind, ...], num_bodies: int, draw: random.Random
) -> list[tuple[hostile_kinds.Kind | Behaviour, int]]:
    """Return each kind by its share of `num_bodies`, at least one of each, and numbers."""
    every: list[hostile_kinds.Kind | Behaviour] = [*kinds, *BEHAVIOURS]
    total = sum(kind.share for kind in every)
    counts = [max(1, round(kind.share * num_bodies / total)) for kind in every]
    counts[0] = max(1, counts[0] + num_bodies - sum(counts))
    # A short run begins anywhere in the cases of a kind.
    firsts = [draw.randrange(kind.share) for kind in every]
    return [
        (kind, first + n)
        for kind, count, first in zip(every, counts, firsts, strict=True)
        for n in range(count)
    ]


def canary() -> tuple[socket.socket, int]:
    """Return a listening socket that nobody should ever connect to, and its port."""
    made = socket.create_server(("127.0.0.1", 0))
    made.setblocking(False)
    return made, made.getsockname()[1]


def run_load(args: argparse.Namespace, start: Callable[[], WatchedServer]) -> dict[str, Any]:
    began_s = time.monotonic()
    listener, port = canary()

    async def attack() -> Attack:
        made = Attack(start, args.seed, args.log_mb << 20)
        try:
            await made.run(args.bodies, port, min(200, args.bodies // 10))
        except BaseException:
            made.server.close()
            raise
        return made

    made = asyncio.run(attack())
    tally, server = made.tally, made.server
    try:
        listener.accept()
        tally.faults["a connection to the address in a schema"] += 1
    except BlockingIOError:
        pass
    log = server.log_figures()
    for words, count in log["tracebacks"].items():
        tally.faults[f"traceback in the log: {words}"] += count
    time.sleep(0.5)
    whole = [(began_s, time.monotonic())]
    gaps = {name: server.lateness(name, whole) for name in ("loop", "thread")}
    memory = server.memory()
    returned = server.close()
    if returned not in (0, -signal.SIGTERM):
        tally.faults[f"exit status {returned} after SIGTERM"] += 1
    honest_s = sorted(tally.honest_s)
    return {
        "bodies": tally.num_bodies,
        "seconds": round(time.monotonic() - began_s),
        "by_kind": {
            name: {"slowest_s": round(tally.slowest_s[name], 1), **dict(counts.most_common())}
            for name, counts in sorted(tally.outcomes.items())
        },
        "honest": dict(tally.honest),
        "honest_median_s": round(honest_s[len(honest_s) // 2], 2) if honest_s else None,
        "honest_slowest_s": round(honest_s[-1], 2) if honest_s else None,
        "memory": memory,
        "gaps": gaps,
        "log": log,
        "deaths": made.deaths,
        "faults": dict(tally.faults.most_common()),
    }


def show_load(result: dict[str, Any]) -> None:
    print(f"\n{result['bodies']} bodies in {result['seconds']} s")
    for name, counts in result["by_kind"].items():
        told = dict(counts)
        slowest_s = told.pop("slowest_s")
        words = ", ".join(f"{count} x {outcome}" for outcome, count in told.items())
        print(f"  {name:28} slowest {slowest_s:6.1f} s   {words}")
    for name in ("honest", "honest_median_s", "honest_slowest_s", "memory", "gaps", "log"):
        print(f"{name}: {result[name]}")
    for death in result["deaths"]:
        print(f"server ended: {death}")
    for fault, count in result["faults"].items():
        print(f"FAULT {count} x {fault}")
    print(f"{len(result['faults'])} kinds of fault")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose server runs")
    parser.add_argument("--model", type=Path, help="by default the one that the tree ships")
    parser.add_argument("--parts", nargs="+", choices=("gap", "load"), default=["gap", "load"])
    parser.add_argument("--bodies", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8], help="MB, part gap")
    parser.add_argument("--only", nargs="+", help="words of the names of bodies, part gap")
    parser.add_argument("--control-s", type=float, default=20)
    parser.add_argument("--memory-gb", type=int, default=12, help="private memory of the server")
    parser.add_argument("--files", type=int, default=1024, help="open files of the server")
    parser.add_argument("--log-mb", type=int, default=200, help="a longer log ends the server")
    args = parser.parse_args()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, most_files), most_files))
    tree = args.tree.resolve()
    own = [] if args.model is None else [str(args.model.resolve())]

    def start() -> WatchedServer:
        return WatchedServer(tree, *own, data_bytes=args.memory_gb << 30, num_files=args.files)

    names = ("starlette", "uvicorn", "msgspec", "tokenizers", "llguidance")
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    result: dict[str, Any] = {
        "tree_commit": commit or None,
        "seed": args.seed,
        "memory_limit_gb": args.memory_gb,
        "files": args.files,
        "versions": {name: importlib.metadata.version(name) for name in names},
    }
    if "gap" in args.parts:
        result["gap"] = run_gap(args, start)
        show_gap(result["gap"])
    if "load" in args.parts:
        result["load"] = run_load(args, start)
        show_load(result["load"])
    # Imported late: it brings torch, which the clients do not need.
    from record import write_result

    print("written to", write_result("hostile_load", result))
    return int(any(result.get(part, {}).get("faults") for part in ("gap", "load")))


if __name__ == "__main__":
    sys.exit(main())
