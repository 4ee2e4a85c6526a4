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
    hyper_connection,
    index,
    moe,
    norm,
    rope,
    rounding,
    sinkhorn,
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
    index_scores: Callable = index.index_scores
    select_topk: Callable = index.select_topk_ref
    select_pool_blocks: Callable = index.select_pool_blocks
    hyper_mix: Callable = hyper_connection.hyper_mix
    hyper_collapse: Callable = hyper_connection.hyper_collapse
    hyper_expand: Callable = hyper_connection.hyper_expand
    engram_rows: Callable = engram.engram_rows
    engram_gate: Callable = engram.engram_gate
    route_experts: Callable = moe.route_experts
    clamped_swiglu: Callable = moe.clamped_swiglu
    round_window_kv: Callable = rounding.round_fp8
    round_main_kv: Callable = rounding.round_main_kv
    round_index: Callable = rounding.round_index
    round_input: Callable = rounding.round_fp8


# The definition, and the faster forms that are tested against it.
REFERENCE = Ops()
FAST = Ops(
    sparse_attention=attention.sparse_attention_masked,
    index_scores=index.index_scores_matmul,
    select_topk=index.select_topk,
    hyper_mix=partial(hyper_connection.hyper_mix, sinkhorn=sinkhorn.sinkhorn_planes),
)
