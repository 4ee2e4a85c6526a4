"""Sinkhorn-balanced momentum: by hand on two rows, and scale vectors against the written matrix."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from finwhale.optim.sinkhorn_momentum import (
    SinkhornMomentum,
    SinkhornMomentumError,
    sinkhorn_update,
    sinkhorn_update_ref,
)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _uneven(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows and columns of very different size, and every third row without a gradient."""
    g = _random(rows, columns, seed=seed)
    g *= torch.logspace(-1, 1, columns) * torch.logspace(0, 1.5, rows).unsqueeze(1)
    g[2::3] = 0.0
    return g


@pytest.mark.parametrize("update", [sinkhorn_update, sinkhorn_update_ref])
def test_three_steps_on_two_rows_by_hand(update):
    g = torch.tensor([[3.0, 4.0], [0.0, 5.0]])
    root = math.sqrt(2)  # sqrt(n)
    rows = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    torch.testing.assert_close(update(g, steps=1), root * rows)
    second = math.sqrt(0.8**2 + 1.0)
    columns = torch.tensor([[1.0, 0.8 / second], [0.0, 1.0 / second]])
    torch.testing.assert_close(update(g, steps=2), root * columns)
    first_row = math.hypot(1.0, 0.8 / second)
    last = torch.tensor([[1.0 / first_row, 0.8 / second / first_row], [0.0, 1.0]])
    torch.testing.assert_close(update(g, steps=3), root * last)


@pytest.mark.parametrize("scale", [1e-18, 1e-12, 1.0, 1e15])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (7, 1), (2, 2), (33, 16), (200, 32)], ids=str)
def test_scale_vectors_equal_the_written_matrix(shape, scale):
    g = _uneven(*shape) * scale
    expected = sinkhorn_update_ref(g.double())
    found = sinkhorn_update(g)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-6)


def test_every_live_row_has_rms_one():
    g = _uneven(40, 16)
    rms = sinkhorn_update(g).square().mean(1).sqrt()
    expected = torch.ones(40)
    expected[2::3] = 0.0
    torch.testing.assert_close(rms, expected, rtol=1e-5, atol=0)


def test_columns_are_equalised_and_row_steps_alone_leave_them_uneven():
    g = _uneven(60, 8)

    def spread(update: torch.Tensor) -> float:
        sizes = update.square().mean(0)
        return float(sizes.max() / sizes.min())

    assert spread(sinkhorn_update(g)) < 1.01
    assert spread(sinkhorn_update(g, steps=1)) > 100
    # An even number of steps ends on columns: exactly equal.
    assert spread(sinkhorn_update(g, steps=10)) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("update", [sinkhorn_update, sinkhorn_update_ref])
def test_rows_at_or_below_the_floor_do_not_move(update):
    """Norms 1, 2, 3 have mean 2: half of it is 1, and the row exactly there is dropped."""
    g = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    at = update(g, row_floor=0.5)
    assert at.abs().sum(1).gt(0).tolist() == [False, True, True]
    below = update(g, row_floor=0.49)
    assert below.abs().sum(1).gt(0).tolist() == [True, True, True]


def test_the_floor_is_a_thousandth_of_the_mean_row():
    g = torch.zeros(2, 3)
    g[0, 0], g[1, 1] = 1.0, 5.1e-4  # mean about 0.5, floor about 5.003e-4
    assert sinkhorn_update(g)[1].any()
    g[1, 1] = 4.9e-4
    assert not sinkhorn_update(g)[1].any()
    assert sinkhorn_update(g)[0].any()


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (0, 4), (4, 0)], ids=str)
def test_no_gradient_is_no_update(shape):
    assert torch.equal(sinkhorn_update(torch.zeros(shape)), torch.zeros(shape))


def test_empty_columns_stay_empty_and_finite():
    """1/eps = 1e20 squared is infinite in fp32: the plain product of scales would be NaN."""
    g = _random(9, 5)
    g[:, 2] = 0.0
    found = sinkhorn_update(g)
    torch.testing.assert_close(found, sinkhorn_update_ref(g), rtol=2e-5, atol=1e-6)
    assert not found[:, 2].any()
    assert not torch.isfinite(torch.tensor(1 / 1e-20).square())


@pytest.mark.parametrize("peak", [1e-45, 1e-38, 1e-30])
def test_vanishing_gradients_stay_finite(peak):
    found = sinkhorn_update(_random(6, 4) * peak)
    assert torch.isfinite(found).all()


def test_steps_by_hand():
    """One number: the update is the sign of beta M + (1 - beta) G times gamma lr."""
    parameter = nn.Parameter(torch.tensor([[1.0]]))
    optimizer = SinkhornMomentum([parameter], lr=0.5, beta=0.75, gamma=0.2)
    parameter.grad = torch.tensor([[8.0]])
    optimizer.step()
    assert parameter.item() == pytest.approx(0.9)
    assert float(optimizer.state[parameter]["momentum"]) == pytest.approx(2.0)
    # M = 0.75 * 2 - 0.25 * 5 = 0.25; Nesterov 0.75 * 0.25 - 0.25 * 5 < 0: it turns round.
    parameter.grad = torch.tensor([[-5.0]])
    optimizer.step()
    assert parameter.item() == pytest.approx(1.0)
    assert float(optimizer.state[parameter]["momentum"]) == pytest.approx(0.25)


def test_a_live_row_moves_by_gamma_times_the_rate_and_a_dead_one_not_at_all():
    value = _random(12, 8, seed=1)
    parameter = nn.Parameter(value.clone())
    parameter.grad = _uneven(12, 8)
    SinkhornMomentum([parameter], lr=0.1).step()
    moved = (parameter.detach() - value).square().mean(1).sqrt()
    expected = torch.full((12,), 0.018)
    expected[2::3] = 0.0
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=0)
    # No decay: a row without a gradient is what it was, bit for bit.
    assert torch.equal(parameter.detach()[2::3], value[2::3])


def test_a_tensor_rate_equals_a_number_and_no_gradient_does_nothing():
    value = _random(6, 4)
    parameters = [nn.Parameter(value.clone()) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = _random(6, 4, seed=3)
    SinkhornMomentum([parameters[0], parameters[2]], lr=0.1).step()
    SinkhornMomentum([parameters[1]], lr=torch.tensor(0.1)).step()
    torch.testing.assert_close(parameters[0], parameters[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(parameters[2], value)


def test_other_shapes_and_momentum_of_one_are_refused():
    with pytest.raises(SinkhornMomentumError, match="AdamW"):
        SinkhornMomentum([nn.Parameter(torch.zeros(3))])
    with pytest.raises(SinkhornMomentumError, match="beta"):
        SinkhornMomentum([nn.Parameter(torch.zeros(2, 2))], beta=1.0)


def test_a_step_reads_no_value_on_the_host():
    """Tensors on the meta device have no values: reading one, or a shape made of one, raises."""
    parameter = nn.Parameter(torch.empty(6, 4, device="meta"))
    parameter.grad = torch.empty(6, 4, device="meta")
    SinkhornMomentum([parameter], lr=torch.empty((), device="meta")).step()
    with pytest.raises(RuntimeError):
        parameter.grad[parameter.grad.sum(1) > 0]
