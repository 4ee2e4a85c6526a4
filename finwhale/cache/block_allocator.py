"""Who holds which block: reference counts and a free list, no tensors.

One block id addresses the same `block_size` tokens in every global KV stream, so there is one
allocator for all of them. Refused: a block that nobody holds cannot be retained or released. A
newcomer's mistake: to look for cached blocks here. A cached block is an ordinary held block; its
holder is `finwhale.cache.prefix_index`, and eviction is that holder's release.
Source: spec/kv-cache.md sections 2.1 and 8.
"""

from __future__ import annotations

from collections.abc import Callable


class BlockError(ValueError):
    """A block that is not there, is not held, or counts that contradict each other."""


class NoBlockError(BlockError):
    """Every block is held; release some, or evict from the prefix index, and ask again."""


class BlockAllocator:
    """Blocks 0 ... num_blocks - 1, each free or held by one or more holders."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise BlockError(f"num_blocks: got {num_blocks}, expected 1 or more")
        self.num_blocks = num_blocks
        self._num_holders = [0] * num_blocks
        # A stack: the block freed last is used first, because its memory is still warm.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._watchers: list[Callable[[int], None]] = []

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give out now."""
        return len(self._free)

    def watch(self, watcher: Callable[[int], None]) -> None:
        """Call `watcher(block)` whenever `is_shared(block)` changes, after the change.

        The prefix index keeps its count of evictable blocks by it. A watcher calls no method
        that changes a count.
        """
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[int], None]) -> None:
        """Call `watcher` no more; ValueError if it did not watch."""
        self._watchers.remove(watcher)

    def allocate(self) -> int:
        """Return a free block, now with one holder; raises NoBlockError if there is none."""
        if not self._free:
            raise NoBlockError(
                f"allocate: all {self.num_blocks} blocks are held; release or evict some first"
            )
        block = self._free.pop()
        self._num_holders[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a holder to a block that has one."""
        self._check_held("retain", block)
        self._num_holders[block] += 1
        if self._num_holders[block] == 2:
            self._tell(block)

    def release(self, block: int) -> None:
        """Take a holder from a block; without holders it is free."""
        self._check_held("release", block)
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            self._free.append(block)
        elif self._num_holders[block] == 1:
            self._tell(block)

    def num_holders(self, block: int) -> int:
        """Return how many hold `block`; 0 for a free one."""
        self._check_range("num_holders", block)
        return self._num_holders[block]

    def is_shared(self, block: int) -> bool:
        """Two or more hold `block`: nobody may write to it."""
        return self.num_holders(block) > 1

    def check(self) -> None:
        """Raise BlockError unless every block is exactly one of free and held. For tests: O(n)."""
        free = set(self._free)
        if len(free) != len(self._free):
            twice = sorted(block for block in free if self._free.count(block) > 1)
            raise BlockError(f"free list: blocks {twice} are in it more than once")
        for block, holders in enumerate(self._num_holders):
            if holders < 0 or (holders == 0) != (block in free):
                where = "in" if block in free else "not in"
                raise BlockError(f"block {block}: {holders} holders, but {where} the free list")
        if not free <= set(range(self.num_blocks)):
            raise BlockError(f"free list: has blocks outside 0 ... {self.num_blocks - 1}")

    def _tell(self, block: int) -> None:
        for watcher in self._watchers:
            watcher(block)

    def _check_range(self, call: str, block: int) -> None:
        # A negative index would silently mean a block at the other end.
        if not 0 <= block < self.num_blocks:
            raise BlockError(f"{call}: got block {block}, expected 0 ... {self.num_blocks - 1}")

    def _check_held(self, call: str, block: int) -> None:
        self._check_range(call, block)
        if self._num_holders[block] == 0:
            raise BlockError(f"{call}: block {block} is free; allocate it first")
