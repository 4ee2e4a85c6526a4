"""One hyper-connection site of a decode step in one launch, from expert outputs to normed input.

A program owns a slice of the channels of a few tokens: it adds what the sub-layer before returned,
expands with that site's coefficients, writes the streams back, collapses with the mix that comes
in, and multiplies its part of the projection, in fp32. The last program of a token adds the parts
in order, makes the coefficients (Sinkhorn in registers) and the RMS norm of the collapsed row,
plain and rounded to FP8 groups. It serves four streams, as released. The easy mistake: three mixes
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

from finwhale.decode_kernels.launch import is_interpreted, launch_for, wait_for_earlier
from finwhale.decode_kernels.tiles import (
    GROUP,
    counters,
    last_to_arrive,
    overlap_of,
    round_groups,
    to_bf16,
)
from finwhale.ops.hyper_connection import HyperMix, hyper_collapse, hyper_expand, hyper_mix
from finwhale.ops.norm import rms_norm
from finwhale.ops.rounding import round_fp8

STREAMS = 4
_ROWS = 24  # coefficients of a site: 4 pre, 4 post, 16 comb
_PADDED = tl.constexpr(32)  # of a row of parts: 24 products, the two sums of squares


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
    """Channels of a slice, tokens of a program, warps; overlap as in `LinearLaunch`.

    apart  two launches: the projection of 16 tokens at once on the matrix unit (`tokens` does not
           count), then a program per token for what needs the whole row
    """

    channels: int
    tokens: int
    warps: int
    apart: bool = False
    overlap: int = 0


# (one token, up to 16, more) by device family.
_LAUNCH: dict[str, tuple[SiteLaunch, SiteLaunch, SiteLaunch]] = {
    "any": (
        SiteLaunch(channels=32, tokens=1, warps=4),
        SiteLaunch(channels=64, tokens=1, warps=4),
        SiteLaunch(channels=64, tokens=4, warps=8),
    ),
    "hopper": (
        SiteLaunch(channels=32, tokens=1, warps=4),
        SiteLaunch(channels=64, tokens=1, warps=4),
        SiteLaunch(channels=32, tokens=1, warps=4, apart=True),
    ),
}
_INVARIANT = {"any": SiteLaunch(channels=64, tokens=1, warps=4)}

# What `bench/gpu_decode.py --tune` times, and the compiled tests run.
BENCHED = tuple(
    SiteLaunch(channels=channels, tokens=tokens, warps=warps, apart=apart)
    for channels, tokens, warps, apart in (
        (32, 1, 4, True), (64, 1, 4, True), (64, 1, 8, True), (128, 1, 8, True),
        (32, 1, 4, False), (64, 1, 4, False), (64, 4, 8, False),
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
def _coefficients(sums_ptr, t, inside, base_ptr, scale_ptr, pre_ptr, post_ptr, comb_ptr,
                  iterations, inverse, eps):  # fmt: skip
    """Store pre, post and the balanced comb of tokens t, from their 24 projections."""
    # Sixteen planes over the tokens stay in registers: a step is four sums and four quotients.
    scale = tl.load(scale_ptr)
    for i in tl.static_range(4):
        m = tl.load(sums_ptr + t * _PADDED + i, mask=inside, other=0.0, cache_modifier=".cg")
        m = scale * (m * inverse) + tl.load(base_ptr + i)
        tl.store(pre_ptr + t * 4 + i, 1.0 / (1.0 + tl.exp(-m)) + eps, mask=inside)
    scale = tl.load(scale_ptr + 1)
    for i in tl.static_range(4):
        m = tl.load(sums_ptr + t * _PADDED + 4 + i, mask=inside, other=0.0, cache_modifier=".cg")
        m = scale * (m * inverse) + tl.load(base_ptr + 4 + i)
        tl.store(post_ptr + t * 4 + i, 2.0 / (1.0 + tl.exp(-m)), mask=inside)
    a0, a1, a2, a3 = _softmax_row(sums_ptr, t, inside, base_ptr, scale_ptr, inverse, eps, 0)
    b0, b1, b2, b3 = _softmax_row(sums_ptr, t, inside, base_ptr, scale_ptr, inverse, eps, 1)
    c0, c1, c2, c3 = _softmax_row(sums_ptr, t, inside, base_ptr, scale_ptr, inverse, eps, 2)
    d0, d1, d2, d3 = _softmax_row(sums_ptr, t, inside, base_ptr, scale_ptr, inverse, eps, 3)
    for step in range(iterations):
        if step > 0:
            a0, a1, a2, a3 = _divided(a0, a1, a2, a3, eps)
            b0, b1, b2, b3 = _divided(b0, b1, b2, b3, eps)
            c0, c1, c2, c3 = _divided(c0, c1, c2, c3, eps)
            d0, d1, d2, d3 = _divided(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _divided(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _divided(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _divided(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _divided(a3, b3, c3, d3, eps)
    comb = comb_ptr + t * 16
    _store_row(comb, a0, a1, a2, a3, inside)
    _store_row(comb + 4, b0, b1, b2, b3, inside)
    _store_row(comb + 8, c0, c1, c2, c3, inside)
    _store_row(comb + 12, d0, d1, d2, d3, inside)


@triton.jit
def _softmax_row(sums_ptr, t, inside, base_ptr, scale_ptr, inverse, eps, row: tl.constexpr):
    """Return row `row` of the combine matrix before its Sinkhorn steps, four planes."""
    scale = tl.load(scale_ptr + 2)
    at = sums_ptr + t * _PADDED + 8 + 4 * row
    base = base_ptr + 8 + 4 * row
    m0 = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    m1 = tl.load(at + 1, mask=inside, other=0.0, cache_modifier=".cg")
    m2 = tl.load(at + 2, mask=inside, other=0.0, cache_modifier=".cg")
    m3 = tl.load(at + 3, mask=inside, other=0.0, cache_modifier=".cg")
    m0 = scale * (m0 * inverse) + tl.load(base)
    m1 = scale * (m1 * inverse) + tl.load(base + 1)
    m2 = scale * (m2 * inverse) + tl.load(base + 2)
    m3 = scale * (m3 * inverse) + tl.load(base + 3)
    top = tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3))
    m0, m1, m2, m3 = tl.exp(m0 - top), tl.exp(m1 - top), tl.exp(m2 - top), tl.exp(m3 - top)
    r = 1.0 / ((m0 + m1) + (m2 + m3))
    return m0 * r + eps, m1 * r + eps, m2 * r + eps, m3 * r + eps


@triton.jit
def _divided(x0, x1, x2, x3, eps):
    """Return four numbers over their sum."""
    r = 1.0 / ((x0 + x1) + (x2 + x3) + eps)
    return x0 * r, x1 * r, x2 * r, x3 * r


@triton.jit
def _store_row(at, v0, v1, v2, v3, inside):
    tl.store(at, v0, mask=inside)
    tl.store(at + 1, v1, mask=inside)
    tl.store(at + 2, v2, mask=inside)
    tl.store(at + 3, v3, mask=inside)


@triton.jit
def _store_normed(z, weight, r, x_ptr, rounded_ptr, c, C, CP: tl.constexpr, UPCAST: tl.constexpr):
    """Store one normalised row [CP] and its FP8-rounded twin."""
    x = to_bf16(weight.to(tl.float32) * (z.to(tl.float32) * r), UPCAST)
    tl.store(x_ptr + c, x.to(x_ptr.dtype.element_ty), mask=c < C)
    y = tl.reshape(round_groups(tl.reshape(x, (1, CP // 32, 32))), (CP,))
    tl.store(rounded_ptr + c, to_bf16(y, UPCAST).to(rounded_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def _bf16_parts(x, UPCAST: tl.constexpr):
    """Return three bf16 numbers whose sum is an fp32 number; exact above 2^-110."""
    high = to_bf16(x, UPCAST)
    rest = x - high
    middle = to_bf16(rest, UPCAST)
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
    streams_ptr, parts_ptr, post_ptr, comb_ptr, incoming_ptr, fn_ptr, z_ptr, sums_ptr,
    T, C, num_parts,
    CS: tl.constexpr, TB: tl.constexpr, HAS_UPDATE: tl.constexpr, OVERLAP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The first launch of `apart`: TB tokens, CS channels of all streams."""
    piece, block = tl.program_id(0), tl.program_id(1)
    own = piece * CS + tl.arange(0, CS)
    row = tl.arange(0, _PADDED)
    t = block * TB + tl.arange(0, TB)
    inside = t < T
    token = t.to(tl.int64)
    wait_for_earlier(OVERLAP > 0)
    at = token[:, None] * (4 * C) + own[None, :]
    keep = inside[:, None] & (own < C)[None, :]
    y = tl.zeros([TB, CS], tl.float32)
    if HAS_UPDATE:
        for p in range(num_parts):
            at_part = (token * num_parts + p)[:, None] * C + own[None, :]
            y += tl.load(parts_ptr + at_part, mask=keep, other=0.0).to(tl.float32)
        y = to_bf16(y, UPCAST)
    z = tl.zeros([TB, CS], tl.float32)
    squares = tl.zeros([TB], tl.float32)
    acc = tl.zeros([TB, _PADDED], tl.float32)
    # All four are read before one is written.
    s0 = tl.load(streams_ptr + at, mask=keep, other=0.0).to(tl.float32)
    s1 = tl.load(streams_ptr + at + C, mask=keep, other=0.0).to(tl.float32)
    s2 = tl.load(streams_ptr + at + 2 * C, mask=keep, other=0.0).to(tl.float32)
    s3 = tl.load(streams_ptr + at + 3 * C, mask=keep, other=0.0).to(tl.float32)
    for j in tl.static_range(4):
        if HAS_UPDATE:
            c0 = tl.load(comb_ptr + token * 16 + j, mask=inside, other=0.0)
            c1 = tl.load(comb_ptr + token * 16 + 4 + j, mask=inside, other=0.0)
            c2 = tl.load(comb_ptr + token * 16 + 8 + j, mask=inside, other=0.0)
            c3 = tl.load(comb_ptr + token * 16 + 12 + j, mask=inside, other=0.0)
            post = tl.load(post_ptr + token * 4 + j, mask=inside, other=0.0)
            mixed = c0[:, None] * s0 + c1[:, None] * s1
            mixed = mixed + c2[:, None] * s2 + c3[:, None] * s3  # in the order of the reference
            u = to_bf16(post[:, None] * y + mixed, UPCAST)
            tl.store(streams_ptr + at + j * C, u.to(streams_ptr.dtype.element_ty), mask=keep)
        else:
            u = s0 if j == 0 else s1 if j == 1 else s2 if j == 2 else s3
        incoming = tl.load(incoming_ptr + token * 4 + j, mask=inside, other=0.0)
        z += incoming[:, None] * u
        squares += tl.sum(u * u, axis=1)
        at_fn = row.to(tl.int64)[:, None] * (4 * C) + (j * C + own)[None, :]
        fn = tl.load(fn_ptr + at_fn, mask=(row < 24)[:, None] & (own < C)[None, :], other=0.0)
        acc = _dot_parts(u, fn, acc, UPCAST)
    z = to_bf16(z, UPCAST)
    tl.store(z_ptr + token[:, None] * C + own[None, :], z.to(z_ptr.dtype.element_ty), mask=keep)
    acc = tl.where(row[None, :] == 24, squares[:, None], acc)
    acc = tl.where(row[None, :] == 25, tl.sum(z * z, axis=1)[:, None], acc)
    at_sums = (token * tl.num_programs(0) + piece)[:, None] * _PADDED + row[None, :]
    tl.store(sums_ptr + at_sums, acc, mask=inside[:, None])


