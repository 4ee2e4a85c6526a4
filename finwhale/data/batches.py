"""Which rows make batch number n: a function of the seed and n alone.

Rows are visited in a fresh permutation per epoch; a batch may cross from one epoch into the
next, so every batch has the same size. The whole state of the stream is one integer, which is
what makes a run resumable at any step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOrder:
    """The order of `num_rows` rows in batches of `batch_rows`."""

    num_rows: int
    batch_rows: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"num_rows: got {self.num_rows}, expected at least one packed row")
        if self.batch_rows < 1:
            raise ValueError(f"batch_rows: got {self.batch_rows}, expected at least 1")

    def rows(self, position: int) -> np.ndarray:
        """Return the row numbers of batch `position` (from 0), int64 [batch_rows]."""
        first = position * self.batch_rows
        visits = np.arange(first, first + self.batch_rows)
        epochs, places = np.divmod(visits, self.num_rows)
        orders = {int(epoch): self._epoch(int(epoch)) for epoch in np.unique(epochs)}
        picked = [orders[int(e)][p] for e, p in zip(epochs, places, strict=True)]
        return np.array(picked, dtype=np.int64)

    def _epoch(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)
