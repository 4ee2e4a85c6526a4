"""Selection errors: a dense reference over all rows, hand cases, controls that must lose mass."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finwhale.config import PoolUse
from finwhale.data.long_tasks import alphabet
from finwhale.data.packing import NO_TARGET, PackedRows, pack
from finwhale.evals import selection_errors as measuring
from finwhale.evals.failing_inputs import (
    CONTROL,
    FORMS,
    KINDS,
    FailingInputsError,
    disturbed_input,
    failing_inputs,
)
from finwhale.evals.selection_errors import (
    BUCKETS,
    MASS_LOST,
    OUTSIDE_POOL,
    STALENESS,
    MeasuredState,
    SelectionErrorsError,
    best_entries,
    dropped_share,
    plots,
    selection_errors,
)
from finwhale.model import Backbone, Numerics
from finwhale.ops import FAST
from finwhale.ops.index import select_pool_blocks, select_topk
from finwhale.train.loss import Batch
from tests.models import EXACT, build, token_ids, unit_model

VOCAB = range(100, 300)
# Three rows, the last two of several documents; odd lengths leave unfinished groups.
ROW, LENGTHS = 45, (45, 29, 11, 2, 16)


def packed_rows(lengths=LENGTHS, row=ROW) -> PackedRows:
    documents = [token_ids(n + 1, seed=i).tolist() for i, n in enumerate(lengths)]
    return pack(documents, sequence_length=row, pad_id=0)


def by_key(records):
    """Return (measure, owner, layer, low) -> record."""
    return {(r.measure, r.owner, r.layer, r.low): r for r in records}


def assert_same_records(got, want, tolerance=1e-6):
    assert [replace(r, values={}) for r in got] == [replace(r, values={}) for r in want]
    for a, b in zip(got, want, strict=True):
        assert a.values == pytest.approx(b.values, rel=tolerance, abs=tolerance)


# The slow reference: what the attention core and the scorer really got, all rows at once.


def captured_inputs(model: Backbone, packed: PackedRows):
    """Return attention inputs and index scores per layer of one row after the other."""
    attention, scores = [], []

    def sparse_attention(*inputs):
        attention.append(inputs)
        return FAST.sparse_attention(*inputs)

    def visible_index_scores(*inputs):
        found = FAST.visible_index_scores(*inputs)
        scores.append(found)
        return found

    kept = model.parts.ops
    model.parts.ops = replace(
        kept, sparse_attention=sparse_attention, visible_index_scores=visible_index_scores
    )
    batch = Batch.of(packed, np.arange(packed.num_rows))
    plan = measuring.SelectionPlan(uses_pool=True)
    with torch.no_grad():
        model.hidden(batch.ids, packing=batch.packing, plan=plan)
    model.parts.ops = kept
    layers = {spec.layer_id: attention[spec.layer_id] for spec in model.specs}
    owners = [spec.layer_id for spec in model.specs if spec.owns_topk]
    return layers, dict(zip(owners, scores, strict=True)), batch


def dense_mass(inputs, b, t, visible):
    """Return the mass [M] of one query, float64: an explicit loop over heads."""
    q, window_kv, entries, _, sink, reach, window = inputs
    mass = torch.zeros(entries.shape[1], dtype=torch.float64)
    near = range(t - min(int(reach[b, t]), window - 1), t + 1)
    for h in range(q.shape[2]):
        query = q[b, t, h].double() / q.shape[-1] ** 0.5
        parts = torch.cat(
            (
                torch.stack([window_kv[b, s].double() @ query for s in near]),
                entries[b, visible].double() @ query,
                sink[h].detach().double()[None],
            )
        ).softmax(0)
        mass[visible] += parts[len(near) : -1]
    return mass


def best_k(values, allowed, k):
    """Return the k allowed places of the highest values, the lowest place first among equals."""
    return set(sorted(allowed, key=lambda m: (-float(values[m]), m))[:k])


def pool_of(builder_scores, own, first, blocks, size):
    """Return the entries (rows) of the pool of one query, from the builder's scores."""
    last = (len(own) - 1) // size
    best = {
        n: max(float(builder_scores[m]) for m in own[n * size : (n + 1) * size])
        for n in range(last + 1)
    }
    best[last] = float("inf")
    chosen = sorted(best, key=lambda n: (-best[n], n))[:blocks]
    return {m for m in own if (m - first) // size in chosen}


def reference_records(model: Backbone, packed: PackedRows):
    """Return (measure, owner, layer, low) -> (queries, mean values), by plain loops."""
    c = model.config.text_config
    layers, scores, batch = captured_inputs(model, packed)
    readers = {}
    for spec in model.specs:
        if spec.topk_owner is not None:
            readers.setdefault(spec.topk_owner, []).append(spec.layer_id)
    builder = next(s.layer_id for s in model.specs if s.pool is PoolUse.BUILDS)
    pool = c.candidate_topk_blocks * c.candidate_block_size
    sums: dict = {}

    def add(key, capacity, count, values):
        low = max((e for e in (0.0, *BUCKETS) if count > e * capacity), default=0.0)
        sums.setdefault((*key, low), []).append(values)

    for owner, b in itertools.product(readers, range(len(batch.ids))):
        for t in torch.nonzero(batch.targets[b] != NO_TARGET).flatten().tolist():
            own = torch.nonzero(~scores[owner][b, t].isneginf()).flatten().tolist()
            if not own:
                continue
            chosen = set(layers[owner][3][b, t].tolist()) - {-1}
            masses = {n: dense_mass(layers[n], b, t, own) for n in readers[owner]}
            whole = sum(masses.values())

            def lost(mass, kept, own=own):
                return sum(float(mass[m]) for m in own if m not in kept)

            heads = c.num_attention_heads
            for layer, mass in masses.items():
                best = best_k(mass, own, c.index_topk)
                values = {
                    "overlap": len(best & chosen) / len(best),
                    "lost": lost(mass, chosen) / heads,
                    "best_lost": lost(mass, best) / heads,
                }
                add((STALENESS, owner, layer), c.index_topk, len(own), values)
            total = heads * len(masses)
            best = best_k(whole, own, c.index_topk)
            values = {
                "lost": lost(whole, chosen) / total,
                "oracle_lost": lost(whole, best) / total,
                "entries": float(whole.sum()) / total,
            }
            add((MASS_LOST, owner, None), c.index_topk, len(own), values)
            if model.specs[owner].pool is PoolUse.SEARCHES:
                inside = pool_of(
                    scores[builder][b, t], own, own[0], c.candidate_topk_blocks,
                    c.candidate_block_size,
                )  # fmt: skip
                wanted = best_k(scores[owner][b, t], own, c.index_topk)
                values = {
                    "outside": len(wanted - inside) / len(wanted),
                    "mass_outside": lost(whole, inside) / total,
                }
                add((OUTSIDE_POOL, owner, None), pool, len(own), values)
    return {
        key: (len(rows), {name: sum(r[name] for r in rows) / len(rows) for name in rows[0]})
        for key, rows in sums.items()
    }


@pytest.mark.parametrize("numerics", [EXACT, Numerics()], ids=["exact", "rounded"])
def test_every_value_equals_dense_loops_over_all_rows(numerics):
    model, packed = build(unit_model().config, numerics), packed_rows()
    got = by_key(selection_errors(model, packed, sampled=ROW))
    want = reference_records(model, packed)
    assert {key for key, r in got.items() if r.queries} == set(want)
    for key, (queries, values) in want.items():
        assert got[key].queries == queries
        assert got[key].values == pytest.approx(values, rel=2e-4, abs=2e-6), key
    # All mechanisms take part: each measure has a bucket where something is lost.
    for measure, name in ((MASS_LOST, "lost"), (OUTSIDE_POOL, "outside"), (STALENESS, "lost")):
        assert max(v[name] for (m, *_), (_, v) in want.items() if m == measure) > 0.05


def test_what_fits_into_the_selection_or_the_pool_loses_exactly_nothing():
    records = selection_errors(unit_model(), packed_rows(), sampled=ROW)
    small = [r for r in records if r.high <= 1 and r.queries]
    assert {r.measure for r in small} == {MASS_LOST, OUTSIDE_POOL, STALENESS}
    for r in small:
        zeros = {k: v for k, v in r.values.items() if k not in ("overlap", "entries")}
        assert set(zeros.values()) == {0.0}
        assert r.values.get("overlap", 1.0) == 1.0
    # Control: one bucket further the same measures lose something.
    larger = [r for r in records if r.measure == MASS_LOST and r.low >= 1 and r.queries]
    assert len(larger) > 4
    assert all(r.values["lost"] > 0 for r in larger)


@pytest.mark.parametrize("k", [ROW - 1, ROW, ROW + 1])
def test_only_a_query_with_more_than_k_entries_loses(k):
    """One document of 45 tokens at ratio 1 has 45 entries for its last query, fewer elsewhere."""
    model = unit_model(index_topk=k, candidate_topk_blocks=-(-ROW // 4))
    losing = set()
    for r in selection_errors(model, packed_rows(), sampled=ROW):
        if r.measure == OUTSIDE_POOL:
            # The pool holds everything.
            assert set(r.values.values()) <= {0.0}
        elif r.values.get("lost"):
            assert r.queries == 1
            losing.add(r.owner)
    assert losing == ({4, 6} if k < ROW else set())


def test_one_entry_less_than_visible_loses_by_hand():
    mass = torch.tensor([[[0.5, 0.25, 0.0, 0.125]]])
    visible = torch.tensor([[[True, True, False, True]]])
    assert dropped_share(mass, torch.tensor([[[0, 1, 3]]]), 2.0).item() == 0.0
    assert dropped_share(mass, torch.tensor([[[0, 3, -1]]]), 2.0).item() == 0.125
    assert dropped_share(mass, torch.tensor([[[-1, -1]]]), 2.0).item() == 0.4375
    assert dropped_share(mass, mass.new_empty(1, 1, 0).long(), 2.0).item() == 0.4375
    assert best_entries(mass, visible, 2).tolist() == [[[0, 1]]]
    assert best_entries(mass, visible, 4).tolist() == [[[0, 1, 3, -1]]]
    # Equal masses: the lowest row, as the deployed rule has it.
    assert best_entries(torch.ones(1, 1, 4), visible, 2).tolist() == [[[0, 1]]]


def test_no_selection_of_k_loses_less_than_the_best_k():
    g = torch.Generator().manual_seed(0)
    mass = torch.rand(1, 1, 7, generator=g, dtype=torch.float64)
    visible = torch.ones(1, 1, 7, dtype=torch.bool)
    best = dropped_share(mass, best_entries(mass, visible, 3), 1.0).item()
    others = [
        dropped_share(mass, torch.tensor([[list(chosen)]]), 1.0).item()
        for chosen in itertools.combinations(range(7), 3)
    ]
    assert best == min(others)
    assert sorted(others)[1] > best


def test_an_index_that_does_not_look_loses_more_than_one_that_does():
    """The control of the measure: the oracle's own selection, then none that knows the content."""
    packed = packed_rows()

    def lost(select):
        model = unit_model(ops=replace(FAST, select_topk=select))
        records = selection_errors(model, packed, sampled=ROW)
        return {
            r.owner: r.values["lost"] - r.values["oracle_lost"]
            for r in records
            if r.measure == MASS_LOST and r.low == 2.0 and r.queries
        }

    def oldest(scores, k):
        blind = torch.where(scores.isneginf(), scores, 0.0)
        return select_topk(blind, k)

    blind = lost(oldest)
    assert len(blind) == 4
    assert min(blind.values()) > 0.03
    # At random weights the index is blind too: it loses as much, where a taught one would not.
    assert min(lost(select_topk).values()) > 0.03


def test_a_pool_of_the_newest_block_alone_lacks_most_of_the_best_entries():
    def outside(select_pool):
        model = unit_model(ops=replace(FAST, select_pool_blocks=select_pool))
        records = selection_errors(model, packed_rows(), sampled=ROW)
        return [
            r.values["outside"]
            for r in records
            if r.measure == OUTSIDE_POOL and r.queries and r.low >= 1
        ]

    def newest(scores, visible, num_blocks, block_size):
        return select_pool_blocks(scores, visible, 1, block_size)

    assert min(outside(newest)) > 0.7
    assert max(outside(select_pool_blocks)) < min(outside(newest))


def measured_state(model, packed, rows, sliced=True):
    batch = Batch.of(packed, np.arange(packed.num_rows))
    return batch, MeasuredState.of(model, batch, rows, sliced)


def test_a_measured_pass_is_the_deployed_pass_bit_for_bit():
    model, packed = unit_model(), packed_rows()
    batch, state = measured_state(model, packed, torch.zeros(packed.num_rows, 5).long())
    with torch.no_grad():
        plain = model.hidden(batch.ids, packing=batch.packing)
        assert torch.equal(model.hidden(batch.ids, state=state), plain)


def test_measures_do_not_depend_on_slices_or_batches(monkeypatch):
    model, packed = unit_model(), packed_rows()
    # Three passes of one row, one of three, one of two that repeats a row; and the training pass.
    want = selection_errors(model, packed, sampled=9)
    for options in ({"batch_rows": 1}, {"batch_rows": 2}, {"sliced": False}):
        assert_same_records(selection_errors(model, packed, sampled=9, **options), want)
    monkeypatch.setattr(measuring, "_SLICE_BYTES", 1)
    assert_same_records(selection_errors(model, packed, sampled=9), want)
    # Control: other queries give other values.
    other = selection_errors(model, packed, sampled=9, seed=1)
    assert [r.values for r in other] != [r.values for r in want]


class LargestMade(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that was made."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor):
                self.largest = max(self.largest, made.numel())
        return out


def test_the_measure_makes_nothing_of_tokens_times_entries(monkeypatch):
    tokens = 150
    model, packed = unit_model(), packed_rows((tokens,), tokens)
    measure = MeasuredState._measure

    def largest(queries):
        made = LargestMade()

        def watched(self, *inputs):
            with made:
                measure(self, *inputs)

        monkeypatch.setattr(MeasuredState, "_measure", watched)
        selection_errors(model, packed, sampled=queries)
        return made.largest

    assert largest(3) < tokens * tokens
    # Control: with half of the rows sampled the watch sees an array of that size.
    assert largest(80) >= tokens * tokens


def test_queries_are_live_tokens_drawn_once_and_reach_short_contexts():
    packed = packed_rows((400,), 400)
    packed.targets[0, ::2] = NO_TARGET
    batch = Batch.of(packed, np.array([0, 0]))
    rng = np.random.default_rng(0)
    rows, live = measuring._drawn_queries(batch, np.array([True, False]), 60, 8, rng)
    assert rows.shape == (2, 60)
    assert live[0].all()
    assert not live[1].any()
    drawn = rows[0].tolist()
    assert len(set(drawn)) == 60
    assert all(row % 2 == 1 for row in drawn)
    # Even in the logarithm: a quarter of the range holds far more than a quarter of the queries.
    assert sum(row < 100 for row in drawn) > 25


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (2, 1)])
def test_documents_of_one_or_two_tokens_have_records_without_losses(lengths):
    records = selection_errors(unit_model(), packed_rows(lengths, 5), sampled=64)
    assert records
    for r in records:
        assert (r.values == {}) == (r.queries == 0)
        assert r.values.get("lost", 0.0) == 0.0


def test_rows_without_a_target_give_empty_buckets():
    packed = packed_rows()
    packed.targets[:] = NO_TARGET
    assert {r.queries for r in selection_errors(unit_model(), packed, sampled=4)} == {0}


@pytest.mark.parametrize(
    ("options", "named"),
    [({"buckets": ()}, "buckets"), ({"buckets": (1, 1)}, "buckets"), ({"buckets": (0, 1)}, "0"),
     ({"sampled": 0}, "sampled")],
)  # fmt: skip
def test_refusals_name_the_field(options, named):
    with pytest.raises(SelectionErrorsError, match=named):
        selection_errors(unit_model(), packed_rows(), **options)


def test_each_measure_with_values_has_a_picture(tmp_path, monkeypatch):
    records = selection_errors(unit_model(), packed_rows(), sampled=5)
    files = plots(records, tmp_path / "new")
    assert [f.name for f in files] == ["mass_lost.png", "outside_pool.png", "staleness.png"]
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)
    few = [r for r in records if r.measure == MASS_LOST]
    assert [f.name for f in plots(few, tmp_path)] == ["mass_lost.png"]
    assert plots([], tmp_path) == ()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SelectionErrorsError, match="extra"):
        plots(records, tmp_path)


