"""All routed experts of a layer as two grouped matrix products: no loop, no count on the host.

Tokens are sorted by expert; `ends` says on the device where each expert's rows stop, so a step can
be captured in a CUDA graph. Dispatch and combine are each other's transpose and are gathers in both
directions: an atomic sum would make two runs differ. Same function as the loop in
`finwhale.model.moe`, in bf16 products with fp32 accumulation. Source: spec/backbone.md section 8.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class _DispatchFn(torch.autograd.Function):
    """Rows of tokens in expert order: out[i] = z[order[i] // k]."""

    @staticmethod
    def forward(ctx, z: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.k = k
        return z[order // k]

    @staticmethod
    def backward(ctx, grad: Tensor):
        _, inverse = ctx.saved_tensors
        return _combined(grad, inverse, ctx.k).to(grad.dtype), None, None, None


class _CombineFn(torch.autograd.Function):
    """The sum over a token's k rows, fp32; the transpose of dispatch."""

    @staticmethod
    def forward(ctx, y: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k, ctx.dtype = k, y.dtype
        return _combined(y, inverse, k)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        return grad.to(ctx.dtype)[order // ctx.k], None, None, None


def _combined(rows: Tensor, inverse: Tensor, k: int) -> Tensor:
    return rows[inverse].unflatten(0, (-1, k)).sum(1, dtype=torch.float32)


def _grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return x[rows of e] @ weights[e]^T for every expert e. x [N, K], weights [X, O, K].

    The grouped product takes bf16 alone. In fp32, which is for checks, every expert multiplies
    every row and a mask keeps its own.
    """
    if x.dtype is torch.float32:
        rows = torch.arange(len(x), device=x.device)
        expert = torch.searchsorted(ends, rows, right=True)
        y = x.new_zeros(len(x), weights.shape[1])
        for e, weight in enumerate(weights):
            y = y + (x * (expert == e).unsqueeze(-1)) @ weight.t()
        return y
    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return product(x, weights.transpose(-2, -1), offs=ends)


def grouped_experts(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    limit: float,
    swiglu: Callable,
) -> Tensor:
    """Return the weighted sum of each token's experts, [N, C] fp32.

    z        [N, C] bf16
    ids      [N, k] int64; weights [N, k] fp32
    gate_up  [X, 2F, C] w1 over w3 of every expert; down [X, C, F] w2; any dtype, read as z's
    swiglu   (gate, up, weight, limit) as `finwhale.ops.moe.clamped_swiglu`
    """
    k, width, count = ids.shape[-1], gate_up.shape[1] // 2, len(gate_up)
    flat = ids.flatten()
    ordered, order = flat.sort(stable=True)
    places = torch.arange(len(flat), device=z.device)
    inverse = torch.empty_like(order).scatter_(0, order, places)
    numbers = torch.arange(count, device=z.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    x = _DispatchFn.apply(z, order, inverse, k)  # [N * k, C]
    gate, up = _grouped_mm(x, gate_up.to(z.dtype), ends).split(width, dim=-1)
    hidden = swiglu(gate, up, weights.flatten().gather(0, order).unsqueeze(-1), limit)
    return _CombineFn.apply(_grouped_mm(hidden, down.to(z.dtype), ends), order, inverse, k)
