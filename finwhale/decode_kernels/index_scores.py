"""Index scores of a decode step from MXFP4 keys: a full scan, or the candidate pool alone.

Programs walk tiles of keys with a stride, up to what each row sees, so a captured launch costs by
the visible length and not by the capacity. Keys and queries are four-bit codes with one scale for
32 channels: products of codes are summed in FP8 by the matrix unit, which is exact for 32 of them,
and scales are applied to these sums in fp32. Beside the scores it writes the best of every block of
the candidate pool, which the pool's selection then reads instead of the scores. A score's bits do
not depend on T or on the launch. Refuses by NaN a query that was not rounded to MXFP4. The easy
mistake: reading columns behind the last visible one; they hold whatever was there. Definition:
`attention_refs.index_scores_ref`. Source: spec/backbone.md sections 5.2, 5.3 and 5.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.formats import bf16_planes, e2m1_as_e4m3
from finwhale.decode_kernels.launch import (
    Overlap,
    is_interpreted,
    launch_for,
    overlap_options,
    wait_for_earlier,
)


class IndexScoresUnsupportedError(ValueError):
    """The kernel cannot run these inputs; the message names the field and its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoresLaunch:
    """Keys of a tile, programs over all rows together, and how they are compiled."""

    keys: int
    programs: int
    num_warps: int
    num_stages: int = 1


# A full scan, measured on Hopper alone, and the candidate pool, not compared with others there.
_LAUNCHES = {"any": ScoresLaunch(keys=64, programs=132 * 7, num_warps=4)}
_WIDE_PROGRAMS = 132  # over all rows, of the launch for queries of a wide range
_POOL_LAUNCHES = {"any": ScoresLaunch(keys=64, programs=132 * 6, num_warps=4)}

# What `bench/gpu_decode_attention.py` times, and the compiled tests run.
BENCHED = tuple(
    ScoresLaunch(keys=keys, programs=132 * each, num_warps=warps, num_stages=stages)
    for keys, warps, stages, each in (
        (64, 4, 1, 7),
        (64, 4, 1, 6),
        (64, 4, 1, 14),
        (64, 4, 2, 8),
        (64, 4, 2, 16),
        (64, 4, 3, 6),
        (128, 4, 1, 3),
        (128, 8, 1, 2),
    )
)


@triton.jit
def _query_group(q_ptr, row, is_head, GROUP: tl.constexpr, HALF: tl.constexpr):
    """Return 32 channels of the heads in fp32, the even ones first: [HEADS, 32]."""
    pair = tl.arange(0, 16)
    at = row[:, None] * HALF + GROUP * 16 + pair[None, :]
    inside = is_head[:, None] & (GROUP * 16 < HALF)
    even, odd = bf16_planes(tl.load(q_ptr + at, mask=inside, other=0), False)
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), [even.shape[0], 32])


@triton.jit
def _query_operand(values, exponent, FAST: tl.constexpr):
    """Return [32, HEADS] values with this exponent brought to 14, E5M2 if FAST, else fp32."""
    values *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    if FAST:
        values = values.to(tl.float8e5)
    return tl.trans(values)


@triton.jit
def _size_bits(values):
    """Return the fp32 bits of sizes: they compare as the sizes do, infinity and then NaN on top."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _lowest(bits):
    """Return the least of sizes but zero, 1.5 below 1 at each exponent: [HEADS]."""
    return tl.min(tl.where(bits == 0, 0x7F800000, bits ^ 0x400000), 1)


@triton.jit
def _exponent(bits):
    """Return the exponent field of sizes' bits, kept where a factor of them is a number."""
    return tl.minimum(tl.maximum(bits >> 23, 14), 254)


@triton.jit
def _is_narrow(largest, smallest):
    """Return whether E5M2 has place for sizes between these two under one factor."""
    return smallest >> 23 >= _exponent(largest) - 28


@triton.jit
def _is_rounded(top, low):
    """Return whether sizes of powers of two times 1 or 1.5 are MXFP4, by their largest and lowest.

    With 4 or 6 as the largest code, the smallest is 0.5, three exponents below, and 0.75 is none.
    Below the third exponent of fp32, all such numbers are codes under the smallest scale.
    """
    half = (top >> 23) - 3
    return (half <= 0) | (low >= (half << 23) + 0x400000)


