"""The least time of one decode step: bytes that must move and products, per operation.

Every weight is read once in its stored format, of the routed experts only the distinct ones; every
selected entry and window row once per sequence; no launch costs anything. An operation takes the
longer of its bytes at the copy bandwidth and its products at the matrix rate; a step is their sum.
Source of the shapes: the config and its layer table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finwhale.config.accounting import index_keys_scored, kv_owners
from finwhale.config.layers import AttentionMode, build_layer_specs
from finwhale.config.model import TextConfig

FP8 = 1 + 1 / 1024  # with one scale byte per 32x32 block
FP4 = 0.5 + 1 / 32
BF16, FP32 = 2, 4


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes and floating-point operations of one operation in one step."""

    bytes: float
    flops: float

    def seconds(self, bandwidth: float, rate: float) -> float:
        return max(self.bytes / bandwidth, self.flops / rate)


def expected_distinct(experts: int, k: int, tokens: int) -> float:
    """Return how many experts of a layer uniform routing touches."""
    return experts * (1 - (1 - k / experts) ** tokens)


def decode_costs(
    c: TextConfig, context: int, batch: int, distinct: Sequence[float] | None = None
) -> dict[str, Cost]:
    """Return the cost of each operation of one step of `batch` sequences at `context` tokens.

    distinct  experts touched per layer, as measured; None: as uniform routing has it
    """
    specs = build_layer_specs(c)
    layers, wide, heads = len(specs), c.hidden_size, c.num_attention_heads
    if distinct is None:
        distinct = [expected_distinct(c.n_routed_experts, c.num_experts_per_tok, batch)] * layers
    joined = heads * c.head_dim
    attention = layers * (
        wide * (c.q_lora_rank + c.head_dim)
        + c.q_lora_rank * joined
        + joined * c.o_lora_rank
        + c.o_groups * c.o_lora_rank * wide
    )
    index_q = sum(s.owns_topk for s in specs) * c.q_lora_rank * c.index_n_heads * c.index_head_dim
    index_weights = sum(s.owns_topk for s in specs) * c.index_n_heads * wide
    compress = sum(
        wide * c.head_dim * (2 if o.ratio > 1 else 1) + c.head_dim * c.index_head_dim
        for o in kv_owners(c)
    )
    expert = 3 * wide * c.moe_intermediate_size
    mixing = c.hc_mult * (c.hc_mult + 2) * c.hc_mult * wide
    inner = c.engram_columns * c.engram_head_dim
    engram = len(c.engram_layer_ids) * inner * wide * (c.hc_mult + 1)
    head = c.vocab_size * wide
    entry = c.head_dim / 2 + c.head_dim / 16
    window = min(c.sliding_window, context)
    row = c.head_dim + c.head_dim / 32
    key = c.index_head_dim / 2 + c.index_head_dim / 32
    selected = sum(
        min(c.index_topk, context // s.ratio) for s in specs if s.mode is not AttentionMode.WINDOW
    )
    full, pool = index_keys_scored(c, context)
    per_key = 2 * c.index_n_heads * c.index_head_dim + 2 * c.index_n_heads
    keys = batch * (selected + layers * window)
    sites, n = 2 * layers, c.hc_mult
    rows = len(c.engram_layer_ids) * c.engram_columns * (c.engram_head_dim * (1 + 1 / 32))
    return {
        "index scores, all entries": Cost(batch * full * key, batch * full * per_key),
        "index scores, pool": Cost(batch * pool * key, batch * pool * per_key),
        "top-k (scores read once, bf16)": Cost(batch * (full + pool) * BF16, 0),
        "attention core": Cost(
            batch * (selected * entry + layers * window * row), 4 * joined * keys
        ),
        "attention projections": Cost(
            (attention + index_q) * FP8 + (index_weights + compress) * BF16,
            2 * batch * (attention + index_q + index_weights + compress),
        ),
        "routed experts": Cost(
            sum(distinct) * expert * FP4, 2 * batch * layers * c.num_experts_per_tok * expert
        ),
        "shared expert": Cost(layers * expert * FP8, 2 * batch * layers * expert),
        "router": Cost(
            layers * c.n_routed_experts * wide * BF16,
            2 * batch * layers * c.n_routed_experts * wide,
        ),
        "mHC": Cost(
            sites * (mixing * FP32 + batch * (2 * n + 2) * wide * BF16),
            batch * sites * (2 * mixing + 2 * wide * (n * n + 2 * n)),
        ),
        "Engram": Cost(batch * rows + engram * FP8, 2 * batch * engram),
        "LM head": Cost(head * BF16 + batch * c.vocab_size * FP32, 2 * batch * head),
    }


def floor_seconds(costs: dict[str, Cost], bandwidth: float, rate: float) -> float:
    """Return the least time of a step. bandwidth in bytes/s, rate in FLOP/s."""
    return sum(cost.seconds(bandwidth, rate) for cost in costs.values())
