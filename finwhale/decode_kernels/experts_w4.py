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

from finwhale.decode_kernels.launch import (
    Overlap,
    is_interpreted,
    launch_for,
    let_next_start,
    overlap_options,
    wait_for_earlier,
)
from finwhale.decode_kernels.route import Routing
from finwhale.decode_kernels.tiles import (
    FP4,
    FP8,
    GROUP,
    check_scratch,
    counters,
    round_groups,
    sum_of_splits,
    tiled_product,
    to_bf16,
    unpack_fp4_tiles,
    unpack_fp8_tiles,
)
from finwhale.ops.linear import linear_fp32_accumulate
from finwhale.ops.moe import clamped_swiglu
from finwhale.ops.rounding import round_fp8
from finwhale.ops.weight_formats import dequantize_weight


class ExpertWeights(NamedTuple):
    """The stored matrices of one layer's experts.

    gate_up         [X, 2F/32, C/32, 512] uint8, w1 over w3, FP4 tiles of `pack_fp4_tiles`
    gate_up_scales  [X, 2F/32, C/32, 32] uint8
    down            [X, C/32, F/32, 512] uint8, w2; down_scales [X, C/32, F/32, 32] uint8
    shared_*        of the shared expert, tiles of `pack_fp8_tiles`: [2F/32, C/32, 1024] and
                    [C/32, F/32, 1024] uint8, scales per tile
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

    gate_rows   rows of gate, and as many of up, of a program; a multiple of 32
    down_rows   rows of w2 of a program; a multiple of 32
    columns     of a step, a multiple of 32
    registers   at most so many per thread, so that more programs fit; 0: as compiled

    Where there is one token, columns are split over programs, the last of which adds:

    gate_splits    of gate and up
    shared_splits  of the shared expert's w2, whose programs would be the last to end: it has twice
                   the bytes of another
    """

    gate_rows: int
    down_rows: int
    columns: int
    warps: int
    stages: int
    gate_splits: int = 1
    shared_splits: int = 1
    registers: int = 0


# (one token, up to 16, more) by device family.
_SAME = ExpertLaunch(gate_rows=64, down_rows=128, columns=128, warps=4, stages=4)
_LAUNCH: dict[str, tuple[ExpertLaunch, ExpertLaunch, ExpertLaunch]] = {
    "any": (
        replace(_SAME, stages=3, gate_splits=2, shared_splits=3, registers=128),
        replace(_SAME, stages=3, registers=128),
        _SAME,
    ),
}
_INVARIANT = {"any": _SAME}

