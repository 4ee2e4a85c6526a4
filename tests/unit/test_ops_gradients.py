"""Gradients of every operation that trains: fast form against definition, and finite differences.

Operations that keep float64 (pool_group, route_experts) go through gradcheck. All others compute in
fp32: their gradients are compared with central differences in fp32, at a tolerance that says so.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import nll_loss

from finwhale.ops import FAST, REFERENCE
from finwhale.ops.head_loss import NO_TARGET, head_loss_ref

BOTH = [pytest.param(REFERENCE, id="reference"), pytest.param(FAST, id="fast")]
# An fp32 value of size 1 carries 6e-8; over a step of 1e-2 that is 6e-6, curvature adds 1e-4 h^2.
STEP, TOLERANCE = 1e-2, 1e-2


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


def projected(output, seed=9):
    """Return a fixed random combination of all outputs, a scalar."""
    outputs = output if isinstance(output, tuple) else (output,)
    return sum((o.float() * drawn(*o.shape, seed=seed + n)).sum() for n, o in enumerate(outputs))


def gradients(function, inputs):
    own = leaves(*inputs)
    return torch.autograd.grad(projected(function(*own)), own)


def agree_with_differences(function, *inputs, step=STEP, tolerance=TOLERANCE):
    """Compare every input's gradient with central differences along five random directions."""
    found = gradients(function, inputs)
    for n, gradient in enumerate(found):
        scale = float(gradient.norm()) + 1e-3
        for seed in range(5):
            direction = drawn(*inputs[n].shape, seed=50 + seed)
            direction /= direction.norm()
            sides = []
            for sign in (1, -1):
                moved = [x.clone() for x in inputs]
                moved[n] += sign * step * direction
                with torch.no_grad():
                    sides.append(float(projected(function(*moved)).double()))
            slope = (sides[0] - sides[1]) / (2 * step)
            wanted = float((gradient * direction).sum())
            assert abs(slope - wanted) <= tolerance * scale, (n, seed, slope, wanted)


