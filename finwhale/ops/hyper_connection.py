"""Single-pass manifold hyper-connections: mixing coefficients, Sinkhorn, collapse and expand.

A site computes its coefficients from the streams before its sublayer; the collapse uses the mix
of the site before (lagged by one), the expansion its own. The easy mistakes: contracting the
combine matrix over its second index, and "repairing" it to be doubly stochastic: it ends on a
column step. Source: spec/backbone.md section 6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HyperMix(NamedTuple):
    """Coefficients of one site, fp32: pre [..., N], post [..., N], comb [..., N, N]."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def sinkhorn_ref(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    """Return `matrix` after one column step and (iterations - 1) row-and-column steps.

    matrix  [..., N, N] positive; each step divides by (sum + eps); ends on columns (dim -2)
    """
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def sinkhorn_planes(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    """Return `matrix` [..., N, N] after the steps of `sinkhorn_ref`; same contract, same bits.

    The reference sums four numbers at a time. Here the N * N entries are planes over all tokens, so
    every step is one pass over long contiguous rows; and the backward pass is written out, so no
    graph of 2 * iterations nodes per site is kept.
    """
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


def hyper_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
    sinkhorn=sinkhorn_ref,
    linear=torch.nn.functional.linear,
    sigmoid=torch.sigmoid,
) -> HyperMix:
    """Return the coefficients of one site.

    streams  [..., N, C]
    fn       [(2 + N) * N, N * C] fp32
    base     [(2 + N) * N] fp32
    scale    [3] fp32, for pre, post and comb

    Projection first, one RMS division over all N * C values after. Section 6, steps 1 to 3.
    """
    num = streams.shape[-2]
    u = streams.flatten(-2).float()  # [..., N * C]
    m = linear(u, fn) * torch.rsqrt(u.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = m.split((num, num, num * num), dim=-1)
    pre_base, post_base, comb_base = base.split((num, num, num * num))
    pre = sigmoid(scale[0] * pre + pre_base) + eps
    post = 2 * sigmoid(scale[1] * post + post_base)
    comb = (scale[2] * comb + comb_base).unflatten(-1, (num, num)).softmax(-1) + eps
    return HyperMix(pre, post, sinkhorn(comb, iterations, eps))


def hyper_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Return sum_i pre_i X_i in the dtype of the streams. streams [..., N, C], pre [..., N]."""
    return (pre.unsqueeze(-2) @ streams.float()).squeeze(-2).to(streams.dtype)


def hyper_collapse_sum(streams: Tensor, pre: Tensor) -> Tensor:
    """Same contract as `hyper_collapse`, in passes over whole rows.

    Thousands of [1, N] @ [N, C] products, each with an outer product backwards, cost four times as
    much on a CPU.
    """
    return _CollapseFn.apply(streams, pre)


class _CollapseFn(torch.autograd.Function):
    """y = sum_i p_i X_i; so dL/dX_i = p_i g and dL/dp_i = sum over channels of g X_i."""

    @staticmethod
    def forward(ctx, streams: Tensor, pre: Tensor) -> Tensor:
        ctx.save_for_backward(streams, pre)
        return (streams.float() * pre.unsqueeze(-1)).sum(-2).to(streams.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        streams, pre = ctx.saved_tensors
        wide = grad.float().unsqueeze(-2)
        return (pre.unsqueeze(-1) * wide).to(streams.dtype), (streams.float() * wide).sum(-1)


def hyper_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return X'_j = post_j y + sum_i comb[i][j] X_i: the first index is contracted.

    y [..., C], streams [..., N, C], post [..., N], comb [..., N, N]. Section 6, step 5.
    """
    mixed = comb.transpose(-1, -2) @ streams.float()  # [..., N, C]
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(streams.dtype)
