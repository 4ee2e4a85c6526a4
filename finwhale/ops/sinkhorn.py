"""Sinkhorn balancing for training: the reference's numbers, a layout and a backward of its own.

The reference sums over the two last dims of [..., N, N], four numbers at a time. Here the N * N
entries are planes over all tokens, so every step is one pass over long contiguous rows; and the
backward pass is written out, so no graph of 2 * iterations nodes per site is kept. The forward
pass equals `sinkhorn_ref` bit for bit. Source: spec/backbone.md section 6.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sinkhorn_planes(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    """Return `matrix` [..., N, N] after the steps of `sinkhorn_ref`; same contract."""
    return _SinkhornFn.apply(matrix, iterations, eps)


class _SinkhornFn(torch.autograd.Function):
    """One step is y = x / d, d = sum(x) + eps; so dL/dx = (g - sum(g * y)) / d."""

    @staticmethod
    def forward(ctx, matrix: Tensor, iterations: int, eps: float) -> Tensor:
        planes = matrix.movedim((-2, -1), (0, 1)).contiguous()  # [N, N, ...]
        outputs, divisors = [], []
        for step in range(2 * iterations - 1):
            divisor = planes.sum(step % 2, keepdim=True).add_(eps)
            planes = planes / divisor
            outputs.append(planes)
            divisors.append(divisor)
        ctx.steps = outputs, divisors
        return planes.movedim((0, 1), (-2, -1)).contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor):
        outputs, divisors = ctx.steps
        grad = grad.movedim((-2, -1), (0, 1)).contiguous()
        for step in reversed(range(len(outputs))):
            pulled = (grad * outputs[step]).sum(step % 2, keepdim=True)
            grad = (grad - pulled).div_(divisors[step])
        return grad.movedim((0, 1), (-2, -1)).contiguous(), None, None
