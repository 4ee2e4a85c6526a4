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
    m = torch.nn.functional.linear(u, fn) * torch.rsqrt(
        u.square().mean(-1, keepdim=True) + norm_eps
    )
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
