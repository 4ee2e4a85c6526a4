"""Hypothesis strategies: valid model configurations that no preset has."""

from __future__ import annotations

from hypothesis import strategies as st

from finwhale.config import ModelConfig, RopeScaling, TextConfig, engram_buckets


@st.composite
def schedules(draw) -> dict:
    """A layer schedule: window layers, an encoder at ratio 2 or 1, a decoder, its sources."""
    ratios = [0] * draw(st.integers(0, 2))
    kv, index = [], []
    for _ in range(draw(st.integers(0, 3))):  # encoder owners
        ratio = draw(st.sampled_from([1, 2]))
        kv.append(len(ratios))
        index.append(len(ratios))
        ratios += [ratio] * draw(st.integers(1, 3))
    cut = len(ratios)
    kv.append(cut)
    index.append(cut)
    decoder = draw(st.integers(1, 6))
    ratio = draw(st.sampled_from([1, 2]))
    ratios += [ratio] * decoder
    later = range(cut + 1, cut + decoder)
    if later:
        index += sorted(draw(st.sets(st.sampled_from(later), max_size=3)))
    return {
        "num_hidden_layers": len(ratios),
        "compress_ratios": tuple(ratios),
        "kv_source_layer_ids": tuple(kv),
        "index_source_layer_ids": tuple(index),
        "candidate_source_layer_id": cut,
    }


@st.composite
def model_configs(draw) -> ModelConfig:
    """A small valid text-only configuration, quantised or not, with up to two Engram layers."""
    schedule = draw(schedules())
    groups = draw(st.sampled_from([1, 2]))
    experts = draw(st.integers(1, 5))
    layers = range(schedule["num_hidden_layers"])
    engram = tuple(sorted(draw(st.sets(st.sampled_from(layers), max_size=2))))
    vocabulary = draw(st.integers(16, 80))
    heads, orders = draw(st.integers(1, 2)), draw(st.integers(2, 4))
    hash_size = draw(st.integers(3, 60))
    buckets = engram_buckets(
        num_layers=len(engram), max_ngram_size=orders, n_heads=heads, vocab_size=hash_size
    )
    text = TextConfig(
        **schedule,
        vocab_size=vocabulary,
        hidden_size=draw(st.sampled_from([32, 64, 96])),
        moe_intermediate_size=draw(st.sampled_from([32, 64])),
        num_attention_heads=groups * draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([32, 64, 96])),
        qk_rope_head_dim=draw(st.sampled_from([8, 16, 32])),
        q_lora_rank=draw(st.sampled_from([32, 64])),
        o_groups=groups,
        o_lora_rank=draw(st.sampled_from([32, 64])),
        sliding_window=draw(st.integers(1, 20)),
        index_n_heads=draw(st.integers(1, 24)),
        index_head_dim=draw(st.sampled_from([32, 64])),
        index_topk=draw(st.integers(1, 16)),
        candidate_topk_blocks=draw(st.integers(1, 8)),
        candidate_block_size=draw(st.integers(1, 8)),
        n_routed_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        hc_mult=draw(st.integers(1, 4)),
        engram_layer_ids=engram,
        engram_num_embeddings=tuple(b.num_rows for b in buckets),
        engram_max_ngram_size=orders,
        engram_vocab_size=hash_size,
        engram_n_heads=heads,
        engram_head_dim=32,
        engram_compressed_vocab_size=draw(st.integers(1, vocabulary)),
        rope_scaling=RopeScaling(original_max_position_embeddings=256),
        max_position_embeddings=draw(st.sampled_from([512, 4096, 65536])),
    )
    config = ModelConfig(text_config=text, vision_config=None, image_token_id=vocabulary - 1)
    if draw(st.booleans()):
        return config
    return ModelConfig(
        text_config=text,
        vision_config=None,
        image_token_id=vocabulary - 1,
        quantization_config=None,
    )
