"""Recoveries against whole passes, the engine and hand arithmetic; no replay must be worse."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from finwhale.cache.sequence_state import fresh_state
from finwhale.config.engine import EngineConfig
from finwhale.config.layers import Half
from finwhale.data.long_tasks import alphabet
from finwhale.engine.engine import Engine
from finwhale.engine.generate import generate_uncached
from finwhale.engine.prefill import Prefill, exact_encoder_rows
from finwhale.engine.request import SamplingParams
from finwhale.evals.position_bits import EvaluationError
from finwhale.evals.replay_boundary import (
    EXACT,
    KEPT,
    Recovery,
    bounded,
    cold_run,
    compare,
    continued,
    decoder_bounded,
    encoder_bounded,
    greedy,
    hidden_behind,
    recover,
    stops_for,
)
from finwhale.evals.replay_chain import chain, uninterrupted
from finwhale.evals.replay_inputs import CROSSINGS, copy_out, copy_source, fact_questions, gram_loop
from finwhale.model import Numerics
from tests.models import token_ids, unit_model

MODEL = unit_model()
TEXT = MODEL.config.text_config
W = TEXT.sliding_window
IDS = token_ids(1, 120, seed=3)
VOCAB = range(1, 511)
# Logits of one call and of another differ by sums in another order; see docs/numerics.md.
BOUND = 5e-5
SUFFIX = 5
HITS = (0, 1, 2, W - 1, W, W + 1, 2 * W, 63, 64, 65, 112)
# Of these hits, of other tests, and where a bounded decoder starts.
STOPS = {1, 5, 33, 41, 50, 56, 57, 71, 93, 94, 96, 97, *HITS[1:], *range(40, 110, 14)}


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    """Logits [T, V] of one pass over everything: the slow definition."""
    with torch.no_grad():
        return MODEL(IDS)[0]


@pytest.fixture(scope="module")
def cold():
    return cold_run(MODEL, IDS, stops=STOPS, chunk=32)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def logits_behind(cold, hit: int, recovery: Recovery, suffix: int = SUFFIX) -> torch.Tensor:
    _, last = recover(cold, hit, hit + suffix, recovery)
    with torch.no_grad():
        return MODEL.logits(last)[0]


def test_divergence_is_that_of_hand_arithmetic():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]).clamp_min(1e-30).log()
    q = torch.tensor([[0.25, 0.75, 0.0], [0.2, 0.3, 0.5]]).clamp_min(1e-30).log()
    found = compare(p, q)
    by_hand = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert found.kl == pytest.approx((by_hand, 0), abs=1e-7)
    # A tie goes to the lowest id, so the first rows disagree; the reply parts at once.
    assert found.same == (False, True)
    assert (found.run, found.agreement(1), found.agreement(2)) == (0, 0.0, 0.5)
    assert found.mean_kl(2) == pytest.approx(by_hand / 2)
    assert compare(p, p).run == 2


def test_divergence_refuses_unequal_rows():
    with pytest.raises(EvaluationError, match="log-probabilities"):
        compare(torch.zeros(2, 3), torch.zeros(3, 3))
    with pytest.raises(EvaluationError, match="log-probabilities"):
        compare(torch.zeros(0, 3), torch.zeros(0, 3))


def test_a_cold_run_is_the_whole_pass_however_it_is_cut(cold, whole):
    with torch.no_grad():
        assert difference(MODEL.logits(cold.hidden), whole) < BOUND
    assert cold.stops == sorted(STOPS)


@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("recovery", [KEPT, EXACT], ids=lambda r: r.name)
def test_kept_and_exact_recovery_give_the_cold_run(cold, whole, hit, recovery):
    for suffix in (1, SUFFIX):
        found = logits_behind(cold, hit, recovery, suffix)
        assert difference(found, whole[hit + suffix - 1]) < BOUND


@pytest.mark.parametrize("recovery", [encoder_bounded, decoder_bounded, bounded])
def test_a_replay_of_the_whole_prefix_is_exact_and_a_short_one_is_not(cold, whole, recovery):
    hit = 97
    right = whole[hit + SUFFIX - 1]
    assert difference(logits_behind(cold, hit, recovery(hit + SUFFIX)), right) < BOUND
    assert difference(logits_behind(cold, hit, recovery(W)), right) > 100 * BOUND


@pytest.mark.parametrize("hit", [96, 97])
def test_rows_of_the_receptive_field_make_the_encoder_exact(cold, whole, hit):
    rows = exact_encoder_rows(TEXT)
    assert rows < hit
    right = whole[hit + SUFFIX - 1]
    assert difference(logits_behind(cold, hit, encoder_bounded(rows)), right) < BOUND
    assert difference(logits_behind(cold, hit, encoder_bounded(rows // 2)), right) > BOUND


def test_without_replay_it_is_worse_than_with_one_window(cold, whole):
    """The negative control: means over hits, as one hit may be lucky."""
    hits = range(40, 110, 14)
    mean = {}
    for name, recovery in (("none", bounded(0)), ("window", bounded(W)), ("exact", EXACT)):
        rows = [logits_behind(cold, hit, recovery, 2) for hit in hits]
        right = torch.stack([whole[hit + 1] for hit in hits])
        mean[name] = compare(right.log_softmax(-1), torch.stack(rows).log_softmax(-1)).mean_kl(
            len(hits)
        )
    assert mean["none"] > 2 * mean["window"] > 100 * mean["exact"]


@pytest.mark.parametrize("stop", [W, W + 1, 64, 101])
def test_a_bounded_decoder_is_that_of_a_cold_bounded_prefill(cold, stop):
    prefill = Prefill(MODEL, fresh_state(MODEL), mode="bounded", bounded_rows=W)
    prefill.feed(IDS[:, :stop])
    expected = prefill.finish()
    _, found = recover(cold, stop - 3, stop, decoder_bounded(W))
    assert difference(found, expected) < BOUND


def test_bounded_recovery_is_what_the_engine_serves():
    model = unit_model(Numerics())
    prompt = IDS[0, :77].tolist()
    engine = Engine(model, EngineConfig(prefill="bounded", block_size=8, kernels="torch"))
    params = SamplingParams(max_new_tokens=1, temperature=0, logprobs=True, top_logprobs=20)
    engine.generate([prompt[:73]], params)
    engine.add(prompt, params)
    (output,) = [o for o in engine.step() if o.new]
    # 9 blocks are there, and the last window of them runs again.
    assert output.num_cached_tokens == 72 - W
    cold = cold_run(model, IDS[:, :77], stops={72})
    log_p = continued(model, *recover(cold, 72, 77, bounded(W)), [])[0]
    wrong = continued(model, *recover(cold, 72, 77, bounded(0)), [])[0]
    for token, value in output.new[0].top:
        assert abs(float(log_p[token]) - value) < 1e-3
    assert max(abs(float(wrong[t]) - value) for t, value in output.new[0].top) > 1e-2


def test_each_bounded_half_leaves_the_other_alone(cold):
    hit, rows = 64, W
    kept = cold.kept(hit)
    state, _ = recover(cold, hit, hit + 1, encoder_bounded(rows))
    assert state.window_start == {Half.ENCODER: hit - rows, Half.DECODER: 0}
    state, _ = recover(cold, hit, hit + 1, decoder_bounded(rows))
    assert state.window_start == {Half.ENCODER: 0, Half.DECODER: hit + 1 - rows}
    # And what the cold run kept is still as it was.
    again = cold.kept(hit)
    for layer, held in kept.window.items():
        assert torch.equal(held.rows, again.window[layer].rows)
    for layer, entries in kept.entries.items():
        assert torch.equal(entries.view(), again.entries[layer].view())


def test_global_kv_of_a_hit_is_not_written(cold):
    hit = 65
    before = cold.global_only(hit)
    for recovery in (EXACT, bounded(W), encoder_bounded(W), bounded(0)):
        state, _ = recover(cold, hit, hit + 4, recovery)
        for layer, entries in before.entries.items():
            count = entries.length
            assert torch.equal(state.entries[layer].view()[:count], entries.view())


def test_rows_behind_a_hit_are_suffixes_of_every_length(cold):
    hit = 71
    for recovery in (KEPT, encoder_bounded(W), encoder_bounded(0)):
        rows = hidden_behind(cold, hit, hit + 12, recovery)
        for suffix in (1, 2, 12):
            _, last = recover(cold, hit, hit + suffix, recovery)
            assert difference(rows[suffix - 1], last[0]) < BOUND
    with pytest.raises(EvaluationError, match="where the prompt ends"):
        hidden_behind(cold, hit, hit + 12, bounded(W))


def test_a_branch_is_a_cold_run_of_its_own_text(cold):
    tail = token_ids(1, 9, seed=8)[0].tolist()
    branch = cold.branch(50, tail, stops=[53])
    ids = torch.cat((IDS[:, :50], torch.tensor([tail])), dim=1)
    with torch.no_grad():
        assert difference(MODEL.logits(branch.hidden), MODEL(ids)[0]) < BOUND
    assert branch.stops == [*(stop for stop in sorted(STOPS) if stop <= 50), 53, 59]
    # The trunk reads on as if there were no branch.
    assert difference(cold.branch(50, IDS[0, 50:60].tolist()).hidden, cold.hidden[:60]) < BOUND


def test_greedy_tokens_are_those_of_whole_passes(cold):
    tokens, rows = greedy(cold, 41, 6)
    assert tokens == list(generate_uncached(MODEL, IDS[0, :41].tolist(), max_new_tokens=6))
    assert rows.argmax(-1).tolist() == tokens
    state, last = recover(cold, 33, 41, KEPT)
    assert compare(rows, continued(MODEL, state, last, tokens[:-1])).run == 6


def test_lengths_that_were_not_kept_are_refused():
    run = cold_run(MODEL, IDS[:, :20], stops={10})
    assert stops_for(10, 15, decoder_bounded(W)) == {10, 7}
    assert stops_for(10, 15, bounded(W)) == {10}
    for call in (lambda: run.kept(11), lambda: run.global_only(9)):
        with pytest.raises(EvaluationError, match="the cold run kept"):
            call()
    for hit, stop in ((10, 10), (-1, 5), (10, 21)):
        with pytest.raises(EvaluationError, match="hit, stop"):
            recover(run, hit, stop, KEPT)
    with pytest.raises(EvaluationError, match="stops"):
        cold_run(MODEL, IDS[:, :20], stops={21})
    with pytest.raises(EvaluationError, match="same in both halves"):
        Recovery(name="x", encoder=3, decoder=4, recomputes=True)
    with pytest.raises(EvaluationError, match="0 or more"):
        encoder_bounded(-1)


ROLES = alphabet(VOCAB)


def first_value_of(ids: list[int], key: int) -> int:
    return ids[ids.index(key) + 1]


@pytest.mark.parametrize("hit", [68, 69, 200])
def test_facts_lie_where_they_say_and_each_is_asked_once(hit):
    window = 32
    questions = fact_questions(
        np.random.default_rng(1), vocab=VOCAB, hit=hit, window=window, bos_id=0
    )
    assert len({q.shared for q in questions}) == 1
    at = {}
    for question in questions:
        marker, key = question.tail
        assert marker == ROLES.query
        assert question.shared.count(key) == 1
        assert first_value_of(question.ids, key) == question.answer[0]
        at[question.place] = question.shared.index(question.answer[0])
    assert at["far"] < at["before"] < hit - window == at["window start"]
    assert hit - window < at["inside"] < hit - 2
    assert at["hit"] == hit < at["behind"]
    assert questions[0].shared[0] == 0


def test_facts_need_room():
    for hit, window in ((67, 32), (68, 11)):
        with pytest.raises(EvaluationError, match="two windows"):
            fact_questions(np.random.default_rng(1), vocab=VOCAB, hit=hit, window=window)


@pytest.mark.parametrize("build", CROSSINGS)
@pytest.mark.parametrize("hit", [200, 201])
def test_what_crosses_a_hit_is_cut_by_it(build, hit):
    placed = build(np.random.default_rng(2), vocab=VOCAB, hit=hit, window=32, bos_id=0)
    ids, stop = placed.ids, len(placed.ids)
    assert len(placed.shared) == hit < stop
    full = [*ids, *placed.answer]
    if build is gram_loop:
        for at in range(hit - 9 + 4, len(full)):
            assert full[at] == full[at - 4]
        return
    source = ids.index(ROLES.fact)
    copy = full.index(ROLES.copy)
    assert full[source + 1 : source + 33] == full[copy + 1 :]
    if build is copy_out:
        assert source + 33 < hit - 32
        assert (hit - copy - 1, len(placed.answer)) == (16, 15)
    else:
        assert source + 17 == hit
        assert (copy, len(placed.answer)) == (hit + 16, 32)


def test_copies_need_room():
    for build in (copy_out, copy_source, gram_loop):
        with pytest.raises(EvaluationError, match="hit"):
            build(np.random.default_rng(2), vocab=VOCAB, hit=16, window=32)


def test_a_chain_from_disk_is_exact_bit_for_bit_and_bounded_is_not(tmp_path):
    model = unit_model(Numerics())
    ids = IDS[0].tolist()
    reference = uninterrupted(model, ids, block_size=8)
    with torch.no_grad():
        assert difference(reference, model(IDS)[0].log_softmax(-1)) < 0.05
    equal = {}
    for prefill in ("exact", "bounded"):
        lengths = list(range(90, 121, 10))
        turns = list(
            chain(
                model,
                ids,
                lengths=lengths,
                prefill=prefill,
                folder=tmp_path / prefill,
                block_size=8,
                max_bytes=8 << 20,
            )
        )
        assert [turn.tokens for turn in turns] == lengths
        assert turns[0].loaded_tokens == 0
        if prefill == "bounded":
            # Whole blocks of the turn before: 90 -> 88, 100 -> 96, 110 -> 104.
            assert [turn.loaded_tokens for turn in turns] == [0, 88, 96, 104]
            assert [turn.cached_tokens for turn in turns] == [0, 80, 88, 96]
        equal[prefill] = [torch.equal(turn.log_p, reference[turn.tokens - 1]) for turn in turns]
        steps = [b.tokens - a.tokens for a, b in pairwise(turns)]
        assert steps == [10, 10, 10]
    assert equal["exact"] == [True] * 4
    assert not any(equal["bounded"])


def test_a_chain_refuses_lengths_that_do_not_grow(tmp_path):
    for lengths in ([], [5, 5], [9, 5], [121]):
        with pytest.raises(EvaluationError, match="growing"):
            next(
                chain(
                    MODEL, IDS[0].tolist(), lengths=lengths, prefill="exact", folder=tmp_path / "x"
                )
            )