@triton.jit
def _range_of(top, exponent):
    """Return what a group's own factor of the queries is above the whole head's: [HEADS]."""
    below = tl.maximum(_exponent(top) - exponent, -126)
    return ((below + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _in_rows(x, WARPS: tl.constexpr):
    """Bring bytes of keys, loaded in `_load_order`, to the order of keys."""
    KEYS: tl.constexpr = x.shape[0]
    x = tl.reshape(x, [KEYS // (16 * WARPS), 2, WARPS, 8, 16])
    return tl.reshape(tl.permute(x, (0, 2, 1, 3, 4)), [KEYS, 16])


@triton.jit
def _load_order(KEYS: tl.constexpr, WARPS: tl.constexpr):
    """Return the key that each row of a load is of.

    A load spreads its rows over the warps by eights; the matrix unit takes sixteen of a warp. In
    this order each thread loads the very bytes that it gives to the matrix unit.
    """
    row = tl.arange(0, KEYS)
    sixteen = row // (16 * WARPS) * WARPS + row // 8 % WARPS
    return sixteen * 16 + row // (8 * WARPS) % 2 * 8 + row % 8


@triton.jit
def _group_dots(row, q, GROUP: tl.constexpr, HALF: tl.constexpr, WARPS: tl.constexpr,
                FAST: tl.constexpr):  # fmt: skip
    """Return [KEYS, HEADS] products over one group's 32 channels, without the keys' scales."""
    byte = tl.arange(0, 16)
    place = row[:, None] + GROUP * 16 + byte[None, :]
    codes = tl.load(place) if GROUP * 16 < HALF else tl.zeros(place.shape, tl.uint8)
    even, odd = e2m1_as_e4m3(_in_rows(codes, WARPS), FAST)
    planes = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), [row.shape[0], 32])
    return tl.dot(planes, q, input_precision="ieee")


@triton.jit
def _scale_of(codes, HEADS: tl.constexpr):
    """Return 2^(code - 127) of each key for every head, 0 for code 0: [KEYS, HEADS]."""
    return _to_heads((codes << 23).to(tl.float32, bitcast=True), HEADS)


@triton.jit
def _to_heads(x, HEADS: tl.constexpr):
    """Repeat [KEYS, 4] equal columns to [KEYS, HEADS], each where a thread already has it."""
    x = tl.broadcast_to(x[:, None, :, None], [x.shape[0], HEADS // 8, 4, 2])
    return tl.reshape(x, [x.shape[0], HEADS])


@triton.jit
def _entry_of(column, t, blocks_ptr, M, P, BLOCK: tl.constexpr, POOL: tl.constexpr):
    """Return the entry of a column, -1 for none."""
    if POOL:
        place = blocks_ptr + t * P + column // BLOCK
        block = tl.load(place, mask=column < M, other=-1).to(tl.int32)
        column = tl.where(block < 0, -1, block * BLOCK + column % BLOCK)
    return column


@triton.jit
def _rows_of(
    column, t, blocks_ptr, tables_ptr, visible, M, NB, P,
    EPB: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Return the rows of the columns' keys; some row that exists where nothing is seen."""
    entry = _entry_of(column, t, blocks_ptr, M, P, BLOCK, POOL)
    tables_ptr += t * NB
    if POOL:
        seen = (entry >= 0) & (entry < visible)
        entry = tl.where(seen, entry, 0)
        block = tl.load(tables_ptr + entry // EPB, mask=seen, other=0)
    else:
        # A row that sees nothing has no tile, so what this reads for it is not used.
        entry = tl.maximum(tl.minimum(entry, visible - 1), 0)
        block = tl.load(tables_ptr + entry // EPB)
    return block.to(tl.int32) * EPB + entry % EPB


@triton.jit
def _scores_kernel(
    q_ptr, weights_ptr, keys_ptr, tables_ptr, visible_ptr, blocks_ptr, scores_ptr, best_ptr,
    M, NB, P,
    HI: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr,
    WARPS: tl.constexpr, EPB: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr,
    BEST: tl.constexpr, WIDE: tl.constexpr, FAST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(OVERLAP)
    ROW: tl.constexpr = HALF + HALF // 16
    t = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, HEADS)
    row, is_head = t * HI + head, head < HI
    q0 = _query_group(q_ptr, row, is_head, 0, HALF)
    q1 = _query_group(q_ptr, row, is_head, 1, HALF)
    q2 = _query_group(q_ptr, row, is_head, 2, HALF)
    q3 = _query_group(q_ptr, row, is_head, 3, HALF)
    bits0, bits1, bits2, bits3 = _size_bits(q0), _size_bits(q1), _size_bits(q2), _size_bits(q3)
    top0, top1, top2, top3 = tl.max(bits0, 1), tl.max(bits1, 1), tl.max(bits2, 1), tl.max(bits3, 1)
    largest = tl.maximum(tl.maximum(top0, top1), tl.maximum(top2, top3))
    low0, low1, low2, low3 = _lowest(bits0), _lowest(bits1), _lowest(bits2), _lowest(bits3)
    smallest = tl.minimum(tl.minimum(low0, low1), tl.minimum(low2, low3))
    # Bits that no code has.
    excess = tl.max((bits0 | bits1 | bits2 | bits3) & 0x3FFFFF, 1)
    exponent = _exponent(largest)
    # The largest of a head's values comes to 2^14 .. 2^15, the upper end of E5M2. Rows where then a
    # value of some head lies below its lower end are the business of the wide launch, where each
    # group has a factor of its own; the other one would be slower for what hardly any row needs.
    is_narrow = tl.min(_is_narrow(largest, smallest).to(tl.int32), 0) > 0
    q0 = _query_operand(q0, _exponent(top0) if WIDE else exponent, FAST)
    q1 = _query_operand(q1, _exponent(top1) if WIDE else exponent, FAST)
    q2 = _query_operand(q2, _exponent(top2) if WIDE else exponent, FAST)
    q3 = _query_operand(q3, _exponent(top3) if WIDE else exponent, FAST)
    # The factor is taken out again, and the 2^-6 of the keys' codes.
    weights = tl.load(weights_ptr + row, mask=is_head, other=0.0).to(tl.float32)
    weights *= ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    held = (excess == 0) & (largest < 0x7F800000)
    held = held & _is_rounded(top0, low0) & _is_rounded(top1, low1)
    held = held & _is_rounded(top2, low2) & _is_rounded(top3, low3)
    weights = tl.where(held, weights, float("nan"))
    visible = tl.load(visible_ptr + t).to(tl.int32)
    newest = (visible - 1) // BLOCK
    visible = visible if POOL else tl.minimum(visible, M)
    length = M if POOL else visible
    tiles = (length + KEYS - 1) // KEYS
    tiles = tl.where(is_narrow != WIDE, tiles, 0)
    order, byte = _load_order(KEYS, WARPS), tl.arange(0, 16)
    # Where keys lie is looked up a tile ahead, so that only the keys themselves are waited for.
    tile = tl.program_id(0)
    next_row = _rows_of(tile * KEYS + order, t, blocks_ptr, tables_ptr, visible, M, NB, P, EPB,
                        BLOCK, POOL)  # fmt: skip
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        key = keys_ptr + next_row.to(tl.int64) * ROW
        column = (tile + tl.num_programs(0)) * KEYS + order
        next_row = _rows_of(column, t, blocks_ptr, tables_ptr, visible, M, NB, P, EPB, BLOCK, POOL)
        # What is not seen reads some row; its score is replaced below.
        GROUPS: tl.constexpr = HALF // 16
        scales = tl.load(key[:, None] + HALF + (byte % GROUPS)[None, :])
        # Four threads have the scales of one key; where there are fewer than four, they repeat.
        scales = tl.reshape(_in_rows(scales, WARPS).to(tl.int32), [KEYS, 4, 2, 2])
        scales_02, scales_13 = tl.split(scales)
        scale0, scale2 = tl.split(scales_02)
        scale1, scale3 = tl.split(scales_13)
        worst = tl.maximum(tl.maximum(scale0, scale1), tl.maximum(scale2, scale3))
        dots = _to_heads(tl.where(worst == 255, float("nan"), 0.0), HEADS)
        part = _group_dots(key, q0, 0, HALF, WARPS, FAST)
        if WIDE:
            part *= _range_of(top0, exponent)[None, :]
        dots += part * _scale_of(scale0, HEADS)
        part = _group_dots(key, q1, 1, HALF, WARPS, FAST)
        if WIDE:
            part *= _range_of(top1, exponent)[None, :]
        dots += part * _scale_of(scale1, HEADS)
        part = _group_dots(key, q2, 2, HALF, WARPS, FAST)
        if WIDE:
            part *= _range_of(top2, exponent)[None, :]
        dots += part * _scale_of(scale2, HEADS)
        part = _group_dots(key, q3, 3, HALF, WARPS, FAST)
        if WIDE:
            part *= _range_of(top3, exponent)[None, :]
        dots += part * _scale_of(scale3, HEADS)
        # A NaN stays a NaN, as in torch.
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)  # [KEYS, HEADS]
        column = tile * KEYS + tl.arange(0, KEYS)
        entry = _entry_of(column, t, blocks_ptr, M, P, BLOCK, POOL)
        seen = (entry >= 0) & (entry < visible)
        scores = tl.where(seen, tl.sum(dots * weights[None, :], 1), float("-inf"))
        tl.store(scores_ptr + t * M + column, scores, mask=column < M)
        if BEST:
            real = tl.where(scores != scores, float("-inf"), scores)
            best = tl.max(tl.reshape(real, [KEYS // BLOCK, BLOCK]), 1)
            number = tile * (KEYS // BLOCK) + tl.arange(0, KEYS // BLOCK)
            best = tl.where(number == newest, float("inf"), best)
            width = (M + BLOCK - 1) // BLOCK
            tl.store(best_ptr + t * width + number, best, mask=number < width)


def index_scores_unsupported(q: Tensor, keys: Tensor) -> str | None:
    """Return why `index_scores` cannot run, or None; no value of a tensor is read."""
    heads, dim = q.shape[1:]
    if q.dtype is not torch.bfloat16:
        return f"q.dtype {q.dtype}: use bfloat16"
    if dim not in (32, 64, 128):
        return f"index dim {dim}: use 32, 64 or 128"
    if not 1 <= heads <= 64:
        return f"index heads {heads}: use 1 to 64"
    if keys.shape[-1] != dim // 2 + dim // 32 or keys.dtype is not torch.uint8:
        return f"keys: rows of {keys.shape[-1]} {keys.dtype}, expected {dim // 2 + dim // 32} bytes"
    if keys.shape[0] >= 1 << 31:
        return f"keys: {keys.shape[0]} rows, use fewer than 2^31"
    if not q.is_cuda and not is_interpreted(_scores_kernel):
        return f"device {q.device}: use a CUDA device, or the reference on others"
    return None


@cache
def has_fp8(device: torch.device) -> bool:
    """Return whether a GPU multiplies FP8; without, the products are fp32 and as exact."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    visible: Tensor,
    entries_per_block: int,
    num_columns: int,
    pool_blocks: Tensor | None = None,
    pool_block_size: int = 8,
    *,
    want_best: bool = True,
    overlap: int = Overlap.NONE,
    launch: ScoresLaunch | None = None,
) -> tuple[Tensor, Tensor]:
    """Return scores [T, M] and block bests; the contract of `attention_refs.index_scores_ref`.

    Queries are rounded to MXFP4; one that is not, or a NaN, makes its row NaN. A key's scale of
    code 0 counts as 0. Columns beyond the tile of a row's last visible one are not written.
    `want_best=False` leaves the second result empty.
    """
    reason = index_scores_unsupported(q, keys)
    if reason is not None:
        raise IndexScoresUnsupportedError(f"index_scores: {reason}")
    tokens, heads, dim = q.shape
    scores = torch.empty(tokens, num_columns, dtype=torch.float32, device=q.device)
    width = -(-num_columns // pool_block_size) if want_best else 0
    best = torch.empty(tokens, width, dtype=torch.float32, device=q.device)
    if not scores.numel():
        return scores, best
    is_pool = pool_blocks is not None
    launch = launch or launch_for(_POOL_LAUNCHES if is_pool else _LAUNCHES, q.device)
    tiles = -(-num_columns // launch.keys)
    # Few rows or none are for the wide launch; a program of it that has no row ends at once.
    for is_wide, programs in ((False, launch.programs), (True, _WIDE_PROGRAMS)):
        _scores_kernel[(max(1, min(tiles, programs // tokens)), tokens)](
            q.contiguous().view(torch.int32), weights.contiguous(), keys, tables, visible,
            pool_blocks if is_pool else tables, scores, best,
            num_columns, tables.shape[1], pool_blocks.shape[1] if is_pool else 0,
            HI=heads, HEADS=max(16, triton.next_power_of_2(heads)), HALF=dim // 2,
            KEYS=launch.keys, WARPS=min(launch.num_warps, launch.keys // 16),
            EPB=entries_per_block, BLOCK=pool_block_size, POOL=is_pool, BEST=want_best,
            WIDE=is_wide, FAST=not is_interpreted(_scores_kernel) and has_fp8(q.device),
            num_warps=launch.num_warps, num_stages=launch.num_stages,
            **overlap_options(overlap, q.device),
        )  # fmt: skip
    return scores, best
