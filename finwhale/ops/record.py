"""The operations a model is built from, as one frozen record that is passed in.

A module calls `self.ops.sparse_attention(...)`; whoever builds the model decides which
implementation that is. There is no registry and no global choice. Negative controls replace one
field and must break parity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from finwhale.ops import (
    attention,
    compress,
    engram,
    head_loss,
    hyper_connection,
    index,
    moe,
    norm,
    rope,
    rounding,
)
from finwhale.ops import linear as product


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """One callable per operation; contracts are the docstrings of the reference functions."""

    rms_norm: Callable = norm.rms_norm
    apply_rope: Callable = rope.apply_rope
    rope_frequencies: Callable = rope.rope_frequencies
    linear: Callable = product.linear
    linear_release: Callable = product.linear_fp32_accumulate
    grouped_linear: Callable = product.grouped_linear
    sparse_attention: Callable = attention.sparse_attention_ref
    pool_group: Callable = compress.pool_group
    sparse_attention_with_mass: Callable = attention.sparse_attention_with_mass_ref
    index_scores: Callable = index.index_scores
    visible_index_scores: Callable = index.visible_index_scores_ref
    select_topk: Callable = index.select_topk_ref
    select_pool_blocks: Callable = index.select_pool_blocks
    hyper_mix: Callable = hyper_connection.hyper_mix
    hyper_collapse: Callable = hyper_connection.hyper_collapse
    hyper_expand: Callable = hyper_connection.hyper_expand
    engram_rows: Callable = engram.engram_rows
    engram_gate: Callable = engram.engram_gate
    route_experts: Callable = moe.route_experts
    clamped_swiglu: Callable = moe.clamped_swiglu
    # All experts of a layer at once (finwhale.kernels.experts); None: one after the other.
    grouped_experts: Callable | None = None
    head_loss: Callable = head_loss.head_loss_ref
    round_window_kv: Callable = rounding.round_fp8
    round_main_kv: Callable = rounding.round_main_kv
    round_index: Callable = rounding.round_index
    round_input: Callable = rounding.round_fp8


# The definition, and the faster forms that are tested against it.
REFERENCE = Ops()
FAST = Ops(
    sparse_attention=attention.sparse_attention_masked,
    sparse_attention_with_mass=attention.sparse_attention_with_mass_masked,
    index_scores=index.index_scores_matmul,
    visible_index_scores=index.visible_index_scores_matmul,
    select_topk=index.select_topk,
    hyper_collapse=hyper_connection.hyper_collapse_sum,
    hyper_mix=partial(hyper_connection.hyper_mix, sinkhorn=hyper_connection.sinkhorn_planes),
)
