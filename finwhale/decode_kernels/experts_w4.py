"""The experts of a layer for 1 to 64 tokens in two launches: FP4 routed ones, FP8 shared one.

First launch: gate and up of every expert that some token chose, clamped SwiGLU, rounding. Second:
the down products, one row of output per token and expert, left for the hyper-connection site to
add (in ascending expert id, the shared expert last: D12). Each matrix is read once, however many
rows it has; `Routing` says on the device which experts there are, so no host waits. The easy
mistake: a slot without an expert (-1) must end at once and write nothing; its rows do not exist.
Source: spec/backbone.md sections 8 and 9.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.launch import is_interpreted, launch_for, wait_for_earlier
from finwhale.decode_kernels.route import Routing
from finwhale.decode_kernels.tiles import (
    FP4,
    FP8,
    GROUP,
    overlap_of,
    prefetch_rows,
    round_groups,
    row_product,
    tile_product,
    to_bf16,
    unpack_fp4_tiles,
)
from finwhale.ops.linear import linear_fp32_accumulate
from finwhale.ops.moe import clamped_swiglu
from finwhale.ops.rounding import round_fp8
from finwhale.ops.weight_formats import dequantize_weight


class ExpertWeights(NamedTuple):
    """The stored matrices of one layer's experts.

    gate_up         [X, 2F, C/2] uint8, w1 over w3, FP4 in the order of `pack_fp4_tiles`
    gate_up_scales  [X, 2F, C/32] uint8
    down            [X, C, F/2] uint8, w2; down_scales [X, C, F/32] uint8
    shared_*        of the shared expert: [2F, C] and [C, F] float8_e4m3fn, scales per 32x32 block
    """

    gate_up: Tensor
    gate_up_scales: Tensor
    down: Tensor
    down_scales: Tensor
    shared_gate_up: Tensor
    shared_gate_up_scales: Tensor
    shared_down: Tensor
    shared_down_scales: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLaunch:
    """How the two launches are cut.

    gate_rows   BN rows of gate and as many of up per program; a multiple of 32
    down_rows   BN rows of w2 per program
    columns     BK; tile_columns where an expert has several rows
    by_rows     one token is served without the matrix unit
    registers   at most so many per thread, so that more programs fit; 0: as compiled
    overlap     as in `LinearLaunch`; only the shared expert's weights are known early
    """

    gate_rows: int
    down_rows: int
    columns: int
    tile_columns: int
    warps: int
    stages: int
    by_rows: bool = True
    registers: int = 0
    overlap: int = 0


_FEW = ExpertLaunch(gate_rows=64, down_rows=128, columns=256, tile_columns=128, warps=4, stages=3)
_ONE = ExpertLaunch(gate_rows=32, down_rows=32, columns=256, tile_columns=128, warps=8, stages=3)
# (one token, up to 16, more) by device family.
_LAUNCH: dict[str, tuple[ExpertLaunch, ExpertLaunch, ExpertLaunch]] = {"any": (_ONE, _FEW, _FEW)}
_INVARIANT = {"any": replace(_FEW, by_rows=False)}

# What `bench/gpu_decode.py --tune` times for any number of tokens, and the compiled tests run. With
# 32 rows of the matrix for each warp, codes are decoded where the matrix unit wants them; with
# fewer they would pass through shared memory once more.
BENCHED = tuple(
    ExpertLaunch(
        gate_rows=gate,
        down_rows=2 * gate,
        columns=256,
        tile_columns=128,
        warps=warps,
        stages=stages,
        registers=registers,
        by_rows=False,
    )
    for gate, warps, stages, registers in (
        (64, 4, 3, 0), (64, 4, 3, 128), (64, 4, 4, 128), (32, 2, 3, 0), (32, 2, 4, 0),
        (32, 2, 3, 144), (64, 2, 3, 0), (128, 8, 3, 128),
    )
)  # fmt: skip


class ExpertsUnsupportedError(ValueError):
    """These inputs cannot run in the kernels; the message names the field and its value."""


@triton.jit
def _store_hidden(
    acc, hidden_ptr, rows, inside, weight, first, F, limit,
    BM: tl.constexpr, HALF: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store silu(min(gate, limit)) * clamp(up) * weight, rounded, of acc [BM, gate then up]."""
    acc = tl.permute(tl.reshape(to_bf16(acc, UPCAST), (BM, 2, HALF)), (0, 2, 1))
    gate, up = tl.split(acc)
    gate = tl.where(gate > limit, limit, gate)  # a NaN stays one
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    y = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
    y = round_groups(tl.reshape(to_bf16(y, UPCAST), (BM, HALF // 32, 32)))
    y = to_bf16(tl.reshape(y, (BM, HALF)), UPCAST)
    f = first + tl.arange(0, HALF)
    at = rows.to(tl.int64)[:, None] * F + f[None, :]
    keep = inside[:, None] & (f < F)[None, :]
    tl.store(hidden_ptr + at, y.to(hidden_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _gate_up_kernel(
    x_ptr, w_ptr, s_ptr, shared_ptr, shared_s_ptr, hidden_ptr,
    weights_ptr, order_ptr, starts_ptr, active_ptr, T, C, F, slots, k, limit,
    HALF: tl.constexpr, BK: tl.constexpr, TILE_BK: tl.constexpr, BM: tl.constexpr,
    IS_ROW: tl.constexpr, EVEN: tl.constexpr, TILE_EVEN: tl.constexpr,
    OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    BN: tl.constexpr = 2 * HALF
    first = tl.program_id(0) * HALF
    slot = tl.program_id(1)
    i = tl.arange(0, BN)
    f = tl.minimum(first + i % HALF, F - 1)
    n = tl.where(i < HALF, f, F + f)
    shared_hidden_ptr = hidden_ptr + tl.cast(T * k, tl.int64) * F
    if OVERLAP > 1 and EVEN and slot == 0:
        prefetch_rows(shared_ptr, n, C, 0, BK)
    wait_for_earlier(OVERLAP > 0)
    # The shared expert has slot 0: its matrices are the largest, so it should not come last.
    if slot == 0:
        if IS_ROW:
            row = tl.arange(0, 1)
            acc = row_product(
                x_ptr, shared_ptr, shared_s_ptr, n, 0, C, C, FP8, BN, BK, EVEN, UPCAST
            )
            one = tl.full([1], 1.0, tl.float32)
            _store_hidden(
                acc[None, :], shared_hidden_ptr, row, row < T, one, first, F, limit,
                1, HALF, UPCAST,
            )  # fmt: skip
        else:
            for start in range(0, T, BM):
                row = start + tl.arange(0, BM)
                acc = tile_product(
                    x_ptr, row.to(tl.int64) * C, row < T, shared_ptr, shared_s_ptr, n, 0, C, C,
                    FP8, BM, BN, TILE_BK, TILE_EVEN, UPCAST,
                )  # fmt: skip
                one = tl.full([BM], 1.0, tl.float32)
                _store_hidden(
                    acc, shared_hidden_ptr, row, row < T, one, first, F, limit,
                    BM, HALF, UPCAST,
                )  # fmt: skip
    else:
        expert = tl.load(active_ptr + slot - 1)
        if expert >= 0:
            begin = tl.load(starts_ptr + expert)
            end = tl.load(starts_ptr + expert + 1)
            w = w_ptr + tl.cast(expert, tl.int64) * (2 * F) * (C // 2)
            s = s_ptr + tl.cast(expert, tl.int64) * (2 * F) * (C // 32)
            if IS_ROW:
                row = begin + tl.arange(0, 1)
                weight = tl.load(weights_ptr + tl.load(order_ptr + row))
                acc = row_product(x_ptr, w, s, n, 0, C, C, FP4, BN, BK, EVEN, UPCAST)
                _store_hidden(
                    acc[None, :], hidden_ptr, row, row < end, weight, first, F, limit,
                    1, HALF, UPCAST,
                )  # fmt: skip
            else:
                for start in range(begin, end, BM):
                    row = start + tl.arange(0, BM)
                    pair = tl.load(order_ptr + row, mask=row < end, other=0)
                    weight = tl.load(weights_ptr + pair, mask=row < end, other=0.0)
                    acc = tile_product(
                        x_ptr, (pair // k).to(tl.int64) * C, row < end, w, s, n, 0, C, C,
                        FP4, BM, BN, TILE_BK, TILE_EVEN, UPCAST,
                    )  # fmt: skip
                    _store_hidden(
                        acc, hidden_ptr, row, row < end, weight, first, F, limit,
                        BM, HALF, UPCAST,
                    )  # fmt: skip


@triton.jit
def _down_kernel(
    hidden_ptr, w_ptr, s_ptr, shared_ptr, shared_s_ptr, out_ptr,
    order_ptr, rank_ptr, starts_ptr, active_ptr, T, C, F, slots, k,
    BN: tl.constexpr, BK: tl.constexpr, TILE_BK: tl.constexpr, BM: tl.constexpr,
    IS_ROW: tl.constexpr, EVEN: tl.constexpr, TILE_EVEN: tl.constexpr,
    OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BN + tl.arange(0, BN)
    slot = tl.program_id(1)
    n = tl.minimum(place, C - 1)
    shared_hidden_ptr = hidden_ptr + tl.cast(T * k, tl.int64) * F
    if OVERLAP > 1 and EVEN and slot == 0:
        prefetch_rows(shared_ptr, n, F, 0, BK)
    wait_for_earlier(OVERLAP > 0)
    if slot == 0:
        if IS_ROW:
            acc = row_product(
                shared_hidden_ptr, shared_ptr, shared_s_ptr, n, 0, F, F, FP8, BN, BK, EVEN, UPCAST
            )
            at = tl.cast(k, tl.int64) * C + place
            acc = to_bf16(acc, UPCAST).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + at, acc, mask=place < C)
        else:
            for start in range(0, T, BM):
                row = (start + tl.arange(0, BM)).to(tl.int64)
                acc = tile_product(
                    shared_hidden_ptr, row * F, row < T, shared_ptr, shared_s_ptr, n, 0, F, F,
                    FP8, BM, BN, TILE_BK, TILE_EVEN, UPCAST,
                )  # fmt: skip
                at = (row * (k + 1) + k)[:, None] * C + place[None, :]
                acc = to_bf16(acc, UPCAST).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + at, acc, mask=(row < T)[:, None] & (place < C)[None, :])
    else:
        expert = tl.load(active_ptr + slot - 1)
        if expert >= 0:
            begin = tl.load(starts_ptr + expert)
            end = tl.load(starts_ptr + expert + 1)
            w = w_ptr + tl.cast(expert, tl.int64) * C * (F // 2)
            s = s_ptr + tl.cast(expert, tl.int64) * C * (F // 32)
            if IS_ROW:
                rank = tl.load(rank_ptr + tl.load(order_ptr + begin))
                acc = row_product(
                    hidden_ptr + tl.cast(begin, tl.int64) * F,
                    w,
                    s,
                    n,
                    0,
                    F,
                    F,
                    FP4,
                    BN,
                    BK,
                    EVEN,
                    UPCAST,
                )
                acc = to_bf16(acc, UPCAST).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + tl.cast(rank, tl.int64) * C + place, acc, mask=place < C)
            else:
                for start in range(begin, end, BM):
                    row = start + tl.arange(0, BM)
                    pair = tl.load(order_ptr + row, mask=row < end, other=0)
                    rank = tl.load(rank_ptr + pair, mask=row < end, other=0)
                    acc = tile_product(
                        hidden_ptr, row.to(tl.int64) * F, row < end, w, s, n, 0, F, F,
                        FP4, BM, BN, TILE_BK, TILE_EVEN, UPCAST,
                    )  # fmt: skip
                    at = ((pair // k).to(tl.int64) * (k + 1) + rank)[:, None] * C + place[None, :]
                    keep = (row < end)[:, None] & (place < C)[None, :]
                    acc = to_bf16(acc, UPCAST).to(out_ptr.dtype.element_ty)
                    tl.store(out_ptr + at, acc, mask=keep)


def experts_w4_ref(x: Tensor, routing: Routing, w: ExpertWeights, limit: float) -> Tensor:
    """Return the output of every chosen expert and of the shared one, not yet added.

    x        [T, C] bf16, rounded to FP8 groups where the release does so
    routing  of `route`; an id of -1 is no expert and its row is zero
    returns  [T, k + 1, C] bf16: the token's experts in ascending id, then the shared expert

    Section 8, steps 4 and 5, without the sum.
    """
    tokens, k = routing.ids.shape
    out = x.new_zeros(tokens, k + 1, x.shape[-1])

    def one(z, gate_up, down, weight):
        gate, up = linear_fp32_accumulate(z, gate_up).chunk(2, dim=-1)
        hidden = round_fp8(clamped_swiglu(gate, up, weight, limit))
        return linear_fp32_accumulate(hidden, down)

    def matrix(packed, scales, expert):
        codes = unpack_fp4_tiles(packed[expert]).view(torch.int8)
        return dequantize_weight(codes, scales[expert])

    ranks = routing.rank.view(tokens, k)
    for expert in sorted(set(routing.ids[routing.ids >= 0].tolist())):
        token, choice = (routing.ids == expert).nonzero(as_tuple=True)
        gate_up = matrix(w.gate_up, w.gate_up_scales, expert)
        down = matrix(w.down, w.down_scales, expert)
        weight = routing.weights[token, choice, None]
        out[token, ranks[token, choice].long()] = one(x[token], gate_up, down, weight)
    gate_up = dequantize_weight(w.shared_gate_up, w.shared_gate_up_scales)
    out[:, k] = one(x, gate_up, dequantize_weight(w.shared_down, w.shared_down_scales), None)
    return out


def experts_unsupported(x: Tensor, w: ExpertWeights) -> str | None:
    """Return why `experts_w4` cannot take these inputs, or None."""
    channels, width = x.shape[-1], w.down.shape[-1] * 2
    for name, value in (("hidden_size", channels), ("moe_intermediate_size", width)):
        if value % GROUP:
            return f"{name}: {value}, expected a multiple of {GROUP}"
    if w.gate_up.shape[1:] != (2 * width, channels // 2):
        return f"gate_up: shape {tuple(w.gate_up.shape)} for widths {channels} and {width}"
    if not x.is_contiguous():
        return "x is not contiguous"
    if any(scales.data_ptr() % 4 for scales in w[1::2]):
        return "scales: read as words, so their addresses must be multiples of 4"
    return None


def expert_launch(tokens: int, device: torch.device, invariant: bool = False) -> ExpertLaunch:
    """Return the parameters for `tokens` tokens on a device; invariant as `linear_launch`."""
    if invariant:
        return launch_for(_INVARIANT, device)
    one, few, many = launch_for(_LAUNCH, device)
    return one if tokens == 1 else few if tokens <= 16 else many


def experts_w4(
    x: Tensor,
    routing: Routing,
    w: ExpertWeights,
    limit: float,
    launch: ExpertLaunch | None = None,
) -> Tensor:
    """Same contract as `experts_w4_ref`; products are exact in bf16, sums are fp32.

    Rows of ids that are -1 are not written: nothing may read them.
    """
    reason = experts_unsupported(x, w)
    if reason is not None:
        raise ExpertsUnsupportedError(f"experts_w4: {reason}")
    (tokens, channels), k = x.shape, routing.ids.shape[-1]
    width = w.down.shape[-1] * 2
    out = x.new_empty(tokens, k + 1, channels)
    if not tokens:
        return out
    launch = expert_launch(tokens, x.device) if launch is None else launch
    hidden = x.new_empty(tokens * (k + 1), width)
    slots = len(routing.active)
    constants = {
        "BK": launch.columns,
        "TILE_BK": launch.tile_columns,
        "BM": 16,
        "IS_ROW": tokens == 1 and launch.by_rows,
        "UPCAST": is_interpreted(_gate_up_kernel),
        "num_warps": launch.warps,
        "num_stages": launch.stages,
        **({"maxnreg": launch.registers} if launch.registers else {}),
        **overlap_of(launch.overlap, x.device),
    }
    _gate_up_kernel[(triton.cdiv(width, launch.gate_rows), slots + 1)](
        x, w.gate_up, w.gate_up_scales, w.shared_gate_up, _bytes(w.shared_gate_up_scales), hidden,
        routing.weights, routing.order, routing.starts, routing.active,
        tokens, channels, width, slots, k, limit,
        HALF=launch.gate_rows, EVEN=channels % launch.columns == 0,
        TILE_EVEN=channels % launch.tile_columns == 0, **constants,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(channels, launch.down_rows), slots + 1)](
        hidden, w.down, w.down_scales, w.shared_down, _bytes(w.shared_down_scales), out,
        routing.order, routing.rank, routing.starts, routing.active,
        tokens, channels, width, slots, k,
        BN=launch.down_rows, EVEN=width % launch.columns == 0,
        TILE_EVEN=width % launch.tile_columns == 0, **constants,
    )  # fmt: skip
    return out


def _bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8)
