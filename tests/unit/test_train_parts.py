"""Optimiser groups, learning rate, expert balance, bits per byte: each by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from finwhale.config.presets import unit, with_compressed_vocab
from finwhale.config.run import ScheduleConfig
from finwhale.data.packing import pack
from finwhale.model import Backbone
from finwhale.model.selection_plan import SelectionPlan
from finwhale.ops import FAST
from finwhale.optim.optimizers import Optimizers, learning_rate
from finwhale.train.balance import ExpertBalance, sequence_balance_loss
from finwhale.train.evaluate import bits_per_byte


@pytest.fixture
def model() -> Backbone:
    model = Backbone(with_compressed_vocab(unit(), 512), ops=FAST)
    model.init_weights(0)
    return model


def _plan(balance) -> SelectionPlan:
    return SelectionPlan(router_observer=balance)


def test_an_indexer_that_is_not_taught_is_frozen_and_nothing_else(model):
    """Case 125: without an objective the indexer stays as it was drawn."""
    Optimizers(model, indexer="frozen")
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert frozen
    ids = torch.arange(3, 43).view(1, 40)
    model(ids).square().mean().backward()
    without = {n for n, p in model.named_parameters() if p.requires_grad and p.grad is None}
    # An expert that served no token has no gradient in this pass.
    assert {name for name in without if ".experts." not in name} == set()
    Optimizers(model, indexer="adamw")
    assert all(p.requires_grad for p in model.parameters())


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


ALL = torch.ones(1, 10, dtype=torch.bool)
IDS = torch.arange(3, 13).view(1, 10)


def test_balance_moves_biases_against_the_load(model):
    """A bias that sends all tokens to experts 0 and 1 of 4: these go down, the others up."""
    balance = ExpertBalance(model, rate=0.25)
    gate = model.layers[0].ffn.gate
    gate.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    balance.watch(ALL)
    model(IDS, plan=_plan(balance))
    assert float(balance.update()) == 2.0
    assert gate.bias.tolist() == [8.75, 8.75, 0.25, 0.25]
    assert gate.bias_vl.tolist() == [0.0] * 4


def test_balance_without_a_plan_counts_nothing(model):
    """Control: nobody watches, nothing moves."""
    balance = ExpertBalance(model, rate=0.25)
    balance.watch(ALL)
    model(IDS)
    assert float(balance.update()) == 1.0
    assert not model.layers[0].ffn.gate.bias.any()


def test_balance_counts_live_positions_with_gradients_only(model):
    balance = ExpertBalance(model, rate=0.25)
    gate = model.layers[0].ffn.gate
    gate.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    balance.watch(torch.zeros(1, 10, dtype=torch.bool))
    model(IDS, plan=_plan(balance))
    with torch.no_grad():
        balance.watch(ALL)
        model(IDS, plan=_plan(balance))
    assert float(balance.update()) == 1.0
    # No load at all: nothing is known, nothing moves.
    assert gate.bias.tolist() == [9.0, 9.0, 0.0, 0.0]


def test_balance_rate_zero_leaves_biases_alone(model):
    balance = ExpertBalance(model, rate=0.0)
    balance.watch(ALL)
    model(IDS, plan=_plan(balance))
    balance.update()
    assert all(not layer.ffn.gate.bias.any() for layer in model.layers)


def test_text_and_image_biases_move_by_their_own_loads(model):
    """Six tokens by hand: three text, two image, one that does not count."""
    balance = ExpertBalance(model, rate=0.25)
    balance.watch(torch.tensor([[True, True, True], [True, True, False]]))
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [2, 3], [2, 3], [1, 1]])
    is_image = torch.tensor([False, False, False, True, True, True])
    balance.routed(model.specs[2], ids, torch.zeros(6, 4), is_image)
    # Text loads 3 2 1 0, mean 1.5: busiest 2; image loads 0 0 2 2, mean 1: busiest 2.
    assert float(balance.update()) == 2.0
    gate = model.layers[2].ffn.gate
    assert gate.bias.tolist() == [-0.25, -0.25, 0.25, 0.25]
    assert gate.bias_vl.tolist() == [0.25, 0.25, -0.25, -0.25]
    others = [layer.ffn.gate for n, layer in enumerate(model.layers) if n != 2]
    assert not any(bool(g.bias.any()) or bool(g.bias_vl.any()) for g in others)
    # The counts were cleared: an update without a pass moves nothing.
    assert float(balance.update()) == 1.0
    assert gate.bias.tolist() == [-0.25, -0.25, 0.25, 0.25]


def test_an_expert_at_its_share_does_not_move(model):
    balance = ExpertBalance(model, rate=0.5)
    balance.watch(torch.ones(1, 4, dtype=torch.bool))
    balance.routed(model.specs[0], torch.tensor([[0], [1], [2], [2]]), torch.zeros(4, 4), None)
    balance.update()
    assert model.layers[0].ffn.gate.bias.tolist() == [0.0, 0.0, -0.5, 0.5]


def _balance_by_hand(logits, chosen, live) -> float:
    """Return n * sum_i f_i P_i summed over rows, in Python floats."""
    total = 0.0
    for row, picks, counts in zip(logits, chosen, live, strict=True):
        kept = [(s, p) for s, p, c in zip(row, picks, counts, strict=True) if c]
        if not kept:
            continue
        n, num = len(kept), len(kept[0][0])
        k = len(kept[0][1])
        scores = [[math.sqrt(math.log1p(math.exp(x))) for x in s] for s, _ in kept]
        shares = [[x / sum(s) for x in s] for s in scores]
        for i in range(num):
            frequency = num / (k * n) * sum(i in p for _, p in kept)
            total += n * frequency * sum(s[i] for s in shares) / n
    return total


def test_sequence_balance_loss_of_two_tokens_and_two_experts_by_hand():
    logits = torch.tensor([[0.0, 0.0], [math.log(math.e**4 - 1), math.log(math.e - 1)]])
    chosen = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    live = torch.ones(1, 2, dtype=torch.bool)
    # Scores sqrt(softplus): equal, then 2 and 1. P_0 = (1/2 + 2/3) / 2; f = (2, 0); n = 2.
    want = 2 * 2 * (1 / 2 + 2 / 3) / 2
    assert float(sequence_balance_loss(logits, chosen, live)) == pytest.approx(want, rel=1e-6)
    # Even load over even scores is the least: 1 per token.
    even = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert float(sequence_balance_loss(torch.zeros(2, 2), even, live)) == pytest.approx(2.0)


def test_sequence_balance_loss_counts_rows_apart_and_live_tokens_only():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 4, generator=g)
    picks = logits.topk(2, dim=-1).indices
    chosen = torch.zeros_like(logits).scatter(-1, picks, 1.0)
    live = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    got = sequence_balance_loss(logits.flatten(0, 1), chosen.flatten(0, 1), live)
    want = _balance_by_hand(logits.tolist(), picks.tolist(), live.tolist())
    assert float(got) == pytest.approx(want, rel=1e-5)
    # Rows one by one add up to the whole: parts of a batch do too.
    parts = [sequence_balance_loss(logits[b], chosen[b], live[b : b + 1]) for b in range(3)]
    assert float(sum(parts)) == pytest.approx(want, rel=1e-5)
    assert float(parts[2]) == 0.0


def test_sequence_balance_gradient_equals_finite_differences():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(2, dim=-1).indices, 1.0)
    live = torch.tensor([[True, True, False], [True, True, True]])
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sequence_balance_loss(x, chosen, live), logits)
    sequence_balance_loss(logits, chosen, live).backward()
    assert not logits.grad[2].any()


def test_balance_weight_zero_is_no_loss_and_others_scale_it(model):
    found = {}
    for weight in (0.0, 1.0, 0.5):
        balance = ExpertBalance(model, rate=0.0, loss_weight=weight)
        balance.watch(ALL)
        model(IDS, plan=_plan(balance))
        found[weight] = balance.loss()
    assert found[0.0] is None
    assert float(found[1.0].detach()) == pytest.approx(2 * float(found[0.5].detach()))
    # At least 1 per token and layer: frequencies and shares sum like two aligned averages.
    assert float(found[1.0].detach()) == pytest.approx(10 * len(model.layers), rel=0.1)


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