# Inputs that are built to fail.


def drawn_input(kind="run", form="needle", copies=6, depth=0.5, length=90, far=8, seed=0):
    return disturbed_input(
        np.random.default_rng(seed), kind=kind, form=form, copies=copies, depth=depth,
        length=length, vocab=VOCAB, far=far,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [*KINDS, CONTROL])
def test_an_input_has_one_answer_far_from_its_question(kind, form):
    roles = alphabet(VOCAB)
    for copies, depth, length in itertools.product((0, 1, 7), (0.0, 0.4, 1.0), (70, 71)):
        if kind == CONTROL and copies:
            continue
        made = drawn_input(kind, form, copies, depth, length, 9)
        start, stop = made.fact
        *body, query, key, value = made.tokens
        assert len(made.tokens) == length
        assert query == roles.query
        fact = [roles.fact, key, value] if form == "needle" else [key, value]
        assert list(made.tokens[start:stop]) == fact
        # Distance of the value from the last token that is read, which is the question's key.
        assert length - 2 - (stop - 1) >= 9
        after_key = [b for a, b in itertools.pairwise(body) if a == key]
        assert [t for t in after_key if t in roles.values] == [value]


def near_copies(tokens, fact, start, changed):
    """Return how many places hold the fact with exactly the tokens at `changed` different."""
    n = len(fact)
    return sum(
        i != start and {j for j in range(n) if tokens[i + j] != fact[j]} == changed
        for i in range(len(tokens) - n - 2)
    )


