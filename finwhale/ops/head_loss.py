"""Prediction head and next-token loss together, so that no [N, V] matrix of logits is ever whole.

Logits are made a slice of rows at a time and again in the backward pass: memory does not grow with
rows times vocabulary. Source: spec/training.md section II.4.5 (objective).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NO_TARGET = -100


def head_loss_ref(hidden: Tensor, head: Tensor, targets: Tensor, chunk_rows: int) -> Tensor:
    """Return the summed negative log-likelihood of the targets in nats, fp32 scalar.

    hidden      [N, C] normalised collapsed streams
    head        [V, C]
    targets     [N] int64; NO_TARGET rows count nothing
    chunk_rows  rows whose logits exist at one time
    """

    def chunk_loss(rows: Tensor, wanted: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(rows.float(), head.float())
        return torch.nn.functional.cross_entropy(
            logits, wanted, reduction="sum", ignore_index=NO_TARGET
        )

    # Without a row the sum is still attached to both: their gradients are zeros.
    total = (hidden[:0].float().sum() + head[:0].float().sum()) * 0.0
    for start in range(0, len(hidden), chunk_rows):
        rows, wanted = hidden[start : start + chunk_rows], targets[start : start + chunk_rows]
        if torch.is_grad_enabled() and len(hidden) > chunk_rows:
            total = total + checkpoint(chunk_loss, rows, wanted, use_reentrant=False)
        else:
            total = total + chunk_loss(rows, wanted)
    return total
