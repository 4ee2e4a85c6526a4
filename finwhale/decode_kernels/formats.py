"""Packed numbers inside Triton kernels: E2M1 pairs, E4M3, UE8M0, read and written.

Channels always travel as two planes, the even ones and the odd ones: a byte of E2M1 codes holds one
of each, RoPE turns such a pair, and no plane has to be woven into the other before a product. The
easy mistake: native bf16 arithmetic, which Triton's interpreter gets wrong; what is not fp32 here
sits behind `FAST`, which the interpreter's tests switch off. Meaning: `finwhale.ops.codecs`.
Source: spec/backbone.md section 9.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What a plane is multiplied by; an exact power of two that the reader takes out of a sum again.
PLANE_SHRINK = tl.constexpr(2.0**-64)
PLANE_GROW = tl.constexpr(2.0**64)

# Two codes at a time, 16 bits each. The multiplication copies a nibble to bits 9..6 and 15..12, and
# the mask keeps its magnitude at 8..6 and its sign at 15: as bf16, the code's value times 2^-126
# (the subnormal of one format becomes that of the other). One exact product adds the scale.
_DECODE_FOUR_BYTES = tl.constexpr("""
{
.reg .b32 t, a;
prmt.b32 t, $4, 0, 0x4140;
and.b32 a, t, 0x000F000F;  mul.lo.u32 a, a, 0x1040;  and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $0, a, $5;
and.b32 a, t, 0x00F000F0;  mul.lo.u32 a, a, 0x0104;  and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $2, a, $5;
prmt.b32 t, $4, 0, 0x4342;
and.b32 a, t, 0x000F000F;  mul.lo.u32 a, a, 0x1040;  and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $1, a, $6;
and.b32 a, t, 0x00F000F0;  mul.lo.u32 a, a, 0x0104;  and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $3, a, $6;
}
""")

# Four codes at a time, 8 bits each. A nibble's sign goes to bit 7 and its magnitude to bits 4..2:
# as E4M3, the code's value times 2^-6 (the subnormal of one format becomes that of the other).
_E4M3_OF_LOW = tl.constexpr("""
{
.reg .b32 sign, size;
shl.b32 sign, $1, 4;  and.b32 sign, sign, 0x80808080;
shl.b32 size, $1, 2;  and.b32 size, size, 0x1C1C1C1C;
or.b32 $0, size, sign;
}
""")
_E4M3_OF_HIGH = tl.constexpr("""
{
.reg .b32 sign, size;
and.b32 sign, $1, 0x80808080;
shr.u32 size, $1, 2;  and.b32 size, size, 0x1C1C1C1C;
or.b32 $0, size, sign;
}
""")


@triton.jit
def e2m1_value(code):
    """Return the fp32 value of codes 0..15 (int32): as fp16 bits they stand for value * 2^-14."""
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def ue8m0_value(code):
    """Return 2^(code - 127) in fp32; 0 is the subnormal 2^-127, 255 is NaN."""
    wide = code.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(code):
    """Return the fp32 value of E4M3 codes (uint8); 0x7F and 0xFF are NaN."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_planes(packed, scale, FAST: tl.constexpr):
    """Return the even and the odd channels of bytes of E2M1 pairs, times scale and PLANE_SHRINK.

    packed  uint8
    scale   fp32 of the same shape with at most 8 significant bits, in 2^-60 to 2^65 or 0 or NaN;
            a smaller one may give 0, a larger one infinity
    The planes are bf16 if FAST, else fp32; both hold the values exactly.
    """
    if FAST:
        even, odd = tl.inline_asm_elementwise(
            asm=_DECODE_FOUR_BYTES,
            constraints="=&r,=&r,=&r,=&r,r,r,r",
            args=[packed, (scale * 4611686018427387904.0).to(tl.bfloat16)],  # 2^(126 - 64)
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = packed.to(tl.int32)
        even = e2m1_value(wide & 15) * (scale * PLANE_SHRINK)
        odd = e2m1_value(wide >> 4) * (scale * PLANE_SHRINK)
    return even, odd


@triton.jit
def e2m1_as_e4m3(packed, FAST: tl.constexpr):
    """Return the even and the odd channels of bytes of E2M1 pairs, times 2^-6, without scales.

    The planes are E4M3 if FAST, else fp32; both hold the values exactly.
    """
    if FAST:
        even = tl.inline_asm_elementwise(
            asm=_E4M3_OF_LOW, constraints="=r,r", args=[packed], dtype=tl.uint8, is_pure=True,
            pack=4,
        )  # fmt: skip
        odd = tl.inline_asm_elementwise(
            asm=_E4M3_OF_HIGH, constraints="=r,r", args=[packed], dtype=tl.uint8, is_pure=True,
            pack=4,
        )  # fmt: skip
        even = even.to(tl.float8e4nv, bitcast=True)
        odd = odd.to(tl.float8e4nv, bitcast=True)
    else:
        wide = packed.to(tl.int32)
        even = e2m1_value(wide & 15) * 0.015625
        odd = e2m1_value(wide >> 4) * 0.015625
    return even, odd


@triton.jit
def e4m3_planes(pairs, scale, FAST: tl.constexpr):
    """Return the even and the odd channels of two E4M3 codes per int16, times their scale.

    As `e2m1_planes`; the scale is a power of two above 2^-50.
    """
    wide = pairs.to(tl.int32)
    even = e4m3_value((wide & 255).to(tl.uint8)) * (scale * PLANE_SHRINK)
    odd = e4m3_value(((wide >> 8) & 255).to(tl.uint8)) * (scale * PLANE_SHRINK)
    if FAST:
        even = even.to(tl.bfloat16)
        odd = odd.to(tl.bfloat16)
    return even, odd


@triton.jit
def bf16_planes(pairs, FAST: tl.constexpr):
    """Return the even and the odd channels of two bf16 values per int32: bf16 if FAST, else fp32.

    The upper half of an fp32 is the bf16 of the same value.
    """
    even = (pairs << 16).to(tl.float32, bitcast=True)
    odd = (pairs & -65536).to(tl.float32, bitcast=True)
    if FAST:
        even = even.to(tl.bfloat16)
        odd = odd.to(tl.bfloat16)
    return even, odd


@triton.jit
def bf16_bits(x):
    """Return fp32 values rounded to bf16 (nearest, ties to even) as int32 bits 15..0; NaN stays."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    kept = tl.where(x != x, 0x7FC00000, rounded)
    return (kept >> 16) & 0xFFFF


@triton.jit
def bf16_rounded(x):
    """Return fp32 values that bf16 holds: x rounded to the nearest, ties to even."""
    return (bf16_bits(x) << 16).to(tl.float32, bitcast=True)


@triton.jit
def ceil_power_of_two(x):
    """Return UE8M0 codes (int32): the exponent of x, plus one if any mantissa bit is set."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.minimum(((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 254)


@triton.jit
def e4m3_code(x):
    """Return E4M3 codes (int32) of fp32 values, nearest and ties to even, saturating at 448.

    A NaN stays one; compiled, the lesser of it and 448 would be 448.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    own = size.to(tl.int32, bitcast=True)
    normal = ((own + 0x7FFFF + ((own >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 the code counts steps of 2^-9; the addition rounds as the format does.
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(size < 0.015625, small, normal) | ((bits >> 24) & 128)
    return tl.where(x == x, code, 127)


@triton.jit
def e2m1_code(x):
    """Return E2M1 codes (int32) of fp32 values, nearest and ties to the even code, saturating."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32)
    code += (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
