"""Matrix products under the two numerics modes.

`release`: the input of every FP8 and FP4 matrix is rounded to FP8 in groups of 32, the product
accumulates in fp32 and is rounded once to bf16. `dequant`: the dequantised weight in the compute
dtype, no activation rounding; a different function, and named so. Source: spec/backbone.md
section 9.1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T in the dtype of x. x [..., K], weight [O, K]."""
    return torch.nn.functional.linear(x, weight.to(x.dtype))


def linear_fp32_accumulate(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T accumulated in fp32 and rounded once to the dtype of x."""
    return torch.nn.functional.linear(x.float(), weight.float()).to(x.dtype)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return the block-diagonal product of the output projection's first half.

    x        [..., G, K]  group g holds its heads' outputs
    weight   [G * O, K]   rows g*O .. g*O+O-1 belong to group g
    returns  [..., G * O], accumulated in fp32 for bf16 inputs

    Section 4.6, step 2.
    """
    groups = x.shape[-2]
    w = weight.float().unflatten(0, (groups, -1))  # [G, O, K]
    flat = x.float().flatten(0, -3).transpose(0, 1)  # [G, N, K]
    y = (flat @ w.transpose(1, 2)).transpose(0, 1)  # [N, G, O]
    return y.reshape(*x.shape[:-2], weight.shape[0]).to(x.dtype)


def straight_through(rounding, x: Tensor) -> Tensor:
    """Return rounding(x); its gradient is that of the identity."""
    return _StraightThroughFn.apply(x, rounding) if x.requires_grad else rounding(x)


class _StraightThroughFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rounding):
        return rounding(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None
