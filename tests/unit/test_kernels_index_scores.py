"""Index-score kernels in Triton's interpreter against the reference, and the reference itself.

The reference is checked against float64 loops and central differences; the kernels against
autograd through the reference.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.kernels import index_scores as kernels
from finwhale.kernels.index_scores import (
    IndexScoresUnsupportedError,
    visible_index_scores_triton,
    visible_index_scores_unsupported,
)
from finwhale.ops.index import visible_index_scores_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
FORMS = [visible_index_scores_ref, visible_index_scores_triton]


def make_inputs(batch, tokens, entries, heads, dim, *, seed=0):
    """Two documents per sequence where there is room; some tokens see nothing.

    Queries and keys are small integers, so every dot product is exact and many are 0: the two
    sides agree on which side of the ReLU it lies, whatever the order of their sums.
    """
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(-2, 3, (batch, tokens, heads, dim), generator=g).float()
    weights = torch.randn(batch, tokens, heads, generator=g) / heads
    keys = torch.randint(-2, 3, (batch, entries, dim), generator=g).float()
    first = torch.zeros(batch, tokens, dtype=torch.int64)
    first[:, tokens // 2 :] = entries // 2
    room = torch.where(first > 0, entries - first, entries // 2)
    visible = (torch.rand(batch, tokens, generator=g) * (room + 1)).long()
    visible[0, 0] = room[0, 0]
    if tokens > 1:
        visible[:, -1] = 0
    return [tensor.to(DEVICE) for tensor in (q, weights, keys, first, visible)]


def with_gradients(form, inputs, grad):
    """Return scores and the three gradients; what comes in is `grad`, at hidden entries too."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs[:3]]
    out = form(*leaves, *inputs[3:])
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def relative_error(got, want):
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def assert_same(got, want, tolerance=2e-5):
    assert torch.equal(got[0].isneginf(), want[0].isneginf())
    assert not want[0].isnan().any()
    shown = ~want[0].isneginf()
    pairs = [(got[0][shown], want[0][shown]), *zip(got[1:], want[1:], strict=True)]
    for name, pair in zip(("scores", "q", "weights", "keys"), pairs, strict=True):
        assert relative_error(*pair) < tolerance, name
        assert pair[0].dtype is pair[1].dtype


def loop_scores(q, weights, keys, first, visible):
    """The formula in float64, one dot product at a time."""
    out = torch.full((*q.shape[:2], keys.shape[1]), -INF, dtype=torch.float64)
    for b, t, m in torch.cartesian_prod(*(torch.arange(n) for n in out.shape)).tolist():
        if first[b, t] <= m < first[b, t] + visible[b, t]:
            dots = [float(torch.dot(head, keys[b, m])) for head in q[b, t]]
            out[b, t, m] = sum(w * max(0, d) for w, d in zip(weights[b, t], dots, strict=True))
    return out


