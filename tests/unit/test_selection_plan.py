"""A training plan against what is deployed: selection, candidate pool, windows of a replay."""

from __future__ import annotations

import pytest
import torch

from finwhale.cache.sequence_state import fresh_state
from finwhale.config.layers import Half
from finwhale.engine.prefill import Prefill
from finwhale.engine.step import forward_step
from finwhale.model import Packing
from finwhale.model.selection_plan import SelectionPlan
from tests.models import token_ids, unit_model

# Another order of sums; logits have a deviation of about 1.
CLOSE = {"rtol": 0, "atol": 1e-5}
W, K = 8, 8  # window and index_topk of the unit preset; its pool is 4 blocks of 4 entries
MODEL = unit_model()
RATIOS = (1, 2)


@torch.no_grad()
def logits(ids, plan=None, packing=None, prepared=True, model=MODEL):
    if packing is None:
        packing = Packing.whole(*ids.shape)
    if prepared and plan is not None:
        packing = packing.prepared(RATIOS, "cpu")
    return model(ids, packing=packing, plan=plan)


# Around the window; around k entries at ratio 1 (tokens) and at ratio 2 (half of them); pool bound.
LENGTHS = (1, W - 1, W, W + 1, 2 * K - 2, 2 * K - 1, 2 * K, 2 * K + 1, 2 * K + 2, 61)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_plan_with_the_pool_equals_the_deployed_model(tokens):
    ids = token_ids(2, tokens)
    want = logits(ids)
    for prepared in (False, True):
        got = logits(ids, SelectionPlan(uses_pool=True), prepared=prepared)
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize(
    "rows", [[[61]], [[1, 60]], [[33, 28]], [[7, 8, 9, 37]], [[2, 15, 16, 17, 11]], [[50]]]
)
def test_plan_equals_the_deployed_model_on_packed_rows(rows):
    ids = token_ids(1, 61)
    packing = Packing.from_lengths(rows, tokens=61)
    want = logits(ids, packing=packing)
    got = logits(ids, SelectionPlan(uses_pool=True), packing=packing)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("entries", [1, 61, 7 * 61, 60 * 61])
def test_slices_of_a_long_row_change_nothing(entries, monkeypatch):
    ids = token_ids(2, 61)
    packing = Packing.from_lengths([[40, 21], [61]])
    want = logits(ids, SelectionPlan(uses_pool=True), packing=packing)
    monkeypatch.setattr("finwhale.model.selection_plan._SLICE_ENTRIES", entries)
    assert torch.equal(logits(ids, SelectionPlan(uses_pool=True), packing=packing), want)


def test_leaving_the_pool_out_changes_what_long_rows_select():
    """Control for the pool; up to 4 blocks of 4 entries nothing is left out."""
    ids = token_ids(1, 61)
    difference = (logits(ids, SelectionPlan()) - logits(ids)).abs().amax(-1)[0]
    assert difference[:16].max() < 1e-5
    assert difference.max() > 1e-3


def test_topk_of_a_plan_is_the_configs():
    ids = token_ids(1, 61)
    for k in (1, 5, 61):
        want = logits(ids, model=unit_model(index_topk=k, candidate_topk_blocks=1000))
        torch.testing.assert_close(logits(ids, SelectionPlan(topk=k)), want, **CLOSE)


def test_plan_selects_the_deployed_entries():
    ids, packing = token_ids(1, 61), Packing.from_lengths([[40, 21]])
    traces = []
    for plan in (None, SelectionPlan(uses_pool=True)):
        trace = {}
        with torch.no_grad():
            MODEL.hidden(ids, packing=packing, plan=plan, trace=trace)
        traces.append(trace)
    for spec in MODEL.specs:
        if not spec.owns_topk:
            continue
        rows = [t[f"topk.{spec.layer_id}"][0].tolist() for t in traces]
        for deployed, planned in zip(*rows, strict=True):
            assert {m for m in deployed if m >= 0} == {m for m in planned if m >= 0}


