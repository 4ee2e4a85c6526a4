"""Expert routing and the clamped SwiGLU.

The correction bias picks experts and never scales them; scores stay fp32 and are computed by a
softplus that does not underflow. Source: spec/backbone.md section 8.
"""

from __future__ import annotations

import torch
from torch import Tensor


def route_experts(
    logits: Tensor,
    bias: Tensor,
    k: int,
    scaling: float,
    softplus=torch.nn.functional.softplus,
) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their weights.

    s = sqrt(softplus(logits)); choose the k best of s + bias; w = s / (sum of chosen s) * scaling

    logits   [N, X] fp32
    bias     [X] or [N, X] fp32
    returns  expert ids [N, k] int64 (best first, ties to the lowest id), weights [N, k] fp32

    Section 8, steps 1 to 3.
    """
    scores = softplus(logits).sqrt()
    order = (scores.detach() + bias).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = scores.gather(-1, order)
    return order, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling


def clamped_swiglu(gate: Tensor, up: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit) * weight in the dtype of gate.

    gate, up  [..., F]
    weight    [..., 1] fp32 routing weight or None; it multiplies before the down projection

    The gate is clamped from above only. Section 8, step 4.
    """
    g = gate.float().clamp_max(limit)
    u = up.float().clamp(-limit, limit)
    y = torch.nn.functional.silu(g) * u
    return (y if weight is None else y * weight).to(gate.dtype)
