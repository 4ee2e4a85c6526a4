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


class _SinkhornFn(torch.autograd.Function):
    """Sinkhorn as row and column factors of one fixed matrix, tokens last.

    Every step only rescales rows or columns, so the result is K[i][j] a[i] b[j]; carrying a and b
    touches 2N values per token and step instead of N^2. With u = a s + eps, s the weighted sum:
    a' = a / u, da'/ds = -a'^2, da'/da = eps / u^2.
    """

    @staticmethod
    def forward(ctx, matrix: Tensor, iterations: int, eps: float) -> Tensor:
        kernel = matrix.detach().flatten(0, -3).permute(1, 2, 0).contiguous()  # [N, N, T]
        rows = torch.ones_like(kernel[:, 0])  # [N, T]
        columns = rows
        trail = []
        for step in range(2 * iterations - 1):
            is_column = step % 2 == 0
            if is_column:
                factor, sums = columns, (kernel * rows.unsqueeze(1)).sum(0)
            else:
                factor, sums = rows, (kernel * columns.unsqueeze(0)).sum(1)
            divisor = torch.addcmul(torch.full_like(sums, eps), factor, sums)
            updated = factor / divisor
            trail.append((divisor, updated, rows if is_column else columns))
            rows, columns = (rows, updated) if is_column else (updated, columns)
        ctx.trail, ctx.eps, ctx.kernel, ctx.factors = trail, eps, kernel, (rows, columns)
        result = kernel * rows.unsqueeze(1) * columns.unsqueeze(0)
        return result.permute(2, 0, 1).contiguous().view(matrix.shape)

    @staticmethod
    def backward(ctx, grad: Tensor):
        shape, kernel, (rows, columns) = grad.shape, ctx.kernel, ctx.factors
        grad = grad.flatten(0, -3).permute(1, 2, 0).contiguous()  # [N, N, T]
        weighted = grad * kernel
        grad_rows = (weighted * columns.unsqueeze(0)).sum(1)
        grad_columns = (weighted * rows.unsqueeze(1)).sum(0)
        grad_kernel = grad * rows.unsqueeze(1) * columns.unsqueeze(0)
        for step in reversed(range(len(ctx.trail))):
            divisor, updated, other = ctx.trail[step]
            is_column = step % 2 == 0
            grad_factor = grad_columns if is_column else grad_rows
            grad_sums = -(updated.square() * grad_factor)
            grad_factor = grad_factor * ctx.eps / divisor.square()
            if is_column:
                grad_kernel.addcmul_(other.unsqueeze(1), grad_sums.unsqueeze(0))
                grad_rows = grad_rows + (kernel * grad_sums.unsqueeze(0)).sum(1)
                grad_columns = grad_factor
            else:
                grad_kernel.addcmul_(other.unsqueeze(0), grad_sums.unsqueeze(1))
                grad_columns = grad_columns + (kernel * grad_sums.unsqueeze(1)).sum(0)
                grad_rows = grad_factor
        return grad_kernel.permute(2, 0, 1).contiguous().view(shape), None, None


def sinkhorn_factored(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    """Same contract as `sinkhorn_ref`; the same function up to rounding, with its own backward."""
    return _SinkhornFn.apply(matrix, iterations, eps)


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
    m = torch.nn.functional.linear(u, fn) * torch.rsqrt(u.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = m.split((num, num, num * num), dim=-1)
    pre_base, post_base, comb_base = base.split((num, num, num * num))
    pre = torch.sigmoid(scale[0] * pre + pre_base) + eps
    post = 2 * torch.sigmoid(scale[1] * post + post_base)
    comb = (scale[2] * comb + comb_base).unflatten(-1, (num, num)).softmax(-1) + eps
    return HyperMix(pre, post, sinkhorn(comb, iterations, eps))


def hyper_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Return sum_i pre_i X_i in the dtype of the streams. streams [..., N, C], pre [..., N]."""
    return (pre.unsqueeze(-2) @ streams.float()).squeeze(-2).to(streams.dtype)


def hyper_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return X'_j = post_j y + sum_i comb[i][j] X_i: the first index is contracted.

    y [..., C], streams [..., N, C], post [..., N], comb [..., N, N]. Section 6, step 5.
    """
    mixed = comb.transpose(-1, -2) @ streams.float()  # [..., N, C]
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(streams.dtype)
