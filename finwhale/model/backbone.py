"""The text backbone: token ids in, fp32 logits out, all layers on all tokens.

This is the definition the faster paths are judged by. There is no control flow for the
encoder-decoder cut: it only says where the decoder's entries come from. Dequantised weights keep
their checkpoint names, so `state_dict()` is the checkpoint. Source: spec/backbone.md section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from finwhale.config import LayerSpec, ModelConfig, build_layer_specs
from finwhale.config.layers import Half, RopeKind
from finwhale.model.block import Block
from finwhale.model.continuation import Continuation, PagedRows
from finwhale.model.init import initialize
from finwhale.model.layers import ForwardState, Parts, RMSNorm
from finwhale.model.moe import Gate
from finwhale.model.numerics import Numerics
from finwhale.model.packing import Packing
from finwhale.model.selection_plan import SelectionPlan
from finwhale.ops import REFERENCE, Ops


class Table(nn.Module):
    """One matrix `weight` [V, C]: the token embedding, or the untied head."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim, dtype=dtype))


def _check_finite(layer: int, streams: Tensor, state: ForwardState) -> None:
    """Refuse to go on, and so to store anything, once a stream holds a NaN or an infinity."""
    finite = torch.isfinite(streams).flatten(2).all(-1)  # [B, T]
    if not finite.all():
        position = int(state.packing.positions[~finite][0])
        raise ValueError(f"layer {layer}: streams are not finite at position {position}")


