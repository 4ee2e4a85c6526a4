"""The indexer taught through a whole model: who gets a gradient, whose attention is the teacher."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from finwhale.config import AttentionMode, PoolUse
from finwhale.data.packing import pack
from finwhale.model.selection_plan import SelectionPlan
from finwhale.ops.attention import sparse_attention_with_mass_ref
from finwhale.train.evaluate import index_recall
from finwhale.train.index_objective import IndexObjective
from finwhale.train.loss import Batch
from tests.models import build, token_ids, unit_model

NO_ROWS = torch.zeros(1, 0).long()


def objective_of(
    tokens, rows=NO_ROWS, learns_rows=False, learns_selected=None, teaches_pool=False
) -> IndexObjective:
    live = torch.ones(1, tokens, dtype=torch.bool)
    if learns_selected is None:
        learns_selected = not learns_rows
    return IndexObjective(
        live=live,
        rows=rows,
        learns_rows=learns_rows,
        learns_selected=learns_selected,
        teaches_pool=teaches_pool,
    )


def passed(model, ids, **options):
    """Run one planned pass; return hidden states and the objective."""
    objective = objective_of(ids.shape[1], **options)
    hidden = model.hidden(ids, plan=SelectionPlan(topk=4, observer=objective))
    return hidden, objective


def names_with_gradient(model) -> set[str]:
    return {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def indexer_names(model) -> set[str]:
    return {n for n, _ in model.named_parameters() if ".indexer." in n}


@pytest.mark.parametrize("learns_rows", [False, True])
def test_index_loss_teaches_all_of_the_indexer_and_nothing_else(learns_rows):
    model = build(unit_model().config)
    rows = torch.arange(0, 40, 3).unsqueeze(0) if learns_rows else NO_ROWS
    _, objective = passed(model, token_ids(1, 40), rows=rows, learns_rows=learns_rows)
    losses = objective.losses()
    assert list(losses) == [s.layer_id for s in model.specs if s.owns_topk]
    sum(losses.values()).backward()
    assert names_with_gradient(model) == indexer_names(model)


def test_pool_builder_learns_what_the_searching_layers_look_at():
    """By hand: its teacher is the mass of all decoder layers that read entries."""
    model = unit_model()
    rows = torch.arange(0, 40, 3).unsqueeze(0)
    found = {}
    for teaches in (False, True):
        with torch.no_grad():
            _, objective = passed(
                model, token_ids(1, 40), rows=rows, learns_rows=True, learns_selected=False,
                teaches_pool=teaches,
            )  # fmt: skip
            found[teaches] = {owner: float(loss) for owner, loss in objective.losses().items()}
    builder = next(s.layer_id for s in model.specs if s.pool is PoolUse.BUILDS)
    searchers = [s.layer_id for s in model.specs if s.pool is PoolUse.SEARCHES]
    assert searchers
    groups = objective._groups
    teacher = sum(m for o in (builder, *searchers) for m in groups[o].row_masses)
    scores = groups[builder].scores.gather(
        1, rows.unsqueeze(-1).expand(-1, -1, groups[builder].scores.shape[-1])
    )
    live = objective.live.gather(1, rows)
    by_hand = 0.0
    for row in range(rows.shape[1]):
        seen = ~scores[0, row].isneginf()
        p = teacher[0, row, seen].double()
        if live[0, row] and p.sum() > 0:
            s = scores[0, row, seen].double()
            by_hand += float(s.logsumexp(0) - (p / p.sum() * s).sum())
    assert found[True][builder] == pytest.approx(by_hand * 40 / rows.shape[1], rel=1e-5)
    # Control: it is another teacher, and nobody else's has changed.
    assert found[True][builder] != pytest.approx(found[False][builder], rel=1e-3)
    assert {o: v for o, v in found[True].items() if o != builder} == {
        o: v for o, v in found[False].items() if o != builder
    }


def test_combined_loss_is_the_mean_of_its_two_halves():
    model = unit_model()
    ids, rows = token_ids(1, 40), torch.arange(0, 40, 3).unsqueeze(0)
    found = {}
    for name, halves in {"rows": (True, False), "set": (False, True), "both": (True, True)}.items():
        with torch.no_grad():
            _, objective = passed(
                model, ids, rows=rows, learns_rows=halves[0], learns_selected=halves[1]
            )
            found[name] = {owner: float(loss) for owner, loss in objective.losses().items()}
    for owner, both in found["both"].items():
        halves = found["rows"][owner], found["set"][owner]
        assert both == pytest.approx(sum(halves) / 2, rel=1e-6)
        # Control: the halves are not one thing counted twice.
        assert halves[0] != pytest.approx(halves[1], rel=1e-2)


def test_language_model_loss_teaches_the_indexer_nothing():
    model = build(unit_model().config)
    hidden, _ = passed(model, token_ids(1, 40))
    model.logits(hidden).square().mean().backward()
    assert not names_with_gradient(model) & indexer_names(model)
    assert names_with_gradient(model) > {"embed.weight", "head.weight"}


def test_reindex_loss_reaches_the_keys_of_its_kv_owner():
    model = build(unit_model().config)
    spec = next(s for s in model.specs if s.mode is AttentionMode.REINDEX)
    _, objective = passed(model, token_ids(1, 40))
    objective.losses()[spec.layer_id].backward()
    own, keys = (f"layers.{n}.attn.indexer." for n in (spec.layer_id, spec.kv_owner))
    assert names_with_gradient(model) == {
        f"{own}wq_b.weight",
        f"{own}weights_proj.weight",
        f"{keys}wk.weight",
        f"{keys}k_norm.weight",
    }


def test_teacher_of_an_owner_is_the_sum_over_the_layers_that_use_its_selection():
    model = unit_model()
    ids = token_ids(1, 40)
    spec = next(s for s in model.specs if s.mode is AttentionMode.REUSE)
    seen = []

    class Watched(IndexObjective):
        def attended(self, spec, mass, attention_inputs):
            seen.append((spec.topk_owner, mass))
            IndexObjective.attended(self, spec, mass, attention_inputs)

    class WithoutReuse(IndexObjective):
        def wants_mass(self, other):
            return IndexObjective.wants_mass(self, other) and other.layer_id != spec.layer_id

    live = torch.ones(1, 40, dtype=torch.bool)
    found = {}
    for kind in (Watched, WithoutReuse):
        objective = kind(live=live, rows=NO_ROWS)
        with torch.no_grad():
            plan = SelectionPlan(topk=4, observer=objective)
            model.hidden(ids, plan=plan)
        found[kind] = objective
    for owner, group in found[Watched]._groups.items():
        mass = sum(group.masses)
        torch.testing.assert_close(mass, sum(m for o, m in seen if o == owner))
    assert sum(o == spec.topk_owner for o, _ in seen) > 1
    full, less = (found[k].losses() for k in (Watched, WithoutReuse))
    assert float(full[spec.topk_owner]) != pytest.approx(float(less[spec.topk_owner]), rel=1e-6)
    for owner in full.keys() - {spec.topk_owner}:
        assert float(full[owner]) == pytest.approx(float(less[owner]), rel=1e-6)


def test_positions_that_do_not_count_teach_nothing():
    model = unit_model()
    ids = token_ids(1, 40)
    losses = []
    for live in (slice(0, 40), slice(0, 25), slice(25, 40), slice(0, 0)):
        objective = objective_of(40)
        objective = replace(objective, live=torch.zeros(1, 40, dtype=torch.bool))
        objective.live[:, live] = True
        with torch.no_grad():
            model.hidden(ids, plan=SelectionPlan(topk=4, observer=objective))
        losses.append({k: float(v) for k, v in objective.losses().items()})
    for owner, whole in losses[0].items():
        assert whole == pytest.approx(losses[1][owner] + losses[2][owner], rel=1e-5)
        assert losses[3][owner] == 0.0


def test_all_rows_sampled_and_all_entries_selected_give_one_loss():
    """Selecting everything makes the selected-set loss the full-row loss."""
    model = unit_model()
    ids = token_ids(1, 23)
    rows = torch.arange(23).unsqueeze(0)
    found = []
    for learns_rows in (False, True):
        objective = objective_of(23, rows=rows, learns_rows=learns_rows)
        with torch.no_grad():
            model.hidden(ids, plan=SelectionPlan(topk=23, observer=objective))
        found.append({k: float(v) for k, v in objective.losses().items()})
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_rows_without_entries_give_finite_losses(tokens):
    model = build(unit_model().config)
    _, objective = passed(model, token_ids(1, tokens))
    losses = objective.losses()
    # One token closes no group of two: ratio-2 owners have no entry and no loss.
    assert (1 in losses) == (tokens > 1)
    total = sum(losses.values())
    total.backward()
    assert math.isfinite(float(total.detach()))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.isfinite(g).all() for g in grads)


class Watcher(IndexObjective):
    """Keeps what every layer that uses a selection attended with."""

    inputs: list

    def attended(self, spec, mass, attention_inputs):
        if spec.topk_owner is not None:
            self.inputs.append((spec.topk_owner, attention_inputs))


def recall_loop(model, batch, k) -> dict[int, float]:
    """Recall of every owner over all live queries, entry by entry."""
    watcher = Watcher(live=batch.targets >= 0, rows=torch.zeros(len(batch.ids), 0).long())
    watcher.inputs = []
    with torch.no_grad():
        model.hidden(batch.ids, packing=batch.packing, plan=SelectionPlan(observer=watcher))
    found = {}
    for owner, group in watcher._groups.items():
        visible = ~group.scores.isneginf()
        everything = torch.where(visible, torch.arange(visible.shape[-1]), -1)
        mass = torch.zeros_like(group.scores)
        for own, (q, window_kv, entries, _, sink, reach, window) in watcher.inputs:
            if own == owner:
                mass += sparse_attention_with_mass_ref(
                    q, window_kv, entries, everything, sink, reach, window
                )[1]
        shares = []
        for b, t in (batch.targets >= 0).nonzero().tolist():
            seen = [m for m in range(visible.shape[-1]) if visible[b, t, m]]
            if len(seen) <= k:
                continue
            best = sorted(seen, key=lambda m: -float(group.scores[b, t, m]))[:k]
            total = sum(float(mass[b, t, m]) for m in seen)
            shares.append(sum(float(mass[b, t, m]) for m in best) / total)
        found[owner] = sum(shares) / len(shares) if shares else math.nan
    return found


def test_recall_of_every_indexer_equals_a_loop_over_entries():
    generator = np.random.default_rng(0)
    documents = [generator.integers(3, 500, n).tolist() for n in (31, 26, 6)]
    packed = pack(documents, sequence_length=30, pad_id=2)
    model = unit_model()
    got = index_recall(model, packed, sampled=30, num_rows=2)
    batch = Batch.of(packed, np.arange(2)).prepared((1, 2), "cpu")
    want = recall_loop(model, batch, 8)
    assert got == pytest.approx(want, rel=1e-4)
    assert all(0 < share < 1 for share in got.values())


def test_recall_without_a_choice_is_no_number():
    """Eight entries or fewer at ratio 2, so every selection is perfect: nothing to measure."""
    packed = pack([list(range(3, 20))], sequence_length=16, pad_id=2)
    got = index_recall(unit_model(), packed, sampled=16, num_rows=1)
    ratios = {s.layer_id: s.ratio for s in unit_model().specs if s.owns_topk}
    assert got.keys() == ratios.keys()
    assert all(math.isnan(got[owner]) == (ratio == 2) for owner, ratio in ratios.items())
