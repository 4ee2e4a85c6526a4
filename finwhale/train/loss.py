"""Batches of packed rows, and the next-token loss over them as a sum.

The sum over all micro-batches of a step is divided by the number of targets of the whole step, so
splitting a batch into parts changes nothing but rounding. A mean per part would weigh every part
alike, however few targets it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from finwhale.data.packing import NO_TARGET, PackedRows
from finwhale.model import Backbone, Packing
from finwhale.model.selection_plan import SelectionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows ready for the model.

    ids      [B, T] int64
    targets  [B, T] int64, NO_TARGET where nothing is predicted
    is_token [B, T] bool, False on padding
    packing  document layout of the rows
    """

    ids: Tensor
    targets: Tensor
    is_token: Tensor
    packing: Packing

    @property
    def num_targets(self) -> int:
        return int((self.targets != NO_TARGET).sum())

    @classmethod
    def of(cls, packed: PackedRows, rows: np.ndarray) -> Batch:
        """Return the given rows of `packed`, in that order."""
        lengths = [list(packed.lengths[row]) for row in rows]
        tokens = torch.tensor([sum(row) for row in lengths])
        return cls(
            ids=torch.from_numpy(packed.inputs[rows]).long(),
            targets=torch.from_numpy(packed.targets[rows]).long(),
            is_token=torch.arange(packed.inputs.shape[1]) < tokens.unsqueeze(-1),
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
                is_token=self.is_token[start:stop],
                packing=Packing.from_lengths(lengths, tokens=self.ids.shape[1]),
            )

    def prepared(self, ratios: tuple[int, ...], device: str) -> Batch:
        """Return the batch on `device`, its compression groups made; shapes depend on [B, T]."""
        return replace(
            self,
            ids=self.ids.to(device),
            targets=self.targets.to(device),
            is_token=self.is_token.to(device),
            packing=self.packing.prepared(ratios, device),
        )


def loss_sum(
    model: Backbone, batch: Batch, *, chunk_tokens: int, plan: SelectionPlan | None = None
) -> Tensor:
    """Return the summed negative log-likelihood of the batch's targets, in nats, fp32 scalar.

    plan  how the pass selects and who watches it; None: as deployed
    """
    hidden = model.hidden(batch.ids, packing=batch.packing, plan=plan).flatten(0, 1)  # [N, C]
    targets = batch.targets.flatten()
    if hidden.device.type == "cpu":
        # Padding has no target: leave its rows out of the largest product. A GPU would have to
        # tell the host how many there are.
        has_target = targets != NO_TARGET
        hidden, targets = hidden[has_target], targets[has_target]
    return model.parts.ops.head_loss(hidden, model.head.weight, targets, chunk_tokens)