# What `bench/gpu_decode.py --tune` times for any number of tokens, and the compiled tests run. 32
# rows of a matrix for each warp: a lane then keeps all that it loads.
BENCHED = tuple(
    ExpertLaunch(
        gate_rows=gate, down_rows=2 * gate, columns=columns, warps=warps, stages=stages,
        gate_splits=splits, shared_splits=shared, registers=registers,
    )
    for gate, columns, warps, stages, splits, shared, registers in (
        (64, 128, 4, 4, 1, 1, 0), (64, 128, 4, 3, 1, 1, 0), (64, 128, 4, 3, 2, 1, 128),
        (64, 128, 4, 3, 2, 3, 128), (64, 128, 4, 3, 4, 3, 128), (64, 128, 4, 3, 5, 2, 128),
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
    weights_ptr, order_ptr, starts_ptr, active_ptr, part_ptr, count_ptr, T, C, F, k, limit, chunk,
    SPLITS: tl.constexpr, HALF: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
    ONE: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr, OVERLAP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = HALF // 16
    G: tl.constexpr = BK // 32
    # The shared expert's programs come first: its matrices are the largest, and wait for no router.
    slot, split = tl.program_id(2) - 1, tl.program_id(1)
    first = tl.program_id(0) * HALF
    groups = C // 32
    g_begin = split * chunk
    g_end = tl.minimum(g_begin + chunk, groups)
    # Strips of 32 rows of w1 over w3.
    i = tl.arange(0, S)
    strip = tl.minimum(first // 32 + i % (S // 2), F // 32 - 1)
    strip = tl.where(i < S // 2, strip, F // 32 + strip)
    index = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    part_ptr += index * (SPLITS * 2 * HALF)
    count_ptr += index
    if slot < 0:
        hidden_ptr += tl.cast(T * k, tl.int64) * F
        for start in range(0, T, BM):
            row = start + tl.arange(0, BM)
            acc = tiled_product(
                x_ptr, row.to(tl.int64) * C, row < T, shared_ptr, shared_s_ptr, strip,
                g_begin, g_end, groups, 0, 0, FP8, BM, S, G, EVEN, WARPS, 0, ".cg", 0, UPCAST,
            )  # fmt: skip
            # Nothing of the launch before is read, the router's; but it must have ended before
            # anything is written, and before the next launch comes up.
            wait_for_earlier(OVERLAP)
            let_next_start(OVERLAP)
            acc, is_whole = sum_of_splits(
                acc, row < T, part_ptr, count_ptr, split, BM, 2 * HALF, SPLITS, ONE
            )  # fmt: skip
            one = tl.full([BM], 1.0, tl.float32)
            if is_whole:
                _store_hidden(acc, hidden_ptr, row, row < T, one, first, F, limit, BM, HALF, UPCAST)
    else:
        wait_for_earlier(OVERLAP)
        expert = tl.load(active_ptr + slot)
        if expert >= 0:
            # One token has one row of each of its experts: nothing to wait for.
            begin = slot if ONE else tl.load(starts_ptr + expert)
            end = slot + 1 if ONE else tl.load(starts_ptr + expert + 1)
            w = w_ptr + tl.cast(expert, tl.int64) * (F // 16) * groups * 512
            s = s_ptr + tl.cast(expert, tl.int64) * (F // 16) * groups * 32
            for start in range(begin, end, BM):
                row = start + tl.arange(0, BM)
                pair = tl.load(order_ptr + row, mask=row < end, other=0)
                weight = tl.load(weights_ptr + pair, mask=row < end, other=0.0)
                token = tl.zeros([BM], tl.int32) if ONE else pair // k
                acc = tiled_product(
                    x_ptr, token.to(tl.int64) * C, row < end, w, s, strip,
                    g_begin, g_end, groups, 0, 0, FP4, BM, S, G, EVEN, WARPS, 0, "", OVERLAP,
                    UPCAST,
                )  # fmt: skip
                acc, is_whole = sum_of_splits(
                    acc, row < end, part_ptr, count_ptr, split, BM, 2 * HALF, SPLITS, ONE
                )  # fmt: skip
                if is_whole:
                    _store_hidden(
                        acc, hidden_ptr, row, row < end, weight, first, F, limit, BM, HALF, UPCAST
                    )


@triton.jit
def _down_kernel(
    hidden_ptr, w_ptr, s_ptr, shared_ptr, shared_s_ptr, out_ptr,
    order_ptr, rank_ptr, starts_ptr, active_ptr, part_ptr, count_ptr, T, C, F, k, chunk,
    SPLITS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
    ONE: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr, OVERLAP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = BN // 32
    G: tl.constexpr = BK // 32
    slot, split = tl.program_id(1) - 1, tl.program_id(2)
    place = tl.program_id(0) * BN + tl.arange(0, BN)
    strip = tl.minimum(tl.program_id(0) * S + tl.arange(0, S), C // 32 - 1)
    groups = F // 32
    index = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    part_ptr += index * (SPLITS * BN)
    count_ptr += index
    wait_for_earlier(OVERLAP)
    if slot < 0:
        hidden_ptr += tl.cast(T * k, tl.int64) * F
        begin = split * chunk
        end = tl.minimum(begin + chunk, groups)
        for start in range(0, T, BM):
            row = (start + tl.arange(0, BM)).to(tl.int64)
            acc = tiled_product(
                hidden_ptr, row * F, row < T, shared_ptr, shared_s_ptr, strip,
                begin, end, groups, 0, 0, FP8, BM, S, G, EVEN, WARPS, 0, "", OVERLAP, UPCAST,
            )  # fmt: skip
            acc, is_whole = sum_of_splits(
                acc, row < T, part_ptr, count_ptr, split, BM, BN, SPLITS, ONE
            )  # fmt: skip
            at = (row * (k + 1) + k)[:, None] * C + place[None, :]
            if is_whole:
                y = to_bf16(acc, UPCAST).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + at, y, mask=(row < T)[:, None] & (place < C)[None, :])
    elif split == 0:
        expert = tl.load(active_ptr + slot)
        if expert >= 0:
            begin = slot if ONE else tl.load(starts_ptr + expert)
            end = slot + 1 if ONE else tl.load(starts_ptr + expert + 1)
            w = w_ptr + tl.cast(expert, tl.int64) * (C // 32) * groups * 512
            s = s_ptr + tl.cast(expert, tl.int64) * (C // 32) * groups * 32
            for start in range(begin, end, BM):
                item = start + tl.arange(0, BM)
                keep = item < end
                pair = tl.load(order_ptr + item, mask=keep, other=0)
                rank = tl.load(rank_ptr + pair, mask=keep, other=0)
                acc = tiled_product(
                    hidden_ptr, item.to(tl.int64) * F, keep, w, s, strip,
                    0, groups, groups, 0, 0, FP4, BM, S, G, EVEN, WARPS, 0, "", OVERLAP, UPCAST,
                )  # fmt: skip
                at = ((pair // k).to(tl.int64) * (k + 1) + rank)[:, None] * C + place[None, :]
                y = to_bf16(acc, UPCAST).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + at, y, mask=keep[:, None] & (place < C)[None, :])


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
        codes, by_row = unpack_fp4_tiles(packed[expert], scales[expert])
        return dequantize_weight(codes.view(torch.int8), by_row)

    def shared(packed, scales):
        return dequantize_weight(unpack_fp8_tiles(packed), scales)

    ranks = routing.rank.view(tokens, k)
    for expert in sorted(set(routing.ids[routing.ids >= 0].tolist())):
        token, choice = (routing.ids == expert).nonzero(as_tuple=True)
        gate_up = matrix(w.gate_up, w.gate_up_scales, expert)
        down = matrix(w.down, w.down_scales, expert)
        weight = routing.weights[token, choice, None]
        out[token, ranks[token, choice].long()] = one(x[token], gate_up, down, weight)
    gate_up = shared(w.shared_gate_up, w.shared_gate_up_scales)
    out[:, k] = one(x, gate_up, shared(w.shared_down, w.shared_down_scales), None)
    return out


def experts_unsupported(x: Tensor, w: ExpertWeights) -> str | None:
    """Return why `experts_w4` cannot take these inputs, or None."""
    channels, width = x.shape[-1], w.down.shape[-2] * GROUP
    if channels % GROUP:
        return f"hidden_size: {channels}, expected a multiple of {GROUP}"
    if w.gate_up.shape[1:] != (2 * width // GROUP, channels // GROUP, 512):
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
    scratch: tuple[Tensor, Tensor] | None = None,
    overlaps: tuple[int, int] = (Overlap.NONE, Overlap.NONE),
) -> Tensor:
    """Same contract as `experts_w4_ref`; products are exact in bf16, sums are fp32.

    scratch   (parts fp32, zeroed counters int32) for launches with splits; None: made here
    overlaps  an `Overlap` for each of the two launches; with one for the first, the launch before
              must not write `x`, which the shared expert reads before the wait

    Rows of ids that are -1 are not written: nothing may read them.
    """
    reason = experts_unsupported(x, w)
    if reason is not None:
        raise ExpertsUnsupportedError(f"experts_w4: {reason}")
    (tokens, channels), k = x.shape, routing.ids.shape[-1]
    width = w.down.shape[-2] * GROUP
    out = x.new_empty(tokens, k + 1, channels)
    if not tokens:
        return out
    launch = expert_launch(tokens, x.device) if launch is None else launch
    hidden = x.new_empty(tokens * (k + 1), width)
    columns = launch.columns
    # Width, rows of a program and splits of each product.
    shapes = (
        (channels, width, launch.gate_rows, launch.gate_splits),
        (width, channels, launch.down_rows, launch.shared_splits),
    )
    if tokens > 1:
        shapes = tuple((*shape[:3], 1) for shape in shapes)
    tiles, slots = [triton.cdiv(rows, tile) for _, rows, tile, _ in shapes], len(routing.active) + 1
    parts = (hidden, routing.active)  # nobody reads those
    if max(launch.gate_splits, launch.shared_splits) > 1 and tokens == 1:
        room = _room(max(tiles) * slots, launch)
        parts = scratch or (torch.empty(room[0], device=x.device), counters(x.device, room[1]))
        check_scratch(parts, *room)
    constants = {
        "BK": columns,
        "BM": 16,
        "ONE": tokens == 1,
        "WARPS": launch.warps,
        "UPCAST": is_interpreted(_gate_up_kernel),
        "num_warps": launch.warps,
        "num_stages": launch.stages,
        **({"maxnreg": launch.registers} if launch.registers else {}),
    }
    chunks, even = zip(
        *(_steps(inner, columns, splits) for inner, _, _, splits in shapes), strict=True
    )
    splits = [shape[-1] for shape in shapes]
    _gate_up_kernel[tiles[0], splits[0], slots](
        x, w.gate_up, w.gate_up_scales, w.shared_gate_up, w.shared_gate_up_scales, hidden,
        routing.weights, routing.order, routing.starts, routing.active, *parts,
        tokens, channels, width, k, limit, chunks[0],
        SPLITS=splits[0], HALF=launch.gate_rows, EVEN=even[0], **constants,
        **overlap_options(overlaps[0], x.device),
    )  # fmt: skip
    # Splits last: all but the shared expert's are empty behind the first.
    _down_kernel[tiles[1], slots, splits[1]](
        hidden, w.down, w.down_scales, w.shared_down, w.shared_down_scales, out,
        routing.order, routing.rank, routing.starts, routing.active, *parts,
        tokens, channels, width, k, chunks[1],
        SPLITS=splits[1], BN=launch.down_rows, EVEN=even[1], **constants,
        **overlap_options(overlaps[1], x.device),
    )  # fmt: skip
    return out


def _steps(width: int, columns: int, splits: int) -> tuple[int, bool]:
    """Return the groups of 32 columns of a split, and whether all its steps are whole words."""
    steps = -(-width // columns)
    return -(-steps // splits) * (columns // GROUP), width % columns == 0 and width % 128 == 0


def _room(tiles: int, launch: ExpertLaunch) -> tuple[int, int]:
    """Return the numbers and the counters that split sums of one token need."""
    rows = max(2 * launch.gate_rows * launch.gate_splits, launch.down_rows * launch.shared_splits)
    return tiles * rows, tiles
