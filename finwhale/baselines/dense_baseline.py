"""A plain dense transformer of the model's active size, trained by the same loop.

Pre-norm blocks, rotary positions over whole heads of 64, full causal attention inside each packed
document, SwiGLU, untied embedding and head. It offers what a training step, the loss and an
evaluation use of a Backbone, so optimisers, data and schedule are shared; it has no cache, no
stored formats and no experts, and is never exported. The mistake to avoid: comparing total
parameters, when a mixture of experts is as fast as its active ones. The sizes come from
`dense_shape`; the optimiser's scheme is that of spec/training.md section 1.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from finwhale.config import AttentionMode, LayerSpec, ModelConfig, PoolUse
from finwhale.config.layers import Half, RopeKind
from finwhale.config.presets import DENSE_HEAD_DIM, DenseShape, dense_shape
from finwhale.model import Numerics, Packing
from finwhale.model.backbone import Table
from finwhale.model.init import initialize
from finwhale.model.layers import Linear, Parts, RMSNorm
from finwhale.model.moe import Gate
from finwhale.model.selection_plan import SelectionPlan
from finwhale.ops import REFERENCE, Ops
from finwhale.ops.rope import rope_rotation

# Queries that attend at one time. Keys behind a block's last query are not multiplied at all.
_QUERY_BLOCK = 2048
# Added to the score of a key that a query must not see: its weight is exactly 0, and, unlike with
# an infinity, no tile in which a query sees nothing can make a NaN. bf16 holds it.
_UNSEEN = -1e30


def document_masks(positions: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return what is added to the scores of each block of queries, 0 or a large negative number.

    positions  [B, T] int64 position of each token in its document: 0 where one begins
    returns    per block, [B, 1, queries, keys up to the last query] in `dtype`

    Token s is seen by t if s <= t and both lie in one document. Together T^2 B bytes in bf16.
    """
    tokens = positions.shape[1]
    documents = (positions == 0).cumsum(1)  # [B, T]
    place = torch.arange(tokens, device=positions.device)
    masks = []
    for start in range(0, tokens, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, tokens)
        seen = documents[:, start:stop, None] == documents[:, None, :stop]
        seen &= place[start:stop, None] >= place[:stop]
        mask = torch.zeros(seen.shape, dtype=dtype, device=positions.device)
        masks.append(mask.masked_fill_(~seen, _UNSEEN).unsqueeze(1))
    return masks


