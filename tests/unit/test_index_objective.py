"""The indexer's loss and its teacher: plain loops in float64, hand numbers, finite differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from finwhale.config.run import INDEXER_FORMS, IndexerConfig
from finwhale.data.packing import NO_TARGET as N
from finwhale.ops.attention import sparse_attention_with_mass_ref
from finwhale.train.index_objective import (
    IndexObjective,
    IndexSchedule,
    _Group,
    annealed_topk,
    answer_positions,
    answer_rows,
    full_row_mass,
    row_divergence,
    sampled_rows,
    selected_divergence,
)

INF = float("inf")


def cross_entropy_loop(scores, mass, chosen):
    """KL(p || softmax(I)) + entropy(p) over `chosen`, one row, Python floats."""
    total = sum(mass[m] for m in chosen)
    if not chosen or total == 0:
        return 0.0
    teacher = {m: mass[m] / total for m in chosen}
    norm = sum(math.exp(scores[m]) for m in chosen)
    student = {m: math.exp(scores[m]) / norm for m in chosen}
    divergence = sum(p * math.log(p / student[m]) for m, p in teacher.items() if p)
    return divergence - sum(p * math.log(p) for p in teacher.values() if p)


def drawn(seed=0, tokens=6, entries=7, k=4):
    """Scores, mass and a selection with 0 to k entries per row, float64."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, tokens, entries, generator=g, dtype=torch.float64)
    mass = torch.rand(2, tokens, entries, generator=g, dtype=torch.float64)
    topk = torch.full((2, tokens, k), -1)
    for b in range(2):
        for t in range(tokens):
            count = (b + t) % (k + 1)
            slots = torch.randperm(k, generator=g)[:count]
            topk[b, t, slots] = torch.randperm(entries, generator=g)[:count]
    return scores, mass, topk


def test_selected_divergence_equals_kl_plus_entropy():
    scores, mass, topk = drawn()
    got = selected_divergence(scores, mass, topk)
    for b in range(2):
        for t in range(6):
            chosen = [m for m in topk[b, t].tolist() if m >= 0]
            want = cross_entropy_loop(scores[b, t].tolist(), mass[b, t].tolist(), chosen)
            assert float(got[b, t]) == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_row_divergence_equals_kl_plus_entropy_over_what_is_visible():
    scores, mass, _ = drawn()
    for t in range(6):
        scores[:, t, t:] = -INF  # the first row sees nothing
    got = row_divergence(scores, mass)
    for b in range(2):
        for t in range(6):
            want = cross_entropy_loop(scores[b, t].tolist(), mass[b, t].tolist(), list(range(t)))
            assert float(got[b, t]) == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_divergence_gradients_equal_finite_differences():
    scores, mass, topk = drawn(1, 5, 5, 4)
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: selected_divergence(s, mass, topk), scores)
    hidden = torch.arange(5) >= torch.arange(5).unsqueeze(-1)
    assert torch.autograd.gradcheck(
        lambda s: row_divergence(s.masked_fill(hidden, -INF), mass), scores
    )


def test_gradient_is_softmax_minus_teacher_and_zero_outside_the_selection():
    scores = torch.tensor([[[0.0, 0.0, 5.0]]], dtype=torch.float64, requires_grad=True)
    mass = torch.tensor([[[3.0, 1.0, 9.0]]], dtype=torch.float64)
    selected_divergence(scores, mass, torch.tensor([[[1, -1, 0]]])).sum().backward()
    # softmax over entries 0 and 1 is (1/2, 1/2), the teacher (3/4, 1/4).
    assert scores.grad.tolist() == [[[-0.25, 0.25, 0.0]]]


