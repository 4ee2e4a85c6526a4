"""Compiled products and codecs of the engine: the values of the plain forms, row by row."""

from dataclasses import replace

import pytest
import torch

from finwhale.cache import paged_reads
from finwhale.engine.invariance import (
    broken_promises,
    engine_ops,
    padded_linear,
    whole_vectors,
)
from finwhale.kernels import codecs_numba as codecs
from finwhale.kernels import products_numba as products
from finwhale.kernels.index_scores_numba import select_topk
from finwhale.ops import linear as plain
from finwhale.ops.index import select_topk_ref
from finwhale.ops.moe import clamped_swiglu, route_experts
from finwhale.ops.rounding import round_index
from tests.models import unit_model

SHAPES = [(37, 53), (64, 24), (256, 4), (128, 129), (1, 1), (33, 5)]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_product_is_the_float64_product(width, outputs):
    x, weight = drawn(7, width), drawn(outputs, width, seed=1)
    want = x.double() @ weight.double().T
    size = want.abs().max().clamp_min(1)
    assert (products.linear(x, weight) - want).abs().max() <= 2e-6 * size
    assert products.linear(x[:0], weight).shape == (0, outputs)


def check_rows(product, width: int, outputs: int, starts: tuple[int, ...]) -> None:
    x, weight = drawn(41, width), drawn(outputs, width, seed=1)
    whole = product(x, weight)
    for rows in (*range(1, 12), 16, 33, 40):
        for start in starts:
            part = product(x[start : start + rows], weight)
            assert torch.equal(part, whole[start : start + rows]), (rows, start)


@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_rows_of_a_product_do_not_depend_on_their_number_or_place(width, outputs):
    check_rows(products.linear, width, outputs, (0, 1))


@pytest.mark.parametrize(("width", "outputs"), [(64, 24), (256, 128), (128, 512)])
def test_rows_of_the_padded_product_do_not_depend_on_their_number(width, outputs):
    # Where a row stands is another matter: at odd widths the library looks at its alignment.
    check_rows(padded_linear, width, outputs, (0,))


def test_unpadded_products_are_found_where_the_library_changes_single_rows():
    # The negative control: without it `broken_promises` could be blind.
    model = unit_model()
    exact, _ = engine_ops("torch", batch_invariant=True)
    loose, _ = engine_ops("torch", batch_invariant=False)
    assert broken_promises(model, exact) == []
    weight = model.head.weight.detach()
    x = drawn(8, weight.shape[1])
    changes = not torch.equal(plain.linear(x[:1], weight), plain.linear(x, weight)[:1])
    assert bool(broken_promises(model, loose)) >= changes


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_grouped_product_is_the_reference(tokens):
    x, weight = drawn(1, tokens, 2, 96), drawn(2 * 24, 96, seed=1)
    got, want = products.grouped_linear(x, weight), plain.grouped_linear(x, weight)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    whole = products.grouped_linear(torch.cat((x, drawn(1, 9, 2, 96, seed=2)), dim=1), weight)
    assert torch.equal(whole[:, :tokens], got)


