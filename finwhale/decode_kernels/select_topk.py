"""Exact selection of the k best of up to millions of scores, lowest position first among equals.

A tournament: each program finds the k best of its stretch of a row, in order of position, and the
survivors of all stretches play the next level, until one stretch is left. The threshold is found by
narrowing an interval of ordered integers until exactly k scores reach it, by a guess and by halves
in turn, so nothing is sorted, nothing is added by atomics and every launch gives the same answer.
Levels depend on the capacity alone and programs on the row's length, so a graph can hold it. The
easy mistake: comparing floats with their signs of zero; 0 and -0 are equal and must tie (D01).
Definition: `attention_refs.select_topk_rows_ref`. Source: spec/backbone.md sections 5.4 and 5.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.launch import (
    is_interpreted,
    launch_for,
    overlap_options,
    wait_for_earlier,
)


class SelectTopkUnsupportedError(ValueError):
    """The kernels cannot run these inputs; the message names the field and its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectLaunch:
    """Scores of one stretch, the warps that hold them, and registers of a thread (0: any)."""

    stretch: int
    num_warps: int
    max_registers: int = 0

    def options(self) -> dict[str, int]:
        """Return what the kernel is compiled with."""
        limit = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"STRETCH": self.stretch, "num_warps": self.num_warps, **limit}


# The longest stretch by k; a row of fewer scores gets one of its own length.
# Measured on Hopper alone, and served to all.
_LAUNCHES = {
    "any": {
        0: SelectLaunch(stretch=4096, num_warps=4),
        513: SelectLaunch(stretch=8192, num_warps=8),
    }
}
# What `bench/gpu_decode_attention.py` times, and the compiled tests run.
BENCHED = tuple(
    SelectLaunch(stretch=stretch, num_warps=warps, max_registers=registers)
    for stretch, warps, registers in (
        (4096, 4, 0), (4096, 4, 128), (8192, 8, 0), (8192, 8, 128),
    )
)  # fmt: skip

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
def _level_length(length, K, LEVEL: tl.constexpr, STRETCH: tl.constexpr):
    """Return how many survivors a row of `length` scores sends to a level."""
    for _ in tl.static_range(LEVEL):
        length = (length + STRETCH - 1) // STRETCH * K
    return length


