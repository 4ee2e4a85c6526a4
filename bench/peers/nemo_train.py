"""nemo-automodel's DeepSeek-V4.1 as a training step, for `bench/train_step.py`.

    python bench/peers/nemo_train.py CONFIG.json ROWS TOKENS STEPS
Prints one JSON line. Weights and activations bf16, fused AdamW, SDPA attention, grouped expert
products, Triton RoPE: the fastest settings of the package that run without further libraries. It
freezes the indexer, so it does less work than a run that teaches one.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of numbered words, which the peer needs for its Engram map."""
    words = ["<bos>", "<eos>", "<pad>", *(f"\u0120w{n}" for n in range(vocab_size - 3))]
    vocab = {word: n for n, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in words[:3]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


def build(text: dict):
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41 import engram
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM

    tokenizer = word_tokenizer(text["vocab_size"])
    compressed = engram._compressed_token_map(tokenizer)[1]
    text = {**text, "dtype": "bfloat16", "engram_compressed_vocab_size": compressed}
    config = DeepseekV41Config(
        text_config=text, vision_config={"num_hidden_layers": 0}, dtype="bfloat16"
    )
    backend = BackendConfig(
        attn="sdpa",
        linear="torch",
        rms_norm="torch_fp32",
        rope="triton",
        rope_fusion=False,
        experts="torch_mm",
        dispatcher="torch",
        gate_precision="float32",
        enable_hf_state_dict_adapter=False,
        enable_fsdp_optimizations=False,
    )
    with torch.device("cuda"):
        model = DeepseekV41ForCausalLM(config, backend=backend, tokenizer=tokenizer)
    model.initialize_weights(buffer_device=torch.device("cuda"), dtype=torch.bfloat16)
    return model.cuda().train()


def main() -> None:
    logging.disable(logging.WARNING)
    text = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rows, tokens, steps = (int(x) for x in sys.argv[2:5])
    model = build(text)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    took, losses = [], []
    for _ in range(steps):
        ids = torch.randint(3, text["vocab_size"] - 1, (rows, tokens), generator=generator).cuda()
        torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss))
        took.append(time.perf_counter() - began)
    print(
        json.dumps(
            {
                "step_s": statistics.median(took[len(took) // 2 :]),
                "first_loss": losses[0],
                "last_loss": losses[-1],
                "memory_bytes": torch.cuda.max_memory_allocated(),
            }
        )
    )


if __name__ == "__main__":
    main()
