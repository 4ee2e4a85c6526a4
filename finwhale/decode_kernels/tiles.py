"""Products of a few activation rows with rows of a stored matrix: what all weight kernels share.

FP8 matrices (a UE8M0 scale per 32x32 block) and FP4 ones (one per row and 32 columns) lie in tiles
of 32 rows by 32 columns, in the order in which the threads of a matrix unit hold them: a lane loads
16 bytes and decodes them where it needs them. `pack_fp8_tiles` and `pack_fp4_tiles` make that order
once, when a model is loaded. BF16 matrices stay as they are. A matrix is read once, in the bytes it
is stored in; decoded weights are exact, and only the order of the sums is the kernels' own. K must
be a multiple of 32. The easy mistake: an FP4 scale is 2^(code - 127), so code 0 is a subnormal
number. Source: spec/backbone.md section 9.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.formats import bf16_rounded, ue8m0_value
from finwhale.decode_kernels.launch import let_next_start
from finwhale.ops.codecs import pack_nibbles, unpack_nibbles

GROUP = 32
BF16 = tl.constexpr(0)
FP8 = tl.constexpr(1)
FP4 = tl.constexpr(2)
_INV_448 = tl.constexpr(0.002232142857142857)
# A 32-bit word holds eight e2m1 codes as four pairs of lanes. Each pair is one shift away from a
# sign in bit 15 and a magnitude in bits 8 to 6 of its lane: the bf16 number value * 2^-126.
# Per pair, the places of (sign, high exponent bit, low exponent bit, mantissa) before that shift:
_PAIR_BITS = ((15, 8, 7, 6), (9, 2, 1, 0), (19, 12, 11, 10), (13, 14, 5, 4))
# Four bytes and the scale of their group, 2^126 in it -> four low and four high bf16 values.
_UNPACK_FP4 = tl.constexpr(
    """
    {
    .reg .b32 t0, t1, t2, t3, u;
    and.b32 t0, $4, 0x81C081C0;
    shl.b32 t1, $4, 6;
    and.b32 t1, t1, 0x81C081C0;
    shf.r.wrap.b32 t2, $4, $4, 4;
    and.b32 t2, t2, 0x81C081C0;
    shl.b32 t3, $4, 2;
    and.b32 t3, t3, 0x80C080C0;
    shr.u32 u, $4, 6;
    and.b32 u, u, 0x01000100;
    or.b32 t3, t3, u;
    mul.rn.bf16x2 $0, t0, $5;
    mul.rn.bf16x2 $1, t1, $5;
    mul.rn.bf16x2 $2, t2, $5;
    mul.rn.bf16x2 $3, t3, $5;
    }
    """
)
MAX_FP4_SCALE = 128  # 2^(code - 1) must be a bf16 number
# Four e4m3 codes and the scale of their group ($3: a pair of it, 2^120 in it) -> four bf16 numbers.
# A half of the word holds a code of the first pair as a bf16 number, the value * 2^-120, and among
# its unused bits one of the second: its sign in bit 11, the low four bits in place, the rest above.
_UNPACK_FP8 = tl.constexpr(
    """
    {
    .reg .b32 t, u, v;
    and.b32 t, $2, 0x87F087F0;
    shl.b32 u, $2, 4;
    and.b32 u, u, 0x80F080F0;
    shr.u32 v, $2, 4;
    and.b32 v, v, 0x07000700;
    or.b32 u, u, v;
    mul.rn.bf16x2 $0, t, $3;
    mul.rn.bf16x2 $1, u, $3;
    }
    """
)
MAX_FP8_SCALE = 134  # 2^(code - 7) must be a bf16 number


def pack_fp4_tiles(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return an FP4 matrix in tiles; once, when a model is loaded.

    codes    [..., O, K/2] int8 or uint8, low nibble column 2i, high nibble column 2i + 1
    scales   [..., O, K/32] uint8; O is a multiple of 32
    returns  [..., O/32, K/32, 512] and [..., O/32, K/32, 32] uint8

    A tile holds 32 lanes of 16 bytes: lane 4r + q has a word for each of the rows r, r + 8, r + 16
    and r + 24, in it columns 2q and 2q + 1 of each run of eight, bits as `_PAIR_BITS` says. Its
    scales are words too: word r has those four rows. So nine instructions decode eight codes. A
    scale above 2 raises ValueError.
    """
    _check_scales(scales, MAX_FP4_SCALE)
    nibbles = unpack_nibbles(codes).long()
    tiles = nibbles.unflatten(-1, (-1, 4, 4, 2)).unflatten(-5, (-1, 4, 8))
    # [..., O/32, j, r, K/32, pair, q, lane] -> [..., O/32, K/32, r, q, j, pair, lane]
    tiles = _moved_last(tiles, (-7, -4, -5, -2, -6, -3, -1))
    words = torch.zeros_like(tiles[..., 0, 0])
    for pair, lane, bit, place in _places():
        words |= ((tiles[..., pair, lane] >> bit) & 1) << place
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    packed = words.contiguous().view(torch.uint8).flatten(-3)
    by_word = scales.unflatten(-2, (-1, 4, 8))  # [..., O/32, j, r, K/32]
    return packed, _moved_last(by_word, (-4, -1, -2, -3)).contiguous().flatten(-2)