def test_experts_are_the_sum_of_each_rows_own_in_ascending_order():
    tokens, channels, width, experts, choices = 9, 48, 20, 5, 2
    z, weights = drawn(tokens, channels), torch.rand(tokens, choices)
    ids = torch.stack(
        [
            torch.randperm(experts, generator=torch.Generator().manual_seed(t))[:choices]
            for t in range(tokens)
        ]
    )
    gate_up, down = drawn(experts, 2 * width, channels, seed=1), drawn(experts, channels, width)
    got = products.grouped_experts(z, ids, weights, gate_up, down, 7.0)
    want = torch.zeros(tokens, channels, dtype=torch.float64)
    for t in range(tokens):
        for c in range(choices):
            e = int(ids[t, c])
            gate, up = (gate_up[e].double() @ z[t].double()).split(width)
            inner = clamped_swiglu(gate.float(), up.float(), None, 7.0).double() * weights[t, c]
            want[t] += down[e].double() @ inner
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    for t in range(tokens):
        rows = slice(t, t + 1)
        alone = products.grouped_experts(z[rows], ids[rows], weights[rows], gate_up, down, 7.0)
        assert torch.equal(alone[0], got[t])
    other = products.grouped_experts(z, ids.flip(1), weights.flip(1), gate_up, down, 7.0)
    assert torch.equal(other, got)


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-30, 1e-6, 1.0, 37.0, 1e5, 1e30])
def test_compiled_codecs_give_the_same_bytes(scale):
    x = drawn(60, 128) * scale
    # Exact multiples of a quarter meet every tie.
    x[1::3] = (torch.randint(-24, 25, (20, 128)) * 0.25) * scale
    x[5] = -0.0
    for name in ("pack_window", "pack_entry", "pack_index"):
        for storage in ("fp4", "bf16", "fp32"):
            got, want = (getattr(m, name)(x, storage) for m in (codecs, paged_reads))
            assert torch.equal(got, want), (name, storage)
    got, want = codecs.round_index(x), round_index(x)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_rounding_makes_a_group_with_a_nan_a_nan():
    x = drawn(3, 64)
    x[0, 3], x[1, 40] = torch.nan, torch.inf
    assert torch.equal(codecs.round_index(x).isnan(), round_index(x).isnan())


@pytest.mark.parametrize("size", [1, 3, 63, 64, 65, 130])
def test_whole_vectors_do_not_depend_on_what_follows(size):
    x = drawn(200)
    whole = whole_vectors(torch.sigmoid, x)
    assert torch.equal(whole_vectors(torch.sigmoid, x[:size]), whole[:size])
    torch.testing.assert_close(whole, torch.sigmoid(x))


def test_missing_kernels_are_refused_by_name(monkeypatch):
    monkeypatch.setattr("finwhale.engine.invariance.numba_missing", lambda: "numba is not here")
    with pytest.raises(ValueError, match=r"engine\.kernels: numba is not here"):
        engine_ops("numba", batch_invariant=True)
    assert engine_ops("auto", batch_invariant=True)[1].name == "torch"


@pytest.mark.parametrize("k", [0, 1, 3, 8, 9, 40])
def test_compiled_selection_is_the_reference_with_its_ties(k):
    scores = torch.randint(-3, 4, (23, 9)).float()
    scores[0], scores[1, ::2], scores[2, 3] = -torch.inf, -torch.inf, torch.nan
    scores[3] = 0.0
    assert torch.equal(select_topk(scores, k), select_topk_ref(scores, k))
    assert torch.equal(select_topk(scores[None, :, :0], k), select_topk_ref(scores[None, :, :0], k))


@pytest.mark.parametrize("has_rows", [False, True])
def test_compiled_router_is_the_reference(has_rows):
    logits = drawn(17, 12) * 8
    logits[0], logits[1] = 0.0, 25.0
    bias = drawn(17, 12, seed=1) if has_rows else drawn(12, seed=1)
    ids, weights = products.route_experts(logits, bias, 4, 1.5)
    want_ids, want = route_experts(logits, bias, 4, 1.5)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)
    level = products.route_experts(torch.zeros(1, 6), torch.zeros(6), 3, 1.0)
    assert level[0].tolist() == [[0, 1, 2]]
    for t in range(17):
        own = bias[t : t + 1] if has_rows else bias
        alone = products.route_experts(logits[t : t + 1], own, 4, 1.5)
        assert torch.equal(alone[1][0], weights[t])


@pytest.mark.parametrize("field", ["linear", "grouped_linear"])
def test_a_product_that_looks_at_a_rows_place_or_number_is_found(field):
    exact, _ = engine_ops("numba", batch_invariant=True)
    plain_form = getattr(exact, field)

    def by_place(x, weight):
        y = plain_form(x, weight)
        rows = y.reshape(-1, y.shape[-1]).clone()
        rows[1::2] = rows[1::2] * (1 + 2**-22)
        return rows.view(y.shape)

    def by_number(x, weight):
        return plain_form(x, weight) * (1 + 2**-22 * (x.shape[0] > 40 or x.shape[1] > 200))

    for wrong in (by_place, by_number):
        assert broken_promises(unit_model(), replace(exact, **{field: wrong}), most_rows=256)
    assert broken_promises(unit_model(), exact, most_rows=256) == []
