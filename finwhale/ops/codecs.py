"""Number formats, bit by bit: E4M3, E2M1 and UE8M0 codes, and packing of two codes per byte.

Everything here is exact integer or fp32 work; which groups share a scale is decided in
`rounding.py` (activations and cache) and `weight_formats.py` (checkpoint). The easy mistake:
taking a scale exponent from a float log2, which is off by one at exact powers of two; it is
read from the fp32 bit pattern instead. Source: spec/backbone.md section 9.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
# Codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign.
# Halfway points between neighbours, and whether the tie goes up (to the even code).
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_TIE_UP = (False, True, False, True, False, True, False)


def ceil_power_of_two(x: Tensor) -> Tensor:
    """Return 2^ceil(log2 x) as UE8M0 codes: the exponent of x, plus one if any mantissa bit is set.

    x        [...] fp32, positive and normal
    returns  [...] uint8, value 2^(code - 127)

    spec/backbone.md section 9.2.
    """
    bits = x.float().contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    # D11: beyond 2^127 the code saturates; 255 would read back as NaN.
    return (exponent + ((bits & 0x7FFFFF) != 0).int()).clamp(max=254).to(torch.uint8)


def ue8m0_decode(codes: Tensor) -> Tensor:
    """Return 2^(code - 127) in fp32; code 0 is the subnormal 2^-127, code 255 is NaN.

    codes [...] uint8 or float8_e8m0fnu
    """
    wide = codes.view(torch.uint8).to(torch.int32)
    bits = torch.where(wide == 0, 0x00400000, wide << 23)
    return torch.where(wide == 255, 0x7FC00000, bits).view(torch.float32)


def e4m3_encode(x: Tensor) -> Tensor:
    """Round fp32 to E4M3 (nearest, ties to even), saturating at 448. Returns float8_e4m3fn."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e2m1_encode(x: Tensor) -> Tensor:
    """Round fp32 to E2M1 codes (nearest, ties to the even code), saturating at 6.

    returns  [...] uint8 in 0..15; a negative input that rounds to zero gives code 8 (minus zero)

    spec/backbone.md section 9.4.
    """
    magnitude = x.float().abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for midpoint, tie_up in zip(_E2M1_MIDPOINTS, _E2M1_TIE_UP, strict=True):
        code += (magnitude >= midpoint if tie_up else magnitude > midpoint).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Return the fp32 value of E2M1 codes 0..15. codes [...] uint8."""
    wide = codes.int()
    mantissa, exponent = wide & 1, (wide >> 1) & 3
    # In halves: 0 and 1 where the exponent is 0, else 2 or 3 times a power of two. Arithmetic, not
    # a table: a table would be copied to the device at every call.
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp_min(0))
    return halves.float() * torch.where(wide >= 8, -0.5, 0.5)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes [..., 2n] uint8 into [..., n] uint8: low nibble column 2i, high nibble 2i+1."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`: [..., n] (uint8 or int8) to [..., 2n] uint8."""
    raw = packed.view(torch.uint8)
    return torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)