def unpack_fp4_tiles(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_fp4_tiles`: codes [..., O, K/2] uint8 and scales [..., O, K/32]."""
    words = packed.contiguous().view(torch.int32).long().unflatten(-1, (8, 4, 4))
    tiles = words.new_zeros(*words.shape, 4, 2)
    for pair, lane, bit, place in _places():
        tiles[..., pair, lane] |= ((words >> place) & 1) << bit
    nibbles = _moved_last(tiles, (-7, -3, -5, -6, -2, -4, -1))
    nibbles = nibbles.flatten(-4).flatten(-4, -2)  # columns, then rows
    by_row = _moved_last(scales.unflatten(-1, (8, 4)), (-4, -1, -2, -3))
    return pack_nibbles(nibbles.to(torch.uint8)), by_row.flatten(-4, -2)


def pack_fp8_tiles(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return an FP8 matrix in tiles; once, when a model is loaded.

    codes    [O, K] float8_e4m3fn
    scales   [ceil(O/32), K/32] uint8 or float8_e8m0fnu
    returns  [ceil(O/32), K/32, 1024] and [ceil(O/32), K/32] uint8; rows beyond O are zero

    A tile holds its columns 0 ... 15, then the others, each as 32 lanes of 16 bytes. Lane 4r + q
    has columns 2q and 2q + 1 of rows r and r + 8, then columns 8 + 2q and 9 + 2q of both, and the
    same of rows r + 16 and r + 24. The bits of the four codes of a word are mixed: `_UNPACK_FP8`. A
    NaN or a scale above 128 raises ValueError.
    """
    codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
    _check_scales(scales, MAX_FP8_SCALE)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise ValueError("codes: NaN, expected numbers")
    codes = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % GROUP))
    tiles = codes.unflatten(1, (-1, 2, 2, 4, 2)).unflatten(0, (-1, 2, 2, 8))
    # [O/32, b, j, r, K/32, half, pair, q, lane] -> [O/32, K/32, half, r, q, b, pair, j, lane]
    tiles = tiles.permute(0, 4, 5, 3, 7, 1, 6, 2, 8).contiguous().flatten(2)
    c = tiles.unflatten(-1, (-1, 2, 2)).to(torch.int16)  # [..., word, pair, half]
    first, second = c[..., 0, :], c[..., 1, :]
    halves = ((first & 0x80) << 8) | ((first & 0x7F) << 4)
    halves |= ((second & 0x80) << 4) | ((second & 0x70) << 8) | (second & 0x0F)
    return halves.view(torch.uint8).flatten(2), scales.contiguous()


def unpack_fp8_tiles(packed: Tensor) -> Tensor:
    """Return the codes [O, K] float8_e4m3fn of `pack_fp8_tiles`, O a multiple of 32."""
    halves = packed.contiguous().view(torch.int16).to(torch.int32)
    first = ((halves >> 8) & 0x80) | ((halves >> 4) & 0x7F)
    second = ((halves >> 4) & 0x80) | ((halves >> 8) & 0x70) | (halves & 0x0F)
    both = torch.stack((first.unflatten(-1, (-1, 2)), second.unflatten(-1, (-1, 2))), dim=-2)
    tiles = both.to(torch.uint8).flatten(-3).unflatten(-1, (2, 8, 4, 2, 2, 2, 2))
    rows = tiles.permute(0, 5, 7, 3, 1, 2, 6, 4, 8).flatten(4).flatten(0, 3)
    return rows.contiguous().view(torch.float8_e4m3fn)


def _check_scales(scales: Tensor, most: int) -> None:
    if scales.numel() and int(scales.max()) > most:
        raise ValueError(f"scales: code {int(scales.max())}, expected at most {most}")


def _moved_last(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return x with its last dimensions in another order, counted from the end."""
    kept = x.dim() - len(order)
    return x.permute(*range(kept), *(x.dim() + n for n in order))


def _places() -> list[tuple[int, int, int, int]]:
    """Return (pair, lane, bit of the code, place in the word) of all 32 bits."""
    return [
        (pair, lane, 3 - bit, (place + 16 * lane) % 32)
        for pair, places in enumerate(_PAIR_BITS)
        for lane in range(2)
        for bit, place in enumerate(places)
    ]


@triton.jit
def to_bf16(x, UPCAST: tl.constexpr):
    """Round fp32 to the nearest bf16, as fp32. The interpreter's own cast cuts the bits off."""
    return bf16_rounded(x) if UPCAST else x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def round_groups(x):
    """Return x [R, G, 32] fp32 through FP8 with one UE8M0 scale per 32 and back (section 9.2).

    As `finwhale.ops.rounding.round_fp8`: a group with a NaN or an infinity becomes NaN.
    """
    largest = tl.max(tl.abs(x), axis=2)
    broken = tl.max((tl.abs(x) <= 3.3895313e38).to(tl.int32) ^ 1, axis=2)
    quotient = tl.maximum(largest, 1e-4) * _INV_448
    bits = quotient.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    exponent = tl.minimum(exponent, 253)
    scale = tl.where(broken != 0, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    y = tl.minimum(tl.maximum(x * inverse[:, :, None], -448.0), 448.0)
    # Adding and subtracting 1.5 * 2^23 steps rounds to whole steps, ties to even.
    of_y = tl.maximum((y.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    magic = (((of_y + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return ((y + magic) - magic) * scale[:, :, None]


@triton.jit
def _lanes(pairs):
    """Return both lanes of pairs of bf16 numbers as fp32, times 2^126."""
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & -65536).to(tl.float32, bitcast=True)
    return tl.join(low, high) * 8.507059173023462e37


@triton.jit
def _four_bytes(words):
    """Return the bytes of words [...] as [..., 2, 2], the lowest first.

    Joined: of FP8 scales shifted by a vector, Triton 3.7 makes an order that sends all decoded
    weights through shared memory. (Of FP4 scales it does, and joined ones would split words.)
    """
    even = tl.join(words & 255, (words >> 16) & 255)
    odd = tl.join((words >> 8) & 255, (words >> 24) & 255)
    return tl.join(even, odd)


@triton.jit
def _fp4_decoded(packed, scale_words, UPCAST: tl.constexpr):
    """Return tiles [S, G, half, r, q, b, pair, j, lane].

    packed       [S, G, 512] uint8; scale_words [S, G, 8] int32
    """
    S: tl.constexpr = packed.shape[0]
    G: tl.constexpr = packed.shape[1]
    codes = (scale_words[:, :, :, None] >> (tl.arange(0, 4) * 8)[None, None, None, :]) & 255
    if UPCAST:
        # The interpreter knows no assembler: the same shifts on whole words.
        byte = (tl.arange(0, 4) * 8)[None, None, None, :]
        v = tl.sum(tl.reshape(packed, (S, G, 128, 4)).to(tl.int32) << byte, axis=3)
        v = tl.reshape(v, (S, G, 8, 4, 4))
        m = -2118090304  # 0x81C081C0
        t2 = ((v >> 4) & 0x0FFFFFFF) | (v << 28)
        t3 = ((v << 2) & -2134867776) | ((v >> 6) & 0x01000100)  # 0x80C080C0
        scale = ue8m0_value(codes)[:, :, :, None, :, None, None]
        # Behind the words: lane, then pair.
        low = tl.join(_lanes(v & m), _lanes((v << 6) & m)) * scale
        high = tl.join(_lanes(t2 & m), _lanes(t3)) * scale
        low = tl.permute(low, (0, 1, 2, 3, 4, 6, 5))
        high = tl.permute(high, (0, 1, 2, 3, 4, 6, 5))
    else:
        packed = tl.reshape(packed, (S, G, 8, 4, 4, 4))
        pair = (codes + 126) * 8388736  # twice, shifted to the exponent
        low, high = tl.inline_asm_elementwise(
            _UNPACK_FP4,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [packed, tl.broadcast_to(pair[:, :, :, None, :, None], packed.shape)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    # Of each 32 columns the first and the last 16; a word is (b, j), its values (pair, lane).
    y = tl.reshape(tl.join(low, high), (S, G, 8, 4, 2, 2, 2, 2, 2))
    return tl.permute(y, (0, 1, 8, 2, 3, 4, 6, 5, 7))


@triton.jit
def _fp8_decoded(packed, codes, WARPS: tl.constexpr, UPCAST: tl.constexpr):
    """Return tiles [S, G, half, r, q, b, pair, j, lane].

    packed  [S, G, 2, 512] or [S, G, 1024] uint8; codes [S, G] int32 of the scales

    The assembler takes the four bytes of a word, which one thread has only where wide products are
    made: of 64 rows and 4 warps or more (`tests/machine_code.py`). Elsewhere, plain shifts.
    """
    S: tl.constexpr = packed.shape[0]
    G: tl.constexpr = packed.shape[1]
    if UPCAST or S == 1 or WARPS < 4:
        byte = (tl.arange(0, 4) * 8)[None, None, None, :]
        v = tl.sum(tl.reshape(packed, (S, G, 256, 4)).to(tl.int32) << byte, axis=3)
        t = v & -2014279696  # 0x87F087F0
        u = ((v << 4) & -2131722000) | ((v >> 4) & 0x07000700)  # 0x80F080F0
        y = tl.permute(tl.join(_lanes(t), _lanes(u)), (0, 1, 2, 4, 3))  # words, pairs, lanes
        y = y * (ue8m0_value(codes) * 0.015625)[:, :, None, None, None]  # 2^126 in them, not 2^120
        y = y if UPCAST else y.to(tl.bfloat16)
    else:
        pair = (codes + 120) * 8388736
        if len(packed.shape) == 4:
            packed = tl.reshape(packed, (S, G, 2, 128, 4))
            pair = pair[:, :, None, None, None]
        else:
            packed = tl.reshape(packed, (S, G, 256, 4))
            pair = pair[:, :, None, None]
        y = tl.inline_asm_elementwise(
            _UNPACK_FP8,
            "=&r,=&r,r,r,r,r,r",
            [packed, tl.broadcast_to(pair, packed.shape)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return tl.reshape(y, (S, G, 2, 8, 4, 2, 2, 2, 2))


@triton.jit
def _by_warp(w, WARPS: tl.constexpr):
    """Return [32 S, 16 G halves] of tiles [S, G, halves, r, q, b, pair, j, lane].

    A warp of the matrix unit takes 16 rows of a block of 16 WARPS; a tile's two blocks of 16 rows
    go to one warp if there are two such blocks.
    """
    S: tl.constexpr = w.shape[0]
    K: tl.constexpr = w.shape[1] * w.shape[2] * 16
    if S == WARPS:
        w = tl.permute(w, (5, 0, 7, 3, 1, 2, 6, 4, 8))
    else:
        w = tl.permute(w, (0, 5, 7, 3, 1, 2, 6, 4, 8))
    return tl.reshape(w, (32 * S, K))


@triton.jit
def _fp8_bytes_at(w_ptr, tile, WARPS: tl.constexpr):
    """Return pointers to the bytes of FP8 tiles [S, G].

    In two shapes of one thing: each keeps decoded weights within a warp for its number of rows.
    """
    if tile.shape[0] == WARPS:
        half = tile[:, :, None, None] * 2 + tl.arange(0, 2)[None, None, :, None]
        at = w_ptr + half * 512 + tl.arange(0, 512)[None, None, None, :]
    else:
        at = w_ptr + tile[:, :, None] * 1024 + tl.arange(0, 1024)[None, None, :]
    return at


@triton.jit
def _fp8_scales(s_ptr, first, G: tl.constexpr):
    """Return the scales of G groups from `first` [S] on, four in a word [S, G / 4].

    A load of single bytes is never loaded ahead.
    """
    word = s_ptr + first[:, None] + tl.arange(0, G // 4)[None, :] * 4
    return tl.load(word.to(tl.pointer_type(tl.int32), bitcast=True))


@triton.jit
def tiles_ahead(
    w_ptr, s_ptr, strips, g_begin, num_groups,
    AHEAD: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return the bytes of the first AHEAD groups of FP8 strips, and their scales as words.

    For `tiled_product`, which adds them last. AHEAD is a multiple of 4; 0: nothing is read.
    """
    packed, words = 0, 0
    if AHEAD > 0:
        strip = strips.to(tl.int64) * num_groups + g_begin
        tile = strip[:, None] + tl.arange(0, AHEAD)[None, :]
        packed = tl.load(_fp8_bytes_at(w_ptr, tile, WARPS))
        words = _fp8_scales(s_ptr, strip, AHEAD)
    return packed, words


@triton.jit
def tiled_product(
    x_ptr, rows, inside, w_ptr, s_ptr, strips, g_begin, g_end, num_groups, packed_ahead,
    words_ahead,
    KIND: tl.constexpr, BM: tl.constexpr, S: tl.constexpr, G: tl.constexpr, EVEN: tl.constexpr,
    WARPS: tl.constexpr, AHEAD: tl.constexpr, CACHE: tl.constexpr, OVERLAP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return [BM, 32 S] fp32, the products of rows of x with S strips of 32 rows of a matrix.

    rows                   [BM] element offset of each row in x; inside [BM] bool, others are zero
    strips                 [S] int; the rows of strip n are 32 n ... 32 n + 31
    g_begin, g_end         groups of 32 columns to sum; a step takes G of `num_groups`
    EVEN                   all steps are full, and num_groups a multiple of 4
    packed_ahead           of `tiles_ahead`, the first AHEAD groups, with EVEN and FP8 alone
    CACHE                  of the loads of x: ".cg" before the wait for the launch before

    FP8 or FP4. 16 or 32 rows of the matrix a warp: then nothing decoded crosses a warp.
    """
    acc = tl.zeros([32 * S, BM], tl.float32)
    strip = strips.to(tl.int64) * num_groups
    g = tl.arange(0, G)
    column = tl.arange(0, 32 * G)
    at_x = x_ptr + rows[:, None] + column[None, :]
    keep = tl.broadcast_to(inside[:, None], (BM, 32 * G))
    if KIND == FP4:
        at_w = w_ptr + (strip[:, None] + g[None, :])[:, :, None] * 512
        at_w += tl.arange(0, 512)[None, None, :]
        at_s = s_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        at_s += (strip[:, None] + g[None, :])[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    else:
        at_w = _fp8_bytes_at(w_ptr, strip[:, None] + g[None, :], WARPS)
    one = tl.full([32 * S, BM], 1.0, tl.float32)
    if AHEAD > 0:
        # Asked for now, so that it is there when the loop has ended.
        own = tl.arange(0, 32 * AHEAD)
        at_ahead = x_ptr + rows[:, None] + own[None, :] + g_begin * 32
        keep_ahead = tl.broadcast_to(inside[:, None], (BM, 32 * AHEAD))
        x_ahead = tl.load(at_ahead, mask=keep_ahead, other=0.0)
    for k in range(g_begin + AHEAD, g_end, G):
        there = k + g < g_end
        if KIND == FP4:
            if EVEN:
                packed = tl.load(at_w + tl.cast(k, tl.int64) * 512)
                words = tl.load(at_s + k * 8)
            else:
                mask = tl.broadcast_to(there[None, :, None], (S, G, 512))
                packed = tl.load(at_w + tl.cast(k, tl.int64) * 512, mask=mask, other=0)
                mask = tl.broadcast_to(there[None, :, None], (S, G, 8))
                words = tl.load(at_s + k * 8, mask=mask, other=0)
            w = _fp4_decoded(packed, words, UPCAST)
        else:
            if EVEN and G % 4 == 0:
                packed = tl.load(at_w + tl.cast(k, tl.int64) * 1024)
                codes = tl.reshape(_four_bytes(_fp8_scales(s_ptr, strip + k, G)), (S, G))
            else:
                mask = tl.reshape(there, (1, G, 1, 1) if S == WARPS else (1, G, 1))
                mask = tl.broadcast_to(mask, at_w.shape)
                packed = tl.load(at_w + tl.cast(k, tl.int64) * 1024, mask=mask, other=0)
                mask = tl.broadcast_to(there[None, :], (S, G))
                code = s_ptr + (strip + k)[:, None] + g[None, :]
                codes = tl.load(code, mask=mask, other=0).to(tl.int32)
            w = _fp8_decoded(packed, codes, WARPS, UPCAST)
        if not EVEN:
            keep = inside[:, None] & (k + column // 32 < g_end)[None, :]
        x = tl.load(at_x + k * 32, mask=keep, other=0.0, cache_modifier=CACHE)
        # Not a product on top of acc: that one may still read w's registers when the next step
        # writes them. What the multiply-add needs is waited for.
        part = _dot(_by_warp(w, WARPS), x, tl.zeros([32 * S, BM], tl.float32), UPCAST)
        acc = tl.fma(part, one, acc)
    let_next_start(OVERLAP)
    if AHEAD > 0:
        codes = tl.reshape(_four_bytes(words_ahead), (S, AHEAD))
        w = _fp8_decoded(packed_ahead, codes, WARPS, UPCAST)
        part = _dot(_by_warp(w, WARPS), x_ahead, tl.zeros([32 * S, BM], tl.float32), UPCAST)
        acc = tl.fma(part, one, acc)
    # Back to the order of the matrix.
    if S == WARPS:
        acc = tl.permute(tl.reshape(acc, (2, S, 16, BM)), (3, 1, 0, 2))
    else:
        acc = tl.permute(tl.reshape(acc, (S, 2, 16, BM)), (3, 0, 1, 2))
    return tl.reshape(acc, (BM, 32 * S))


@triton.jit
def _row_weights_at(w_ptr, n, K, BK: tl.constexpr):
    """Return pointers to BK columns of rows n [BN], [BK / 16, BN, 16].

    Columns come first: of the two outer dimensions, neighbouring threads walk along the first.
    """
    at = (n.to(tl.int64) * K)[None, :, None] + tl.arange(0, BK // 16)[:, None, None] * 16
    return w_ptr + at + tl.arange(0, 16)[None, None, :]


@triton.jit
def row_ahead(w_ptr, n, k_begin, K, BK: tl.constexpr):
    """Return the weights of the first step of `row_product`, [BK / 16, BN, 16]."""
    return tl.load(_row_weights_at(w_ptr, n, K, BK) + k_begin)


@triton.jit
def row_product(
    x_ptr, w_ptr, n, k_begin, k_end, K, first,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return [BN] fp32, the products of one row x [K] with rows n [BN] of a BF16 matrix.

    EVEN   k_end - k_begin is a multiple of BK
    first  with AHEAD, the weights of the first step (`row_ahead`)
    """
    # Loads without a mask: then the compiler sees that rows of one thread share their x.
    j = tl.arange(0, 16)[None, None, :]
    U: tl.constexpr = BK // 16
    u = tl.arange(0, U)
    acc = tl.zeros([U, BN], tl.float32)
    at_w = _row_weights_at(w_ptr, n, K, BK)
    at_x = x_ptr + tl.broadcast_to(u[:, None, None] * 16 + j, (U, BN, 16))
    if AHEAD:
        x = tl.load(at_x + k_begin)
        acc += tl.sum(first.to(tl.float32) * x.to(tl.float32), axis=2)
        k_begin += BK
    for k in range(k_begin, k_end, BK):
        if EVEN:
            w = tl.load(at_w + k)
            x = tl.load(at_x + k)
        else:
            there = tl.broadcast_to(k + u[:, None] * 16 < k_end, (U, BN))
            w = tl.load(at_w + k, mask=there[:, :, None], other=0.0)
            x = tl.load(at_x + k, mask=there[:, :, None], other=0.0)
        acc += tl.sum(w.to(tl.float32) * x.to(tl.float32), axis=2)
    return tl.sum(acc, axis=0)


@triton.jit
def tile_product(
    x_ptr, rows, inside, w_ptr, n, k_begin, k_end, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return [BM, BN] fp32, the products of rows of x with rows n [BN] of a BF16 matrix.

    rows    [BM] element offset of each row in x; inside [BM] bool, others count as zero
    EVEN    k_end - k_begin is a multiple of BK
    """
    acc = tl.zeros([BM, BN], tl.float32)
    across = tl.arange(0, BK)
    at_w = (n.to(tl.int64) * K)[:, None] + across[None, :]
    for k in range(k_begin, k_end, BK):
        if EVEN:
            keep_x = tl.broadcast_to(inside[:, None], (BM, BK))
            w = tl.load(w_ptr + at_w + k)
        else:
            there = (k + across < k_end)[None, :]
            keep_x = inside[:, None] & there
            w = tl.load(w_ptr + at_w + k, mask=tl.broadcast_to(there, (BN, BK)), other=0.0)
        x = tl.load(x_ptr + rows[:, None] + (k + across)[None, :], mask=keep_x, other=0.0)
        acc = _dot(x, w, acc, UPCAST)
    return acc


@triton.jit
def _dot(x, w, acc, UPCAST: tl.constexpr):
    """Return acc [M, N] + x [M, K] @ w [N, K]^T; the interpreter multiplies in fp32."""
    if UPCAST:
        acc += tl.dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def last_to_arrive(count_ptr, total):
    """Return whether this program is the last of `total` to come here, and clear the counter.

    What the others stored before they came is visible to the last one's later loads.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == total - 1
    tl.debug_barrier()
    if is_last:
        tl.store(count_ptr, 0)
    return is_last


@triton.jit
def sum_of_splits(
    acc, inside, part_ptr, count_ptr, split,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Return the sum of SPLITS parts acc [BM, BN], and whether this program has it.

    The last program to arrive adds the parts in their order. Rows that are not inside [BM] are not
    kept; ONE: the first row alone is.
    """
    is_last = True
    if SPLITS > 1:
        row, n = tl.arange(0, BM)[:, None], tl.arange(0, BN)
        if ONE:
            at = tl.broadcast_to((part_ptr + split * BN + n)[None, :], (BM, BN))
            tl.store(at, acc, mask=tl.broadcast_to(row == 0, (BM, BN)))
        else:
            own = part_ptr + row * BN + n[None, :]
            keep = tl.broadcast_to(inside[:, None], (BM, BN))
            tl.store(own + split * (BM * BN), acc, mask=keep)
        is_last = last_to_arrive(count_ptr, SPLITS)
        if is_last:
            if ONE:
                total = tl.zeros([BN], tl.float32)
                for one in tl.static_range(SPLITS):
                    total += tl.load(part_ptr + one * BN + n, cache_modifier=".cg")
                acc = tl.broadcast_to(total[None, :], (BM, BN))
            else:
                acc = tl.zeros([BM, BN], tl.float32)
                for one in tl.static_range(SPLITS):
                    part = own + one * (BM * BN)
                    acc += tl.load(part, mask=keep, other=0.0, cache_modifier=".cg")
    return acc, is_last


def counters(device: torch.device | str, count: int) -> Tensor:
    """Return zeroed counters for kernels whose last program finishes; each launch clears its own.

    Launches that overlap may share them: they are used after the wait for earlier launches.
    """
    return torch.zeros(count, dtype=torch.int32, device=device)


def check_scratch(scratch: tuple[Tensor, Tensor], parts: int, counted: int) -> None:
    """Refuse scratch (parts fp32, counters) with less room than a launch needs."""
    got = scratch[0].numel(), scratch[1].numel()
    if got[0] < parts or got[1] < counted:
        raise ValueError(f"scratch: {got} parts and counters, expected {(parts, counted)} or more")
