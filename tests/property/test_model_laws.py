"""Laws of the whole model that hold for any weights; rounding off where sums may be reordered."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finwhale.model import Numerics, Packing
from finwhale.ops import FAST, REFERENCE
from tests.models import EXACT, build, token_ids, unit_model

CLOSE = {"rtol": 0, "atol": 2e-5}
W, K = 8, 8  # window and top-k of the unit preset


@torch.no_grad()
def logits(model, ids, **options):
    return model(ids, **options)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 10**6))
@example([1], 0)
@example([1, 1, 2, 3], 0)
@example([W - 1, W, W + 1, 2 * W + 1], 0)
@example([2 * K + 1, 1, 37], 0)
def test_packed_documents_equal_separate_documents(lengths, seed):
    model = unit_model()
    ids = token_ids(1, sum(lengths), seed=seed)
    packed = logits(model, ids, packing=Packing.from_lengths([lengths]))[0]
    start = 0
    for length in lengths:
        alone = logits(model, ids[:, start : start + length])[0]
        torch.testing.assert_close(packed[start : start + length], alone, **CLOSE)
        start += length


def test_packing_matters():
    # Control: without the layout the documents see each other.
    ids = token_ids(1, 40)
    packed = logits(unit_model(), ids, packing=Packing.from_lengths([[20, 20]]))
    assert (packed - logits(unit_model(), ids))[:, 20:].abs().max() > 0.1


@settings(max_examples=20)
@given(st.integers(2, 70), st.data())
def test_a_prefix_gives_the_logits_of_the_whole(tokens, data):
    cut = data.draw(st.integers(1, tokens - 1))
    ids = token_ids(1, tokens, seed=tokens)
    whole = logits(unit_model(), ids)
    torch.testing.assert_close(logits(unit_model(), ids[:, :cut]), whole[:, :cut], **CLOSE)


def test_with_cache_rounding_a_prefix_moves_by_a_bin_at_most():
    model = unit_model(Numerics(), REFERENCE)
    ids = token_ids(1, 50)
    part, whole = logits(model, ids[:, :31]), logits(model, ids)[:, :31]
    # A reordered sum may cross a rounding bin; almost no logit may move.
    assert ((part - whole).abs() < 1e-4).float().mean() > 0.9


@pytest.mark.parametrize("neighbours", [1, 3])
def test_batch_neighbours_do_not_matter(neighbours):
    ids = token_ids(1 + neighbours, 37)
    together = logits(unit_model(), ids)[:1]
    torch.testing.assert_close(together, logits(unit_model(), ids[:1]), **CLOSE)


@pytest.mark.parametrize(
    "tokens", [1, 2, 3, W - 1, W, W + 1, 2 * W + 1, 2 * K - 1, 2 * K, 2 * K + 1]
)
def test_fast_operations_equal_reference_operations(tokens):
    ids = token_ids(2, tokens, seed=tokens)
    fast, slow = unit_model(EXACT, FAST), unit_model(EXACT, REFERENCE)
    torch.testing.assert_close(logits(fast, ids), logits(slow, ids), **CLOSE)


def test_fast_gradients_equal_reference_gradients():
    ids, results = token_ids(2, 33), []
    for ops in (REFERENCE, FAST):
        from finwhale.config import preset

        model = build(preset("unit"), EXACT, ops)
        packing = Packing.from_lengths([[20, 13], [5, 28]])
        out = model(ids, packing=packing)
        torch.nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten()).backward()
        results.append({n: p.grad for n, p in model.named_parameters()})
    reference, fast = results
    for name, grad in reference.items():
        if grad is None:
            assert ".indexer." in name, f"{name} has no gradient"
            assert fast[name] is None
            continue
        torch.testing.assert_close(fast[name], grad, rtol=1e-3, atol=1e-6, msg=name)


def test_only_the_indexer_has_no_gradient():
    # The hard selection passes none: the freeze is stated in docs/deviations.md (D09).
    from finwhale.config import preset

    model = build(preset("unit"))
    model(token_ids(1, 40)).square().mean().backward()
    frozen = {n for n, p in model.named_parameters() if p.grad is None}
    assert frozen == {n for n, _ in model.named_parameters() if ".indexer." in n}


@pytest.mark.parametrize("pool", [1, 2, 1000])
def test_pool_drops_entries_only_when_it_is_smaller_than_the_context(pool):
    ids = token_ids(1, 60)
    free = logits(unit_model(candidate_topk_blocks=10_000), ids)
    bound = logits(unit_model(candidate_topk_blocks=pool), ids)
    inside = 4 * pool  # blocks of 4 entries at ratio 1
    torch.testing.assert_close(bound[:, :inside], free[:, :inside], **CLOSE)
    if inside < 60:
        assert (bound - free)[:, inside:].abs().max() > 1e-3


@pytest.mark.parametrize("rounding", [False, True])
def test_one_token_sequences_and_empty_batches(rounding):
    model = unit_model(Numerics(cache_rounding=rounding))
    assert logits(model, token_ids(1, 1)).shape == (1, 1, 512)
    assert logits(model, token_ids(2, 0)).shape == (2, 0, 512)
    assert logits(model, token_ids(0, 5)).shape == (0, 5, 512)
