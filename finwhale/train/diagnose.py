"""What went wrong at a step: the first layer that is not finite, and the batch on disk.

The batch is kept first; then its passes run once more, forward only and watched, on the weights as
they were before the step: what a person who finds a stopped run in the morning asks first.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from finwhale.config.files import replace_file
from finwhale.model import Backbone
from finwhale.train.loss import Batch

FAILED_FILE = "failed_step.pt"


def save_failed_batch(out: Path, batch: Batch, *, step: int, rows: Any, why: str) -> Path:
    """Write the batch of the failing step and return the file. Raises FileError."""
    path, held = out / FAILED_FILE, io.BytesIO()
    torch.save(
        {
            "step": step,
            "why": why,
            "rows": torch.as_tensor(rows),
            "ids": batch.ids,
            "targets": batch.targets,
            "lengths": [list(row) for row in batch.packing.lengths],
        },
        held,
    )
    replace_file(path, held.getvalue())
    return path


def first_bad_layer(traces: Iterable[tuple[int, dict[str, Any]]], num_layers: int) -> str:
    """Return a sentence about the first layer whose streams are not finite, or the largest ones.

    traces  (first row, trace) of the parts of the failing step, as `TrainStep.traces` gives them
    """
    largest, where = 0.0, 0
    for first_row, trace in traces:
        for layer in range(num_layers + 1):
            streams = trace[f"streams.{layer}"]
            finite = torch.isfinite(streams).flatten(2).all(-1)
            if not bool(finite.all()):
                row, position = (int(x) for x in (~finite).nonzero()[0])
                return (
                    f"{_place(layer)} is the first that is not finite, in row {first_row + row} at "
                    f"position {position}"
                )
            size = float(streams.abs().max())
            if size > largest:
                largest, where = size, layer
    return f"all streams are finite; the largest, {largest:.3g}, leave {_place(where)}"


def _place(layer: int) -> str:
    return "the embedding" if layer == 0 else f"layer {layer - 1}"


def bad_gradients(model: Backbone) -> str:
    """Return a sentence about the parameters whose gradients are not finite."""
    bad = [
        name
        for name, parameter in model.trained_tensors().items()
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]
    if not bad:
        return "every gradient is finite"
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"gradients that are not finite: {', '.join(bad[:3])}{more}"
