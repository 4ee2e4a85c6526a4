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

from finwhale.ops.codecs import pack_nibbles, unpack_nibbles

GROUP = 32
BF16 = tl.constexpr(0)
FP8 = tl.constexpr(1)
FP4 = tl.constexpr(2)
_INV_448 = tl.constexpr(0.002232142857142857)
# In each run of four bytes, the register order of the decoded values is 0, 2, 1, 3.
_BYTE_ORDER = (0, 2, 1, 3)

# Four bytes of two e2m1 codes each -> the four low values and the four high values, bf16, exact.
# A nibble t becomes sign and exponent by one product (t << 12) + (t << 6) and a mask; that is the
# value times 2^-126, which the bf16 number 0x7E80 = 2^126 repairs.
_UNPACK_FP4 = tl.constexpr(
    """
    {
    .reg .b32 t0, t1, t2, t3, s, c;
    mov.b32 c, 0x7E807E80;
    and.b32 t0, $4, 0x000F000F;
    shr.u32 s, $4, 8;
    and.b32 t1, s, 0x000F000F;
    shr.u32 s, $4, 4;
    and.b32 t2, s, 0x000F000F;
    shr.u32 s, $4, 12;
    and.b32 t3, s, 0x000F000F;
    mul.lo.u32 t0, t0, 4160;
    mul.lo.u32 t1, t1, 4160;
    mul.lo.u32 t2, t2, 4160;
    mul.lo.u32 t3, t3, 4160;
    and.b32 t0, t0, 0x81C081C0;
    and.b32 t1, t1, 0x81C081C0;
    and.b32 t2, t2, 0x81C081C0;
    and.b32 t3, t3, 0x81C081C0;
    mul.rn.bf16x2 $0, t0, c;
    mul.rn.bf16x2 $1, t1, c;
    mul.rn.bf16x2 $2, t2, c;
    mul.rn.bf16x2 $3, t3, c;
    }
    """
)
# The same, each value times the scale of its group ($5 holds two equal bf16 numbers).
_UNPACK_FP4_SCALED = tl.constexpr(
    _UNPACK_FP4.value.rsplit("}", 1)[0]
    + """
    mul.rn.bf16x2 $0, $0, $5;
    mul.rn.bf16x2 $1, $1, $5;
    mul.rn.bf16x2 $2, $2, $5;
    mul.rn.bf16x2 $3, $3, $5;
    }
    """
)

# Four e4m3 codes times the scale of their group -> four bf16 numbers. By way of fp16 and fp32: the
# direct conversion of fp16 to bf16 runs at a quarter of the rate.
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


