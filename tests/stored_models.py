"""Small models whose weights are stored values, in release numerics, and prefills of them."""

from dataclasses import replace

import torch

from finwhale.cache.sequence_state import fresh_state
from finwhale.config import ModelConfig, preset
from finwhale.config.inventory import Storage, checkpoint_tensors
from finwhale.engine.prefill import Prefill
from finwhale.model import Backbone, Numerics
from finwhale.ops.weight_formats import round_weight
from tests.models import build

PLAIN = (Storage.BF16, Storage.F32)


def small_config(**text) -> ModelConfig:
    """Six layers with every mechanism of a decode step: S F2 R | F1 I R; all entries selected."""
    config = preset("unit")
    own = {
        "num_hidden_layers": 6, "kv_source_layer_ids": (1, 3), "index_source_layer_ids": (1, 3, 4),
        "compress_ratios": (0, 2, 2, 1, 1, 1), "candidate_source_layer_id": 3,
        "index_head_dim": 64, "index_topk": 32, "sliding_window": 4, "candidate_topk_blocks": 16,
        "hc_sinkhorn_iters": 3, "engram_layer_ids": (1, 2),
    }  # fmt: skip
    return replace(config, text_config=replace(config.text_config, **own | text))


def stored_model(config: ModelConfig, seed: int = 3) -> Backbone:
    """Return a model in release numerics whose matrices hold what their files would hold."""
    model = build(config, Numerics.release(), seed=seed)
    storages = {spec.name: spec.storage for spec in checkpoint_tensors(config)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if storages[name] not in PLAIN:
                weight.copy_(round_weight(weight.float(), storages[name]))
    return model


def prefilled(model: Backbone, ids: list[int]):
    """Return a prompt's state and the logits [V] behind it."""
    state = fresh_state(model, max_rollback=0)
    session = Prefill(model, state)
    session.feed(torch.tensor([ids]))
    with torch.no_grad():
        return state, model.logits(session.finish())[0]
