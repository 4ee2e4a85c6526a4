"""Attention straight from packed cache rows, compiled for one CPU thread.

Same contracts as `finwhale.cache.paged_reads`. A result is a function of its own row: visible keys
are taken in slot order, in tiles of fixed size, and every inner loop has one order of arithmetic.
The easy mistake: an inner loop as long as what is left, whose last elements would go through other
instructions and get other bits than the same elements of a longer row.
Only files named *_numba.py import numba; nothing imports them unless asked (extra `engine`).
Source: spec/backbone.md sections 4.5 and 9.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from finwhale.cache.paged_reads import entry_row_bytes, window_row_bytes
from finwhale.kernels.fused_numba import exponential
from finwhale.kernels.select import KernelError
from finwhale.ops.codecs import e2m1_decode, ue8m0_decode, unpack_nibbles

# Sums may be regrouped into vector lanes and fused into multiply-adds, once, at compile time. NaN,
# infinity and the sign of zero (D06) keep their meaning. With Python's error model every division
# would test for zero and leave the loop, and no loop with one would become vector code.
_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
# Numba keeps compiled code per file: after a change of `exponential`, which is compiled into the
# functions here, this file must be touched too.
_BYTES = torch.arange(256, dtype=torch.uint8)
_E4M3 = _BYTES.view(torch.float8_e4m3fn).float().numpy()  # [256]
UE8M0 = ue8m0_decode(_BYTES).numpy()  # [256]
_PAIRS = e2m1_decode(unpack_nibbles(_BYTES[:, None]))  # [256, 2]
E2M1_EVEN = _PAIRS[:, 0].contiguous().numpy()
E2M1_ODD = _PAIRS[:, 1].contiguous().numpy()
# Keys per tile of attention; 64 rows of 512 fp32 values are 128 KiB, so they stay near the core.
_KEYS = 64
# From this many queries on it pays to look which rows they share.
_MIN_DECODE_ONCE = 8
_DECODED_BYTES = 1 << 27


# What a row holds: codes with scales, or plain values of two or four bytes.
KINDS = {"fp4": 0, "bf16": 2, "fp32": 4}


@_compiled
def _unpack_plain(packed, bits, size):
    """Write the fp32 bit patterns of bf16 or fp32 values. packed [size * D] uint8, bits [D]."""
    for i in range(bits.shape[0]):
        pattern = np.int32(0)
        for b in range(size):
            pattern |= np.int32(packed[size * i + b]) << (8 * (4 - size + b))
        bits[i] = pattern


@_compiled
def _unpack_window(packed, row):
    """Write the fp32 values of one window row. packed [wb] uint8, row [D] fp32."""
    dim = row.shape[0]
    for g in range(dim // 32):
        scale = UE8M0[packed[dim + g]]
        for i in range(32 * g, 32 * g + 32):
            row[i] = _E4M3[packed[i]] * scale


@_compiled
def _unpack_entry(packed, row):
    """Write the fp32 values of one entry. packed [eb] uint8, row [D] fp32."""
    half = row.shape[0] // 2
    for g in range(half // 8):
        scale = _E4M3[packed[half + g]]
        for i in range(8 * g, 8 * g + 8):
            row[2 * i] = E2M1_EVEN[packed[i]] * scale
            row[2 * i + 1] = E2M1_ODD[packed[i]] * scale


@_compiled
def _score_tile(q, keys, count, factor, scores):
    """Write scores[h, s] = factor * q_h . k_s. q [H, D], keys [_KEYS, D], scores [H, _KEYS]."""
    heads, dim = q.shape
    blocked = heads - heads % 4
    for s in range(count):
        k = keys[s]
        for h in range(0, blocked, 4):
            q0, q1, q2, q3 = q[h], q[h + 1], q[h + 2], q[h + 3]
            a0 = a1 = a2 = a3 = np.float32(0.0)
            for d in range(dim):
                a0 += q0[d] * k[d]
                a1 += q1[d] * k[d]
                a2 += q2[d] * k[d]
                a3 += q3[d] * k[d]
            scores[h, s] = a0 * factor
            scores[h + 1, s] = a1 * factor
            scores[h + 2, s] = a2 * factor
            scores[h + 3, s] = a3 * factor
        for h in range(blocked, heads):
            q0 = q[h]
            a0 = np.float32(0.0)
            for d in range(dim):
                a0 += q0[d] * k[d]
            scores[h, s] = a0 * factor


@_compiled
def _softmax_tile(scores, count, top, total, out):
    """Turn scores into probabilities relative to the running maximum; rescale what came before."""
    heads, dim = out.shape
    for h in range(heads):
        best = top[h]
        for s in range(count):
            best = max(best, scores[h, s])
        if best > top[h]:
            shrink = exponential(top[h] - best)
            top[h] = best
            total[h] *= shrink
            for d in range(dim):
                out[h, d] *= shrink
        added = np.float32(0.0)
        for s in range(count):
            p = exponential(scores[h, s] - best)
            scores[h, s] = p
            added += p
        total[h] += added


@_compiled
def _add_values(p, keys, count, out):
    """Add sum_s p[h, s] k_s to out[h]. p [H, _KEYS], keys [_KEYS, D], out [H, D]."""
    heads, dim = out.shape
    blocked = count - count % 4
    paired = heads - heads % 2
    for s in range(0, blocked, 4):
        k0, k1, k2, k3 = keys[s], keys[s + 1], keys[s + 2], keys[s + 3]
        for h in range(0, paired, 2):
            a0, a1, a2, a3 = p[h, s], p[h, s + 1], p[h, s + 2], p[h, s + 3]
            b0, b1, b2, b3 = p[h + 1, s], p[h + 1, s + 1], p[h + 1, s + 2], p[h + 1, s + 3]
            x, y = out[h], out[h + 1]
            for d in range(dim):
                x[d] += a0 * k0[d] + a1 * k1[d] + a2 * k2[d] + a3 * k3[d]
                y[d] += b0 * k0[d] + b1 * k1[d] + b2 * k2[d] + b3 * k3[d]
        for h in range(paired, heads):
            a0, a1, a2, a3 = p[h, s], p[h, s + 1], p[h, s + 2], p[h, s + 3]
            x = out[h]
            for d in range(dim):
                x[d] += a0 * k0[d] + a1 * k1[d] + a2 * k2[d] + a3 * k3[d]
    for s in range(blocked, count):
        k0 = keys[s]
        for h in range(heads):
            a0 = p[h, s]
            x = out[h]
            for d in range(dim):
                x[d] += a0 * k0[d]


@_compiled
def _attend(q, fresh, ring, window_index, main, entry_index, sink, kind, factor, out):
    tokens, heads, dim = q.shape
    width, num_ring = window_index.shape[1], ring.shape[0]
    slots = width + entry_index.shape[1]
    keys = np.empty((_KEYS, dim), np.float32)
    bits = keys.view(np.int32)
    scores = np.empty((heads, _KEYS), np.float32)
    top, total = np.empty(heads, np.float32), np.empty(heads, np.float32)
    for t in range(tokens):
        for h in range(heads):
            top[h] = -np.inf
            total[h] = 0.0
            for d in range(dim):
                out[t, h, d] = 0.0
        slot = 0
        while slot < slots:
            count = 0
            while slot < slots and count < _KEYS:
                is_window = slot < width
                row = window_index[t, slot] if is_window else entry_index[t, slot - width]
                slot += 1
                if row < 0:
                    continue
                if not is_window:
                    packed = main[row]
                elif row < num_ring:
                    packed = ring[row]
                else:
                    packed = fresh[row - num_ring]
                if kind:
                    _unpack_plain(packed, bits[count], kind)
                elif is_window:
                    _unpack_window(packed, keys[count])
                else:
                    _unpack_entry(packed, keys[count])
                count += 1
            if count:
                _score_tile(q[t], keys, count, factor, scores)
                _softmax_tile(scores, count, top, total, out[t])
                _add_values(scores, keys, count, out[t])
        for h in range(heads):
            # Nothing seen: total is 0 and the values are 0 already.
            if total[h] != 0.0:
                share = np.float32(1.0) / (total[h] + exponential(sink[h] - top[h]))
                for d in range(dim):
                    out[t, h, d] *= share


@_compiled
def _number_rows(window_index, entry_index, num_window, num_main, index):
    """Number the distinct rows that are seen, in order of sight; index [T, W + K] int32 gets them.

    Returns the source row of each number (an entry behind num_window) and how many slots see one.
    """
    width = window_index.shape[1]
    numbers = np.full(num_window + num_main, -1, np.int32)
    sources = np.empty(min(index.size, num_window + num_main), np.int64)
    count = seen = 0
    for t in range(index.shape[0]):
        for slot in range(index.shape[1]):
            row = window_index[t, slot] if slot < width else entry_index[t, slot - width]
            if row < 0:
                index[t, slot] = -1
                continue
            if slot >= width:
                row += num_window
            if numbers[row] < 0:
                numbers[row] = count
                sources[count] = row
                count += 1
            index[t, slot] = numbers[row]
            seen += 1
    return sources[:count], seen


@_compiled
def _decode(sources, fresh, ring, main, kind, decoded):
    """Write the values of the numbered rows: decoded [U, D] fp32."""
    num_ring, num_window = ring.shape[0], ring.shape[0] + fresh.shape[0]
    bits = decoded.view(np.int32)
    for n in range(sources.shape[0]):
        row = sources[n]
        if row >= num_window:
            packed = main[row - num_window]
        elif row < num_ring:
            packed = ring[row]
        else:
            packed = fresh[row - num_ring]
        if kind:
            _unpack_plain(packed, bits[n], kind)
        elif row < num_window:
            _unpack_window(packed, decoded[n])
        else:
            _unpack_entry(packed, decoded[n])


@_compiled
def _attend_decoded(q, decoded, index, sink, factor, out):
    """As `_attend`, on rows that were decoded before: the same tiles, so the same bits."""
    tokens, heads, dim = q.shape
    slots = index.shape[1]
    keys = np.empty((_KEYS, dim), np.float32)
    scores = np.empty((heads, _KEYS), np.float32)
    top, total = np.empty(heads, np.float32), np.empty(heads, np.float32)
    for t in range(tokens):
        for h in range(heads):
            top[h] = -np.inf
            total[h] = 0.0
            for d in range(dim):
                out[t, h, d] = 0.0
        slot = 0
        while slot < slots:
            count = 0
            while slot < slots and count < _KEYS:
                row = index[t, slot]
                slot += 1
                if row >= 0:
                    source, target = decoded[row], keys[count]
                    for d in range(dim):
                        target[d] = source[d]
                    count += 1
            if count:
                _score_tile(q[t], keys, count, factor, scores)
                _softmax_tile(scores, count, top, total, out[t])
                _add_values(scores, keys, count, out[t])
        for h in range(heads):
            if total[h] != 0.0:
                share = np.float32(1.0) / (total[h] + exponential(sink[h] - top[h]))
                for d in range(dim):
                    out[t, h, d] *= share


def plain_array(name: str, x: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Return x as a contiguous array over the same memory, or refuse it."""
    if x.dtype is not dtype or not x.is_cpu:
        raise KernelError(f"{name}: got {x.dtype} on {x.device}, expected {dtype} on a CPU")
    return np.ascontiguousarray((x.detach() if x.requires_grad else x).numpy())