@triton.jit
def _stretch_kernel(
    scores_ptr, index_ptr, lengths_ptr, out_scores_ptr, out_index_ptr, N, capacity, K,
    STRETCH: tl.constexpr, SLOTS: tl.constexpr, LEVEL: tl.constexpr, FINAL: tl.constexpr,
    ALIGNED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the K best of a stretch in order of position, then empty slots."""
    wait_for_earlier(OVERLAP)
    chunk, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + t), capacity).to(tl.int32)
    length = _level_length(tl.maximum(length, 0), K, LEVEL, STRETCH)
    start = chunk * STRETCH
    # The last level has one stretch and always answers.
    if FINAL or (start < length):
        place = start + tl.arange(0, STRETCH)
        inside = place < length
        # Rows of a multiple of 16 can be read to the next such border, four scores at a time.
        border = (length + 15) // 16 * 16 if ALIGNED else length
        score = tl.load(scores_ptr + t * N + place, mask=place < border, other=float("-inf"))
        key = tl.where(inside, _ordered(score), _NEVER)
        possible = key > _MINUS_INFINITY
        low = _MINUS_INFINITY + 1
        if tl.sum(possible.to(tl.int32), 0) > K:
            # At least K keys reach `low`, fewer than K reach `high`.
            low = tl.min(tl.where(possible, key, 2147483647), 0)
            high = tl.max(tl.where(key < _INFINITY, key, _NEVER), 0) + 1
            reach_low = tl.sum(possible.to(tl.int32), 0)
            reach_high = tl.sum((key >= high).to(tl.int32), 0)
            if reach_high >= K:
                low = _INFINITY
                high = low
            turn = 0
            while low + 1 < high:
                middle = (low >> 1) + (high >> 1) + (low & high & 1)
                if turn % 2 == 0:
                    # Were the logarithm of the count a line over the scores, this would hit K.
                    top = tl.log(reach_low.to(tl.float32))
                    share = top - tl.log(tl.maximum(reach_high, 1).to(tl.float32))
                    share = (top - tl.log(tl.cast(K, tl.float32))) / tl.maximum(share, 1e-6)
                    guess = _score(low) + share * (_score(high) - _score(low))
                    middle = tl.minimum(tl.maximum(_ordered(guess), low + 1), high - 1)
                count = tl.sum((key >= middle).to(tl.int32), 0)
                if count >= K:
                    low = middle
                    reach_low = count
                else:
                    high = middle
                    reach_high = count
                high = tl.where(count == K, low, high)
                turn += 1
        above = key > low
        level = key == low
        room = K - tl.sum(above.to(tl.int32), 0)
        # Both counts in one scan: fewer than K are above, at most STRETCH <= 2^15 are level.
        before = tl.cumsum((above.to(tl.int32) << 16) | level.to(tl.int32), 0)
        levels = before & 0xFFFF
        keep = above | (level & (levels <= room))
        slot = (before >> 16) + tl.minimum(levels, room) - 1
        filled = tl.sum(keep.to(tl.int32), 0)
        chosen = place
        if LEVEL > 0:
            chosen = tl.load(index_ptr + t * N + place, mask=keep, other=0)
        empty = tl.arange(0, SLOTS)
        unused = (empty >= filled) & (empty < K)
        if FINAL:
            out = out_index_ptr + t * K
            tl.store(out + slot, chosen.to(tl.int64), mask=keep)
            tl.store(out + empty, tl.full([SLOTS], -1, tl.int64), mask=unused)
        else:
            at = (t * tl.num_programs(0) + chunk) * K
            tl.store(out_scores_ptr + at + slot, score, mask=keep)
            tl.store(out_index_ptr + at + slot, chosen, mask=keep)
            lost = tl.full([SLOTS], float("-inf"), tl.float32)
            tl.store(out_scores_ptr + at + empty, lost, mask=unused)


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


def select_launch(capacity: int, k: int, device: torch.device) -> SelectLaunch:
    """Return the launch for rows of `capacity` scores on a device."""
    table = launch_for(_LAUNCHES, device)
    longest = table[max(least for least in table if least <= k)]
    stretch = max(triton.next_power_of_2(capacity), triton.next_power_of_2(2 * k), 1024)
    if stretch >= longest.stretch:
        return longest
    return SelectLaunch(stretch=stretch, num_warps=max(4, min(longest.num_warps, stretch >> 9)))


def select_topk_rows(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    *,
    overlap: bool = False,
    launch: SelectLaunch | None = None,
) -> Tensor:
    """Return [T, k] int64; the contract of `attention_refs.select_topk_rows_ref`."""
    reason = select_topk_rows_unsupported(scores, k)
    if reason is not None:
        raise SelectTopkUnsupportedError(f"select_topk_rows: {reason}")
    tokens, capacity = scores.shape
    out = torch.empty(tokens, k, dtype=torch.int64, device=scores.device)
    if not out.numel():
        return out
    launch = launch or select_launch(capacity, k, scores.device)
    stretch = launch.stretch
    assert 2 * k <= stretch <= 1 << 15
    scores = scores.contiguous()
    index, width, level = out, capacity, 0
    sizes = {"SLOTS": triton.next_power_of_2(k), **launch.options()}
    sizes |= overlap_options(overlap, scores.device)
    while width > stretch:
        chunks = -(-width // stretch)
        kept = torch.empty(tokens, chunks * k, dtype=torch.float32, device=scores.device)
        kept_index = torch.empty(tokens, chunks * k, dtype=torch.int32, device=scores.device)
        _stretch_kernel[(chunks, tokens)](
            scores, index, lengths, kept, kept_index, width, capacity, k,
            LEVEL=level, FINAL=False, ALIGNED=width % 16 == 0, **sizes,
        )  # fmt: skip
        scores, index, width, level = kept, kept_index, chunks * k, level + 1
    _stretch_kernel[(1, tokens)](
        scores, index, lengths, scores, out, width, capacity, k,
        LEVEL=level, FINAL=True, ALIGNED=width % 16 == 0, **sizes,
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
    overlap: bool = False,
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
