"""Append-only rows that can be cut back: the storage of one stream of one sequence.

Two kinds. `GrowingRows` keeps every row (global KV); `RecentRows` keeps the last ones (windows,
open groups, token history). Both write behind their committed length first and count the rows
when the whole step has succeeded, so a failed forward pass leaves nothing behind.
"""

from __future__ import annotations

import torch
from torch import Tensor


class GrowingRows:
    """Rows [n, ...] in a buffer that doubles; `staged` rows are visible before they count."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self.length = 0
        self._staged = 0

    def stage(self, rows: Tensor) -> Tensor:
        """Write `rows` [m, ...] behind the committed ones and return all [length + m, ...]."""
        total = self.length + rows.shape[0]
        if self._buffer is None or total > self._buffer.shape[0]:
            size = max(64, total, 2 * self.length)
            grown = rows.new_full((size, *rows.shape[1:]), torch.nan)
            if self._buffer is not None:
                grown[: self.length] = self._buffer[: self.length]
            self._buffer = grown
        self._buffer[self.length : total] = rows
        self._staged = total
        return self._buffer[:total]

    def commit(self) -> None:
        """Count the staged rows."""
        self.length = max(self.length, self._staged)

    def truncate(self, length: int) -> None:
        """Forget all rows from `length` on."""
        self.length = self._staged = min(self.length, length)

    def view(self) -> Tensor:
        """Return the committed rows [length, ...], not copied."""
        if self._buffer is None:
            raise ValueError("rows: nothing was ever written")
        return self._buffer[: self.length]

    @property
    def is_empty(self) -> bool:
        return self.length == 0

    def clone(self) -> GrowingRows:
        """Return an independent copy of the committed rows."""
        copy = GrowingRows()
        if self._buffer is not None:
            copy._buffer, copy.length = self._buffer[: self.length].clone(), self.length
        return copy


class RecentRows:
    """The rows of the last tokens, ending at position `stop` (exclusive)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: Tensor | None = None
        self.stop = 0

    @property
    def start(self) -> int:
        """Position of the oldest row kept."""
        return self.stop - (0 if self.rows is None else self.rows.shape[0])

    def last(self, start: int) -> Tensor | None:
        """Return the rows from position `start` on, as far as held; None before the first write."""
        if self.rows is None:
            return None
        return self.rows[max(0, start - self.start) :]

    def replaced(self, rows: Tensor, stop: int) -> RecentRows:
        """Return new RecentRows with `rows` ending at `stop`, cut to the capacity."""
        other = RecentRows(self.capacity)
        # Not rows[-capacity:], which at capacity 0 is everything.
        other.rows, other.stop = rows[max(0, rows.shape[0] - self.capacity) :].clone(), stop
        return other

    def truncate(self, stop: int) -> None:
        """Forget the rows from position `stop` on."""
        if self.rows is not None:
            keep = max(0, stop - self.start)
            self.rows = self.rows[:keep]
        self.stop = min(self.stop, stop)
