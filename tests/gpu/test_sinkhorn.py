"""Sinkhorn kernels compiled on CUDA: parity with the reference, repeatability, graph capture."""

import pytest
import torch

if not torch.cuda.is_available():
    # Imported without a GPU, the kernels would be compiled ones for the interpreter's tests too.
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.kernels.sinkhorn import sinkhorn_triton
from finwhale.ops.hyper_connection import sinkhorn_ref

DEVICE = "cuda"
EPS = 1e-6


def make_matrix(*shape, seed=0):
    g = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=g, device=DEVICE).exp()


def with_gradient(form, matrix, iterations, grad, eps=EPS):
    leaf = matrix.detach().clone().requires_grad_()
    out = form(leaf, iterations, eps)
    return out.detach(), *torch.autograd.grad(out, leaf, grad)


def relative_error(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize(
    "shape", [(4, 4), (1, 1, 2, 2), (63, 4, 4), (65, 2, 2), (2, 1000, 4, 4), (16, 4097, 4, 4)]
)
def test_kernels_equal_reference_with_gradient(shape, iterations):
    matrix, grad = make_matrix(*shape), torch.randn(shape, device=DEVICE)
    got = with_gradient(sinkhorn_triton, matrix, iterations, grad)
    want = with_gradient(sinkhorn_ref, matrix, iterations, grad)
    assert relative_error(got[0], want[0]) < 1e-5
    assert relative_error(got[1], want[1]) < 1e-5


def test_gradient_equals_float64_autograd():
    matrix, grad = make_matrix(4097, 4, 4), torch.randn(4097, 4, 4, device=DEVICE)
    got = with_gradient(sinkhorn_triton, matrix, 20, grad)
    want = with_gradient(sinkhorn_ref, matrix.double(), 20, grad.double())
    assert relative_error(got[0].double(), want[0]) < 1e-5
    assert relative_error(got[1].double(), want[1]) < 1e-5


def test_one_iteration_less_breaks_agreement():
    matrix, grad = make_matrix(65, 4, 4), torch.randn(65, 4, 4, device=DEVICE)
    got = with_gradient(sinkhorn_triton, matrix, 3, grad)
    want = with_gradient(sinkhorn_ref, matrix, 2, grad)
    assert relative_error(got[0], want[0]) > 1e-3
    assert relative_error(got[1], want[1]) > 1e-3


def test_two_runs_give_the_same_bits():
    # Many runs' worth of programs: a divisor read before it is stored would differ between them.
    matrix, grad = make_matrix(65_537, 4, 4), torch.randn(65_537, 4, 4, device=DEVICE)
    one, two = (with_gradient(sinkhorn_triton, matrix, 20, grad) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


def test_graph_of_forward_and_backward_replays_on_new_values():
    held, grad = make_matrix(2, 1000, 4, 4).requires_grad_(), torch.randn(2, 1000, 4, 4).cuda()

    def step():
        out = sinkhorn_triton(held, 20, EPS)
        return out, *torch.autograd.grad(out, held, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    fresh = make_matrix(2, 1000, 4, 4, seed=1)
    with torch.no_grad():
        held.copy_(fresh)
    graph.replay()
    want = with_gradient(sinkhorn_triton, fresh, 20, grad)
    assert all(torch.equal(a, b.detach()) for a, b in zip(want, captured, strict=True))