class DenseAttention(nn.Module):
    """`wq`, `wk`, `wv`, `wo`: full attention of H heads of 64, each with keys of its own."""

    def __init__(self, parts: Parts, width: int):
        super().__init__()
        self.ops = parts.ops
        self.wq = Linear(parts, width, width, "plain")
        self.wk = Linear(parts, width, width, "plain")
        self.wv = Linear(parts, width, width, "plain")
        self.wo = Linear(parts, width, width, "plain")

    def forward(self, x: Tensor, rotation: Tensor, masks: list[Tensor]) -> Tensor:
        """Return [B, T, C] from x [B, T, C]; rotation [2, B, T, 32], masks of `document_masks`."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, DENSE_HEAD_DIM)) for linear in (self.wq, self.wk, self.wv)
        )  # [B, T, H, D]
        q, k = self.ops.apply_rope(q, rotation), self.ops.apply_rope(k, rotation)
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))  # [B, H, T, D]
        # The only form on a GPU that takes a mask and never writes [T, T] scores: no silent other.
        form = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if x.is_cuda else nullcontext()
        out, start = [], 0
        with form:
            for mask in masks:
                queries, stop = mask.shape[-2:]
                out.append(
                    nn.functional.scaled_dot_product_attention(
                        q[:, :, start:stop],
                        k[:, :, :stop],
                        v[:, :, :stop],
                        attn_mask=mask.expand(-1, q.shape[1], -1, -1),
                    )
                )
                start += queries
        return self.wo(torch.cat(out, dim=2).transpose(1, 2).flatten(-2))


class DenseFeedForward(nn.Module):
    """y = w2(silu(w1 x) * w3 x), without a clamp."""

    def __init__(self, parts: Parts, width: int, inner: int):
        super().__init__()
        self.w1 = Linear(parts, width, inner, "plain")
        self.w2 = Linear(parts, inner, width, "plain")
        self.w3 = Linear(parts, width, inner, "plain")

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class DenseBlock(nn.Module):
    """x + attn(attn_norm(x)), then x + ffn(ffn_norm(x))."""

    def __init__(self, parts: Parts, shape: DenseShape):
        super().__init__()
        self.attn_norm = RMSNorm(parts, shape.hidden_size)
        self.attn = DenseAttention(parts, shape.hidden_size)
        self.ffn_norm = RMSNorm(parts, shape.hidden_size)
        self.ffn = DenseFeedForward(parts, shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, rotation: Tensor, masks: list[Tensor]) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rotation, masks)
        return x + self.ffn(self.ffn_norm(x))


class DenseBaseline(nn.Module):
    """`embed`, `layers.L`, `norm`, `head`; the parts of a Backbone that training uses.

    config  of the model it is compared with, whose vocabulary and constants it shares
    shape   its own sizes
    specs   one per layer, for loops that count layers: none owns or reads entries
    """

    def __init__(
        self, config: ModelConfig, shape: DenseShape, numerics: Numerics, ops: Ops = REFERENCE
    ):
        super().__init__()
        c = config.text_config
        self.config, self.shape = config, shape
        self.parts = Parts(config=c, numerics=numerics, ops=ops)
        self.specs = tuple(_spec(layer) for layer in range(shape.num_hidden_layers))
        self.embed = Table(shape.vocab_size, shape.hidden_size, numerics.parameter_dtype)
        self.layers = nn.ModuleList(DenseBlock(self.parts, shape) for _ in self.specs)
        self.norm = RMSNorm(self.parts, shape.hidden_size)
        self.head = Table(shape.vocab_size, shape.hidden_size, numerics.parameter_dtype)
        with torch.device("cpu"):
            self.frequencies = ops.rope_frequencies(c.rope_theta, DENSE_HEAD_DIM, None)

    @property
    def numerics(self) -> Numerics:
        return self.parts.numerics

    def round_cache(self, on: bool) -> None:
        """Do nothing: there is no cache whose rows could be rounded."""

    def stack_experts(self) -> None:
        """Do nothing: there are no experts."""

    def gates(self) -> list[Gate]:
        """Return the routers: none."""
        return []

    def trained_tensors(self) -> dict[str, Tensor]:
        """Return what an optimiser may own, by name."""
        return dict(self.named_parameters())

    def init_weights(self, seed: int) -> None:
        """Draw every parameter deterministically from `seed`, as a Backbone draws its own."""
        initialize(self, seed)

    def to_device(self, device: torch.device | str) -> DenseBaseline:
        """Move parameters and derived constants."""
        self.to(device)
        self.frequencies = self.frequencies.to(device)
        return self

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
        trace: dict[str, Any] | None = None,
        plan: SelectionPlan | None = None,
    ) -> Tensor:
        """Return the normalised rows after the last layer, [B, T, C].

        ids      [B, T] int64
        packing  document layout; None means one document per row
        trace    filled with detached copies `streams.L` [B, T, C] before layer L
        plan     of a training pass, whose caller has checked the ids; there is nothing to select
        """
        if plan is None:
            self._check_ids(ids)
        if not ids.numel():
            return self.embed.weight.new_zeros(*ids.shape, self.shape.hidden_size)
        positions = packing.positions if packing is not None else _whole(ids)
        if positions.shape != ids.shape:
            raise ValueError(
                f"packing: layout of {tuple(positions.shape)}, expected that of the ids, "
                f"{tuple(ids.shape)}"
            )
        dtype = self.numerics.dtype
        rotation = rope_rotation(positions, self.frequencies)
        masks = document_masks(positions, dtype)
        x = nn.functional.embedding(ids, self.embed.weight).to(dtype)
        for layer, block in enumerate(self.layers):
            _note(trace, layer, x)
            x = block(x, rotation, masks)
        _note(trace, len(self.layers), x)
        return self.norm(x)

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dim() != 2 or ids.dtype != torch.int64:
            raise ValueError(f"ids: got {tuple(ids.shape)} {ids.dtype}, expected [B, T] int64")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.shape.vocab_size:
            raise ValueError(
                f"ids: range {int(ids.min())}..{int(ids.max())}, expected "
                f"0..{self.shape.vocab_size - 1}"
            )


def dense_baseline(
    config: ModelConfig, *, numerics: Numerics | None = None, ops: Ops = REFERENCE
) -> DenseBaseline:
    """Return the dense transformer of as many active parameters as `config`; weights undefined.

    numerics  dtype of activations and parameters; its roundings have no meaning here

    Call `init_weights` before use. Raises ConfigError if no shape fits (`dense_shape`).
    """
    return DenseBaseline(config, dense_shape(config), numerics or Numerics(), ops)


def _spec(layer: int) -> LayerSpec:
    return LayerSpec(
        layer_id=layer,
        half=Half.ENCODER,
        mode=AttentionMode.WINDOW,
        ratio=0,
        kv_owner=None,
        topk_owner=None,
        pool=PoolUse.NONE,
        rope=RopeKind.WINDOW,
        engram_index=None,
    )


def _whole(ids: Tensor) -> Tensor:
    return Packing.whole(*ids.shape, device=ids.device).positions


def _note(trace: dict[str, Any] | None, layer: int, x: Tensor) -> None:
    if trace is not None:
        trace[f"streams.{layer}"] = x.detach().clone()
