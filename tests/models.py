"""Small models with hashed weights, built once per process and shared by the tests."""

from dataclasses import replace
from functools import cache

import torch

from finwhale.checkpoint.hashed_weights import fill_hashed
from finwhale.config import ModelConfig, preset
from finwhale.model import Backbone, Numerics
from finwhale.ops import FAST, Ops

EXACT = Numerics(cache_rounding=False)


def token_map(config: ModelConfig) -> torch.Tensor:
    """Return a map that really compresses: ids share a compressed id modulo its size."""
    c = config.text_config
    return torch.arange(c.vocab_size) % c.engram_compressed_vocab_size


def build(config: ModelConfig, numerics: Numerics = EXACT, ops: Ops = FAST, seed=0) -> Backbone:
    """Return a Backbone of `config` with hashed weights."""
    model = Backbone(config, token_map(config), numerics, ops)
    fill_hashed(model, seed)
    return model.eval()


@cache
def unit_model(numerics: Numerics = EXACT, ops: Ops = FAST, **text) -> Backbone:
    """Return the `unit` preset, with text fields replaced; cached."""
    config = preset("unit")
    return build(replace(config, text_config=replace(config.text_config, **text)), numerics, ops)


def token_ids(*shape: int, seed: int = 0, vocab: int = 512) -> torch.Tensor:
    """Return random token ids."""
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))
