"""Index scores of a decode step from MXFP4 keys: a full scan, or the candidate pool alone.

Programs walk tiles of keys with a stride, up to what each row sees, so a captured launch costs by
the visible length and not by the capacity. Beside the scores it writes the best of every block of
the candidate pool, which the pool's selection then reads instead of the scores. Scores are fp32. A
score's bits do not depend on T or on the launch's number of programs. The easy mistake: reading
columns behind the last visible one; they hold whatever was there. Definition:
`attention_refs.index_scores_ref`. Source: spec/backbone.md sections 5.3 and 5.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.formats import PLANE_GROW, bf16_planes, e2m1_planes, ue8m0_value
from finwhale.decode_kernels.launch import (
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
    num_stages: int = 2


# Measured on Hopper alone: a full scan, and the candidate pool.
_LAUNCHES = {
    "any": ScoresLaunch(keys=128, programs=132 * 3, num_warps=4, num_stages=1),
    "hopper": ScoresLaunch(keys=64, programs=132 * 6, num_warps=4, num_stages=1),
}
_POOL_LAUNCHES = {"any": ScoresLaunch(keys=128, programs=132 * 4, num_warps=4)}

# What `bench/gpu_decode_attention.py` times, and the compiled tests run.
BENCHED = tuple(
    ScoresLaunch(keys=keys, programs=132 * each, num_warps=warps, num_stages=stages)
    for keys, warps, stages, each in (
        (64, 4, 1, 6),
        (128, 4, 1, 3),
        (128, 4, 2, 3),
        (128, 8, 1, 3),
        (128, 4, 3, 3),
        (64, 4, 3, 4),
        (64, 4, 3, 6),
        (128, 8, 3, 2),
    )
)


@triton.jit
def _scores_kernel(
    q_ptr, weights_ptr, keys_ptr, tables_ptr, visible_ptr, blocks_ptr, scores_ptr, best_ptr,
    M, NB, P,
    HI: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr,
    EPB: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr, BEST: tl.constexpr,
    FAST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(OVERLAP)
    ROW: tl.constexpr = HALF + HALF // 16
    t = tl.program_id(1).to(tl.int64)
    head, channel = tl.arange(0, HEADS), tl.arange(0, HALF)
    group, in_group = tl.arange(0, HALF // 16), tl.arange(0, 16)
    at = (t * HI + head[:, None]) * HALF + channel[None, :]
    q_even, q_odd = bf16_planes(tl.load(q_ptr + at, mask=(head < HI)[:, None], other=0), FAST)
    q_even, q_odd = tl.trans(q_even), tl.trans(q_odd)  # [HALF, HEADS]
    weights = tl.load(weights_ptr + t * HI + head, mask=head < HI, other=0.0)
    weights = weights.to(tl.float32) * PLANE_GROW
    visible = tl.load(visible_ptr + t).to(tl.int32)
    length = M if POOL else tl.minimum(visible, M)
    newest = (visible - 1) // BLOCK
    for tile in range(tl.program_id(0), (length + KEYS - 1) // KEYS, tl.num_programs(0)):
        column = tile * KEYS + tl.arange(0, KEYS)
        entry = column
        if POOL:
            place = blocks_ptr + t * P + column // BLOCK
            block = tl.load(place, mask=column < M, other=-1).to(tl.int32)
            entry = tl.where(block < 0, -1, block * BLOCK + column % BLOCK)
        seen = (column < M) & (entry >= 0) & (entry < visible)
        safe = tl.where(seen, entry, 0)
        block = tl.load(tables_ptr + t * NB + safe // EPB, mask=seen, other=0).to(tl.int64)
        # What is not seen reads some row; its score is replaced below.
        row = keys_ptr + (block * EPB + safe % EPB) * ROW
        codes = tl.load(row[:, None, None] + group[None, :, None] * 16 + in_group[None, None, :])
        if HALF == 64:
            # All four scales of a key as one word: loads of single bytes are never pipelined.
            word = tl.load((row + HALF).to(tl.pointer_type(tl.int32), bitcast=True))
            scale = (word[:, None, None] >> (group * 8)[None, :, None]) & 255
        else:
            scale = tl.load((row + HALF)[:, None, None] + group[None, :, None])
        scale = tl.broadcast_to(ue8m0_value(scale), [KEYS, HALF // 16, 16])
        even, odd = e2m1_planes(codes, scale, FAST)
        dots = tl.dot(tl.reshape(even, [KEYS, HALF]), q_even, input_precision="ieee")
        dots = tl.dot(tl.reshape(odd, [KEYS, HALF]), q_odd, acc=dots, input_precision="ieee")
        # A NaN stays a NaN, as in torch.
        dots = tl.where(dots <= 0.0, 0.0, dots)  # [KEYS, HEADS]
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
    if not q.is_cuda and not is_interpreted(_scores_kernel):
        return f"device {q.device}: use a CUDA device, or the reference on others"
    return None


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
    overlap: bool = False,
    launch: ScoresLaunch | None = None,
) -> tuple[Tensor, Tensor]:
    """Return scores [T, M] and block bests; the contract of `attention_refs.index_scores_ref`.

    Columns beyond the tile of a row's last visible one are not written. `want_best=False` leaves
    the second result empty.
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
    programs = max(1, min(-(-num_columns // launch.keys), launch.programs // tokens))
    _scores_kernel[(programs, tokens)](
        q.contiguous().view(torch.int32), weights.contiguous(), keys, tables, visible,
        pool_blocks if is_pool else tables, scores, best,
        num_columns, tables.shape[1], pool_blocks.shape[1] if is_pool else 0,
        HI=heads, HEADS=max(16, triton.next_power_of_2(heads)), HALF=dim // 2, KEYS=launch.keys,
        EPB=entries_per_block, BLOCK=pool_block_size, POOL=is_pool, BEST=want_best,
        FAST=not is_interpreted(_scores_kernel),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
        **overlap_options(overlap, q.device),
    )  # fmt: skip
    return scores, best
