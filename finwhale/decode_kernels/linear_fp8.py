"""Products with an FP8 or BF16 matrix of few rows: y = x W^T, the matrix read once per 64 rows.

The release rounds the input of every FP8 matrix to FP8 in groups of 32; here that is the business
of whoever makes the input, once, and not of each product: `round_output` rounds what this product
hands to the next one. K may be split over programs; the last of them to arrive adds the parts in
order, so a launch is deterministic and there is no second one. A row's result does not depend on
its neighbours within one launch form; the forms (one row; tiles of several sizes) sum in another
order, unless the launch is the invariant one.
The easy mistake: `groups`, the block-diagonal product of `wo_a`, where output rows read different
slices of x. Source: spec/backbone.md sections 4.6 and 9.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    BF16,
    FP8,
    GROUP,
    check_scratch,
    counters,
    round_groups,
    row_ahead,
    row_product,
    sum_of_splits,
    tile_product,
    tiled_product,
    tiles_ahead,
    to_bf16,
    unpack_fp8_tiles,
)
from finwhale.ops.linear import grouped_linear
from finwhale.ops.rope import apply_rope
from finwhale.ops.rounding import round_fp8
from finwhale.ops.weight_formats import dequantize_weight


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLaunch:
    """How one product is launched.

    rows, columns   BN output rows by BK columns of the matrix per step; rows a multiple of 32 where
                    outputs are rounded
    programs        aimed at; K is split until there are about so many
    least           steps of a split at least
    wide            rows instead, where the matrix has `programs` tiles of so many or more; 0: never
    block           rows of x per program; 0: by their number. Fixed, a row's sums have one order
    ahead           groups of 32 columns read before the wait for an earlier launch, whole steps of
                    128 columns or more (others: none); of a BF16 matrix and one row of x, the first
                    step whatever the number
    """

    rows: int
    columns: int
    programs: int
    warps: int
    stages: int
    least: int = 2
    wide: int = 0
    block: int = 0
    ahead: int = 0


# (one row, up to 16 rows, more) by device family, of FP8 matrices in tiles.
_TILED = LinearLaunch(rows=64, columns=128, programs=528, warps=4, stages=4)
_LAUNCH: dict[str, tuple[LinearLaunch, LinearLaunch, LinearLaunch]] = {
    "any": (
        replace(_TILED, programs=924, stages=3, least=5, ahead=4),
        _TILED,
        replace(_TILED, programs=256, least=10, wide=128),
    ),
}
# Of BF16 matrices.
_BF16: dict[str, tuple[LinearLaunch, LinearLaunch, LinearLaunch]] = {
    "any": (
        LinearLaunch(rows=16, columns=256, programs=1056, warps=4, stages=2, ahead=8),
        LinearLaunch(rows=64, columns=128, programs=396, warps=4, stages=4),
        LinearLaunch(rows=128, columns=128, programs=264, warps=8, stages=3),
    ),
}
# Serves every number of rows alike.
_INVARIANT = {"any": replace(_TILED, block=16)}
_INVARIANT_BF16 = {
    "any": LinearLaunch(rows=64, columns=128, programs=396, warps=4, stages=4, block=16),
}

# What `bench/gpu_decode.py --tune` times, one launch after the other: what reading ahead wins where
# launches overlap does not show there. Each serves every FP8 product of a layer, also the one
# that rounds its outputs. 16 or 32 rows for each warp.
BENCHED = (
    *_LAUNCH["any"],
    replace(_TILED, programs=396),
    replace(_TILED, programs=264, stages=3),
    replace(_TILED, stages=3, ahead=4),
    replace(_TILED, programs=264, stages=3, ahead=4),
    replace(_TILED, columns=256, stages=2),
    replace(_TILED, rows=128, programs=396, stages=3, ahead=4),
)


class LinearUnsupportedError(ValueError):
    """These inputs cannot run in the kernel; the message names the field and its value."""


@triton.jit
def _linear_kernel(
    x_ptr, w_ptr, s_ptr, turn_ptr, out_ptr, part_ptr, count_ptr,
    T, ROWS, K, x_row, group_rows, chunk,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, ROUND: tl.constexpr,
    HEAD: tl.constexpr, R2: tl.constexpr, IS_ROW: tl.constexpr, WARPS: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = tile * BN + tl.arange(0, BN)
    n = tl.minimum(place, ROWS - 1)
    # All rows of a tile lie in one group: the host picks BN so.
    x_group = x_ptr + tl.cast(tile * BN // group_rows, tl.int64) * K
    begin = split * chunk
    end = tl.minimum(begin + chunk, K)
    row = block * BM + tl.arange(0, BM)
    if KIND == FP8:
        S: tl.constexpr = BN // 32
        G: tl.constexpr = BK // 32
        strip = tl.minimum(tile * S + tl.arange(0, S), (ROWS + 31) // 32 - 1)
        packed, words = tiles_ahead(w_ptr, s_ptr, strip, begin // 32, K // 32, AHEAD, WARPS)
    elif IS_ROW:
        first = row_ahead(w_ptr, n, begin, K, BK) if AHEAD > 0 else 0
    wait_for_earlier(OVERLAP)
    if KIND == FP8:
        acc = tiled_product(
            x_group, row.to(tl.int64) * x_row, row < T, w_ptr, s_ptr, strip, begin // 32, end // 32,
            K // 32, packed, words, FP8, BM, S, G, EVEN, WARPS, AHEAD, "", OVERLAP, UPCAST,
        )  # fmt: skip
    elif IS_ROW:
        acc = row_product(x_group, w_ptr, n, begin, end, K, first, BN, BK, EVEN, AHEAD > 0)
        let_next_start(OVERLAP)
        acc = acc[None, :]
    else:
        acc = tile_product(
            x_group, row.to(tl.int64) * x_row, row < T, w_ptr, n, begin, end, K,
            BM, BN, BK, EVEN, UPCAST,
        )  # fmt: skip
        let_next_start(OVERLAP)
    index = block * tl.num_programs(0) + tile
    part_ptr += tl.cast(index, tl.int64) * (SPLITS * BM * BN)
    acc, is_last = sum_of_splits(
        acc, row < T, part_ptr, count_ptr + index, split, BM, BN, SPLITS, ONE
    )  # fmt: skip
    if is_last:
        if R2 > 0:
            # RoPE: neighbouring outputs are a pair; only the last 2 * R2 channels of a head turn.
            even, odd = tl.split(tl.reshape(to_bf16(acc, UPCAST), (BM, BN // 2, 2)))
            channel = (tile * BN + 2 * tl.arange(0, BN // 2)) % HEAD - (HEAD - 2 * R2)
            turning = (channel >= 0)[None, :] & (row < T)[:, None]
            angle = turn_ptr + row[:, None] * R2 + (channel // 2)[None, :]
            cos = tl.load(angle, mask=turning, other=1.0)
            sin = tl.load(angle + T * R2, mask=turning, other=0.0)
            turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
            acc = tl.reshape(turned, (BM, BN))
        if ROUND:
            acc = tl.reshape(to_bf16(acc, UPCAST), (BM, BN // 32, 32))
            acc = tl.reshape(round_groups(acc), (BM, BN))
        if out_ptr.dtype.element_ty == tl.bfloat16:
            acc = to_bf16(acc, UPCAST)
        at = row.to(tl.int64)[:, None] * ROWS + place[None, :]
        keep = (row < T)[:, None] & (place < ROWS)[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=keep)


def linear_fp8_ref(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    *,
    groups: int = 1,
    round_output: bool = False,
    turn: Tensor | None = None,
    head_dim: int = 0,
    outputs: int | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return x W^T, summed in fp32 and rounded once.

    x         [T, groups * K] bf16, already rounded to FP8 groups where the release does so
    weight    [ceil(O/32), K/32, 1024] uint8, tiles of `pack_fp8_tiles`, or [O, K] bf16 with
              `scales` None
    scales    [ceil(O/32), K/32] uint8
    outputs   O; None: a multiple of 32, or the rows of a bf16 matrix
    groups    output rows g * O/groups ... read columns g * K ... of x
    turn      [2, T, R/2] fp32: RoPE of heads of `head_dim` outputs (section 4.7); None: none
    returns   [T, O]; with round_output through FP8 in groups of 32 and back

    Section 9.1; section 4.6, step 2 for groups.
    """
    w = weight.float()
    if scales is not None:
        w = dequantize_weight(unpack_fp8_tiles(weight), scales)[:outputs]
    y = grouped_linear(x.float().unflatten(-1, (groups, -1)), w).to(torch.float32)
    if turn is not None:
        heads = y.to(torch.bfloat16).unflatten(-1, (-1, head_dim))
        y = apply_rope(heads, turn).flatten(-2)
    y = y.to(torch.bfloat16) if round_output else y.to(out_dtype)
    return round_fp8(y).to(out_dtype) if round_output else y