@triton.jit
def _site_end_kernel(
    base_ptr, scale_ptr, norm_ptr, x_ptr, rounded_ptr, new_pre_ptr, new_post_ptr, new_comb_ptr,
    z_ptr, sums_ptr, T, C, pieces, iterations, norm_eps, eps,
    SP: tl.constexpr, CP: tl.constexpr, OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The second launch of `apart`: one token, its coefficients and its normed row."""
    wait_for_earlier(OVERLAP > 0)
    token = tl.program_id(0).to(tl.int64)
    c, row, s = tl.arange(0, CP), tl.arange(0, _PADDED), tl.arange(0, SP)
    z = tl.load(z_ptr + token * C + c, mask=c < C, other=0.0)
    weight = tl.load(norm_ptr + c, mask=c < C, other=0.0)
    at = (token * pieces + s)[:, None] * _PADDED + row[None, :]
    total = tl.sum(tl.load(sums_ptr + at, mask=(s < pieces)[:, None], other=0.0), axis=0)
    # The sums of all tokens lie behind the parts of all slices.
    totals_ptr = sums_ptr + tl.cast(T, tl.int64) * pieces * _PADDED
    tl.store(totals_ptr + token * _PADDED + row, total)
    square_z = tl.sum(tl.where(row == 25, total, 0.0), axis=0)
    r = tl.rsqrt(square_z / tl.cast(C, tl.float32) + norm_eps)
    _store_normed(z, weight, r, x_ptr + token * C, rounded_ptr + token * C, c, C, CP, UPCAST)
    tl.debug_barrier()
    one = token + tl.arange(0, 1)
    square = tl.load(totals_ptr + one * _PADDED + 24, cache_modifier=".cg")
    inverse = tl.rsqrt(square / tl.cast(4 * C, tl.float32) + norm_eps)
    _coefficients(
        totals_ptr, one, one < T, base_ptr, scale_ptr,
        new_pre_ptr, new_post_ptr, new_comb_ptr, iterations, inverse, eps,
    )  # fmt: skip


@triton.jit
def _site_kernel(
    streams_ptr, parts_ptr, post_ptr, comb_ptr, incoming_ptr,
    fn_ptr, base_ptr, scale_ptr, norm_ptr,
    x_ptr, rounded_ptr, new_pre_ptr, new_post_ptr, new_comb_ptr,
    z_ptr, sums_ptr, count_ptr, T, C, num_parts, iterations, norm_eps, eps,
    CS: tl.constexpr, TB: tl.constexpr, SP: tl.constexpr, CP: tl.constexpr,
    HAS_UPDATE: tl.constexpr, OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    piece, block = tl.program_id(0), tl.program_id(1)
    pieces = tl.num_programs(0)
    own = piece * CS + tl.arange(0, CS)  # channels
    i = tl.arange(0, 4)
    row = tl.arange(0, _PADDED)
    flat = tl.arange(0, 4 * CS)
    at_fn = row.to(tl.int64)[:, None] * (4 * C) + (flat // CS * C + piece * CS + flat % CS)[None, :]
    # The weights are asked for before the wait.
    fn = tl.load(fn_ptr + at_fn, mask=(row < 24)[:, None], other=0.0)
    wait_for_earlier(OVERLAP > 0)
    # The sums of all tokens lie behind the parts of all slices.
    totals_ptr = sums_ptr + tl.cast(T, tl.int64) * pieces * _PADDED
    for t in range(block * TB, tl.minimum(block * TB + TB, T)):
        token = tl.cast(t, tl.int64)
        at = (token * 4 + i)[:, None] * C + own[None, :]
        streams = tl.load(streams_ptr + at).to(tl.float32)
        if HAS_UPDATE:
            y = tl.zeros([CS], tl.float32)
            for p in range(num_parts):
                y += tl.load(parts_ptr + (token * num_parts + p) * C + own).to(tl.float32)
            y = to_bf16(y, UPCAST)
            post = tl.load(post_ptr + token * 4 + i)
            comb = tl.load(comb_ptr + token * 16 + i[:, None] * 4 + i[None, :])  # [in, out]
            mixed = tl.sum(comb[:, :, None] * streams[:, None, :], axis=0)
            streams = to_bf16(post[:, None] * y[None, :] + mixed, UPCAST)
            tl.store(streams_ptr + at, streams.to(streams_ptr.dtype.element_ty))
        incoming = tl.load(incoming_ptr + token * 4 + i)
        z = to_bf16(tl.sum(incoming[:, None] * streams, axis=0), UPCAST)
        tl.store(z_ptr + token * C + own, z.to(z_ptr.dtype.element_ty))
        u = tl.reshape(streams, (4 * CS,))
        m = tl.sum(fn * u[None, :], axis=1)
        m = tl.where(row == 24, tl.sum(u * u, axis=0), m)
        m = tl.where(row == 25, tl.sum(z * z, axis=0), m)
        tl.store(sums_ptr + (token * pieces + piece) * _PADDED + row, m)
    if last_to_arrive(count_ptr + block, pieces):
        c = tl.arange(0, CP)
        weight = tl.load(norm_ptr + c, mask=c < C, other=0.0)
        first = block * TB
        # The first row is asked for now, so that the coefficients hide the wait for it.
        z = tl.load(
            z_ptr + tl.cast(first, tl.int64) * C + c, mask=c < C, other=0.0, cache_modifier=".cg"
        )
        s = tl.arange(0, SP)
        for t in range(first, tl.minimum(first + TB, T)):
            at = (tl.cast(t, tl.int64) * pieces + s)[:, None] * _PADDED + row[None, :]
            tile = tl.load(
                sums_ptr + at, mask=(s < pieces)[:, None], other=0.0, cache_modifier=".cg"
            )
            tl.store(totals_ptr + tl.cast(t, tl.int64) * _PADDED + row, tl.sum(tile, axis=0))
        tl.debug_barrier()
        tokens = (first + tl.arange(0, TB)).to(tl.int64)
        inside = tokens < T
        square = tl.load(
            totals_ptr + tokens * _PADDED + 24, mask=inside, other=0.0, cache_modifier=".cg"
        )
        inverse = tl.rsqrt(square / tl.cast(4 * C, tl.float32) + norm_eps)
        _coefficients(
            totals_ptr, tokens, inside, base_ptr, scale_ptr,
            new_pre_ptr, new_post_ptr, new_comb_ptr, iterations, inverse, eps,
        )  # fmt: skip
        for t in range(first, tl.minimum(first + TB, T)):
            token = tl.cast(t, tl.int64)
            square_z = tl.load(totals_ptr + token * _PADDED + 25, cache_modifier=".cg")
            r = tl.rsqrt(square_z / tl.cast(C, tl.float32) + norm_eps)
            if TB > 1:
                z = tl.load(z_ptr + token * C + c, mask=c < C, other=0.0, cache_modifier=".cg")
            _store_normed(
                z, weight, r, x_ptr + token * C, rounded_ptr + token * C, c, C, CP, UPCAST
            )


def split_normed_ref(joined: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised and FP8-rounded head of each row, and a copy of its tail.

    joined   [T, A + B] bf16: the products with `wq_a` and `wkv` in one matrix
    weight   [A] bf16
    returns  [T, A] bf16, [T, B] bf16

    Section 4.1, step 1; section 9.1.
    """
    head, tail = joined.split((len(weight), joined.shape[1] - len(weight)), dim=-1)
    return round_fp8(rms_norm(head, weight, eps)), tail.contiguous()


@triton.jit
def _split_normed_kernel(
    joined_ptr, weight_ptr, head_ptr, tail_ptr, A, B, eps,
    AP: tl.constexpr, BP: tl.constexpr, OVERLAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(OVERLAP > 0)
    row = tl.cast(tl.program_id(0), tl.int64)
    a, b = tl.arange(0, AP), tl.arange(0, BP)
    x = tl.load(joined_ptr + row * (A + B) + a, mask=a < A, other=0.0).to(tl.float32)
    tail = tl.load(joined_ptr + row * (A + B) + A + b, mask=b < B, other=0.0)
    tl.store(tail_ptr + row * B + b, tail, mask=b < B)
    weight = tl.load(weight_ptr + a, mask=a < A, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, axis=0) / tl.cast(A, tl.float32) + eps)
    y = to_bf16(weight * (x * r), UPCAST)
    y = tl.reshape(round_groups(tl.reshape(y, (1, AP // 32, 32))), (AP,))
    tl.store(head_ptr + row * A + a, to_bf16(y, UPCAST).to(head_ptr.dtype.element_ty), mask=a < A)


def split_normed(
    joined: Tensor, weight: Tensor, eps: float, overlap: int = 0
) -> tuple[Tensor, Tensor]:
    """Same contract as `split_normed_ref`, in one launch; overlap as in `LinearLaunch`."""
    tokens, width = joined.shape
    head = joined.new_empty(tokens, len(weight))
    tail = joined.new_empty(tokens, width - len(weight))
    if len(weight) % GROUP:
        raise SiteUnsupportedError(
            f"split_normed: {len(weight)} columns, not a multiple of {GROUP}"
        )
    if tokens:
        _split_normed_kernel[(tokens,)](
            joined, weight, head, tail, head.shape[1], tail.shape[1], eps,
            AP=triton.next_power_of_2(head.shape[1]), BP=triton.next_power_of_2(tail.shape[1]),
            UPCAST=is_interpreted(_split_normed_kernel), num_warps=4,
            **overlap_of(overlap, joined.device),
        )  # fmt: skip
    return head, tail


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
    """Collapsed rows, parts of the sums, and counters of launches that do not overlap."""

    collapsed: Tensor
    sums: Tensor
    counters: Tensor


def site_scratch(tokens: int, channels: int, device: torch.device | str) -> SiteScratch:
    """Return scratch that serves any launch for up to `tokens` tokens."""
    return SiteScratch(
        torch.empty(tokens, channels, dtype=torch.bfloat16, device=device),
        torch.empty(tokens * (channels // GROUP + 1), _PADDED.value, device=device),
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
) -> SiteOutput:
    """Same contract as `hyper_site_ref`, up to the order of the fp32 sums."""
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
        raise SiteUnsupportedError(f"launch: slices of {width} channels, expected at least {GROUP}")
    scratch = site_scratch(tokens, channels, x.device) if scratch is None else scratch
    unread = out.mix  # pointers that HAS_UPDATE=False never follows
    old = unread if before is None else before
    num_parts = 0 if parts is None else parts.shape[1]
    if launch.apart:
        shared = {
            "UPCAST": is_interpreted(_site_kernel), **overlap_of(launch.overlap, x.device),
        }  # fmt: skip
        pieces = channels // width
        _streams_kernel[(pieces, triton.cdiv(tokens, 16))](
            streams, streams if parts is None else parts, old.post, old.comb, incoming, site.fn,
            *scratch[:2], tokens, channels, num_parts,
            CS=width, TB=16, HAS_UPDATE=parts is not None, num_warps=launch.warps, **shared,
        )  # fmt: skip
        _site_end_kernel[(tokens,)](
            site.base, site.scale, site.norm, *out[:2], *out.mix, *scratch[:2],
            tokens, channels, pieces, iterations, norm_eps, eps,
            SP=triton.next_power_of_2(pieces), CP=triton.next_power_of_2(channels),
            num_warps=8, **shared,
        )  # fmt: skip
        return out
    _site_kernel[(channels // width, triton.cdiv(tokens, launch.tokens))](
        streams, streams if parts is None else parts, old.post, old.comb, incoming,
        *site, *out[:2], *out.mix, *scratch,
        tokens, channels, num_parts, iterations, norm_eps, eps,
        CS=width, TB=launch.tokens, SP=triton.next_power_of_2(channels // width),
        CP=triton.next_power_of_2(channels), HAS_UPDATE=parts is not None,
        UPCAST=is_interpreted(_site_kernel),
        num_warps=launch.warps, **overlap_of(launch.overlap, x.device),
    )  # fmt: skip
    return out