def test_disturbances_are_what_they_say():
    roles = alphabet(VOCAB)
    for kind, changed in (
        ("changed_key", {1}), ("changed_value", {2}), ("other_fact", {1, 2}),
    ):  # fmt: skip
        made = drawn_input(kind, copies=6)
        fact = made.tokens[slice(*made.fact)]
        assert near_copies(made.tokens, fact, made.fact[0], changed) == 6
    for kind, place in (("repeated_key", 1), ("repeated_value", 2)):
        made = drawn_input(kind, copies=7)
        start, stop = made.fact
        token = made.tokens[start + place]
        assert made.tokens[start - 3 : start] == (token,) * 3
        assert made.tokens[stop : stop + 4] == (token,) * 4
    made = drawn_input("run", copies=7)
    stop = made.fact[1]
    assert len(set(made.tokens[stop : stop + 7])) == 1
    assert made.tokens[stop] in roles.fillers


def test_depth_moves_the_fact_from_the_front_to_the_reach_of_the_window():
    starts = [drawn_input(CONTROL, copies=0, depth=d).fact[0] for d in (0.0, 0.5, 1.0)]
    # 90 tokens, 3 of question, 3 of fact: 84 fillers, of which far - 2 = 6 stay behind.
    assert starts == [0, 39, 78]


