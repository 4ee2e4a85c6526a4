"""Muon against the singular value decomposition in float64 and against arithmetic by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from finwhale.optim.muon import Muon, MuonError, newton_schulz, newton_schulz_ref

SHAPES = [(1, 1), (1, 7), (7, 1), (2, 2), (5, 3), (3, 5), (8, 8), (33, 16)]


def _random(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def _polynomial(s: float) -> float:
    """What the iteration does to one singular value, written out."""
    for _ in range(8):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    for _ in range(2):
        s = 2.0 * s - 1.5 * s**3 + 0.5 * s**5
    return s


def _parameter(value: torch.Tensor, grad: torch.Tensor | None) -> nn.Parameter:
    parameter = nn.Parameter(value.clone())
    parameter.grad = None if grad is None else grad.clone()
    return parameter


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_polynomial_of_the_singular_values(shape):
    matrix = _random(*shape)
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    lifted = [_polynomial(float(s)) for s in S / S.square().sum().sqrt()]
    expected = U @ torch.diag(torch.tensor(lifted, dtype=torch.float64)) @ Vh
    torch.testing.assert_close(newton_schulz_ref(matrix), expected, rtol=0, atol=1e-10)


def test_singular_values_settle_at_one_and_fast_steps_alone_do_not():
    matrix = _random(12, 9)
    fast_only = newton_schulz_ref(matrix, [(3.4445, -4.7750, 2.0315)] * 8)
    settled = torch.linalg.svdvals(newton_schulz_ref(matrix))
    assert float((settled - 1).abs().max()) < 0.02
    assert float((torch.linalg.svdvals(fast_only) - 1).abs().max()) > 0.1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batched_equals_one_by_one(shape):
    matrices = _random(2, 3, *shape)
    expected = torch.stack([newton_schulz_ref(m) for m in matrices.flatten(0, 1)])
    found = newton_schulz(matrices, torch.float64)
    assert found.shape == matrices.shape
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=0, atol=1e-10)
    single = newton_schulz(matrices.float())
    assert single.dtype is torch.float32
    torch.testing.assert_close(single.flatten(0, 1).double(), expected, rtol=0, atol=2e-3)


def test_bf16_iteration_is_orthogonal_to_its_precision():
    matrices = _random(3, 16, 40, dtype=torch.float32)
    gram = newton_schulz(matrices, torch.bfloat16)
    assert gram.dtype is torch.float32
    singular = torch.linalg.svdvals(gram)
    assert float((singular - 1).abs().max()) < 0.1


def test_a_zero_matrix_stays_zero_beside_others():
    matrices = _random(3, 4, 6, dtype=torch.float32)
    matrices[1] = 0.0
    found = newton_schulz(matrices)
    assert not found[1].any()
    torch.testing.assert_close(found[[0, 2]], newton_schulz(matrices[[0, 2]]))
    assert newton_schulz(torch.empty(0, 4, 6)).shape == (0, 4, 6)


@pytest.mark.parametrize("scale", [1e-15, 1e-6, 1e12])
def test_the_size_of_the_gradient_does_not_matter(scale):
    matrix = _random(6, 4, dtype=torch.float32)
    torch.testing.assert_close(
        newton_schulz(matrix * scale), newton_schulz(matrix), rtol=0, atol=1e-4
    )


def test_one_by_one_steps_by_hand():
    parameter = _parameter(torch.tensor([[3.0]]), torch.tensor([[2.0]]))
    optimizer = Muon([parameter], lr=0.1, momentum=0.5, weight_decay=0.2)
    optimizer.step()
    # A 1x1 matrix over its norm is its sign: the update is 0.18 * p(1).
    size = 0.1 * 0.18 * _polynomial(1.0)
    first = 3.0 * (1 - 0.1 * 0.2) - size
    assert parameter.item() == pytest.approx(first, rel=1e-6)
    # M = 0.5 * 2 - 1.5 = -0.5; Nesterov 0.5 * -0.5 - 1.5 < 0. The step turns round.
    parameter.grad = torch.tensor([[-1.5]])
    optimizer.step()
    assert parameter.item() == pytest.approx(first * 0.98 + size, rel=1e-6)
    assert float(optimizer.state[parameter]["momentum"]) == -0.5
    # M = 0.5 * -0.5 + 0.3 = 0.05; Nesterov 0.325 > 0.
    parameter.grad = torch.tensor([[0.3]])
    optimizer.step()
    assert parameter.item() == pytest.approx((first * 0.98 + size) * 0.98 - size, rel=1e-6)


def test_nesterov_looks_ahead():
    """M = 0.5 * 2 - 0.9 = 0.1 points up; 0.5 * 0.1 - 0.9 points down, and that is followed."""
    parameter = _parameter(torch.tensor([[0.0]]), torch.tensor([[2.0]]))
    optimizer = Muon([parameter], lr=1.0, momentum=0.5, weight_decay=0.0)
    optimizer.step()
    before = parameter.item()
    parameter.grad = torch.tensor([[-0.9]])
    optimizer.step()
    assert parameter.item() > before


def test_two_by_two_step_by_hand():
    """diag(3, -4) has singular values 0.6 and 0.8 of its norm 5."""
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    parameter = _parameter(value, torch.diag(torch.tensor([3.0, -4.0])))
    Muon([parameter], lr=0.5, weight_decay=0.0).step()
    size = 0.5 * 0.18 * math.sqrt(2)
    expected = torch.tensor(
        [[1.0 - size * _polynomial(0.6), 2.0], [3.0, 4.0 + size * _polynomial(0.8)]]
    )
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 64), (16, 96), (96, 16), (24, 256), (1, 50)], ids=str)
def test_update_rms_is_that_of_adamw(shape):
    parameter = _parameter(torch.zeros(shape), _random(*shape, dtype=torch.float32))
    Muon([parameter], lr=1.0, weight_decay=0.0).step()
    rms = float(parameter.detach().square().mean().sqrt())
    assert rms == pytest.approx(0.18, rel=0.05)


def test_heads_are_separate_matrices_and_differ_from_the_whole():
    value = _random(12, 5, dtype=torch.float32)
    grad = _random(12, 5, seed=1, dtype=torch.float32)
    stacked, whole = _parameter(value, grad), _parameter(value, grad)
    separate = [_parameter(v, g) for v, g in zip(value.split(4), grad.split(4), strict=True)]
    Muon([stacked], lr=0.1, heads=3).step()
    Muon([whole], lr=0.1).step()
    Muon(separate, lr=0.1).step()
    joined = torch.cat([p.detach() for p in separate])
    torch.testing.assert_close(stacked.detach(), joined, rtol=0, atol=1e-6)
    assert float((whole.detach() - joined).abs().max()) > 1e-3


def _mixed_parameters() -> list[nn.Parameter]:
    shapes = [(6, 4), (4, 6), (12, 4), (6, 4), (3, 3), (6, 4)]
    return [
        _parameter(
            _random(*shape, seed=n, dtype=torch.float32),
            _random(*shape, seed=50 + n, dtype=torch.float32),
        )
        for n, shape in enumerate(shapes)
    ]


def _mixed_groups(parameters: list[nn.Parameter]) -> list[dict]:
    """Heads of (6, 4) beside whole (6, 4); two learning rates."""
    return [
        {"params": parameters[:2]},
        {"params": parameters[2:3], "heads": 2},
        {"params": parameters[3:], "lr": 0.5, "weight_decay": 0.0},
    ]


def test_one_batch_per_shape_equals_one_optimiser_per_parameter():
    together, alone = _mixed_parameters(), _mixed_parameters()
    groups = Muon(_mixed_groups(together), lr=0.1)
    singles = []
    for group in _mixed_groups(alone):
        for parameter in group.pop("params"):
            singles.append(Muon([{"params": [parameter], **group}], lr=0.1))
    for _ in range(3):
        groups.step()
        for single in singles:
            single.step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_elements", [1, 24, 25, 48])
def test_the_batch_limit_changes_nothing(max_elements):
    whole, cut = _mixed_parameters(), _mixed_parameters()
    Muon(_mixed_groups(whole), lr=0.1).step()
    Muon(_mixed_groups(cut), lr=0.1, max_elements=max_elements).step()
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_tensor_rate_equals_a_number():
    by_number, by_tensor = _mixed_parameters(), _mixed_parameters()
    Muon(by_number, lr=0.1).step()
    Muon(by_tensor, lr=torch.tensor(0.1)).step()
    for a, b in zip(by_number, by_tensor, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_zero_gradient_only_decays_and_no_gradient_does_nothing():
    value = _random(4, 3, dtype=torch.float32)
    zero, missing = _parameter(value, torch.zeros(4, 3)), _parameter(value, None)
    Muon([zero, missing], lr=0.5, weight_decay=0.1).step()
    torch.testing.assert_close(zero.detach(), value * 0.95)
    assert torch.equal(missing, value)
    Muon([missing]).step()


def test_resumed_momentum_is_exact_even_for_bf16_parameters():
    """Torch would round it to the parameter's dtype on loading."""
    value, grad = _random(4, 3).bfloat16(), _random(4, 3, seed=1).bfloat16()
    runs = [_parameter(value, grad) for _ in range(2)]
    first = Muon([runs[0]], lr=0.1)
    for _ in range(3):
        first.step()
    second = Muon([runs[1]], lr=0.1)
    second.load_state_dict(first.state_dict())
    momenta = [o.state[p]["momentum"] for o, p in zip((first, second), runs, strict=True)]
    assert momenta[1].dtype is torch.float32
    assert torch.equal(*momenta)
    assert not torch.equal(momenta[0], momenta[0].bfloat16().float())


@pytest.mark.parametrize(
    ("shape", "heads"), [((4,), 1), ((2, 2, 2), 1), ((5, 3), 2), ((4, 3), 0)], ids=str
)
def test_other_shapes_and_uneven_heads_are_refused(shape, heads):
    with pytest.raises(MuonError, match="heads"):
        Muon([nn.Parameter(torch.zeros(shape))], heads=heads)


def test_momentum_of_one_is_refused():
    with pytest.raises(MuonError, match="momentum"):
        Muon([nn.Parameter(torch.zeros(2, 2))], momentum=1.0)


def test_a_step_reads_no_value_on_the_host():
    """Tensors on the meta device have no values: reading one, or a shape made of one, raises."""
    parameters = [nn.Parameter(torch.empty(6, 4, device="meta")) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.empty(6, 4, device="meta")
    lr = torch.empty((), device="meta")
    Muon([{"params": parameters[:2], "heads": 2}, {"params": parameters[2:]}], lr=lr).step()
    with pytest.raises(RuntimeError):
        lr.item()
