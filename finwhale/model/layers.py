"""The parameter holders that every module uses: Linear, RMSNorm, and the forward's shared facts.

Attribute names are checkpoint keys, so a state_dict needs no renaming. A Linear says which
products it makes: `input` is "quantized" (FP8 or FP4 weight, rounded input in release mode),
"plain" (compute dtype) or "fp32" (both sides promoted). Source: spec/backbone.md section 9.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from finwhale.config import LayerSpec, TextConfig
from finwhale.config.layers import RopeKind
from finwhale.model.continuation import Continuation, PagedRows
from finwhale.model.numerics import Numerics
from finwhale.model.packing import Groups, Packing
from finwhale.model.selection_plan import SelectionPlan
from finwhale.ops import Ops
from finwhale.ops.linear import straight_through
from finwhale.ops.rope import rope_rotation


@dataclass(kw_only=True, slots=True)
class Parts:
    """What every module of one model shares; `Backbone.round_cache` may replace the numerics."""

    config: TextConfig
    numerics: Numerics
    ops: Ops


class Linear(nn.Module):
    """y = x W^T without bias; `weight` [out, in] is the checkpoint's matrix, dequantised."""

    def __init__(self, parts: Parts, in_features: int, out_features: int, input: str):
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=parts.numerics.parameter_dtype)
        )
        self.input, self.ops = input, parts.ops
        self.is_release = parts.numerics.mode == "release"

    def forward(self, x: Tensor) -> Tensor:
        if self.input == "fp32":
            return self.ops.linear(x.float(), self.weight)
        if not self.is_release:
            return self.ops.linear(x, self.weight)
        if self.input == "quantized":
            x = self.ops.round_input(x)
        return self.ops.linear_release(x, self.weight)


class RMSNorm(nn.Module):
    """Plain-weight RMSNorm, `weight` [D]."""

    def __init__(self, parts: Parts, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=parts.numerics.parameter_dtype))
        self.eps, self.ops = parts.config.rms_norm_eps, parts.ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


def rounded(parts: Parts, rounding, x: Tensor) -> Tensor:
    """Return x as the cache would give it back; gradients pass straight through."""
    return straight_through(rounding, x) if parts.numerics.cache_rounding else x


@dataclass(kw_only=True, slots=True)
class ForwardState:
    """What the layers of one forward pass share; keyed by owner layer, never one global slot.

    entries[L], index_keys[L]  [B, M, D], [B, M, DI] as the cache would return them
    topk[L]                    [B, T, K] int64 rows of the owner's entries, -1 padded
    pool_blocks                [B, T, P] int64 blocks of the candidate pool, from document start
    encoder_output             [B, T, C] collapsed streams at the encoder-decoder cut, or None
    plan                       how a training pass selects (selection_plan.py); None: as deployed
    paged                      packed pools under many sequences (an engine's pass), or None
    kept                       [T'] rows whose output is read (an engine's pass); None: all T
    layer_tokens[L]            rows whose output layer L has made
    stale_keys, stale_rows     [B, M, DI], [B, T] bool: stale_slot.py; None by the default rule
    """

    packing: Packing
    continuation: Continuation | PagedRows | None = None
    paged: PagedRows | None = None
    kept: Tensor | None = None
    image_mask: Tensor | None = None
    compressed_ids: Tensor | None
    trace: dict[str, Any] | None = None
    frequencies: dict[RopeKind, Tensor]
    entries: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    topk: dict[int, Tensor] = field(default_factory=dict)
    pool_blocks: Tensor | None = None
    encoder_output: Tensor | None = None
    plan: SelectionPlan | None = None
    stale_keys: Tensor | None = None
    stale_rows: Tensor | None = None
    layer_tokens: dict[int, int] = field(default_factory=dict)
    _groups: dict[tuple, Groups] = field(default_factory=dict)
    _rotations: dict[tuple, Tensor] = field(default_factory=dict)

    def groups(self, spec: LayerSpec) -> Groups:
        """Return the compression groups of the KV owner that a layer reads."""
        key = (spec.ratio, None if self.continuation is None else spec.kv_owner)
        if key not in self._groups:
            self._groups[key] = (
                self.packing.groups(spec.ratio)
                if self.continuation is None
                else self.continuation.groups(spec, self.packing.positions)
            )
        return self._groups[key]

    def token_rotation(self, spec: LayerSpec) -> Tensor:
        """Return the rotation at each token's position, [2, B, T, R/2]."""
        key = (spec.rope, 0)
        if key not in self._rotations:
            frequencies = self.frequencies[spec.rope]
            self._rotations[key] = rope_rotation(self.packing.positions, frequencies)
        return self._rotations[key]

    def query_rotation(self, spec: LayerSpec) -> Tensor:
        """Return the rotation at the position of each row whose output is read."""
        if self.kept is None:
            return self.token_rotation(spec)
        key = (spec.rope, -1)
        if key not in self._rotations:
            self._rotations[key] = self.token_rotation(spec)[:, :, self.kept]
        return self._rotations[key]

    def of_kept(self, x: Tensor) -> Tensor:
        """Return the rows of x [B, T, ...] whose output is read."""
        return x if self.kept is None else x[:, self.kept]

    def entry_rotation(self, spec: LayerSpec) -> Tensor:
        """Return the rotation at the first token of each entry's group, [2, B, M, R/2]."""
        key = (spec.rope, spec.ratio, spec.kv_owner)
        if key not in self._rotations:
            positions = self.groups(spec).positions
            self._rotations[key] = rope_rotation(positions, self.frequencies[spec.rope])
        return self._rotations[key]

    def cached(self, parts: Parts, rounding, x: Tensor) -> Tensor:
        """Return x as the cache would give it back; packed pools round when they store."""
        return x if self.paged is not None else rounded(parts, rounding, x)

    def window(self, layer: int, rows: Tensor) -> Tensor:
        """Return what windows of this call read: earlier rows, if any, then `rows` [B, T, D]."""
        if self.continuation is None:
            return rows
        return self.continuation.window_rows(layer, rows)

    def reach(self, spec: LayerSpec) -> Tensor:
        """Return [B, T] the number of rows before each token that its window may see at most."""
        if self.continuation is not None:
            return self.packing.positions - self.continuation.window_start
        if self.plan is not None:
            return self.plan.reach(spec, self.packing.positions)
        return self.packing.positions

    def publish(self, layer: int, entries: Tensor, keys: Tensor) -> None:
        """Make an owner's new entries and index keys readable, behind the earlier ones."""
        if self.continuation is not None:
            entries, keys = self.continuation.append(layer, entries, keys)
        self.entries[layer], self.index_keys[layer] = entries, keys

    def note(self, name: str, value: Tensor) -> None:
        """Keep a detached copy of `value` if the caller asked for a trace."""
        if self.trace is not None:
            self.trace[name] = value.detach().clone()
