"""Prefill and decode seconds of nemo-automodel on a checkpoint; runs inside its environment.

    python bench/peers/nemo_decode.py CHECKPOINT IDS_JSON NEW_TOKENS
Prints one JSON object. The package keeps no cache, so each token costs a forward over all tokens
before it. Weights and activations fp32, one thread, the settings that run on a CPU.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
from safetensors.torch import load_file


def load(folder: Path) -> DeepseekV41ForCausalLM:
    config = DeepseekV41Config.from_pretrained(str(folder))
    config._name_or_path = str(folder)
    # The default is the released tower of 32 layers; these checkpoints are text alone.
    config.vision_config.num_hidden_layers = 0
    config.dtype = config.text_config.dtype = "float32"
    backend = BackendConfig(
        attn="sdpa",
        linear="torch",
        rms_norm="torch_fp32",
        rope_fusion=False,
        experts="torch",
        dispatcher="torch",
        gate_precision="float32",
        enable_hf_state_dict_adapter=True,
        enable_fsdp_optimizations=False,
    )
    model = DeepseekV41ForCausalLM(config, backend=backend)
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.float32)
    stored = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored.update(load_file(file))
    native = model.state_dict_adapter.from_hf(stored)
    model.load_state_dict({name: t.float() for name, t in native.items()}, strict=True)
    return model.eval()


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    folder, ids, steps = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    model, tokens, stamps = load(folder), torch.tensor([ids]), []
    with torch.no_grad():
        model(tokens[:, :8])
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(steps + 1):
            last = model(tokens, logits_to_keep=1).logits[:, -1]
            tokens = torch.cat((tokens, last.argmax(-1, keepdim=True)), 1)
            stamps.append((time.perf_counter() - start, time.process_time() - cpu_start))
    result = {
        "prefill_s": stamps[0][0],
        "prefill_cpu_s": stamps[0][1],
        "decode_s": stamps[-1][0] - stamps[0][0],
        "decode_cpu_s": stamps[-1][1] - stamps[0][1],
        "decoded": steps,
        "tokens": tokens[0, len(ids) :].tolist(),
    }
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
