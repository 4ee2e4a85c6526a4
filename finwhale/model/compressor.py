"""The compressor of a KV owner: token rows in, one un-rotated latent per group out.

The latent feeds the index keys first and is rotated and rounded for the cache afterwards; a
compressor that rotated in place would corrupt the selection silently.
Source: spec/backbone.md section 4.3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from finwhale.config import LayerSpec
from finwhale.model.layers import ForwardState, Linear, Parts, RMSNorm


class Compressor(nn.Module):
    """`wkv`, `wgate` (ratio 2 only) and `norm` of a KV owner."""

    def __init__(self, parts: Parts, spec: LayerSpec):
        super().__init__()
        c = parts.config
        self.spec = spec
        self.ops, self.dtype = parts.ops, parts.numerics.dtype
        pooled = spec.ratio > 1
        kind = "fp32" if pooled else "plain"
        self.wkv = Linear(parts, c.hidden_size, c.head_dim, input=kind)
        self.wgate = Linear(parts, c.hidden_size, c.head_dim, input=kind) if pooled else None
        self.norm = RMSNorm(parts, c.head_dim)

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        """Return the normalised, un-rotated latent of every complete group.

        x        [B, T, C] the owner's attention input
        returns  [B, M, D]

        The pooled value is rounded to the compute dtype before its norm (D07).
        """
        if state.continuation is not None:
            x = state.continuation.new_token_rows(self.spec, x)
        if self.wgate is None:
            return self.norm(self.wkv(x))
        if state.continuation is not None:
            rows = torch.stack((self.wkv(x), self.wgate(x)), dim=-2)  # [B, T, 2, D]
            content, gate = state.continuation.complete_groups(self.spec, rows).unbind(-2)
            return self.norm(self.ops.pool_group(content, gate).to(self.dtype))
        tokens = state.groups(self.spec).tokens  # [B, M, r]
        rows = tokens.flatten(1).unsqueeze(-1).expand(-1, -1, self.wkv.weight.shape[0])
        content, gate = (
            projected.gather(1, rows).unflatten(1, tokens.shape[1:])  # [B, M, r, D]
            for projected in (self.wkv(x), self.wgate(x))
        )
        return self.norm(self.ops.pool_group(content, gate).to(self.dtype))
