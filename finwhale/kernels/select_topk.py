"""Selection of the best entries from a threshold, one program per query.

`torch.topk` finds the value of the k-th best score; this kernel then writes the positions that are
above it and, of those exactly at it, the lowest ones, in ascending order (D01). A library top-k
alone would break ties as its threads happen to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_ENTRIES = 65536


class SelectTopkUnsupportedError(ValueError):
    """Scores that the kernel cannot take; the message names the cause."""


@triton.jit
def _select_kernel(SCORES, THRESHOLD, OUT, M, K, WIDTH: tl.constexpr, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, WIDTH)
    score = tl.load(SCORES + row * M + m, mask=m < M, other=float("-inf"))
    score = tl.where(score != score, float("-inf"), score)
    threshold = tl.load(THRESHOLD + row)
    possible = score > float("-inf")
    above = (score > threshold) & possible
    level = (score == threshold) & possible
    room = K - tl.sum(above.to(tl.int32), axis=0)
    keep = above | (level & (tl.cumsum(level.to(tl.int32), axis=0) <= room))
    slot = tl.cumsum(keep.to(tl.int32), axis=0) - 1
    tl.store(OUT + row * K + slot, m.to(tl.int64), mask=keep)
    filled = tl.sum(keep.to(tl.int32), axis=0)
    k = tl.arange(0, SLOTS)
    empty = (k >= filled) & (k < K)
    tl.store(OUT + row * K + k, tl.full([SLOTS], -1, tl.int64), mask=empty)


def select_topk_unsupported(scores: Tensor) -> str | None:
    """Return why `select_topk_triton` cannot take these scores, or None."""
    if scores.shape[-1] > _MAX_ENTRIES:
        return f"{scores.shape[-1]} entries: a program holds at most {_MAX_ENTRIES} of a row"
    return None


def select_topk_triton(scores: Tensor, k: int) -> Tensor:
    """Same contract as `finwhale.ops.index.select_topk_ref`: [..., M] fp32 -> [..., k] int64."""
    reason = select_topk_unsupported(scores)
    if reason is not None:
        raise SelectTopkUnsupportedError(f"select_topk_triton: {reason}")
    total = scores.shape[-1]
    k = min(k, total)
    out = torch.empty(*scores.shape[:-1], k, dtype=torch.int64, device=scores.device)
    if not out.numel():
        return out
    scores = scores.contiguous()
    if k == total:
        # Everything possible is selected; a top-k of whole rows would be a sort.
        threshold = scores.new_full(scores.shape[:-1], -torch.inf)
    else:
        wanted = torch.where(scores.isnan(), -torch.inf, scores)
        threshold = wanted.topk(k, dim=-1, sorted=False).values.amin(-1)
    _select_kernel[(out.numel() // k,)](
        scores,
        threshold,
        out,
        total,
        k,
        WIDTH=triton.next_power_of_2(total),
        SLOTS=triton.next_power_of_2(k),
        num_warps=4 if total <= 4096 else 8,
    )
    return out