def linear_unsupported(
    x: Tensor, weight: Tensor, outputs: int, width: int, groups: int, round_output: bool
) -> str | None:
    """Return why `linear_fp8` cannot take these inputs, or None."""
    if weight.dim() == 3 and not 0 <= len(weight) * GROUP - outputs < GROUP:
        return f"outputs: {outputs} of a matrix with {len(weight)} strips of {GROUP} rows"
    if width % GROUP:
        return f"weight: {width} columns, expected a multiple of {GROUP}"
    if x.dim() != 2 or x.shape[1] != groups * width:
        return f"x: shape {tuple(x.shape)}, expected [T, {groups * width}]"
    if outputs % groups or (groups > 1 and (outputs // groups) % GROUP):
        return f"weight: {outputs} rows in {groups} groups, expected multiples of {GROUP}"
    if round_output and outputs % GROUP:
        return f"round_output: {outputs} outputs, expected a multiple of {GROUP}"
    if not x.is_contiguous() or not weight.is_contiguous():
        return "x or weight is not contiguous"
    return None


def linear_launch(
    rows: int, device: torch.device, invariant: bool = False, is_fp8: bool = True
) -> LinearLaunch:
    """Return the parameters for `rows` rows on a device.

    invariant  those that give a row the same bits whatever its neighbours and their number
    """
    if invariant:
        return launch_for(_INVARIANT if is_fp8 else _INVARIANT_BF16, device)
    one, few, many = launch_for(_LAUNCH if is_fp8 else _BF16, device)
    return one if rows == 1 else few if rows <= 16 else many


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    *,
    groups: int = 1,
    round_output: bool = False,
    turn: Tensor | None = None,
    head_dim: int = 0,
    outputs: int | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    launch: LinearLaunch | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
    overlap: int = Overlap.NONE,
) -> Tensor:
    """Same contract as `linear_fp8_ref`; products are exact in bf16, sums are fp32.

    launch   None: by the table
    scratch  (parts fp32, zeroed counters int32), kept by the caller; None: made here
    overlap  an `Overlap`; with `ahead`, the launch before must not write `weight` or `scales`
    """
    is_fp8 = scales is not None
    width = weight.shape[1] * (GROUP if is_fp8 else 1)
    outputs = outputs or len(weight) * (GROUP if is_fp8 else 1)
    reason = linear_unsupported(x, weight, outputs, width, groups, round_output)
    if reason is None and turn is not None and (head_dim < 1 or outputs % head_dim):
        reason = f"head_dim: {head_dim}, expected a divisor of {outputs} outputs"
    if reason is None and scales is not None and scales.data_ptr() % 4:
        reason = "scales: read as words, so their address must be a multiple of 4"
    if reason is not None:
        raise LinearUnsupportedError(f"linear_fp8: {reason}")
    tokens = len(x)
    out = torch.empty(tokens, outputs, dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    if launch is None:
        launch = linear_launch(tokens, x.device, is_fp8=is_fp8)
    is_interpreted_here = is_interpreted(_linear_kernel)
    bm = launch.block or _row_block(tokens, is_fp8)
    bn, splits, chunk = _shape(launch, outputs, width, groups)
    if is_fp8 and bn % GROUP:
        raise LinearUnsupportedError(
            f"linear_fp8: launch: tiles of {bn} rows, expected a multiple of {GROUP} for FP8"
        )
    if round_output and bn % GROUP:
        raise LinearUnsupportedError(
            f"linear_fp8: launch: tiles of {bn} rows, expected a multiple of {GROUP} where outputs"
            " are rounded"
        )
    grid = (-(-outputs // bn), splits, -(-tokens // bm))
    tiles = grid[0] * grid[2] if splits > 1 else 0
    if scratch is None:
        scratch = (
            torch.empty(tiles * splits * bm * bn, device=x.device),
            counters(x.device, tiles),
        )
    check_scratch(scratch, tiles * splits * bm * bn, tiles)
    even = width == splits * chunk and chunk % launch.columns == 0 and width % 128 == 0
    # Whole steps, and scales that are read as words.
    is_ahead = even and (
        launch.columns % 128 == 0
        and launch.ahead * GROUP % launch.columns == 0
        and launch.ahead * GROUP <= chunk
        if is_fp8
        else bm == 1
    )
    _linear_kernel[grid](
        x, weight, weight if scales is None else scales, x if turn is None else turn, out, *scratch,
        tokens, outputs, width, x.shape[1], outputs // groups, chunk,
        KIND=BF16 if scales is None else FP8, BM=bm, BN=bn, BK=launch.columns, SPLITS=splits,
        EVEN=even, AHEAD=launch.ahead if is_ahead else 0,
        ROUND=round_output, ONE=tokens == 1, IS_ROW=bm == 1,
        HEAD=head_dim, R2=0 if turn is None else turn.shape[-1],
        WARPS=launch.warps, UPCAST=is_interpreted_here,
        num_warps=launch.warps, num_stages=launch.stages,
        **overlap_options(overlap, x.device),
    )  # fmt: skip
    return out


def _row_block(tokens: int, is_fp8: bool) -> int:
    """Return the rows of x in a program: a power of two, and 16 at least for a matrix unit."""
    return 1 if tokens == 1 and not is_fp8 else min(64, max(16, 1 << (tokens - 1).bit_length()))


def _shape(launch: LinearLaunch, outputs: int, width: int, groups: int) -> tuple[int, int, int]:
    """Return rows of a tile, splits of K and columns of a split."""
    rows = launch.wide if 0 < launch.wide * launch.programs <= outputs else launch.rows
    while groups > 1 and (outputs // groups) % rows:
        rows //= 2
    tiles, steps = -(-outputs // rows), -(-width // launch.columns)
    # A count that divides the steps leaves no short split.
    wanted = max(1, min(launch.programs // tiles, steps // launch.least))
    splits = max(s for s in range(1, wanted + 1) if steps % s == 0)
    return rows, splits, steps // splits * launch.columns
