"""The Engram module of one layer: table lookup, projection, gated addition to all streams.

It stands at the top of its layer, before the hyper-connection coefficients are computed, so
they see the updated streams. Source: spec/backbone.md section 7.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from finwhale.config import LayerSpec
from finwhale.model.layers import ForwardState, Linear, Parts
from finwhale.ops.engram import engram_multipliers


class EngramTable(nn.Module):
    """`weight` [rows, dim]; in the checkpoint FP8 with one scale per row and 32 columns."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim, dtype=dtype))


class Engram(nn.Module):
    """The `engram.*` tensors of one layer."""

    def __init__(self, parts: Parts, spec: LayerSpec):
        super().__init__()
        c = parts.config
        self.parts, self.spec = parts, spec
        rows = c.engram_num_embeddings[spec.engram_index]
        self.embed = EngramTable(rows, c.engram_head_dim, parts.numerics.parameter_dtype)
        inner, out = c.engram_columns * c.engram_head_dim, (c.hc_mult + 1) * c.hidden_size
        self.wkv = Linear(parts, inner, out, "quantized")
        shape = (c.hc_mult, c.hidden_size)
        self.q_weight = nn.Parameter(torch.empty(shape, dtype=parts.numerics.parameter_dtype))
        self.k_weight = nn.Parameter(torch.empty(shape, dtype=parts.numerics.parameter_dtype))
        # Derived from the config, so never in a checkpoint; plain tensors survive meta init.
        buckets = c.engram_buckets()[spec.engram_index]
        shape = (c.engram_max_ngram_size - 1, c.engram_n_heads)
        with torch.device("cpu"):
            self.primes = torch.tensor(buckets.primes, dtype=torch.int64).view(shape)
            self.offsets = torch.tensor(buckets.offsets, dtype=torch.int64).view(shape)
            self.multipliers = engram_multipliers(
                spec.layer_id, c.engram_max_ngram_size, c.engram_compressed_vocab_size
            )

    def to_device(self, device: torch.device | str) -> None:
        """Move the hash constants, which are no buffers."""
        self.primes, self.offsets = self.primes.to(device), self.offsets.to(device)
        self.multipliers = self.multipliers.to(device)

    def rows(self, state: ForwardState, pad_id: int) -> Tensor:
        """Return the table rows of every token, [B, T, J] int64."""
        ids, positions = state.compressed_ids, state.packing.positions
        earlier = ids.shape[1] - positions.shape[1]  # ids of tokens before this call
        own = slice(earlier, None)
        if state.paged is not None:
            positions, own = state.paged.engram_positions()
        elif earlier:
            positions = torch.cat(
                (positions[:, :1] + torch.arange(-earlier, 0, device=ids.device), positions), dim=1
            )
        rows = self.parts.ops.engram_rows(
            ids,
            positions,
            state.image_mask,
            self.multipliers.to(ids.device),
            self.primes.to(ids.device),
            self.offsets.to(ids.device),
            pad_id,
        )
        return rows[:, own]

    def forward(self, streams: Tensor, state: ForwardState, pad_id: int) -> Tensor:
        """Return the streams plus the gated value. streams [B, T, N, C]."""
        c = self.parts.config
        rows = self.rows(state, pad_id)
        state.note(f"engram_rows.{self.spec.layer_id}", rows)
        e = torch.nn.functional.embedding(rows, self.embed.weight).to(streams.dtype)
        e = e.flatten(-2)  # [B, T, J * dim]
        keys, value = self.wkv(e).split((c.hc_mult * c.hidden_size, c.hidden_size), dim=-1)
        updated = self.parts.ops.engram_gate(
            streams,
            keys.unflatten(-1, (c.hc_mult, c.hidden_size)),
            value,
            self.q_weight,
            self.k_weight,
            c.rms_norm_eps,
        )
        if state.image_mask is None:
            return updated
        return torch.where(state.image_mask[..., None, None], streams, updated)
