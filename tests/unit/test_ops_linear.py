"""Products, pooling and norms by hand arithmetic."""

import math

import pytest
import torch

from finwhale.ops.compress import pool_group
from finwhale.ops.linear import (
    grouped_linear,
    linear_fp32_accumulate,
    straight_through,
)
from finwhale.ops.norm import rms_norm


def test_grouped_linear_uses_each_groups_rows():
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # [N=1, G=2, K=2]
    weight = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0]])  # rows 0-1 group 0, rows 2-3 group 1
    assert grouped_linear(x, weight).tolist() == [[1, 2, 7, 6]]


def test_fp32_accumulation_rounds_once():
    # 256 + 1 - 256 in bf16 steps loses the 1; a single rounding keeps it.
    x = torch.tensor([[256.0, 1.0, -256.0]], dtype=torch.bfloat16)
    assert linear_fp32_accumulate(x, torch.ones(1, 3, dtype=torch.bfloat16)).item() == 1.0


def test_pool_group_is_a_softmax_per_channel():
    content = torch.tensor([[[1.0, 10.0], [3.0, 20.0]]])
    gate = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0]]])
    assert pool_group(content, gate)[0].tolist() == pytest.approx([2.0, 12.5])


def test_rms_norm_has_a_plain_weight_and_survives_zeros():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    got = rms_norm(x, torch.tensor([1.0, 0.03]), 1e-20)
    rms = math.sqrt(12.5)
    assert got[0].tolist() == pytest.approx([3 / rms, 0.03 * 4 / rms])
    assert got[1].tolist() == [0, 0]


def test_straight_through_rounds_forward_and_passes_gradients():
    x = torch.tensor([0.4, 1.6], requires_grad=True)
    y = straight_through(torch.round, x)
    assert y.tolist() == [0.0, 2.0]
    y.backward(torch.tensor([3.0, 5.0]))
    assert x.grad.tolist() == [3.0, 5.0]
