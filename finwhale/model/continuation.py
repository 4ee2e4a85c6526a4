"""One call on top of what a sequence already has: earlier rows in, new rows staged, then commit.

The layers ask for the rows they need through this object and never see the cache itself. Nothing
of the sequence changes before `commit`, so a failed pass leaves the state as it was. Rows before
the stored entries' end (a replay) make windows and open groups and never write global KV.
Source: spec/backbone.md section 3 (replay), kv-cache.md section 1.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from finwhale.cache.rows import RecentRows
from finwhale.cache.sequence_state import SequenceState, StateError
from finwhale.config import LayerSpec
from finwhale.model.packing import Groups


class PagedRows(Protocol):
    """Rows of many sequences on top of packed pools, as the layers see them (an engine's pass).

    Layers hand over values before rounding: what is stored and what is read back is the pools'
    business. Rows of all sequences lie one after the other in one [1, T] row.
    """

    def groups(self, spec: LayerSpec, positions: Tensor) -> Groups:
        """Return the groups that these rows complete, as `Continuation.groups`."""

    def new_token_rows(self, spec: LayerSpec, x: Tensor) -> Tensor:
        """Return the rows of x [1, T, C] that entries are made from, as `Continuation`."""

    def complete_groups(self, spec: LayerSpec, rows: Tensor) -> Tensor:
        """Return the rows of every group that is complete now, as `Continuation`."""

    def append(self, layer: int, entries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Pack and store new entries and index keys [1, M, ...]."""

    def attend(self, spec: LayerSpec, q: Tensor, window_kv: Tensor, sink: Tensor) -> Tensor:
        """Return the attention core's output for queries [1, T', H, D] (`ForwardState.kept`).

        window_kv  [1, T, D] raw window rows of all tokens
        """

    def select(self, spec: LayerSpec, q: Tensor, weights: Tensor) -> Tensor:
        """Return pool rows of the selected entries, [1, T', K] int64, -1 empty."""

    def engram_positions(self) -> tuple[Tensor, Tensor]:
        """Return positions of ids behind their histories [1, T'], and which are own [T]."""


@dataclass(kw_only=True, slots=True)
class Continuation:
    """Rows [start, stop) of one sequence, on top of `past`.

    window_start  first position that a window of these rows may see
    keep_rows     window rows worth keeping at the end: rows before a trimmed start are inexact
    """

    past: SequenceState
    start: int
    stop: int
    window_start: int
    keep_rows: int | None = None
    _windows: dict[int, RecentRows] = field(default_factory=dict)
    _open_groups: dict[int, RecentRows] = field(default_factory=dict)
    _written: set[int] = field(default_factory=set)

    def positions(self, device=None) -> Tensor:
        """Return [1, T] absolute positions."""
        return torch.arange(self.start, self.stop, device=device).unsqueeze(0)

    def groups(self, spec: LayerSpec, positions: Tensor) -> Groups:
        """Return the groups that these rows complete for the KV owner of `spec`.

        `visible` counts all entries ever made. Owners of one ratio may differ here: an open prefill
        has the encoder's entries and not yet the decoder's.
        """
        ratio = spec.ratio
        first, last = self._stored_entries(spec), self.stop // ratio
        entries = torch.arange(first, max(first, last), device=positions.device)
        return Groups(
            tokens=entries.new_zeros(1, 0, ratio),
            positions=(entries * ratio).unsqueeze(0),
            first=torch.zeros_like(positions),
            visible=(positions + 1) // ratio,
        )

    def _stored_entries(self, spec: LayerSpec) -> int:
        if spec.kv_owner is None:
            raise StateError(f"layer {spec.layer_id}: a window layer has no entries")
        return self.past.entries[spec.kv_owner].length

    def window_rows(self, layer: int, rows: Tensor) -> Tensor:
        """Return the earlier rows that a window can reach, then `rows` [1, T, D]."""
        kept = self.past.window[layer]
        earlier = None
        if kept.rows is not None and kept.stop == self.start:
            earlier = kept.rows
        joined = rows[0] if earlier is None else torch.cat((earlier, rows[0]))
        self._windows[layer] = kept.replaced(joined, self.stop)
        reach = self.past.config.sliding_window - 1
        before = joined.shape[0] - rows.shape[1]
        return joined[max(0, before - reach) :].unsqueeze(0)

    def complete_groups(self, spec: LayerSpec, rows: Tensor) -> Tensor:
        """Return the rows of every group that is complete now and not yet stored.

        rows     [1, T, 2, D] fp32 content and gate of the tokens that `new_token_rows` gave
        returns  [1, M, r, 2, D]
        """
        kept = self.past.open_groups[spec.layer_id]
        needed = self._stored_entries(spec) * spec.ratio
        own_start = self.start
        joined = rows[0]
        if kept.rows is not None and kept.stop == self.start:
            joined = torch.cat((kept.rows, joined))
            own_start = kept.start
        if own_start > needed and self.stop > needed:
            raise StateError(
                f"layer {spec.layer_id}: rows {needed} to {own_start - 1} of an open group are gone"
            )
        self._open_groups[spec.layer_id] = kept.replaced(joined, self.stop)
        count = max(0, self.stop // spec.ratio - needed // spec.ratio)
        first = max(0, needed - own_start)
        return joined[first : first + count * spec.ratio].unflatten(0, (count, spec.ratio))[None]

    def new_token_rows(self, spec: LayerSpec, x: Tensor) -> Tensor:
        """Return the rows of x [1, T, C] that entries are made from, at ratio 1 those not stored.

        At ratio 2 all: a group that a prefix leaves open is made again from its first token.
        """
        if spec.ratio > 1:
            return x
        stored = self._stored_entries(spec)
        return x[:, max(0, min(stored - self.start, x.shape[1])) :]

    def append(self, layer: int, entries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Stage new entries and index keys [1, M, ...]; return all of them."""
        self._written.add(layer)
        return (
            self.past.entries[layer].stage(entries[0]).unsqueeze(0),
            self.past.index_keys[layer].stage(keys[0]).unsqueeze(0),
        )

    def commit_layers(self) -> None:
        """Make the staged windows, open groups and entries part of the sequence."""
        for layer, kept in self._windows.items():
            if self.keep_rows is not None and kept.rows is not None:
                kept.rows = kept.rows[max(0, kept.rows.shape[0] - self.keep_rows) :]
            self.past.window[layer] = kept
        self.past.open_groups.update(self._open_groups)
        for layer in self._written:
            self.past.entries[layer].commit()
            self.past.index_keys[layer].commit()
