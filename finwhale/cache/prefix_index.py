"""Which blocks hold which prefix: whole blocks under chained keys, in memory.

A key names all that the rows of a block depend on: the namespace (weights, layout, numerics, ...),
the request's salt, every token id before and in the block, and the images among them. Refused:
parts of blocks, chains with a hole. A newcomer's mistakes: to trust a key alone (a hit compares
the stored ids as well), and to go on inserting after `insert` returned None (the chain has ended).
Source: spec/kv-cache.md sections 4.1, 4.3 and 8; cases 43, 44 and 46.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from finwhale.cache.block_allocator import BlockAllocator
from finwhale.cache.prefix_key import (
    ROOT_TAG,
    Images,
    Namespace,
    PrefixError,
    block_key,
    tagged_digest,
    text_bytes,
    token_bytes,
)


@dataclass(frozen=True, kw_only=True)
class Match:
    """A prefix found in the index; its blocks are retained for the caller, who releases them.

    blocks      block ids, first tokens first
    num_tokens  len(blocks) * block_size
    keys        key of each block
    root        root key of the request
    """

    blocks: list[int]
    num_tokens: int
    keys: list[bytes]
    root: bytes

    @property
    def parent_key(self) -> bytes:
        """The `parent_key` for inserting the block behind the match."""
        return self.keys[-1] if self.keys else self.root


class Inserted(NamedTuple):
    """Where a block's content is cached: `block` is the caller's, or an older equal one."""

    key: bytes
    block: int


@dataclass(kw_only=True)
class PrefixStats:
    """Counters in blocks; hits + misses = whole blocks that `match` was asked for."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(kw_only=True, slots=True, eq=False)
class _Cached:
    """One cached block.

    holds  reasons to stay: other holders of the block (1 or 0), pins, children with holds
    """

    key: bytes
    parent_key: bytes
    parent: _Cached | None
    tokens: bytes
    images: tuple[tuple[int, bytes], ...]
    block: int
    last_used: int
    holds: int = 0
    pins: int = 0
    num_children: int = 0

    @property
    def is_evictable_now(self) -> bool:
        return not self.holds and not self.num_children