def agree(name, inputs, make, rtol=1e-4, atol=1e-5):
    """FAST's gradients equal REFERENCE's."""
    want, got = (gradients(make(getattr(o, name)), inputs) for o in (REFERENCE, FAST))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def test_differences_would_notice_a_wrong_gradient():
    """Control: a function whose backward is off by a tenth."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2.2

    with pytest.raises(AssertionError):
        agree_with_differences(Off.apply, drawn(3, 4))


def attention_inputs(tokens=7, entries=5, heads=2, dim=4):
    topk = torch.tensor([-1, -1, 0, 2, 4])[: min(5, entries)].expand(1, tokens, -1).clone()
    topk[:, 0] = -1
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2])[:tokens].unsqueeze(0)
    tensors = drawn(1, tokens, heads, dim), drawn(1, tokens, dim, seed=1)
    return (*tensors, drawn(1, entries, dim, seed=2), drawn(heads, seed=3)), topk, positions


def attend(topk, positions, with_mass=False):
    def make(operation):
        def call(q, window_kv, entries, sink):
            out = operation(q, window_kv, entries, topk, sink, positions, 3)
            return out[0] if with_mass else out

        return call

    return make


@pytest.mark.parametrize("ops", BOTH)
@pytest.mark.parametrize("name", ["sparse_attention", "sparse_attention_with_mass"])
def test_sparse_attention_gradients(ops, name):
    inputs, topk, positions = attention_inputs()
    make = attend(topk, positions, with_mass=name.endswith("mass"))
    agree_with_differences(make(getattr(ops, name)), *inputs)
    agree(name, inputs, make)


@pytest.mark.parametrize("ops", BOTH)
def test_attention_mass_has_no_gradient(ops):
    inputs, topk, positions = attention_inputs()
    q, window_kv, entries, sink = leaves(*inputs)
    out, mass = ops.sparse_attention_with_mass(q, window_kv, entries, topk, sink, positions, 3)
    assert out.requires_grad
    assert not mass.requires_grad


@pytest.mark.parametrize("ops", BOTH)
def test_visible_index_scores_gradients(ops):
    first, visible = torch.tensor([[0, 0, 0, 3, 3]]), torch.tensor([[0, 1, 3, 1, 2]])

    def make(operation):
        def call(q, weights, keys):
            scores = operation(q, weights, keys, first, visible)
            return scores.masked_fill(scores.isneginf(), 0.0)

        return call

    inputs = drawn(1, 5, 3, 4), drawn(1, 5, 3, seed=1), drawn(1, 5, 4, seed=2)
    # Small steps: relu has corners.
    agree_with_differences(make(ops.visible_index_scores), *inputs, step=1e-3)
    agree("visible_index_scores", inputs, make)


def test_pool_group_gradients():
    agree_with_differences(REFERENCE.pool_group, drawn(3, 2, 4), drawn(3, 2, 4, seed=1))
    double = [t.double().requires_grad_() for t in (drawn(3, 2, 4), drawn(3, 2, 4, seed=1))]
    assert torch.autograd.gradcheck(REFERENCE.pool_group, double)


HYPER = {"iterations": 5, "norm_eps": 1e-6, "eps": 1e-6}


@pytest.mark.parametrize("ops", BOTH)
def test_hyper_mix_gradients(ops):
    n, c = 2, 3
    inputs = (
        drawn(4, n, c),
        drawn((2 + n) * n, n * c, seed=1, scale=0.5),
        drawn((2 + n) * n, seed=2),
        drawn(3, seed=3),
    )

    def make(operation):
        return lambda *tensors: tuple(operation(*tensors, **HYPER))

    agree_with_differences(make(ops.hyper_mix), *inputs)
    agree("hyper_mix", inputs, make)


@pytest.mark.parametrize("ops", BOTH)
def test_hyper_collapse_and_expand_gradients(ops):
    agree_with_differences(ops.hyper_collapse, drawn(5, 3, 4), drawn(5, 3, seed=1))
    inputs = drawn(5, 4), drawn(5, 3, 4, seed=1), drawn(5, 3, seed=2), drawn(5, 3, 3, seed=3)
    agree_with_differences(ops.hyper_expand, *inputs)


def test_engram_gate_gradients():
    inputs = (
        drawn(5, 2, 4),
        drawn(5, 2, 4, seed=1),
        drawn(5, 4, seed=2),
        1 + drawn(2, 4, seed=3, scale=0.1),
        1 + drawn(2, 4, seed=4, scale=0.1),
    )
    agree_with_differences(lambda *t: REFERENCE.engram_gate(*t, 1e-6), *inputs, step=1e-3)


def test_route_experts_weights_have_the_gradient_of_the_chosen_scores():
    bias = drawn(5, seed=1, scale=0.1).double()
    logits = drawn(6, 5).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: REFERENCE.route_experts(x, bias, 2, 1.5)[1], logits, eps=1e-6
    )
    ids, weights = REFERENCE.route_experts(logits, bias, 2, 1.5)
    weights[:, 0].sum().backward()
    unchosen = torch.ones(6, 5, dtype=torch.bool).scatter(1, ids, False)
    assert not logits.grad[unchosen].any()
    assert logits.grad[~unchosen].abs().min() > 0


def test_clamped_swiglu_gradients_and_their_zeros_behind_the_clamp():
    limit = 1.5
    gate, up = drawn(40), drawn(40, seed=1)
    away = ((gate - limit).abs() > 0.1) & ((up.abs() - limit).abs() > 0.1)
    gate, up = gate[away].unsqueeze(0), up[away].unsqueeze(0)
    weight = drawn(1, 1, seed=2)
    agree_with_differences(
        lambda g, u, w: REFERENCE.clamped_swiglu(g, u, w, limit), gate, up, weight
    )
    g, u = leaves(gate, up)
    REFERENCE.clamped_swiglu(g, u, None, limit).sum().backward()
    assert not g.grad[gate > limit].any()
    assert not u.grad[up.abs() > limit].any()
    # The gate has no clamp from below.
    assert g.grad[gate < -0.2].abs().min() > 0


def test_rms_norm_gradients():
    agree_with_differences(lambda x, w: REFERENCE.rms_norm(x, w, 1e-6), drawn(5, 4), drawn(4))


def test_rope_gradient_is_the_inverse_rotation():
    frequencies = REFERENCE.rope_frequencies(100.0, 4, None)
    angles = torch.arange(5).unsqueeze(-1) * frequencies
    rotation = torch.stack((angles.cos(), angles.sin()))
    agree_with_differences(lambda x: REFERENCE.apply_rope(x, rotation), drawn(5, 6))
    (x,) = leaves(drawn(5, 6))
    incoming = drawn(5, 6, seed=1)
    REFERENCE.apply_rope(x, rotation).backward(incoming)
    back = REFERENCE.apply_rope(incoming, rotation, inverse=True)
    torch.testing.assert_close(x.grad, back, rtol=1e-6, atol=1e-6)


def test_grouped_linear_gradients():
    agree_with_differences(REFERENCE.grouped_linear, drawn(2, 3, 2, 4), drawn(6, 4, seed=1))


@pytest.mark.parametrize("chunk_rows", [1, 3, 4, 5, 100])
def test_head_loss_slices_do_not_matter(chunk_rows):
    inputs = drawn(9, 4), drawn(7, 4, seed=1)
    targets = torch.tensor([0, 6, NO_TARGET, 2, 2, NO_TARGET, 1, 5, NO_TARGET])

    def loss(hidden, head):
        return head_loss_ref(hidden, head, targets, chunk_rows)

    hidden, head = leaves(*(t.double() for t in inputs))
    logits = hidden @ head.T
    live = targets != NO_TARGET
    wanted = nll_loss(logits.log_softmax(-1)[live], targets[live], reduction="sum")
    assert float(loss(*inputs)) == pytest.approx(float(wanted.detach()), rel=1e-6)
    by_hand = torch.autograd.grad(wanted, (hidden, head))
    own = leaves(*inputs)
    got = torch.autograd.grad(loss(*own), own)
    for a, b in zip(got, by_hand, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    # Rows without a target count nothing and feel nothing, whatever they hold.
    assert not got[0][~live].any()
    other = inputs[0].clone()
    other[~live] = 1e3
    assert float(loss(other, inputs[1])) == float(loss(*inputs))
    agree_with_differences(loss, *inputs)


def test_head_loss_of_nothing_is_zero():
    head = drawn(7, 4)
    assert float(head_loss_ref(drawn(0, 4), head, torch.zeros(0).long(), 4)) == 0.0
    none = torch.full((3,), NO_TARGET)
    (hidden,) = leaves(drawn(3, 4))
    loss = head_loss_ref(hidden, head, none, 4)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not hidden.grad.any()


def test_every_trained_operation_is_checked_here():
    """The differentiable fields of Ops are named in this file; the others pass no gradient."""
    from dataclasses import fields
    from pathlib import Path

    without = {
        "rope_frequencies", "index_scores", "select_topk", "select_pool_blocks", "engram_rows",
        "round_window_kv", "round_main_kv", "round_index", "round_input", "grouped_experts",
        "linear", "linear_release",
    }  # fmt: skip
    source = Path(__file__).read_text(encoding="utf-8")
    names = {f.name for f in fields(REFERENCE)} - without
    assert [name for name in sorted(names) if f"{name}" not in source.split("without = {")[0]] == []
