"""Window rows of prefixes in host memory, for minutes: a hit that finds them replays nothing.

Windows are large (a snapshot of the release's encoder windows has the bytes of 1,519 tokens of
global KV) and cheap to make again, so they are kept for a lifetime and a budget and never written
to a slower tier. What is kept under a key belongs to the prefix that ends with that block, whether
or not its block is at hand. A newcomer's mistake: to look into a value; it is the caller's.
Source: spec/kv-cache.md sections 1.1, 3 and 6.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(kw_only=True)
class WindowStats:
    """Counters since the start, in snapshots, and bytes now.

    hits     answers of `longest` that gave one
    expired  given up because nobody asked for their lifetime
    evicted  given up for room
    """

    hits: int = 0
    stored: int = 0
    rejected: int = 0
    expired: int = 0
    evicted: int = 0
    num_snapshots: int = 0
    num_bytes: int = 0


class _Kept(NamedTuple):
    value: object
    num_bytes: int
    last_used_s: float


class WindowPool:
    """Values by block key, least recently used first; one thread uses it, any may read `stats`.

    max_bytes   of all values; 0 keeps none
    lifetime_s  time since a value was kept or asked for last, after which it is gone
    clock       seconds; tests pass their own
    """

    def __init__(
        self, max_bytes: int, lifetime_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes: got {max_bytes}, expected 0 or more")
        if not lifetime_s > 0:
            raise ValueError(f"lifetime_s: got {lifetime_s}, expected more than 0 seconds")
        self.max_bytes, self.lifetime_s, self._clock = max_bytes, lifetime_s, clock
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._stats = WindowStats()

    def __contains__(self, key: bytes) -> bool:
        kept = self._kept.get(key)
        return kept is not None and self._clock() - kept.last_used_s < self.lifetime_s

    def renew(self, key: bytes) -> bool:
        """Begin the lifetime of a value anew; False if it is not here."""
        if key not in self:
            return False
        self._kept[key] = self._kept[key]._replace(last_used_s=self._clock())
        self._kept.move_to_end(key)
        return True

    def put(self, key: bytes, value: object, num_bytes: int) -> bool:
        """Keep a value in place of an older one; False if it is larger than the whole budget."""
        self._drop(key)
        self.expire()
        if num_bytes > self.max_bytes:
            self._stats.rejected += 1
            return False
        while self._stats.num_bytes + num_bytes > self.max_bytes:
            self._drop(next(iter(self._kept)))
            self._stats.evicted += 1
        self._kept[key] = _Kept(value, num_bytes, self._clock())
        self._stats.stored += 1
        self._stats.num_bytes += num_bytes
        self._stats.num_snapshots += 1
        return True

    def longest(self, keys: Sequence[bytes]) -> tuple[int, object] | None:
        """Return (number of blocks, value) of the longest prefix of a chain that has a value."""
        self.expire()
        for num_blocks in range(len(keys), 0, -1):
            key = keys[num_blocks - 1]
            if self.renew(key):
                self._stats.hits += 1
                return num_blocks, self._kept[key].value
        return None

    def stats(self) -> WindowStats:
        """Return the counters now."""
        return replace(self._stats)

    def clear(self) -> None:
        """Forget everything."""
        for key in list(self._kept):
            self._drop(key)

    def expire(self) -> float | None:
        """Give up what is too old; return the seconds until the next will be, None: nothing left.

        `put` and `longest` do so too; who waits for a request calls it, or memory stays taken.
        """
        # Order of use is order of time, so the first that lives ends the search.
        now = self._clock()
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            left = self.lifetime_s - (now - kept.last_used_s)
            if left > 0:
                return left
            self._drop(key)
            self._stats.expired += 1
        return None

    def _drop(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._stats.num_bytes -= kept.num_bytes
            self._stats.num_snapshots -= 1
