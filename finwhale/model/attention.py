"""CSA2 attention of one layer: query, window KV, entries by mode, sparse core, output.

Full makes entries and index keys and selects; Reindex selects anew among its owner's entries;
Reuse takes the selection it finds; Window has no entries. The layer table says which; nothing
here looks at a layer id to decide. Source: spec/backbone.md sections 4 and 5.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from finwhale.config import AttentionMode, LayerSpec
from finwhale.model.compressor import Compressor
from finwhale.model.indexer import Indexer
from finwhale.model.layers import ForwardState, Linear, Parts, RMSNorm


class Attention(nn.Module):
    """The `attn.*` tensors of one layer."""

    def __init__(self, parts: Parts, spec: LayerSpec):
        super().__init__()
        c = parts.config
        heads, dim = c.num_attention_heads, c.head_dim
        self.parts, self.spec = parts, spec
        self.wq_a = Linear(parts, c.hidden_size, c.q_lora_rank, "quantized")
        self.q_norm = RMSNorm(parts, c.q_lora_rank)
        self.wq_b = Linear(parts, c.q_lora_rank, heads * dim, "quantized")
        self.wkv = Linear(parts, c.hidden_size, dim, "quantized")
        self.kv_norm = RMSNorm(parts, dim)
        group_width = heads * dim // c.o_groups
        self.wo_a = Linear(parts, group_width, c.o_groups * c.o_lora_rank, "plain")
        self.wo_b = Linear(parts, c.o_groups * c.o_lora_rank, c.hidden_size, "quantized")
        self.attn_sink = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.compressor = Compressor(parts, spec) if spec.owns_kv else None
        self.indexer = Indexer(parts, spec) if spec.owns_topk else None

    def forward(self, x: Tensor, state: ForwardState, entry_input: Tensor | None = None) -> Tensor:
        """Return the attention output.

        x            [B, T, C] normalised collapsed streams
        entry_input  [B, T, C] what the compressor reads instead of x (general CED form), or None
        returns      [B, T', C] of the rows whose output is read; all T but in an engine's pass
        """
        c, ops, spec = self.parts.config, self.parts.ops, self.spec
        rotation, query_rotation = state.token_rotation(spec), state.query_rotation(spec)
        queries = state.of_kept(x)
        qr = self.q_norm(self.wq_a(queries))
        q = self.wq_b(qr).unflatten(-1, (c.num_attention_heads, c.head_dim))  # [B, T, H, D]
        q = ops.apply_rope(q, query_rotation)
        window_kv = ops.apply_rope(self.kv_norm(self.wkv(x)), rotation)  # [B, T, D]
        state.note(f"window_kv_raw.{spec.layer_id}", window_kv)
        window_kv = state.cached(self.parts, ops.round_window_kv, window_kv)
        self.publish(x if entry_input is None else entry_input, state)
        if self.indexer is not None:
            state.topk[spec.layer_id] = self.indexer(queries, qr, state)
            state.note(f"topk.{spec.layer_id}", state.topk[spec.layer_id])
        out = self._attend(state, q, window_kv)
        out = ops.apply_rope(out, query_rotation, inverse=True)
        # D10: wo_a reads bf16, its input is not rounded to FP8.
        grouped = out.flatten(-2).unflatten(-1, (c.o_groups, -1))  # [B, T, G, H/G * D]
        return self.wo_b(ops.grouped_linear(grouped, self.wo_a.weight))

    def _attend(self, state: ForwardState, q: Tensor, window_kv: Tensor) -> Tensor:
        """Return the attention core's output; whoever teaches the indexer sees where it looked."""
        spec = self.spec
        if state.paged is not None:
            return state.paged.attend(spec, q, window_kv, self.attn_sink)
        is_window = spec.mode is AttentionMode.WINDOW
        inputs = (
            q,
            state.window(spec.layer_id, window_kv),
            None if is_window else state.entries[spec.kv_owner],
            None if is_window else state.topk[spec.topk_owner],
            self.attn_sink,
            state.reach(spec),
            self.parts.config.sliding_window,
        )
        observer = None if state.plan is None else state.plan.observer
        if observer is None:
            return self.parts.ops.sparse_attention(*inputs)
        mass = None
        if observer.wants_mass(spec):
            out, mass = self.parts.ops.sparse_attention_with_mass(*inputs)
        else:
            out = self.parts.ops.sparse_attention(*inputs)
        observer.attended(spec, mass, inputs)
        return out

    def publish(self, entry_input: Tensor, state: ForwardState) -> None:
        """Make this owner's entries and index keys from `entry_input` [B, T, C], once per call."""
        ops, layer = self.parts.ops, self.spec.layer_id
        if self.compressor is None or layer in state.entries:
            return
        latent = self.compressor(entry_input, state)  # [B, M, D], not rotated
        # Index keys teach the indexer's own projection and nothing below it.
        keys = self.indexer.make_keys(latent.detach(), state)
        entries = ops.apply_rope(latent, state.entry_rotation(self.spec))
        state.note(f"entries_raw.{layer}", entries)
        state.publish(layer, state.cached(self.parts, ops.round_main_kv, entries), keys)
