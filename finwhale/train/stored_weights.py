"""Training with the weights that the checkpoint will hold.

Before a step's passes every parameter is replaced by what its stored format gives back (FP8 blocks,
FP8 rows, FP4 experts, BF16), after them the fp32 masters return and take the gradient: a straight-
through estimate. Export quantises the same masters, so it writes exactly what was trained.
The easy mistake: rounding the masters themselves, which loses every update smaller than a bin.
Source: spec/training.md section 1 (precision), backbone.md section 10.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from finwhale.config.inventory import GROUP, Storage, checkpoint_tensors
from finwhale.model import Backbone
from finwhale.ops.weight_formats import round_weight


class StoredWeights:
    """The masters of a model, and the rounding of each by its stored format."""

    def __init__(self, model: Backbone) -> None:
        storage = {s.name: s.storage for s in checkpoint_tensors(model.config, quantized=True)}
        self._batches: dict[tuple[Storage, torch.Size], list[Tensor]] = {}
        for name, parameter in model.named_parameters():
            kind = storage[name]
            if kind is not Storage.F32:
                self._batches.setdefault((kind, parameter.shape), []).append(parameter.data)
        self._masters = {key: torch.stack(batch) for key, batch in self._batches.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model its stored weights inside the block and its masters after it."""
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def take(self) -> None:
        """Keep the masters aside and write the rounded values into the parameters."""
        for (kind, shape), batch in self._batches.items():
            masters = self._masters[kind, shape]
            torch.stack(batch, out=masters)
            torch._foreach_copy_(batch, list(rounded_as_stored(masters, kind).unbind()))

    def give_back(self) -> None:
        """Write the masters back into the parameters."""
        for key, batch in self._batches.items():
            torch._foreach_copy_(batch, list(self._masters[key].unbind()))


def rounded_as_stored(weights: Tensor, storage: Storage) -> Tensor:
    """Return weights [n, ...] of one stored format as the checkpoint would give them back.

    Matrices whose rows fill the format's blocks go through as one tall matrix.
    """
    if storage is Storage.BF16:
        return weights.bfloat16().to(weights.dtype)
    if storage is Storage.FP8_BLOCK and weights.shape[1] % GROUP:
        return torch.stack([round_weight(one, storage) for one in weights])
    return round_weight(weights.flatten(0, 1), storage).view(weights.shape)