def test_empty_rows_are_zero_and_every_number_is_finite():
    scores = torch.full((1, 3, 4), -INF, requires_grad=True)
    mass = torch.zeros(1, 3, 4)
    topk = torch.full((1, 3, 2), -1)
    for loss in (selected_divergence(scores, mass, topk), row_divergence(scores, mass)):
        assert loss.tolist() == [[0.0, 0.0, 0.0]]
        scores.grad = None
        loss.sum().backward()
        assert scores.grad.tolist() == torch.zeros(1, 3, 4).tolist()
    # A selection without any slot, and one whose teacher saw nothing.
    assert selected_divergence(scores, mass, topk[..., :0]).tolist() == [[0.0] * 3]
    finite = torch.zeros(1, 3, 4, requires_grad=True)
    loss = selected_divergence(finite, mass, torch.tensor([[[0, 1]]]).expand(1, 3, 2))
    loss.sum().backward()
    assert loss.tolist() == [[0.0] * 3]
    assert not finite.grad.any()


def test_divergence_does_not_see_a_shift_of_the_scores_or_the_scale_of_the_mass():
    scores, mass, topk = drawn(2)
    base = selected_divergence(scores, mass, topk)
    shift = torch.randn(2, 6, 1, dtype=torch.float64)
    torch.testing.assert_close(selected_divergence(scores + shift, mass, topk), base)
    torch.testing.assert_close(selected_divergence(scores, mass * 7, topk), base)
    # Control: a shift of one entry only is seen.
    moved = scores.clone()
    moved[..., 0] += 1
    assert not torch.allclose(selected_divergence(moved, mass, topk), base)


def test_divergence_is_least_where_the_index_distribution_is_the_teacher():
    _, mass, _ = drawn(3)
    topk = torch.tensor([0, 2, 3, -1]).expand(2, 6, 4)
    scores = mass.log().requires_grad_()
    loss = selected_divergence(scores, mass, topk)
    loss.sum().backward()
    assert scores.grad.abs().max() < 1e-12
    for seed in range(4):
        noise = torch.randn(
            scores.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        assert (selected_divergence(scores + noise, mass, topk) > loss).all()


def test_teacher_by_hand_has_window_and_sink_in_its_softmax():
    """Two heads, D = 1: entry scores differ per head, so where a head looks decides its vote."""
    # One token whose window row is k = 1 and entries are 1 and 2. Head 0: q = 1; head 1: q = -3.
    q = torch.tensor([[[[1.0], [-3.0]]]])
    window_kv, entries = torch.tensor([[[1.0]]]), torch.tensor([[[1.0], [2.0]]])
    sink = torch.tensor([0.0, 1.0])
    _, mass = sparse_attention_with_mass_ref(
        q, window_kv, entries, torch.tensor([[[0, 1]]]), sink, torch.zeros(1, 1).long(), 4
    )
    e = math.exp
    first = e(1) + e(1) + e(2) + e(0)
    second = e(-3) + e(-3) + e(-6) + e(1)
    want = [e(1) / first + e(-3) / second, e(2) / first + e(-6) / second]
    assert mass[0, 0].tolist() == pytest.approx(want, rel=1e-6)
    teacher = mass[0, 0] / mass[0, 0].sum()
    # Control: each head normalised over the entries alone is another target.
    alone = [
        e(1) / (e(1) + e(2)) + e(-3) / (e(-3) + e(-6)),
        e(2) / (e(1) + e(2)) + e(-6) / (e(-3) + e(-6)),
    ]
    assert abs(float(teacher[0]) - alone[0] / sum(alone)) > 0.2


@pytest.mark.parametrize("entries", [1, 5])
def test_full_row_mass_equals_the_mass_with_every_visible_entry_selected(entries):
    g = torch.Generator().manual_seed(entries)
    batch, tokens, heads, dim, window = 2, 7, 3, 4, 3
    q = torch.randn(batch, tokens, heads, dim, generator=g)
    window_kv = torch.randn(batch, tokens, dim, generator=g)
    rows_kv = torch.randn(batch, entries, dim, generator=g)
    sink = torch.randn(heads, generator=g)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3]])
    visible = torch.rand(batch, tokens, entries, generator=g) > 0.4
    topk = torch.where(visible, torch.arange(entries), -1)
    _, want = sparse_attention_with_mass_ref(q, window_kv, rows_kv, topk, sink, positions, window)
    rows = torch.arange(tokens).expand(batch, tokens)
    got = full_row_mass(q, window_kv, rows_kv, sink, positions, window, rows, visible)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    # Control: without the sink the mass is larger.
    bare = full_row_mass(q, window_kv, rows_kv, sink - 1e9, positions, window, rows, visible)
    assert (bare - want).max() > 1e-3
    # Any rows, in any order.
    some = torch.tensor([[6, 2], [0, 3]])
    picked = visible.gather(1, some.unsqueeze(-1).expand(-1, -1, entries))
    got = full_row_mass(q, window_kv, rows_kv, sink, positions, window, some, picked)
    want = want.gather(1, some.unsqueeze(-1).expand(-1, -1, entries))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tokens", "count"), [(1, 4), (3, 4), (4, 4), (5, 4), (37, 8)])
