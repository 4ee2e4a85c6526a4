"""Index scores straight from packed keys, and the selection among them, for one CPU thread.

Same contracts as `finwhale.cache.paged_reads` and `finwhale.ops.index`. Queries and keys are FP4:
32 channels share a power of two, and a product of their codes is a small integer. So the dot
product of a group is exact in any order, and a processor that multiplies bytes (`HAS_DOT`) makes it
of bytes, sixteen entries at a time; without, and for plain values, floats give the same bits
(short of overflow).
Groups and heads are then added in a stated order, by functions without fast-math. A query that is
not on the grid takes the floats, whatever its neighbours take.
The easy mistake: to let a loaded tile or a neighbour decide how a row is scored.
Only files named *_numba.py import numba; nothing imports them unless asked (extra `engine`).
Source: spec/backbone.md sections 5.3 and 9.4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from finwhale.cache.paged_reads import index_row_bytes
from finwhale.kernels.paged_numba import (
    E2M1_EVEN,
    E2M1_ODD,
    KINDS,
    UE8M0,
    packed_rows,
    plain_array,
)
from finwhale.kernels.products_numba import compiler_features

# As in paged_numba.py: sums may be regrouped and fused, once, at compile time.
_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
_in_order = njit(cache=True, nogil=True, error_model="numpy")
HAS_DOT = "+avx512vnni" in compiler_features()
# Entries per tile: the length of every inner loop, four registers of the byte products.
_ENTRIES, _LANES = 64, 16
# Rows that share a tile: more would write to more pages at a time than a processor remembers.
_ROWS = 64
# Byte products take one unsigned side: twice the key's value, and 12 so that none is below 0.
_CODES = np.stack((2 * E2M1_EVEN + 12, 2 * E2M1_ODD + 12)).astype(np.int32)
_TWO_CODES = _CODES[0] | _CODES[1] << 8  # [256] the two codes of a byte
# Twice a value of E2M1 is one of these.
_IS_CODE = np.isin(np.arange(13), (0, 1, 2, 3, 4, 6, 8, 12))


def _byte_scores(
    typingctx, words, key_scales, queries, query_scales, starts, weights, heads, groups, scores
):
    """Add one query's scores to scores [_ENTRIES]; arguments are addresses, but for two counts.

    words       [G, 8, _ENTRIES] int32, four key codes each; key_scales [G, _ENTRIES] fp32
    queries     [HI, G, 8] int32, four codes each; query_scales [HI, G]
    starts      [HI, G] int32, what the 12 of every key code has to be paid with

    Heads in pairs, as `_score_entries`.
    """
    return types.void(*[types.intp] * 9), _byte_scores_code


def _byte_scores_code(context, builder, signature, args):
    if not HAS_DOT:
        return context.get_dummy_value()
    i32, i64, f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
    ints, floats = ir.VectorType(i32, _LANES), ir.VectorType(f32, _LANES)
    kinds = i32, f32, i32, f32, i32, f32, None, None, f32
    words, key_scales, queries, query_scales, starts, weights, heads, groups, scores = (
        arg if kind is None else builder.inttoptr(arg, kind.as_pointer())
        for arg, kind in zip(args, kinds, strict=True)
    )
    dot, fused = (
        cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
        for kind, name in ((ints, "llvm.x86.avx512.vpdpbusd.512"), (floats, "llvm.fma.v16f32"))
    )
    zero = ir.Constant(floats, [0.0] * _LANES)

    def one(array, index):
        return builder.load(builder.gep(array, [index]))

    def many(array, index, kind):
        found = builder.load(builder.bitcast(builder.gep(array, [index]), kind.as_pointer()))
        found.align = 4
        return found

    def spread(value, kind):
        empty = ir.Constant(kind, ir.Undefined)
        first = builder.insert_element(empty, value, i32(0))
        return builder.shuffle_vector(first, empty, ir.Constant(ints, [0] * _LANES))

    def plus(index, by):
        return builder.add(index, i64(by))

    parts = range(_ENTRIES // _LANES)
    sums = [[cgutils.alloca_once(builder, floats) for _ in parts] for _ in range(2)]
    with cgutils.for_range_slice(builder, i64(0), heads, i64(2), intp=i64) as (head, _):
        last = builder.sub(heads, i64(1))
        other = builder.select(builder.icmp_signed("<", head, last), plus(head, 1), head)
        for total in (*sums[0], *sums[1]):
            builder.store(zero, total)
        with cgutils.for_range(builder, groups, intp=i64) as loop:
            at = [builder.add(builder.mul(h, groups), loop.index) for h in (head, other)]
            dots = [[spread(one(starts, n), ints)] * len(parts) for n in at]
            first = builder.mul(loop.index, i64(8 * _ENTRIES))
            for i in range(8):
                codes = [spread(one(queries, plus(builder.mul(n, i64(8)), i)), ints) for n in at]
                for p in parts:
                    keys = many(words, plus(first, i * _ENTRIES + p * _LANES), ints)
                    for n in range(2):
                        dots[n][p] = builder.call(dot, [dots[n][p], keys, codes[n]])
            first = builder.mul(loop.index, i64(_ENTRIES))
            for p in parts:
                scale = many(key_scales, plus(first, p * _LANES), floats)
                for n in range(2):
                    # Powers of two: the product is exact, so the fused sum rounds as a plain one.
                    both = builder.fmul(scale, spread(one(query_scales, at[n]), floats))
                    value = builder.sitofp(dots[n][p], floats)
                    value = builder.call(fused, [value, both, builder.load(sums[n][p])])
                    builder.store(value, sums[n][p])
        is_pair = builder.icmp_signed(">", other, head)
        far = builder.select(is_pair, one(weights, other), f32(0.0))
        shares = spread(one(weights, head), floats), spread(far, floats)
        for p in parts:
            near, far = (builder.load(sums[n][p]) for n in range(2))
            near, far = (
                builder.fmul(w, builder.select(builder.fcmp_ordered("<", x, zero), zero, x))
                for w, x in zip(shares, (near, far), strict=True)
            )
            total = builder.fadd(many(scores, i64(p * _LANES), floats), builder.fadd(near, far))
            place = builder.gep(scores, [i64(p * _LANES)])
            builder.store(total, builder.bitcast(place, floats.as_pointer())).align = 4
    return context.get_dummy_value()


_add_byte_scores: Any = intrinsic(_byte_scores)


@_compiled
def _encode_queries(q, codes, scales, starts, is_coded):
    """Write the codes of queries that lie on the FP4 grid, and which rows do.

    q [T, HI, DI], codes [T, HI, DI] int8, scales and starts [T, HI, DI / 32], is_coded [T]
    """
    tokens, heads, dim = q.shape
    for t in range(tokens):
        is_coded[t] = True
        for h in range(heads):
            for g in range(dim // 32):
                group, to = q[t, h, 32 * g : 32 * g + 32], codes[t, h, 32 * g : 32 * g + 32]
                largest = np.float32(0.0)
                for d in range(32):
                    largest = max(largest, abs(group[d]))
                # A power of two under which the largest code is 4 or 6, or 3 of a coarser grid.
                scale = np.float32(1.0)
                if np.float32(2.0**-40) < largest < np.float32(2.0**40):
                    while largest > np.float32(6.0) * scale:
                        scale *= np.float32(2.0)
                    while largest <= np.float32(3.0) * scale:
                        scale *= np.float32(0.5)
                total = 0
                for d in range(32):
                    twice = group[d] * (np.float32(2.0) / scale)
                    code = np.int32(twice) if abs(twice) <= 12 else np.int32(5)
                    if code != twice or not _IS_CODE[abs(code)]:
                        is_coded[t] = False
                    to[d] = code
                    total += code
                # Twice a query's value times twice a key's.
                scales[t, h, g] = scale * np.float32(0.25)
                starts[t, h, g] = -12 * total


@_compiled
def _load_words(keys, rows, count, words, scales):
    """Write the codes of `count` pool rows, four channels to a word: words [DI / 4, _ENTRIES]."""
    half = 2 * words.shape[0]
    for j in range(count):
        key = keys[rows[j]]
        for i in range(words.shape[0]):
            words[i, j] = _TWO_CODES[key[2 * i]] | _TWO_CODES[key[2 * i + 1]] << 16
        for g in range(scales.shape[0]):
            scales[g, j] = UE8M0[key[half + g]]


@_compiled
def _load_entries(keys, rows, count, kind, scales, values):
    """Write the values of `count` pool rows, channels first: values [DI, _ENTRIES] fp32.

    rows [_ENTRIES] int64, scales [_ENTRIES] fp32 scratch
    """
    dim = values.shape[0]
    half = dim // 2
    if kind:
        bits = values.view(np.int32)
        for d in range(dim):
            for j in range(count):
                pattern = np.int32(0)
                for b in range(kind):
                    pattern |= np.int32(keys[rows[j], kind * d + b]) << (8 * (4 - kind + b))
                bits[d, j] = pattern
        return
    for g in range(dim // 32):
        for j in range(count):
            scales[j] = UE8M0[keys[rows[j], half + g]]
        for i in range(16 * g, 16 * g + 16):
            even, odd = values[2 * i], values[2 * i + 1]
            for j in range(count):
                byte = keys[rows[j], i]
                even[j] = E2M1_EVEN[byte] * scales[j]
                odd[j] = E2M1_ODD[byte] * scales[j]


@_in_order
def _add_groups(x, y, total, far):
    for j in range(_ENTRIES):
        total[j] += x[j]
        far[j] += y[j]


@_in_order
def _add_heads(w, v, x, y, scores):
    for j in range(_ENTRIES):
        # A NaN is not below 0, so it stays.
        near = w * (np.float32(0.0) if x[j] < 0 else x[j])
        scores[j] += near + v * (np.float32(0.0) if y[j] < 0 else y[j])


@_compiled
def _score_entries(q, weights, values, dots, scores):
    """Write scores[j] = sum_h w_h relu(q_h . k_j). q [HI, DI], values [DI, _ENTRIES].

    Two heads at a time; an odd last head goes with itself at weight 0.
    """
    heads, dim = q.shape
    x, y, total, far = dots[0], dots[1], dots[2], dots[3]
    for j in range(_ENTRIES):
        scores[j] = 0.0
    for h in range(0, heads, 2):
        other = min(h + 1, heads - 1)
        for j in range(_ENTRIES):
            total[j] = 0.0
            far[j] = 0.0
        for group in range(0, dim, 32):
            for j in range(_ENTRIES):
                x[j] = 0.0
                y[j] = 0.0
            for d in range(group, group + 32, 4):
                a0, a1, a2, a3 = q[h, d], q[h, d + 1], q[h, d + 2], q[h, d + 3]
                b0, b1, b2, b3 = q[other, d], q[other, d + 1], q[other, d + 2], q[other, d + 3]
                k0, k1, k2, k3 = values[d], values[d + 1], values[d + 2], values[d + 3]
                for j in range(_ENTRIES):
                    x[j] += a0 * k0[j] + a1 * k1[j] + a2 * k2[j] + a3 * k3[j]
                    y[j] += b0 * k0[j] + b1 * k1[j] + b2 * k2[j] + b3 * k3[j]
            _add_groups(x, y, total, far)
        v = weights[other] if other > h else np.float32(0.0)
        _add_heads(weights[h], v, total, far, scores)


@_compiled
def _score_tile(t, q, weights, coded, tile, dots, scores):
    """Write the scores of one row against a loaded tile, by bytes if the row is coded."""
    codes, query_scales, starts, is_coded = coded
    words, key_scales, values = tile
    if not is_coded[t]:
        _score_entries(q[t], weights[t], values, dots, scores)
        return
    for j in range(_ENTRIES):
        scores[j] = 0.0
    _add_byte_scores(
        words.ctypes.data,
        key_scales.ctypes.data,
        codes[t].ctypes.data,
        query_scales[t].ctypes.data,
        starts[t].ctypes.data,
        weights[t].ctypes.data,
        q.shape[1],
        q.shape[2] // 32,
        scores.ctypes.data,
    )


@_compiled
def _load_tile(keys, rows, count, kind, has_coded, has_plain, scales, tile):
    words, key_scales, values = tile
    if has_coded:
        _load_words(keys, rows, count, words, key_scales)
    if has_plain:
        _load_entries(keys, rows, count, kind, scales, values)


@_compiled
def _empty_tile(dim):
    """Columns behind the last entry keep older values: no column meets another one."""
    words = np.zeros((dim // 4, _ENTRIES), np.int32)
    key_scales = np.zeros((dim // 32, _ENTRIES), np.float32)
    return words, key_scales, np.zeros((dim, _ENTRIES), np.float32)


@_compiled
def _score_rows(q, weights, coded, keys, tables, sequence, order, visible, per_block, kind, out):
    tokens, _, dim = q.shape
    num_columns = out.shape[1]
    rows, scales = np.zeros(_ENTRIES, np.int64), np.zeros(_ENTRIES, np.float32)
    tile, is_coded = _empty_tile(dim), coded[3]
    dots, scores = np.empty((4, _ENTRIES), np.float32), np.empty(_ENTRIES, np.float32)
    begin = 0
    while begin < tokens:
        s = sequence[order[begin]]
        end = begin
        longest = num_coded = 0
        while end < min(tokens, begin + _ROWS) and sequence[order[end]] == s:
            num_coded += is_coded[order[end]]
            longest = max(longest, min(visible[order[end]], num_columns))
            end += 1
        for start in range(0, longest, _ENTRIES):
            count = min(_ENTRIES, longest - start)
            for j in range(count):
                block = (start + j) // per_block
                rows[j] = tables[s, block] * per_block + start + j - block * per_block
            has_plain = num_coded < end - begin
            _load_tile(keys, rows, count, kind, num_coded > 0, has_plain, scales, tile)
            for i in range(begin, end):
                t = order[i]
                size = min(count, visible[t] - start)
                if size > 0:
                    _score_tile(t, q, weights, coded, tile, dots, scores)
                    for j in range(size):
                        out[t, start + j] = scores[j]
        begin = end
    for t in range(tokens):
        for e in range(max(0, visible[t]), num_columns):
            out[t, e] = -np.inf


def _coded(q: np.ndarray, kind: int) -> tuple[np.ndarray, ...]:
    """Return codes, scales and starts of the queries, and which of them are on the grid."""
    tokens, _, dim = q.shape
    if kind or not HAS_DOT:
        q = q[:0]
    shape = *q.shape[:2], dim // 32
    codes, scales = np.empty(q.shape, np.int8), np.empty(shape, np.float32)
    starts, is_coded = np.empty(shape, np.int32), np.zeros(tokens, np.bool_)
    _encode_queries(q, codes, scales, starts, is_coded)
    return codes, scales, starts, is_coded


def paged_index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    sequence: Tensor,
    visible: Tensor,
    entries_per_block: int,
    storage: str = "fp4",
    num_columns: int | None = None,
) -> Tensor:
    """Return [T, M] fp32; same contract as `finwhale.cache.paged_reads.paged_index_scores_ref`.

    Tiles of entries are decoded channels first, so no sum runs across vector lanes. No gradient.
    """
    tokens, _, dim = q.shape
    if num_columns is None:
        num_columns = int(visible.max()) if tokens else 0
    out = torch.empty(tokens, num_columns)
    which = plain_array("sequence", sequence, torch.int64)
    queries, kind = plain_array("q", q, torch.float32), KINDS[storage]
    _score_rows(
        queries,
        plain_array("weights", weights, torch.float32),
        _coded(queries, kind),
        packed_rows("keys", keys, index_row_bytes(dim, storage)),
        plain_array("tables", tables, torch.int64),
        which,
        # Sorted by sequence: a tile of keys is decoded once for all rows of its sequence.
        np.argsort(which, kind="stable"),
        plain_array("visible", visible, torch.int64),
        entries_per_block,
        kind,
        out.numpy(),
    )
    return out


@_compiled
def _score_listed(q, weights, coded, keys, listed, kind, out):
    tokens, _, dim = q.shape
    length = listed.shape[1]
    rows, scales = np.zeros(_ENTRIES, np.int64), np.zeros(_ENTRIES, np.float32)
    tile, is_coded = _empty_tile(dim), coded[3]
    dots, scores = np.empty((4, _ENTRIES), np.float32), np.empty(_ENTRIES, np.float32)
    for t in range(tokens):
        for start in range(0, length, _ENTRIES):
            count = min(_ENTRIES, length - start)
            seen = 0
            for j in range(count):
                rows[j] = max(listed[t, start + j], 0)
                seen += listed[t, start + j] >= 0
            if seen:
                _load_tile(keys, rows, count, kind, is_coded[t], not is_coded[t], scales, tile)
                _score_tile(t, q, weights, coded, tile, dots, scores)
            for j in range(count):
                is_seen = listed[t, start + j] >= 0
                out[t, start + j] = scores[j] if is_seen else np.float32(-np.inf)


def paged_listed_scores(
    q: Tensor, weights: Tensor, keys: Tensor, listed: Tensor, storage: str = "fp4"
) -> Tensor:
    """Return scores [T, L] fp32 of the pool rows `listed` [T, L] int64; -inf where that is -1.

    Each has the bits that `paged_index_scores` gives it: a column of a tile meets no other. For a
    search in the candidate pool, whose size does not grow with the context (section 5.5).
    """
    out = torch.empty(listed.shape)
    queries, kind = plain_array("q", q, torch.float32), KINDS[storage]
    _score_listed(
        queries,
        plain_array("weights", weights, torch.float32),
        _coded(queries, kind),
        packed_rows("keys", keys, index_row_bytes(q.shape[-1], storage)),
        plain_array("listed", listed, torch.int64),
        kind,
        out.numpy(),
    )
    return out


@_compiled
def _rank(bits):
    """Return 0 .. 2047 of a number's bits as int32: the order of their upper 11; 3 is -inf."""
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 21) + 1024


