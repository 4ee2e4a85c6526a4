"""Momentum with Sinkhorn balancing: for tables whose rows are tokens or n-grams.

Rows and columns of the Nesterov momentum are normalised in turn, rows last, so every live row
moves by the same RMS however rarely its token occurs. Owns the reference, which writes the matrix
at each step, and the update that carries two scale vectors. Refused: anything but matrices. The
mistakes to avoid: weight decay (rows without a gradient would shrink to nothing), and squaring
1/eps = 1e20, which fp32 cannot hold. Source: spec/training.md sections 1 and II.1.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from finwhale.optim.muon import load_momentum, momentum_of

STEPS = 11  # odd, so the last step is a row step
ROW_FLOOR = 1e-3  # tau: rows at or below this share of the mean row norm do not move
EPS = 1e-20
# A column whose norm among unit rows is below this counts as empty: its scale, squared, could
# leave the range of fp32, and an empty one would give 0 * inf. The reference lifts a tiny one to
# full size, which is the one place where the two differ.
_COLUMN_FLOOR = 1e-15
# The smallest largest-entry whose inverse fp32 can hold.
_SMALLEST_PEAK = 1e-37


class SinkhornMomentumError(ValueError):
    """A parameter or setting that the balanced momentum cannot serve."""


def sinkhorn_update_ref(
    g: Tensor, *, steps: int = STEPS, row_floor: float = ROW_FLOOR, eps: float = EPS
) -> Tensor:
    """Return sqrt(n) * U of `g` [m, n], any floating dtype: the algorithm as it is written.

    Rows with norm <= row_floor * mean(row norm) become zero. Then `steps` divisions: odd ones
    of each row by its L2 norm + eps, even ones of each column by its.
    """
    norms = g.square().sum(1).sqrt()
    U = torch.where((norms > row_floor * norms.mean()).unsqueeze(1), g, 0.0)
    for step in range(1, steps + 1):
        dim = 1 if step % 2 else 0
        U = U / (U.square().sum(dim, keepdim=True).sqrt() + eps)
    return sqrt(g.shape[1]) * U


def sinkhorn_update(
    g: Tensor, *, steps: int = STEPS, row_floor: float = ROW_FLOOR, eps: float = EPS
) -> Tensor:
    """Return sqrt(n) * U of `g` [m, n] fp32; equals `sinkhorn_update_ref` to rounding.

    U = diag(row_scale) G diag(column_scale) at every step, so a row norm is
    row_scale_i * sqrt(sum_j G_ij^2 column_scale_j^2): a step is one product of the squares with
    a vector, and U is written once, at the end. No shape depends on data, the host waits for
    nothing.
    """
    if not g.numel():
        return torch.zeros_like(g)
    peak = g.abs().amax()
    # Squares of entries relative to the largest: those of a small gradient would vanish.
    peak = torch.where(peak > _SMALLEST_PEAK, peak, 1.0)
    relative = g / peak
    squares = relative.square()
    norms = squares.sum(1).sqrt()
    # In these units the first row norm is peak * sqrt(...), to which eps compares.
    row_scale = torch.where(norms > row_floor * norms.mean(), peak, 0.0)  # [m]
    column_scale = torch.ones_like(squares[0])  # [n]
    for step in range(1, steps + 1):
        if step % 2:
            norms = row_scale * (squares @ column_scale.square()).sqrt()
            row_scale = row_scale / (norms + eps)
        else:
            norms = column_scale * (row_scale.square() @ squares).sqrt()
            scale = column_scale / (norms + eps)
            column_scale = torch.where(norms > _COLUMN_FLOOR, scale, 0.0)
    return relative.mul_(row_scale.unsqueeze(1)).mul_(column_scale * sqrt(g.shape[1]))


class SinkhornMomentum(torch.optim.Optimizer):
    """Sinkhorn-balanced Nesterov momentum over 2-D parameters [rows m, features n].

    M <- beta M + (1 - beta) G;  update = sinkhorn_update(beta M + (1 - beta) G);
    W <- W - gamma lr update. There is no weight decay.

    lr     float or 0-dim tensor on the parameters' device
    gamma  RMS of a live row's step in units of lr

    Momentum is fp32. A parameter without a gradient is left as it is.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 1e-3,
        beta: float = 0.95,
        gamma: float = 0.18,
    ) -> None:
        if not 0 <= beta < 1:
            raise SinkhornMomentumError(f"beta: got {beta!r}, expected at least 0 and below 1")
        super().__init__(params, {"lr": lr, "beta": beta, "gamma": gamma})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() != 2:
                raise SinkhornMomentumError(
                    f"params: got shape {tuple(parameter.shape)}, expected a matrix [rows, "
                    "features]; give other parameters to AdamW"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        load_momentum(self, state_dict)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply one update from the gradients. Nothing here waits for the device."""
        for group in self.param_groups:
            beta, size = group["beta"], group["gamma"] * group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = parameter.grad.float()
                momentum = momentum_of(self, parameter)
                momentum.lerp_(grad, 1 - beta)
                update = sinkhorn_update(torch.lerp(momentum, grad, 1 - beta))
                parameter.sub_(update.mul_(size))