class PrefixIndex:
    """The cached blocks of one namespace; holds one reference to each.

    max_blocks  cached blocks at most (None: as many as the allocator has)
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        namespace: Namespace,
        block_size: int,
        max_blocks: int | None = None,
    ) -> None:
        if block_size < 1:
            raise PrefixError(f"block_size: got {block_size}, expected 1 or more")
        if max_blocks is not None and max_blocks < 0:
            raise PrefixError(f"max_blocks: got {max_blocks}, expected 0 or more")
        self.allocator = allocator
        self.namespace = namespace
        self.block_size = block_size
        self.max_blocks = allocator.num_blocks if max_blocks is None else max_blocks
        self.stats = PrefixStats()
        self._namespace_digest = namespace.digest()
        self._cached: dict[bytes, _Cached] = {}
        self._by_block: dict[int, _Cached] = {}
        self._num_evictable = 0
        # (last_used, key); an item counts only while it agrees with the block it names.
        self._queue: list[tuple[int, bytes]] = []
        self._clock = 0
        allocator.watch(self._on_shared)

    @property
    def num_cached(self) -> int:
        """Blocks that the index holds."""
        return len(self._cached)

    @property
    def num_evictable(self) -> int:
        """Blocks that `evict` could free now, one after the other; O(1)."""
        return self._num_evictable

    def root_key(self, salt: str = "") -> bytes:
        """Return the parent key of a first block [36 bytes]; requests share only equal salts."""
        return ROOT_TAG + tagged_digest(
            b"finwhale.request", self._namespace_digest, text_bytes(salt)
        )

    def match(self, tokens: Sequence[int], images: Images = (), salt: str = "") -> Match:
        """Return the longest cached chain of whole blocks that `tokens` begin with, retained.

        At most len(tokens) - 1 tokens match: the last token has to be computed, because its
        logits are what the caller is after and no block holds them (case 43). A key that is
        cached for other content is a miss.

        tokens  ids of the request
        images  (position in `tokens`, content digest)
        """
        size, clock = self.block_size, self._tick()
        self._check_images(images, len(tokens))
        inside: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for at, image in images:
            inside[at // size].append((at % size, image))
        root = parent_key = self.root_key(salt)
        found: list[_Cached] = []
        num_whole = max(0, len(tokens) - 1) // size
        for n in range(num_whole):
            part = tokens[n * size : (n + 1) * size]
            cached = self._cached.get(block_key(parent_key, part, inside[n]))
            if cached is None or not self._is_same(cached, parent_key, part, inside[n]):
                break
            found.append(cached)
            parent_key = cached.key
        for cached in found:
            cached.last_used = clock
            self.allocator.retain(cached.block)
        self.stats.hits += len(found)
        self.stats.misses += num_whole - len(found)
        return Match(
            blocks=[cached.block for cached in found],
            num_tokens=len(found) * size,
            keys=[cached.key for cached in found],
            root=root,
        )

    def insert(
        self, parent_key: bytes, tokens: Sequence[int], block: int, images: Images = ()
    ) -> Inserted | None:
        """Cache a full block behind `parent_key`; return its key and the block cached there.

        If equal content is cached already, the older block stays and is returned; the caller may
        retain it and release its own. None means not cached, so nothing behind it can be either:
        the parent is gone, `max_blocks` are all in use, or the key belongs to other content.

        parent_key  key of the block before, or `root_key(salt)`
        tokens      ids, block_size of them
        block       a block that the caller holds; the index takes a reference of its own
        images      (position in `tokens`, content digest)
        """
        if len(tokens) != self.block_size:
            raise PrefixError(f"tokens: got {len(tokens)}, expected one block of {self.block_size}")
        self._check_images(images, len(tokens))
        if self.allocator.num_holders(block) == 0:
            raise PrefixError(f"block: {block} is free; insert it while you hold it")
        parent = None
        if not self._is_root(parent_key):
            parent = self._cached.get(parent_key)
            if parent is None:
                return None
        key = block_key(parent_key, tokens, images)
        cached = self._cached.get(key)
        if cached is not None:
            if not self._is_same(cached, parent_key, tokens, images):
                return None
            cached.last_used = self._tick()
            self._offer(cached)
            return Inserted(key, cached.block)
        if block in self._by_block:
            raise PrefixError(f"block: {block} is cached under another key; use a block of its own")
        if not self._has_room(parent):
            return None
        cached = _Cached(
            key=key,
            parent_key=parent_key,
            parent=parent,
            tokens=token_bytes(tokens),
            images=tuple(sorted(images)),
            block=block,
            last_used=self._tick(),
        )
        if parent is not None:
            parent.num_children += 1
        self._cached[key] = cached
        self._num_evictable += 1
        # The reference first: the watcher then passes over a block that is not listed yet.
        self.allocator.retain(block)
        self._by_block[block] = cached
        self._add_hold(cached)
        return Inserted(key, block)

    def evict(self, count: int) -> int:
        """Free up to `count` blocks, least recently used first; return how many.

        Only blocks that nobody else holds, unpinned, without cached children: a chain is taken
        from its end. To use a block is to use all before it.
        """
        freed = 0
        while freed < count and self._queue:
            last_used, key = heapq.heappop(self._queue)
            cached = self._cached.get(key)
            if cached and cached.is_evictable_now and cached.last_used == last_used:
                self._remove(cached)
                freed += 1
        self.stats.evictions += freed
        return freed

    def pin(self, key: bytes) -> None:
        """Keep the chain up to `key` until as many `unpin` calls."""
        cached = self._get("pin", key)
        cached.pins += 1
        self._add_hold(cached)

    def unpin(self, key: bytes) -> None:
        """Take one pin back."""
        cached = self._get("unpin", key)
        if not cached.pins:
            raise PrefixError(f"unpin: key {key.hex()} has no pin")
        cached.pins -= 1
        self._drop_hold(cached)

    def close(self) -> None:
        """Forget every block and let go of the allocator, which another index may then use."""
        self.clear()
        self.allocator.unwatch(self._on_shared)

    def clear(self) -> None:
        """Forget every block; holders keep theirs. Refused while a key is pinned."""
        pinned = sum(cached.pins > 0 for cached in self._cached.values())
        if pinned:
            raise PrefixError(f"clear: {pinned} keys are pinned; unpin them first")
        blocks = list(self._by_block)
        self._cached.clear()
        self._by_block.clear()
        self._queue.clear()
        self._num_evictable = 0
        for block in blocks:
            self.allocator.release(block)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _get(self, call: str, key: bytes) -> _Cached:
        if key not in self._cached:
            raise PrefixError(f"{call}: key {key.hex()} is not cached; insert its block first")
        return self._cached[key]

    @staticmethod
    def _is_root(key: bytes) -> bool:
        return len(key) > 32 and key.startswith(ROOT_TAG)

    @staticmethod
    def _is_same(cached: _Cached, parent_key: bytes, tokens: Sequence[int], images: Images) -> bool:
        # The blocks before were compared on the way here, so equal parent keys are equal prefixes.
        return (
            cached.parent_key == parent_key
            and cached.tokens == token_bytes(tokens)
            and cached.images == tuple(sorted(images))
        )

    @staticmethod
    def _check_images(images: Images, num_tokens: int) -> None:
        for at, _ in images:
            if not 0 <= at < num_tokens:
                raise PrefixError(f"images: got position {at}, expected 0 ... {num_tokens - 1}")

    def _has_room(self, parent: _Cached | None) -> bool:
        """Evict one block if the index is full, but never the parent of the new one."""
        if self.num_cached < self.max_blocks:
            return True
        if parent is not None:
            self._add_hold(parent)
        freed = self.evict(1)
        if parent is not None:
            self._drop_hold(parent)
        return freed == 1

    def _on_shared(self, block: int) -> None:
        cached = self._by_block.get(block)
        if cached is not None:
            change = self._add_hold if self.allocator.is_shared(block) else self._drop_hold
            change(cached)

    def _add_hold(self, cached: _Cached | None) -> None:
        # Walks up only through blocks whose first hold this is, so a whole chain costs its length.
        while cached is not None:
            cached.holds += 1
            if cached.holds > 1:
                return
            self._num_evictable -= 1
            cached = cached.parent

    def _drop_hold(self, cached: _Cached | None) -> None:
        while cached is not None:
            cached.holds -= 1
            if cached.holds:
                return
            self._num_evictable += 1
            self._offer(cached)
            cached = cached.parent

    def _offer(self, cached: _Cached) -> None:
        """Queue a block that could go now."""
        if not cached.is_evictable_now:
            return
        heapq.heappush(self._queue, (cached.last_used, cached.key))
        if len(self._queue) > 2 * self.num_cached + 64:
            blocks = self._cached.values()
            self._queue = [(c.last_used, c.key) for c in blocks if c.is_evictable_now]
            heapq.heapify(self._queue)

    def _remove(self, cached: _Cached) -> None:
        del self._cached[cached.key], self._by_block[cached.block]
        self._num_evictable -= 1
        self.allocator.release(cached.block)
        parent = cached.parent
        if parent is not None:
            parent.num_children -= 1
            parent.last_used = max(parent.last_used, cached.last_used)
            self._offer(parent)