def test_sampled_rows_take_one_row_of_each_stretch(tokens, count):
    seen = set()
    for seed in range(30):
        rows = sampled_rows(torch.tensor(seed), torch.zeros(3, tokens), count)
        assert rows.shape == (3, min(count, tokens))
        assert sampled_rows(torch.tensor(seed), torch.zeros(3, tokens), 0).shape == (3, 0)
        edges = [n * tokens // min(count, tokens) for n in range(min(count, tokens) + 1)]
        for row in rows.tolist():
            assert all(a <= x < b for a, x, b in zip(edges, row, edges[1:], strict=False))
        assert torch.equal(rows, sampled_rows(torch.tensor(seed), torch.zeros(3, tokens), count))
        seen |= {x for row in rows.tolist() for x in row}
    assert seen == set(range(tokens))


def test_answers_are_targets_of_documents_with_other_tokens():
    """By hand: a text of 3, a task of 4 that answers twice, a task without an answer, padding."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 0]])
    targets = torch.tensor([[5, 6, 7, N, 8, N, 9, N, N, N]])
    is_token = torch.tensor([[True] * 9 + [False]])
    found = answer_positions(targets, is_token, positions)
    assert found.nonzero()[:, 1].tolist() == [4, 6]
    # Padding behind a text does not make it a task.
    text = answer_positions(targets[:, :3], is_token[:, :3], positions[:, :3])
    assert not text.any()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_answer_rows_are_answers_and_cover_them(count):
    is_answer = torch.zeros(3, 40, dtype=torch.bool)
    is_answer[0, [3, 4, 17, 29, 39]] = True
    is_answer[1, 11] = True
    seen = set()
    for seed in range(40):
        rows = answer_rows(torch.tensor(seed), is_answer, count)
        assert rows.shape == (3, count)
        assert is_answer[:2].gather(1, rows[:2]).all()
        # Of five answers eight draws take each, in order.
        assert count < 5 or len(set(rows[0].tolist())) == 5
        assert rows[0].tolist() == sorted(rows[0].tolist())
        # A row that asks nothing gives what it would anyway.
        assert torch.equal(rows[2], sampled_rows(torch.tensor(seed), is_answer, count)[2])
        # A part draws what the whole would.
        part = answer_rows(torch.tensor(seed), is_answer[1:], count, first=1)
        assert torch.equal(part, rows[1:])
        seen |= set(rows[0].tolist())
    assert seen == {3, 4, 17, 29, 39}


def watched(scores, mass, live=None) -> IndexObjective:
    """An objective that has seen one group, all rows sampled; scores and mass [1, T, M]."""
    tokens = scores.shape[1]
    live = torch.ones(1, tokens, dtype=torch.bool) if live is None else live
    objective = IndexObjective(live=live, rows=torch.arange(tokens).expand(1, tokens))
    topk = torch.zeros(1, tokens, 1).long()
    objective._groups[3] = _Group(spec=None, scores=scores, topk=topk, row_masses=[mass])
    return objective


def test_recall_by_hand():
    scores = torch.tensor([[[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, -INF], [0.0, 1.0, -INF, -INF]]])
    mass = torch.tensor([[[0.4, 0.1, 0.2, 0.3], [0.5, 0.25, 0.25, 9.0], [0.7, 0.3, 0.0, 0.0]]])
    # Two best: 0.5 of 1.0, then 0.5 of 1.0 (what is hidden does not count); row 2 has no choice.
    share, count = watched(scores, mass).recalls(2)[3]
    assert (float(share), int(count)) == (pytest.approx(1.0), 2)
    live = torch.tensor([[True, False, True]])
    share, count = watched(scores, mass, live).recalls(2)[3]
    assert (float(share), int(count)) == (pytest.approx(0.5), 1)
    assert watched(scores, mass).recalls(4) == {}  # as many entries as are taken: no choice


def test_recall_is_one_where_the_best_scores_hold_the_most_mass_that_k_entries_can():
    g = torch.Generator().manual_seed(0)
    mass = torch.rand(1, 5, 9, generator=g) * (torch.arange(9) % 3 == 0)
    share, count = watched(mass, mass).recalls(3)[3]
    assert float(share / count) == pytest.approx(1.0, abs=1e-6)
    worst, count = watched(-mass, mass).recalls(3)[3]
    assert float(worst) == 0.0


@pytest.mark.parametrize(
    ("form", "step", "want"),
    [
        # (topk, explore, learns, learns_rows) of index_topk 4, 32 entries, 100 steps, phase 0.5
        ("frozen", 0, (4, 0, False, False)),
        ("selected", 0, (4, 0, True, False)),
        ("selected", 99, (4, 0, True, False)),
        ("explored", 0, (4, 8, True, False)),
        ("explored", 99, (4, 8, True, False)),
        ("sampled_rows", 0, (4, 0, True, True)),
        ("combined", 0, (4, 8, True, True)),
        ("dense_combined", 49, (32, 0, True, True)),
        ("dense_combined", 50, (4, 8, True, True)),
        ("dense_warmup", 0, (32, 0, True, False)),
        ("dense_warmup", 49, (32, 0, True, False)),
        ("dense_warmup", 50, (4, 0, True, False)),
        ("annealed", 0, (32, 0, True, False)),
        # Level 4 of 8 is half-way: 32 * sqrt(4 / 32) = 11.3.
        ("annealed", 25, (11, 0, True, False)),
        # Level 7: 32 / 8^(7/8) = 5.19.
        ("annealed", 49, (5, 0, True, False)),
        ("annealed", 50, (4, 0, True, False)),
        ("annealed", 99, (4, 0, True, False)),
    ],
)
def test_schedule_by_hand(form, step, want):
    found = IndexSchedule.at(IndexerConfig(form=form, phase=0.5), step, 100, 4, 32)
    assert (found.topk, found.explore, found.learns, found.learns_rows) == want


def test_schedule_never_asks_for_more_than_there_is():
    for form in INDEXER_FORMS:
        for step in (0, 3, 9):
            short = IndexSchedule.at(IndexerConfig(form=form), step, 10, 4, 3)
            assert short.topk == 3
            assert short.explore <= 3
            # A net of windows only has no entry at all.
            assert IndexSchedule.at(IndexerConfig(form=form), step, 10, 4, 0).topk == 0
    explored = IndexerConfig(form="explored", explore=5)
    assert IndexSchedule.at(explored, 0, 10, 4, 32).explore == 5


def test_annealing_goes_down_in_at_most_nine_sizes():
    path = [annealed_topk(n / 1000, 16, 1024) for n in range(1001)]
    assert path[0] == 1024
    assert path[-1] == 16
    assert all(a >= b for a, b in itertools.pairwise(path))
    assert len(set(path)) == 9
    # Geometric: every level takes the same share, 64^(1/8).
    for a, b in itertools.pairwise(sorted(set(path))):
        assert b / a == pytest.approx(64 ** (1 / 8), rel=0.05)
