"""Engram: n-gram hashing into table rows, and the gate that adds the looked-up value.

Hashes are 64-bit integers end to end; multipliers exceed 2^53 and must never pass through a
double. The n-gram window stops at the start of the document and at image spans, and at nothing
else. Source: spec/backbone.md sections 7.4 to 7.6.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def engram_multipliers(layer_id: int, max_ngram_size: int, compressed_vocab_size: int) -> Tensor:
    """Return the odd hash multipliers of one layer, [n] int64; index k belongs to look-back k.

    Section 7.4: PCG64 seeded with 10007 * layer_id, so that every product stays below 2^63.
    """
    bound = ((2**63 - 1) // compressed_vocab_size) // 2
    drawn = np.random.default_rng(10007 * layer_id).integers(
        0, bound, size=max_ngram_size, dtype=np.int64
    )
    return torch.from_numpy(2 * drawn + 1)


def engram_rows(
    ids: Tensor,
    positions: Tensor,
    dead: Tensor | None,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    """Return the table rows of every token.

    h_1 = c_0 M_0;  h_n = h_(n-1) xor c_(n-1) M_(n-1);  row = h_n mod prime + offset
    c_k is the compressed id k tokens back, or `pad_id` before the document or once a dead
    position was met (which then hides all farther ones).

    ids        [B, T] int64 compressed ids
    positions  [B, T] int64 position within the document
    dead       [B, T] bool, image positions; None if there are none
    primes     [n - 1, heads] int64
    offsets    [n - 1, heads] int64
    returns    [B, T, (n - 1) * heads] int64

    Section 7.5.
    """
    blocked = torch.zeros_like(ids, dtype=torch.bool)
    hashed = torch.zeros_like(ids)
    rows = []
    for back in range(multipliers.numel()):
        shifted = torch.nn.functional.pad(ids, (back, 0), value=pad_id)[:, : ids.shape[1]]
        blocked = blocked | (positions < back)
        if dead is not None:
            blocked = blocked | torch.nn.functional.pad(dead, (back, 0))[:, : ids.shape[1]]
        hashed = hashed ^ (torch.where(blocked, pad_id, shifted) * multipliers[back])
        if back:
            rows.append(hashed.unsqueeze(-1) % primes[back - 1] + offsets[back - 1])
    return torch.cat(rows, dim=-1)


def engram_gate(
    streams: Tensor,
    keys: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    sigmoid=torch.sigmoid,
) -> Tensor:
    """Return X_s + gate_s * value, with gate_s a sigmoid of a signed root of a normalised dot.

    dot_s  = sum_d X qw kw key * rsqrt(mean X^2 + eps) * rsqrt(mean key^2 + eps) / sqrt(C)
    gate_s = sigmoid(copysign(sqrt(max(|dot_s|, 1e-6)), dot_s))

    streams, keys       [..., N, C]
    value               [..., C]
    q_weight, k_weight  [N, C]; only their product matters
    returns             [..., N, C] in the dtype of streams

    Section 7.6. At dot = 0 the sign of zero decides (D06).
    """
    x, key = streams.float(), keys.float()
    dot = (x * (q_weight.float() * k_weight.float()) * key).sum(-1)  # [..., N]
    dot = dot * torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = dot * x.shape[-1] ** -0.5
    gate = sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return (x + gate.unsqueeze(-1) * value.float().unsqueeze(-2)).to(streams.dtype)
