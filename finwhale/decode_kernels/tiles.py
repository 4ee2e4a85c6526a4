"""Products of a few activation rows with rows of a stored matrix: what all weight kernels share.

A matrix is read once, in the bytes it is stored in, and decoded in registers: BF16, FP8 with a
UE8M0 scale per 32x32 block, or FP4 with one per row and 32 columns. Two forms with one meaning:
`row_product` for a single row (no matrix unit, no shared memory) and `tile_product` for up to BM
rows (bf16 products, fp32 sums). Decoded weights are exact; the sums differ in their order alone.
K must be a multiple of 32. FP4 weights are read in the order of `pack_fp4_tiles`, made once when a
model is loaded. The easy mistake: an FP4 scale is 2^(code - 127), so code 0 is a subnormal number.
Source: spec/backbone.md section 9.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.decode_kernels.formats import ue8m0_value
from finwhale.decode_kernels.launch import overlap_options
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
# Four e4m3 codes times the scale of their group ($3: a pair of it) -> four bf16 numbers. By way of
# fp16 and fp32: the direct conversion of fp16 to bf16 runs at a quarter of the rate.
_UNPACK_FP8_SCALED = tl.constexpr(
    """
    {
    .reg .b16 a, b, c, d;
    .reg .b32 t, u;
    .reg .f32 e, f;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 t, a;
    cvt.rn.f16x2.e4m3x2 u, b;
    mov.b32 {c, d}, t;
    cvt.f32.f16 e, c;
    cvt.f32.f16 f, d;
    cvt.rn.bf16x2.f32 t, f, e;
    mov.b32 {c, d}, u;
    cvt.f32.f16 e, c;
    cvt.f32.f16 f, d;
    cvt.rn.bf16x2.f32 u, f, e;
    mul.rn.bf16x2 $0, t, $3;
    mul.rn.bf16x2 $1, u, $3;
    }
    """
)


def pack_fp4_tiles(codes: Tensor, scales: Tensor) -> Tensor:
    """Return FP4 codes in the order the kernels decode; once, when a model is loaded.

    codes    [..., K/2] int8 or uint8, low nibble column 2i, high nibble column 2i + 1
    scales   [..., K/32] uint8, only looked at: a scale above 2 raises ValueError
    returns  [..., K/2] uint8. Of a group of 32 columns, word w of four holds columns 4w ... 4w + 3
             in its first two pairs and 16 + 4w ... in the others, bits as `_PAIR_BITS` says

    So a thread that reads 16 bytes meets one scale and two runs of 16 neighbouring columns, and
    nine instructions decode eight codes.
    """
    if scales.numel() and int(scales.max()) > MAX_FP4_SCALE:
        raise ValueError(f"scales: code {int(scales.max())}, expected at most {MAX_FP4_SCALE}")
    nibbles = unpack_nibbles(codes).long().unflatten(-1, (-1, 2, 4, 2, 2))  # half, word, pair, lane
    words = torch.zeros_like(nibbles[..., 0, :, 0, 0])  # [..., K/32, 4]
    for half, pair, lane, bit, place in _places():
        words |= ((nibbles[..., half, :, pair, lane] >> bit) & 1) << place
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words.contiguous().view(torch.uint8).flatten(-2)


def unpack_fp4_tiles(packed: Tensor) -> Tensor:
    """Inverse of `pack_fp4_tiles`, [..., K/2] uint8."""
    words = packed.contiguous().view(torch.int32).long().unflatten(-1, (-1, 4))  # [..., K/32, 4]
    nibbles = words.new_zeros(*words.shape[:-1], 2, 4, 2, 2)
    for half, pair, lane, bit, place in _places():
        nibbles[..., half, :, pair, lane] |= ((words >> place) & 1) << bit
    return pack_nibbles(nibbles.flatten(-5).to(torch.uint8))


def _places() -> list[tuple[int, int, int, int, int]]:
    """Return (half, pair in it, lane, bit of the code, place in the word) of all 32 bits."""
    return [
        (number // 2, number % 2, lane, 3 - bit, (place + 16 * lane) % 32)
        for number, places in enumerate(_PAIR_BITS)
        for lane in range(2)
        for bit, place in enumerate(places)
    ]


@triton.jit
def to_bf16(x, UPCAST: tl.constexpr):
    """Round fp32 to the nearest bf16, as fp32. The interpreter's own cast cuts the bits off."""
    if UPCAST:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        y = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        y = x.to(tl.bfloat16).to(tl.float32)
    return y


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
def _fp4_loaded(w_ptr, at, there, scale_codes, EVEN: tl.constexpr, UPCAST: tl.constexpr):
    """Return the low and the high 16 columns of groups, [G, BN, 16] each, decoded and scaled.

    at           [G, BN] byte offset of each group; there [G, BN], if not EVEN
    scale_codes  [G, BN] uint8, at most `MAX_FP4_SCALE`
    """
    if UPCAST:
        # The interpreter knows no assembler: the same shifts on whole words.
        word = tl.arange(0, 4)[None, None, :] * 4
        v = tl.zeros([at.shape[0], at.shape[1], 4], tl.int32)
        for byte in tl.static_range(4):
            place = w_ptr + at[:, :, None] + word + byte
            v |= tl.load(place, mask=there[:, :, None], other=0).to(tl.int32) << (8 * byte)
        m = -2118090304  # 0x81C081C0
        t2 = ((v >> 4) & 0x0FFFFFFF) | (v << 28)
        t3 = ((v << 2) & -2134867776) | ((v >> 6) & 0x01000100)  # 0x80C080C0
        low = tl.join(_lanes(v & m), _lanes((v << 6) & m))  # [G, BN, word, lane, pair]
        high = tl.join(_lanes(t2 & m), _lanes(t3))
        scale = ue8m0_value(scale_codes)[:, :, None]
        shape: tl.constexpr = (at.shape[0], at.shape[1], 16)
        low = tl.reshape(tl.permute(low, (0, 1, 2, 4, 3)), shape) * scale
        high = tl.reshape(tl.permute(high, (0, 1, 2, 4, 3)), shape) * scale
    else:
        place = w_ptr + at[:, :, None] + tl.arange(0, 16)[None, None, :]
        packed = tl.load(place) if EVEN else tl.load(place, mask=there[:, :, None], other=0)
        pair = (scale_codes.to(tl.int32) + 126) * 8388736  # twice, shifted to the exponent
        low, high = tl.inline_asm_elementwise(
            _UNPACK_FP4,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [packed, tl.broadcast_to(pair[:, :, None], packed.shape)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def _fp8_scaled(w, codes, UPCAST: tl.constexpr):
    """Return e4m3 values [G, BN, 32] times their scale, UE8M0 codes [G, BN]."""
    if UPCAST:
        y = w.to(tl.float32) * ue8m0_value(codes)[:, :, None]
    else:
        code = codes.to(tl.int32)
        pair = tl.where(code == 0, 0x40, code << 7) * 65537
        y = tl.inline_asm_elementwise(
            _UNPACK_FP8_SCALED,
            "=&r,=&r,r,r,r,r,r",
            [w, tl.broadcast_to(pair[:, :, None], w.shape)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return y


@triton.jit
def row_product(
    x_ptr, w_ptr, s_ptr, n, k_begin, k_end, K,
    KIND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return [BN] fp32, the products of one row x [K] with rows n [BN] of a matrix.

    EVEN  k_end - k_begin is a multiple of BK
    """
    # Groups come first: of the two outer dimensions, neighbouring threads walk along the first.
    # Loads without a mask: then the compiler sees that rows of one thread share their x.
    n = n.to(tl.int64)
    j = tl.arange(0, 16)[None, None, :]
    if KIND == FP4:
        G: tl.constexpr = BK // 32
        g = tl.arange(0, G)
        acc = tl.zeros([G, BN, 16], tl.float32)
        at_w = (n * (K // 2))[None, :] + g[:, None] * 16
        at_x = x_ptr + tl.broadcast_to(g[:, None, None] * 32 + j, (G, BN, 16))
        at_s = s_ptr + (n * (K // 32))[None, :] + g[:, None]
        for k in range(k_begin, k_end, BK):
            there = tl.broadcast_to(k + g[:, None] * 32 < k_end, (G, BN))
            if EVEN:
                codes = tl.load(at_s + k // 32)
                low_x = tl.load(at_x + k)
                high_x = tl.load(at_x + (k + 16))
            else:
                codes = tl.load(at_s + k // 32, mask=there, other=127)
                low_x = tl.load(at_x + k, mask=there[:, :, None], other=0.0)
                high_x = tl.load(at_x + (k + 16), mask=there[:, :, None], other=0.0)
            low, high = _fp4_loaded(w_ptr, at_w + k // 2, there, codes, EVEN, UPCAST)
            acc += low.to(tl.float32) * low_x.to(tl.float32)
            acc += high.to(tl.float32) * high_x.to(tl.float32)
        total = tl.sum(tl.sum(acc, axis=2), axis=0)
    else:
        U: tl.constexpr = BK // 16
        u = tl.arange(0, U)
        acc = tl.zeros([U, BN], tl.float32)
        at_w = w_ptr + (n * K)[None, :, None] + u[:, None, None] * 16 + j
        at_x = x_ptr + tl.broadcast_to(u[:, None, None] * 16 + j, (U, BN, 16))
        at_s = s_ptr + ((n // 32) * (K // 32))[None, :] + (u // 2)[:, None]
        for k in range(k_begin, k_end, BK):
            there = tl.broadcast_to(k + u[:, None] * 16 < k_end, (U, BN))
            if EVEN:
                w = tl.load(at_w + k)
                x = tl.load(at_x + k)
            else:
                w = tl.load(at_w + k, mask=there[:, :, None], other=0.0)
                x = tl.load(at_x + k, mask=there[:, :, None], other=0.0)
            part = tl.sum(w.to(tl.float32) * x.to(tl.float32), axis=2)
            if KIND == FP8:
                if EVEN:
                    part *= ue8m0_value(tl.load(at_s + k // 32))
                else:
                    part *= ue8m0_value(tl.load(at_s + k // 32, mask=there, other=127))
            acc += part
        total = tl.sum(acc, axis=0)
    return total


@triton.jit
def _codes_of_words(s_ptr, at, BN: tl.constexpr, G: tl.constexpr):
    """Return the scale codes [G, BN] int32 of G groups in a row; G is a multiple of 4.

    at  [BN] byte offset of the first, a multiple of 4

    A load of one byte per element is never pipelined, so each step would wait for memory. Words
    are, and a thread gets the four codes of its rows in one register.
    """
    Q: tl.constexpr = G // 4
    words = (s_ptr + at[None, :] + tl.arange(0, Q)[:, None] * 4).to(
        tl.pointer_type(tl.int32), bitcast=True
    )
    byte = tl.arange(0, 4)[None, :, None] * 8
    return tl.reshape((tl.load(words)[:, None, :] >> byte) & 255, (G, BN))


@triton.jit
def tile_product(
    x_ptr, rows, inside, w_ptr, s_ptr, n, k_begin, k_end, K,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return [BM, BN] fp32, the products of rows of x with rows n [BN] of a matrix.

    rows    [BM] element offset of each row in x; inside [BM] bool, others count as zero
    EVEN    k_end - k_begin is a multiple of BK
    """
    n = n.to(tl.int64)
    acc = tl.zeros([BM, BN], tl.float32)
    if KIND == FP4:
        G: tl.constexpr = BK // 32
        g = tl.arange(0, G)
        half = tl.arange(0, G * 16)
        at_w = (n * (K // 2))[None, :] + g[:, None] * 16
        at_x = rows[:, None] + ((half // 16) * 32 + half % 16)[None, :]
        at_s = (n * (K // 32))[None, :] + g[:, None]
        for k in range(k_begin, k_end, BK):
            there = tl.broadcast_to(k + g[:, None] * 32 < k_end, (G, BN))
            if EVEN:
                keep_x = tl.broadcast_to(inside[:, None], (BM, G * 16))
                if BK % 128 == 0:
                    codes = _codes_of_words(s_ptr, n * (K // 32) + k // 32, BN, G)
                else:
                    codes = tl.load(s_ptr + at_s + k // 32)
            else:
                keep_x = inside[:, None] & (k + (half // 16) * 32 < k_end)[None, :]
                codes = tl.load(s_ptr + at_s + k // 32, mask=there, other=127)
            low_x = tl.load(x_ptr + at_x + k, mask=keep_x, other=0.0)
            high_x = tl.load(x_ptr + at_x + (k + 16), mask=keep_x, other=0.0)
            low, high = _fp4_loaded(w_ptr, at_w + k // 2, there, codes, EVEN, UPCAST)
            acc = _dot(low_x, _rows_by_columns(low), acc, UPCAST)
            acc = _dot(high_x, _rows_by_columns(high), acc, UPCAST)
    elif KIND == FP8:
        G: tl.constexpr = BK // 32
        g = tl.arange(0, G)
        j = tl.arange(0, 32)
        across = tl.arange(0, BK)
        at_w = (n * K)[None, :, None] + g[:, None, None] * 32 + j[None, None, :]
        at_s = ((n // 32) * (K // 32))[None, :] + g[:, None]
        for k in range(k_begin, k_end, BK):
            if EVEN:
                keep_x = tl.broadcast_to(inside[:, None], (BM, BK))
                w = tl.load(w_ptr + at_w + k)
                if BK % 128 == 0:
                    codes = _codes_of_words(s_ptr, (n // 32) * (K // 32) + k // 32, BN, G)
                else:
                    codes = tl.load(s_ptr + at_s + k // 32)
            else:
                keep_x = inside[:, None] & (k + across < k_end)[None, :]
                there = tl.broadcast_to(k + g[:, None] * 32 < k_end, (G, BN))
                w = tl.load(w_ptr + at_w + k, mask=there[:, :, None], other=0.0)
                codes = tl.load(s_ptr + at_s + k // 32, mask=there, other=127)
            x = tl.load(x_ptr + rows[:, None] + (k + across)[None, :], mask=keep_x, other=0.0)
            w = _fp8_scaled(w, codes, UPCAST)
            acc = _dot(x, _rows_by_columns(w), acc, UPCAST)
    else:
        across = tl.arange(0, BK)
        at_w = (n * K)[:, None] + across[None, :]
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
def _rows_by_columns(w):
    """Return [BN, G * J] of a tile [G, BN, J]."""
    w = tl.permute(w, (1, 0, 2))
    return tl.reshape(w, (w.shape[0], w.shape[1] * w.shape[2]))


@triton.jit
def _dot(x, w, acc, UPCAST: tl.constexpr):
    """Return acc [BM, BN] + x [BM, K] @ w [BN, K]^T; the interpreter multiplies in fp32."""
    if UPCAST:
        acc += tl.dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def prefetch_rows(w_ptr, n, row_bytes, first_byte, BYTES: tl.constexpr):
    """Ask for bytes first_byte ... + BYTES of rows n of a byte matrix, into the L2 cache."""
    line = tl.arange(0, BYTES // 128) * 128
    at = w_ptr.to(tl.int64, bitcast=True) + n.to(tl.int64)[:, None] * row_bytes
    at += first_byte + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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


def overlap_of(overlap: int, device: torch.device) -> dict[str, int | bool]:
    """Return the launch options of a kernel with that kind of overlap, where the device has it."""
    options = overlap_options(overlap > 0, device)
    return options | {"OVERLAP": overlap if options["OVERLAP"] else 0}


def counters(device: torch.device | str, count: int) -> Tensor:
    """Return zeroed counters for kernels whose last program finishes; each launch clears its own.

    Two launches that may overlap need counters of their own.
    """
    return torch.zeros(count, dtype=torch.int32, device=device)
