"""Root-mean-square normalisation with a plain weight (not 1 + w)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return w * x * rsqrt(mean(x^2) + eps), computed in fp32, in the dtype of x.

    x        [..., D]
    weight   [D]

    An all-zero row gives zeros. spec/backbone.md, conventions.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * (wide * scale)).to(x.dtype)
