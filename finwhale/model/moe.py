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
        self.weight = nn.Parameter(torch.empty(shape, dtype=parts.numerics.parameter_dtype))
        self.register_buffer("bias", torch.empty(c.n_routed_experts, dtype=torch.float32))
        self.register_buffer("bias_vl", torch.empty(c.n_routed_experts, dtype=torch.float32))

    def forward(self, z: Tensor, is_image: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return expert ids and weights [N, k], logits [N, X]. z [N, C], is_image [N] or None."""
        c, ops = self.parts.config, self.parts.ops
        bias = self.bias
        if is_image is not None:
            bias = torch.where(is_image.unsqueeze(-1), self.bias_vl, self.bias)
        logits = ops.linear(z.float(), self.weight)
        k, scaling = c.num_experts_per_tok, c.routed_scaling_factor
        return *ops.route_experts(logits, bias, k, scaling), logits


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


def _as_one(parts: list[Tensor]) -> Tensor:
    """Return the rows of `parts` as one matrix: a view where they lie one after the other."""
    first, at = parts[0].detach(), parts[0].storage_offset()
    for part in parts:
        is_next = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_next or part.storage_offset() != at or not part.is_contiguous():
            return torch.cat(parts)
        at += part.numel()
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


class MoE(nn.Module):
    """The `ffn.*` tensors of one layer."""

    def __init__(self, parts: Parts, spec: LayerSpec):
        super().__init__()
        self.parts, self.spec = parts, spec
        self.gate = Gate(parts)
        self.experts = nn.ModuleList(Expert(parts) for _ in range(parts.config.n_routed_experts))
        self.shared_experts = Expert(parts)
        self.stacks: dict[str, Tensor] = {}

    def stack_experts(self) -> None:
        """Join the experts' matrices in two trainable tensors that grouped products read.

        `w1_w3` [X * 2F, C] holds w1 and w3 of expert 0, then of expert 1; `w2` is [X * C, F]. The
        experts' own weights stay readable and writable under their names, as views without a
        gradient, so a checkpoint sees no difference. A thousand small matrices train as two.
        """
        with torch.no_grad():
            pairs = [m.weight for e in self.experts for m in (e.w1, e.w3)]
            self.stacks = {
                "w1_w3": _as_one(pairs),
                "w2": _as_one([e.w2.weight for e in self.experts]),
            }
            gate_up = self.stacks["w1_w3"].chunk(len(pairs))
            for n, (expert, down) in enumerate(
                zip(self.experts, self.stacks["w2"].chunk(len(self.experts)), strict=True)
            ):
                for module, view in zip(
                    (expert.w1, expert.w3, expert.w2),
                    (gate_up[2 * n], gate_up[2 * n + 1], down),
                    strict=True,
                ):
                    module.weight.requires_grad_(False)
                    module.weight.data = view
        for stack in self.stacks.values():
            stack.requires_grad_()

    def share_experts(self, stacked: MoE) -> None:
        """Let the experts' weights be views of the stacks of `stacked`; own stacks stay."""
        if self.stacks:
            return
        for expert, other in zip(self.experts, stacked.experts, strict=True):
            for name in ("w1", "w2", "w3"):
                getattr(expert, name).weight.data = getattr(other, name).weight.data

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        """Return routed plus shared expert outputs, summed in fp32. x [B, T, C]."""
        z = x.flatten(0, -2)  # [N, C]
        is_image = None if state.image_mask is None else state.image_mask.flatten()
        ids, weights, logits = self.gate(z, is_image)
        if state.plan is not None and state.plan.router_observer is not None:
            state.plan.router_observer.routed(self.spec, ids, logits, is_image)
        state.note(f"gate_ids.{self.spec.layer_id}", ids)
        state.note(f"gate_weights.{self.spec.layer_id}", weights)
        y = self._routed(z, ids, weights)
        return (y + self.shared_experts(z).float()).to(x.dtype).view(x.shape)

    def _routed(self, z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's routed experts, [N, C] fp32."""
        if self.stacks:
            return self.parts.ops.grouped_experts(
                z,
                ids,
                weights,
                self.stacks["w1_w3"].unflatten(0, (len(self.experts), -1)),
                self.stacks["w2"].unflatten(0, (len(self.experts), -1)),
                self.parts.config.swiglu_limit,
                self.parts.ops.clamped_swiglu,
            )
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
        return y
