"""Bits per byte of a model on held-out documents.

bits per byte = sum of -log2 p(target) / bytes of the documents' text. Every token of a document
and its end marker is a target, the begin marker is not: what the n-gram baselines are scored on.
Documents longer than the row are cut as in training, so later pieces start without context.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from finwhale.data.packing import PackedRows
from finwhale.model import Backbone
from finwhale.train.loss import Batch, loss_sum

# Tokens of one forward pass.
_PASS_TOKENS = 4096


def bits_per_byte(
    model: Backbone, packed: PackedRows, num_bytes: int, *, chunk_tokens: int
) -> float:
    """Return the bits the model needs for all targets of `packed`, per byte of its text."""
    nats = 0.0
    batch_rows = max(1, _PASS_TOKENS // packed.inputs.shape[1])
    with torch.no_grad():
        for start in range(0, packed.num_rows, batch_rows):
            rows = np.arange(start, min(start + batch_rows, packed.num_rows))
            nats += float(loss_sum(model, Batch.of(packed, rows), chunk_tokens=chunk_tokens))
    return nats / math.log(2) / num_bytes