@pytest.mark.parametrize("copies", [10, 11])
def test_what_has_no_room_is_refused_with_the_length_it_needs(copies):
    need = 3 + 3 + copies * 3 + 6
    assert len(drawn_input("changed_key", copies=copies, length=need).tokens) == need
    with pytest.raises(FailingInputsError, match=f"expected at least {need} "):
        drawn_input("changed_key", copies=copies, length=need - 1)


def searched(ops=FAST, candidate_topk_blocks=4, **options):
    model = unit_model(ops=ops, candidate_topk_blocks=candidate_topk_blocks)
    given = {"vocab": VOCAB, "length": 66, "kinds": ("run", "changed_key"), "depths": (0.3,),
             "copies": (0, 0.5, 1), "examples": 3} | options  # fmt: skip
    return failing_inputs(model, **given)


def test_recall_is_what_the_last_position_selected_and_accuracy_what_it_ranked_first():
    model, records = unit_model(), searched(examples=1)
    assert {(r.kind, r.copies) for r in records} == {
        (CONTROL, 0), ("run", 4), ("run", 8), ("changed_key", 4), ("changed_key", 8),
    }  # fmt: skip
    for r in records:
        trace = {}
        ids = torch.tensor([r.tokens])
        hidden = model.hidden(ids[:, :-1], trace=trace)
        for spec in model.specs:
            if not spec.owns_topk:
                continue
            chosen = trace[f"topk.{spec.layer_id}"][0, -1].tolist()
            tokens = {m * spec.ratio + i for m in chosen if m >= 0 for i in range(spec.ratio)}
            assert r.recall[spec.layer_id] == float(r.fact[1] - 1 in tokens)
            assert r.touched[spec.layer_id] == float(bool(tokens & set(range(*r.fact))))
        assert r.accuracy == float(model.logits(hidden)[0, -1].argmax() == r.tokens[-1])


