"""Sinkhorn balancing of small matrices as two Triton kernels, for training.

Owns the kernels and the autograd function; the contract is that of `sinkhorn_planes`.
It refuses other sizes than 2 and 4 and other dtypes than fp32. The whole iteration stays in
registers. The backward keeps no history of matrices: it runs the forward again, stores the N
divisors of each step, and walks back with x = y * d. A newcomer transposes the steps: the first
and the last are over columns (dim -2). Source: spec/backbone.md section 6.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 64  # matrices of one program


class SinkhornUnsupportedError(ValueError):
    """These inputs cannot run in the kernels; the message names the cause and the remedy."""


def sinkhorn_unsupported(matrix: Tensor, iterations: int) -> str | None:
    """Return why `sinkhorn_triton` cannot take these inputs, or None if it can."""
    if matrix.ndim < 2 or matrix.shape[-1] not in (2, 4) or matrix.shape[-2] != matrix.shape[-1]:
        shape = tuple(matrix.shape)
        return f"matrix has shape {shape}, not [..., N, N] with N 2 or 4: use sinkhorn_planes"
    if matrix.dtype is not torch.float32:
        return f"matrix is {matrix.dtype}: cast to float32"
    if iterations < 1:
        return f"iterations is {iterations}: give at least 1"
    if not matrix.is_cuda and isinstance(_sinkhorn_fwd_kernel, triton.JITFunction):
        return f"matrix is on {matrix.device}: move it to a CUDA device, or set TRITON_INTERPRET=1"
    return None


def sinkhorn_triton(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    """Return `matrix` after one column step and (iterations - 1) row-and-column steps.

    One step is y = x / (sum(x) + eps), over dim -2 in a column step and over dim -1 in a row step.

    matrix   [..., N, N] fp32, positive; N 2 or 4
    returns  [..., N, N] fp32

    Contract: `sinkhorn_planes`; equal up to fp32 rounding, not bit for bit. Reads no
    value on the host, so a CUDA graph can hold it. Section 6.
    """
    reason = sinkhorn_unsupported(matrix, iterations)
    if reason is not None:
        raise SinkhornUnsupportedError(reason)
    return _SinkhornTritonFn.apply(matrix, iterations, eps)


class _SinkhornTritonFn(torch.autograd.Function):
    """One step is y = x / d, d = sum(x) + eps; so dL/dx = (g - sum(g * y)) / d."""

    @staticmethod
    def forward(ctx, matrix: Tensor, iterations: int, eps: float) -> Tensor:
        matrix = matrix.contiguous()
        ctx.save_for_backward(matrix)
        ctx.iterations, ctx.eps = iterations, eps
        out = torch.empty_like(matrix)
        if matrix.numel():
            total = matrix.shape[:-2].numel()
            _sinkhorn_fwd_kernel[(-(-total // _BLOCK),)](
                matrix, out, total, iterations, eps, **_launch(matrix)
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (matrix,) = ctx.saved_tensors
        grad_matrix = torch.empty_like(matrix)
        if matrix.numel():
            num, total = matrix.shape[-1], matrix.shape[:-2].numel()
            programs, steps = -(-total // _BLOCK), 2 * ctx.iterations - 1
            divisors = matrix.new_empty(programs, steps, _BLOCK, num)
            _sinkhorn_bwd_kernel[(programs,)](
                matrix, grad.contiguous(), grad_matrix, divisors, total, ctx.iterations, ctx.eps,
                **_launch(matrix),
            )  # fmt: skip
        return grad_matrix, None, None


def _launch(matrix: Tensor) -> dict[str, Any]:
    """Return what the kernels are compiled with."""
    return {"N": matrix.shape[-1], "BLOCK": _BLOCK, "num_warps": 4}


@triton.jit
def _places(total, N: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets [BLOCK, N, N] of this program's matrices, and which are there."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i, j = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
    return index[:, None, None] * (N * N) + i * N + j, (index < total)[:, None, None]


@triton.jit
def _divisor(x, eps, axis: tl.constexpr):
    return tl.expand_dims(tl.sum(x, axis=axis), axis) + eps


@triton.jit
def _pull(grad, y, divisor, axis: tl.constexpr):
    """Return the gradient before a step, from the one after it, its result and its divisor."""
    return (grad - tl.expand_dims(tl.sum(grad * y, axis=axis), axis)) / divisor


@triton.jit
def _sinkhorn_fwd_kernel(matrix, out, total, iterations, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    """Balance BLOCK matrices."""
    places, inside = _places(total, N, BLOCK)
    x = tl.load(matrix + places, mask=inside, other=1.0)
    x = x / _divisor(x, eps, 1)
    for _ in range(1, iterations):
        x = x / _divisor(x, eps, 2)
        x = x / _divisor(x, eps, 1)
    tl.store(out + places, x, mask=inside)


@triton.jit
def _sinkhorn_bwd_kernel(
    matrix, grad, grad_matrix, divisors, total, iterations, eps,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Balance BLOCK matrices again, then walk back through the steps."""
    places, inside = _places(total, N, BLOCK)
    x = tl.load(matrix + places, mask=inside, other=1.0)
    # Step s of this program is divisors[s]: [BLOCK, N]. Odd steps are over rows.
    stored = divisors + tl.program_id(0).to(tl.int64) * (2 * iterations - 1) * (BLOCK * N)
    member = tl.arange(0, BLOCK)[:, None, None] * N
    of_column = stored + member + tl.arange(0, N)[None, None, :]  # [BLOCK, 1, N]
    of_row = stored + member + tl.arange(0, N)[None, :, None]  # [BLOCK, N, 1]
    step_size = BLOCK * N
    by_column = _divisor(x, eps, 1)
    tl.store(of_column, by_column)
    x = x / by_column
    for pair in range(1, iterations):
        by_row = _divisor(x, eps, 2)
        tl.store(of_row + (2 * pair - 1) * step_size, by_row)
        x = x / by_row
        by_column = _divisor(x, eps, 1)
        tl.store(of_column + 2 * pair * step_size, by_column)
        x = x / by_column
    # A divisor is read by other threads than the one that stored it.
    tl.debug_barrier()
    g = tl.load(grad + places, mask=inside, other=0.0)
    for back in range(1, iterations):
        pair = iterations - back
        by_column = tl.load(of_column + 2 * pair * step_size)
        g = _pull(g, x, by_column, 1)
        x = x * by_column
        by_row = tl.load(of_row + (2 * pair - 1) * step_size)
        g = _pull(g, x, by_row, 2)
        x = x * by_row
    g = _pull(g, x, tl.load(of_column), 1)
    tl.store(grad_matrix + places, g, mask=inside)
