"""The remaining kernels of a training step against their plain forms, on a CPU.

Triton runs in its interpreter in fp32; the experts take the fp32 path of the grouped product.
"""

import os
from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.kernels.experts import grouped_experts
from finwhale.kernels.hyper import hyper_collapse_triton, hyper_expand_triton, hyper_mix_fused
from finwhale.kernels.index_scores import select_topk_triton
from finwhale.kernels.select import KernelError, grouped_linear_native, training_ops
from finwhale.ops import FAST
from finwhale.ops.hyper_connection import (
    hyper_collapse,
    hyper_expand,
    hyper_mix,
    sinkhorn_ref,
)
from finwhale.ops.index import select_topk_ref
from finwhale.ops.linear import grouped_linear
from finwhale.ops.moe import clamped_swiglu, route_experts
from tests.models import build, preset, token_ids

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def with_gradients(form, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = form(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [drawn(*out.shape, seed=50 + n) for n, out in enumerate(outputs)]
    found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    return [out.detach() for out in outputs], list(found)


def agree(kernel, plain, *inputs):
    (outs, grads), (want_outs, want_grads) = (with_gradients(f, *inputs) for f in (kernel, plain))
    for got, want in zip([*outs, *grads], [*want_outs, *want_grads], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


# 1,025 channels: two blocks, the second with one channel.
@pytest.mark.parametrize("shape", [(1, 4, 1), (3, 4, 33), (2, 2, 4, 96), (2, 4, 1025)])
def test_collapse_kernel_equals_the_plain_form(shape):
    agree(hyper_collapse_triton, hyper_collapse, drawn(*shape), drawn(*shape[:-1], seed=1))


@pytest.mark.parametrize("shape", [(1, 4, 1), (3, 4, 33), (2, 2, 4, 96), (2, 4, 1025)])
def test_expand_kernel_equals_the_plain_form(shape):
    batch, num, channels = shape[:-2], shape[-2], shape[-1]
    inputs = (
        drawn(*batch, channels),
        drawn(*shape, seed=1),
        drawn(*batch, num, seed=2),
        drawn(*batch, num, num, seed=3),
    )
    agree(hyper_expand_triton, hyper_expand, *inputs)


def test_negative_control_the_other_index_of_the_combine_matrix_is_another_function():
    y, streams, post, comb = drawn(3, 8), drawn(3, 4, 8), drawn(3, 4), drawn(3, 4, 4)
    right = hyper_expand(y, streams, post, comb)
    assert not torch.allclose(hyper_expand_triton(y, streams, post, comb.mT), right, atol=1e-2)


def test_no_token_gives_no_row():
    assert hyper_collapse_triton(drawn(0, 4, 8), drawn(0, 4)).shape == (0, 8)
    streams = drawn(0, 4, 8)
    assert hyper_expand_triton(drawn(0, 8), streams, drawn(0, 4), drawn(0, 4, 4)).shape == (0, 4, 8)


def test_mix_equals_the_plain_form():
    options = {"iterations": 4, "norm_eps": 1e-20, "eps": 1e-6}
    inputs = (drawn(2, 5, 4, 12), drawn(24, 48, seed=1), drawn(24, seed=2), drawn(3, seed=3))
    fused = partial(hyper_mix_fused, sinkhorn=sinkhorn_ref, **options)
    agree(lambda *x: tuple(fused(*x)), lambda *x: tuple(hyper_mix(*x, **options)), *inputs)


@pytest.mark.parametrize("entries", [1, 7, 64, 65])
@pytest.mark.parametrize("k", [1, 7, 8, 100])
def test_selection_kernel_equals_the_sorted_list(entries, k):
    # Few distinct values: ties at the threshold in nearly every row.
    scores = drawn(3, 5, entries).mul(2).round()
    hidden = torch.arange(entries, device=DEVICE) >= torch.arange(15, device=DEVICE).view(3, 5, 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    scores[0, 3, 0] = torch.nan
    assert torch.equal(select_topk_triton(scores, k), select_topk_ref(scores, k))


def test_selection_kernel_without_entries_selects_nothing():
    assert select_topk_triton(drawn(2, 3, 0), 4).shape == (2, 3, 0)


def experts_one_by_one(z, weights, gate_up, down, ids, limit):
    y = torch.zeros_like(z)
    width = gate_up.shape[1] // 2
    for token in range(len(z)):
        for choice, expert in enumerate(ids[token].tolist()):
            gate = gate_up[expert, :width] @ z[token]
            up = gate_up[expert, width:] @ z[token]
            hidden = clamped_swiglu(gate, up, weights[token, choice], limit)
            y[token] = y[token] + down[expert] @ hidden
    return y


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 4, 2), (7, 4, 2), (9, 3, 3), (6, 8, 1)])
def test_grouped_experts_equal_one_expert_at_a_time(tokens, experts, k):
    z, weights = drawn(tokens, 6), drawn(tokens, k, seed=1).abs()
    gate_up, down = drawn(experts, 10, 6, seed=2), drawn(experts, 6, 5, seed=3)
    ids, _ = route_experts(drawn(tokens, experts, seed=4), torch.zeros(experts).to(DEVICE), k, 1.0)

    def grouped(z, weights, gate_up, down):
        return grouped_experts(z, ids, weights, gate_up, down, 10.0, clamped_swiglu)

    def single(z, weights, gate_up, down):
        return experts_one_by_one(z, weights, gate_up, down, ids, 10.0)

    agree(grouped, single, z, weights, gate_up, down)


def test_stacked_experts_are_the_same_model_under_the_same_names():
    plain = build(preset("unit"))
    stacked = build(preset("unit"))
    object.__setattr__(stacked.parts, "ops", _with_grouped(stacked.parts.ops))
    stacked.stack_experts()
    ids = token_ids(2, 17)
    torch.testing.assert_close(stacked(ids), plain(ids), rtol=1e-5, atol=1e-5)
    assert stacked.state_dict().keys() == plain.state_dict().keys()
    # A view: what the optimiser writes is what a checkpoint reads.
    with torch.no_grad():
        stacked.layers[0].ffn.stacks["w2"].fill_(3.0)
    assert bool((stacked.layers[0].ffn.experts[1].w2.weight == 3.0).all())
    names = stacked.trained_tensors()
    assert not any(".experts.0." in name for name in names)
    assert sum(t.numel() for t in names.values()) == sum(p.numel() for p in plain.parameters())


def _with_grouped(ops):
    from dataclasses import replace

    return replace(ops, grouped_experts=grouped_experts)


def test_grouped_linear_in_the_inputs_dtype_equals_the_definition():
    x, weight = drawn(2, 3, 2, 8), drawn(12, 8, seed=1)
    agree(grouped_linear_native, grouped_linear, x, weight)


def test_cpu_gets_the_plain_operations_and_a_missing_gpu_is_named():
    assert training_ops("cpu") is FAST
    with pytest.raises(KernelError, match="expected 'cpu' or 'cuda'"):
        training_ops("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(KernelError, match="torch sees no GPU"):
            training_ops("cuda")
