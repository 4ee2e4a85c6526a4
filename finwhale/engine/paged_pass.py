"""One pass of the layers over rows of many sequences, on top of packed pools.

Rows of all sequences lie one after the other. Everything that depends on where a row belongs (its
window, the entries it sees, the groups it completes) is turned into index arrays once per pass, so
the layers and kernels know nothing of sequences. Entries are packed into their blocks at once:
nobody sees a row before its sequence counts it. Rings and open groups are written by `commit`, so a
failed pass leaves them as they were. Rows that nothing above a layer reads enter it for their
window row alone (`live_rows.py`). A newcomer's mistake: writing a replayed row's entry; entries
below `stored` exist, may be shared and are never written.
Source: spec/backbone.md sections 3 to 5, spec/kv-cache.md sections 1.1 and 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from finwhale.cache.paged_pools import PagedPools
from finwhale.cache.paged_reads import all_finite_rows
from finwhale.config import LayerSpec, PoolUse
from finwhale.model.packing import Groups
from finwhale.ops import Ops
from finwhale.ops.index import pool_mask

# Bytes of one slice's scores; the selection makes several temporaries of that size.
_SCORE_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSpan:
    """Rows [start, stop) of one sequence in one pass.

    ids           its token ids, at least `stop` of them
    slot          where its rings and open groups are
    blocks        its block table, long enough for `stop` tokens
    stored        tokens whose global KV exists already and is not written again
    window_floor  first position whose window row exists
    """

    ids: Sequence[int]
    slot: int
    blocks: Sequence[int]
    start: int
    stop: int
    stored: int = 0
    window_floor: int = 0

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class _NewEntries(NamedTuple):
    """Entries that a pass makes at one ratio.

    rows       [M] index of the group's last token among the pass's rows
    positions  [M] position of its first token
    tokens     [M, r] its tokens: open-group row, or num_open + index among the rows not stored
    target     [M] pool row
    """

    rows: Tensor
    positions: Tensor
    tokens: Tensor
    target: Tensor


def last_rows(counts: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return the indices of the last kept[n] of counts[n] rows of every span n, spans in order.

    Raises ValueError for rows that are gone.
    """
    if (kept > counts).any():
        raise ValueError(f"rows: got {kept.tolist()}, expected at most {counts.tolist()} alive")
    ends = np.cumsum(counts)
    before = np.cumsum(kept) - kept
    return np.repeat(ends - kept - before, kept) + np.arange(int(kept.sum()))


