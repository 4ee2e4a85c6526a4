"""The longest time that a server stands still while large bodies arrive, part `gap` of the load.

One body at a time beside a stream of honest requests; the honest requests alone are the control.
Three clocks: a task of the server's loop and a thread of its process (watched_server.py), and a
small request every 5 ms from another process. It refuses to build a body while it measures.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import hostile_bodies as bodies
import hostile_frames as frames
from hostile_connections import HONEST, exchange
from hostile_server import Probe, WatchedServer, gap_figures


def gap_bodies(sizes: list[int]) -> list[tuple[str, bytes]]:
    """Return large bodies by name, all built before anything is measured."""
    made = [
        (f"{kind}, {size} MB", bodies.long_text(kind, size))
        for kind in bodies.TEXTS
        for size in sizes
    ]
    most = max(sizes)
    for path in (bodies.TEXT, bodies.RESPONSES, bodies.MESSAGES, bodies.COUNT):
        made.append((f"words, {most} MB, {path}", bodies.long_text("words", most, path)))
    for path in (bodies.CHAT, bodies.RESPONSES, bodies.MESSAGES):
        made.append((f"100,001 messages, {path}", bodies.many_messages(path)))
    made += [
        ("35,000 tool calls", bodies.many_tool_calls()),
        ("50,000 tools", bodies.many_tools()),
        ("3,500,000 ids", bodies.many_ids()),
        ("1,500,000 prompts", bodies.many_prompts()),
        ("1,500,000 stops", bodies.many_stops()),
        ("400,000 biases", bodies.large_bias()),
        ("6 MB of metadata", bodies.large_metadata()),
        ("enum of 600,000", frames.large_enum()),
        ("499 optional properties", frames.optional_properties(499)),
        ("10,000 optional properties", frames.optional_properties(10_000)),
        ("nested JSON", bodies.nested_json(random.Random(1), 3)),
        ("7,000,000 digits", bodies.huge_numbers(random.Random(1), 23)),
        ("16 stop texts of 60 kB", bodies.stop_texts(random.Random(3), 5)),
        ("grammar given up", frames.grammar_given_up(random.Random(1), 1)),
        # Last, since it may be the server's end.
        ("16 stop texts of 400 kB", bodies.stop_texts(random.Random(3), 20)),
    ]
    return made


def run_gap(args: argparse.Namespace, start: Callable[[], WatchedServer]) -> dict[str, Any]:
    sent = gap_bodies(args.sizes)
    if args.only:
        sent = [(name, raw) for name, raw in sent if any(word in name for word in args.only)]
    server = start()
    asyncio.run(_warm(server))
    probe = Probe(server)
    try:
        return asyncio.run(_gaps(server, probe, sent, args.control_s))
    finally:
        probe.close()
        server.close()


def is_sound(status: str) -> bool:
    """Return whether a large body may end so: with a status that is no failure of the server."""
    return status.isdigit() and (int(status) < 500 or status in ("503", "504"))


async def _warm(server: WatchedServer) -> None:
    # Kernels are compiled or loaded with the first requests of a process.
    for path, body in HONEST:
        await exchange(server.port, bodies.post(path, body), 180)


async def _gaps(
    server: WatchedServer, probe: Probe, sent: list[tuple[str, bytes]], control_s: float
) -> dict[str, Any]:
    stopped = asyncio.Event()

    async def honest() -> None:
        number = 0
        while not stopped.is_set():
            path, body = HONEST[number % len(HONEST)]
            await exchange(server.port, bodies.post(path, body), 600)
            number += 1

    asking = asyncio.create_task(honest())
    await asyncio.sleep(1)
    since_s = time.monotonic()
    await asyncio.sleep(control_s)
    control = [(since_s, time.monotonic())]
    windows: dict[str, tuple[tuple[float, float], str]] = {}
    for name, raw in sent:
        since_s = time.monotonic()
        word, answer = await exchange(server.port, raw, 600)
        status = str(answer.status) if answer and answer.status else word
        windows[name] = (since_s, time.monotonic()), status
        if not server.is_alive:
            windows[name] = windows[name][0], "server ended"
            break
        await asyncio.sleep(0.5)
    stopped.set()
    await asking
    # The clocks write a fifth of a second late.
    await asyncio.sleep(1)

    def figures(inside: list[tuple[float, float]]) -> dict[str, Any]:
        return {
            "loop": server.lateness("loop", inside),
            "thread": server.lateness("thread", inside),
            "request": gap_figures(probe.pairs(), inside),
        }

    ends = [(name, status) for name, (_, status) in windows.items()]
    return {
        "faults": [f"{name}: {status}" for name, status in ends if not is_sound(status)],
        "probe": probe.path,
        "control": figures(control),
        "bodies": figures([window for window, _ in windows.values()]),
        "by_body": {
            name: {"status": status, "seconds": round(window[1] - window[0], 2)}
            | {clock: each["longest_ms"] for clock, each in figures([window]).items()}
            for name, (window, status) in windows.items()
        },
        "memory": server.memory(),
    }


def show_gap(result: dict[str, Any]) -> None:
    print(f"\nms; small request: {result['probe']}      longest    99.9 %   s in gaps over 50 ms")
    for part in ("control", "bodies"):
        for clock, told in result[part].items():
            numbers = (
                f"{told['longest_ms']:10.1f} {told['p999_ms']:9.1f} {told['over_50ms_s']:8.2f}"
            )
            print(f"  {part:8} {clock:8} {numbers}   of {told['count']}")
    print(f"\n  {'longest gap of one body, ms':40} {'loop':>9} {'thread':>9} {'request':>9}")
    for name, told in result["by_body"].items():
        numbers = " ".join(f"{told[clock]:9.1f}" for clock in ("loop", "thread", "request"))
        print(f"  {name:40} {numbers}   {told['status']} after {told['seconds']} s")
    print(f"memory: {result['memory']}")
    for fault in result["faults"]:
        print(f"FAULT {fault}")
