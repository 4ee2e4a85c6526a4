"""Index-score kernels compiled on CUDA: parity, repeatability, graph capture, long offsets."""

import pytest
import torch

if not torch.cuda.is_available():
    # Imported without a GPU, the kernels would be compiled ones for the interpreter's tests too.
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.kernels.index_scores import visible_index_scores_triton
from finwhale.ops.index import visible_index_scores_ref

DEVICE = "cuda"
HEADS = 24
NAMES = ("scores", "q", "weights", "keys")
# B, T, M, DI
SHAPES = [
    (1, 1, 1, 32),
    (2, 63, 65, 32),
    (2, 65, 127, 64),
    (2, 1000, 512, 64),
    (1, 1000, 4096, 128),
    (1, 4096, 512, 128),
    (1, 4096, 4096, 64),
]


def packed(batch, tokens, entries, g):
    """Return first and visible of packed documents: causal inside each, some tokens see nothing."""
    bounds = torch.rand(batch, 3, generator=g, device=DEVICE).sort().values
    place = torch.arange(tokens, device=DEVICE).expand(batch, tokens)
    edge = (bounds * tokens).long()
    document = (place[..., None] >= edge[:, None]).sum(-1)
    starts = torch.nn.functional.pad(edge, (1, 0))
    position = place - starts.gather(1, document)
    first = (starts * entries // tokens).gather(1, document)
    return first, torch.minimum((position + 1) * entries // tokens, entries - first)


def make_inputs(batch, tokens, entries, dim, dtype, *, seed=0):
    """In fp32 q and keys are small integers: dot products are exact, many are 0.

    Otherwise a product near 0 could fall on either side of the ReLU by the order of its sum, and
    one such flip is larger than the tolerance.
    """
    g = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape):
        if dtype is torch.float32:
            return torch.randint(-2, 3, shape, generator=g, device=DEVICE).float()
        return torch.randn(shape, generator=g, device=DEVICE).to(dtype)

    weights = torch.randn(batch, tokens, HEADS, generator=g, device=DEVICE) * HEADS**-0.5
    return [
        draw(batch, tokens, HEADS, dim),
        weights.to(dtype),
        draw(batch, entries, dim),
        *packed(batch, tokens, entries, g),
    ]


def with_gradients(form, inputs, grad):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs[:3]]
    out = form(*leaves, *inputs[3:])
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def assert_near(got, want, tolerance):
    assert torch.equal(got[0].isneginf(), want[0].isneginf())
    for name, left, right in zip(NAMES, got, want, strict=True):
        left, right = (t.float().masked_fill(t.isneginf(), 0) for t in (left, right))
        error = (left - right).norm() / right.norm().clamp_min(1e-30)
        assert error < tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "B{}-T{}-M{}-DI{}".format(*s))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)], ids=["bf16", "fp32"]
)
def test_kernels_equal_reference_with_gradients(shape, dtype, tolerance):
    batch, tokens, entries, _ = shape
    inputs = make_inputs(*shape, dtype)
    grad = torch.randn(batch, tokens, entries, device=DEVICE)
    got = with_gradients(visible_index_scores_triton, inputs, grad)
    assert [t.dtype for t in got] == [torch.float32, dtype, dtype, dtype]
    assert_near(got, with_gradients(visible_index_scores_ref, inputs, grad), tolerance)
    # Without the roundings of D03, too.
    exact = [t.float() if t.is_floating_point() else t for t in inputs]
    assert_near(got, with_gradients(visible_index_scores_ref, exact, grad), tolerance)


@pytest.mark.parametrize("heads", [1, 3, 32, 64])
def test_any_number_of_heads_equals_reference(heads, monkeypatch):
    monkeypatch.setitem(globals(), "HEADS", heads)
    inputs = make_inputs(2, 129, 130, 64, torch.float32)
    grad = torch.randn(2, 129, 130, device=DEVICE)
    want = with_gradients(visible_index_scores_ref, inputs, grad)
    assert_near(with_gradients(visible_index_scores_triton, inputs, grad), want, 1e-5)


