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
    """Rows and columns of the matrix per step, programs aimed at; the rest as `LinearLaunch`.

    apart  the choice is a second launch with a program per token, the last of which makes the lists
    """

    rows: int
    columns: int
    programs: int
    warps: int
    stages: int
    block: int = 0
    apart: bool = False
    overlap: int = 0


# (one token, more) by device family.
_LAUNCH: dict[str, tuple[RouteLaunch, RouteLaunch]] = {
    "any": (
        RouteLaunch(rows=16, columns=256, programs=128, warps=4, stages=2),
        RouteLaunch(rows=32, columns=128, programs=32, warps=8, stages=3),
    ),
    "hopper": (
        RouteLaunch(rows=16, columns=256, programs=128, warps=4, stages=2),
        RouteLaunch(rows=32, columns=128, programs=96, warps=4, stages=3, apart=True),
    ),
}
_INVARIANT = {
    "any": RouteLaunch(rows=32, columns=128, programs=32, warps=8, stages=3, block=16),
}

# What `bench/gpu_decode.py --tune` times, and the compiled tests run.
BENCHED = tuple(
    RouteLaunch(
        rows=rows, columns=columns, programs=programs, warps=warps, stages=3, apart=apart
    )
    for rows, columns, programs, warps, apart in (
        (32, 128, 32, 8, True), (32, 128, 96, 4, True), (16, 256, 120, 4, True),
        (32, 256, 64, 4, True), (32, 128, 32, 8, False), (16, 256, 128, 4, False),
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
    APART: tl.constexpr, OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
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
    is_last = False
    if not APART:
        is_last = last_to_arrive(count_ptr, tl.num_programs(0) * SPLITS)
    if is_last:
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
            taken = tl.zeros([TB, XP], tl.int32)
            for j in tl.static_range(KEPT):
                best = tl.max(biased, axis=1)
                # Without a comparable score (all NaN) the lowest ids are taken; weights are NaN.
                free = (biased == best[:, None]) & (taken == 0)
                chosen = tl.min(tl.where(free, e[None, :], XP), axis=1)
                is_chosen = e[None, :] == chosen[:, None]
                weight = tl.sum(tl.where(is_chosen, score, 0.0), axis=1)
                total += weight
                tl.store(ids_ptr + t * KEPT + j, chosen, mask=t < T)
                tl.store(weights_ptr + t * KEPT + j, weight, mask=t < T)
                biased = tl.where(is_chosen, float("-inf"), biased)
                taken += is_chosen.to(tl.int32)
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


@triton.jit
def _bits_of(word):
    """Return how many of the low 16 bits of an int32 are set."""
    word = word - ((word >> 1) & 0x5555)
    word = (word & 0x3333) + ((word >> 2) & 0x3333)
    word = (word + (word >> 4)) & 0x0F0F
    return (word + (word >> 8)) & 31


@triton.jit
def _choose_kernel(
    bias_ptr, part_ptr, count_ptr,
    ids_ptr, weights_ptr, order_ptr, rank_ptr, starts_ptr, active_ptr,
    T, X, slots, scaling, splits,
    KEPT: tl.constexpr, KP: tl.constexpr, WORDS: tl.constexpr, XP: tl.constexpr, PP: tl.constexpr,
    PADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The second launch of `apart`: a program chooses for one token, the last makes the lists.

    Behind the counter lie WORDS rows of X words: bit t % 16 of word [t // 16, e] says that token t
    chose expert e. So a pair's place in `order` is a count of bits, and no pair meets another.
    """
    wait_for_earlier(OVERLAP > 0)
    t = tl.program_id(0)
    e, j = tl.arange(0, XP), tl.arange(0, KP)
    chosen_ptr = count_ptr + 1
    step = tl.arange(0, PADDED)[:, None]
    part = part_ptr + (step * T + t) * X + e[None, :]
    part = tl.load(part, mask=(step < splits) & (e < X)[None, :], other=0.0)
    score = _sqrt_softplus(tl.sum(part, axis=0))
    biased = score + tl.load(bias_ptr + e, mask=e < X, other=0.0)
    biased = tl.where((e < X) & (biased == biased), biased, float("-inf"))
    ids = tl.full([KP], XP, tl.int32)
    weights = tl.zeros([KP], tl.float32)
    taken = tl.zeros([XP], tl.int32)
    for kept in tl.static_range(KEPT):
        best = tl.max(biased, axis=0)
        # Without a comparable score (all NaN) the lowest ids are taken; weights are NaN.
        chosen = tl.min(tl.where((biased == best) & (taken == 0), e, XP), axis=0)
        weight = tl.sum(tl.where(e == chosen, score, 0.0), axis=0)
        ids = tl.where(j == kept, chosen, ids)
        weights = tl.where(j == kept, weight, weights)
        biased = tl.where(e == chosen, float("-inf"), biased)
        taken += (e == chosen).to(tl.int32)
    weights = weights / (tl.sum(weights, axis=0) + 1e-20) * scaling
    own = t * KEPT + j
    tl.store(ids_ptr + own, ids, mask=j < KEPT)
    tl.store(weights_ptr + own, weights, mask=j < KEPT)
    rank = tl.sum((ids[None, :] < ids[:, None]).to(tl.int32), axis=1)
    tl.store(rank_ptr + own, rank, mask=j < KEPT)
    bit = tl.zeros([KP], tl.int32) + (1 << (t % 16))
    tl.atomic_or(chosen_ptr + (t // 16) * X + ids, bit, mask=j < KEPT)
    if last_to_arrive(count_ptr, T):
        counts = tl.zeros([XP], tl.int32)
        for word in tl.static_range(WORDS):
            bits = tl.load(chosen_ptr + word * X + e, mask=e < X, other=0, cache_modifier=".cg")
            counts += _bits_of(bits)
        ends = tl.cumsum(counts, axis=0)
        tl.store(starts_ptr + e, ends - counts, mask=e < X)
        tl.store(starts_ptr + e + 1, ends, mask=e == X - 1)
        tl.store(active_ptr + e, tl.full([XP], -1, tl.int32), mask=e < slots)
        tl.debug_barrier()
        present = (counts > 0).to(tl.int32)
        slot = tl.cumsum(present, axis=0) - 1
        tl.store(active_ptr + slot, e, mask=(present > 0) & (e < X))
        p = tl.arange(0, PP)
        there = p < T * KEPT
        expert = tl.load(ids_ptr + p, mask=there, other=0, cache_modifier=".cg")
        token = p // KEPT
        place = tl.load(starts_ptr + expert, mask=there, other=0, cache_modifier=".cg")
        for word in tl.static_range(WORDS):
            at = chosen_ptr + word * X + expert
            bits = tl.load(at, mask=there, other=0, cache_modifier=".cg")
            below = tl.minimum(tl.maximum(token - word * 16, 0), 16)
            place += _bits_of(bits & ((1 << below) - 1))
        tl.store(order_ptr + place, p, mask=there)
        tl.debug_barrier()
        for word in tl.static_range(WORDS):
            tl.store(chosen_ptr + word * X + e, tl.zeros([XP], tl.int32), mask=e < X)


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
    """Partial logits, and a counter with the bits behind it, of launches that do not overlap."""

    parts: Tensor
    counter: Tensor


def route_scratch(tokens: int, experts: int, device: torch.device | str) -> RouteScratch:
    """Return scratch that serves up to `tokens` tokens and 32 splits of the columns."""
    bits = -(-tokens // 16) * experts
    return RouteScratch(
        torch.empty(32 * tokens * experts, device=device), counters(device, 1 + bits)
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
        APART=launch.apart, UPCAST=is_interpreted(_route_kernel),
        num_warps=launch.warps, num_stages=launch.stages, **overlap_of(launch.overlap, x.device),
    )  # fmt: skip
    if launch.apart:
        _choose_kernel[(tokens,)](
            bias, *scratch, *found, tokens, experts, slots, scaling, splits,
            KEPT=k, KP=max(2, triton.next_power_of_2(k)), WORDS=-(-tokens // 16), XP=padded,
            PP=triton.next_power_of_2(tokens * k), PADDED=triton.next_power_of_2(splits),
            num_warps=1 if padded <= 128 else 4, **overlap_of(launch.overlap, x.device),
        )  # fmt: skip
    return found
