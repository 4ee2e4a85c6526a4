"""Optimiser groups, learning rate, expert balance, bits per byte: each by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from finwhale.config.presets import unit, with_compressed_vocab
from finwhale.config.run import OptimConfig, ScheduleConfig
from finwhale.data.packing import pack
from finwhale.model import Backbone
from finwhale.ops import FAST
from finwhale.train.balance import ExpertBalance
from finwhale.train.evaluate import bits_per_byte
from finwhale.train.optimizer import build_optimizer, learning_rate


@pytest.fixture
def model() -> Backbone:
    model = Backbone(with_compressed_vocab(unit(), 512), ops=FAST)
    model.init_weights(0)
    return model


def test_norms_biases_sinks_and_scales_do_not_decay(model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.25))
    decayed, kept = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    for part in ("norm", "attn_sink", "_base", "_scale", "q_weight", "k_weight"):
        assert not [name for name in decayed if part in name], part
        assert [name for name in kept if part in name], part
    for part in ("embed.weight", "head.weight", "wq_a", "w1", "gate.weight", "hc_attn_fn", "wkv"):
        assert [name for name in decayed if part in name], part


def test_the_indexer_is_frozen_and_nothing_else(model):
    """Case 125: no objective teaches the indexer here, so it stays as it was drawn."""
    build_optimizer(model, OptimConfig())
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert frozen
    ids = torch.arange(3, 43).view(1, 40)
    model(ids).square().mean().backward()
    without = {n for n, p in model.named_parameters() if p.requires_grad and p.grad is None}
    # An expert that served no token has no gradient in this pass.
    assert {name for name in without if ".experts." not in name} == set()


def test_learning_rate_by_hand():
    schedule = ScheduleConfig(steps=11, warmup_steps=2, min_ratio=0.1)
    rates = [learning_rate(step, 2.0, schedule) for step in range(11)]
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[6] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # half-way: cosine is zero
    assert rates[10] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(rates[2:]))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_learning_rate_of_runs_that_only_warm_up(steps):
    schedule = ScheduleConfig(steps=steps, warmup_steps=steps)
    assert learning_rate(steps - 1, 0.5, schedule) == 0.5


def test_balance_moves_biases_against_the_load(model):
    """A bias that sends all tokens to experts 0 and 1 of 4: these go down, the others up."""
    balance = ExpertBalance(model, rate=0.25)
    gate = model.layers[0].ffn.gate
    gate.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    ids = torch.arange(3, 13).view(1, 10)
    balance.watch(torch.ones(1, 10, dtype=torch.bool))
    model(ids)
    assert balance.update() == 2.0
    assert gate.bias.tolist() == [8.75, 8.75, 0.25, 0.25]
    assert gate.bias_vl.tolist() == [0.0] * 4


def test_balance_counts_live_positions_with_gradients_only(model):
    balance = ExpertBalance(model, rate=0.25)
    gate = model.layers[0].ffn.gate
    gate.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    ids = torch.arange(3, 13).view(1, 10)
    balance.watch(torch.zeros(1, 10, dtype=torch.bool))
    model(ids)
    with torch.no_grad():
        balance.watch(torch.ones(1, 10, dtype=torch.bool))
        model(ids)
    assert balance.update() == 1.0
    # No load at all: every expert is under its share of zero.
    assert gate.bias.tolist() == [9.25, 9.25, 0.25, 0.25]


def test_balance_rate_zero_leaves_biases_alone(model):
    balance = ExpertBalance(model, rate=0.0)
    balance.watch(torch.ones(1, 10, dtype=torch.bool))
    model(torch.arange(3, 13).view(1, 10))
    balance.update()
    assert all(not layer.ffn.gate.bias.any() for layer in model.layers)


def test_uniform_model_needs_log2_of_the_vocabulary(model):
    """Zero head: every target costs log2(512) = 9 bits."""
    with torch.no_grad():
        model.head.weight.zero_()
    documents = [list(range(3, 3 + length)) for length in (5, 30, 90)]
    packed = pack(documents, sequence_length=32, pad_id=2)
    targets = 4 + 29 + 89
    bits = bits_per_byte(model, packed, 100, chunk_tokens=16)
    assert bits == pytest.approx(targets * 9 / 100)


def test_bits_per_byte_do_not_depend_on_the_row_order(model):
    documents = [np.random.default_rng(n).integers(3, 500, 20).tolist() for n in range(6)]
    values = [
        bits_per_byte(model, pack(order, sequence_length=40, pad_id=2), 77, chunk_tokens=4096)
        for order in (documents, documents[::-1])
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    assert math.isfinite(values[0])
