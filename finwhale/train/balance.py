"""Load balance of the experts: correction biases without a gradient, and a small loss per row.

After each step the routing bias of every expert that served more than its share goes down by a
fixed rate, of every other one up. The bias picks experts and never scales them, so this moves load
without a gradient. Text and image tokens have a bias each and are counted apart; padding does not
count. Counts stay on the device. The loss is the report's sequence-level one: for one row of n
tokens, sum over experts of f_i P_i with f_i = X / (k n) * (times i was chosen) and P_i the mean of
i's normalised score. Source: spec/training.md section 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finwhale.config import LayerSpec
from finwhale.model import Backbone


class ExpertBalance:
    """Counts the load of each routed expert, sums the balance loss, nudges the biases.

    As `router_observer` of a pass between `watch` and the pass's end.
    """

    def __init__(self, model: Backbone, rate: float, *, loss_weight: float = 0.0) -> None:
        self._gates = model.gates()
        count = model.config.text_config.n_routed_experts
        device = model.embed.weight.device  # a dense baseline has no gates
        self._loads = torch.zeros(len(self._gates), 2, count, device=device)  # [L, text/image, X]
        self._rate, self._loss_weight = rate, loss_weight
        self._live: Tensor | None = None
        self._loss: Tensor | None = None

    def watch(self, live: Tensor) -> None:
        """Count the next forward pass over positions `live` [B, T] bool."""
        self._live, self._loss = live, None

    def routed(self, spec: LayerSpec, ids: Tensor, logits: Tensor, is_image: Tensor | None) -> None:
        """Take one layer's choices: ids [N, k] and logits [N, X]."""
        if self._live is None or not torch.is_grad_enabled():
            return
        live = self._live.flatten().float()
        chosen = torch.zeros_like(logits).scatter(1, ids, 1.0)  # [N, X]
        counted = chosen.detach() * live.unsqueeze(-1)
        if is_image is None:
            self._loads[spec.layer_id, 0] += counted.sum(0)
        else:
            image = is_image.float()
            self._loads[spec.layer_id, 0] += ((1 - image) @ counted).detach()
            self._loads[spec.layer_id, 1] += (image @ counted).detach()
        if self._loss_weight:
            loss = sequence_balance_loss(logits, chosen, self._live)
            self._loss = loss if self._loss is None else self._loss + loss

    def clear(self) -> None:
        """Forget what was counted: a step that failed must not count in the next one."""
        self._loads.zero_()

    def loss(self) -> Tensor | None:
        """Return the weighted balance loss summed over live tokens and layers, or None.

        Each row's loss is weighed by its live tokens, so parts of a batch add up.
        """
        return None if self._loss is None else self._loss_weight * self._loss

    def update(self) -> Tensor:
        """Move the biases by one step, clear the counts, return the largest over-use [].

        Over-use is the load of the busiest expert over the mean load, the worst of all layers;
        1 is perfect balance. A kind of token that did not occur leaves its bias alone.
        """
        if not self._gates:
            return self._loads.new_ones(())
        with torch.no_grad():
            mean = self._loads.mean(-1, keepdim=True)
            share = torch.where(mean > 0, self._loads / mean.clamp_min(1e-9), 1.0)
            move = self._rate * torch.sign(1.0 - share)
            for gate, own in zip(self._gates, move, strict=True):
                gate.bias += own[0]
                gate.bias_vl += own[1]
            self._loads.zero_()
            return share.max().clamp_min(1.0)


def sequence_balance_loss(logits: Tensor, chosen: Tensor, live: Tensor) -> Tensor:
    """Return the sum over rows of (live tokens) * sum_i f_i P_i, fp32 scalar.

    logits, chosen  [B * T, X]; chosen is 1.0 where an expert serves the token
    live            [B, T] bool
    """
    weight = live.float().unsqueeze(-1)  # [B, T, 1]
    scores = torch.nn.functional.softplus(logits).sqrt().unflatten(0, live.shape)
    share = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    picked = chosen.detach().unflatten(0, live.shape) * weight
    tokens = weight.sum((1, 2)).clamp_min(1.0).unsqueeze(-1)  # [B, 1]
    per_token = picked.sum((1, 2), keepdim=False).unsqueeze(-1) / tokens  # k where a row is live
    frequency = picked.sum(1) * share.shape[-1] / (per_token.clamp_min(1.0) * tokens)  # [B, X]
    mean_share = (share * weight).sum(1) / tokens  # [B, X]
    return ((frequency * mean_share).sum(-1) * weight.sum((1, 2))).sum()