def packed_rows(name: str, x: Tensor, row_bytes: int) -> np.ndarray:
    """Return packed rows as such an array, or refuse their width."""
    if x.shape[-1] != row_bytes:
        raise KernelError(f"{name}: got rows of {x.shape[-1]} bytes, expected {row_bytes}")
    return plain_array(name, x, torch.uint8)


def paged_attention(
    q: Tensor,
    fresh: Tensor,
    ring: Tensor,
    window_index: Tensor,
    main: Tensor | None,
    entry_index: Tensor,
    sink: Tensor,
    storage: str = "fp4",
) -> Tensor:
    """Return [T, H, D] fp32; same contract as `finwhale.cache.paged_reads.paged_attention_ref`.

    The softmax runs over tiles of visible keys with a running maximum. Rows that many queries of a
    call see are decoded once for all of them, into memory of this call. No gradient.
    """
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads, dim)
    if main is None:
        main = torch.empty(0, entry_row_bytes(dim, storage), dtype=torch.uint8)
        entry_index = entry_index.new_empty(tokens, 0)
    queries, factor = plain_array("q", q, torch.float32), np.float32(dim**-0.5)
    rows = (
        packed_rows("fresh", fresh, window_row_bytes(dim, storage)),
        packed_rows("ring", ring, window_row_bytes(dim, storage)),
        packed_rows("main", main, entry_row_bytes(dim, storage)),
    )
    windows = plain_array("window_index", window_index, torch.int64)
    entries = plain_array("entry_index", entry_index, torch.int64)
    sinks, kind = plain_array("sink", sink, torch.float32), KINDS[storage]
    if tokens >= _MIN_DECODE_ONCE:
        index = np.empty((tokens, windows.shape[1] + entries.shape[1]), np.int32)
        num_window = rows[0].shape[0] + rows[1].shape[0]
        sources, seen = _number_rows(windows, entries, num_window, rows[2].shape[0], index)
        if seen >= 2 * len(sources) and 4 * dim * len(sources) <= _DECODED_BYTES:
            decoded = np.empty((len(sources), dim), np.float32)
            _decode(sources, *rows, kind, decoded)
            _attend_decoded(queries, decoded, index, sinks, factor, out.numpy())
            return out
    _attend(queries, rows[0], rows[1], windows, rows[2], entries, sinks, kind, factor, out.numpy())
    return out