@pytest.mark.parametrize("form", FORMS)
def test_scores_equal_loops(form):
    inputs = make_inputs(2, 5, 7, 3, 32)
    cpu = [tensor.cpu() for tensor in inputs]
    want = loop_scores(*(tensor.double() for tensor in cpu[:3]), *cpu[3:])
    torch.testing.assert_close(form(*inputs).cpu().double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_equal_central_differences(form):
    inputs = make_inputs(1, 3, 4, 3, 32, seed=1)
    g = torch.Generator().manual_seed(2)
    for floats in (inputs[0], inputs[2]):  # off the kinks of the ReLU
        floats += torch.rand(floats.shape, generator=g).to(DEVICE)
    cpu = [tensor.cpu() for tensor in inputs]
    coming = torch.randn(1, 3, 4, generator=g)
    exact = [tensor.double() for tensor in cpu[:3]]
    gradients = with_gradients(form, inputs, coming.to(DEVICE))[1:]

    def loss(*floats):
        return loop_scores(*floats, *cpu[3:]).nan_to_num(neginf=0).mul(coming).sum()

    for which, gradient in enumerate(gradients):
        direction = torch.randn(exact[which].shape, generator=g, dtype=torch.float64)
        ends = []
        for step in (1e-5, -1e-5):
            moved = list(exact)
            moved[which] = exact[which] + step * direction
            ends.append(loss(*moved))
        slope = (ends[0] - ends[1]) / 2e-5
        torch.testing.assert_close(
            (gradient.cpu().double() * direction).sum(), slope, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("batch", "tokens", "entries", "heads", "dim"),
    [
        *((2, tokens, entries, 3, 64) for tokens in (1, 17, 33) for entries in (0, 1, 37)),
        *((1, tokens, entries, 24, 32) for tokens, entries in ((1, 37), (17, 37), (33, 1))),
    ],
)
def test_kernels_equal_reference_with_gradients(batch, tokens, entries, heads, dim):
    inputs = make_inputs(batch, tokens, entries, heads, dim, seed=tokens + entries)
    grad = torch.randn(batch, tokens, entries, device=DEVICE)
    want = with_gradients(visible_index_scores_ref, inputs, grad)
    assert_same(with_gradients(visible_index_scores_triton, inputs, grad), want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 5, 0), (0, 5, 5), (1, 0, 0)])
def test_empty_sides_give_empty_scores_and_zero_gradients(form, shape):
    batch, tokens, entries = shape
    inputs = [
        torch.ones(batch, tokens, 3, 32, device=DEVICE),
        torch.ones(batch, tokens, 3, device=DEVICE),
        torch.ones(batch, entries, 32, device=DEVICE),
        *(torch.zeros(batch, tokens, dtype=torch.int64, device=DEVICE) for _ in range(2)),
    ]
    grad = torch.ones(batch, tokens, entries, device=DEVICE)
    out, *gradients = with_gradients(form, inputs, grad)
    assert out.shape == (batch, tokens, entries)
    assert out.dtype is torch.float32
    for gradient, tensor in zip(gradients, inputs[:3], strict=True):
        assert torch.equal(gradient, torch.zeros_like(tensor))


@pytest.mark.parametrize("form", FORMS)
def test_nothing_visible_gives_minus_infinity_and_zero_gradients(form):
    inputs = make_inputs(2, 17, 37, 3, 32)
    inputs[4].zero_()
    out, *gradients = with_gradients(form, inputs, torch.full((2, 17, 37), 3.0, device=DEVICE))
    assert out.isneginf().all()
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("form", FORMS)
def test_nan_that_comes_in_at_hidden_entries_is_dropped(form):
    inputs = make_inputs(2, 17, 37, 3, 32)
    hidden = form(*inputs).isneginf()
    assert hidden.any()
    assert not hidden.all()
    grad = torch.randn(2, 17, 37, device=DEVICE)
    clean = with_gradients(form, inputs, grad.masked_fill(hidden, 0))
    poisoned = with_gradients(form, inputs, grad.masked_fill(hidden, float("nan")))
    for left, right in zip(clean[1:], poisoned[1:], strict=True):
        assert torch.equal(left, right)


def test_entries_past_the_end_are_not_read():
    # `visible` that runs past M ends at M: the rows behind the keys are not this op's memory.
    inputs = make_inputs(1, 17, 37, 3, 32)
    inputs[4].fill_(1000)
    storage = torch.full((1, 64, 32), float("nan"), device=DEVICE)
    storage[:, :37] = inputs[2]
    inputs[2] = storage[:, :37]
    grad = torch.randn(1, 17, 37, device=DEVICE)
    want = with_gradients(visible_index_scores_ref, inputs, grad)
    assert_same(with_gradients(visible_index_scores_triton, inputs, grad), want)


