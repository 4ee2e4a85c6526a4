"""One hyper-connection site of a decode step in one launch, from expert outputs to normed input.

A program owns a slice of the channels of a token: it adds what the sub-layer before returned,
expands with that site's coefficients, writes the streams back, collapses with the mix that comes
in, and multiplies its part of the projection, in fp32. The last program of a token adds the parts
in order and makes the RMS norm of the collapsed row, plain and rounded to FP8 groups, and the
coefficients (Sinkhorn in registers), which may be left to the next site's programs. All of it is a
chain of latencies: what counts is how often a load waits for another. It serves four streams, as
released. The easy mistake: three mixes meet here: `post` and `comb` of the site before, `pre` of
the site before that one's sub-layer (it collapses), and the ones made here, which only later sites
use. Source: spec/backbone.md section 6.
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
    """What a site hands on: the sub-layer's input, plain and rounded, and its coefficients.

    mix  the coefficients, or fp32 [T, 24] logits of which the next site makes them: pre and post
         before their sigmoids, comb before its softmax
    """

    x: Tensor
    x_rounded: Tensor
    mix: HyperMix | Tensor


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
def _logits(total, base, scale, C, norm_eps):
    """Return what a token's coefficients are made of, from its sums; all are [32]."""
    row = tl.arange(0, _PADDED)
    square = tl.sum(tl.where(row == 24, total, 0.0), axis=0)
    inverse = tl.rsqrt(square / tl.cast(4 * C, tl.float32) + norm_eps)
    return scale * (total * inverse) + base


@triton.jit
def _coefficients(logits, iterations, eps, UPCAST: tl.constexpr):
    """Return pre, post and the balanced comb, four rows of it, each four scalars; logits [32]."""
    rows = tl.reshape(logits, (8, 4))  # pre, post, the matrix
    gate = 1.0 / (1.0 + tl.exp(-rows))
    pre, post = _numbers(gate + eps, 0), _numbers(2.0 * gate, 1)
    comb = tl.exp(rows - tl.max(rows, axis=1)[:, None])
    comb = comb * _reciprocal(tl.sum(comb, axis=1), UPCAST)[:, None] + eps
    # Sixteen numbers, the same in every thread: a round is four sums and four quotients by rows,
    # then by columns. What the rows are divided by is found at the end of the round before.
    a, b, c, d = _numbers(comb, 2), _numbers(comb, 3), _numbers(comb, 4), _numbers(comb, 5)
    of_a = tl.full((), 1.0, tl.float32)
    of_b, of_c, of_d = of_a, of_a, of_a
    for _ in range(iterations):
        a, b, c, d = _times(a, of_a), _times(b, of_b), _times(c, of_c), _times(d, of_d)
        of_0 = _inverse_sum((a[0], b[0], c[0], d[0]), eps, UPCAST)
        of_1 = _inverse_sum((a[1], b[1], c[1], d[1]), eps, UPCAST)
        of_2 = _inverse_sum((a[2], b[2], c[2], d[2]), eps, UPCAST)
        of_3 = _inverse_sum((a[3], b[3], c[3], d[3]), eps, UPCAST)
        a = a[0] * of_0, a[1] * of_1, a[2] * of_2, a[3] * of_3
        b = b[0] * of_0, b[1] * of_1, b[2] * of_2, b[3] * of_3
        c = c[0] * of_0, c[1] * of_1, c[2] * of_2, c[3] * of_3
        d = d[0] * of_0, d[1] * of_1, d[2] * of_2, d[3] * of_3
        of_a, of_b = _inverse_sum(a, eps, UPCAST), _inverse_sum(b, eps, UPCAST)
        of_c, of_d = _inverse_sum(c, eps, UPCAST), _inverse_sum(d, eps, UPCAST)
    return pre, post, (a, b, c, d)


