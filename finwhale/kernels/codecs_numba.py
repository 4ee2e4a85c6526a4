"""Packing of cache rows and the rounding of index queries, compiled for one CPU thread.

Same bytes as `finwhale.cache.paged_reads.pack_*` in storage "fp4", and same values as
`finwhale.ops.rounding.round_index`: everything is exact integer or fp32 work in the stated order,
so no fast-math flag is set. The easy mistake: a reciprocal of the scale instead of a division.
Only files named *_numba.py import numba; nothing imports them unless asked (extra `engine`).
Source: spec/backbone.md sections 9.2 to 9.4.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from finwhale.cache import paged_reads
from finwhale.kernels.fused_numba import _array

_compiled = njit(cache=True, nogil=True, error_model="numpy")
_INV_448, _INV_6 = np.float32(1.0 / 448.0), np.float32(1.0 / 6.0)
_MIN_WINDOW = np.float32(1e-4)
_MIN_ENTRY = np.float32(6.0 * 2.0**-9)
_MIN_INDEX = np.float32(6.0 * 2.0**-126)
_SIX, _E4M3_MAX = np.float32(6.0), np.float32(448.0)
_SMALLEST_NORMAL, _PER_SUBNORMAL = np.float32(2.0**-6), np.float32(2.0**9)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E2M1[8] = -0.0
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@_compiled
def _largest(x):
    """Return the largest magnitude of a group."""
    best = np.float32(0.0)
    for i in range(x.shape[0]):
        best = max(best, abs(x[i]))
    return best


@_compiled
def _ceil_exponent(value, bits):
    """Return 2^ceil(log2 value) as a UE8M0 code. `bits` [1] int32 is the view of `value` [1]."""
    code = (bits[0] >> 23) & 0xFF
    if bits[0] & 0x7FFFFF:
        code += 1
    return min(code, 254)


@_compiled
def _power(code, value, bits):
    """Return 2^(code - 127); code 0 is subnormal."""
    bits[0] = 0x00400000 if code == 0 else code << 23
    return value[0]


@_compiled
def _e4m3(value, bits):
    """Return the E4M3 code of value[0], nearest and ties to even, saturating at 448."""
    sign = (bits[0] >> 24) & 0x80
    bits[0] &= 0x7FFFFFFF
    value[0] = min(value[0], _E4M3_MAX)
    if value[0] < _SMALLEST_NORMAL:
        # np.rint rounds halves to even; 8 is the smallest normal.
        return sign | int(np.rint(value[0] * _PER_SUBNORMAL))
    bits[0] += 0x7FFFF + ((bits[0] >> 20) & 1)
    return sign | ((((bits[0] >> 23) - 120) << 3) | ((bits[0] >> 20) & 7))


@_compiled
def _e2m1(x):
    """Return the E2M1 code of x, nearest and ties to the even code, saturating at 6."""
    a = abs(x)
    code = 0
    if a > 0.25:
        code = 1
    if a >= 0.75:
        code = 2
    if a > 1.25:
        code = 3
    if a >= 1.75:
        code = 4
    if a > 2.5:
        code = 5
    if a >= 3.5:
        code = 6
    if a > 5.0:
        code = 7
    return code


@_compiled
def _signed(x, code, value, bits):
    """Return `code` with the sign bit of x, of minus zero too."""
    value[0] = x
    return code | ((bits[0] >> 28) & 8)


@_compiled
def _pack_windows(x, out):
    rows, dim = x.shape
    value = np.empty(1, np.float32)
    bits = value.view(np.int32)
    for t in range(rows):
        for g in range(dim // 32):
            value[0] = max(_largest(x[t, 32 * g : 32 * g + 32]), _MIN_WINDOW) * _INV_448
            code = _ceil_exponent(value, bits)
            out[t, dim + g] = code
            scale = _power(code, value, bits)
            for i in range(32 * g, 32 * g + 32):
                value[0] = x[t, i] / scale
                out[t, i] = _e4m3(value, bits)


@_compiled
def _pack_entries(x, out):
    rows, dim = x.shape
    value = np.empty(1, np.float32)
    bits = value.view(np.int32)
    for t in range(rows):
        for g in range(dim // 16):
            value[0] = max(_largest(x[t, 16 * g : 16 * g + 16]), _MIN_ENTRY) / _SIX
            code = _e4m3(value, bits)
            out[t, dim // 2 + g] = code
            scale = _E4M3[code]
            for i in range(8 * g, 8 * g + 8):
                even, odd = x[t, 2 * i] / scale, x[t, 2 * i + 1] / scale
                low = _signed(even, _e2m1(even), value, bits)
                out[t, i] = low | (_signed(odd, _e2m1(odd), value, bits) << 4)


@_compiled
def _pack_index_rows(x, out):
    rows, dim = x.shape
    value = np.empty(1, np.float32)
    bits = value.view(np.int32)
    for t in range(rows):
        for g in range(dim // 32):
            value[0] = max(_largest(x[t, 32 * g : 32 * g + 32]), _MIN_INDEX) * _INV_6
            code = _ceil_exponent(value, bits)
            out[t, dim // 2 + g] = code
            scale = _power(code, value, bits)
            for i in range(16 * g, 16 * g + 16):
                even, odd = x[t, 2 * i] / scale, x[t, 2 * i + 1] / scale
                low = _signed(even, _e2m1(even), value, bits)
                out[t, i] = low | (_signed(odd, _e2m1(odd), value, bits) << 4)


@_compiled
def _round_index_rows(x, out):
    rows, dim = x.shape
    value = np.empty(1, np.float32)
    bits = value.view(np.int32)
    for t in range(rows):
        for g in range(dim // 32):
            part = x[t, 32 * g : 32 * g + 32]
            is_finite = True
            for i in range(32):
                is_finite &= np.isfinite(part[i])
            value[0] = max(_largest(part), _MIN_INDEX) * _INV_6
            scale = _power(_ceil_exponent(value, bits), value, bits)
            for i in range(32):
                y = part[i] / scale
                code = _signed(y, _e2m1(y), value, bits)
                out[t, 32 * g + i] = _E2M1[code] * scale if is_finite else np.float32(np.nan)


def _packed(kernel, x: Tensor, row_bytes: int) -> Tensor:
    *lead, dim = x.shape
    rows = math.prod(lead)
    out = torch.empty(*lead, row_bytes, dtype=torch.uint8)
    if rows:
        kernel(_array("x", x, rows, dim), out.numpy().reshape(rows, row_bytes))
    return out


def pack_window(x: Tensor, storage: str = "fp4") -> Tensor:
    """Return window rows [..., wb] uint8 of x [..., D] fp32."""
    if storage != "fp4":
        return paged_reads.pack_window(x, storage)
    return _packed(_pack_windows, x, paged_reads.window_row_bytes(x.shape[-1], storage))


def pack_entry(x: Tensor, storage: str = "fp4") -> Tensor:
    """Return entries [..., eb] uint8 of x [..., D] fp32."""
    if storage != "fp4":
        return paged_reads.pack_entry(x, storage)
    return _packed(_pack_entries, x, paged_reads.entry_row_bytes(x.shape[-1], storage))


def pack_index(x: Tensor, storage: str = "fp4") -> Tensor:
    """Return index keys [..., kb] uint8 of x [..., DI] fp32."""
    if storage != "fp4":
        return paged_reads.pack_index(x, storage)
    return _packed(_pack_index_rows, x, paged_reads.index_row_bytes(x.shape[-1], storage))


def round_index(x: Tensor) -> Tensor:
    """Return x [..., DI] fp32 through MXFP4 and back; as `finwhale.ops.rounding.round_index`."""
    *lead, dim = x.shape
    rows = math.prod(lead)
    out = torch.empty(x.shape)
    if rows:
        _round_index_rows(_array("x", x, rows, dim), out.numpy().reshape(rows, dim))
    return out
