"""The router of a decode step: scores, choice, weights, and the order of the work.

Programs compute parts of the logits. For one token the last to arrive adds them and does the rest;
for more a second launch does it, a program for each token and the last one for the lists:
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

from finwhale.decode_kernels.launch import (
    Overlap,
    is_interpreted,
    launch_for,
    let_next_start,
    overlap_options,
    wait_for_earlier,
)
from finwhale.decode_kernels.tiles import (
    counters,
    last_to_arrive,
    row_ahead,
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
    """Rows and columns of the matrix per step, programs aimed at; the rest as `LinearLaunch`.

    apart  one token, too, takes two launches, as more do: the choice with a program per token, the
           last of which makes the lists
    """

    rows: int
    columns: int
    programs: int
    warps: int
    stages: int
    block: int = 0
    apart: bool = False


# (one token, more) by device family.
_LAUNCH: dict[str, tuple[RouteLaunch, RouteLaunch]] = {
    "any": (
        RouteLaunch(rows=16, columns=256, programs=128, warps=4, stages=2),
        RouteLaunch(rows=32, columns=128, programs=32, warps=8, stages=3),
    ),
    "hopper": (
        RouteLaunch(rows=16, columns=256, programs=128, warps=4, stages=2),
        RouteLaunch(rows=32, columns=128, programs=96, warps=4, stages=3),
    ),
}
_INVARIANT = {
    "any": RouteLaunch(rows=32, columns=128, programs=32, warps=8, stages=3, block=16, apart=True),
}
_CHOOSE_WARPS = 8

# What `bench/gpu_decode.py --tune` times, and the compiled tests run.
BENCHED = tuple(
    RouteLaunch(rows=rows, columns=columns, programs=programs, warps=warps, stages=3)
    for rows, columns, programs, warps in (
        (32, 128, 32, 8), (32, 128, 96, 4), (16, 256, 120, 4), (16, 256, 60, 4),
        (32, 256, 64, 4), (32, 256, 64, 8),
    )
)  # fmt: skip


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
    """sqrt(log(1 + e^x)), accurate where e^x is far below one; a NaN stays one.

    Compiled, the lesser of a NaN and a number is the number.
    """
    e = tl.exp(tl.minimum(x, 20.0))
    wide = 1.0 + e
    # log(1 + e) = log(w) * e / (w - 1) with w the rounded sum.
    exact = tl.where(wide == 1.0, e, tl.log(wide) * (e / tl.where(wide == 1.0, 1.0, wide - 1.0)))
    return tl.where(x == x, tl.sqrt(tl.where(x > 20.0, x, exact)), x)


@triton.jit
def _chosen(
    logits, bias, e, j, X, scaling, KEPT: tl.constexpr, XP: tl.constexpr, KP: tl.constexpr
):  # fmt: skip
    """Return ids and weights [KP] of the KEPT best of a token, best first, and starts [XP].

    logits, bias  [XP], of experts e; j [KP]; starts: how many of the chosen have a lower id
    An id that is not one of the KEPT is XP.
    """
    score = _sqrt_softplus(logits)
    biased = score + bias
    biased = tl.where(biased == biased, biased, float("-inf"))
    # Integers in the order of the numbers: a warp finds their largest in one instruction. A score
    # that is NaN is above all, as in torch, so that it shows in the weights; only the taken lie
    # below the -inf of a bias that is NaN.
    key = biased.to(tl.int32, bitcast=True)
    key = tl.where(score == score, key ^ ((key >> 31) & 0x7FFFFFFF), 2147483647)
    key = tl.where(e < X, key, -2147483648)
    score = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    ids = tl.full([KP], XP, tl.int32)
    weights = tl.zeros([KP], tl.int32)
    starts = tl.zeros([XP], tl.int32)
    for kept in tl.static_range(KEPT):
        chosen = tl.min(tl.where(key == tl.max(key, axis=0), e, XP), axis=0)
        weight = tl.max(tl.where(e == chosen, score, 0), axis=0)
        ids = tl.where(j == kept, chosen, ids)
        weights = tl.where(j == kept, weight, weights)
        key = tl.where(e == chosen, -2147483648, key)
        starts += (chosen < e).to(tl.int32)
    weights = weights.to(tl.float32, bitcast=True)
    return ids, weights / (tl.sum(weights, axis=0) + 1e-20) * scaling, starts


@triton.jit
def _route_kernel(
    x_ptr, w_ptr, bias_ptr, part_ptr, count_ptr,
    ids_ptr, weights_ptr, order_ptr, rank_ptr, starts_ptr, active_ptr,
    T, X, C, scaling, chunk,
    KEPT: tl.constexpr, KP: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
    SPLITS: tl.constexpr, PADDED: tl.constexpr, XP: tl.constexpr, EVEN: tl.constexpr,
    APART: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Parts of the logits; of one token, unless APART, the last program makes the routing too."""
    tile, split = tl.program_id(0), tl.program_id(1)
    place = tile * BX + tl.arange(0, BX)
    n = tl.minimum(place, X - 1)
    begin = split * chunk
    end = tl.minimum(begin + chunk, C)
    first = 0
    if AHEAD:
        first = row_ahead(w_ptr, n, begin, C, BK)
    wait_for_earlier(OVERLAP)
    for start in range(0, T, BM):
        row = start + tl.arange(0, BM)
        if BM == 1:
            acc = row_product(x_ptr, w_ptr, n, begin, end, C, first, BX, BK, EVEN, AHEAD)
            acc = acc[None, :]
        else:
            acc = tile_product(
                x_ptr, row.to(tl.int64) * C, row < T, w_ptr, n, begin, end, C,
                BM, BX, BK, EVEN, UPCAST,
            )  # fmt: skip
        at = (split * T + row)[:, None] * X + place[None, :]
        tl.store(part_ptr + at, acc, mask=(row < T)[:, None] & (place < X)[None, :])
    let_next_start(OVERLAP)
    if not APART:
        e, j, step = tl.arange(0, XP), tl.arange(0, KP), tl.arange(0, PADDED)[:, None]
        column = tl.broadcast_to(e[None, :], (PADDED, XP))
        # A row of the shape of the parts: as a vector it would change its layout, and each program
        # would wait for it before it counts itself in.
        bias = tl.load(bias_ptr + column, mask=(step == 0) & (column < X), other=0.0)
        if last_to_arrive(count_ptr, tl.num_programs(0) * SPLITS):
            there = (step < SPLITS) & (column < X)
            part = part_ptr + (step * X + column)
            part = tl.load(part, mask=there, other=0.0, cache_modifier=".cg")
            ids, weights, starts = _chosen(
                tl.sum(part, axis=0), tl.sum(bias, axis=0), e, j, X, scaling, KEPT, XP, KP
            )  # fmt: skip
            is_id = j < KEPT
            tl.store(ids_ptr + j, ids, mask=is_id)
            tl.store(weights_ptr + j, weights, mask=is_id)
            tl.store(starts_ptr + e, starts, mask=e < X)
            tl.store(starts_ptr + X, KEPT)
            # No expert has two pairs: the order is that of the ids.
            rank = tl.sum((ids[None, :] < ids[:, None]).to(tl.int32), axis=1)
            tl.store(rank_ptr + j, rank, mask=is_id)
            tl.store(order_ptr + rank, j, mask=is_id)
            tl.store(active_ptr + rank, ids, mask=is_id)


