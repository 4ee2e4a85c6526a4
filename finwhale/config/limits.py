"""The range of every number in a configuration, several times what the release has.

A range bounds what is allocated and looped before any file is compared with the configuration, so
that a folder with one absurd value costs a sentence. Floats are bounded where float32 computes with
them: no infinity, and no number that becomes 0. Products that decide the length of a loop (experts
of all layers, hash columns) have bounds of their own in `finwhale.config.model`.
"""

from __future__ import annotations

Range = tuple[float, float]

_SMALL, _LARGE = 1e-37, 1e6
_MOST_TOKENS = 2**31 - 1

TEXT: dict[str, Range] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**18),
    "moe_intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 4096),
    "head_dim": (1, 2**14),
    "qk_rope_head_dim": (1, 2**14),
    "q_lora_rank": (1, 2**18),
    "o_lora_rank": (1, 2**18),
    "o_groups": (1, 4096),
    "sliding_window": (1, 2**16),
    "rope_theta": (1.001, 1e12),
    "compress_rope_theta": (1.001, 1e12),
    "index_n_heads": (1, 4096),
    "index_head_dim": (1, 2**14),
    "index_topk": (1, 2**20),
    "candidate_source_layer_id": (0, 1023),
    "candidate_topk_blocks": (1, 2**22),
    "candidate_block_size": (1, 2**16),
    "num_nextn_predict_layers": (0, 64),
    "dspark_block_size": (0, 2**16),
    "dspark_noise_token_id": (0, _MOST_TOKENS),
    "dspark_markov_rank": (0, 2**18),
    "dspark_n_routed_experts": (0, 2**16),
    "dspark_num_experts_per_tok": (0, 2**16),
    "n_routed_experts": (1, 2**16),
    "num_experts_per_tok": (1, 2**10),
    "routed_scaling_factor": (_SMALL, _LARGE),
    "swiglu_limit": (_SMALL, _LARGE),
    "rms_norm_eps": (_SMALL, 1),
    "initializer_range": (_SMALL, _LARGE),
    "max_position_embeddings": (1, _MOST_TOKENS),
    "hc_mult": (1, 64),
    "hc_sinkhorn_iters": (1, 1000),
    "hc_eps": (_SMALL, 1),
    "engram_max_ngram_size": (2, 32),
    "engram_vocab_size": (1, 2**30),
    "engram_n_heads": (1, 256),
    "engram_head_dim": (1, 2**14),
    "engram_pad_token_id": (0, 2**24),
    "engram_compressed_vocab_size": (1, 2**24),
}
ROPE_SCALING: dict[str, Range] = {
    "factor": (1e-3, _LARGE),
    "beta_fast": (1e-6, _LARGE),
    "beta_slow": (1e-6, _LARGE),
    "original_max_position_embeddings": (1, _MOST_TOKENS),
}
VISION: dict[str, Range] = {
    "num_hidden_layers": (0, 1024),
    "hidden_size": (1, 2**18),
    "num_attention_heads": (1, 4096),
    "intermediate_size": (1, 2**20),
    "patch_size": (1, 1024),
    "rope_theta": (1.001, 1e12),
    "downsample_ratio": (1, 64),
    "max_image_tokens": (1, _MOST_TOKENS),
    "min_pixels": (0, 2**48),
    "max_wh_ratio": (1e-3, _LARGE),
}
MODEL: dict[str, Range] = {"image_token_id": (0, _MOST_TOKENS)}

# Experts of all layers, draft stages included: the release has 15,744.
MOST_EXPERTS = 2**17
# Hash columns of all Engram layers, each with a prime to find: the release has 48.
MOST_COLUMNS = 1024
