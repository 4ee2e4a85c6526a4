"""Hyper-connections on a GPU: one pass over the streams per collapse and per expansion.

A program owns one token: it reads the N streams once, forward and backward, and reduces over the
channels itself, so nothing is summed by atomics. Same functions as
`finwhale.ops.hyper_connection`. The projection of the mixing coefficients reads bf16 streams and an
fp32 matrix; the matrix is split into two bf16 halves, whose products accumulate in fp32, so 16 of
its 24 significant bits take part (D14). Source: spec/backbone.md section 6.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from finwhale.ops.hyper_connection import HyperMix

_MAX_BLOCK = 1024


@triton.jit
def _collapse_fwd_kernel(X, PRE, OUT, C, N: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    pre = tl.load(PRE + token * N + n)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        keep = (c < C)[None, :]
        x = tl.load(X + (token * N + n[:, None]) * C + c[None, :], mask=keep, other=0.0)
        y = tl.sum(pre[:, None] * x.to(tl.float32), axis=0)
        tl.store(OUT + token * C + c, y.to(OUT.dtype.element_ty), mask=c < C)


@triton.jit
def _collapse_bwd_kernel(X, PRE, G, DX, DPRE, C, N: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    pre = tl.load(PRE + token * N + n)
    d_pre = tl.zeros([N], dtype=tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        keep = (c < C)[None, :]
        at = (token * N + n[:, None]) * C + c[None, :]
        x = tl.load(X + at, mask=keep, other=0.0).to(tl.float32)
        g = tl.load(G + token * C + c, mask=c < C, other=0.0).to(tl.float32)
        d_pre += tl.sum(x * g[None, :], axis=1)
        tl.store(DX + at, (pre[:, None] * g[None, :]).to(DX.dtype.element_ty), mask=keep)
    tl.store(DPRE + token * N + n, d_pre)


@triton.jit
def _expand_fwd_kernel(Y, X, POST, COMB, OUT, C, N: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    post = tl.load(POST + token * N + n)
    comb = tl.load(COMB + token * N * N + n[:, None] * N + n[None, :])  # [N in, N out]
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        keep = (c < C)[None, :]
        at = (token * N + n[:, None]) * C + c[None, :]
        x = tl.load(X + at, mask=keep, other=0.0).to(tl.float32)
        y = tl.load(Y + token * C + c, mask=c < C, other=0.0).to(tl.float32)
        mixed = tl.sum(comb[:, :, None] * x[:, None, :], axis=0)  # [N out, BLOCK]
        out = post[:, None] * y[None, :] + mixed
        tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=keep)


@triton.jit
def _expand_bwd_kernel(
    Y, X, POST, COMB, G, DY, DX, DPOST, DCOMB, C, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    post = tl.load(POST + token * N + n)
    comb_at = token * N * N + n[:, None] * N + n[None, :]
    comb = tl.load(COMB + comb_at)
    d_post = tl.zeros([N], dtype=tl.float32)
    d_comb = tl.zeros([N, N], dtype=tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        keep = (c < C)[None, :]
        at = (token * N + n[:, None]) * C + c[None, :]
        x = tl.load(X + at, mask=keep, other=0.0).to(tl.float32)
        g = tl.load(G + at, mask=keep, other=0.0).to(tl.float32)
        y = tl.load(Y + token * C + c, mask=c < C, other=0.0).to(tl.float32)
        d_post += tl.sum(g * y[None, :], axis=1)
        d_comb += tl.sum(x[:, None, :] * g[None, :, :], axis=2)
        d_y = tl.sum(post[:, None] * g, axis=0)
        tl.store(DY + token * C + c, d_y.to(DY.dtype.element_ty), mask=c < C)
        d_x = tl.sum(comb[:, :, None] * g[None, :, :], axis=1)
        tl.store(DX + at, d_x.to(DX.dtype.element_ty), mask=keep)
    tl.store(DPOST + token * N + n, d_post)
    tl.store(DCOMB + comb_at, d_comb)


def _sizes(channels: int) -> dict[str, int]:
    """Return the block of channels and its warps: one warp sums without shared memory."""
    block = min(_MAX_BLOCK, triton.next_power_of_2(channels))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


class _CollapseFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams: Tensor, pre: Tensor) -> Tensor:
        streams, pre = streams.contiguous(), pre.contiguous()
        *batch, num, channels = streams.shape
        out = streams.new_empty(*batch, channels)
        tokens = out.numel() // channels
        if tokens:
            _collapse_fwd_kernel[(tokens,)](streams, pre, out, channels, N=num, **_sizes(channels))
        ctx.save_for_backward(streams, pre)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        streams, pre = ctx.saved_tensors
        num, channels = streams.shape[-2:]
        grad = grad.contiguous()
        d_streams, d_pre = torch.empty_like(streams), torch.empty_like(pre)
        tokens = grad.numel() // channels
        if tokens:
            _collapse_bwd_kernel[(tokens,)](
                streams, pre, grad, d_streams, d_pre, channels, N=num, **_sizes(channels)
            )
        return d_streams, d_pre


class _ExpandFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        y, streams, post, comb = (t.contiguous() for t in (y, streams, post, comb))
        num, channels = streams.shape[-2:]
        out = torch.empty_like(streams)
        tokens = y.numel() // channels
        if tokens:
            _expand_fwd_kernel[(tokens,)](
                y, streams, post, comb, out, channels, N=num, **_sizes(channels)
            )
        ctx.save_for_backward(y, streams, post, comb)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        y, streams, post, comb = ctx.saved_tensors
        num, channels = streams.shape[-2:]
        grad = grad.contiguous()
        grads = [torch.empty_like(t) for t in (y, streams, post, comb)]
        tokens = y.numel() // channels
        if tokens:
            _expand_bwd_kernel[(tokens,)](
                y, streams, post, comb, grad, *grads, channels, N=num, **_sizes(channels)
            )
        return tuple(grads)


class _ProjectFn(torch.autograd.Function):
    """x [.., K] bf16 times an fp32 matrix [O, K], as two bf16 products with fp32 sums."""

    @staticmethod
    def forward(ctx, x: Tensor, matrix: Tensor) -> Tensor:
        high = matrix.to(x.dtype)
        low = (matrix - high.float()).to(x.dtype)
        flat = x.flatten(0, -2)
        both = torch.mm(flat, torch.cat((high, low)).t(), out_dtype=torch.float32)
        ctx.save_for_backward(flat, high)
        ctx.shape = x.shape
        first, second = both.unflatten(0, x.shape[:-1]).split(matrix.shape[0], dim=-1)
        return first + second

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        flat, high = ctx.saved_tensors
        narrow = grad.flatten(0, -2).to(flat.dtype)
        d_matrix = torch.mm(narrow.t(), flat, out_dtype=torch.float32)
        return (narrow @ high).view(ctx.shape), d_matrix


def _coefficients(u: Tensor, m: Tensor, base: Tensor, scale: Tensor, norm_eps: float, eps: float):
    """Return pre, post and the positive combine matrix before its Sinkhorn steps."""
    num = int((m.shape[-1] + 1) ** 0.5) - 1
    m = m * torch.rsqrt(u.float().square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = m.split((num, num, num * num), dim=-1)
    pre_base, post_base, comb_base = base.split((num, num, num * num))
    pre = torch.sigmoid(scale[0] * pre + pre_base) + eps
    post = 2 * torch.sigmoid(scale[1] * post + post_base)
    comb = (scale[2] * comb + comb_base).unflatten(-1, (num, num)).softmax(-1) + eps
    return pre, post, comb


def hyper_mix_fused(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
    sinkhorn: Callable,
    coefficients: Callable = _coefficients,
) -> HyperMix:
    """Same contract as `finwhale.ops.hyper_connection.hyper_mix`, up to D14.

    coefficients  `_coefficients`, compiled or not
    """
    u = streams.flatten(-2)
    m = torch.nn.functional.linear(u, fn) if u.dtype is torch.float32 else _ProjectFn.apply(u, fn)
    pre, post, comb = coefficients(u, m, base, scale, norm_eps, eps)
    return HyperMix(pre, post, sinkhorn(comb, iterations, eps))


def hyper_collapse_triton(streams: Tensor, pre: Tensor) -> Tensor:
    """Same contract as `hyper_collapse`: [..., N, C], [..., N] fp32 -> [..., C]."""
    return _CollapseFn.apply(streams, pre)


def hyper_expand_triton(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Same contract as `hyper_expand`: [..., C], [..., N, C], [..., N], [..., N, N]."""
    return _ExpandFn.apply(y, streams, post, comb)
