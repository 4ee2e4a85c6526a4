"""One hyper-connection site of a decode step in one launch, from expert outputs to normed input.

A program owns a slice of the channels of a token: it adds what the sub-layer before returned,
expands with that site's coefficients, writes the streams back, collapses with the mix that comes
in, and multiplies its part of the projection, in fp32. The last program of a token adds the parts
in order, makes the coefficients (Sinkhorn in registers) and the RMS norm of the collapsed row,
plain and rounded to FP8 groups. All of it is a chain of latencies: what counts is how often a load
waits for another. It serves four streams, as released. The easy mistake: three mixes
meet here: `post` and `comb` of the site before, `pre` of the site before that one's sub-layer (it
collapses), and the ones made here, which only later sites use. Source: spec/backbone.md section 6.
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
    GROUP,
    counters,
    last_to_arrive,
    round_groups,
    to_bf16,
)
from finwhale.ops.hyper_connection import HyperMix, hyper_collapse, hyper_expand, hyper_mix
from finwhale.ops.norm import rms_norm
from finwhale.ops.rounding import round_fp8

STREAMS = 4
_ROWS = 24  # coefficients of a site: 4 pre, 4 post, 16 comb
_PADDED = tl.constexpr(32)  # of a row of parts: 24 products, the two sums of squares
_END_CHANNELS = 4096  # of a program that norms a piece of a row


class Site(NamedTuple):
    """Parameters of a site.

    fn    [24, 4 * C] fp32; base [24] fp32; scale [3] fp32
    norm  [C] bf16, the weight of the sub-layer's norm
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor


class SiteOutput(NamedTuple):
    """What a site hands on: the sub-layer's input, plain and rounded, and its coefficients."""

    x: Tensor
    x_rounded: Tensor
    mix: HyperMix


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteLaunch:
    """Channels of a slice, and warps.

    apart  two launches: the projection of 16 tokens at once on the matrix unit, then what needs
           whole rows, the coefficients of a token beside pieces of its norm
    """

    channels: int
    warps: int
    apart: bool = False


# (one token, up to 16, more) by device family.
_LAUNCH: dict[str, tuple[SiteLaunch, SiteLaunch, SiteLaunch]] = {
    "any": (
        SiteLaunch(channels=64, warps=4),
        SiteLaunch(channels=64, warps=4),
        SiteLaunch(channels=32, warps=4, apart=True),
    ),
    "hopper": (
        SiteLaunch(channels=64, warps=4),
        SiteLaunch(channels=32, warps=4, apart=True),
        SiteLaunch(channels=32, warps=4, apart=True),
    ),
}
_INVARIANT = {"any": SiteLaunch(channels=64, warps=4)}

# What `bench/gpu_decode.py --tune` times, and the compiled tests run.
BENCHED = tuple(
    SiteLaunch(channels=channels, warps=warps, apart=apart)
    for channels, warps, apart in (
        (32, 4, True), (32, 8, True), (64, 4, True), (64, 8, True),
        (32, 4, False), (32, 8, False), (64, 4, False), (64, 8, False),
    )
)  # fmt: skip


class SiteUnsupportedError(ValueError):
    """These inputs cannot run in the kernel; the message names the field and its value."""


