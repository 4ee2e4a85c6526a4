"""Sinkhorn kernels in Triton's interpreter against `sinkhorn_ref` and finite differences."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.kernels.sinkhorn import (
    SinkhornUnsupportedError,
    sinkhorn_triton,
    sinkhorn_unsupported,
)
from finwhale.ops.hyper_connection import sinkhorn_planes, sinkhorn_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


def make_matrix(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).exp().to(DEVICE)


def with_gradient(form, matrix, iterations, grad, eps=EPS):
    leaf = matrix.detach().clone().requires_grad_()
    out = form(leaf, iterations, eps)
    return out.detach(), *torch.autograd.grad(out, leaf, grad)


def relative_error(got, want):
    return ((got - want).norm() / want.norm()).item()


def transposed(matrix, iterations, eps):
    return sinkhorn_ref(matrix.mT, iterations, eps).mT


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("shape", [(4, 4), (1, 2, 2), (2, 31, 4, 4), (64, 4, 4), (65, 2, 2)])
def test_kernels_equal_reference_with_gradient(shape, iterations):
    matrix, grad = make_matrix(*shape), torch.randn(shape, device=DEVICE)
    got = with_gradient(sinkhorn_triton, matrix, iterations, grad)
    for form in (sinkhorn_ref, sinkhorn_planes):
        want = with_gradient(form, matrix, iterations, grad)
        for left, right in zip(got, want, strict=True):
            assert left.shape == right.shape
            assert relative_error(left, right) < 1e-5


def test_gradient_equals_finite_differences_of_the_reference_in_float64():
    matrix = make_matrix(3, 4, 4, seed=1)
    grad = torch.randn(3, 4, 4, device=DEVICE)
    _, gradient = with_gradient(sinkhorn_triton, matrix, 5, grad, eps=1e-2)
    exact, step = matrix.double(), 1e-6
    want = torch.zeros_like(exact)
    for i in range(4):
        for j in range(4):
            moved = torch.zeros(4, 4, dtype=torch.float64, device=DEVICE)
            moved[i, j] = step
            ends = [sinkhorn_ref(exact + sign * moved, 5, 1e-2) for sign in (1, -1)]
            want[:, i, j] = ((ends[0] - ends[1]) / (2 * step) * grad).sum((-2, -1))
    assert relative_error(gradient.double(), want) < 1e-5


def test_one_iteration_is_one_column_step_by_hand():
    matrix = torch.tensor([[1.0, 2.0], [3.0, 2.0]], device=DEVICE)
    out, gradient = with_gradient(
        sinkhorn_triton, matrix, 1, torch.tensor([[1.0, 0.0], [0.0, 0.0]], device=DEVICE), eps=0.0
    )
    assert out.tolist() == [[0.25, 0.5], [0.75, 0.5]]
    # d(a / (a + c)) = c / (a + c)^2 and -a / (a + c)^2 with a = 1, c = 3.
    assert gradient.tolist() == [[3 / 16, 0.0], [-1 / 16, 0.0]]


@pytest.mark.parametrize("shape", [(0, 4, 4), (3, 0, 4, 4)])
def test_no_matrix_gives_no_matrix(shape):
    out, gradient = with_gradient(
        sinkhorn_triton, torch.ones(shape, device=DEVICE), 3, torch.ones(shape, device=DEVICE)
    )
    assert out.shape == gradient.shape == shape


def test_matrices_do_not_meet():
    # 65 matrices fill one block and start a second: changing one changes no other.
    matrix, grad = make_matrix(65, 4, 4), torch.randn(65, 4, 4, device=DEVICE)
    before = with_gradient(sinkhorn_triton, matrix, 3, grad)
    matrix[64] = float("nan")
    after = with_gradient(sinkhorn_triton, matrix, 3, grad)
    for left, right in zip(before, after, strict=True):
        assert torch.equal(left[:64], right[:64])
        assert right[64].isnan().all()


def test_strided_matrix_and_gradient_equal_contiguous_ones():
    matrix = make_matrix(4, 4, 5).movedim(-1, 0)
    grad = torch.randn(5, 4, 1, device=DEVICE).expand(5, 4, 4)
    got = with_gradient(sinkhorn_triton, matrix, 3, grad)
    want = with_gradient(sinkhorn_ref, matrix, 3, grad)
    assert max(map(relative_error, got, want)) < 1e-5


@pytest.mark.parametrize("change", ["axes swapped", "one iteration less", "no backward sum"])
def test_dropping_a_mechanism_breaks_agreement(change):
    matrix, grad = make_matrix(7, 4, 4), torch.randn(7, 4, 4, device=DEVICE)
    got = with_gradient(sinkhorn_triton, matrix, 3, grad)

    def frozen_divisors(matrix, iterations, eps):
        return matrix * (sinkhorn_ref(matrix, iterations, eps) / matrix).detach()

    form = {"axes swapped": transposed, "no backward sum": frozen_divisors}.get(change)
    want = with_gradient(form or sinkhorn_ref, matrix, 3 if form else 2, grad)
    assert relative_error(got[1], want[1]) > 1e-3
    if change != "no backward sum":
        assert relative_error(got[0], want[0]) > 1e-3


@pytest.mark.parametrize(
    ("matrix", "iterations", "cause"),
    [
        (torch.ones(5, 3, 3), 2, "N 2 or 4"),
        (torch.ones(4, 2), 2, "N 2 or 4"),
        (torch.ones(4), 2, "N 2 or 4"),
        (torch.ones(4, 4).bfloat16(), 2, "bfloat16: cast to float32"),
        (torch.ones(4, 4), 0, "iterations is 0"),
    ],
)
def test_refusal_names_the_cause(matrix, iterations, cause):
    assert sinkhorn_unsupported(torch.ones(4, 4, device=DEVICE), 1) is None
    with pytest.raises(SinkhornUnsupportedError, match=cause):
        sinkhorn_triton(matrix.to(DEVICE), iterations, EPS)