def pack_fp4_tiles(codes: Tensor) -> Tensor:
    """Return FP4 codes in the order the kernels decode: a permutation inside each 16 bytes.

    codes    [..., K/2] int8 or uint8, low nibble column 2i, high nibble column 2i + 1
    returns  [..., K/2] uint8; of a group of 32 columns, byte b holds column p(b) in its low and
             column 16 + p(b) in its high nibble, p swapping the middle two of every four bytes

    So a thread that reads 16 bytes meets one scale and two runs of 16 neighbouring columns.
    """
    columns = unpack_nibbles(codes).unflatten(-1, (-1, 2, GROUP // 2))  # [..., K/32, 2, 16]
    quads = columns.unflatten(-1, (-1, 4))[..., list(_BYTE_ORDER)].flatten(-2)
    return pack_nibbles(quads.transpose(-1, -2).flatten(-3))


def unpack_fp4_tiles(packed: Tensor) -> Tensor:
    """Inverse of `pack_fp4_tiles`, [..., K/2] uint8."""
    quads = unpack_nibbles(packed).unflatten(-1, (-1, GROUP // 2, 2)).transpose(-1, -2)
    columns = quads.unflatten(-1, (-1, 4))[..., list(_BYTE_ORDER)].flatten(-2)
    return pack_nibbles(columns.flatten(-3))


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
def ue8m0(codes):
    """Return 2^(code - 127) in fp32; 255 is NaN."""
    wide = codes.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


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
def _fp4_values(packed, UPCAST: tl.constexpr):
    """Return the low and the high values of packed codes, exact; bf16, or fp32 if UPCAST."""
    if UPCAST:
        code = packed.to(tl.int32)
        low = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)
        high = (((code & 128) << 24) | ((code & 112) << 18)).to(tl.float32, bitcast=True)
        low, high = low * 8.507059173023462e37, high * 8.507059173023462e37  # 2^126
    else:
        low, high = tl.inline_asm_elementwise(
            _UNPACK_FP4,
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def _fp4_scaled(packed, scale, UPCAST: tl.constexpr):
    """Return the values of packed codes [G, BN, 16] times their scale [G, BN] fp32."""
    if UPCAST:
        low, high = _fp4_values(packed, True)
        low, high = low * scale[:, :, None], high * scale[:, :, None]
    else:
        wide = tl.broadcast_to(scale.to(tl.bfloat16)[:, :, None], packed.shape)
        low, high = tl.inline_asm_elementwise(
            _UNPACK_FP4_SCALED,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, wide],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def _fp8_scaled(w, scale, UPCAST: tl.constexpr):
    """Return e4m3 values [G, BN, 32] times their scale [G, BN] fp32."""
    if UPCAST:
        y = w.to(tl.float32) * scale[:, :, None]
    else:
        wide = tl.broadcast_to(scale.to(tl.bfloat16)[:, :, None], w.shape)
        y = tl.inline_asm_elementwise(
            _UNPACK_FP8_SCALED,
            "=&r,=&r,r,r,r",
            [w, wide],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return y


@triton.jit
def _byte_order(j, UPCAST: tl.constexpr):
    """Return the byte that holds place j: the decoder's registers reorder, the interpreter asks."""
    if UPCAST:
        j = (j & -4) | ((j & 1) << 1) | ((j >> 1) & 1)
    return j


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
        acc = tl.zeros([G, BN], tl.float32)
        at_w = (
            w_ptr + (n * (K // 2))[None, :, None] + g[:, None, None] * 16 + _byte_order(j, UPCAST)
        )
        at_x = x_ptr + tl.broadcast_to(g[:, None, None] * 32 + j, (G, BN, 16))
        at_s = s_ptr + (n * (K // 32))[None, :] + g[:, None]
        for k in range(k_begin, k_end, BK):
            if EVEN:
                codes = tl.load(at_s + k // 32)
                packed = tl.load(at_w + k // 2)
                low_x = tl.load(at_x + k)
                high_x = tl.load(at_x + (k + 16))
            else:
                there = tl.broadcast_to(k + g[:, None] * 32 < k_end, (G, BN))
                codes = tl.load(at_s + k // 32, mask=there, other=127)
                packed = tl.load(at_w + k // 2, mask=there[:, :, None], other=0)
                low_x = tl.load(at_x + k, mask=there[:, :, None], other=0.0)
                high_x = tl.load(at_x + (k + 16), mask=there[:, :, None], other=0.0)
            low, high = _fp4_values(packed, UPCAST)
            parts = low.to(tl.float32) * low_x.to(tl.float32)
            parts += high.to(tl.float32) * high_x.to(tl.float32)
            acc += tl.sum(parts, axis=2) * ue8m0(codes)
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
                    part *= ue8m0(tl.load(at_s + k // 32))
                else:
                    part *= ue8m0(tl.load(at_s + k // 32, mask=there, other=127))
            acc += part
    return tl.sum(acc, axis=0)


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
        j = tl.arange(0, 16)
        half = tl.arange(0, G * 16)
        at_w = (n * (K // 2))[None, :, None] + g[:, None, None] * 16
        at_w += _byte_order(j, UPCAST)[None, None, :]
        at_x = rows[:, None] + ((half // 16) * 32 + half % 16)[None, :]
        at_s = (n * (K // 32))[None, :] + g[:, None]
        for k in range(k_begin, k_end, BK):
            if EVEN:
                keep_x = tl.broadcast_to(inside[:, None], (BM, G * 16))
                packed = tl.load(w_ptr + at_w + k // 2)
                codes = tl.load(s_ptr + at_s + k // 32)
            else:
                keep_x = inside[:, None] & (k + (half // 16) * 32 < k_end)[None, :]
                there = tl.broadcast_to(k + g[:, None] * 32 < k_end, (G, BN))
                packed = tl.load(w_ptr + at_w + k // 2, mask=there[:, :, None], other=0)
                codes = tl.load(s_ptr + at_s + k // 32, mask=there, other=127)
            low_x = tl.load(x_ptr + at_x + k, mask=keep_x, other=0.0)
            high_x = tl.load(x_ptr + at_x + (k + 16), mask=keep_x, other=0.0)
            low, high = _fp4_scaled(packed, ue8m0(codes), UPCAST)
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
                codes = tl.load(s_ptr + at_s + k // 32)
            else:
                keep_x = inside[:, None] & (k + across < k_end)[None, :]
                there = tl.broadcast_to(k + g[:, None] * 32 < k_end, (G, BN))
                w = tl.load(w_ptr + at_w + k, mask=there[:, :, None], other=0.0)
                codes = tl.load(s_ptr + at_s + k // 32, mask=there, other=127)
            x = tl.load(x_ptr + rows[:, None] + (k + across)[None, :], mask=keep_x, other=0.0)
            w = _fp8_scaled(w, ue8m0(codes), UPCAST)
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
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Let the next kernel start, then wait until the one before has finished.

    With programmatic dependent launch the start of a kernel lies under the end of the one before.
    Nothing that an earlier kernel wrote or still reads may be touched before this; weights may.
    """
    if OVERLAP > 0:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


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


def counters(device: torch.device | str, count: int) -> Tensor:
    """Return zeroed counters for kernels whose last program finishes; each launch clears its own.

    Two launches that may overlap need counters of their own.
    """
    return torch.zeros(count, dtype=torch.int32, device=device)
