"""Routing and the clamped SwiGLU by hand arithmetic (section 8)."""

import math

import pytest
import torch

from finwhale.ops.moe import clamped_swiglu, route_experts


def score(g):
    return math.sqrt(math.log1p(math.exp(g)))


def test_route_weights_are_normalised_scores_times_scaling():
    ids, weights = route_experts(torch.tensor([[0.5, -1.0, 2.0, 0.0]]), torch.zeros(4), 2, 1.5)
    assert ids.tolist() == [[2, 0]]
    a, b = score(2.0), score(0.5)
    assert weights[0].tolist() == pytest.approx([1.5 * a / (a + b), 1.5 * b / (a + b)])


def test_route_bias_picks_and_does_not_scale():
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    ids, weights = route_experts(logits, torch.tensor([0.0, 9.0, 0, 0]), 2, 1.5)
    assert ids.tolist() == [[1, 2]]
    a, b = score(-1.0), score(2.0)
    assert weights[0].tolist() == pytest.approx([1.5 * a / (a + b), 1.5 * b / (a + b)])


def test_route_survives_very_negative_logits():
    # log(1 + exp(-40)) is zero in fp32; the stable form keeps exp(-20) per score.
    _, weights = route_experts(torch.full((1, 3), -40.0), torch.zeros(3), 2, 1.5)
    assert weights[0].tolist() == pytest.approx([0.75, 0.75])


def test_route_ties_go_to_the_lowest_expert():
    assert route_experts(torch.zeros(1, 384), torch.zeros(384), 6, 1.5)[0].tolist() == [
        [0, 1, 2, 3, 4, 5]
    ]


def test_route_of_384_experts_equals_sorted_list():
    logits = torch.randn(50, 384, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(384, generator=torch.Generator().manual_seed(1)) * 0.1
    ids, _ = route_experts(logits, bias, 6, 1.5)
    for row, got in zip(logits.tolist(), ids.tolist(), strict=True):
        rank = sorted(range(384), key=lambda e: (-(score(row[e]) + float(bias[e])), e))
        assert got == rank[:6]


def test_route_takes_a_bias_per_token():
    bias = torch.tensor([[0.0, 0, 9], [9.0, 0, 0]])
    assert route_experts(torch.zeros(2, 3), bias, 1, 1.0)[0].tolist() == [[2], [0]]


def test_swiglu_clamps_gate_from_above_only():
    gate, up = torch.tensor([20.0, -20.0, 1.0]), torch.tensor([30.0, -30.0, 2.0])

    def silu(v):
        return v / (1 + math.exp(-v))

    want = [silu(10.0) * 10, silu(-20.0) * -10, silu(1.0) * 2]
    assert clamped_swiglu(gate, up, None, 10.0).tolist() == pytest.approx(want, rel=1e-6)
    weight = torch.tensor([0.5])
    halved = [v / 2 for v in want]
    assert clamped_swiglu(gate, up, weight, 10.0).tolist() == pytest.approx(halved, rel=1e-6)
