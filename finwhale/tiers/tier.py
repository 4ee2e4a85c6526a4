"""What every tier of the prefix cache can do, whatever it is made of.

A tier serves one namespace. It keeps the global KV of whole blocks as opaque bytes, one buffer per
group (the main entries and the index keys of each KV owner, in the layout's order), under the
block's chained key and a tenant. Refused: parts of blocks. A newcomer's mistake: to take a hit of
`lookup` for a promise; a later `load` may still be a miss, and a miss is never an error. No torch
here. Source: spec/kv-cache.md sections 4 and 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    stored         written and committed
    rejected       not written: no room, over quota, queue full, or a write that failed
    evicted        given up for room or quota, or by `evict`
    damaged        found with wrong bytes; each was a miss
    errors         operating system or index errors survived
    num_blocks     blocks held, all namespaces
    num_bytes      bytes of the tier's files; never above its budget
    pending_bytes  waiting for the writer
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    rejected: int = 0
    evicted: int = 0
    damaged: int = 0
    errors: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    pending_bytes: int = 0


class Tier(Protocol):
    """The interface of a tier. No method but `flush` and `close` waits for a device's write.

    `lookup`, `load`, `pin`, `unpin`, `evict` and `stats` never raise: what goes wrong is a miss
    and a counter.
    """

    def lookup(self, keys: Sequence[bytes], *, tenant: str = "") -> int:
        """Return how many of the first `keys` are here without a hole."""
        ...

    def load(self, key: bytes, *, tenant: str = "") -> tuple[bytes, ...] | None:
        """Return the groups of a block as they were stored, or None."""
        ...

    def store(
        self,
        key: bytes,
        groups: Groups,
        *,
        tokens: tuple[int, int],
        tenant: str = "",
        retention: Retention = Retention.NORMAL,
    ) -> bool:
        """Take a copy of a block for writing later; False if it was turned away at once.

        tokens  first position of the block and the one behind its last
        """
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

    def flush(self) -> None:
        """Wait until all that was stored before this call is committed or rejected."""
        ...

    def close(self) -> None:
        """Flush and let go of all resources."""
        ...
