"""Norm, hyper-connection, rotation, SwiGLU and Engram gate: one pass over each row, one CPU thread.

Same contracts as the reference fields of `finwhale.ops.record.Ops`, for fp32 alone and without
gradients; another dtype or a tensor that asks for a gradient is refused, never converted. A row's
bits depend on that row alone. The one matrix product, in `hyper_mix`, stays with the caller's
`linear`, whose bits are the caller's affair: a product over all rows may change with their number.
Only files named *_numba.py import numba; nothing imports them unless asked (extra `engine`).
Source: spec/backbone.md, conventions and sections 4.7, 6, 7.6 and 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numba import njit
from torch import Tensor

from finwhale.kernels.select import KernelError
from finwhale.ops.hyper_connection import HyperMix

# Sums may be regrouped into vector lanes and fused into multiply-adds, once, at compile time. NaN,
# infinity and the sign of zero (D06) keep their meaning. With Python's error model every division
# would test for zero and leave the loop, and no loop with one would become vector code.
_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
_compiled_in_order = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_ONE = np.float32(1.0)
_PER_LN2 = np.float32(1.0 / math.log(2.0))
# ln 2 in two parts; the first has 15 bits, so that its products with |n| <= 127 are exact.
_LN2_HIGH = np.float32(math.floor(math.log(2.0) * 2**15) / 2**15)
_LN2_LOW = np.float32(math.log(2.0) - math.floor(math.log(2.0) * 2**15) / 2**15)
_EXP_SERIES = tuple(np.float32(1.0 / math.factorial(i)) for i in range(7))


def _array(name: str, x: Tensor, *shape: int) -> np.ndarray:
    """Return x as a contiguous fp32 array of `shape`, or refuse it."""
    if x.dtype is not torch.float32 or not x.is_cpu:
        raise KernelError(
            f"{name}: got {x.dtype} on {x.device}, expected torch.float32 on a CPU; "
            "the references in finwhale.ops take any"
        )
    if x.requires_grad:
        if torch.is_grad_enabled():
            raise KernelError(
                f"{name}: asks for a gradient, which these kernels do not have; expected "
                "torch.inference_mode, or the references in finwhale.ops"
            )
        x = x.detach()
    array = np.ascontiguousarray(x.numpy())
    return array if array.shape == shape else array.reshape(shape)


def _constant(name: str, x: Tensor, *shape: int) -> np.ndarray:
    """Return `_array` of a weight, made once per tensor: at one row the conversions count."""
    kept = getattr(x, "_finwhale_array", None)
    if kept is None or kept[0] != x.data_ptr() or kept[1].shape != shape:
        kept = x.data_ptr(), _array(name, x, *shape)
        x._finwhale_array = kept  # type: ignore[attr-defined]
    return kept[1]


def _empty(*shape: int) -> np.ndarray:
    """Return fp32 memory for a result; numpy is the quicker of the two at small sizes."""
    return np.empty(shape, np.float32)


@_compiled_in_order
def exponential(x):
    """Return e^x in fp32 within 2 units in the last place, x held to -87 .. 88.

    e^x = 2^n e^r, n = round(x / ln 2), |r| <= ln(2) / 2. Plain arithmetic, so that loops over it
    become vector code, which a call into the C library prevents. A NaN stays one.
    """
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    n = np.int32(x * _PER_LN2 + (np.float32(0.5) if x >= 0 else np.float32(-0.5)))
    turns = np.float32(n)
    r = (x - turns * _LN2_HIGH) - turns * _LN2_LOW
    p = _EXP_SERIES[6]
    p = p * r + _EXP_SERIES[5]
    p = p * r + _EXP_SERIES[4]
    p = p * r + _EXP_SERIES[3]
    p = p * r + _EXP_SERIES[2]
    p = p * r + _ONE
    p = p * r + _ONE
    return p * np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)


@_compiled_in_order
def _sigmoid(x):
    return _ONE / (_ONE + exponential(-x))


@_compiled
def _mean_square(row):
    total = np.float32(0.0)
    for i in range(row.shape[0]):
        total += row[i] * row[i]
    return total / np.float32(row.shape[0])


@_compiled
def _norm_rows(x, weight, eps, out):
    for t in range(x.shape[0]):
        row, to = x[t], out[t]
        scale = _ONE / np.float32(math.sqrt(_mean_square(row) + eps))
        for i in range(row.shape[0]):
            to[i] = weight[i] * (row[i] * scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return w * x * rsqrt(mean(x^2) + eps); as `finwhale.ops.norm.rms_norm`. x [..., D]."""
    *lead, dim = x.shape
    tokens = math.prod(lead)
    out = _empty(*x.shape)
    _norm_rows(
        _array("x", x, tokens, dim),
        _constant("weight", weight, dim),
        np.float32(eps),
        out.reshape(tokens, dim),
    )
    return torch.from_numpy(out)


