"""Compiled on CUDA: fused loss, grouped experts, hyper-connections and selection, bf16 and fp32."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("liger_kernel", reason="the fused loss needs liger-kernel")

from finwhale.kernels.experts import grouped_experts
from finwhale.kernels.head_loss import head_loss_fused
from finwhale.kernels.hyper import hyper_collapse_triton, hyper_expand_triton
from finwhale.kernels.index_scores import select_topk_triton
from finwhale.ops.head_loss import NO_TARGET, head_loss_ref
from finwhale.ops.hyper_connection import hyper_collapse, hyper_expand
from finwhale.ops.index import select_topk_ref
from finwhale.ops.moe import clamped_swiglu

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])


def drawn(*shape, seed=0, dtype=torch.float32):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=g, device="cuda", dtype=dtype)


def relative_error(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))


def with_gradients(form, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = form(*leaves)
    grad = drawn(*out.shape, seed=9, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def agree(kernel, plain, dtype, *inputs):
    """The plain form runs in fp32 on the same, already rounded, values."""
    got = with_gradients(kernel, *inputs)
    want = with_gradients(plain, *(x.float() for x in inputs))
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < TOLERANCE[dtype]
    again = with_gradients(kernel, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@DTYPES
@pytest.mark.parametrize("vocab", [4096, 16384, 16389])
def test_fused_loss_equals_the_plain_loss_and_repeats(dtype, vocab):
    hidden, head = drawn(1000, 256, dtype=dtype), drawn(vocab, 256, seed=1) / 16
    targets = torch.randint(0, vocab, (1000,), device="cuda")
    targets[::7] = NO_TARGET
    agree(
        lambda h, w: head_loss_fused(h, w, targets, 384),
        lambda h, w: head_loss_ref(h, w, targets, 1000),
        dtype,
        hidden,
        head,
    )


@DTYPES
def test_grouped_experts_equal_masked_products(dtype):
    tokens, experts, k, c, f = 1003, 8, 2, 256, 128
    ids = torch.rand(tokens, experts, device="cuda").topk(k).indices
    ids[:, 0] = ids[:, 0].clamp_max(6)  # expert 7 is rarely or never first

    def plain(z, weights, gate_up, down):
        y = torch.zeros_like(z)
        for expert in range(experts):
            gate, up = (z @ gate_up[expert].t()).split(f, dim=-1)
            share = (weights * (ids == expert)).sum(-1, keepdim=True)
            y = y + clamped_swiglu(gate, up, share, 10.0) @ down[expert].t()
        return y

    agree(
        lambda z, w, a, b: grouped_experts(z, ids, w, a, b, 10.0, clamped_swiglu),
        plain,
        dtype,
        drawn(tokens, c, dtype=dtype),
        drawn(tokens, k, seed=1).abs(),
        drawn(experts, 2 * f, c, seed=2) / 16,
        drawn(experts, c, f, seed=3) / 11,
    )


@DTYPES
@pytest.mark.parametrize("channels", [96, 256, 512, 1030])
def test_hyper_connections_equal_the_plain_forms(dtype, channels):
    streams, pre = drawn(999, 4, channels, dtype=dtype), drawn(999, 4, seed=1)
    agree(hyper_collapse_triton, hyper_collapse, dtype, streams, pre)
    y, comb = drawn(999, channels, seed=2, dtype=dtype), drawn(999, 4, 4, seed=3)
    agree(hyper_expand_triton, hyper_expand, dtype, y, streams, pre, comb)


@pytest.mark.parametrize(("entries", "k"), [(1, 1), (1000, 128), (4096, 128), (8193, 512)])
def test_selection_follows_the_tie_rule(entries, k):
    scores = drawn(3, 333, entries).mul(4).round()
    scores[:, :9, 5:] = -torch.inf
    assert torch.equal(select_topk_triton(scores, k), select_topk_ref(scores, k))