@triton.jit
def _bits_of(word):
    """Return how many bits of an int64 are set, as int32."""
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    low = low - ((low >> 1) & 0x55555555)
    high = high - ((high >> 1) & 0x55555555)
    four = (low & 0x33333333) + ((low >> 2) & 0x33333333)
    four += (high & 0x33333333) + ((high >> 2) & 0x33333333)
    eight = (four & 0x0F0F0F0F) + ((four >> 4) & 0x0F0F0F0F)
    eight += eight >> 16
    return (eight + (eight >> 8)) & 127


@triton.jit
def _choose_kernel(
    bias_ptr, part_ptr, count_ptr,
    ids_ptr, weights_ptr, order_ptr, rank_ptr, starts_ptr, active_ptr,
    T, X, slots, scaling, splits,
    KEPT: tl.constexpr, KP: tl.constexpr, XP: tl.constexpr, PP: tl.constexpr,
    PADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The second launch: a program chooses for one token, the last makes the lists.

    Behind the counter lie X words of 64 bits: bit t of word e says that token t chose expert e. So
    a pair's place in `order` is a count of bits, and no pair meets another.
    """
    t = tl.program_id(0)
    e, j = tl.arange(0, XP), tl.arange(0, KP)
    bias = tl.load(bias_ptr + e, mask=e < X, other=0.0)
    wait_for_earlier(OVERLAP)
    tl.debug_barrier()  # no load crosses it: the bias is on its way before the parts
    chosen_ptr = (count_ptr + 2).to(tl.pointer_type(tl.int64), bitcast=True)
    step = tl.arange(0, PADDED)[:, None]
    part = part_ptr + t * X + (step * (T * X) + e[None, :])
    part = tl.load(part, mask=(step < splits) & (e < X)[None, :], other=0.0)
    ids, weights, _ = _chosen(tl.sum(part, axis=0), bias, e, j, X, scaling, KEPT, XP, KP)
    own = t * KEPT + j
    tl.store(ids_ptr + own, ids, mask=j < KEPT)
    bit = tl.full([KP], 1, tl.int64) << t
    tl.atomic_or(chosen_ptr + ids, bit, mask=j < KEPT, sem="relaxed")
    tl.store(weights_ptr + own, weights, mask=j < KEPT)
    rank = tl.sum((ids[None, :] < ids[:, None]).to(tl.int32), axis=1)
    tl.store(rank_ptr + own, rank, mask=j < KEPT)
    if last_to_arrive(count_ptr, T):
        bits = tl.load(chosen_ptr + e, mask=e < X, other=0, cache_modifier=".cg")
        p = tl.arange(0, PP)
        there = p < T * KEPT
        expert = tl.load(ids_ptr + p, mask=there, other=0, cache_modifier=".cg")
        earlier = (tl.full([PP], 1, tl.int64) << (p // KEPT)) - 1
        place = _bits_of(tl.gather(bits, expert, axis=0) & earlier)
        counts = _bits_of(bits)
        # Two running sums in one, of pairs (at most 64 * 512) and of experts that have any.
        present = (counts > 0).to(tl.int32)
        running = tl.cumsum(counts + (present << 16), axis=0)
        starts, slot = (running & 0xFFFF) - counts, running >> 16
        tl.store(order_ptr + place + tl.gather(starts, expert, axis=0), p, mask=there)
        tl.store(starts_ptr + e, starts, mask=e < X)
        tl.store(starts_ptr + X, T * KEPT)
        tl.store(active_ptr + slot - 1, e, mask=(present > 0) & (e < X))
        # Behind the last one that has a pair: as many -1 as are missing.
        missing = tl.sum(present, axis=0) + e
        tl.store(active_ptr + missing, tl.full([XP], -1, tl.int32), mask=missing < slots)
        tl.debug_barrier()
        tl.store(chosen_ptr + e, tl.zeros([XP], tl.int64), mask=e < X)


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
    """Partial logits, and a counter with the bits behind it. Launches that overlap may share."""

    parts: Tensor
    counter: Tensor


def route_scratch(tokens: int, experts: int, device: torch.device | str) -> RouteScratch:
    """Return scratch that serves up to `tokens` tokens and 32 splits of the columns."""
    return RouteScratch(
        torch.empty(32 * tokens * experts, device=device), counters(device, 2 + 2 * experts)
    )


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
    overlap: int = Overlap.NONE,
) -> Routing:
    """Same contract as `route_ref`, up to the order of the fp32 sums, for at most 64 tokens.

    overlap  an `Overlap`
    """
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
    block = launch.block or (1 if tokens == 1 else max(16, triton.next_power_of_2(tokens)))
    apart = launch.apart or tokens > 1
    is_even = channels == splits * chunk
    shared = {
        "KEPT": k,
        "KP": max(2, triton.next_power_of_2(k)),
        "XP": triton.next_power_of_2(experts),
        "PADDED": triton.next_power_of_2(splits),
        **overlap_options(overlap, x.device),
    }
    _route_kernel[(tiles, splits)](
        x, weight, bias, *scratch, *found, tokens, experts, channels, scaling, chunk,
        BX=launch.rows, BK=launch.columns, BM=block, SPLITS=splits,
        EVEN=is_even, APART=apart, AHEAD=is_even and block == 1,
        UPCAST=is_interpreted(_route_kernel),
        num_warps=launch.warps, num_stages=launch.stages, **shared,
    )  # fmt: skip
    if apart:
        _choose_kernel[(tokens,)](
            bias, *scratch, *found, tokens, experts, slots, scaling, splits,
            PP=triton.next_power_of_2(tokens * k), num_warps=_CHOOSE_WARPS, **shared,
        )  # fmt: skip
    return found