def test_explored_pass_selects_more_and_attends_to_it():
    ids = token_ids(1, 61)
    trace: dict = {}
    plan = SelectionPlan(explore=6, explore_seed=torch.tensor(3))
    with torch.no_grad():
        MODEL.hidden(
            ids, packing=Packing.whole(1, 61).prepared(RATIOS, "cpu"), plan=plan, trace=trace
        )
        plain: dict = {}
        MODEL.hidden(ids, plan=SelectionPlan(), trace=plain)
    owners = [s for s in MODEL.specs if s.owns_topk]
    for spec in owners:
        assert trace[f"topk.{spec.layer_id}"].shape[-1] == K + 6
    # The first owner reads the same streams either way: its best entries stay.
    first = owners[0].layer_id
    assert torch.equal(trace[f"topk.{first}"][..., :K], plain[f"topk.{first}"])
    assert (logits(ids, plan) - logits(ids, SelectionPlan())).abs().max() > 1e-3
    # No two owners draw alike: the layer salts the draw.
    extra = [trace[f"topk.{s.layer_id}"][0, -1, K:].tolist() for s in owners if s.ratio == 2]
    assert extra[0] != extra[1]


@pytest.mark.parametrize("tokens", [W, W + 1, 41])
def test_decoder_replay_start_is_the_engines_bounded_replay(tokens):
    ids = token_ids(1, tokens + W + 3)
    state = fresh_state(MODEL)
    prefill = Prefill(MODEL, state, mode="bounded")
    prefill.feed(ids[:, :tokens])
    want = [MODEL.logits(prefill.finish())]
    for t in range(tokens, ids.shape[1]):
        want.append(MODEL.logits(forward_step(MODEL, state, ids[:, t : t + 1]))[0])
    start = torch.full(ids.shape, tokens - W)
    plan = SelectionPlan(uses_pool=True, decoder_replay_start=start)
    behind = logits(ids, plan)[0, tokens - 1 :]
    torch.testing.assert_close(behind, torch.cat(want).detach(), rtol=0, atol=5e-5)
    if tokens > W:
        # Control: without the cut the logits are others; nothing before the start sees it.
        whole = logits(ids)[0]
        assert (whole[tokens - 1 :] - behind).abs().max() > 1e-3
        torch.testing.assert_close(logits(ids, plan)[0, : tokens - W], whole[: tokens - W], **CLOSE)


def test_reach_is_cut_in_its_half_only_and_from_the_start_on():
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1]])
    start = torch.tensor([[2, 2, 2, 2, 2, 9, 9]])
    plan = SelectionPlan(encoder_replay_start=start)
    for spec in MODEL.specs:
        want = [[0, 1, 0, 1, 2, 0, 1]] if spec.half is Half.ENCODER else positions.tolist()
        assert plan.reach(spec, positions).tolist() == want


def test_replay_of_one_document_leaves_its_neighbours_alone():
    ids, packing = token_ids(1, 61), Packing.from_lengths([[30, 31]])
    start = torch.full((1, 61), 1 << 40)
    start[:, :30] = 12
    plan = SelectionPlan(uses_pool=True, encoder_replay_start=start, decoder_replay_start=start)
    difference = (logits(ids, plan, packing) - logits(ids, packing=packing)).abs().amax(-1)[0]
    assert difference[:12].max() < 1e-5
    assert difference[12:30].max() > 1e-3
    assert difference[30:].max() < 1e-5


def test_plan_without_an_observer_gives_the_indexer_no_gradient():
    ids = token_ids(1, 20)
    hidden = MODEL.hidden(ids, plan=SelectionPlan(explore=2, explore_seed=torch.tensor(0)))
    hidden.square().mean().backward()
    found = {n for n, p in MODEL.named_parameters() if p.grad is None}
    assert {n for n, _ in MODEL.named_parameters() if ".indexer." in n} <= found
    MODEL.zero_grad(set_to_none=True)
