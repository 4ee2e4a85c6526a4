"""Memory in front of a slower tier: written to both, read from the first that has it.

What is found behind the memory is kept in it (promoted). A prefix may lie half here and half there.
What the memory gives up stays behind it, so nothing is moved down. A newcomer's mistake: to pin in
one of the two; a block may come or go in either, and a pin must hold whatever happens.
Source: spec/kv-cache.md section 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from finwhale.tiers.memory_store import MemoryStore
from finwhale.tiers.tier import Groups, Retention, Tier, TierStats


class TierChain:
    """A `Tier` of a memory and the tier behind it, which may be a chain again."""

    def __init__(self, memory: MemoryStore, behind: Tier) -> None:
        self.memory, self.behind = memory, behind

    def lookup(self, keys: Sequence[bytes], *, tenant: str = "") -> int:
        """Return how many of the first `keys` are here without a hole, each in either place."""
        count, fruitless, place, other = 0, 0, self.memory, self.behind
        while count < len(keys) and fruitless < 2:
            found = place.lookup(keys[count:], tenant=tenant)
            count, fruitless = count + found, 0 if found else fruitless + 1
            place, other = other, place
        return count

    def load(
        self, key: bytes, *, tenant: str = "", parent: bytes = b""
    ) -> tuple[bytes, ...] | None:
        """Return the groups of a block, which the memory then holds if it has room."""
        groups = self.memory.load(key, tenant=tenant)
        if groups is None:
            groups = self.behind.load(key, tenant=tenant, parent=parent)
            if groups is not None:
                self.memory.keep(key, groups, tenant=tenant, parent=parent)
        return groups

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
        """Store in both; False if neither took it."""
        # One copy for both: bytes are not copied again.
        copies = tuple(bytes(group) for group in groups)
        taken = [
            place.store(
                key, copies, tokens=tokens, tenant=tenant, retention=retention, parent=parent
            )
            for place in (self.memory, self.behind)
        ]
        return any(taken)

    def touch(self, keys: Sequence[bytes], *, tenant: str = "") -> None:
        """Note that a chain has been in use, in both places."""
        self.memory.touch(keys, tenant=tenant)
        self.behind.touch(keys, tenant=tenant)

    def pin(self, key: bytes, *, tenant: str = "") -> bool:
        """Pin wherever the block is; False if it is nowhere.

        As `unpin` takes one pin from each place that has one, the place with the most pins has at
        least as many as are outstanding: the block stays there.
        """
        taken = [place.pin(key, tenant=tenant) for place in (self.memory, self.behind)]
        return any(taken)

    def unpin(self, key: bytes, *, tenant: str = "") -> None:
        """Take one pin back."""
        self.memory.unpin(key, tenant=tenant)
        self.behind.unpin(key, tenant=tenant)

    def evict(self, key: bytes, *, tenant: str = "") -> bool:
        """Forget a block in both; False if it is in neither, or a pin keeps it in one."""
        gone = [place.evict(key, tenant=tenant) for place in (self.memory, self.behind)]
        return any(gone) and not self.lookup([key], tenant=tenant)

    def stats(self) -> TierStats:
        """Return the sums of both; a miss in memory that the tier behind answers is no miss."""
        memory = self.memory.stats()
        total = memory + self.behind.stats()
        total.misses -= memory.misses
        return total

    def figures(self) -> Mapping[str, TierStats]:
        """Return the counters of each place by its name."""
        return {**self.memory.figures(), **self.behind.figures()}

    def flush(self) -> None:
        """Wait for the tier behind."""
        self.behind.flush()

    def close(self) -> None:
        """Forget the memory and close the tier behind."""
        self.memory.close()
        self.behind.close()