@_compiled
def _divide_rows(matrix, eps):
    """Divide every row of matrix [N, N] by its sum plus eps, in place."""
    num = matrix.shape[0]
    for i in range(num):
        total = np.float32(0.0)
        for j in range(num):
            total += matrix[i, j]
        total += eps
        for j in range(num):
            matrix[i, j] /= total


@_compiled
def _divide_columns(matrix, eps):
    """Divide every column of matrix [N, N] by its sum plus eps, in place."""
    num = matrix.shape[0]
    for j in range(num):
        total = np.float32(0.0)
        for i in range(num):
            total += matrix[i, j]
        total += eps
        for i in range(num):
            matrix[i, j] /= total


@_compiled
def _mix_rows(u, projected, base, scale, iterations, norm_eps, eps, pre, post, comb):
    num = pre.shape[1]
    for t in range(u.shape[0]):
        m, matrix = projected[t], comb[t]
        rms = _ONE / np.float32(math.sqrt(_mean_square(u[t]) + norm_eps))
        for i in range(num):
            k = num + i
            pre[t, i] = _sigmoid(scale[0] * (m[i] * rms) + base[i]) + eps
            post[t, i] = np.float32(2.0) * _sigmoid(scale[1] * (m[k] * rms) + base[k])
            best = np.float32(-np.inf)
            for j in range(num):
                k = (2 + i) * num + j
                matrix[i, j] = scale[2] * (m[k] * rms) + base[k]
                best = max(best, matrix[i, j])
            total = np.float32(0.0)
            for j in range(num):
                matrix[i, j] = exponential(matrix[i, j] - best)
                total += matrix[i, j]
            for j in range(num):
                matrix[i, j] = matrix[i, j] / total + eps
        _divide_columns(matrix, eps)
        for _ in range(iterations - 1):
            _divide_rows(matrix, eps)
            _divide_columns(matrix, eps)


def hyper_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
    linear: Callable[[Tensor, Tensor], Tensor],
) -> HyperMix:
    """Return the coefficients of one site; as `finwhale.ops.hyper_connection.hyper_mix`.

    streams  [..., N, C]
    linear   x [T, N * C], weight [(2 + N) * N, N * C] -> [T, (2 + N) * N]; the projection

    Everything behind the projection is one pass per token. Section 6, steps 1 to 3.
    """
    *lead, num, width = streams.shape
    tokens = math.prod(lead)
    u = streams.reshape(tokens, num * width)
    pre, post, comb = _empty(*lead, num), _empty(*lead, num), _empty(*lead, num, num)
    _mix_rows(
        _array("streams", u, tokens, num * width),
        _array("linear", linear(u, fn), tokens, (2 + num) * num),
        _constant("base", base, (2 + num) * num),
        _constant("scale", scale, 3),
        iterations,
        np.float32(norm_eps),
        np.float32(eps),
        pre.reshape(tokens, num),
        post.reshape(tokens, num),
        comb.reshape(tokens, num, num),
    )
    return HyperMix(*(torch.from_numpy(array) for array in (pre, post, comb)))


@_compiled
def _collapse_rows(streams, pre, out):
    tokens, num, width = streams.shape
    for t in range(tokens):
        to = out[t]
        for c in range(width):
            to[c] = np.float32(0.0)
        for i in range(num):
            row, p = streams[t, i], pre[t, i]
            for c in range(width):
                to[c] += p * row[c]


def hyper_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Return sum_i pre_i X_i [..., C]; as `finwhale.ops.hyper_connection.hyper_collapse`."""
    *lead, num, width = streams.shape
    tokens = math.prod(lead)
    out = _empty(*lead, width)
    _collapse_rows(
        _array("streams", streams, tokens, num, width),
        _array("pre", pre if pre.numel() == tokens * num else pre.expand(*lead, num), tokens, num),
        out.reshape(tokens, width),
    )
    return torch.from_numpy(out)


@_compiled
def _expand_rows(y, streams, post, comb, out):
    tokens, num, width = streams.shape
    for t in range(tokens):
        new = y[t]
        for j in range(num):
            to, p = out[t, j], post[t, j]
            for c in range(width):
                to[c] = p * new[c]
            for i in range(num):
                row, share = streams[t, i], comb[t, i, j]
                for c in range(width):
                    to[c] += share * row[c]


def hyper_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return X'_j = post_j y + sum_i comb[i][j] X_i, as the reference in hyper_connection."""
    *lead, num, width = streams.shape
    tokens = math.prod(lead)
    out = _empty(*streams.shape)
    _expand_rows(
        _array("y", y, tokens, width),
        _array("streams", streams, tokens, num, width),
        _array("post", post, tokens, num),
        _array("comb", comb, tokens, num, num),
        out.reshape(tokens, num, width),
    )
    return torch.from_numpy(out)


