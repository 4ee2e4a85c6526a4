"""Who runs in the next step, on which rows, and where their memory comes from.

Rules, in this order:
- Admission is first come, first served, into a free slot, when the blocks of the prompt and of one
  token more, if one is to be drawn, are free or can be evicted. Nobody overtakes the head of the
  queue.
- Every decoding sequence gets its one row; the rest of the token budget is split evenly among the
  sequences that still read their prompt, so a long prompt cannot hold up a short one.
- A sequence that finds no block takes memory from the youngest running one, which is preempted and
  goes back to its place in the queue. The oldest is never preempted and every request fits alone,
  so somebody always finishes.
- A preempted sequence starts again from its tokens; cached blocks and windows make that short.

What a start can reuse is decided in `_plan_start`, the rule of prefix hits. Behind the blocks in
the pool a slower tier may know more of the prompt; they are loaded where that saves more rows than
it costs (`_num_worth_loading`). A newcomer's mistake: counting cached blocks as free; only those
that nobody else holds can be evicted.
Source: spec/kv-cache.md sections 2.10 and 8, spec/backbone.md section 3.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from finwhale.cache.block_allocator import BlockAllocator
from finwhale.cache.block_bytes import read_block, write_block
from finwhale.cache.paged_pools import PagedPools
from finwhale.cache.prefix_index import Match, PrefixIndex
from finwhale.cache.prefix_key import block_key
from finwhale.config.engine import EngineConfig
from finwhale.engine.live_rows import Work
from finwhale.engine.paged_pass import RowSpan
from finwhale.engine.prefill import exact_decoder_rows, exact_encoder_rows
from finwhale.engine.sequence import Sequence
from finwhale.telemetry import get_logger
from finwhale.tiers.tier import Tier
from finwhale.tiers.window_pool import WindowPool

logger = get_logger("engine")

# Blocks that an ending sequence offers a second time; the next turn offers the rest.
_MOST_OFFERED_AGAIN = 32


@dataclass(kw_only=True, slots=True)
class SchedulerStats:
    """Counters since the start.

    cached_tokens    of what started, found with their global KV; again after each preemption
    loaded_tokens    of these, brought in from a slower tier
    handed_tokens    of these, given by another engine
    unloaded_tokens  found in a slower tier and left there, because loading would have cost more
    replayed_tokens  of the cached, whose rows ran again for their windows
    """

    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    unloaded_tokens: int = 0
    handed_tokens: int = 0
    replayed_tokens: int = 0
    restored_windows: int = 0
    tier_errors: int = 0


class Scheduler:
    """Owns the queue, the running sequences, the blocks and the slots."""

    def __init__(
        self,
        config: EngineConfig,
        pools: PagedPools,
        allocator: BlockAllocator,
        index: PrefixIndex,
        tier: Tier | None = None,
        windows: WindowPool | None = None,
    ):
        self.tier = tier
        self.windows = windows or WindowPool(config.snapshot_bytes, config.snapshot_lifetime_s)
        self.config, self.pools, self.allocator, self.index = config, pools, allocator, index
        text = pools.layout.config
        self.window = text.sliding_window
        self.bounded_rows = config.replay_windows * text.sliding_window
        self.decoder_tail = exact_decoder_rows(text)
        self.encoder_tail = exact_encoder_rows(text)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_slots = list(range(config.max_sequences))[::-1]
        # Whom the queue waits for, and how many blocks were available when it did not fit.
        self._blocked: tuple[tuple[str, int], int] = (("", 0), 0)
        self.stats = SchedulerStats()

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def schedule(self) -> list[tuple[Sequence, Work]]:
        """Return the work of the next step, oldest sequence first; empty if nobody can run."""
        self._admit()
        self.stats.steps += 1
        self.running.sort(key=lambda sequence: sequence.arrival)
        rows = self._shares()
        chosen: list[tuple[Sequence, int]] = []
        for sequence in list(self.running):
            count = rows.get(sequence.name, 0)
            if count and sequence.is_running and self._reserve(sequence, count):
                chosen.append((sequence, count))
        return [(sequence, self._work(sequence, count)) for sequence, count in chosen]

    def _shares(self) -> dict[tuple[str, int], int]:
        """Return how many rows each running sequence gets."""
        rows = {s.name: 1 for s in self.running if s.num_left == 1}
        reading = [s for s in self.running if s.num_left > 1]
        budget = self.config.max_batch_tokens - len(rows)
        if reading:
            # Who needs least comes first; among equals the remainder goes round.
            turn = self.stats.steps % len(reading)
            order = sorted(reading[turn:] + reading[:turn], key=lambda s: s.num_left)
            for n, sequence in enumerate(order):
                share = -(-budget // (len(order) - n))
                rows[sequence.name] = min(sequence.num_left, share)
                budget -= rows[sequence.name]
        return rows

    def _admit(self) -> None:
        while self.waiting and self.free_slots:
            sequence = self.waiting[0]
            # To match a long prompt again costs its hash; more room is what could help.
            name, room = self._blocked
            if name == sequence.name and self._num_available() <= room:
                return
            match = None
            if self._may_hit(sequence):
                match = self.index.match(sequence.tokens, salt=sequence.salt)
            held = [] if match is None else match.blocks
            needed = self.num_blocks_for(sequence.num_held) - len(held)
            if needed > self._num_available():
                for block in held:
                    self.allocator.release(block)
                self._blocked = sequence.name, self._num_available()
                return
            self._start(sequence, match)
            self.waiting.popleft()
            self.running.append(sequence)
            self._blocked = (("", 0), 0)

    def _may_hit(self, sequence: Sequence) -> bool:
        # Rows of a hit have no logits; "full" has no row that it would not run.
        return self.config.prefill != "full" and not sequence.wants_prompt_results

    def _num_available(self) -> int:
        # Blocks come row by row, so what those that run were let in for is not to be given twice.
        promised = sum(
            max(0, self.num_blocks_for(other.num_held) - len(other.blocks))
            for other in self.running
        )
        return self.allocator.num_free + self.index.num_evictable - promised

    def _start(self, sequence: Sequence, match) -> None:
        """Give a sequence its slot, the blocks of its hit and the place where it begins."""
        is_given = sequence.hand_over is not None
        if match and self.tier is not None and self.config.prefix_cache and not is_given:
            self._load_more(sequence, match, self.tier)
        self._unpin(sequence)
        sequence.slot = self.free_slots.pop()
        sequence.blocks = [] if match is None else list(match.blocks)
        sequence.keys = [] if match is None else list(match.keys)
        sequence.num_found = len(sequence.keys)
        sequence.may_cache = self.config.prefix_cache
        sequence.root_key = self.index.root_key(sequence.salt)
        sequence.stored = len(sequence.blocks) * self.config.block_size
        self._take_over(sequence)
        saved, saved_tokens = self._saved_windows(match)
        if self._plan_start(sequence, saved_tokens) and saved is not None:
            windows = cast("Tensor", saved[1])
            self.pools.restore_windows(sequence.slot, sequence.num_computed, windows)
            self.stats.restored_windows += 1
        if not sequence.num_new:
            sequence.num_cached_tokens = min(sequence.stored, sequence.num_computed)
        self.stats.cached_tokens += sequence.stored
        self.stats.replayed_tokens += max(0, sequence.stored - sequence.num_computed)

    def _take_over(self, sequence: Sequence) -> None:
        """Write global KV that came from elsewhere behind the blocks of the hit.

        The blocks are the sequence's own; they are cached as its rows pass them.
        """
        given, sequence.hand_over = sequence.hand_over, None
        if given is None or given.num_tokens <= sequence.stored:
            return
        for number in range(len(sequence.blocks), self.num_blocks_for(given.num_tokens)):
            if not self.allocator.num_free and not self.index.evict(1):
                return  # what it was admitted with is gone; whole blocks so far are as good
            block = self.allocator.allocate()
            self.pools.forget_block(block)
            given.write_block(self.pools, number, block)
            sequence.blocks.append(block)
            before, sequence.stored = (
                sequence.stored,
                min(given.num_tokens, (number + 1) * self.config.block_size),
            )
            self.stats.handed_tokens += sequence.stored - before
        given.write_open(self.pools, sequence.slot)

    def _saved_windows(self, match: Match | None):
        """Return the longest saved windows as (number of blocks, rows), and their tokens."""
        if match is None or self.config.prefill != "exact":
            return None, 0
        saved = self.windows.longest(match.keys)
        return saved, 0 if saved is None else saved[0] * self.config.block_size

    def _load_more(self, sequence: Sequence, match: Match, tier: Tier) -> None:
        """Extend a match by blocks of the tier, if that is worth it.

        The blocks come out of what the sequence was admitted with. What the tier cannot give after
        all ends the chain; nothing is lost but the hit.
        """
        size, tokens = self.config.block_size, sequence.tokens
        keys: list[bytes] = []
        parent = match.parent_key
        for n in range(len(match.blocks), (len(tokens) - 1) // size):
            parent = block_key(parent, tokens[n * size : (n + 1) * size])
            keys.append(parent)
        found = tier.lookup(keys, tenant=sequence.salt) if keys else 0
        count = self._num_worth_loading(len(tokens), match.keys, keys[:found])
        self.stats.unloaded_tokens += (found - count) * size
        for key in keys[:count]:
            before = match.keys[-1] if match.keys else b""
            groups = tier.load(key, tenant=sequence.salt, parent=before)
            if groups is None or not (self.allocator.num_free or self.index.evict(1)):
                return
            n = len(match.blocks)
            block = self.allocator.allocate()
            self.pools.forget_block(block)
            try:
                write_block(self.pools, block, groups)
            except ValueError:
                self.allocator.release(block)
                self.stats.tier_errors += 1
                logger.exception("the cache tier gave a block of another layout")
                return
            part = tokens[n * size : (n + 1) * size]
            inserted = self.index.insert(match.parent_key, part, block)
            if inserted is None or inserted.key != key or inserted.block != block:
                self.allocator.release(block)
                return
            match.blocks.append(block)
            match.keys.append(key)
            self.stats.loaded_tokens += size

    def _num_worth_loading(self, length: int, held: list[bytes], found: list[bytes]) -> int:
        """Return how many of the `found` blocks behind the `held` ones a prompt should load.

        Loading b blocks moves the first row by g(b) and costs load_cost * b * block_size rows, as
        the setting says. The best b is chosen of all that were found and those that end with saved
        windows; nothing is loaded for less than a block of rows.
        """
        if not found:
            return 0
        size, first, keys = self.config.block_size, len(held), [*held, *found]
        ends: list[int] = []
        if self.config.prefill == "exact":
            ends = [n for n, key in enumerate(keys, start=1) if key in self.windows]

        def row(num_blocks: int) -> int:
            saved = max((n for n in ends if n <= num_blocks), default=0)
            return self._first_row(length, num_blocks * size, saved * size)

        def gain(num_blocks: int) -> float:
            cost = self.config.load_cost * (num_blocks - first) * size
            return row(num_blocks) - row(first) - cost

        best = max((*(n for n in ends if n > first), len(keys)), key=gain)
        is_worth_it = gain(best) > 0 and row(best) - row(first) >= size
        return best - first if is_worth_it else 0

    def _first_row(self, length: int, stored: int, saved: int) -> int:
        """Return the row that a prompt of `length` starts at, with `stored` tokens of global KV.

        saved  length of the longest prefix whose windows are at hand; 0: none
        """
        if self.config.prefill == "full":
            return 0
        if self.config.prefill == "bounded":
            start = max(0, stored - self.bounded_rows)
        else:
            start = max(0, min(stored, self._decoder_rows(length)) - self.encoder_tail)
        start -= start % self.pools.layout.ratio_multiple
        return saved if saved > 0 and start <= saved else start

    def _decoder_rows(self, length: int) -> int:
        """Return the first row that the decoder reads for an exact start."""
        return max(0, self._last_block_end(length) - self.decoder_tail)

    def _last_block_end(self, length: int) -> int:
        # Of a prompt of whole blocks a later request can match all blocks but the last.
        return (length - 1) // self.config.block_size * self.config.block_size

    def _plan_start(self, sequence: Sequence, saved: int) -> bool:
        """Return whether to restore saved windows, having decided where a sequence begins.

        saved  length of the longest prefix of the hit whose windows are at hand; 0: none

        exact    The decoder needs its last rows up to the last block end (so that windows there
                 can be saved), the encoder the receptive field before the first row whose output
                 counts: the first without global KV or the first that the decoder reads. Saved
                 windows replace that replay where they begin later.
        bounded  The last window's rows of the hit run again, and the decoder on the last window
                 of the prompt (or on `replay_windows` of each): A01.
        full     From the start, all layers.

        With `trim_rows` a layer runs on what is needed of these rows alone (`live_rows.py`), so
        windows are whole from there on that the plan aims at, and not before.
        """
        length, stored, multiple = (
            len(sequence.tokens),
            sequence.stored,
            self.pools.layout.ratio_multiple,
        )
        sequence.exact_from = 0
        is_read_whole = self.config.prefill == "full" or sequence.wants_prompt_results
        if is_read_whole:
            start = decoder = 0
        elif self.config.prefill == "bounded":
            start = max(0, stored - self.bounded_rows)
            decoder = max(0, length - self.bounded_rows)
        else:
            decoder = self._decoder_rows(length)
            start = max(0, min(stored, decoder) - self.encoder_tail)
        start -= start % multiple
        floor = start
        decoder_floor = decoder = max(decoder, start)
        is_restored = saved > 0 and saved >= start
        if is_restored:
            start, floor = saved, max(0, saved - self.window + 1)
            if decoder <= saved:
                decoder, decoder_floor = saved, floor
            # No window lies farther back than the restored one.
            sequence.exact_from = saved
        if self.config.prefill == "exact":
            if floor and not is_restored:
                sequence.exact_from = start + self.encoder_tail
            if decoder_floor and not (is_restored and decoder == saved):
                sequence.exact_from = max(sequence.exact_from, decoder + self.decoder_tail)
        sequence.encoder_whole = sequence.decoder_whole = None
        if self.config.trim_rows and not is_read_whole:
            # Only exact windows are saved at a block end; bounded ones serve the last token alone.
            is_exact = self.config.prefill == "exact"
            end = self._last_block_end(length) if is_exact else length - 1
            # W - 1 rows per layer, one less than `decoder_tail`, whose last query nobody asks.
            sequence.encoder_whole = min(stored, max(decoder, end - self.decoder_tail + 1))
            sequence.decoder_whole = end
            sequence.exact_from = max(sequence.encoder_whole, end)
        sequence.num_computed, sequence.encoder_floor = start, floor
        sequence.decoder_start, sequence.decoder_floor = decoder, decoder_floor
        return is_restored

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Make sure of the blocks for `count` more rows; False if the sequence was preempted."""
        needed = self.num_blocks_for(max(sequence.num_computed + count, sequence.stored))
        while len(sequence.blocks) < needed:
            if not self.allocator.num_free and not self.index.evict(1):
                youngest = max(self.running, key=lambda other: other.arrival)
                self.preempt(youngest)
                if youngest is sequence:
                    return False
                continue
            sequence.blocks.append(self.allocator.allocate())
            # Here and not where blocks are freed: an eviction frees blocks, too.
            self.pools.forget_block(sequence.blocks[-1])
        return True

    def _work(self, sequence: Sequence, count: int) -> Work:
        stop = sequence.num_computed + count
        span = RowSpan(
            ids=sequence.tokens,
            slot=sequence.slot,
            blocks=sequence.blocks,
            start=sequence.num_computed,
            stop=stop,
            stored=sequence.stored,
            window_floor=sequence.encoder_floor,
        )
        first_logits = len(sequence.tokens) - 1
        if sequence.wants_prompt_results:
            first_logits = 0
        return Work(
            span=span,
            decoder_start=sequence.decoder_start,
            decoder_floor=sequence.decoder_floor,
            first_logits=first_logits,
            encoder_whole=sequence.encoder_whole,
            decoder_whole=sequence.decoder_whole,
        )

    def computed(self, sequence: Sequence, stop: int) -> None:
        """Count rows up to `stop`, and cache the blocks that they filled."""
        sequence.num_computed = stop
        size = self.config.block_size
        while sequence.may_cache and (len(sequence.keys) + 1) * size <= stop:
            n = len(sequence.keys)
            parent = sequence.keys[-1] if n else sequence.root_key
            part = sequence.tokens[n * size : (n + 1) * size]
            inserted = self.index.insert(parent, part, sequence.blocks[n])
            if inserted is None:
                sequence.may_cache = False
                return
            sequence.keys.append(inserted.key)
            if inserted.block != sequence.blocks[n]:
                # Somebody made the same block first: one copy is enough.
                self.allocator.retain(inserted.block)
                self.allocator.release(sequence.blocks[n])
                sequence.blocks[n] = inserted.block
            elif self.tier is not None:
                self._offer(self.tier, sequence, n, inserted.key)

    def _offer(self, tier: Tier, sequence: Sequence, n: int, key: bytes) -> None:
        """Give the tier a copy of block `n` of a sequence.

        Nothing is raised: the rings already hold the step's rows, and a sequence whose rows were
        not counted would later save windows that are not its own.
        """
        size = self.config.block_size
        try:
            tier.store(
                key,
                read_block(self.pools, sequence.blocks[n]),
                tokens=(n * size, (n + 1) * size),
                tenant=sequence.salt,
                parent=sequence.keys[n - 1] if n else b"",
            )
        except Exception:
            self.stats.tier_errors += 1
            logger.exception("the cache tier did not take a block; serving goes on without it")

    def _offer_again(self, sequence: Sequence) -> None:
        """Offer blocks of the hit that the tier once turned away: a hole ends every later hit.

        Blocks that the sequence made itself were offered as they were filled, and may be on their
        way still. A tier that never turned a block away is not asked about any.
        """
        found = sequence.keys[: sequence.num_found]
        if self.tier is None or not found or not self.tier.stats().rejected:
            return
        here = self.tier.lookup(found, tenant=sequence.salt)
        for n in range(here, min(len(found), here + _MOST_OFFERED_AGAIN)):
            self._offer(self.tier, sequence, n, found[n])

    def save_windows(self, sequence: Sequence) -> None:
        """Keep the windows at the last block end with that block, if they are exact and wanted.

        Where the tokens end with a block, those one block earlier as well: the ring still has them,
        and the same tokens sent again match up to there.
        """
        if self.config.prefill != "exact" or not self.config.snapshot_bytes:
            return
        size, length = self.config.block_size, sequence.num_computed
        for end in {length // size * size, (length - 1) // size * size}:
            if not sequence.exact_from <= end <= len(sequence.keys) * size or end < size:
                continue
            key = sequence.keys[end // size - 1]
            if not self.windows.renew(key):
                start = max(0, end - self.window + 1)
                saved = self.pools.save_windows(sequence.slot, start, end)
                self.windows.put(key, saved, saved.numel())

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's memory; it goes back to its place in the queue."""
        self.save_windows(sequence)
        if self.tier is not None:
            # It comes back, so its blocks are not to make room for others until then.
            for key in sequence.keys:
                if self.tier.pin(key, tenant=sequence.salt):
                    sequence.pinned.append(key)
        self._leave(sequence)
        sequence.num_preemptions += 1
        self.stats.preemptions += 1
        self.queue(sequence)

    def queue(self, sequence: Sequence) -> None:
        """Let a sequence wait in order of arrival, whoever is preempted or ready first."""
        at = sum(other.arrival < sequence.arrival for other in self.waiting)
        self.waiting.insert(at, sequence)

    def finish(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds, running or waiting."""
        if sequence.is_running:
            self.save_windows(sequence)
            self._offer_again(sequence)
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._unpin(sequence)

    def drop(self, sequence: Sequence) -> None:
        """As `finish`, without keeping windows: its rows may be wrong."""
        sequence.exact_from = 1 << 62
        self.finish(sequence)

    def _unpin(self, sequence: Sequence) -> None:
        """Take back the pins of a preemption."""
        if self.tier is not None:
            for key in sequence.pinned:
                self.tier.unpin(key, tenant=sequence.salt)
        sequence.pinned = []

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if self.tier is not None:
            self.tier.touch(sequence.keys, tenant=sequence.salt)
        for block in reversed(sequence.blocks):
            self.allocator.release(block)
        self.pools.forget_slot(sequence.slot)
        self.free_slots.append(sequence.slot)
        sequence.slot, sequence.blocks, sequence.keys = -1, [], []
        sequence.num_computed = sequence.stored = 0
