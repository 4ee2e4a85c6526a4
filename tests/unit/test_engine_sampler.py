"""Draws against a slow reference in plain Python, and the laws that make them reproducible."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finwhale.engine import sampler
from finwhale.engine.request import RequestError, SamplingParams
from finwhale.engine.sampler import (
    LogitsError,
    best_ids,
    choice_seed,
    draw,
    sample_batch,
    token_logprobs,
    uniform,
)

GREEDY = SamplingParams(temperature=0)


def _u_ref(seed: int, index: int) -> float:
    """The first 53 bits of the hash, read from its hexadecimal digits."""
    bits = bin(int(hashlib.sha256(f"{seed}:{index}".encode()).hexdigest(), 16))[2:].zfill(256)
    return float(Fraction(int(bits[:53], 2), 2**53))


def _kept_ref(x: list[float], params: SamplingParams, mask=None, drawn=()) -> dict[int, float]:
    """Weight of each id that may be drawn, by the definition, one number at a time."""
    x = list(x)
    for token in range(len(x)):
        count = sum(token == other for other in drawn)
        # As the OpenAI reference has it: mu - c * alpha_frequency - (c > 0) * alpha_presence.
        x[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
    for token, added in params.bias:
        x[token] += added
    allowed = [i for i in range(len(x)) if (mask is None or mask[i]) and x[i] > -math.inf]
    top = max(x[i] for i in allowed)
    if params.temperature == 0:
        return {min(i for i in allowed if x[i] == top): 1.0}
    weight = {i: math.exp((x[i] - top) / params.temperature) for i in allowed}
    ranked = sorted(allowed, key=lambda i: (-weight[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        total, mass, nucleus = sum(weight[i] for i in ranked), 0.0, []
        for i in ranked:
            nucleus.append(i)
            mass += weight[i]
            if mass >= params.top_p * total:
                break
        ranked = nucleus
    return {i: weight[i] for i in sorted(ranked) if weight[i] >= params.min_p * weight[ranked[0]]}


def _draw_ref(x, params, u, mask=None, drawn=()) -> tuple[int, float]:
    """The id, and how far u is from the nearest edge between two ids."""
    kept = _kept_ref(x, params, mask, drawn)
    total, mass, edges, answer = sum(kept.values()), 0.0, [], None
    for i, weight in kept.items():
        mass += weight
        edges.append(abs(u - mass / total))
        if answer is None and u * total < mass:
            answer = i
    return answer, min(edges)


def _row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# Quarters give many equal logits.
_LOGITS = st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=1, max_size=9)


@st.composite
def _cases(draw_from):
    x = draw_from(_LOGITS)
    bias = draw_from(
        st.dictionaries(
            st.integers(0, len(x) - 1), st.sampled_from([-math.inf, -1.5, 0.25, 9.0]), max_size=3
        )
    )
    mask = draw_from(
        st.none() | st.lists(st.booleans(), min_size=len(x), max_size=len(x)).map(tuple)
    )
    params = SamplingParams(
        temperature=draw_from(st.sampled_from([0, 0.3, 1.0, 4.0])),
        top_k=draw_from(st.integers(0, len(x) + 1)),
        # Shares that no sum of these weights reaches exactly; ties have their own test.
        top_p=draw_from(st.sampled_from([1.0, 0.9137, 0.61803, 0.1234])),
        min_p=draw_from(st.sampled_from([0.0, 0.0511, 0.7071, 1.0])),
        logit_bias=bias,
        presence_penalty=draw_from(st.sampled_from([0.0, 0.0, -2.0, 0.5, 2.0])),
        frequency_penalty=draw_from(st.sampled_from([0.0, 0.0, -1.0, 0.25, 2.0])),
    )
    drawn = draw_from(st.lists(st.integers(0, len(x) - 1), max_size=6))
    return x, params, mask, drawn


def _is_empty(x, params, mask) -> bool:
    forbidden = {i for i, added in params.bias if added == -math.inf}
    return all(i in forbidden or (mask is not None and not mask[i]) for i in range(len(x)))


@settings(max_examples=120)
@given(case=_cases(), seed=st.integers(-(2**63), 2**64 - 1), index=st.integers(0, 10**6))
@example(case=([0.0], SamplingParams(), None, []), seed=0, index=0)
def test_draw_equals_the_definition(case, seed, index):
    x, params, mask, drawn = case
    tensor = None if mask is None else torch.tensor(mask)
    if _is_empty(x, params, mask):
        with pytest.raises(RequestError, match="no id left"):
            draw(_row(*x), params, seed=seed, index=index, mask=tensor, drawn=Counter(drawn))
        return
    want, margin = _draw_ref(x, params, _u_ref(seed, index), mask, drawn)
    got = draw(_row(*x), params, seed=seed, index=index, mask=tensor, drawn=Counter(drawn))
    # Two exponentials may differ in the last bit; only a u that close to an edge may tell.
    assert got == want or margin < 1e-12


@pytest.mark.parametrize("seed", [0, 1, -5, 2**64 - 1])
def test_uniform_is_the_first_53_bits_of_the_hash(seed):
    for index in (0, 1, 2, 1000):
        assert uniform(seed, index) == _u_ref(seed, index)


def test_uniform_numbers_of_one_seed_and_of_one_index_are_spread():
    """Each tenth gets its share; 5 standard deviations of the binomial law."""
    for numbers in (
        [uniform(7, i) for i in range(4000)],
        [uniform(s, 7) for s in range(4000)],
        [uniform(choice_seed(7, c), 0) for c in range(4000)],
    ):
        assert len(set(numbers)) == 4000
        assert all(0 <= u < 1 for u in numbers)
        for tenth in range(10):
            count = sum(tenth <= 10 * u < tenth + 1 for u in numbers)
            assert abs(count - 400) < 5 * math.sqrt(4000 * 0.1 * 0.9)


def test_choices_of_a_request_have_seeds_of_their_own():
    assert choice_seed(11, 0) == 11
    assert len({choice_seed(seed, c) for seed in (11, 12, -3) for c in range(5)}) == 15


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.0, 0), (0.2499, 0), (0.25, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)],
)
def test_draw_cuts_the_unit_interval_in_id_order(monkeypatch, u, token):
    """Weights 1, 1, 0, 2: ids own [0, 1/4), [1/4, 1/2), nothing and [1/2, 1), edges exact."""
    monkeypatch.setattr(sampler, "uniform", lambda seed, index: u)
    logits = _row(0.0, 0.0, 5.0, math.log(2))
    params = SamplingParams(logit_bias={2: -math.inf, 3: math.log(2) - float(logits[3])})
    assert draw(logits, params, seed=0, index=0) == token


def _support(logits, params, mask=None) -> set[int]:
    """The ids that some u draws."""
    found = set()
    with pytest.MonkeyPatch.context() as patch:
        for step in range(400):
            patch.setattr(sampler, "uniform", lambda seed, index, u=step / 400: u)
            found.add(draw(logits, params, seed=0, index=0, mask=mask))
    return found


@pytest.mark.parametrize(
    ("top_p", "want"),
    [(0.2, {0}), (0.25, {0}), (0.2501, {0, 1}), (0.5, {0, 1}), (0.75, {0, 1, 2}), (0.76, None)],
)
def test_top_p_stops_at_the_share_and_takes_the_lowest_of_equals(top_p, want):
    assert _support(torch.zeros(4), SamplingParams(top_p=top_p)) == (want or {0, 1, 2, 3})


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
def test_top_k_takes_the_lowest_of_equals(top_k):
    ranked = [2, 0, 1, 3]  # 1, then three zeros
    assert _support(_row(0, 0, 1, 0), SamplingParams(top_k=top_k)) == set(ranked[:top_k])


def test_top_p_is_a_share_of_what_top_k_left():
    """Equal weights: half of four is two, half of all eight would have been four."""
    params = SamplingParams(top_k=4, top_p=0.5)
    assert _support(torch.zeros(8), params) == {0, 1}
    assert _support(torch.zeros(8), dataclasses.replace(params, top_k=0)) == {0, 1, 2, 3}


def test_min_p_is_relative_to_the_best():
    logits = _row(0.0, math.log(0.49), math.log(0.51), math.log(0.1))
    assert _support(logits, SamplingParams(min_p=0.5)) == {0, 2}
    assert _support(logits - 40, SamplingParams(min_p=0.5)) == {0, 2}
    assert _support(logits, SamplingParams(min_p=1.0)) == {0}
    assert _support(logits, SamplingParams()) == {0, 1, 2, 3}


def test_extreme_temperatures_and_logits_stay_numbers():
    logits = _row(3e38, -3e38, 3e38)
    for temperature in (1e-300, 1.0, 1e300):
        want = {0, 1, 2} if temperature == 1e300 else {0, 2}
        assert _support(logits, SamplingParams(temperature=temperature)) == want


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0, top_k=1, top_p=0.1)])
def test_greedy_ties_go_to_the_lowest_id(params):
    assert draw(_row(1, 3, 2, 3), params, seed=0, index=0) == 1
    assert sample_batch(_row(1, 3, 2, 3)[None], [params], seeds=[0], indexes=[0])[0].token == 1
    biased = dataclasses.replace(params, logit_bias={1: -1.0, 2: 1.0})
    assert draw(_row(1, 3, 2, 3), biased, seed=0, index=0) == 2
    mask = torch.tensor([True, False, False, True])
    assert draw(_row(1, 3, 2, 3), params, seed=0, index=0, mask=mask) == 3


def test_penalties_by_hand():
    """Logits 3, 2.5, 0 with 0 drawn twice and 1 once; sums by hand."""
    x, drawn = _row(3.0, 2.5, 0.0), {0: 2, 1: 1}

    def best(**penalties):
        params = SamplingParams(temperature=0, **penalties)
        return draw(x, params, seed=0, index=3, drawn=drawn)

    assert best() == 0
    # 3 - 2 = 1, 2.5 - 2 = 0.5: presence moves both alike.
    assert best(presence_penalty=2) == 0
    # 3 - 2 * 0.5 = 2, 2.5 - 0.5 = 2: the tie goes to the lowest id; a little more changes it.
    assert best(frequency_penalty=0.5) == 0
    assert best(frequency_penalty=0.6) == 1
    # 3 - 2 - 2 * 2 = -3, 2.5 - 2 - 2 = -1.5, 0 stays.
    assert best(presence_penalty=2, frequency_penalty=2) == 2
    # A negative penalty invites repetition: 2.5 + 2 against 3 with nothing drawn but 1.
    invited = SamplingParams(temperature=0, presence_penalty=-2)
    assert draw(x, invited, seed=0, index=1, drawn={1: 1}) == 1
    assert draw(x, invited, seed=0, index=1, drawn={}) == 0


def test_penalty_leaves_logprobs_of_the_model_alone():
    x = torch.randn(1, 50)
    one = SamplingParams(temperature=0, logprobs=True, top_logprobs=2, presence_penalty=2)
    (plain,) = sample_batch(x, [one], seeds=[0], indexes=[0])
    (other,) = sample_batch(x, [one], seeds=[0], indexes=[1], drawn=[{plain.token: 1}])
    assert other.top == plain.top
    assert [other] == token_logprobs(x, [other.token], 2)


def test_mask_and_bias_add_up():
    mask = torch.tensor([True, True, False, False])
    params = SamplingParams(logit_bias={0: -math.inf, 3: 100.0})
    assert _support(torch.zeros(4), params, mask) == {1}
    assert _support(torch.zeros(4), SamplingParams(), None) == {0, 1, 2, 3}


@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 257, 700, 701])
def test_best_ids_are_a_stable_full_sort(count):
    values = torch.randint(-40, 40, (700,)) / 8.0
    want = sorted(range(700), key=lambda i: (-float(values[i]), i))[:count]
    assert best_ids(values, count).tolist() == want


@pytest.mark.parametrize("V", [255, 256, 257, 2049])
def test_wide_nucleus_equals_the_definition(V):
    """The search in slices, past the first and up to all of a flat row."""
    logits = (torch.randn(V) * 0.05).round(decimals=2)
    for top_p in (0.05, 0.501, 0.999, 1 - 1e-9):
        params = SamplingParams(top_p=top_p)
        for index in range(4):
            want, margin = _draw_ref(logits.double().tolist(), params, _u_ref(3, index))
            assert draw(logits, params, seed=3, index=index) == want or margin < 1e-12


def _mixed_batch(B: int, V: int):
    """Rows with every kind of option, and the arguments of `sample_batch`."""
    kinds = [
        GREEDY,
        SamplingParams(logprobs=True, top_logprobs=3),
        SamplingParams(temperature=0, logit_bias={1: 9.0}, logprobs=True),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=5, min_p=0.01),
        SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=-1.0),
    ]
    params = [kinds[row % 6] for row in range(B)]
    masks = [torch.rand(V) < 0.5 if row % 3 == 0 else None for row in range(B)]
    seeds = [row // 2 for row in range(B)]
    drawn = [Counter(torch.randint(V, (row % 7,)).tolist()) for row in range(B)]
    return torch.randn(B, V), params, seeds, [row % 4 for row in range(B)], masks, drawn


def test_batch_equals_each_row_alone():
    logits, params, seeds, indexes, masks, drawn = _mixed_batch(37, 311)
    others = {"seeds": seeds, "indexes": indexes, "masks": masks, "drawn": drawn}
    together = sample_batch(logits, params, **others)
    # A row of a larger tensor with another stride, too.
    spread = torch.stack((logits, logits + 1), dim=-1)[..., 0]
    assert not spread.is_contiguous()
    assert sample_batch(spread, params, **others) == together
    for row in range(37):
        one = {name: [values[row]] for name, values in others.items()}
        assert sample_batch(logits[row : row + 1], [params[row]], **one) == [together[row]]
        token = draw(
            logits[row],
            params[row],
            seed=seeds[row],
            index=indexes[row],
            mask=masks[row],
            drawn=drawn[row],
        )
        assert token == together[row].token
        if params[row].logprobs:
            top = params[row].top_logprobs
            assert token_logprobs(logits[row : row + 1], [token], top) == [together[row]]
        else:
            assert (together[row].logprob, together[row].top) == (None, ())


def test_draws_repeat_and_depend_on_seed_and_index():
    logits = torch.zeros(1000)
    numbers = [draw(logits, SamplingParams(), seed=5, index=i) for i in range(20)]
    assert [draw(logits, SamplingParams(), seed=5, index=i) for i in range(20)] == numbers
    assert [draw(logits, SamplingParams(), seed=6, index=i) for i in range(20)] != numbers
    assert len(set(numbers)) > 10


def test_global_generator_does_not_matter():
    """Control of the law above: nothing is drawn from the generator that others share."""
    torch.manual_seed(1)
    first = draw(torch.zeros(1000), SamplingParams(), seed=5, index=0)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    assert draw(torch.zeros(1000), SamplingParams(), seed=5, index=0) == first
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_empty_batch_and_one_token_vocabulary():
    assert sample_batch(torch.empty(0, 5), [], seeds=[], indexes=[]) == []
    assert token_logprobs(torch.empty(0, 5), []) == []
    one = SamplingParams(logprobs=True, top_logprobs=20, top_p=0.5, top_k=7)
    (result,) = sample_batch(torch.zeros(1, 1), [one], seeds=[0], indexes=[0])
    assert (result.token, result.logprob, result.top) == (0, 0.0, ((0, 0.0),))


@given(x=_LOGITS, data=st.data())
def test_logprobs_equal_the_definition(x, data):
    token = data.draw(st.integers(0, len(x) - 1))
    top = data.draw(st.integers(0, len(x) + 1))
    (result,) = token_logprobs(_row(*x)[None], [token], top)
    total = math.log(math.fsum(math.exp(value) for value in x))
    assert result.logprob == pytest.approx(x[token] - total, rel=2e-7, abs=1e-15)
    ranked = sorted(range(len(x)), key=lambda i: (-x[i], i))[:top]
    assert [i for i, _ in result.top] == ranked
    assert [p for _, p in result.top] == pytest.approx(
        [x[i] - total for i in ranked], rel=2e-7, abs=1e-15
    )
    assert all(p == float(torch.tensor(p, dtype=torch.float32)) for _, p in result.top)


def test_logprobs_are_the_models_own():
    """Temperature, bias and mask change what is drawn and not what is told about it."""
    logits = torch.randn(1, 9)
    params = SamplingParams(
        temperature=0.1, top_k=1, logit_bias={4: 50.0}, logprobs=True, top_logprobs=9
    )
    mask = torch.arange(9) == 4
    (got,) = sample_batch(logits, [params], seeds=[0], indexes=[0], masks=[mask])
    want = logits.double().log_softmax(-1)[0]
    assert got.token == 4
    assert got.logprob == pytest.approx(float(want[4]), rel=1e-6)
    assert dict(got.top) == pytest.approx({i: float(want[i]) for i in range(9)}, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused_by_row(bad):
    logits = torch.zeros(4, 6)
    logits[1, 5] = logits[3, 0] = bad
    args = {"seeds": [0] * 4, "indexes": [0] * 4}
    for params in (GREEDY, SamplingParams()):
        with pytest.raises(LogitsError, match=r"rows \[1, 3\] are not finite") as caught:
            sample_batch(logits, [params] * 4, **args)
        assert caught.value.rows == (1, 3)
        with pytest.raises(LogitsError):
            draw(logits[3], params, seed=0, index=0)
    with pytest.raises(LogitsError):
        token_logprobs(logits, [0] * 4)
    args = {"seeds": [0] * 2, "indexes": [0] * 2}
    assert len(sample_batch(logits[[0, 2]], [GREEDY] * 2, **args)) == 2


def test_finite_logits_whose_sum_overflows_are_taken():
    logits = torch.full((1, 6), 3e38)
    assert sample_batch(logits, [GREEDY], seeds=[0], indexes=[0])[0].token == 0
    assert _support(logits[0], SamplingParams(top_k=2)) == {0, 1}


def test_rows_with_no_id_left_are_named_together():
    nothing, anything = torch.zeros(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool)
    args = {"seeds": [0] * 4, "indexes": [0] * 4}
    for params in (GREEDY, SamplingParams()):
        with pytest.raises(RequestError, match="constraint: got no id left") as caught:
            sample_batch(
                torch.zeros(4, 6), [params] * 4, masks=[nothing, anything, None, nothing], **args
            )
        assert caught.value.rows == (0, 3)


def test_arguments_that_do_not_fit_are_refused():
    two = {"seeds": [0, 0], "indexes": [0, 0]}
    with pytest.raises(ValueError, match="batch: got lengths"):
        sample_batch(torch.zeros(3, 6), [GREEDY] * 2, **two)
    with pytest.raises(ValueError, match=r"mask: got \(5,\)"):
        draw(torch.zeros(6), GREEDY, seed=0, index=0, mask=torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask: got \(6,\) torch.float32"):
        draw(torch.zeros(6), GREEDY, seed=0, index=0, mask=torch.ones(6))
    with pytest.raises(RequestError, match="logit_bias: got id 6"):
        draw(torch.zeros(6), SamplingParams(logit_bias={6: 1.0}), seed=0, index=0)
    with pytest.raises(ValueError, match="tokens: got 1, expected 2"):
        token_logprobs(torch.zeros(2, 6), [0])
    for token in (-1, 6):
        with pytest.raises(ValueError, match=f"tokens: got id {token}"):
            token_logprobs(torch.zeros(1, 6), [token])
