"""Where each row of a decode step stands: what it sees, where its rows go, how it is turned.

`Places` is what a step reads. `PositionTables` makes it on the device from one position per row,
with look-ups in tables made once, so a captured step needs no number from the host and rows may
stand anywhere: at odd and even positions, at different lengths, in any slot. A row without a
sequence stands nowhere: it sees nothing and writes nothing. The easy mistake: the number of a row
in the batch is not its slot; rings, open groups and block tables belong to slots.
Source: spec/backbone.md sections 4.3, 4.5 and 5; spec/kv-cache.md section 1.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from finwhale.cache.paged_pools import PagedPools
from finwhale.config.layers import RopeKind
from finwhale.ops.rope import rope_frequencies, rope_rotation

# A write offset that stays negative whatever is added to it: rows below zero are not written.
_NO_ROW = -(1 << 62)


class StepPools(Protocol):
    """Packed rows by layer id, as `finwhale.cache.paged_pools.PagedPools` has them."""

    main: dict[int, Tensor]
    index_k: dict[int, Tensor]
    window: dict[int, Tensor]
    open: dict[int, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryPlaces:
    """What a step needs to read and write the entries of one owner.

    tables             [T, NB] int64 block ids of each row's sequence
    entries_per_block  of this owner; capacity is that of NB blocks
    visible            [T] int64 entries that a row sees, its own among them
    closes             [T] bool whether this token completes a group
    rows               [T] int64 where the new entry goes; -1 or less: there is none
    rotation           [2, T, R/2] at the first token of the group
    pool_lengths       [T] int64 blocks of the candidate pool among the visible ones
    pool_columns       [T] int64 columns of a row in the pool
    """

    tables: Tensor
    entries_per_block: int
    capacity: int
    visible: Tensor
    closes: Tensor
    rows: Tensor
    rotation: Tensor
    pool_lengths: Tensor
    pool_columns: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """What a step needs to know of T rows.

    slots         [T] int64 row of the open groups
    window_index  [T, W] int64 rows of a ring that the window sees; -1 none
    ring_rows     [T] int64 where the window row goes; -1 or less: nowhere
    rotation      [2, T, R/2] at the token's own position
    entries       by owner
    """

    slots: Tensor
    window_index: Tensor
    ring_rows: Tensor
    rotation: dict[RopeKind, Tensor]
    entries: dict[int, EntryPlaces]


class PositionTables:
    """Makes `Places` from positions, on the device.

    Memory: about 900 bytes per token of `capacity`, once for all sequences.
    """

    def __init__(self, pools: PagedPools, capacity: int, device: torch.device):
        """Make the tables of positions 0 to capacity - 1; column 0 is a row without a sequence."""
        layout, c = pools.layout, pools.layout.config
        self.layout, self.window, self.capacity = layout, c.sliding_window, capacity
        self.ratios = sorted({spec.ratio for spec in layout.owners})
        position = torch.arange(-1, capacity)  # [capacity + 1]
        is_row = position >= 0
        columns = [position, torch.where(is_row, position % layout.ring_rows, _NO_ROW)]
        size, blocks = c.candidate_block_size, c.candidate_topk_blocks
        starts = {}
        for ratio in self.ratios:
            visible = (position + 1) // ratio
            closes = (position + 1) % ratio == 0
            per_block = layout.block_size // ratio
            last = visible - 1
            has_entry = is_row & closes
            candidates = -(-visible // size)
            columns += [
                visible,
                # Where there is no row the group counts as closed: then nothing is kept.
                (closes | ~is_row).long(),
                torch.where(has_entry, last // per_block, 0),
                torch.where(has_entry, last % per_block, _NO_ROW),
                candidates,
                candidates.clamp_max(blocks) * size,
            ]
            starts[ratio] = position.clamp_min(0) // ratio * ratio
        self._columns = torch.stack(columns).to(device)  # [2 + 6 ratios, capacity + 1]
        kinds = {
            RopeKind.WINDOW: rope_frequencies(c.rope_theta, c.qk_rope_head_dim, None),
            RopeKind.COMPRESSED: rope_frequencies(
                c.compress_rope_theta, c.qk_rope_head_dim, c.rope_scaling
            ),
        }
        turns = [(kind, position.clamp_min(0)) for kind in kinds]
        turns += [(RopeKind.COMPRESSED, starts[ratio]) for ratio in self.ratios]
        # On the CPU, whose angles are those of the definition.
        self._rotations = torch.stack([rope_rotation(at, kinds[k]) for k, at in turns]).to(device)
        self._back = torch.arange(1 - self.window, 1, device=device)

    def places(self, at: Tensor, slots: Tensor, tables: Tensor) -> Places:
        """Return the places of rows.

        at      [T] int64 position plus one; 0 for a row without a sequence
        slots   [T] int64; tables [T, NB] int64
        """
        columns = self._columns.index_select(1, at)  # [n, T]
        turns = self._rotations.index_select(2, at)  # [m, 2, T, R/2]
        ring = self.layout.ring_rows
        first = slots * ring
        seen = columns[0].unsqueeze(-1) + self._back  # [T, W] positions
        rows = seen.remainder(ring) + first.unsqueeze(-1)
        found: dict[int, EntryPlaces] = {}
        for n, ratio in enumerate(self.ratios):
            visible, closes, block, offset, lengths, width = columns[2 + 6 * n : 8 + 6 * n]
            per_block = self.layout.block_size // ratio
            of_block = tables.gather(1, block.unsqueeze(-1)).squeeze(-1)
            found[ratio] = EntryPlaces(
                tables=tables,
                entries_per_block=per_block,
                capacity=tables.shape[1] * per_block,
                visible=visible,
                closes=closes.bool(),
                rows=of_block * per_block + offset,
                rotation=turns[2 + n],
                pool_lengths=lengths,
                pool_columns=width,
            )
        return Places(
            slots=slots,
            window_index=rows.masked_fill_(seen < 0, -1),
            ring_rows=first + columns[1],
            rotation={RopeKind.WINDOW: turns[0], RopeKind.COMPRESSED: turns[1]},
            entries={spec.layer_id: found[spec.ratio] for spec in self.layout.owners},
        )
