"""Laws of a training pass with the indexer taught: packing, parts and order change nothing.

Cache rounding is off: a reordered sum may cross a rounding bin. The full-row form samples
rows of the packed row, so it is exempt from both laws.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finwhale.data.packing import NO_TARGET, pack
from finwhale.model import Packing
from finwhale.model.selection_plan import SelectionPlan
from finwhale.train.index_objective import IndexObjective
from finwhale.train.loss import Batch, loss_sum
from tests.models import build, unit_model

MODEL = build(unit_model().config)
RATIOS = (1, 2)
WIDTH = 40
FORMS = {"selected": {"topk": 4}, "explored": {"topk": 4, "explore": 5}, "dense": {"topk": WIDTH}}


def documents_of(lengths, seed=0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, 500, n).tolist() for n in lengths]


def batch_of(documents, width) -> Batch:
    packed = pack(documents, sequence_length=width, pad_id=2)
    return Batch.of(packed, np.arange(packed.num_rows)).prepared(RATIOS, "cpu")


def taught(batches, form, seed=5, observed=True):
    """Return (loss, index losses, gradients) summed over the passes of `batches`."""
    MODEL.zero_grad(set_to_none=True)
    loss, index = 0.0, {}
    for batch in batches:
        live = batch.targets != NO_TARGET
        objective = IndexObjective(live=live, rows=torch.zeros(len(batch.ids), 0).long())
        plan = SelectionPlan(
            **FORMS[form],
            explore_seed=torch.tensor(seed),
            observer=objective if observed else None,
        )
        own = loss_sum(MODEL, batch, chunk_tokens=4096, plan=plan)
        losses = objective.losses()
        (own + sum(losses.values())).backward()
        loss += float(own.detach())
        for owner, value in losses.items():
            index[owner] = index.get(owner, 0.0) + float(value.detach())
    found = {n: p.grad for n, p in MODEL.named_parameters() if p.grad is not None}
    return loss, index, found


def assert_same(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1].keys() >= other[1].keys()
    for owner, value in one[1].items():
        assert value == pytest.approx(other[1].get(owner, 0.0), rel=1e-4, abs=1e-4)
    for name in one[2].keys() | other[2].keys():
        zero = torch.zeros_like(MODEL.get_parameter(name))
        a, b = one[2].get(name, zero), other[2].get(name, zero)
        scale = float(b.abs().max()) + 1e-3
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4 * scale, msg=name)


@settings(max_examples=3)
@given(st.lists(st.integers(2, WIDTH + 1), min_size=1, max_size=4), st.sampled_from(list(FORMS)))
@example([2, 8, 9, 10], "explored")
@example([16, 17, 3], "selected")
@example([WIDTH + 1, 2, 33], "explored")
def test_packed_equals_separate_in_loss_and_gradients(lengths, form):
    documents = documents_of(lengths)
    packed = taught([batch_of(documents, WIDTH)], form)
    separate = taught([batch_of([d], len(d) - 1) for d in documents], form)
    assert_same(packed, separate)


def test_rows_read_as_one_document_teach_the_indexer_something_else():
    """Control: without borders the index losses differ too."""
    documents = documents_of([18, 20])
    batch = batch_of(documents, 36)
    assert batch.ids.shape[0] == 1
    whole = Batch(
        ids=batch.ids,
        targets=batch.targets,
        is_token=batch.is_token,
        packing=Packing.whole(*batch.ids.shape).prepared(RATIOS, "cpu"),
    )
    right, wrong = (taught([b], "explored") for b in (batch, whole))
    assert right[0] != pytest.approx(wrong[0], rel=1e-4)
    for owner in right[1]:
        assert right[1][owner] != pytest.approx(wrong[1][owner], rel=1e-3)


@settings(max_examples=3)
@given(st.permutations(range(4)), st.integers(1, 4), st.sampled_from(list(FORMS)))
@example([3, 2, 1, 0], 1, "explored")
def test_parts_and_order_of_rows_do_not_matter(order, rows, form):
    packed = pack(documents_of([41, 30, 9, 25, 14, 38]), sequence_length=WIDTH, pad_id=2)
    assert packed.num_rows == 4
    batch = Batch.of(packed, np.arange(4))
    whole = taught([batch.prepared(RATIOS, "cpu")], form)
    moved = Batch.of(packed, np.array(order))
    parts = taught([part.prepared(RATIOS, "cpu") for part in moved.parts(rows)], form)
    assert_same(whole, parts)


def test_watching_changes_neither_loss_nor_gradients_of_the_model():
    """The language model is trained as if nobody taught the indexer."""
    batch = [batch_of(documents_of([30, 9]), WIDTH)]
    watched, alone = (taught(batch, "explored", observed=o) for o in (True, False))
    assert watched[0] == alone[0]
    assert alone[1] == {}
    assert not any(".indexer." in name for name in alone[2])
    for name, gradient in alone[2].items():
        torch.testing.assert_close(watched[2][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_tokens_of_the_future_change_no_loss_before_them():
    """Causality with exploration on: nothing drawn lies ahead of its query."""
    ids = torch.randint(3, 500, (1, WIDTH), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 25:] = 7
    packing = Packing.whole(1, WIDTH).prepared(RATIOS, "cpu")
    plan = SelectionPlan(topk=4, explore=9, explore_seed=torch.tensor(1))
    with torch.no_grad():
        one, other = (MODEL.hidden(x, packing=packing, plan=plan)[0] for x in (ids, changed))
    torch.testing.assert_close(one[:25], other[:25], rtol=0, atol=1e-5)
    assert (one[25:] - other[25:]).abs().max() > 1e-2
