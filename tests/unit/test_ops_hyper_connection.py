"""Hyper-connections against loops written from section 6."""

import math

import pytest
import torch

from finwhale.ops.hyper_connection import (
    hyper_collapse,
    hyper_expand,
    hyper_mix,
    sinkhorn_planes,
    sinkhorn_ref,
)

N, C, EPS, NORM_EPS = 4, 6, 1e-6, 1e-20


def site(seed=0, tokens=3):
    g = torch.Generator().manual_seed(seed)
    streams = torch.randn(tokens, N, C, generator=g)
    fn = torch.randn(24, N * C, generator=g) * 0.3
    base = torch.randn(24, generator=g) * 0.2
    return streams, fn, base, torch.tensor([0.7, 1.1, 0.9])


def loop(streams, fn, base, scale, iterations):
    """Section 6 steps 1 to 3 for one token, in Python floats."""
    u = streams.double().flatten().tolist()
    rms = 1 / math.sqrt(sum(v * v for v in u) / len(u) + NORM_EPS)
    m = [sum(w * v for w, v in zip(row, u, strict=True)) * rms for row in fn.double().tolist()]
    base, scale = base.double().tolist(), scale.double().tolist()

    def sigmoid(v):
        return 1 / (1 + math.exp(-v))

    pre = [sigmoid(scale[0] * m[i] + base[i]) + EPS for i in range(N)]
    post = [2 * sigmoid(scale[1] * m[4 + i] + base[4 + i]) for i in range(N)]
    r = []
    for i in range(N):
        e = [math.exp(scale[2] * m[8 + 4 * i + j] + base[8 + 4 * i + j]) for j in range(N)]
        r.append([v / sum(e) + EPS for v in e])
    for step in range(2 * iterations - 1):
        if step % 2 == 0:
            sums = [sum(r[i][j] for i in range(N)) + EPS for j in range(N)]
            r = [[r[i][j] / sums[j] for j in range(N)] for i in range(N)]
        else:
            r = [[v / (sum(row) + EPS) for v in row] for row in r]
    return pre, post, r


@pytest.mark.parametrize("form", [sinkhorn_ref, sinkhorn_planes])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_mix_equals_loop(form, iterations):
    streams, fn, base, scale = site()
    mix = hyper_mix(
        streams, fn, base, scale, iterations=iterations, norm_eps=NORM_EPS, eps=EPS, sinkhorn=form
    )
    for t in range(streams.shape[0]):
        pre, post, comb = loop(streams[t], fn, base, scale, iterations)
        torch.testing.assert_close(mix.pre[t], torch.tensor(pre), rtol=2e-6, atol=0)
        torch.testing.assert_close(mix.post[t], torch.tensor(post), rtol=2e-6, atol=0)
        torch.testing.assert_close(mix.comb[t], torch.tensor(comb), rtol=5e-6, atol=1e-7)


def test_sinkhorn_ends_on_columns_and_leaves_rows_alone():
    sharp = torch.tensor([[9.0, 1, 1, 1], [8, 1, 1, 1], [7, 1, 2, 1], [9, 1, 1, 3]])
    once = sinkhorn_ref(sharp, 2, EPS)
    torch.testing.assert_close(once.sum(0), torch.ones(4), rtol=0, atol=1e-5)
    assert (once.sum(1) - 1).abs().max() > 1e-3


def test_sinkhorn_planes_equals_reference_with_gradients():
    g = torch.Generator().manual_seed(1)
    matrix = torch.rand(2, 5, N, N, generator=g, dtype=torch.float64) + 0.05
    weights = torch.randn(matrix.shape, generator=g, dtype=torch.float64)
    results = []
    for form in (sinkhorn_ref, sinkhorn_planes):
        leaf = matrix.clone().requires_grad_()
        out = form(leaf, 20, EPS)
        results.append((out.detach(), *torch.autograd.grad((out * weights).sum(), leaf)))
    for ref, fast in zip(*results, strict=True):
        torch.testing.assert_close(ref, fast, rtol=1e-12, atol=1e-13)


def test_sinkhorn_planes_gradient_equals_finite_differences():
    g = torch.Generator().manual_seed(2)
    matrix = (torch.rand(1, 1, 3, 3, generator=g, dtype=torch.float64) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: sinkhorn_planes(m, 4, 1e-2), (matrix,))


def test_expand_contracts_the_first_index():
    # comb[0][1] alone carries stream 0 into stream 1; the transpose would carry 1 into 0.
    streams = torch.zeros(N, 2)
    streams[0] = torch.tensor([3.0, 5.0])
    comb = torch.zeros(N, N)
    comb[0, 1] = 1.0
    out = hyper_expand(torch.tensor([10.0, 20.0]), streams, torch.tensor([0.0, 0, 1, 2]), comb)
    assert out.tolist() == [[0, 0], [3, 5], [10, 20], [20, 40]]


def test_collapse_weighs_streams():
    streams = torch.tensor([[1.0, 0], [0, 1], [2, 2], [4, 4]])
    assert hyper_collapse(streams, torch.tensor([1.0, 2, 0, 0.5])).tolist() == [3, 4]


def test_zero_streams_give_finite_coefficients():
    _, fn, base, scale = site()
    mix = hyper_mix(torch.zeros(1, N, C), fn, base, scale, iterations=20, norm_eps=1e-20, eps=EPS)
    assert all(torch.isfinite(part).all() for part in mix)