class Backbone(nn.Module):
    """`embed`, `layers.L`, `norm`, `head`.

    token_map  [V] int64 compressed Engram id of each token id; None means the identity, which is
               only right when engram_compressed_vocab_size equals vocab_size
    """

    def __init__(
        self,
        config: ModelConfig,
        token_map: Tensor | None = None,
        numerics: Numerics | None = None,
        ops: Ops = REFERENCE,
    ):
        super().__init__()
        c = config.text_config
        self.config, numerics = config, numerics or Numerics()
        self.specs = build_layer_specs(c)
        self.parts = Parts(config=c, numerics=numerics, ops=ops)
        self.embed = Table(c.vocab_size, c.hidden_size, numerics.parameter_dtype)
        self.layers = nn.ModuleList(Block(self.parts, spec) for spec in self.specs)
        self.norm = RMSNorm(self.parts, c.hidden_size)
        self.head = Table(c.vocab_size, c.hidden_size, numerics.parameter_dtype)
        self.token_map = self._checked_token_map(token_map) if c.engram_layer_ids else None
        self.pad_id = 0 if self.token_map is None else int(self.token_map[c.engram_pad_token_id])
        with torch.device("cpu"):
            self.frequencies = {
                RopeKind.WINDOW: ops.rope_frequencies(c.rope_theta, c.qk_rope_head_dim, None),
                RopeKind.COMPRESSED: ops.rope_frequencies(
                    c.compress_rope_theta, c.qk_rope_head_dim, c.rope_scaling
                ),
            }

    def _checked_token_map(self, token_map: Tensor | None) -> Tensor:
        c = self.config.text_config
        with torch.device("cpu"):
            if token_map is None:
                if c.engram_compressed_vocab_size != c.vocab_size:
                    raise ValueError(
                        f"token_map: missing; engram_compressed_vocab_size is "
                        f"{c.engram_compressed_vocab_size} of {c.vocab_size} ids, so the map of "
                        "the tokenizer is needed"
                    )
                token_map = torch.arange(c.vocab_size)
            token_map = torch.as_tensor(token_map, dtype=torch.int64)
            distinct = int(token_map.unique().numel())
            if token_map.shape != (c.vocab_size,) or distinct != c.engram_compressed_vocab_size:
                raise ValueError(
                    f"token_map: {tuple(token_map.shape)} with {distinct} distinct ids, expected "
                    f"({c.vocab_size},) with engram_compressed_vocab_size = "
                    f"{c.engram_compressed_vocab_size}"
                )
        return token_map

    @property
    def numerics(self) -> Numerics:
        return self.parts.numerics

    def round_cache(self, on: bool) -> None:
        """Round cached rows to their storage formats from now on, or stop doing so."""
        self.parts.numerics = replace(self.parts.numerics, cache_rounding=on)

    def to_device(self, device: torch.device | str) -> Backbone:
        """Move parameters and all derived constants: a forward pass then copies nothing."""
        self.to(device)
        if self.token_map is not None:
            self.token_map = self.token_map.to(device)
        self.frequencies = {kind: f.to(device) for kind, f in self.frequencies.items()}
        for layer in self.layers:
            if layer.engram is not None:
                layer.engram.to_device(device)
        return self

    def gates(self) -> list[Gate]:
        """Return every layer's router."""
        return [layer.ffn.gate for layer in self.layers]

    def stack_experts(self) -> None:
        """Train every layer's experts as two tensors (`MoE.stack_experts`), for grouped products.

        Call it when the model is on its device: moving it later would part views from their stack.
        """
        for layer in self.layers:
            layer.ffn.stack_experts()

    def share_experts(self, stacked: Backbone) -> None:
        """Read the experts from the stacks of another model of equal weights: one copy for both."""
        for layer, other in zip(self.layers, stacked.layers, strict=True):
            layer.ffn.share_experts(other.ffn)

    def trained_tensors(self) -> dict[str, Tensor]:
        """Return what an optimiser may own, by name: the parameters, experts stacked or single."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            if not (".ffn.experts." in name and self.layers[0].ffn.stacks):
                found[name] = parameter
        for layer, block in enumerate(self.layers):
            for name, stack in block.ffn.stacks.items():
                found[f"layers.{layer}.ffn.experts.{name}"] = stack
        return found

    def init_weights(self, seed: int) -> None:
        """Draw every parameter deterministically from `seed`; no tensor is left undefined."""
        initialize(self, seed)

    def forward(self, ids: Tensor, **options) -> Tensor:
        """Return logits [B, T, V] fp32. Options as in `hidden`."""
        return self.logits(self.hidden(ids, **options))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [..., V] of normalised hidden states [..., C]."""
        return self.parts.ops.linear(hidden.float(), self.head.weight)

    def hidden(
        self,
        ids: Tensor,
        *,
        packing: Packing | None = None,
        image_mask: Tensor | None = None,
        trace: dict[str, Any] | None = None,
        state: ForwardState | None = None,
        plan: SelectionPlan | None = None,
    ) -> Tensor:
        """Return the normalised collapsed streams after the last layer, [B, T, C].

        ids         [B, T] int64
        packing     document layout; None means one document per row
        image_mask  [B, T] bool, tokens inside image spans
        trace       filled with detached copies: `streams.L` before layer L, `topk.L`,
                    `candidates.L`, `gate_ids.L`, `engram_rows.L`, and what the caches round
                    (`*_raw.L`)
        plan        how a training pass selects; its caller has checked the ids
        """
        if plan is None:
            self.check_ids(ids)
        if not ids.numel():
            return self.embed.weight.new_zeros(*ids.shape, self.config.text_config.hidden_size)
        if state is None:
            state = self.forward_state(ids, packing=packing, image_mask=image_mask, trace=trace)
            state.plan = plan
        streams, pre = self.run_layers(*self.embed_streams(ids), state, self.specs)
        state.note(f"streams.{len(self.specs)}", streams)
        return self.collapsed(streams, pre)

    def check_ids(self, ids: Tensor, start: int = 0) -> None:
        """Raise ValueError unless ids is [B, T] int64 inside vocabulary and context length.

        start  position of the first token
        """
        vocab = self.config.text_config.vocab_size
        longest = self.config.text_config.max_position_embeddings
        if ids.dim() != 2 or ids.dtype != torch.int64:
            raise ValueError(f"ids: got {tuple(ids.shape)} {ids.dtype}, expected [B, T] int64")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ValueError(
                f"ids: range {int(ids.min())}..{int(ids.max())}, expected 0..{vocab - 1}"
            )
        if start + ids.shape[1] > longest:
            raise ValueError(
                f"ids: {start + ids.shape[1]} tokens, but max_position_embeddings is {longest}"
            )

    def embed_streams(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the initial streams [B, T, N, C] and the one-hot mix [B, T, N]."""
        num = self.config.text_config.hc_mult
        streams = nn.functional.embedding(ids, self.embed.weight).to(self.numerics.dtype)
        pre = torch.zeros(*ids.shape, num, device=ids.device)
        pre[..., 0] = 1.0
        return streams.unsqueeze(-2).repeat(1, 1, num, 1), pre

    def run_layers(
        self, streams: Tensor, pre: Tensor, state: ForwardState, specs: Sequence[LayerSpec]
    ) -> tuple[Tensor, Tensor]:
        """Run the layers of `specs` in order; return the streams and the mix that leave them."""
        for spec in specs:
            state.note(f"streams.{spec.layer_id}", streams)
            if spec.half is Half.DECODER:
                self.note_encoder_output(streams, pre, state)
            streams, pre = self.layers[spec.layer_id](streams, pre, state, self.pad_id)
            if state.continuation is not None and state.paged is None:
                _check_finite(spec.layer_id, streams, state)
        return streams, pre

    def paged_state(self, paged: PagedRows, positions: Tensor, compressed: Tensor) -> ForwardState:
        """Return the shared state of an engine's pass over rows of many sequences.

        positions   [1, T] int64 position of every row in its sequence
        compressed  [1, T'] int64 compressed ids of the rows, their histories among them
        """
        lengths = ((positions.shape[1],),)
        return ForwardState(
            packing=Packing(positions=positions, is_single=True, lengths=lengths),
            continuation=paged,
            paged=paged,
            compressed_ids=compressed,
            frequencies=self.frequencies,
        )

    def note_encoder_output(self, streams: Tensor, pre: Tensor, state: ForwardState) -> None:
        """Keep what leaves the encoder, once, if decoder owners read it (`ced_kv_from`)."""
        if self.config.text_config.ced_kv_from == "encoder_output" and state.encoder_output is None:
            state.encoder_output = self.parts.ops.hyper_collapse(streams, pre)

    def collapsed(self, streams: Tensor, pre: Tensor) -> Tensor:
        """Return the normalised collapsed streams [B, T, C]: what the head reads."""
        return self.norm(self.parts.ops.hyper_collapse(streams, pre))

    def forward_state(
        self,
        ids: Tensor,
        *,
        packing: Packing | None = None,
        image_mask: Tensor | None = None,
        trace: dict[str, Any] | None = None,
    ) -> ForwardState:
        """Return the empty shared state of one forward pass over `ids`."""
        if packing is None:
            packing = Packing.whole(*ids.shape, device=ids.device)
        if packing.positions.shape != ids.shape:
            raise ValueError(
                f"packing: layout of {tuple(packing.positions.shape)}, ids are {tuple(ids.shape)}"
            )
        if self.token_map is not None and self.token_map.device != ids.device:
            self.token_map = self.token_map.to(ids.device)
        return ForwardState(
            packing=packing,
            image_mask=image_mask,
            compressed_ids=None if self.token_map is None else self.token_map[ids],
            trace=trace,
            frequencies={k: f.to(ids.device) for k, f in self.frequencies.items()},
        )

    def continued_state(
        self, continuation: Continuation, ids: Tensor, trace: dict[str, Any] | None = None
    ) -> ForwardState:
        """Return the shared state of a pass over rows [start, stop) of a sequence.

        ids  [1, h + T] the ids of these rows behind up to three earlier ones, for n-grams
        """
        if self.token_map is not None and self.token_map.device != ids.device:
            self.token_map = self.token_map.to(ids.device)
        return ForwardState(
            packing=Packing(
                positions=continuation.positions(ids.device),
                is_single=True,
                lengths=((continuation.stop - continuation.start,),),
            ),
            continuation=continuation,
            compressed_ids=None if self.token_map is None else self.token_map[ids],
            trace=trace,
            frequencies={k: f.to(ids.device) for k, f in self.frequencies.items()},
        )
