"""Rotary positions: adjacent pairs of the last R channels, fp32 angles, two frequency tables.

Window-only layers use `rope_theta` as it is; every rotation of a layer that reads entries uses
`compress_rope_theta` blended by YaRN, at all lengths. The easy mistakes: rotating half-split
pairs (invisible at position 0), and the wrong table for the window keys of a compressed layer.
Source: spec/backbone.md section 4.7.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from finwhale.config.model import RopeScaling


def rope_frequencies(theta: float, dim: int, scaling: RopeScaling | None) -> Tensor:
    """Return the fp32 rotation per position of each channel pair, [dim/2].

    With `scaling`, pair i is divided by `factor` where YaRN's ramp is 1 and left alone where it
    is 0; the ramp runs between the pairs that turn beta_fast and beta_slow times over the original
    context. No magnitude factor. Section 4.7.
    """
    pairs = torch.arange(0, dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (theta ** (pairs / dim))
    if scaling is None:
        return frequencies

    def correction(turns: float) -> float:
        span = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), dim - 1)
    width = max(high - low, 0.001)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def rope_rotation(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return cos and sin of positions * frequencies, fp32.

    positions    [...] int64
    frequencies  [R/2] fp32
    returns      [2, ..., R/2]; the angle is the fp32 product, as in the reference
    """
    angles = positions.float().unsqueeze(-1) * frequencies  # [..., R/2]
    return torch.stack((angles.cos(), angles.sin()))


def apply_rope(x: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
    """Return x with its last R channels rotated pair by pair; `inverse` turns them back.

    x         [..., D] or [..., H, D]
    rotation  [2, ..., R/2], broadcast over a head dimension if x has one more

    Section 4.7; the inverse is the conjugate rotation of section 4.6.
    """
    cos, sin = rotation
    if x.dim() == cos.dim() + 1:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if inverse:
        sin = -sin
    width = 2 * cos.shape[-1]
    plain, last = x.split((x.shape[-1] - width, width), dim=-1)
    even, odd = last.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), dim=-1)
