"""`finwhale` in a process with limits, and with two clocks that tell how long nothing else ran.

    python bench/watched_server.py FILE DATA_BYTES FILES serve --port 0 ...

A thread and a task of the event loop wake every millisecond and write to FILE.thread and FILE.loop
how late each wake-up was: pairs of float64, the time (CLOCK_MONOTONIC, one for all processes) and
the seconds. A late thread means that Python's lock was held, a late task that the loop was, or the
lock. It refuses more private memory than DATA_BYTES and more open files than FILES, so that a
fault ends this process and not the machine.
"""

from __future__ import annotations

import array
import asyncio
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

EVERY_S = 0.001
_WRITE_EVERY = 200


class Lateness:
    """Appends pairs to one file; one writer."""

    def __init__(self, path: str) -> None:
        self.file = Path(path).open("wb", buffering=0)  # noqa: SIM115, lives as long as the process
        self.pairs = array.array("d")

    def add(self, slept_from_s: float) -> None:
        now_s = time.monotonic()
        self.pairs.extend((now_s, now_s - slept_from_s - EVERY_S))
        if len(self.pairs) >= 2 * _WRITE_EVERY:
            self.file.write(self.pairs.tobytes())
            self.pairs = array.array("d")


def tick(late: Lateness) -> None:
    """Tick in a thread for ever."""
    while True:
        since_s = time.monotonic()
        time.sleep(EVERY_S)
        late.add(since_s)


async def tick_loop(late: Lateness) -> None:
    """Tick in the event loop for ever."""
    while True:
        since_s = time.monotonic()
        await asyncio.sleep(EVERY_S)
        late.add(since_s)


def watch_loop(path: str) -> None:
    """Let every server of uvicorn start a tick of its loop with itself."""
    import uvicorn

    start = uvicorn.Server.startup

    async def startup(self: Any, *args: Any, **fields: Any) -> None:
        # The loop keeps tasks by weak references only.
        self.loop_ticks = asyncio.create_task(tick_loop(Lateness(path)))
        await start(self, *args, **fields)

    uvicorn.Server.startup = startup


def main() -> int:
    file, data_bytes, num_files, *arguments = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_DATA, (int(data_bytes), int(data_bytes)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(num_files), int(num_files)))
    threading.Thread(target=tick, args=(Lateness(f"{file}.thread"),), daemon=True).start()
    watch_loop(f"{file}.loop")
    sys.argv = ["finwhale", *arguments]
    from finwhale.cli import main as finwhale

    return finwhale()


if __name__ == "__main__":
    sys.exit(main())
