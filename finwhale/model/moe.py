"""Mixture of experts: fp32 router, routed experts with a clamped SwiGLU, one shared expert.

Text and image tokens have a correction bias each; a bias picks experts and never scales them.
Source: spec/backbone.md section 8.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from finwhale.config import LayerSpec
from finwhale.model.layers import ForwardState, Linear, Parts


class Gate(nn.Module):
    """Router: `weight` [X, C], `bias` and `bias_vl` [X] fp32 (buffers: no gradient trains them)."""

    def __init__(self, parts: Parts):
        super().__init__()
        c = parts.config
        self.parts = parts
        shape = (c.n_routed_experts, c.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=parts.numerics.dtype))
        self.register_buffer("bias", torch.empty(c.n_routed_experts, dtype=torch.float32))
        self.register_buffer("bias_vl", torch.empty(c.n_routed_experts, dtype=torch.float32))

    def forward(self, z: Tensor, is_image: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return expert ids and weights [N, k]. z [N, C], is_image [N] bool or None."""
        c, ops = self.parts.config, self.parts.ops
        bias = self.bias
        if is_image is not None:
            bias = torch.where(is_image.unsqueeze(-1), self.bias_vl, self.bias)
        logits = ops.linear(z.float(), self.weight)
        return ops.route_experts(logits, bias, c.num_experts_per_tok, c.routed_scaling_factor)


class Expert(nn.Module):
    """`w1` gate, `w3` up, `w2` down."""

    def __init__(self, parts: Parts):
        super().__init__()
        c = parts.config
        self.limit, self.ops = c.swiglu_limit, parts.ops
        self.w1 = Linear(parts, c.hidden_size, c.moe_intermediate_size, "quantized")
        self.w2 = Linear(parts, c.moe_intermediate_size, c.hidden_size, "quantized")
        self.w3 = Linear(parts, c.hidden_size, c.moe_intermediate_size, "quantized")

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the expert's output. x [N, C], weight [N, 1] fp32 or None."""
        return self.w2(self.ops.clamped_swiglu(self.w1(x), self.w3(x), weight, self.limit))


class MoE(nn.Module):
    """The `ffn.*` tensors of one layer."""

    def __init__(self, parts: Parts, spec: LayerSpec):
        super().__init__()
        self.spec = spec
        self.gate = Gate(parts)
        self.experts = nn.ModuleList(Expert(parts) for _ in range(parts.config.n_routed_experts))
        self.shared_experts = Expert(parts)

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        """Return routed plus shared expert outputs, summed in fp32. x [B, T, C]."""
        z = x.flatten(0, -2)  # [N, C]
        is_image = None if state.image_mask is None else state.image_mask.flatten()
        ids, weights = self.gate(z, is_image)
        state.note(f"gate_ids.{self.spec.layer_id}", ids)
        state.note(f"gate_weights.{self.spec.layer_id}", weights)
        y = torch.zeros(z.shape, dtype=torch.float32, device=z.device)
        order = ids.flatten().sort(stable=True).indices  # (token, choice) pairs by expert
        tokens, sorted_weights = order // ids.shape[-1], weights.flatten()[order]
        counts = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
        start = 0
        # D12: ascending expert id, fp32 sum, the shared expert last, one rounding.
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                own = tokens[start : start + count]
                weight = sorted_weights[start : start + count, None]
                y = y.index_add(0, own, expert(z[own], weight).float())
                start += count
        return (y + self.shared_experts(z).float()).to(x.dtype).view(x.shape)
