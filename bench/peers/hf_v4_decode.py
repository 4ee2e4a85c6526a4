"""Prefill and decode seconds of transformers' DeepSeek-V4; runs inside its environment.

    python bench/peers/hf_v4_decode.py TEXT_JSON IDS_JSON NEW_TOKENS
Prints one JSON object. transformers has V4 and no V4.1, so this is a model of the same widths and
depth with random weights, not the same checkpoint: no Engram, no shared selection, no rounded
cache, all layers on every prompt token. It decodes with its cache, fp32, one thread.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

# Fields that both configurations have, under one name.
SHARED = """vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads
head_dim q_lora_rank o_groups o_lora_rank n_routed_experts num_experts_per_tok index_n_heads
index_head_dim index_topk sliding_window hc_mult hc_sinkhorn_iters"""


def build(text: dict) -> DeepseekV4ForCausalLM:
    layers = text["num_hidden_layers"]
    config = DeepseekV4Config(
        **{name: text[name] for name in SHARED.split() if name in text},
        num_key_value_heads=1,
        num_nextn_predict_layers=0,
        num_hash_layers=1,
        max_position_embeddings=65536,
        partial_rotary_factor=text["qk_rope_head_dim"] / text["head_dim"],
        # V4's own kinds of layer, in its own alternation behind two plain ones.
        compress_ratios=[0, 0, *([4, 128] * layers)[: layers - 2]],
    )
    torch.manual_seed(0)
    return DeepseekV4ForCausalLM(config).eval()


def main() -> None:
    torch.set_num_threads(1)
    text = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    ids, steps = json.loads(sys.argv[2]), int(sys.argv[3])
    model, tokens, stamps = build(text), torch.tensor([ids]), []
    with torch.no_grad():
        out = model(tokens[:, :16], use_cache=True)
        model(tokens[:, 16:17], past_key_values=out.past_key_values, use_cache=True)
        cache = None
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(steps + 1):
            out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
            stamps.append((time.perf_counter() - start, time.process_time() - cpu_start))
    result = {
        "prefill_s": stamps[0][0],
        "prefill_cpu_s": stamps[0][1],
        "decode_s": stamps[-1][0] - stamps[0][0],
        "decode_cpu_s": stamps[-1][1] - stamps[0][1],
        "decoded": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