def test_an_index_of_the_newest_entries_never_finds_a_far_fact_and_one_of_all_always_does():
    def newest(scores, k):
        place = torch.arange(scores.shape[-1], dtype=torch.float32)
        return select_topk(torch.where(scores.isneginf(), scores, place), k)

    missed = searched(ops=replace(FAST, select_topk=newest), candidate_topk_blocks=17)
    assert {share for r in missed for share in (*r.recall.values(), *r.touched.values())} == {0.0}
    model = unit_model(index_topk=66, candidate_topk_blocks=17)
    found = failing_inputs(
        model, vocab=VOCAB, length=66, kinds=("repeated_key",), copies=(0.1,), examples=2
    )
    assert {share for r in found for share in r.recall.values()} == {1.0}


def test_the_worst_comes_first_and_the_search_repeats_itself():
    options = {"refinements": 2, "kinds": ("run",)}
    records = searched(**options)
    assert len(records) == 3 + 2
    worst = [r.worst_recall for r in records]
    assert worst == sorted(worst)
    assert worst[0] == min(min(r.recall.values()) for r in records)
    assert searched(**options, batch_rows=2) == records
    assert searched(**options, sliced=False) == records


def test_examples_ask_the_same_whatever_the_disturbance():
    asked = {r.tokens[-2:] for r in searched(examples=1)}
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [({"kinds": ("typo",)}, "kind"), ({"form": "typo"}, "form"), ({"examples": 0}, "examples"),
     ({"length": 11}, "length"), ({"kinds": ()}, "empty"), ({"depths": (0.5, 1.5)}, "depth"),
     ({"copies": (1, -1)}, "copies")],
)  # fmt: skip
def test_a_search_that_cannot_be_made_says_why(options, named):
    with pytest.raises(FailingInputsError, match=named):
        searched(**options)


def test_counts_that_do_not_fit_are_left_out():
    kept = {(r.kind, r.copies) for r in searched(copies=(0, 0.5, 8))}
    assert kept == {(CONTROL, 0), ("run", 4), ("changed_key", 4)}
