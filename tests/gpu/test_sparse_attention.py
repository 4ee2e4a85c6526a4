"""Sparse attention kernels compiled for a GPU: the laws of the unit test at training sizes.

The expectation is autograd through the reference in fp32 on the same inputs; bf16 inputs are
rounded first, so that both sides start from the same numbers.
"""

import pytest
import torch

if not torch.cuda.is_available():
    # Before triton is imported: the interpreter's tests must be the first to do that on a CPU.
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from finwhale.kernels import sparse_attention as kernels
from finwhale.ops.attention import (
    sparse_attention_ref,
    sparse_attention_with_mass_masked,
)

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
WINDOW = 128


@pytest.fixture(autouse=True)
def _full_precision():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def case(tokens, heads, dim, entries, k, dtype, batch=2, earlier=0):
    """Two packed documents a sequence; a query selects among the entries before it, at ratio 2."""
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device="cuda")

    q, window_kv = normal(batch, tokens, heads, dim), normal(batch, earlier + tokens, dim)
    positions = torch.arange(earlier, earlier + tokens, device="cuda").repeat(batch, 1)
    positions[:, tokens // 3 :] -= int(positions[0, tokens // 3])
    sink = normal(heads)
    rows, topk = None, None
    if entries:
        rows = normal(batch, entries, dim).to(dtype)
        visible = torch.arange(tokens, device="cuda") * entries // tokens  # [T]
        is_hidden = torch.arange(entries, device="cuda") >= visible[:, None]  # [T, M]
        order = torch.rand(batch, tokens, entries, generator=g, device="cuda")
        best = order.masked_fill(is_hidden, -1.0).topk(min(k, entries), dim=-1)
        topk = torch.where(best.values < 0, -1, best.indices)
    return q.to(dtype), window_kv.to(dtype), rows, topk, sink, positions


def run(form, inputs, weights, dtype=None):
    """Return out, mass and the gradients of sum(out * weights), computed in `dtype` if given."""
    q, window_kv, entries, topk, sink, positions = inputs
    leaves = [
        x if x is None else (x.to(dtype) if dtype else x).detach().clone().requires_grad_()
        for x in (q, window_kv, entries)
    ]
    sink = sink.clone().requires_grad_()
    out, mass = form(*leaves, topk, sink, positions, WINDOW)
    wanted = [x for x in (*leaves, sink) if x is not None]
    return [out.detach(), mass, *torch.autograd.grad(out, wanted, weights.to(out.dtype))]


def relative(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("dtype", LIMITS, ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "entries", "k"),
    [
        (1, 4, 32, 1, 1),
        (63, 8, 64, 33, 5),
        (65, 2, 256, 33, 5),
        (65, 32, 512, 33, 5),
        (1000, 4, 128, 512, 128),
        (1000, 8, 512, 512, 128),
        (1000, 8, 128, 0, 0),
        (4096, 8, 128, 2048, 128),
    ],
)
def test_sparse_attention_equals_reference_with_gradients(tokens, heads, dim, entries, k, dtype):
    inputs = case(tokens, heads, dim, entries, k, dtype)
    weights = torch.randn(inputs[0].shape, device="cuda").to(dtype)
    got = run(kernels.sparse_attention_with_mass_triton, inputs, weights)
    want = run(sparse_attention_with_mass_masked, inputs, weights, torch.float32)
    assert len(got) == len(want)
    names = ("out", "mass", "q", "window_kv", *(("entries",) if entries else ()), "sink")
    for name, mine, theirs in zip(names, got, want, strict=True):
        assert mine.shape == theirs.shape, name
        if theirs.any():
            assert relative(mine, theirs) < LIMITS[dtype], name
        else:
            assert not mine.any(), name


@pytest.mark.parametrize("heads", [8, 64])
def test_sparse_attention_at_full_width_equals_reference(heads):
    # The largest case alone, in bf16: D = 512, with more heads than the key kernels take rows.
    tokens = 4096 if heads == 8 else 512
    inputs = case(tokens, heads, 512, 2048, 128, torch.bfloat16, batch=1, earlier=100)
    weights = torch.randn(inputs[0].shape, device="cuda").bfloat16()
    got = run(kernels.sparse_attention_with_mass_triton, inputs, weights)
    want = run(sparse_attention_with_mass_masked, inputs, weights, torch.float32)
    for mine, theirs in zip(got, want, strict=True):
        assert relative(mine, theirs) < 1e-2


@pytest.mark.parametrize("broken", ["selection", "sink"])
def test_sparse_attention_comparison_notices_a_mistake(broken):
    inputs = case(1000, 4, 128, 512, 8, torch.bfloat16)
    inputs[4].fill_(3.0)  # about a tenth of each softmax
    got = kernels.sparse_attention_triton(*inputs, WINDOW)
    q, window_kv, entries, topk, sink, positions = (
        x.float() if x.is_floating_point() else x for x in inputs
    )
    if broken == "selection":
        topk = torch.where(topk < 0, topk, (topk + 1) % 512)
    else:
        sink = torch.full_like(sink, -torch.inf)
    want = sparse_attention_ref(q, window_kv, entries, topk, sink, positions, WINDOW)
    assert relative(got, want) > 1.2e-2


@pytest.mark.parametrize("dim", [128, 512])
def test_sparse_attention_is_the_same_bit_for_bit(dim):
    inputs = case(1000, 8, dim, 512, 128, torch.bfloat16)
    weights = torch.randn(inputs[0].shape, device="cuda").bfloat16()
    first = run(kernels.sparse_attention_with_mass_triton, inputs, weights)
    for mine, again in zip(
        first, run(kernels.sparse_attention_with_mass_triton, inputs, weights), strict=True
    ):
        assert torch.equal(mine, again)


@pytest.mark.parametrize("entries", [0, 512])
def test_sparse_attention_in_a_cuda_graph_follows_its_inputs(entries):
    inputs = case(1000, 8, 128, entries, 32, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (*inputs[:3], inputs[4]) if x is not None]
    weights = torch.randn(inputs[0].shape, device="cuda").bfloat16()

    def step():
        out, mass = kernels.sparse_attention_with_mass_triton(*inputs, WINDOW)
        return [out, mass, *torch.autograd.grad(out, leaves, weights)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    # New numbers and a new selection in the same memory.
    with torch.no_grad():
        inputs[0].mul_(-0.5)
        if entries:
            inputs[3].copy_(torch.where(inputs[3] < 0, -1, entries - 1 - inputs[3]))
    graph.replay()
    replayed = [x.clone() for x in captured]
    for mine, fresh in zip(replayed, step(), strict=True):
        assert torch.equal(mine, fresh)