@triton.jit
def _numbers(rows, place: tl.constexpr):
    """Return one of eight rows of four as four scalars."""
    is_row = tl.arange(0, 8)[:, None] == place
    even, odd = tl.split(tl.reshape(tl.sum(tl.where(is_row, rows, 0.0), axis=0), (2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def _times(row, by):
    return row[0] * by, row[1] * by, row[2] * by, row[3] * by


@triton.jit
def _inverse_sum(x, eps, UPCAST: tl.constexpr):
    # Quotients come one after the other out of the unit that inverts, and are added as they come.
    return _reciprocal(((eps + x[0]) + x[1] + x[2]) + x[3], UPCAST)


@triton.jit
def _store_coefficients(
    logits, token, pre_ptr, post_ptr, comb_ptr, iterations, eps, UPCAST: tl.constexpr
):
    pre, post, comb = _coefficients(logits, iterations, eps, UPCAST)
    comb_ptr += token * 16
    for i in tl.static_range(4):
        tl.store(pre_ptr + token * 4 + i, pre[i])
        tl.store(post_ptr + token * 4 + i, post[i])
        for j in tl.static_range(4):
            tl.store(comb_ptr + 4 * i + j, comb[i][j])


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
def _expanded(s, y, post, comb, UPCAST: tl.constexpr):
    """Return the streams s, four [R, CS], mixed by comb, each plus post times y."""
    a, b, c, d = comb
    u = ()
    for j in tl.static_range(4):
        # In the order of the reference.
        mixed = (a[j] * s[0] + b[j] * s[1]) + (c[j] * s[2] + d[j] * s[3])
        u += (_rounded(post[j] * y + mixed, UPCAST),)
    return u


@triton.jit
def _collapsed(s, pre, UPCAST: tl.constexpr):
    return _rounded(((pre[0] * s[0] + pre[1] * s[1]) + pre[2] * s[2]) + pre[3] * s[3], UPCAST)


@triton.jit
def _squares(s):
    return (s[0] * s[0] + s[1] * s[1]) + (s[2] * s[2] + s[3] * s[3])


@triton.jit
def _four_at(at, step, keep, other):
    """Return what lies at the pointers and one, two and three steps behind them."""
    v0, v1 = tl.load(at, mask=keep, other=other), tl.load(at + step, mask=keep, other=other)
    v2 = tl.load(at + 2 * step, mask=keep, other=other)
    return v0, v1, v2, tl.load(at + 3 * step, mask=keep, other=other)


@triton.jit
def _columns_of_four(at, inside):
    """Return four neighbours at each of the pointers [R], as columns [R, 1]."""
    return _four_at(at[:, None], 1, inside[:, None], 0.0)


@triton.jit
def _comb_at(at, inside):
    """Return the four rows of four at each of the pointers [R], as columns [R, 1]."""
    a, b = _columns_of_four(at, inside), _columns_of_four(at + 4, inside)
    return a, b, _columns_of_four(at + 8, inside), _columns_of_four(at + 12, inside)


@triton.jit
def _in_fp32(x):
    return x[0].to(tl.float32), x[1].to(tl.float32), x[2].to(tl.float32), x[3].to(tl.float32)


@triton.jit
def _store_streams(at, C, s, keep):
    for n in tl.static_range(4):
        tl.store(at + n * C, s[n].to(at.dtype.element_ty), mask=keep)


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
    pre = _columns_of_four(incoming_ptr + token * 4, inside)
    if PARTS:
        post = _columns_of_four(post_ptr + token * 4, inside)
        at_parts = parts_ptr + token[:, None] * (PARTS * C) + own[None, :]
        y = _sum_of_parts(at_parts, C, keep, PARTS, UPCAST)
    tl.debug_barrier()  # as in `_total`
    at = streams_ptr + token[:, None] * (4 * C) + own[None, :]
    s = _in_fp32(_four_at(at, C, keep, 0.0))
    if PARTS:
        s = _expanded(s, y, post, _comb_at(comb_ptr + token * 16, inside), UPCAST)
        _store_streams(at, C, s, keep)
    z = _collapsed(s, pre, UPCAST)
    tl.store(z_ptr + token[:, None] * C + own[None, :], z.to(z_ptr.dtype.element_ty), mask=keep)
    at_sums = sums_ptr + (token * tl.num_programs(0) + piece) * _PADDED
    both = tl.join(tl.sum(_squares(s), axis=1), tl.sum(z * z, axis=1))
    place = 24 + tl.arange(0, 2)[None, :]
    tl.store(at_sums[:, None] + place, both, mask=inside[:, None])
    # [TB, CS, high bit, low bit of the stream]
    u = tl.join(tl.join(s[0], s[2]), tl.join(s[1], s[3]))
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
        total = _total(sums_ptr, token, pieces, SP)
        _store_coefficients(
            _logits(total, base, scale, C, norm_eps), token,
            new_pre_ptr, new_post_ptr, new_comb_ptr, iterations, eps, UPCAST,
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
    streams_ptr, parts_ptr, post_ptr, comb_ptr, incoming_ptr, logits_ptr,
    fn_ptr, base_ptr, scale_ptr, norm_ptr,
    x_ptr, rounded_ptr, new_pre_ptr, new_post_ptr, new_comb_ptr, new_logits_ptr,
    z_ptr, sums_ptr, count_ptr, C, iterations, norm_eps, eps,
    CS: tl.constexpr, SP: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr,
    PARTS: tl.constexpr, MAKES: tl.constexpr, LATE: tl.constexpr, OVERLAP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One token, CS channels of all streams; the last program does the rest, CA + CB channels.

    MAKES: the coefficients of the site before, from its logits; LATE: its own are left to the next.
    """
    piece, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.arange(0, _PADDED)
    # Channels for each row of the projection: threads of another row load and compute the same, so
    # nothing has to be handed from one to another. Without masks the compiler sees it, too.
    own = tl.broadcast_to((piece * CS + tl.arange(0, CS))[None, :], (_PADDED, CS))
    # What no launch of a step writes is asked for before the wait.
    at_fn = fn_ptr + (row[:, None] * (4 * C) + own)
    is_projected = tl.broadcast_to((row < 24)[:, None], (_PADDED, CS))
    f = _four_at(at_fn, C, is_projected, 0.0)
    if MAKES:
        # In every program, while the sub-layer ends; the last one of that site would be waited for.
        # Past the first-level cache, which may hold what was there before.
        at_logits = logits_ptr + token * 24 + row
        logits = tl.load(at_logits, mask=row < 24, other=0.0, cache_modifier=".cg")
        pre, post, comb = _coefficients(logits, iterations, eps, UPCAST)
    wait_for_earlier(OVERLAP)
    one = token + tl.arange(0, 1)
    if not MAKES:
        pre = _columns_of_four(incoming_ptr + one * 4, one == token)
        if PARTS:
            post = _columns_of_four(post_ptr + one * 4, one == token)
            comb = _comb_at(comb_ptr + one * 16, one == token)
    if PARTS:
        y = _sum_of_parts(parts_ptr + token * (PARTS * C) + own, C, None, PARTS, UPCAST)
    tl.debug_barrier()  # as in `_total`
    at = streams_ptr + token * (4 * C) + own
    s = _in_fp32(_four_at(at, C, None, None))
    is_first = row[:, None] == 0
    if PARTS:
        s = _expanded(s, y, post, comb, UPCAST)
        tl.debug_barrier()  # every row has what the first one writes over
        _store_streams(at, C, s, is_first)
    z = _collapsed(s, pre, UPCAST)
    tl.store(z_ptr + token * C + own, z.to(z_ptr.dtype.element_ty), mask=is_first)
    m = (f[0] * s[0] + f[1] * s[1]) + (f[2] * s[2] + f[3] * s[3])
    m = tl.where(row[:, None] == 24, _squares(s), m)
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
        logits = _logits(total, base, scale, C, norm_eps)
        if LATE:
            tl.store(new_logits_ptr + token * 24 + row, logits, mask=row < 24)
        else:
            _store_coefficients(
                logits, token, new_pre_ptr, new_post_ptr, new_comb_ptr, iterations, eps, UPCAST
            )


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
    before: HyperMix | Tensor | None,
    incoming: Tensor | None,
    site: Site,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
    late: bool = False,
    launch: SiteLaunch | None = None,
    scratch: SiteScratch | None = None,
    overlap: int = Overlap.NONE,
) -> SiteOutput:
    """Same contract as `hyper_site_ref`, up to the order of the fp32 sums.

    before    coefficients, or the logits that the site before left, at least one launch between the
              two; with logits `incoming`, their pre, is None, and the launch is not `apart`
    late      leave the logits to the next site, unless the launch is `apart`: its programs make the
              coefficients before they wait, where the last program here would be waited for; each
              does, so this is for few tokens
    overlap   an `Overlap`
    """
    reason = site_unsupported(streams, site)
    if reason is not None:
        raise SiteUnsupportedError(f"hyper_site: {reason}")
    tokens, _, channels = streams.shape
    launch = site_launch(tokens, streams.device) if launch is None else launch
    late, is_fit = late and not launch.apart, incoming is not None
    if isinstance(before, Tensor):
        is_logits = before.shape == (tokens, _ROWS) and before.dtype == torch.float32
        is_fit = is_logits and not is_fit and not launch.apart
    if not is_fit:
        raise SiteUnsupportedError(
            "hyper_site: before: expected coefficients and incoming, or fp32 logits [T, 24] without"
            " it and a launch that is not apart"
        )
    x = streams.new_empty(tokens, channels)
    mix = HyperMix(*(torch.empty(tokens, *s, device=x.device) for s in ((4,), (4,), (4, 4))))
    logits = torch.empty(tokens, _ROWS, device=x.device) if late else mix.comb
    out = SiteOutput(x, torch.empty_like(x), logits if late else mix)
    if not tokens:
        return out
    width = launch.channels
    while channels % width:
        width //= 2
    if width < GROUP:  # the scratch has room for slices of a group
        raise SiteUnsupportedError(
            f"hyper_site: launch: slices of {width} channels, expected at least {GROUP}"
        )
    scratch = site_scratch(tokens, channels, x.device) if scratch is None else scratch
    # Pointers that nothing follows: without parts, or with logits instead.
    old = before if isinstance(before, HyperMix) else mix
    shared = {
        "PARTS": 0 if parts is None else parts.shape[1],
        "UPCAST": is_interpreted(_site_kernel),
        **overlap_options(overlap, x.device),
    }
    pieces = channels // width
    padded = triton.next_power_of_2(pieces)
    given = (
        streams, streams if parts is None else parts, old.post, old.comb,
        mix.pre if incoming is None else incoming,
    )  # fmt: skip
    if launch.apart:
        _streams_kernel[(pieces, triton.cdiv(tokens, 16))](
            *given, site.fn, *scratch[:2], tokens, channels,
            CS=width, TB=16, num_warps=launch.warps, **shared,
        )  # fmt: skip
        del shared["PARTS"]
        part = min(_END_CHANNELS, triton.next_power_of_2(channels))
        _site_end_kernel[(tokens, 1 + triton.cdiv(channels, part))](
            *site[1:], *out[:2], *mix, *scratch[:2], channels, pieces,
            iterations, norm_eps, eps, SP=padded, CP=part, num_warps=4, **shared,
        )  # fmt: skip
        return out
    most = 1 << channels.bit_length() - 1
    _site_kernel[(pieces, tokens)](
        *given, before if incoming is None else logits, *site, *out[:2], *mix, logits, *scratch,
        channels, iterations, norm_eps, eps, MAKES=incoming is None, LATE=late,
        CS=width, SP=padded, CA=most,
        CB=max(GROUP, triton.next_power_of_2(channels - most)) if channels > most else GROUP,
        num_warps=launch.warps, **shared,
    )  # fmt: skip
    return out
