"""One layer: Engram if it has one, then attention and experts between hyper-connections.

The collapse before each sublayer uses the mix computed one site earlier: attention the mix of
the previous layer's expert site, the experts the mix of this layer's attention site.
Source: spec/backbone.md sections 6 and 13.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from finwhale.config import LayerSpec
from finwhale.model.attention import Attention
from finwhale.model.engram import Engram
from finwhale.model.layers import ForwardState, Parts, RMSNorm
from finwhale.model.moe import MoE


class Block(nn.Module):
    """The `layers.L.*` tensors."""

    def __init__(self, parts: Parts, spec: LayerSpec):
        super().__init__()
        c = parts.config
        self.parts, self.spec = parts, spec
        self.engram = Engram(parts, spec) if spec.has_engram else None
        self.attn_norm = RMSNorm(parts, c.hidden_size)
        self.attn = Attention(parts, spec)
        self.ffn_norm = RMSNorm(parts, c.hidden_size)
        self.ffn = MoE(parts, spec)
        mix, width = (2 + c.hc_mult) * c.hc_mult, c.hc_mult * c.hidden_size
        for site in ("attn", "ffn"):
            for name, shape in (("fn", (mix, width)), ("base", (mix,)), ("scale", (3,))):
                parameter = nn.Parameter(torch.empty(shape, dtype=torch.float32))
                self.register_parameter(f"hc_{site}_{name}", parameter)

    def _mix(self, site: str, streams: Tensor):
        c = self.parts.config
        return self.parts.ops.hyper_mix(
            streams,
            getattr(self, f"hc_{site}_fn"),
            getattr(self, f"hc_{site}_base"),
            getattr(self, f"hc_{site}_scale"),
            iterations=c.hc_sinkhorn_iters,
            norm_eps=c.rms_norm_eps,
            eps=c.hc_eps,
        )

    def _entry_input(self, state: ForwardState) -> Tensor | None:
        if not self.spec.owns_kv or state.encoder_output is None:
            return None
        return self.attn_norm(state.encoder_output)

    def publish(self, streams: Tensor, pre: Tensor, state: ForwardState) -> None:
        """Make this owner's entries and index keys without running the layer (section 3).

        streams  [B, T, N, C] and pre [B, T, N] as they would enter `forward`
        """
        x = self._entry_input(state)
        if x is None:
            x = self.attn_norm(self.parts.ops.hyper_collapse(streams, pre))
        self.attn.publish(x, state)

    def forward(self, streams: Tensor, pre: Tensor, state: ForwardState, pad_id: int):
        """Return the updated streams and the mix for the next collapse, of `state.kept` rows.

        streams  [B, T, N, C]
        pre      [B, T, N] fp32 mix of the site before

        A row that is not kept leaves its window row and nothing else.
        """
        ops, layer = self.parts.ops, self.spec.layer_id
        if self.engram is not None:
            streams = self.engram(streams, state, pad_id)
        kept = state.of_kept(streams)
        state.layer_tokens[layer] = state.layer_tokens.get(layer, 0) + kept.shape[1]
        mix = self._mix("attn", kept)
        x = self.attn_norm(ops.hyper_collapse(streams, pre))
        state.note(f"attn_in.{layer}", x)
        y = self.attn(x, state, self._entry_input(state))
        streams = ops.hyper_expand(y, kept, mix.post, mix.comb)
        pre, mix = mix.pre, self._mix("ffn", streams)
        z = self.ffn_norm(ops.hyper_collapse(streams, pre))
        state.note(f"ffn_in.{layer}", z)
        streams = ops.hyper_expand(self.ffn(z, state), streams, mix.post, mix.comb)
        return streams, mix.pre
