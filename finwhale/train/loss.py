"""Next-token loss over packed rows, as a sum and a count that are divided once.

The sum over all micro-batches of a step is divided by the number of targets of the whole step, so
splitting a batch into parts changes nothing but rounding. A mean per part would weigh every part
alike, however few targets it holds. Logits are made a slice at a time and again in the backward
pass, so memory does not grow with rows times vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from finwhale.data.packing import NO_TARGET, PackedRows
from finwhale.model import Backbone, Packing


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows ready for the model.

    ids      [B, T] int64
    targets  [B, T] int64, NO_TARGET where nothing is predicted
    packing  document layout of the rows
    """

    ids: Tensor
    targets: Tensor
    packing: Packing

    @property
    def num_targets(self) -> int:
        return int((self.targets != NO_TARGET).sum())

    @classmethod
    def of(cls, packed: PackedRows, rows: np.ndarray) -> Batch:
        """Return the given rows of `packed`, in that order."""
        lengths = [list(packed.lengths[row]) for row in rows]
        return cls(
            ids=torch.from_numpy(packed.inputs[rows]).long(),
            targets=torch.from_numpy(packed.targets[rows]).long(),
            packing=Packing.from_lengths(lengths, tokens=packed.inputs.shape[1]),
        )

    def parts(self, rows: int) -> Iterator[Batch]:
        """Yield the batch in parts of at most `rows` rows."""
        for start in range(0, len(self.ids), rows):
            stop = start + rows
            lengths = [list(row) for row in self.packing.lengths[start:stop]]
            yield Batch(
                ids=self.ids[start:stop],
                targets=self.targets[start:stop],
                packing=Packing.from_lengths(lengths, tokens=self.ids.shape[1]),
            )


def loss_sum(model: Backbone, batch: Batch, *, chunk_tokens: int) -> Tensor:
    """Return the summed negative log-likelihood of the batch's targets, in nats, fp32 scalar."""
    hidden = model.hidden(batch.ids, packing=batch.packing)  # [B, T, C]
    has_target = batch.targets != NO_TARGET
    rows, wanted = hidden[has_target], batch.targets[has_target]  # [N, C], [N]

    def chunk_loss(part: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model.logits(part), target, reduction="sum")

    total = torch.zeros((), dtype=torch.float32)
    for start in range(0, len(rows), chunk_tokens):
        part, target = rows[start : start + chunk_tokens], wanted[start : start + chunk_tokens]
        if torch.is_grad_enabled() and len(rows) > chunk_tokens:
            total = total + checkpoint(chunk_loss, part, target, use_reentrant=False)
        else:
            total = total + chunk_loss(part, target)
    return total
