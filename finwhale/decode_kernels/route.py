"""The router of a decode step in one launch: scores, choice, weights, and the order of the work.

Programs compute parts of the logits; the last to arrive adds them and does the rest for all tokens:
the k best of score plus bias (ties to the lowest id), weights, and the lists that let a kernel walk
the experts that were chosen, each with its tokens together. Nothing of it passes the host. The bias
picks and never scales. The easy mistake: softplus by log(1 + exp(x)) is zero below -16.6; here the
rounding of 1 + exp(x) is divided out again. Source: spec/backbone.md section 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.launch import is_interpreted, launch_for, wait_for_earlier
from finwhale.decode_kernels.tiles import (
    BF16,
    counters,
    last_to_arrive,
    overlap_of,
    prefetch_rows,
    row_product,
    tile_product,
)
from finwhale.ops.moe import route_experts

MAX_TOKENS = 64


class Routing(NamedTuple):
    """Which expert does what; int32 except the weights. P = T * k pairs, numbered token * k + j.

    ids      [T, k] best first; weights [T, k] fp32
    order    [P] pairs by ascending expert, then by number
    rank     [P] place of a pair's expert among its token's experts, by ascending id
    starts   [X + 1] where each expert's pairs begin in `order`
    active   [min(X, P)] experts that have a pair, ascending, then -1
    """

    ids: Tensor
    weights: Tensor
    order: Tensor
    rank: Tensor
    starts: Tensor
    active: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteLaunch:
    """Rows and columns of the matrix per step, programs aimed at; the rest as `LinearLaunch`."""

    rows: int
    columns: int
    programs: int
    warps: int
    stages: int
    block: int = 0
    overlap: int = 0


# (one token, more) by device family.
_LAUNCH: dict[str, tuple[RouteLaunch, RouteLaunch]] = {
    "any": (
        RouteLaunch(rows=16, columns=256, programs=128, warps=4, stages=2),
        RouteLaunch(rows=32, columns=128, programs=32, warps=8, stages=3),
    ),
}
_INVARIANT = {
    "any": RouteLaunch(rows=32, columns=128, programs=32, warps=8, stages=3, block=16),
}


class RouteUnsupportedError(ValueError):
    """These inputs cannot run in the kernel; the message names the field and its value."""


def routing_lists(ids: Tensor, weights: Tensor, num_experts: int) -> Routing:
    """Return the lists for a choice [T, k]; the plain form of what the kernel writes.

    An id of -1 is no expert: its pair comes last in `order` and belongs to nobody.
    """
    tokens, k = ids.shape
    ids = ids.to(torch.int32)
    flat = torch.where(ids < 0, num_experts, ids).flatten().long()
    order = flat.sort(stable=True).indices
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    active = torch.full((min(num_experts, tokens * k),), -1, dtype=torch.int32, device=ids.device)
    present = counts.nonzero()[:, 0]
    active[: len(present)] = present.int()
    of_token = flat.view(tokens, k)
    rank = (of_token.unsqueeze(1) < of_token.unsqueeze(2)).sum(-1)  # [T, k]
    return Routing(ids, weights, order.int(), rank.flatten().int(), starts.int(), active)


def route_ref(x: Tensor, weight: Tensor, bias: Tensor, k: int, scaling: float) -> Routing:
    """Return the routing of every token.

    x        [T, C] bf16, not rounded to FP8
    weight   [X, C] bf16; bias [X] fp32
    Logits are fp32 sums of exact products. Section 8, steps 1 to 3.
    """
    ids, weights = route_experts(x.float() @ weight.float().T, bias, k, scaling)
    return routing_lists(ids, weights, len(weight))


@triton.jit
def _sqrt_softplus(x):
    """sqrt(log(1 + e^x)), accurate where e^x is far below one."""
    e = tl.exp(tl.minimum(x, 20.0))
    wide = 1.0 + e
    # log(1 + e) = log(w) * e / (w - 1) with w the rounded sum.
    exact = tl.where(wide == 1.0, e, tl.log(wide) * (e / tl.where(wide == 1.0, 1.0, wide - 1.0)))
    return tl.sqrt(tl.where(x > 20.0, x, exact))


@triton.jit
def _route_kernel(
    x_ptr, w_ptr, bias_ptr, part_ptr, count_ptr,
    ids_ptr, weights_ptr, order_ptr, rank_ptr, starts_ptr, active_ptr,
    T, X, C, slots, scaling, chunk,
    KEPT: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
    SPLITS: tl.constexpr, EVEN: tl.constexpr, IS_ROW: tl.constexpr,
    TB: tl.constexpr, XP: tl.constexpr, PP: tl.constexpr, PADDED: tl.constexpr,
    OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    place = tile * BX + tl.arange(0, BX)
    n = tl.minimum(place, X - 1)
    begin = split * chunk
    end = tl.minimum(begin + chunk, C)
    if OVERLAP > 1 and EVEN:
        prefetch_rows(w_ptr, n, 2 * C, 2 * begin, 2 * BK)
    wait_for_earlier(OVERLAP > 0)
    for start in range(0, T, BM):
        row = start + tl.arange(0, BM)
        if IS_ROW:
            acc = row_product(x_ptr, w_ptr, w_ptr, n, begin, end, C, BF16, BX, BK, EVEN, UPCAST)
            acc = acc[None, :]
        else:
            acc = tile_product(
                x_ptr, row.to(tl.int64) * C, row < T, w_ptr, w_ptr, n, begin, end, C,
                BF16, BM, BX, BK, EVEN, UPCAST,
            )  # fmt: skip
        at = (split * T + row)[:, None] * X + place[None, :]
        tl.store(part_ptr + at, acc, mask=(row < T)[:, None] & (place < X)[None, :])
    if last_to_arrive(count_ptr, tl.num_programs(0) * SPLITS):
        e = tl.arange(0, XP)
        bias = tl.load(bias_ptr + e, mask=e < X, other=0.0)
        tl.store(active_ptr + e, tl.full([XP], -1, tl.int32), mask=e < slots)
        for first in range(0, T, TB):
            t = first + tl.arange(0, TB)
            there = (t < T)[:, None] & (e < X)[None, :]
            if TB == 1:
                step = tl.arange(0, PADDED)[:, None]
                part = part_ptr + (step * T + first) * X + e[None, :]
                there = (step < SPLITS) & (e < X)[None, :]
                part = tl.load(part, mask=there, other=0.0, cache_modifier=".cg")
                logits = tl.sum(part, axis=0)[None, :]
            else:
                logits = tl.zeros([TB, XP], tl.float32)
                for step in tl.static_range(SPLITS):
                    part = part_ptr + (step * T + t)[:, None] * X + e[None, :]
                    logits += tl.load(part, mask=there, other=0.0, cache_modifier=".cg")
            score = _sqrt_softplus(logits)
            biased = tl.where((e < X)[None, :], score + bias[None, :], float("-inf"))
            biased = tl.where(biased == biased, biased, float("-inf"))
            total = tl.zeros([TB], tl.float32)
            for j in tl.static_range(KEPT):
                best = tl.max(biased, axis=1)
                # Without a comparable score (all NaN) the lowest ids are taken; weights are NaN.
                chosen = tl.min(tl.where(biased == best[:, None], e[None, :], XP), axis=1)
                is_chosen = e[None, :] == chosen[:, None]
                weight = tl.sum(tl.where(is_chosen, score, 0.0), axis=1)
                total += weight
                tl.store(ids_ptr + t * KEPT + j, chosen, mask=t < T)
                tl.store(weights_ptr + t * KEPT + j, weight, mask=t < T)
                biased = tl.where(is_chosen, float("-inf"), biased)
            tl.debug_barrier()
            for j in tl.static_range(KEPT):
                at_weight = weights_ptr + t * KEPT + j
                weight = tl.load(at_weight, mask=t < T, other=0.0)
                tl.store(at_weight, weight / (total + 1e-20) * scaling, mask=t < T)
        tl.debug_barrier()
        # The lists: P pairs against all pairs, 16 at a time.
        pairs = T * KEPT
        p = tl.arange(0, PP)
        own = tl.load(ids_ptr + p, mask=p < pairs, other=XP)
        before = tl.zeros([PP], tl.int32)
        counts = tl.zeros([XP], tl.int32)
        for start in range(0, pairs, 16):
            q = start + tl.arange(0, 16)
            other = tl.load(ids_ptr + q, mask=q < pairs, other=XP)
            earlier = (other[None, :] < own[:, None]) | (
                (other[None, :] == own[:, None]) & (q[None, :] < p[:, None])
            )
            before += tl.sum((earlier & (q < pairs)[None, :]).to(tl.int32), axis=1)
            counts += tl.sum((other[None, :] == e[:, None]).to(tl.int32), axis=1)
        tl.store(order_ptr + before, p, mask=p < pairs)
        rank = tl.zeros([PP], tl.int32)
        for j in tl.static_range(KEPT):
            beside = tl.load(ids_ptr + p // KEPT * KEPT + j, mask=p < pairs, other=XP)
            rank += (beside < own).to(tl.int32)
        tl.store(rank_ptr + p, rank, mask=p < pairs)
        ends = tl.cumsum(counts, axis=0)
        tl.store(starts_ptr + e, ends - counts, mask=e < X)
        tl.store(starts_ptr + e + 1, ends, mask=e == X - 1)
        present = (counts > 0).to(tl.int32)
        slot = tl.cumsum(present, axis=0) - 1
        tl.store(active_ptr + slot, e, mask=(present > 0) & (e < X))


def route_unsupported(x: Tensor, weight: Tensor, k: int) -> str | None:
    """Return why `route` cannot take these inputs, or None."""
    if len(x) > MAX_TOKENS:
        return f"{len(x)} tokens, expected at most {MAX_TOKENS}"
    if weight.shape[1] % 32:
        return f"weight: {weight.shape[1]} columns, expected a multiple of 32"
    if not 1 <= k <= len(weight) <= 512:
        return f"k {k} of {len(weight)} experts, expected 1 <= k <= X <= 512"
    return None


class RouteScratch(NamedTuple):
    """Partial logits and the counter of one chain of launches that do not overlap."""

    parts: Tensor
    counter: Tensor


def route_scratch(tokens: int, experts: int, device: torch.device | str) -> RouteScratch:
    """Return scratch that serves up to `tokens` tokens and 32 splits of the columns."""
    return RouteScratch(torch.empty(32 * tokens * experts, device=device), counters(device, 1))


def route_launch(tokens: int, device: torch.device, invariant: bool = False) -> RouteLaunch:
    """Return the parameters for `tokens` tokens on a device; invariant as `linear_launch`."""
    if invariant:
        return launch_for(_INVARIANT, device)
    one, more = launch_for(_LAUNCH, device)
    return one if tokens == 1 else more


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    k: int,
    scaling: float,
    launch: RouteLaunch | None = None,
    scratch: RouteScratch | None = None,
) -> Routing:
    """Same contract as `route_ref`, up to the order of the fp32 sums, for at most 64 tokens."""
    reason = route_unsupported(x, weight, k)
    if reason is not None:
        raise RouteUnsupportedError(f"route: {reason}")
    (tokens, channels), experts = x.shape, len(weight)
    slots = min(experts, tokens * k)

    def int32(*shape):
        return torch.empty(shape, dtype=torch.int32, device=x.device)

    found = Routing(
        int32(tokens, k),
        torch.empty(tokens, k, device=x.device),
        int32(tokens * k),
        int32(tokens * k),
        int32(experts + 1),
        int32(slots),
    )
    if not tokens:
        found.starts.zero_()
        return found
    launch = route_launch(tokens, x.device) if launch is None else launch
    tiles, steps = -(-experts // launch.rows), -(-channels // launch.columns)
    wanted = min(32, max(1, min(launch.programs // tiles, steps)))
    splits = max(s for s in range(1, wanted + 1) if steps % s == 0)
    chunk = steps // splits * launch.columns
    scratch = route_scratch(tokens, experts, x.device) if scratch is None else scratch
    padded = triton.next_power_of_2(experts)
    least = 2 if launch.block else 1  # one token alone adds its parts in another order
    block = launch.block or (1 if tokens == 1 else max(16, triton.next_power_of_2(tokens)))
    _route_kernel[(tiles, splits)](
        x, weight, bias, *scratch, *found, tokens, experts, channels, slots, scaling, chunk,
        KEPT=k, BX=launch.rows, BK=launch.columns,
        BM=block, SPLITS=splits, EVEN=channels == splits * chunk, IS_ROW=block == 1,
        TB=max(least, min(triton.next_power_of_2(tokens), 4096 // padded)), XP=padded,
        PP=triton.next_power_of_2(tokens * k), PADDED=triton.next_power_of_2(splits),
        UPCAST=is_interpreted(_route_kernel),
        num_warps=launch.warps, num_stages=launch.stages, **overlap_of(launch.overlap, x.device),
    )  # fmt: skip
    return found