@_compiled
def _select(scores, k, chosen):
    """Keep numbers whose rank can be among the best k, then those not below the k-th of them."""
    rows, num = scores.shape
    values, near = np.full(-(-num // 16) * 16, -np.inf, np.float32), np.empty(num, np.float32)
    bits, counts, places = (
        values.view(np.int32),
        np.empty((4, 2048), np.int32),
        np.empty(num, np.int64),
    )
    for t in range(rows):
        counts[:] = 0
        for e in range(num):
            # A NaN counts as minus infinity, which is never chosen; -0 is the 0 that it equals.
            value = scores[t, e] + np.float32(0.0)
            values[e] = value if value == value else -np.inf
        # Four counters, because neighbours often meet in one and would wait for each other.
        for e in range(0, values.shape[0], 4):
            for n in range(4):
                counts[n, _rank(bits[e + n])] += 1
        rank, possible = 2048, 0
        while rank > 4 and possible < k:
            rank -= 1
            for n in range(4):
                possible += counts[n, rank]
        count = 0
        for start in range(0, num, 16):
            is_near = False
            for e in range(start, start + 16):
                is_near |= _rank(bits[e]) >= rank
            if is_near:
                for e in range(start, start + 16):
                    if _rank(bits[e]) >= rank:
                        near[count], places[count] = values[e], e
                        count += 1
        threshold, room = np.float32(-np.inf), k
        if count > k:
            threshold = np.partition(near[:count], count - k)[count - k]
            for n in range(count):
                room -= near[n] > threshold
        slot = 0
        for n in range(count):
            is_level = near[n] == threshold
            if near[n] > threshold or (is_level and room > 0):
                room -= is_level
                chosen[t, slot] = places[n]
                slot += 1
        for s in range(slot, k):
            chosen[t, s] = -1


def select_topk(scores: Tensor, k: int) -> Tensor:
    """Return [..., min(k, M)] int64; same contract as `finwhale.ops.index.select_topk`."""
    *lead, num = scores.shape
    k = min(k, num)
    chosen = np.empty((*lead, k), np.int64)
    if chosen.size:
        flat = plain_array("scores", scores, torch.float32).reshape(-1, num)
        _select(flat, k, chosen.reshape(-1, k))
    return torch.from_numpy(chosen)
