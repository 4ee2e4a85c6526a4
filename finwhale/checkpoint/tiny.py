"""A small random checkpoint in the released layout, with what it must answer.

For people who test another engine: config, quantised shards, a toy tokenizer, and
`expected.safetensors` with prompt, logits and a greedy continuation of this reference, computed
from the folder as it was read back. `expected.json` says how. Weights are hashed, so the same
call writes the same checkpoint on every machine; logits agree to fp32 summation order.
The easy mistake: comparing greedy ids alone; a model without Engram can pass that (case 133).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

import finwhale
from finwhale.checkpoint.hashed_weights import hashed_source, hashes, stream_key
from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.save import saved_config, write_folder
from finwhale.checkpoint.staging import staged_folder
from finwhale.checkpoint.token_map import map_of_file
from finwhale.checkpoint.tokenizer_config import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    tokenizer_config_text,
)
from finwhale.checkpoint.toy_tokenizer import (
    SPECIAL_TOKENS,
    toy_tokenizer_json,
)
from finwhale.config.model import ModelConfig
from finwhale.config.presets import with_compressed_vocab
from finwhale.model import Backbone, Numerics
from finwhale.model.stale_slot import stale_slot_logits

GREEDY_TOKENS = 16
# Decoded tokens of the stale-slot vector: open groups and complete ones.
STALE_STEPS = 7


def write_tiny(
    config: ModelConfig,
    out: str | Path,
    *,
    seed: int = 0,
    quantized: bool = True,
    prompt_tokens: int = 96,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a random checkpoint of `config` with expected answers; return the report.

    The config's engram_compressed_vocab_size becomes that of the toy tokenizer's id map. The
    report is what expected.json holds, with the folder's bytes.
    """
    text = config.text_config
    if prompt_tokens < 1:
        raise ValueError(f"prompt_tokens: got {prompt_tokens}, expected at least 1")
    with staged_folder(
        out, overwrite=overwrite, also_replaceable=frozenset({"expected.safetensors"})
    ) as folder:
        tokenizer_file, tokenizer = folder / TOKENIZER_FILE, toy_tokenizer_json(text.vocab_size)
        tokenizer_file.write_text(tokenizer, encoding="utf-8")
        (folder / TOKENIZER_CONFIG_FILE).write_text(
            tokenizer_config_text(config, tokenizer.encode("utf-8"), TOKENIZER_FILE),
            encoding="utf-8",
        )
        if text.engram_layer_ids:
            config = with_compressed_vocab(config, int(map_of_file(tokenizer_file).max()) + 1)
        saved = write_folder(config, hashed_source(seed), folder, out, quantized=quantized)
        config = saved_config(config, quantized=quantized)
        ids = hashed_prompt(config, seed, prompt_tokens)
        expected = expected_answers(folder, ids)
        (folder / "expected.safetensors").write_bytes(save(expected))
        report = {
            "made_by": f"finwhale {finwhale.__version__}, finwhale.checkpoint.tiny.write_tiny",
            "torch": torch.__version__,
            "seed": seed,
            "quantized": quantized,
            "prompt_tokens": prompt_tokens,
            "greedy_tokens": GREEDY_TOKENS,
            "config_sha256": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
            "tensors": saved.num_tensors,
            "payload_bytes": saved.payload_bytes,
            "numerics": {
                "logits": "mode dequant, float32, cache rounding on",
                "logits_no_cache_rounding": "mode dequant, float32, cache rounding off",
                "logits_stale_slot": "as logits_no_cache_rounding",
                "greedy_ids": "argmax of logits, whole forward per token",
            },
            "index_key_rule": {
                "logits_stale_slot": "stale slot (D08), prefill "
                f"{max(1, prompt_tokens - STALE_STEPS)} tokens, then one by one",
                "all others": "the owner's own keys",
            },
            "expected": {
                name: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
                for name, value in expected.items()
            },
            "greedy_min_margin": _min_margin(expected["greedy_logits"]),
        }
        (folder / "expected.json").write_text(json.dumps(report, indent=1) + "\n")
        report["folder_bytes"] = sum(file.stat().st_size for file in folder.iterdir())
    return report


def hashed_prompt(config: ModelConfig, seed: int, num_tokens: int) -> Tensor:
    """Return a random prompt [1, T] int64 of ordinary words: no special token, no image token."""
    first = len(SPECIAL_TOKENS)
    image = config.image_token_id
    has_image = first <= image < config.text_config.vocab_size
    words = np.uint64(config.text_config.vocab_size - first - has_image)
    drawn = hashes(stream_key("prompt", seed), 0, num_tokens) >> np.uint64(32)
    ids = (drawn % words).astype(np.int64) + first
    if has_image:
        ids += ids >= image
    return torch.from_numpy(ids)[None]


def expected_answers(folder: Path, ids: Tensor) -> dict[str, Tensor]:
    """Return what the checkpoint in `folder` answers to prompt `ids` [1, T].

    input_ids [1, T], logits and logits_no_cache_rounding [1, T, V] fp32, greedy_ids [G] and
    the logits that chose them, greedy_logits [G, V]; engram_rows.L [1, T, J], the table rows
    that layer L reads. logits_stale_slot [1, T, V], without cache rounding, is the shipped
    reference's rule for index keys (D08) with the last STALE_STEPS tokens decoded one by one; it
    differs from the owner's rule once an encoder layer has more entries than it selects.
    """
    answers: dict[str, Tensor] = {"input_ids": ids}
    with torch.no_grad():
        exact = load_model(folder, numerics=Numerics(cache_rounding=False)).model
        answers["logits_no_cache_rounding"] = exact(ids)
        prefill_tokens = max(1, ids.shape[1] - STALE_STEPS)
        answers["logits_stale_slot"] = stale_slot_logits(exact, ids, prefill_tokens)
        del exact
        model = load_model(folder, numerics=Numerics()).model
        trace: dict[str, Tensor] = {}
        answers["logits"] = model(ids, trace=trace)
        answers["greedy_ids"], answers["greedy_logits"] = _greedy(model, ids)
    for name, value in trace.items():
        if name.startswith("engram_rows."):
            answers[name] = value
    return answers


def _greedy(model: Backbone, ids: Tensor) -> tuple[Tensor, Tensor]:
    rows = []
    for _ in range(GREEDY_TOKENS):
        rows.append(model.logits(model.hidden(ids)[0, -1]))
        ids = torch.cat((ids, rows[-1].argmax()[None, None]), dim=1)
    return ids[0, -GREEDY_TOKENS:].clone(), torch.stack(rows)


def _min_margin(logits: Tensor) -> float:
    """Return the smallest lead of the best logit over the second, over all rows [G, V]."""
    top = logits.topk(2).values
    return float((top[:, 0] - top[:, 1]).min())
