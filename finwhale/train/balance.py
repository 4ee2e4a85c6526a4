"""Load balance of the experts without an auxiliary loss.

After each step the routing bias of every expert that served more than its share goes down by a
fixed rate, of every other one up. The bias picks experts and never scales them, so this moves
load without a gradient. Padding does not count. Only `gate.bias` moves: there are no image
tokens here. Source: spec/training.md section 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finwhale.model import Backbone
from finwhale.model.moe import Gate


class ExpertBalance:
    """Counts the load of each routed expert and nudges the biases.

    Between `watch` and `update` every forward pass of the model in training mode is counted.
    """

    def __init__(self, model: Backbone, rate: float) -> None:
        self._gates = [m for m in model.modules() if isinstance(m, Gate)]
        self._loads = [torch.zeros(len(gate.bias), dtype=torch.int64) for gate in self._gates]
        self._rate = rate
        self._live: Tensor | None = None
        for gate, load in zip(self._gates, self._loads, strict=True):
            gate.register_forward_hook(lambda _, __, out, load=load: self._count(out[0], load))

    def watch(self, live: Tensor) -> None:
        """Count the next forward pass over positions `live` [B, T] bool."""
        self._live = live.flatten()

    def _count(self, expert_ids: Tensor, load: Tensor) -> None:
        if self._live is not None and torch.is_grad_enabled():
            load += torch.bincount(expert_ids[self._live].flatten(), minlength=len(load))

    def update(self) -> float:
        """Move the biases by one step, clear the counts, return the largest over-use.

        Over-use is the load of the busiest expert over the mean load, the worst of all layers;
        1 is perfect balance.
        """
        worst = 1.0
        with torch.no_grad():
            for gate, load in zip(self._gates, self._loads, strict=True):
                share = load.float() / max(1.0, float(load.float().mean()))
                worst = max(worst, float(share.max()))
                gate.bias += self._rate * torch.sign(1.0 - share)
                load.zero_()
        self._live = None
        return worst