def test_strided_inputs_and_gradient_equal_contiguous_ones():
    q, weights, keys, first, visible = make_inputs(2, 5, 7, 3, 32)
    grad = torch.randn(2, 5, 1, device=DEVICE).expand(2, 5, 7)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    want = with_gradients(visible_index_scores_ref, (q, weights, keys, first, visible), grad)
    rows = first.repeat_interleave(2, dim=1)[:, ::2]
    got = with_gradients(visible_index_scores_triton, (q, weights, keys, rows, visible), grad)
    assert_same(got, want)


def test_only_asked_gradients_are_made():
    q, weights, keys, first, visible = make_inputs(1, 5, 7, 3, 32)
    for which in range(3):
        leaves = [q.clone(), weights.clone(), keys.clone()]
        leaves[which].requires_grad_()
        out = visible_index_scores_triton(*leaves, first, visible)
        out.masked_fill(out.isneginf(), 0).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [i == which for i in range(3)]


def test_several_splits_of_the_key_gradient_equal_one(monkeypatch):
    inputs = make_inputs(1, 65, 20, 2, 32)
    grad = torch.randn(1, 65, 20, device=DEVICE)
    many = with_gradients(visible_index_scores_triton, inputs, grad)
    monkeypatch.setattr(kernels, "_MOST_SPLITS", 1)
    assert_same(with_gradients(visible_index_scores_triton, inputs, grad), many, 1e-6)


@pytest.mark.parametrize("drop", ["first", "visible", "relu"])
def test_dropping_a_mechanism_breaks_agreement(drop):
    inputs = make_inputs(2, 17, 37, 3, 32)
    grad = torch.randn(2, 17, 37, device=DEVICE)
    got = with_gradients(visible_index_scores_triton, inputs, grad)

    def without_relu(q, weights, keys, first, visible):
        place = torch.arange(keys.shape[1], device=q.device) - first.unsqueeze(-1)
        hidden = (place < 0) | (place >= visible.unsqueeze(-1))
        scores = torch.einsum("bthd,bmd,bth->btm", q, keys, weights)
        return scores.masked_fill(hidden, -INF)

    changed = list(inputs)
    if drop == "first":
        changed[3] = torch.zeros_like(inputs[3])
    elif drop == "visible":
        changed[4] = torch.full_like(inputs[4], 37)
    form = without_relu if drop == "relu" else visible_index_scores_ref
    want = with_gradients(form, changed, grad)
    if drop != "relu":
        assert not torch.equal(got[0].isneginf(), want[0].isneginf())
    for left, right in zip(got[1:], want[1:], strict=True):
        assert relative_error(left, right) > 1e-2


@pytest.mark.parametrize(
    ("field", "change", "cause"),
    [
        (0, lambda t: t[..., :24], "DI is 24"),
        (0, lambda t: t[0], "q has shape"),
        (0, lambda t: t.double(), "q is torch.float64"),
        (0, lambda t: t[:, :, :0], "HI is 0"),
        (1, lambda t: t[..., :1], "weights has shape"),
        (1, lambda t: t.half(), "weights are torch.float16"),
        (2, lambda t: t.bfloat16(), "keys are torch.bfloat16"),
        (2, lambda t: t[..., 0], "keys has shape"),
        (3, lambda t: t.float(), "first is torch.float32"),
        (4, lambda t: t[:, :2], "visible has shape"),
        (4, lambda t: t.to("meta"), "visible is on meta"),
    ],
)
def test_refusal_names_the_cause(field, change, cause):
    inputs = make_inputs(2, 5, 7, 3, 32)
    assert visible_index_scores_unsupported(*inputs) is None
    inputs[field] = change(inputs[field])
    if field == 0 and inputs[0].ndim == 4:
        inputs[1] = inputs[1][..., : inputs[0].shape[2]]
        inputs[2] = inputs[2][..., : inputs[0].shape[3]]
    with pytest.raises(IndexScoresUnsupportedError, match=cause):
        visible_index_scores_triton(*inputs)
