"""A process that stores, loads and evicts until `kill -9`, and what must be true afterwards.

    python -m tests.killed_store DIRECTORY SEED MODE [CONTROL]     (the process to kill)

The process tells on its output what it has been promised: `ack` after a flush that left a block
visible, `bye` before it gives one up. `Killing` ends it at random moments, opens the directory as
the next process would, and looks at every block. Laws: a block is what was stored under its key or
a miss; what was promised is there; the survey behind `finwhale cache verify` finds no damage.

    MODE     "roomy": nothing is evicted unasked, so every promise counts.
             "tight": the store is full all the time, and segments are emptied and removed. Blocks
             of class LONG are fewer than half of the capacity, so their promises count.
    CONTROL  "early": promises before the flush. A kill must then find a broken promise.

A kill loses no page of the system's memory; what a loss of power does is `tests/fault_disk.py`'s.
"""

from __future__ import annotations

import hashlib
import os
import random
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from finwhale.tiers.disk_check import survey
from finwhale.tiers.disk_segments import Disk
from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig
from finwhale.tiers.tier import Retention

ROOT = Path(__file__).resolve().parent.parent
NAMESPACES = {name: hashlib.sha256(name.encode()).digest() for name in ("a", "b")}
NUM_BLOCKS = {"roomy": 60, "tight": 150}
NUM_LONG = 12
_BOUNDS = {"roomy": (1 << 18, 1 << 26), "tight": (1 << 16, 10 << 16)}
# Most sessions last about as long as a few hundred operations.
LONGEST_S = 0.4


def key_of(n: int) -> bytes:
    return hashlib.sha256(f"block {n}".encode()).digest()


def groups_of(name: str, n: int) -> tuple[bytes, ...]:
    """Return the bytes of block `n` of a namespace: one, two or three groups, 2 pages at most."""
    draw = random.Random(f"{name} {n}")
    sizes = [draw.choice((0, 1, 900, 2200)) for _ in range(draw.randrange(1, 4))]
    return tuple(
        hashlib.shake_256(f"{name} {n} {i}".encode()).digest(s) for i, s in enumerate(sizes)
    )


def retention_of(n: int) -> Retention:
    return Retention.LONG if n < NUM_LONG else Retention.NORMAL


def open_store(directory: Path, name: str, mode: str, disk: Disk | None = None) -> DiskStore:
    segment_bytes, max_bytes = _BOUNDS[mode]
    config = DiskStoreConfig(
        directory=directory,
        namespace=NAMESPACES[name],
        max_bytes=max_bytes,
        segment_bytes=segment_bytes,
    )
    return DiskStore(config, disk)


def _say(text: str) -> None:
    # One write per line: a kill cuts no line in two.
    os.write(1, f"{text}\n".encode())


def work(directory: Path, seed: int, mode: str, control: str = "") -> None:
    """Store, load, evict and reopen for ever; the parent ends this."""
    draw = random.Random(seed)
    _say("start")
    while True:
        name = draw.choice(sorted(NAMESPACES))
        _say("open")
        store = open_store(directory, name, mode)
        _say("work")
        for _ in range(draw.randrange(1, 40)):
            _session(store, name, mode, draw, control)
        _say("close")
        store.close()


def _session(store: DiskStore, name: str, mode: str, draw: random.Random, control: str) -> None:
    count = NUM_BLOCKS[mode]
    waiting = [draw.randrange(count) for _ in range(draw.randrange(1, 12))]
    for n in waiting:
        groups = groups_of(name, n)
        store.store(key_of(n), groups, tokens=(n, n + 1), retention=retention_of(n))
        if control == "early":
            _say(f"ack {name} {n}")
    if draw.random() < 0.7:
        _say("flush")
        store.flush()
        for n in waiting:
            if store.lookup([key_of(n)]):
                _say(f"ack {name} {n}")
        _say("work")
    n = draw.randrange(count)
    found = store.load(key_of(n))
    if found not in (None, groups_of(name, n)):
        _say(f"wrong {name} {n}")
    if mode == "roomy" and draw.random() < 0.3:
        _say(f"bye {name} {n}")
        store.evict(key_of(n))


@dataclass
class Killing:
    """Kills of processes that work on one directory, and what they were promised.

    required  blocks (namespace, number) that must be there
    moments   what the process was doing when it was killed: counts
    """

    directory: Path
    mode: str
    seed: int = 0
    control: str = ""
    required: set[tuple[str, int]] = field(default_factory=set)
    moments: dict[str, int] = field(default_factory=dict)
    num_kills: int = 0
    promises: int = 0
    loads: int = 0

    def once(self) -> list[str]:
        """Let a process work for a random time, kill it, look at all blocks; return what broke."""
        self.num_kills += 1
        draw = random.Random(f"{self.seed} {self.num_kills}")
        arguments = [str(self.directory), str(draw.randrange(1 << 30)), self.mode, self.control]
        # Half of the times are short: opening and adopting deserve their kills.
        delay_s = draw.choice((LONGEST_S / 8, LONGEST_S)) * draw.random()
        with subprocess.Popen(
            [sys.executable, "-m", "tests.killed_store", *arguments],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            bufsize=0,
        ) as process:
            told = process.stdout.readline()
            stop = time.perf_counter() + delay_s
            # The pipe is emptied all the time: a full one would stop the process.
            while (left := stop - time.perf_counter()) > 0:
                if select.select([process.stdout], [], [], left)[0]:
                    told += os.read(process.stdout.fileno(), 1 << 16)
            is_alive = process.poll() is None
            process.kill()
            told += process.stdout.read()
        problems = [] if is_alive else [f"the process ended by itself: {process.returncode}"]
        return problems + self._hear(told.decode().splitlines()) + self.verify()

    def _hear(self, lines: list[str]) -> list[str]:
        moment, problems = "start", []
        for line in lines:
            what, *who = line.split()
            if what == "ack":
                block = who[0], int(who[1])
                if self.mode == "roomy" or block[1] < NUM_LONG:
                    self.required.add(block)
                    self.promises += 1
            elif what == "bye":
                self.required.discard((who[0], int(who[1])))
            elif what == "wrong":
                problems.append(line)
            else:
                moment = what
        self.moments[moment] = self.moments.get(moment, 0) + 1
        return problems

    def verify(self) -> list[str]:
        """Open the directory as the next process would and return what breaks a law."""
        problems = []
        if not self.directory.exists():
            return [f"lost {sorted(self.required)}"] if self.required else []
        for name in sorted(NAMESPACES):
            with open_store(self.directory, name, self.mode) as store:
                for n in range(NUM_BLOCKS[self.mode]):
                    found = store.load(key_of(n))
                    self.loads += 1
                    if found is None and (name, n) in self.required:
                        problems.append(f"lost {name} {n}")
                    elif found not in (None, groups_of(name, n)):
                        problems.append(f"wrong {name} {n}")
                stats = store.stats()
                if stats.damaged or stats.errors:
                    problems.append(f"damaged {stats.damaged}, errors {stats.errors}")
        files = sum(path.stat().st_size for path in self.directory.glob("segment-*"))
        if files > _BOUNDS[self.mode][1]:
            problems.append(f"bound: {files} bytes")
        return problems + survey(self.directory).problems


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
