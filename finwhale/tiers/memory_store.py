"""The memory tier of the prefix cache: blocks in host memory, in bounds, gone with the process.

It serves one engine, so one namespace. Under pressure the lowest retention class goes first, in it
the least recently used, and a chain of blocks goes from its end: a block without those before it
is of no use. Pinned blocks and what they follow on stay; a tenant over its quota loses its own
blocks alone. Refused: a block that would push out a higher class. A newcomer's mistake: to size it
by content; Python's own bytes per block are in the budget, too. No torch here.
Source: spec/kv-cache.md sections 3 and 8.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from finwhale.tiers.tier import Groups, Retention, StoreError, TierStats

# Python's bytes for a block of eight groups, upwards: its objects and their places in the tables.
OVERHEAD_BYTES = 1600

_Address: TypeAlias = tuple[str, bytes]


@dataclass(kw_only=True, slots=True, eq=False)
class _Held:
    """One block; `followers` of its own are counted by the parent's address, here or not."""

    address: _Address
    parent: _Address | None
    groups: tuple[bytes, ...]
    num_bytes: int
    retention: int
    last_used: int
    pins: int = 0

    @property
    def value(self) -> tuple[int, int]:
        """Order of eviction, least valuable first."""
        return self.retention, self.last_used


class MemoryStore:
    """A `Tier` in this process; every method may be called from any thread.

    max_bytes           content and overhead of all blocks, at every moment
    tenant_quota_bytes  the same of one tenant; None: no quota
    """

    name = "memory"

    def __init__(self, max_bytes: int, *, tenant_quota_bytes: int | None = None) -> None:
        if max_bytes < 1:
            raise StoreError(f"max_bytes: got {max_bytes}, expected 1 or more")
        if tenant_quota_bytes is not None and tenant_quota_bytes < 0:
            raise StoreError(f"tenant_quota_bytes: got {tenant_quota_bytes}, expected 0 or more")
        self.max_bytes, self.tenant_quota_bytes = max_bytes, tenant_quota_bytes
        self._lock = threading.Lock()
        self._held: dict[_Address, _Held] = {}
        self._followers: Counter[_Address] = Counter()
        self._tenant_bytes: Counter[str] = Counter()
        # (retention, last used, address); an item counts only while it agrees with its block.
        self._queues: dict[str, list[tuple[int, int, _Address]]] = defaultdict(list)
        self._num_bytes = self._clock = 0
        self._stats = TierStats()

    def lookup(self, keys: Sequence[bytes], *, tenant: str = "") -> int:
        """Return how many of the first `keys` are here without a hole."""
        with self._lock:
            for count, key in enumerate(keys):
                if (tenant, key) not in self._held:
                    return count
            return len(keys)

    def load(
        self, key: bytes, *, tenant: str = "", parent: bytes = b""
    ) -> tuple[bytes, ...] | None:
        """Return the groups of a block as they were stored, or None."""
        del parent
        began = time.perf_counter()
        with self._lock:
            held = self._held.get((tenant, key))
            if held is None:
                self._stats.misses += 1
            else:
                self._touch(held)
                self._stats.hits += 1
                self._stats.loaded_bytes += sum(map(len, held.groups))
            self._stats.load_s += time.perf_counter() - began
            return None if held is None else held.groups

    def store(
        self,
        key: bytes,
        groups: Groups,
        *,
        tokens: tuple[int, int],
        tenant: str = "",
        retention: Retention = Retention.NORMAL,
        parent: bytes = b"",
    ) -> bool:
        """Take a copy of a block; False if there is no room for it. A block that is here counts.

        StoreError: a range that no block has.
        """
        if not 0 <= tokens[0] < tokens[1]:
            raise StoreError(f"tokens: got {tokens}, expected a first position and a later end")
        return self.keep(key, groups, tenant=tenant, retention=retention, parent=parent)

    def keep(
        self,
        key: bytes,
        groups: Groups,
        *,
        tenant: str = "",
        retention: Retention = Retention.NORMAL,
        parent: bytes = b"",
    ) -> bool:
        """As `store`, of a block whose positions nobody told: one that comes from a tier behind."""
        began = time.perf_counter()
        # Without a copy if they are bytes already, which nobody can change.
        copies = tuple(bytes(group) for group in groups)
        with self._lock:
            is_here = self._keep((tenant, key), copies, int(retention), parent)
            self._stats.store_s += time.perf_counter() - began
        return is_here

    def _keep(
        self, address: _Address, groups: tuple[bytes, ...], retention: int, parent: bytes
    ) -> bool:
        held = self._held.get(address)
        if held is not None:
            self._touch(held)
            return True
        tenant = address[0]
        held = _Held(
            address=address,
            parent=(tenant, parent) if parent else None,
            groups=groups,
            num_bytes=sum(map(len, groups)) + OVERHEAD_BYTES,
            retention=retention,
            last_used=self._tick(),
        )
        # Counted before room is made, so that its own parent does not make room for it.
        if held.parent is not None:
            self._followers[held.parent] += 1
        if not self._make_room(held):
            self._unlink(held)
            self._stats.rejected += 1
            return False
        self._held[address] = held
        self._num_bytes += held.num_bytes
        self._tenant_bytes[tenant] += held.num_bytes
        self._stats.stored += 1
        self._stats.stored_bytes += held.num_bytes
        self._offer(held)
        return True

    def touch(self, keys: Sequence[bytes], *, tenant: str = "") -> None:
        """Note that a chain has been in use: its last block here keeps those before it."""
        with self._lock:
            for key in reversed(keys):
                held = self._held.get((tenant, key))
                if held is not None:
                    self._touch(held)
                    return

    def pin(self, key: bytes, *, tenant: str = "") -> bool:
        """Keep a block until as many `unpin` calls; False (and no pin) if it is not here."""
        with self._lock:
            held = self._held.get((tenant, key))
            if held is None:
                return False
            held.pins += 1
            self._touch(held)
            return True

    def unpin(self, key: bytes, *, tenant: str = "") -> None:
        """Take one pin back; without a pin nothing happens."""
        with self._lock:
            held = self._held.get((tenant, key))
            if held is not None and held.pins:
                held.pins -= 1
                self._offer(held)

    def evict(self, key: bytes, *, tenant: str = "") -> bool:
        """Forget a block; False if it is pinned or not here. Blocks behind it stay."""
        with self._lock:
            held = self._held.get((tenant, key))
            if held is None or held.pins:
                return False
            self._remove(held)
            return True

    def stats(self) -> TierStats:
        """Return the counters now."""
        with self._lock:
            return replace(self._stats, num_blocks=len(self._held), num_bytes=self._num_bytes)

    def figures(self) -> Mapping[str, TierStats]:
        """Return the counters under this tier's name."""
        return {self.name: self.stats()}

    def flush(self) -> None:
        """Return at once: a block is here when `store` returns."""

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
            self._followers.clear()
            self._tenant_bytes.clear()
            self._queues.clear()
            self._num_bytes = 0

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _touch(self, held: _Held) -> None:
        held.last_used = self._tick()
        self._offer(held)

    def _is_evictable(self, held: _Held) -> bool:
        return not held.pins and not self._followers[held.address]

    def _offer(self, held: _Held) -> None:
        """Queue a block that could go now."""
        if not self._is_evictable(held):
            return
        queue = self._queues[held.address[0]]
        heapq.heappush(queue, (*held.value, held.address))
        if len(queue) > 2 * len(self._held) + 64:
            tenant = held.address[0]
            blocks = (h for h in self._held.values() if h.address[0] == tenant)
            queue[:] = [(*h.value, h.address) for h in blocks if self._is_evictable(h)]
            heapq.heapify(queue)

    def _first(self, tenant: str) -> _Held | None:
        """Return the block of a tenant that goes first, if one may go."""
        queue = self._queues[tenant]
        while queue:
            retention, last_used, address = queue[0]
            held = self._held.get(address)
            if held and held.value == (retention, last_used) and self._is_evictable(held):
                return held
            heapq.heappop(queue)
        return None

    def _make_room(self, new: _Held) -> bool:
        """Give blocks up until `new` fits; those that went stay gone if it does not fit at last.

        A block without the one before it pushes nothing out: of a chain that is too long, the rest
        would take the place of the beginning.
        """
        tenant, quota = new.address[0], self.tenant_quota_bytes
        if quota is None:
            quota = self.max_bytes
        may_push = new.parent is None or new.parent in self._held
        if new.num_bytes > min(self.max_bytes, quota):
            return False
        while self._tenant_bytes[tenant] + new.num_bytes > quota:
            if not (may_push and self._push_out([self._first(tenant)], new)):
                return False
        while self._num_bytes + new.num_bytes > self.max_bytes:
            if not (may_push and self._push_out(map(self._first, list(self._queues)), new)):
                return False
        return True

    def _push_out(self, firsts: Iterable[_Held | None], new: _Held) -> bool:
        """Give up the least valuable of `firsts`; False if none may go for `new`."""
        able = [held for held in firsts if held is not None and held.retention <= new.retention]
        if not able:
            return False
        self._remove(min(able, key=lambda held: held.value))
        return True

    def _remove(self, held: _Held) -> None:
        del self._held[held.address]
        self._num_bytes -= held.num_bytes
        self._tenant_bytes[held.address[0]] -= held.num_bytes
        self._stats.evicted += 1
        self._unlink(held)

    def _unlink(self, held: _Held) -> None:
        """Tell the parent that a follower has gone; to use a block is to use those before it."""
        if held.parent is None:
            return
        self._followers[held.parent] -= 1
        if not self._followers[held.parent]:
            del self._followers[held.parent]
        parent = self._held.get(held.parent)
        if parent is not None:
            parent.last_used = max(parent.last_used, held.last_used)
            self._offer(parent)
