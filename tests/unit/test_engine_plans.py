"""Layer plans and weights that an engine is given: served as the model computes, or refused.

The reference is the model itself, one whole forward pass for each token.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from finwhale.config import ConfigError, preset
from finwhale.config.engine import EngineConfig
from finwhale.engine import engine as engine_module
from finwhale.engine.engine import Engine
from finwhale.engine.prefill import encoder_only_unsupported
from finwhale.engine.request import RequestError, SamplingParams
from finwhale.model import Backbone

UNIT = preset("unit")
ROWS = UNIT.text_config.engram_num_embeddings
PROMPT = [3 + n * 7 % 400 for n in range(37)]
GREEDY = SamplingParams(max_new_tokens=5, temperature=0)
SMALL = EngineConfig(
    num_blocks=16, block_size=8, max_sequences=2, max_batch_tokens=16, kernels="torch", poison=True
)
# Case 24: every layer is in the decoder, whose first one builds the pool.
CUT_AT_0 = {
    "num_hidden_layers": 3,
    "compress_ratios": (1, 1, 1),
    "kv_source_layer_ids": (0,),
    "index_source_layer_ids": (0, 2),
    "candidate_source_layer_id": 0,
    "engram_layer_ids": (1,),
    "engram_num_embeddings": ROWS[:1],
}


def model_of(seed: int = 0, **text) -> Backbone:
    text = {"engram_compressed_vocab_size": 512, **text}
    model = Backbone(replace(UNIT, text_config=replace(UNIT.text_config, **text)))
    model.init_weights(seed)
    return model


@torch.no_grad()
def greedy_of(model: Backbone, prompt=PROMPT) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(GREEDY.max_new_tokens):
        ids = torch.cat((ids, model.logits(model.hidden(ids)[0, -1]).argmax()[None, None]), 1)
    return ids[0, len(prompt) :].tolist()


def served(engine: Engine, prompt=PROMPT, params=GREEDY) -> list[int]:
    return [result.token for result in engine.generate([prompt], params)[0][0]]


@pytest.mark.parametrize("prefill", ["exact", "full"])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("snapshot_bytes", [0, 1 << 20])
def test_a_cut_at_the_first_layer_is_served(prefill, kernels, snapshot_bytes):
    model = model_of(**CUT_AT_0)
    fields = {"prefill": prefill, "kernels": kernels, "snapshot_bytes": snapshot_bytes}
    engine = Engine(model, replace(SMALL, **fields))
    # The second time the prompt's blocks are found; without snapshots their rows are replayed.
    assert served(engine) == served(engine) == greedy_of(model)


def random_plan(seed: int) -> dict:
    """Return the fields of a plan of up to five layers; about half are none that a model has."""
    draw = random.Random(seed)
    layers = draw.randint(1, 5)
    ratios = [draw.choice((0, 1, 1, 2)) for _ in range(layers)]
    makers = [n for n in range(layers) if ratios[n] and draw.random() < 0.5]
    choosers = {n for n in range(layers) if ratios[n] and draw.random() < 0.3}
    engrams = [n for n in range(layers) if draw.random() < 0.25][:1]
    return {
        "num_hidden_layers": layers,
        "compress_ratios": tuple(ratios),
        "kv_source_layer_ids": tuple(makers),
        "index_source_layer_ids": tuple(sorted({*makers, *choosers})),
        "candidate_source_layer_id": draw.choice(makers or range(layers)),
        "engram_layer_ids": tuple(engrams),
        "engram_num_embeddings": ROWS[: len(engrams)],
        "ced_kv_from": draw.choice(("layer_input", "encoder_output")),
        "sliding_window": draw.choice((1, 2, 8)),
    }


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_every_plan_is_refused_when_made_or_served_as_the_model_computes(first):
    num_served = 0
    for seed in range(first, first + 20):
        try:
            model = model_of(seed, **random_plan(seed))
        except ConfigError:
            continue
        for prefill in ("exact", "full"):
            config = replace(SMALL, prefill=prefill, snapshot_bytes=seed % 2 << 20)
            try:
                engine = Engine(model, config)
            except ConfigError:
                assert prefill == "exact"
                assert encoder_only_unsupported(model.config.text_config)
                continue
            num_served += 1
            assert served(engine) == served(engine) == greedy_of(model), random_plan(seed)
    assert num_served >= 4


def changed_state(model: Backbone, seed: int, dtype=torch.float32) -> dict:
    other = model_of(seed)
    return {name: tensor.clone().to(dtype) for name, tensor in other.state_dict().items()}


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("assign", [True, False])
def test_weights_that_changed_are_served(kernels, assign):
    """By `assign` the model's tensors are others, which the engine's twin did not read."""
    model = model_of(0)
    engine = Engine(model, replace(SMALL, kernels=kernels))
    before = served(engine)
    model.load_state_dict(changed_state(model, 1), assign=assign)
    engine.weights_changed()
    fresh = Engine(model_of(1), replace(SMALL, kernels=kernels))
    assert served(engine) == served(fresh) != before
    assert engine.namespace.weights_digest == fresh.namespace.weights_digest
    # And once more, on the weights that came by `assign`.
    model.load_state_dict(changed_state(model, 2), assign=not assign)
    engine.weights_changed()
    assert served(engine) == served(Engine(model_of(2), replace(SMALL, kernels=kernels)))


def test_one_tensor_put_in_the_place_of_another_is_served():
    model = model_of(0)
    engine = Engine(model, SMALL)
    head = model_of(1).head.weight.detach()
    model.head.weight = torch.nn.Parameter(head.clone())
    engine.weights_changed()
    assert served(engine) == served(Engine(model, SMALL)) == greedy_of(model)


def test_weights_that_the_engine_cannot_compute_with_are_refused():
    model = model_of(0)
    engine = Engine(model, SMALL)
    before = served(engine)
    model.load_state_dict(changed_state(model, 1, torch.bfloat16), assign=True)
    with pytest.raises(ConfigError, match=r"embed\.weight: got torch\.bfloat16"):
        engine.weights_changed()
    with pytest.raises(ConfigError, match=r"embed\.weight: got torch\.bfloat16"):
        Engine(model, SMALL)
    # The engine goes on with what it had.
    assert served(engine) == before


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_prompt_may_fill_the_pool_when_no_token_is_drawn(block_size, logprobs):
    """1,200 tokens in a pool of 1,200 were refused with "at most 1200 tokens in all"."""
    model = model_of(0)
    prompt = [3 + n * 11 % 400 for n in range(240)]
    params = SamplingParams(max_new_tokens=0, temperature=0, prompt_logprobs=logprobs)
    fields = {"block_size": block_size, "max_batch_tokens": 64}
    told = {}
    for tokens in (240, 480):
        engine = Engine(model, replace(SMALL, num_blocks=tokens // block_size, **fields))
        for _ in range(2):
            outputs = []
            engine.add(prompt, params, request_id="a")
            while engine.has_work:
                outputs += engine.step()
            assert outputs[-1].finish_reason == "length"
            told.setdefault(tokens, [o.prompt_logprobs for o in outputs if o.prompt_logprobs])
        assert served(engine) == served(Engine(model, SMALL))
    assert told[240] == told[480]
    assert bool(told[240]) == (logprobs is not None)
    engine = Engine(model, replace(SMALL, num_blocks=240 // block_size, **fields))
    with pytest.raises(RequestError, match="at most 240 tokens in all"):
        engine.add([*prompt, 3], params)


def test_pools_larger_than_the_memory_are_refused_before_they_are_allocated(monkeypatch):
    """A window of 10^7 asked for 84 GB: a traceback, or a process that the system ends."""
    monkeypatch.setattr(engine_module, "available_memory_bytes", lambda: 1 << 28)
    model = model_of(0, sliding_window=1 << 16)
    with pytest.raises(ConfigError, match="sliding_window is 65536") as error:
        Engine(model, replace(SMALL, max_sequences=8, max_batch_tokens=64))
    # 8 layers with rings of 2^16 + 7 rows of 64 codes and 2 scales; two open rows of 2 * 64 fp32.
    windows = 8 * (8 * ((1 << 16) + 7) * (64 + 2) + 2 * (2 * 64 * 4))
    assert f"{windows:,} for the windows of 8" in str(error.value)
    monkeypatch.setattr(engine_module, "available_memory_bytes", lambda: None)
    Engine(model_of(0), SMALL)