def test_fp32_weights_go_with_bf16_queries():
    inputs = make_inputs(2, 129, 130, 64, torch.bfloat16)
    inputs[1] = inputs[1].float()
    grad = torch.randn(2, 129, 130, device=DEVICE)
    got = with_gradients(visible_index_scores_triton, inputs, grad)
    assert got[2].dtype is torch.float32
    assert_near(got, with_gradients(visible_index_scores_ref, inputs, grad), 1e-2)


def test_nothing_visible_and_nan_that_comes_in_give_zero_gradients():
    inputs = make_inputs(2, 129, 130, 64, torch.bfloat16)
    inputs[4].zero_()
    grad = torch.full((2, 129, 130), float("nan"), device=DEVICE)
    out, *gradients = with_gradients(visible_index_scores_triton, inputs, grad)
    assert out.isneginf().all()
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("drop", ["first", "visible", "relu"])
def test_dropping_a_mechanism_breaks_agreement(drop):
    inputs = make_inputs(2, 129, 130, 64, torch.bfloat16)
    grad = torch.randn(2, 129, 130, device=DEVICE)
    got = with_gradients(visible_index_scores_triton, inputs, grad)

    def changed(q, weights, keys, first, visible):
        if drop == "first":
            first = torch.zeros_like(first)
        elif drop == "visible":
            visible = torch.full_like(visible, 130)
        scores = visible_index_scores_ref(q, weights, keys, first, visible)
        if drop == "relu":
            plain = torch.einsum("bthd,bmd,bth->btm", q.float(), keys.float(), weights.float())
            scores = torch.where(scores.isneginf(), scores, plain)
        return scores

    with pytest.raises(AssertionError):
        assert_near(got, with_gradients(changed, inputs, grad), 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_two_runs_give_the_same_bits(dtype):
    inputs = make_inputs(2, 1000, 512, 64, dtype)
    grad = torch.randn(2, 1000, 512, device=DEVICE)
    one, two = (with_gradients(visible_index_scores_triton, inputs, grad) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


def test_graph_of_forward_and_backward_replays_on_new_values():
    shape = (2, 1000, 512, 64)
    static = make_inputs(*shape, torch.bfloat16, seed=1)
    grad = torch.randn(*shape[:3], device=DEVICE)
    leaves = [tensor.requires_grad_() for tensor in static[:3]]

    def step():
        out = visible_index_scores_triton(*leaves, *static[3:])
        return out, *torch.autograd.grad(out, leaves, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    # Other documents too: what a graph holds must not depend on the bounds it was captured with.
    fresh = make_inputs(*shape, torch.bfloat16, seed=2)
    with torch.no_grad():
        for held, new in zip(static, fresh, strict=True):
            held.copy_(new)
    graph.replay()
    want = with_gradients(visible_index_scores_triton, fresh, grad)
    assert all(torch.equal(a, b.detach()) for a, b in zip(want, captured, strict=True))


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31_reach_the_last_rows():
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GiB of free GPU memory")
    tokens, entries = 65_600, 32_768  # 2,149,580,800 scores
    g = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randn(1, tokens, 1, 32, generator=g, device=DEVICE).bfloat16()
    keys = torch.randn(1, entries, 32, generator=g, device=DEVICE).bfloat16()
    weights = torch.ones(1, tokens, 1, device=DEVICE).bfloat16()
    first = torch.zeros(1, tokens, dtype=torch.int64, device=DEVICE)
    visible = torch.full_like(first, entries)
    grad = torch.ones(1, tokens, entries, device=DEVICE)
    got = with_gradients(visible_index_scores_triton, (q, weights, keys, first, visible), grad)
    last = slice(tokens - 64, tokens)
    rows = q[:, last], weights[:, last], keys, first[:, last], visible[:, last]
    want = with_gradients(visible_index_scores_ref, rows, grad[:, last])
    tail = got[0][:, last], got[1][:, last], got[2][:, last], want[3]
    assert_near(tail, want, 1e-2)
