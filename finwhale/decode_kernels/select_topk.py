"""Exact selection of the k best of up to millions of scores, lowest position first among equals.

A row that one program can hold is searched at once. A longer one is cut into blocks: the k best
blocks, by their best score, hold the k best scores (`select_topk_rows` says why), so a search of
the blocks' bests and a search of k blocks are enough; blocks of blocks serve still longer rows.
The threshold of a search is found by narrowing an interval of ordered integers until exactly k
scores reach it, by a guess and by halves in turn, so nothing is sorted, nothing is added by atomics
and every launch gives the same answer. Launches depend on the capacity alone, so a graph can hold
them. The easy mistake: comparing floats with their signs of zero; 0 and -0 are equal and must tie
(D01). Definition: `attention_refs.select_topk_rows_ref`. Source: spec/backbone.md sections 5.4
and 5.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.launch import (
    Overlap,
    is_interpreted,
    launch_for,
    overlap_options,
    wait_for_earlier,
)


class SelectTopkUnsupportedError(ValueError):
    """The kernels cannot run these inputs; the message names the field and its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectLaunch:
    """Most scores that one program searches, and the warps that hold them."""

    stretch: int
    num_warps: int


# Measured on no device yet; served to all.
_LAUNCHES = {"any": SelectLaunch(stretch=16384, num_warps=16)}
# What `bench/gpu_decode_attention.py` times, and the compiled tests run.
BENCHED = tuple(
    SelectLaunch(stretch=stretch, num_warps=warps)
    for stretch, warps in ((16384, 16), (16384, 32), (8192, 8), (8192, 16), (4096, 4), (4096, 8))
)
# Scores that one program reads to write the bests of its blocks.
_SPAN = 4096

# Ordered as integers: minus infinity, and below it what may not be chosen.
_MINUS_INFINITY = tl.constexpr(-2139095041)
_NEVER = tl.constexpr(-2147483648)
_INFINITY = tl.constexpr(2139095040)


