"""The four activation and cache roundings: what is stored, and the value read back.

Each `quantize_*` gives codes and scales as a cache would hold them; each `round_*` is
dequantise(quantise(x)) in the dtype of x, which is what attention and the matrix products see.
Rounding is part of the model, not an optimisation: it changes which entries are selected.
The input is used as it comes; in `release` numerics it has been rounded to bf16 before, since an
fp32 value can shift the power-of-two bracket of its whole group.
Source: spec/backbone.md sections 9.1 to 9.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finwhale.ops.codecs import (
    E2M1_MAX,
    ceil_power_of_two,
    e2m1_decode,
    e2m1_encode,
    e4m3_encode,
    pack_nibbles,
    ue8m0_decode,
    unpack_nibbles,
)

# fl32(1/448) and fl32(1/6): the reference multiplies by the rounded reciprocal. A zero-dim CPU
# tensor takes part in a product on any device without a copy.
_INV_448 = torch.tensor(1.0 / 448.0, dtype=torch.float32)
_INV_6 = torch.tensor(1.0 / 6.0, dtype=torch.float32)


def _groups(x: Tensor, size: int) -> Tensor:
    if x.shape[-1] % size:
        raise ValueError(f"rounding: last dim is {x.shape[-1]}, expected a multiple of {size}")
    return x.float().unflatten(-1, (-1, size))  # [..., D/size, size]


def _round(x: Tensor, size: int, quantize, dequantize) -> Tensor:
    """Return dequantize(quantize(x)) in the dtype of x.

    No code can hold a NaN or an infinity, so a group with one becomes NaN as a whole: damage must
    reach the check that names its layer, not vanish as zeros.
    """
    finite = torch.isfinite(_groups(x, size)).all(-1, keepdim=True)
    y = dequantize(*quantize(x)).unflatten(-1, (-1, size))
    return torch.where(finite, y, torch.nan).flatten(-2).to(x.dtype)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes [..., D] and UE8M0 scales [..., D/32] uint8, groups of 32 channels.

    scale = 2^ceil(log2(max(amax, 1e-4) / 448)). Used for window KV and, in `release` numerics, for
    the input of every FP8 and FP4 matrix product. Section 9.2.
    """
    g = _groups(x, 32)
    amax = g.abs().amax(-1).clamp_min(1e-4)
    scales = ceil_power_of_two(amax * _INV_448)
    codes = e4m3_encode(g / ue8m0_decode(scales).unsqueeze(-1))
    return codes.flatten(-2), scales


def dequantize_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `quantize_fp8`, fp32 [..., D]."""
    return (codes.float().unflatten(-1, (-1, 32)) * ue8m0_decode(scales).unsqueeze(-1)).flatten(-2)


def round_fp8(x: Tensor) -> Tensor:
    """Return x [..., D] through FP8 and back, in its own dtype. Section 9.2."""
    return _round(x, 32, quantize_fp8, dequantize_fp8)


def quantize_main_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed E2M1 codes [..., D/2] uint8 and E4M3 scales [..., D/16], groups of 16.

    scale = E4M3(max(amax, 6 * 2^-9) / 6), no second-level scale. Section 9.3.
    """
    g = _groups(x, 16)
    scales = e4m3_encode(g.abs().amax(-1).clamp_min(E2M1_MAX * 2.0**-9) / E2M1_MAX)
    codes = e2m1_encode(g / scales.float().unsqueeze(-1))
    return pack_nibbles(codes.flatten(-2)), scales


def dequantize_main_kv(packed: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `quantize_main_kv`, fp32 [..., D]."""
    values = e2m1_decode(unpack_nibbles(packed)).unflatten(-1, (-1, 16))
    return (values * scales.float().unsqueeze(-1)).flatten(-2)


def round_main_kv(x: Tensor) -> Tensor:
    """Return x [..., D] through the FP4 main-KV format and back, in its own dtype. Section 9.3."""
    return _round(x, 16, quantize_main_kv, dequantize_main_kv)


def quantize_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed E2M1 codes [..., D/2] uint8 and UE8M0 scales [..., D/32] uint8 (MXFP4).

    scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)). Used for index queries and keys. Section 9.4.
    """
    g = _groups(x, 32)
    amax = g.abs().amax(-1).clamp_min(E2M1_MAX * 2.0**-126)
    scales = ceil_power_of_two(amax * _INV_6)
    codes = e2m1_encode(g / ue8m0_decode(scales).unsqueeze(-1))
    return pack_nibbles(codes.flatten(-2)), scales


def dequantize_index(packed: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `quantize_index`, fp32 [..., D]."""
    values = e2m1_decode(unpack_nibbles(packed)).unflatten(-1, (-1, 32))
    return (values * ue8m0_decode(scales).unsqueeze(-1)).flatten(-2)


def round_index(x: Tensor) -> Tensor:
    """Return x [..., D] through MXFP4 and back, in its own dtype. Section 9.4."""
    return _round(x, 32, quantize_index, dequantize_index)
