"""What every tier of the prefix cache can do, whatever it is made of.

A tier serves one namespace. It keeps the global KV of whole blocks as opaque bytes, one buffer per
group (the main entries and the index keys of each KV owner, in the layout's order), under the
block's chained key and a tenant. Refused: parts of blocks. Tiers in a row are a tier again
(`tiers/chain.py`). A newcomer's mistake: to take a hit of `lookup` for a promise; a later `load`
may still be a miss, and a miss is never an error. No torch here.
Source: spec/kv-cache.md sections 4 and 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Protocol

Groups = Sequence[bytes | bytearray | memoryview]


class StoreError(ValueError):
    """A block, setting or directory that a tier cannot take."""


class Retention(IntEnum):
    """Classes of blocks; under pressure a lower class goes before a higher one."""

    BRIEF = 0
    NORMAL = 1
    LONG = 2


@dataclass(kw_only=True)
class TierStats:
    """Counters in blocks since the tier was opened, and bytes now.

    hits, misses   answers of `load`
    loaded_bytes   content of the hits
    load_s         seconds in `load`, hits and misses
    stored         written and committed
    stored_bytes   what was stored takes, headers included
    store_s        seconds of writing, on whichever thread writes
    rejected       not written: no room, over quota, queue full, or a write that failed
    evicted        given up for room or quota, or by `evict`
    damaged        found with wrong bytes, or lost to a read that failed; each was a miss
    errors         operating system or index errors survived
    num_blocks     blocks held, all namespaces
    num_bytes      bytes that the tier takes; never above its budget
    pending_bytes  waiting for the writer
    """

    hits: int = 0
    misses: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    stored: int = 0
    stored_bytes: int = 0
    store_s: float = 0.0
    rejected: int = 0
    evicted: int = 0
    damaged: int = 0
    errors: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    pending_bytes: int = 0

    def __add__(self, other: TierStats) -> TierStats:
        """Return the sums, counter by counter."""
        names = [item.name for item in fields(self)]
        return TierStats(**{name: getattr(self, name) + getattr(other, name) for name in names})


class Tier(Protocol):
    """The interface of a tier. No method but `flush` and `close` waits for a device's write.

    None but `store`, `flush` and `close` raises: what goes wrong is a miss and a counter.
    """

    def lookup(self, keys: Sequence[bytes], *, tenant: str = "") -> int:
        """Return how many of the first `keys` are here without a hole."""
        ...

    def load(
        self, key: bytes, *, tenant: str = "", parent: bytes = b""
    ) -> tuple[bytes, ...] | None:
        """Return the groups of a block as they were stored, or None.

        parent  as for `store`: a tier in front of others keeps what it finds behind itself
        """
        ...

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
        """Take a copy of a block for writing later; False if it was turned away at once.

        tokens  first position of the block and the one behind its last
        parent  key of the block before: a block is of no use without all before it, so a tier
                that remembers them gives a chain up from its end; b"" if unknown
        """
        ...

    def touch(self, keys: Sequence[bytes], *, tenant: str = "") -> None:
        """Note that a chain of blocks has been in use, its first block last of all."""
        ...

    def pin(self, key: bytes, *, tenant: str = "") -> bool:
        """Keep a block until as many `unpin` calls; False (and no pin) if it is not here."""
        ...

    def unpin(self, key: bytes, *, tenant: str = "") -> None:
        """Take one pin back; without a pin nothing happens."""
        ...

    def evict(self, key: bytes, *, tenant: str = "") -> bool:
        """Forget a block; False if it is pinned or not here."""
        ...

    def stats(self) -> TierStats:
        """Return the counters now."""
        ...

    def figures(self) -> Mapping[str, TierStats]:
        """Return the counters of each kind of storage in here, by its name; from any thread."""
        ...

    def flush(self) -> None:
        """Wait until all that was stored before this call is committed or rejected."""
        ...

    def close(self) -> None:
        """Flush and let go of all resources."""
        ...