class PagedPass:
    """What some layers of one half see (`finwhale.model.continuation.PagedRows`).

    kept       [T'] the rows whose output is read; None: all T. Queries are theirs alone.
    positions  [1, T] of all rows
    """

    def __init__(
        self,
        pools: PagedPools,
        spans: Sequence[RowSpan],
        ops: Ops,
        reads,
        kept_starts: Sequence[int] | None = None,
    ):
        """Make the index arrays of a pass; `reads` has `attention` and `index_scores`.

        kept_starts  position of the first row of each span whose output is read; None: of all
        """
        self.pools, self.spans, self.ops, self.reads = pools, tuple(spans), ops, reads
        self.config, self.layout = pools.layout.config, pools.layout
        counts = np.array([span.num_rows for span in spans], dtype=np.int64)
        self.counts = self.kept_counts = counts
        self.first_row = np.cumsum(counts) - counts
        self.num_rows = int(counts.sum())
        self._sequence = np.repeat(np.arange(len(spans)), counts)
        starts = np.array([span.start for span in spans], dtype=np.int64)
        own = np.arange(self.num_rows) - self.first_row[self._sequence]
        self._positions = starts[self._sequence] + own
        self.positions = torch.from_numpy(self._positions).unsqueeze(0)
        self._slots = np.array([span.slot for span in spans], dtype=np.int64)
        width = max((len(span.blocks) for span in spans), default=0)
        tables = np.full((len(spans), width), -1, dtype=np.int64)
        for n, span in enumerate(spans):
            tables[n, : len(span.blocks)] = span.blocks
        self._tables, self.tables = tables, torch.from_numpy(tables)
        self.kept: Tensor | None = None
        queries = slice(None)
        if kept_starts is not None:
            stops = np.array([span.stop for span in spans], dtype=np.int64)
            self.kept_counts = stops - np.array(kept_starts, dtype=np.int64)
            queries = last_rows(counts, self.kept_counts)
            self.kept = torch.from_numpy(queries)
        self._of_query, self._at_query = self._sequence[queries], self._positions[queries]
        self.sequence = torch.from_numpy(self._of_query)
        self._window_index = self._window_rows()
        self._no_entries = torch.zeros(len(self._at_query), 0, dtype=torch.int64)
        stored = np.array([span.stored for span in spans], dtype=np.int64)
        self._is_new = self._positions >= stored[self._sequence]
        self._new: dict[int, _NewEntries] = {}
        self._topk: dict[int, Tensor] = {}
        self._pool_blocks = torch.zeros(len(self._at_query), 0, dtype=torch.int64)
        self._fresh_windows: dict[int, Tensor] = {}
        self._open_rows: dict[int, Tensor] = {}
        self.finite_rows = torch.ones(self.num_rows, dtype=torch.bool)

    def take_selections(self, below: PagedPass) -> None:
        """Go on with what the layers of `below` selected; its queries end with those of here."""
        rows = torch.from_numpy(last_rows(below.kept_counts, self.kept_counts))
        self._topk = {layer: chosen[rows] for layer, chosen in below._topk.items()}
        self._pool_blocks = below._pool_blocks[rows]
        # A pass lives until its windows are written; what it selected is needed here alone.
        below._topk = {}

    def _window_rows(self) -> Tensor:
        """Return [T', W]: rows of the ring, or num_ring_rows + row of this pass; -1 not visible."""
        window, ring = self.config.sliding_window, self.layout.ring_rows
        floors = np.array([span.window_floor for span in self.spans], dtype=np.int64)
        starts = np.array([span.start for span in self.spans], dtype=np.int64)
        at = self._at_query[:, None] + np.arange(1 - window, 1)  # [T', W]
        which = self._of_query[:, None]
        fresh = self.pools.num_slots * ring + self.first_row[which] + at - starts[which]
        kept = self._slots[which] * ring + at % ring
        rows = np.where(at >= starts[which], fresh, kept)
        return torch.from_numpy(np.where(at >= floors[which], rows, -1))

    def _new_entries(self, spec: LayerSpec) -> _NewEntries:
        if spec.ratio not in self._new:
            ratio, size = spec.ratio, self.layout.entries_per_block(spec)
            rows = np.flatnonzero(((self._positions + 1) % ratio == 0) & self._is_new)
            which = self._sequence[rows]
            entry = self._positions[rows] // ratio
            back = np.arange(1 - ratio, 1)
            position = self._positions[rows][:, None] + back  # [M, r]
            # A group that straddles `stored` began elsewhere; its first rows came along.
            fresh = [max(span.start, span.stored) for span in self.spans]
            starts = np.array(fresh, dtype=np.int64)
            num_open = self.pools.num_slots * (ratio - 1)
            kept = self._slots[which][:, None] * (ratio - 1) + position % ratio
            own = (np.cumsum(self._is_new) - 1)[rows][:, None] + back
            tokens = np.where(position >= starts[which][:, None], num_open + own, kept)
            target = self._tables[which, entry // size] * size + entry % size
            arrays = rows, entry * ratio, tokens, target
            self._new[ratio] = _NewEntries(*map(torch.from_numpy, arrays))
        return self._new[spec.ratio]

    def groups(self, spec: LayerSpec, positions: Tensor) -> Groups:
        """Return the groups that these rows complete; `visible` counts all entries ever made."""
        new = self._new_entries(spec)
        return Groups(
            tokens=new.tokens.unsqueeze(0),
            positions=new.positions.unsqueeze(0),
            first=torch.zeros_like(positions),
            visible=(positions + 1) // spec.ratio,
        )

    def complete_groups(self, spec: LayerSpec, rows: Tensor) -> Tensor:
        """Return the rows of every group that is complete now: [1, M, r, 2, D].

        rows  [1, .., 2, D] of the tokens that `new_token_rows` gave

        Rows of the groups that stay open are kept for `commit`.
        """
        self._open_rows[spec.layer_id] = rows[0]
        joined = torch.cat((self.pools.open[spec.layer_id], rows[0]))
        return joined[self._new_entries(spec).tokens].unsqueeze(0)

    def new_token_rows(self, spec: LayerSpec, x: Tensor) -> Tensor:
        """Return the rows of x [1, T, C] whose entries are not stored yet."""
        return x if self._is_new.all() else x[:, torch.from_numpy(np.flatnonzero(self._is_new))]

    def append(self, layer: int, entries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Pack and store new entries [1, M, D] and index keys [1, M, DI] of an owner."""
        new = self._new_entries(self.layout.specs[layer])
        if new.target.numel():
            storage = self.layout.storage
            self._note_finite(new.rows, entries[0], keys[0])
            self.pools.main[layer].index_copy_(
                0, new.target, self.reads.pack_entry(entries[0], storage)
            )
            self.pools.index_k[layer].index_copy_(
                0, new.target, self.reads.pack_index(keys[0], storage)
            )
        return entries, keys

    def _note_finite(self, rows: Tensor | None, *values: Tensor) -> None:
        """Codes cannot hold a NaN: remember which rows of this pass had one."""
        finite = all_finite_rows(values[0])
        for value in values[1:]:
            finite &= all_finite_rows(value)
        if rows is None:
            self.finite_rows &= finite
        elif not finite.all():
            self.finite_rows[rows[~finite]] = False

    def attend(self, spec: LayerSpec, q: Tensor, window_kv: Tensor, sink: Tensor) -> Tensor:
        """Return the attention core's output [1, T', H, D]; keeps the packed window rows.

        q [1, T', H, D], window_kv [1, T, D]
        """
        self._note_finite(None, window_kv[0])
        fresh = self.reads.pack_window(window_kv[0], self.layout.storage)
        self._fresh_windows[spec.layer_id] = fresh
        main, chosen = None, self._no_entries
        if spec.kv_owner is not None and spec.topk_owner is not None:
            main, chosen = self.pools.main[spec.kv_owner], self._topk[spec.topk_owner]
        out = self.reads.attention(
            q[0],
            fresh,
            self.pools.window[spec.layer_id],
            self._window_index,
            main,
            chosen,
            sink,
            self.layout.storage,
        )
        return out.unsqueeze(0)

    def select(self, spec: LayerSpec, q: Tensor, weights: Tensor) -> Tensor:
        """Return pool rows of the selected entries, [1, T', K] int64, ascending, -1 at the end.

        q [1, T', HI, DI] rounded index queries, weights [1, T', HI]
        """
        c, size = self.config, self.layout.entries_per_block(spec)
        keys = self.pools.index_k[spec.layer_id if spec.kv_owner is None else spec.kv_owner]
        visible = torch.from_numpy((self._at_query + 1) // spec.ratio)  # [T']
        longest = int(visible.max()) if visible.numel() else 0
        pool, in_pool = self._pool_blocks, c.candidate_topk_blocks * c.candidate_block_size
        searches = spec.pool is PoolUse.SEARCHES
        # While every entry fits the pool, tiles of entries serve all rows of a sequence at once.
        lists = searches and self.reads.listed_scores is not None and longest > in_pool
        step = max(1, _SCORE_BYTES // (4 * max(1, min(longest, in_pool) if lists else longest)))
        chosen, pools = [], []
        for start in range(0, len(visible), step):
            rows = slice(start, min(start + step, len(visible)))
            if lists:
                chosen.append(self._search(q[0, rows], weights[0, rows], keys, rows, visible, size))
                continue
            scores = self.reads.index_scores(
                q[0, rows],
                weights[0, rows],
                keys,
                self.tables,
                self.sequence[rows],
                visible[rows],
                size,
                self.layout.storage,
                longest,
            )
            if spec.pool is PoolUse.BUILDS:
                pools.append(
                    self.ops.select_pool_blocks(
                        scores, visible[rows], c.candidate_topk_blocks, c.candidate_block_size
                    )
                )
            elif searches:
                inside = pool_mask(pool[rows], longest, c.candidate_block_size)
                scores = scores.masked_fill(~inside, -torch.inf)
            chosen.append(self.ops.select_topk(scores, c.index_topk))
        if pools:
            self._pool_blocks = torch.cat(pools)
        entry = torch.cat(chosen) if chosen else visible.new_empty(0, 0)
        flat = self._pool_rows(entry, size, slice(None))
        self._topk[spec.layer_id] = flat
        return flat.unsqueeze(0)

    def _search(self, q, weights, keys, rows: slice, visible: Tensor, size: int) -> Tensor:
        """Return the selected entries [T, K] of the candidate pool, scoring nothing else."""
        block = self.config.candidate_block_size
        first = self._pool_blocks[rows].unsqueeze(-1) * block  # [T, P, 1]
        entries = (first + torch.arange(block)).flatten(1)  # ascending, as the blocks are
        hidden = (first < 0).expand(-1, -1, block).flatten(1) | (entries >= visible[rows, None])
        entries = torch.where(hidden, -1, entries)
        listed = self._pool_rows(entries, size, rows)
        assert self.reads.listed_scores is not None  # or `select` would not have come here
        scores = self.reads.listed_scores(q, weights, keys, listed, self.layout.storage)
        slots = self.ops.select_topk(scores, self.config.index_topk)
        return torch.where(slots < 0, -1, entries.gather(1, slots.clamp_min(0)))

    def _pool_rows(self, entry: Tensor, size: int, rows: slice) -> Tensor:
        """Return the pool row of entries [T, K] of each row's own sequence; -1 stays."""
        safe = entry.clamp_min(0)
        block = self.tables[self.sequence[rows].unsqueeze(-1), safe // size]
        return torch.where(entry < 0, -1, block * size + safe % size)

    def engram_positions(self) -> tuple[Tensor, Tensor]:
        """Return positions of the ids of `ids_with_history` [1, T'], and which are own [T]."""
        return self._id_positions, self.own_ids

    def ids_with_history(self, reach: int) -> Tensor:
        """Return token ids [1, T'] of every span behind up to `reach` earlier ones.

        Also fixes what `engram_positions` will say.
        """
        ids, positions, own, total = [], [], [], 0
        for span in self.spans:
            first = max(0, span.start - reach)
            ids += span.ids[first : span.stop]
            positions.append(np.arange(first, span.stop))
            own.append(total + np.arange(span.start - first, span.stop - first))
            total += span.stop - first
        empty = np.zeros(0, dtype=np.int64)
        self._id_positions = torch.from_numpy(np.concatenate([empty, *positions])).unsqueeze(0)
        self.own_ids = torch.from_numpy(np.concatenate([empty, *own]))
        return torch.tensor(ids, dtype=torch.int64).unsqueeze(0)

    def commit(self, spans: Sequence[bool]) -> None:
        """Write rings and open groups of the sequences for which `spans` is true."""
        ring = self.layout.ring_rows
        source, target = [], []
        for n, span in enumerate(self.spans):
            if spans[n]:
                at = np.arange(max(span.start, span.stop - ring), span.stop)
                source.append(self.first_row[n] + at - span.start)
                target.append(span.slot * ring + at % ring)
        if not source:
            return
        rows, slots = (torch.from_numpy(np.concatenate(x)) for x in (source, target))
        for layer, fresh in self._fresh_windows.items():
            self.pools.window[layer].index_copy_(0, slots, fresh[rows])
        for layer, values in self._open_rows.items():
            self._commit_open(layer, values, spans)

    def _commit_open(self, layer: int, values: Tensor, spans: Sequence[bool]) -> None:
        ratio = self.layout.specs[layer].ratio
        source, target = [], []
        own = np.cumsum(self._is_new) - 1  # row of `values`
        for n, span in enumerate(self.spans):
            if spans[n]:
                # Below `stored` the group is complete, or its rows are there already.
                first = max(span.start, span.stored, span.stop - span.stop % ratio)
                for at in range(first, span.stop):
                    source.append(int(own[self.first_row[n] + at - span.start]))
                    target.append(span.slot * (ratio - 1) + at % ratio)
        if source:
            self.pools.open[layer][target] = values[source]