@triton.jit
def _ordered(x):
    """Return int32 keys that compare as the floats do; 0 and -0 alike, NaN as minus infinity."""
    x = tl.where(x != x, float("-inf"), x)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(key):
    """Return the float of a key; the inverse of `_ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _level_length(length, BLOCK: tl.constexpr, LEVEL: tl.constexpr):
    """Return how many bests a row of `length` scores has on a level; level 0 are the scores."""
    for _ in tl.static_range(LEVEL):
        length = (length + BLOCK - 1) // BLOCK
    return length


@triton.jit
def _logarithm(count):
    return tl.log2(tl.maximum(count, 1).to(tl.float32))


@triton.jit
def _threshold(key, low, K):
    """Return the largest key that at least K keys reach, or `low` where at most K reach `low`."""
    reach_low = tl.sum((key >= low).to(tl.int32), 0)
    if reach_low > K:
        low = tl.min(tl.where(key >= low, key, 2147483647), 0)
        # At least K keys reach `low`, fewer than K reach `high`.
        high = tl.max(tl.where(key < _INFINITY, key, _NEVER), 0) + 1
        reach_high = tl.sum((key >= high).to(tl.int32), 0)
        if reach_high >= K:
            low = _INFINITY
            high = low
        top, bottom = _logarithm(reach_low), _logarithm(reach_high)
        turn = 0
        while low + 1 < high:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            if turn % 2 == 0:
                # Were the logarithm of the count a line over the scores, this would hit K.
                share = (top - _logarithm(K)) / tl.maximum(top - bottom, 1e-6)
                guess = _score(low) + share * (_score(high) - _score(low))
                middle = tl.minimum(tl.maximum(_ordered(guess), low + 1), high - 1)
            count = tl.sum((key >= middle).to(tl.int32), 0)
            if count >= K:
                low = middle
                top = _logarithm(count)
            else:
                high = middle
                bottom = _logarithm(count)
            high = tl.where(count == K, low, high)
            turn += 1
    return low


@triton.jit
def _bests_kernel(
    scores_ptr, lengths_ptr, best_ptr, upper_ptr, N, width, upper_width, capacity,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, LEVEL: tl.constexpr, TWO: tl.constexpr,
    ALIGNED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the best score of each block of a level's row; if TWO, of blocks of blocks as well."""
    wait_for_earlier(OVERLAP)
    chunk, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + t), capacity).to(tl.int32)
    length = _level_length(tl.maximum(length, 0), BLOCK, LEVEL)
    if chunk * SPAN < length:
        place = chunk * SPAN + tl.arange(0, SPAN)
        # Rows of a multiple of 16 can be read to the next such border, four scores at a time.
        border = (length + 15) // 16 * 16 if ALIGNED else length
        score = tl.load(scores_ptr + t * N + place, mask=place < border, other=float("-inf"))
        score = tl.where((place < length) & (score == score), score, float("-inf"))
        best = tl.max(tl.reshape(score, [SPAN // BLOCK, BLOCK]), 1)
        number = chunk * (SPAN // BLOCK) + tl.arange(0, SPAN // BLOCK)
        tl.store(best_ptr + t * width + number, best, mask=number < width)
        if TWO:
            UPPER: tl.constexpr = SPAN // BLOCK // BLOCK
            best = tl.max(tl.reshape(best, [UPPER, BLOCK]), 1)
            number = chunk * UPPER + tl.arange(0, UPPER)
            tl.store(upper_ptr + t * upper_width + number, best, mask=number < upper_width)


@triton.jit
def _stretch_kernel(
    scores_ptr, blocks_ptr, bound_ptr, lengths_ptr, out_ptr, N, capacity, K,
    SIZE: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, LEVEL: tl.constexpr,
    LISTED: tl.constexpr, ALIGNED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the K best of a level's row in order of position, then -1, and their threshold.

    LISTED: the scores are those of the K blocks in `blocks_ptr`, and K of them are known to reach
    `bound_ptr` if there are so many.
    """
    wait_for_earlier(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + t), capacity).to(tl.int32)
    length = _level_length(tl.maximum(length, 0), BLOCK, LEVEL)
    lane = tl.arange(0, SIZE)
    low = _MINUS_INFINITY + 1
    scores_ptr += t * N
    # Rows of a multiple of 16 can be read to the next such border, four scores at a time.
    border = (length + 15) // 16 * 16 if ALIGNED else length
    if LISTED:
        low = tl.load(bound_ptr + t)
        entry = tl.arange(0, SIZE // BLOCK)
        block = tl.load(blocks_ptr + t * K + entry, mask=entry < K, other=-1)
        # Nothing lies at `border` and behind it.
        first = tl.where(block < 0, border, block * BLOCK)
        place = first[:, None] + tl.arange(0, BLOCK)[None, :]
        score = tl.load(scores_ptr + place, mask=place < border, other=float("-inf"))
        key = tl.where(place < length, _ordered(score), _NEVER)
        key = tl.reshape(key, [SIZE])
    else:
        score = tl.load(scores_ptr + lane, mask=lane < border, other=float("-inf"))
        key = tl.where(lane < length, _ordered(score), _NEVER)
    low = _threshold(key, low, K)
    above = key > low
    level = key == low
    room = K - tl.sum(above.to(tl.int32), 0)
    # Both counts in one scan: fewer than K are above, at most SIZE <= 2^15 are level.
    before = tl.cumsum((above.to(tl.int32) << 16) | level.to(tl.int32), 0)
    levels = before & 0xFFFF
    keep = above | (level & (levels <= room))
    slot = (before >> 16) + tl.minimum(levels, room) - 1
    filled = tl.sum(keep.to(tl.int32), 0)
    place = lane
    if LISTED:
        # Read again, as few are kept: held through the search it would not fit the registers.
        block = tl.load(blocks_ptr + t * K + lane // BLOCK, mask=keep, other=0)
        place = block * BLOCK + lane % BLOCK
    kind = out_ptr.dtype.element_ty
    out_ptr += t * K
    tl.store(out_ptr + slot, place.to(kind), mask=keep)
    empty = tl.arange(0, SLOTS)
    unused = (empty >= filled) & (empty < K)
    tl.store(out_ptr + empty, tl.full([SLOTS], -1, kind), mask=unused)
    if LEVEL > 0:
        tl.store(bound_ptr + t, low)


def select_topk_rows_unsupported(scores: Tensor, k: int) -> str | None:
    """Return why `select_topk_rows` cannot run, or None; no value of a tensor is read."""
    if scores.dtype is not torch.float32:
        return f"scores.dtype {scores.dtype}: use float32"
    if not 1 <= k <= 2048:
        return f"k {k}: use 1 to 2048"
    if scores.shape[-1] >= 1 << 30:
        return f"{scores.shape[-1]} scores in a row: use fewer than 2^30"
    if not scores.is_cuda and not is_interpreted(_stretch_kernel):
        return f"device {scores.device}: use a CUDA device, or the reference on others"
    return None


def block_size(capacity: int, k: int, stretch: int) -> int:
    """Return the scores of a block, a power of two, for rows that one program cannot hold.

    As few levels as will do, and about as many bests on the highest as scores in k blocks.
    """
    most = min(stretch // triton.next_power_of_2(k), _SPAN)
    levels = 1
    while stretch * most**levels < capacity:
        levels += 1
    even = 1 << max(1, round(math.log2(max(2, capacity / k)) / (levels + 1)))
    is_enough = stretch * even**levels >= capacity
    return int(even) if even <= most and is_enough else int(most)


def select_topk_rows(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    *,
    overlap: int = Overlap.NONE,
    launch: SelectLaunch | None = None,
) -> Tensor:
    """Return [T, k] int64; the contract of `attention_refs.select_topk_rows_ref`.

    Why k blocks are enough: take k blocks by their best, the lowest first among equals. A score
    outside is beaten by the best of each of them, or equals it and stands behind it.
    """
    reason = select_topk_rows_unsupported(scores, k)
    if reason is not None:
        raise SelectTopkUnsupportedError(f"select_topk_rows: {reason}")
    tokens, capacity = scores.shape
    out = torch.empty(tokens, k, dtype=torch.int64, device=scores.device)
    if not out.numel():
        return out
    launch = launch or launch_for(_LAUNCHES, scores.device)
    assert 2 * k <= launch.stretch <= 1 << 15
    more = overlap_options(overlap, scores.device)
    rows = [scores.contiguous()]  # of scores, of bests of blocks, of blocks of blocks, ...
    block = block_size(capacity, k, launch.stretch)
    while (width := rows[-1].shape[1]) > launch.stretch:
        best = scores.new_empty(tokens, -(-width // block))
        upper = scores.new_empty(tokens, -(-best.shape[1] // block))
        two = best.shape[1] > launch.stretch and block * block <= _SPAN
        _bests_kernel[(-(-width // _SPAN), tokens)](
            rows[-1], lengths, best, upper, width, best.shape[1], upper.shape[1], capacity,
            SPAN=_SPAN, BLOCK=block, LEVEL=len(rows) - 1, TWO=two, ALIGNED=width % 16 == 0,
            num_warps=4, **more,
        )  # fmt: skip
        rows += [best, upper] if two else [best]
    bound = torch.empty(tokens, dtype=torch.int32, device=scores.device)
    chosen = bound  # the first search reads no blocks
    for level in reversed(range(len(rows))):
        width, listed = rows[level].shape[1], level + 1 < len(rows)
        size = triton.next_power_of_2(max(k * block if listed else width, 1024))
        blocks, chosen = chosen, out if level == 0 else torch.empty_like(out, dtype=torch.int32)
        _stretch_kernel[(tokens,)](
            rows[level], blocks, bound, lengths, chosen, width, capacity, k,
            SIZE=size, SLOTS=triton.next_power_of_2(k), BLOCK=block, LEVEL=level, LISTED=listed,
            ALIGNED=width % 16 == 0,
            num_warps=min(32, max(4, launch.num_warps * size // launch.stretch)), **more,
        )  # fmt: skip
    return out


@triton.jit
def _pool_rows_kernel(
    chosen_ptr, tables_ptr, blocks_ptr, out_ptr, K, NB, P,
    EPB: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, WIDTH)
    chosen = tl.load(chosen_ptr + t * K + slot, mask=slot < K, other=-1)
    seen = chosen >= 0
    entry = tl.where(seen, chosen, 0)
    if POOL:
        block = tl.load(blocks_ptr + t * P + entry // BLOCK, mask=seen, other=0)
        entry = block * BLOCK + entry % BLOCK
    block = tl.load(tables_ptr + t * NB + entry // EPB, mask=seen, other=0)
    rows = tl.where(seen, block * EPB + entry % EPB, -1)
    tl.store(out_ptr + t * K + slot, rows, mask=slot < K)


def pool_rows(
    chosen: Tensor,
    tables: Tensor,
    entries_per_block: int,
    pool_blocks: Tensor | None = None,
    pool_block_size: int = 8,
    *,
    overlap: int = Overlap.NONE,
) -> Tensor:
    """Return [T, K] int64; the contract of `attention_refs.pool_rows_ref`."""
    out = torch.empty_like(chosen)
    if out.numel():
        is_pool = pool_blocks is not None
        _pool_rows_kernel[(chosen.shape[0],)](
            chosen, tables, pool_blocks if is_pool else tables, out, chosen.shape[1],
            tables.shape[1], pool_blocks.shape[1] if is_pool else 0, EPB=entries_per_block,
            WIDTH=triton.next_power_of_2(chosen.shape[1]), BLOCK=pool_block_size, POOL=is_pool,
            **overlap_options(overlap, chosen.device),
        )  # fmt: skip
    return out