def hyper_site_ref(
    streams: Tensor,
    parts: Tensor | None,
    before: HyperMix | None,
    incoming: Tensor,
    site: Site,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> SiteOutput:
    """Update the streams in place and return the input of the sub-layer behind them.

    y = bf16(sum_p parts_p);  X <- expand(y, X, before);  mix = hyper_mix(X)
    x = rms_norm(collapse(X, incoming))

    streams   [T, 4, C] bf16, written
    parts     [T, P, C] bf16 outputs of the sub-layer before, added in order; None: X stays
    before    coefficients of the site of that sub-layer; None with parts
    incoming  [T, 4] fp32, pre of the site before; one-hot at the first

    Section 6.
    """
    if parts is not None:
        y = torch.zeros_like(parts[:, 0], dtype=torch.float32)
        for part in parts.float().unbind(1):
            y = y + part
        y = y.to(streams.dtype)
        streams.copy_(hyper_expand(y, streams, before.post, before.comb))
    mix = hyper_mix(
        streams, site.fn, site.base, site.scale, iterations=iterations, norm_eps=norm_eps, eps=eps
    )
    x = rms_norm(hyper_collapse(streams, incoming), site.norm, norm_eps)
    return SiteOutput(x, round_fp8(x), mix)


@triton.jit
def _reciprocal(x, UPCAST: tl.constexpr):
    """Return 1 / x of a normal x, to one unit of the last place.

    The compiler's own quotient promises two, and asks each time whether x is near the ends of the
    range. Of sums of positive numbers near one it need not, forty times in a row.
    """
    if UPCAST:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _coefficients(
    total, base, scale, token, C, pre_ptr, post_ptr, comb_ptr, iterations, norm_eps, eps,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Store pre, post and the balanced comb of a token, from its sums; all three are [32]."""
    row = tl.arange(0, _PADDED)
    square = tl.sum(tl.where(row == 24, total, 0.0), axis=0)
    inverse = tl.rsqrt(square / tl.cast(4 * C, tl.float32) + norm_eps)
    rows = tl.reshape(scale * (total * inverse) + base, (8, 4))  # pre, post, the matrix
    gate = 1.0 / (1.0 + tl.exp(-rows))
    _store_four(pre_ptr + token * 4, *_numbers(gate + eps, 0))
    _store_four(post_ptr + token * 4, *_numbers(2.0 * gate, 1))
    comb = tl.exp(rows - tl.max(rows, axis=1)[:, None])
    comb = comb * _reciprocal(tl.sum(comb, axis=1), UPCAST)[:, None] + eps
    # Sixteen numbers, the same in every thread: a round is four sums and four quotients by rows,
    # then by columns. What the rows are divided by is found at the end of the round before.
    a0, a1, a2, a3 = _numbers(comb, 2)
    b0, b1, b2, b3 = _numbers(comb, 3)
    c0, c1, c2, c3 = _numbers(comb, 4)
    d0, d1, d2, d3 = _numbers(comb, 5)
    of_a = tl.full((), 1.0, tl.float32)
    of_b, of_c, of_d = of_a, of_a, of_a
    for _ in range(iterations):
        a0, a1, a2, a3 = a0 * of_a, a1 * of_a, a2 * of_a, a3 * of_a
        b0, b1, b2, b3 = b0 * of_b, b1 * of_b, b2 * of_b, b3 * of_b
        c0, c1, c2, c3 = c0 * of_c, c1 * of_c, c2 * of_c, c3 * of_c
        d0, d1, d2, d3 = d0 * of_d, d1 * of_d, d2 * of_d, d3 * of_d
        of_0 = _inverse_sum(a0, b0, c0, d0, eps, UPCAST)
        of_1 = _inverse_sum(a1, b1, c1, d1, eps, UPCAST)
        of_2 = _inverse_sum(a2, b2, c2, d2, eps, UPCAST)
        of_3 = _inverse_sum(a3, b3, c3, d3, eps, UPCAST)
        a0, a1, a2, a3 = a0 * of_0, a1 * of_1, a2 * of_2, a3 * of_3
        b0, b1, b2, b3 = b0 * of_0, b1 * of_1, b2 * of_2, b3 * of_3
        c0, c1, c2, c3 = c0 * of_0, c1 * of_1, c2 * of_2, c3 * of_3
        d0, d1, d2, d3 = d0 * of_0, d1 * of_1, d2 * of_2, d3 * of_3
        of_a = _inverse_sum(a0, a1, a2, a3, eps, UPCAST)
        of_b = _inverse_sum(b0, b1, b2, b3, eps, UPCAST)
        of_c = _inverse_sum(c0, c1, c2, c3, eps, UPCAST)
        of_d = _inverse_sum(d0, d1, d2, d3, eps, UPCAST)
    comb_ptr += token * 16
    _store_four(comb_ptr, a0, a1, a2, a3)
    _store_four(comb_ptr + 4, b0, b1, b2, b3)
    _store_four(comb_ptr + 8, c0, c1, c2, c3)
    _store_four(comb_ptr + 12, d0, d1, d2, d3)


@triton.jit
def _numbers(rows, place: tl.constexpr):
    """Return one of eight rows of four as four scalars."""
    is_row = tl.arange(0, 8)[:, None] == place
    even, odd = tl.split(tl.reshape(tl.sum(tl.where(is_row, rows, 0.0), axis=0), (2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def _inverse_sum(x0, x1, x2, x3, eps, UPCAST: tl.constexpr):
    # Quotients come one after the other out of the unit that inverts, and are added as they come.
    return _reciprocal(((eps + x0) + x1 + x2) + x3, UPCAST)


@triton.jit
def _store_four(at, v0, v1, v2, v3):
    tl.store(at, v0)
    tl.store(at + 1, v1)
    tl.store(at + 2, v2)
    tl.store(at + 3, v3)


@triton.jit
def _rounded(x, UPCAST: tl.constexpr):
    """As `to_bf16`, with one instruction for two neighbours, where that takes one for each.

    Called impure, so that the compiler makes no second copy in the layout that the matrix unit
    wants: it would bring each input there by itself, 57 barriers instead of 11.
    """
    if UPCAST:
        y = to_bf16(x, UPCAST)
    else:
        y = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t;
            cvt.rn.bf16x2.f32 t, $3, $2;
            shl.b32 $0, t, 16;
            and.b32 $1, t, 0xFFFF0000;
            }
            """,
            "=&r,=r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=False,
            pack=2,
        )
    return y


@triton.jit
def _store_normed(z, weight, r, x_ptr, rounded_ptr, c, C, CP: tl.constexpr, UPCAST: tl.constexpr):
    """Store CP channels of a normalised row and of its FP8-rounded twin."""
    x = _rounded(weight.to(tl.float32) * (z.to(tl.float32) * r), UPCAST)
    tl.store(x_ptr + c, x.to(x_ptr.dtype.element_ty), mask=c < C)
    y = tl.reshape(round_groups(tl.reshape(x, (1, CP // 32, 32))), (CP,))
    tl.store(rounded_ptr + c, y.to(rounded_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def _total(sums_ptr, token, pieces, SP: tl.constexpr):
    """Return the sums [32] of a token over all slices."""
    s, row = tl.arange(0, SP)[:, None], tl.arange(0, _PADDED)[None, :]
    at = sums_ptr + token * pieces * _PADDED + (s * _PADDED + row)
    # No load crosses a barrier: what was loaded before is under way when the sums are waited for.
    tl.debug_barrier()
    return tl.sum(tl.load(at, mask=s < pieces, other=0.0, cache_modifier=".cg"), axis=0)


@triton.jit
def _row_constants(base_ptr, scale_ptr):
    """Return base and scale of each of the 24 rows, [32] each."""
    row = tl.arange(0, _PADDED)
    base = tl.load(base_ptr + row, mask=row < 24, other=0.0)
    return base, tl.load(scale_ptr + tl.minimum(row // 4, 2))


@triton.jit
def _sum_of_parts(at, C, keep, PARTS: tl.constexpr, UPCAST: tl.constexpr):
    """Return what the sub-layer returned, bf16(sum_p parts_p), as fp32.

    Unrolled, so that all loads are under way before the first is waited for.
    """
    y = tl.load(at, mask=keep).to(tl.float32)
    for p in tl.static_range(1, PARTS):
        y += tl.load(at + p * C, mask=keep).to(tl.float32)
    return _rounded(y, UPCAST)


@triton.jit
def _expanded(
    s0, s1, s2, s3, y0, y1, y2, y3, comb_ptr, token, inside, UPCAST: tl.constexpr
):  # fmt: skip
    """Return the streams s [R, CS], mixed, each plus its y; token and inside are [R] or [1]."""
    a0, a1, a2, a3 = _row_of_four(comb_ptr + token * 16, inside)
    b0, b1, b2, b3 = _row_of_four(comb_ptr + token * 16 + 4, inside)
    c0, c1, c2, c3 = _row_of_four(comb_ptr + token * 16 + 8, inside)
    d0, d1, d2, d3 = _row_of_four(comb_ptr + token * 16 + 12, inside)
    # In the order of the reference.
    u0 = _rounded(y0 + ((a0 * s0 + b0 * s1) + (c0 * s2 + d0 * s3)), UPCAST)
    u1 = _rounded(y1 + ((a1 * s0 + b1 * s1) + (c1 * s2 + d1 * s3)), UPCAST)
    u2 = _rounded(y2 + ((a2 * s0 + b2 * s1) + (c2 * s2 + d2 * s3)), UPCAST)
    u3 = _rounded(y3 + ((a3 * s0 + b3 * s1) + (c3 * s2 + d3 * s3)), UPCAST)
    return u0, u1, u2, u3


@triton.jit
def _row_of_four(at, inside):
    """Return four neighbours at each of the pointers [R], as columns [R, 1]."""
    v0 = tl.load(at, mask=inside, other=0.0)[:, None]
    v1 = tl.load(at + 1, mask=inside, other=0.0)[:, None]
    v2 = tl.load(at + 2, mask=inside, other=0.0)[:, None]
    v3 = tl.load(at + 3, mask=inside, other=0.0)[:, None]
    return v0, v1, v2, v3


@triton.jit
def _bf16_parts(x, UPCAST: tl.constexpr):
    """Return three bf16 numbers whose sum is an fp32 number; exact above 2^-110."""
    high = _rounded(x, UPCAST)
    rest = x - high
    middle = _rounded(rest, UPCAST)
    return high, middle, rest - middle


@triton.jit
def _dot_parts(x, w, acc, UPCAST: tl.constexpr):
    """Return acc + x @ w^T: x [TB, K] holds bf16 values, w [R, K] is fp32; products are exact."""
    high, middle, low = _bf16_parts(w, UPCAST)
    if UPCAST:
        acc += tl.dot(x, tl.trans(low), input_precision="ieee")
        acc += tl.dot(x, tl.trans(middle), input_precision="ieee")
        acc += tl.dot(x, tl.trans(high), input_precision="ieee")
    else:
        x = x.to(tl.bfloat16)
        acc = tl.dot(x, tl.trans(low.to(tl.bfloat16)), acc)
        acc = tl.dot(x, tl.trans(middle.to(tl.bfloat16)), acc)
        acc = tl.dot(x, tl.trans(high.to(tl.bfloat16)), acc)
    return acc


@triton.jit
def _streams_kernel(
    streams_ptr, parts_ptr, post_ptr, comb_ptr, incoming_ptr, fn_ptr, z_ptr, sums_ptr, T, C,
    CS: tl.constexpr, TB: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The first launch of `apart`: TB tokens, CS channels of all streams."""
    piece, block = tl.program_id(0), tl.program_id(1)
    own = piece * CS + tl.arange(0, CS)
    row = tl.arange(0, _PADDED)
    flat = tl.arange(0, 4 * CS)
    at_fn = row[:, None] * (4 * C) + (flat // CS * C + piece * CS + flat % CS)[None, :]
    fn = tl.load(fn_ptr + at_fn, mask=(row < 24)[:, None], other=0.0)
    t = block * TB + tl.arange(0, TB)
    inside = t < T
    token = t.to(tl.int64)
    wait_for_earlier(OVERLAP)
    keep = tl.broadcast_to(inside[:, None], (TB, CS))
    i0, i1, i2, i3 = _row_of_four(incoming_ptr + token * 4, inside)
    if PARTS:
        p0, p1, p2, p3 = _row_of_four(post_ptr + token * 4, inside)
        at_parts = parts_ptr + token[:, None] * (PARTS * C) + own[None, :]
        y = _sum_of_parts(at_parts, C, keep, PARTS, UPCAST)
    tl.debug_barrier()  # as in `_total`
    at = token[:, None] * (4 * C) + own[None, :]
    s0 = tl.load(streams_ptr + at, mask=keep, other=0.0).to(tl.float32)
    s1 = tl.load(streams_ptr + at + C, mask=keep, other=0.0).to(tl.float32)
    s2 = tl.load(streams_ptr + at + 2 * C, mask=keep, other=0.0).to(tl.float32)
    s3 = tl.load(streams_ptr + at + 3 * C, mask=keep, other=0.0).to(tl.float32)
    if PARTS:
        s0, s1, s2, s3 = _expanded(
            s0, s1, s2, s3, p0 * y, p1 * y, p2 * y, p3 * y, comb_ptr, token, inside, UPCAST
        )  # fmt: skip
        kind = streams_ptr.dtype.element_ty
        tl.store(streams_ptr + at, s0.to(kind), mask=keep)
        tl.store(streams_ptr + at + C, s1.to(kind), mask=keep)
        tl.store(streams_ptr + at + 2 * C, s2.to(kind), mask=keep)
        tl.store(streams_ptr + at + 3 * C, s3.to(kind), mask=keep)
    z = _rounded(((i0 * s0 + i1 * s1) + i2 * s2) + i3 * s3, UPCAST)
    tl.store(z_ptr + token[:, None] * C + own[None, :], z.to(z_ptr.dtype.element_ty), mask=keep)
    at_sums = sums_ptr + (token * tl.num_programs(0) + piece) * _PADDED
    squares = (s0 * s0 + s1 * s1) + (s2 * s2 + s3 * s3)
    both = tl.join(tl.sum(squares, axis=1), tl.sum(z * z, axis=1))
    place = 24 + tl.arange(0, 2)[None, :]
    tl.store(at_sums[:, None] + place, both, mask=inside[:, None])
    u = tl.join(tl.join(s0, s2), tl.join(s1, s3))  # [TB, CS, high bit, low bit of the stream]
    u = tl.reshape(tl.permute(u, (0, 2, 3, 1)), (TB, 4 * CS))
    let_next_start(OVERLAP)
    acc = _dot_parts(u, fn, tl.zeros([TB, _PADDED], tl.float32), UPCAST)
    tl.store(at_sums[:, None] + row[None, :], acc, mask=inside[:, None] & (row < 24)[None, :])


@triton.jit
def _site_end_kernel(
    base_ptr, scale_ptr, norm_ptr, x_ptr, rounded_ptr, new_pre_ptr, new_post_ptr, new_comb_ptr,
    z_ptr, sums_ptr, C, pieces, iterations, norm_eps, eps,
    SP: tl.constexpr, CP: tl.constexpr, OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The second launch of `apart`: a token's coefficients, or CP channels of its normed row."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 0:
        base, scale = _row_constants(base_ptr, scale_ptr)
        wait_for_earlier(OVERLAP)
        _coefficients(
            _total(sums_ptr, token, pieces, SP), base, scale, token, C,
            new_pre_ptr, new_post_ptr, new_comb_ptr, iterations, norm_eps, eps, UPCAST,
        )  # fmt: skip
    else:
        c = (part - 1) * CP + tl.arange(0, CP)
        weight = tl.load(norm_ptr + c, mask=c < C, other=0.0)
        wait_for_earlier(OVERLAP)
        s = tl.arange(0, SP)
        at = sums_ptr + token * pieces * _PADDED + (s * _PADDED + 25)
        z = tl.load(z_ptr + token * C + c, mask=c < C, other=0.0)
        tl.debug_barrier()  # as in `_total`
        square = tl.sum(tl.load(at, mask=s < pieces, other=0.0), axis=0)
        r = tl.rsqrt(square / tl.cast(C, tl.float32) + norm_eps)
        _store_normed(z, weight, r, x_ptr + token * C, rounded_ptr + token * C, c, C, CP, UPCAST)


@triton.jit
def _site_kernel(
    streams_ptr, parts_ptr, post_ptr, comb_ptr, incoming_ptr,
    fn_ptr, base_ptr, scale_ptr, norm_ptr,
    x_ptr, rounded_ptr, new_pre_ptr, new_post_ptr, new_comb_ptr,
    z_ptr, sums_ptr, count_ptr, C, iterations, norm_eps, eps,
    CS: tl.constexpr, SP: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr,
    PARTS: tl.constexpr, OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One token, CS channels of all streams; the last program does the rest, CA + CB channels."""
    piece, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.arange(0, _PADDED)
    # Channels for each row of the projection: threads of another row load and compute the same, so
    # nothing has to be handed from one to another. Without masks the compiler sees it, too.
    own = tl.broadcast_to((piece * CS + tl.arange(0, CS))[None, :], (_PADDED, CS))
    # What no launch of a step writes is asked for before the wait.
    at_fn = fn_ptr + (row[:, None] * (4 * C) + own)
    is_projected = tl.broadcast_to((row < 24)[:, None], (_PADDED, CS))
    f0 = tl.load(at_fn, mask=is_projected, other=0.0)
    f1 = tl.load(at_fn + C, mask=is_projected, other=0.0)
    f2 = tl.load(at_fn + 2 * C, mask=is_projected, other=0.0)
    f3 = tl.load(at_fn + 3 * C, mask=is_projected, other=0.0)
    wait_for_earlier(OVERLAP)
    one = token + tl.arange(0, 1)
    i0, i1, i2, i3 = _row_of_four(incoming_ptr + one * 4, one == token)
    if PARTS:
        p0, p1, p2, p3 = _row_of_four(post_ptr + one * 4, one == token)
        y = _sum_of_parts(parts_ptr + token * (PARTS * C) + own, C, None, PARTS, UPCAST)
    tl.debug_barrier()  # as in `_total`
    at = streams_ptr + token * (4 * C) + own
    s0 = tl.load(at).to(tl.float32)
    s1 = tl.load(at + C).to(tl.float32)
    s2 = tl.load(at + 2 * C).to(tl.float32)
    s3 = tl.load(at + 3 * C).to(tl.float32)
    is_first = row[:, None] == 0
    if PARTS:
        s0, s1, s2, s3 = _expanded(
            s0, s1, s2, s3, p0 * y, p1 * y, p2 * y, p3 * y, comb_ptr, one, one == token, UPCAST
        )  # fmt: skip
        kind = streams_ptr.dtype.element_ty
        tl.debug_barrier()  # every row has what the first one writes over
        tl.store(at, s0.to(kind), mask=is_first)
        tl.store(at + C, s1.to(kind), mask=is_first)
        tl.store(at + 2 * C, s2.to(kind), mask=is_first)
        tl.store(at + 3 * C, s3.to(kind), mask=is_first)
    z = _rounded(((i0 * s0 + i1 * s1) + i2 * s2) + i3 * s3, UPCAST)
    tl.store(z_ptr + token * C + own, z.to(z_ptr.dtype.element_ty), mask=is_first)
    m = (f0 * s0 + f1 * s1) + (f2 * s2 + f3 * s3)
    m = tl.where(row[:, None] == 24, (s0 * s0 + s1 * s1) + (s2 * s2 + s3 * s3), m)
    m = tl.where(row[:, None] == 25, z * z, m)
    # What the last program will need is on its way while the programs meet.
    base, scale = _row_constants(base_ptr, scale_ptr)
    a, b = tl.arange(0, CA), CA + tl.arange(0, CB)
    weight_a = tl.load(norm_ptr + a, mask=a < C, other=0.0)
    weight_b = tl.load(norm_ptr + b, mask=b < C, other=0.0)
    pieces = tl.num_programs(0)
    tl.store(sums_ptr + (token * pieces + piece) * _PADDED + row, tl.sum(m, axis=1))
    let_next_start(OVERLAP)
    if last_to_arrive(count_ptr + token, pieces):
        at_z = z_ptr + token * C
        za = tl.load(at_z + a, mask=a < C, other=0.0, cache_modifier=".cg")
        zb = tl.load(at_z + b, mask=b < C, other=0.0, cache_modifier=".cg")
        total = _total(sums_ptr, token, pieces, SP)
        square = tl.sum(tl.where(row == 25, total, 0.0), axis=0)
        r = tl.rsqrt(square / tl.cast(C, tl.float32) + norm_eps)
        x_ptr += token * C
        rounded_ptr += token * C
        _store_normed(za, weight_a, r, x_ptr, rounded_ptr, a, C, CA, UPCAST)
        _store_normed(zb, weight_b, r, x_ptr, rounded_ptr, b, C, CB, UPCAST)
        _coefficients(
            total, base, scale, token, C,
            new_pre_ptr, new_post_ptr, new_comb_ptr, iterations, norm_eps, eps, UPCAST,
        )  # fmt: skip


def site_unsupported(streams: Tensor, site: Site) -> str | None:
    """Return why `hyper_site` cannot take these inputs, or None."""
    channels = streams.shape[-1]
    if streams.shape[-2] != STREAMS:
        return f"streams: {streams.shape[-2]} of them, expected {STREAMS}"
    if channels % GROUP or channels > 8192:
        return f"hidden_size: {channels}, expected a multiple of {GROUP} up to 8192"
    if site.fn.shape != (_ROWS, STREAMS * channels):
        return f"fn: shape {tuple(site.fn.shape)}, expected {(_ROWS, STREAMS * channels)}"
    if not streams.is_contiguous() or not site.fn.is_contiguous():
        return "streams or fn is not contiguous"
    return None


class SiteScratch(NamedTuple):
    """Collapsed rows, parts of the sums, and counters; launches that overlap may share them."""

    collapsed: Tensor
    sums: Tensor
    counters: Tensor


def site_scratch(tokens: int, channels: int, device: torch.device | str) -> SiteScratch:
    """Return scratch that serves any launch for up to `tokens` tokens."""
    return SiteScratch(
        torch.empty(tokens, channels, dtype=torch.bfloat16, device=device),
        torch.empty(tokens * (channels // GROUP), _PADDED.value, device=device),
        counters(device, tokens),
    )


def site_launch(tokens: int, device: torch.device, invariant: bool = False) -> SiteLaunch:
    """Return the parameters for `tokens` tokens on a device; invariant as `linear_launch`."""
    if invariant:
        return launch_for(_INVARIANT, device)
    one, few, many = launch_for(_LAUNCH, device)
    return one if tokens == 1 else few if tokens <= 16 else many


def hyper_site(
    streams: Tensor,
    parts: Tensor | None,
    before: HyperMix | None,
    incoming: Tensor,
    site: Site,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
    launch: SiteLaunch | None = None,
    scratch: SiteScratch | None = None,
    overlap: int = Overlap.NONE,
) -> SiteOutput:
    """Same contract as `hyper_site_ref`, up to the order of the fp32 sums.

    overlap  an `Overlap`
    """
    reason = site_unsupported(streams, site)
    if reason is not None:
        raise SiteUnsupportedError(f"hyper_site: {reason}")
    tokens, _, channels = streams.shape
    x = streams.new_empty(tokens, channels)
    out = SiteOutput(
        x,
        torch.empty_like(x),
        HyperMix(*(torch.empty(tokens, *s, device=x.device) for s in ((4,), (4,), (4, 4)))),
    )
    if not tokens:
        return out
    launch = site_launch(tokens, x.device) if launch is None else launch
    width = launch.channels
    while channels % width:
        width //= 2
    if width < GROUP:  # the scratch has room for slices of a group
        raise SiteUnsupportedError(
            f"hyper_site: launch: slices of {width} channels, expected at least {GROUP}"
        )
    scratch = site_scratch(tokens, channels, x.device) if scratch is None else scratch
    unread = out.mix  # pointers that PARTS = 0 never follows
    old = unread if before is None else before
    shared = {
        "PARTS": 0 if parts is None else parts.shape[1],
        "UPCAST": is_interpreted(_site_kernel),
        **overlap_options(overlap, x.device),
    }
    pieces = channels // width
    padded = triton.next_power_of_2(pieces)
    given = streams, streams if parts is None else parts, old.post, old.comb, incoming
    if launch.apart:
        _streams_kernel[(pieces, triton.cdiv(tokens, 16))](
            *given, site.fn, *scratch[:2], tokens, channels,
            CS=width, TB=16, num_warps=launch.warps, **shared,
        )  # fmt: skip
        del shared["PARTS"]
        part = min(_END_CHANNELS, triton.next_power_of_2(channels))
        _site_end_kernel[(tokens, 1 + triton.cdiv(channels, part))](
            *site[1:], *out[:2], *out.mix, *scratch[:2], channels, pieces,
            iterations, norm_eps, eps, SP=padded, CP=part, num_warps=4, **shared,
        )  # fmt: skip
        return out
    most = 1 << channels.bit_length() - 1
    _site_kernel[(pieces, tokens)](
        *given, *site, *out[:2], *out.mix, *scratch, channels, iterations, norm_eps, eps,
        CS=width, SP=padded, CA=most,
        CB=max(GROUP, triton.next_power_of_2(channels - most)) if channels > most else GROUP,
        num_warps=launch.warps, **shared,
    )  # fmt: skip
    return out