@_compiled
def _rotate_rows(x, rotation, sign, out):
    tokens, heads, dim = x.shape
    pairs = rotation.shape[2]
    plain = dim - 2 * pairs
    for t in range(tokens):
        for h in range(heads):
            row, to = x[t, h], out[t, h]
            for d in range(plain):
                to[d] = row[d]
            for i in range(pairs):
                even, odd = row[plain + 2 * i], row[plain + 2 * i + 1]
                c, s = rotation[0, t, i], sign * rotation[1, t, i]
                to[plain + 2 * i] = even * c - odd * s
                to[plain + 2 * i + 1] = even * s + odd * c


def apply_rope(x: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
    """Return x with its last R channels rotated; as `finwhale.ops.rope.apply_rope`.

    x         [..., D] or [..., H, D]
    rotation  [2, ..., R/2], one dim less than x[None] if x has heads; it may broadcast to x
    """
    has_heads = x.dim() == rotation.dim()
    *lead, dim = x.shape
    heads = lead.pop() if has_heads else 1
    tokens, pairs = math.prod(lead), rotation.shape[-1]
    if rotation.numel() != 2 * tokens * pairs:
        rotation = rotation.expand(2, *lead, pairs)
    out = _empty(*x.shape)
    _rotate_rows(
        _array("x", x, tokens, heads, dim),
        _array("rotation", rotation, 2, tokens, pairs),
        np.float32(-1.0 if inverse else 1.0),
        out.reshape(tokens, heads, dim),
    )
    return torch.from_numpy(out)


@_compiled
def _swiglu_rows(gate, up, weight, limit, out):
    tokens, width = gate.shape
    for t in range(tokens):
        w = weight[t] if weight.shape[0] else _ONE
        for i in range(width):
            # A NaN compares false and stays.
            g = limit if gate[t, i] > limit else gate[t, i]
            u = limit if up[t, i] > limit else (-limit if up[t, i] < -limit else up[t, i])
            out[t, i] = g / (_ONE + exponential(-g)) * u * w


def clamped_swiglu(gate: Tensor, up: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit) * weight; as `finwhale.ops.moe`.

    gate, up  [..., F]
    weight    [..., 1] or None
    """
    *lead, width = gate.shape
    tokens = math.prod(lead)
    out = _empty(*lead, width)
    _swiglu_rows(
        _array("gate", gate, tokens, width),
        _array("up", up, tokens, width),
        np.empty(0, np.float32)
        if weight is None
        else _array("weight", weight.expand(*lead, 1), tokens),
        np.float32(limit),
        out.reshape(tokens, width),
    )
    return torch.from_numpy(out)


@_compiled
def _gate_rows(streams, keys, value, q_weight, k_weight, eps, out):
    tokens, num, width = streams.shape
    root = _ONE / np.float32(math.sqrt(width))
    for t in range(tokens):
        added = value[t]
        for n in range(num):
            x, key, q, k, to = streams[t, n], keys[t, n], q_weight[n], k_weight[n], out[t, n]
            dot = np.float32(0.0)
            for c in range(width):
                dot += x[c] * (q[c] * k[c]) * key[c]
            dot *= _ONE / np.float32(math.sqrt(_mean_square(x) + eps))
            dot *= _ONE / np.float32(math.sqrt(_mean_square(key) + eps))
            dot *= root
            size = np.float32(1e-6) if abs(dot) < np.float32(1e-6) else abs(dot)
            gate = _sigmoid(np.float32(math.copysign(math.sqrt(size), dot)))
            for c in range(width):
                to[c] = x[c] + gate * added[c]


def engram_gate(
    streams: Tensor,
    keys: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
) -> Tensor:
    """Return X_s + gate_s * value; as `finwhale.ops.engram.engram_gate`.

    streams, keys [..., N, C], value [..., C], q_weight and k_weight [N, C]. Section 7.6, D06.
    """
    *lead, num, width = streams.shape
    tokens = math.prod(lead)
    out = _empty(*streams.shape)
    _gate_rows(
        _array("streams", streams, tokens, num, width),
        _array("keys", keys, tokens, num, width),
        _array("value", value, tokens, width),
        _constant("q_weight", q_weight, num, width),
        _constant("k_weight", k_weight, num, width),
        np.float32(eps),
        out.reshape(tokens, num, width),
    )
    return torch.from_numpy(out)
