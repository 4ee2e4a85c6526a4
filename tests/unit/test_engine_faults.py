"""What goes wrong in one request stays in it, and leaves nothing behind that others would meet."""

from dataclasses import replace

import pytest
import torch

from finwhale.config import ConfigError, preset
from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine, QueueFullError
from finwhale.engine.request import RequestError, SamplingParams
from finwhale.model import Numerics
from tests.models import build, token_ids
from tests.uncached_engine import drain, expected

IDS = [int(i) for i in token_ids(1, 400, seed=3, vocab=500)[0]]
GREEDY = SamplingParams(max_new_tokens=4, temperature=0, logprobs=True)


@pytest.fixture(scope="module")
def model():
    return build(preset("unit"), Numerics())


def engine_of(model, **options) -> Engine:
    options = {"num_blocks": 96, "block_size": 8, "max_sequences": 4, **options}
    return Engine(model, EngineConfig(kernels="numba", poison=True, **options))


def results(engine, request_id):
    """Serve to the end; return the tokens and log-probabilities of one request and all errors."""
    served = drain(engine)
    mine = served[(request_id, 0)]
    return mine, {name: one.error for name, one in served.items() if one.error}


class Grammar:
    """Allows everything; raises where it is told to."""

    def __init__(self, vocab: int, fails: str = ""):
        self.vocab, self.fails, self.seen = vocab, fails, 0

    def mask(self):
        if self.fails == "mask" and self.seen:
            raise ValueError("the grammar is broken")
        return torch.ones(self.vocab - (self.fails == "width" and self.seen > 0), dtype=torch.bool)

    def advance(self, token: int) -> None:
        self.seen += 1
        if self.fails == "advance":
            raise ValueError("not allowed here")

    @property
    def is_finished(self) -> bool:
        return False

    def copy(self):
        return Grammar(self.vocab, self.fails)


@pytest.mark.parametrize("fails", ["mask", "advance", "width"])
@pytest.mark.parametrize("order", [0, 1])
def test_a_grammar_that_raises_ends_its_own_request_alone(model, fails, order):
    engine = engine_of(model)
    bad = replace(GREEDY, constraint=Grammar(512, fails))
    requests = [("bad", IDS[:20], bad), ("good", IDS[50:73], GREEDY)]
    for name, prompt, params in requests[:: 1 - 2 * order]:
        engine.add(prompt, params, request_id=name)
    good, errors = results(engine, "good")
    assert list(errors) == [("bad", 0)]
    assert good.reason == "length"
    tokens = [r.token for r in good.results]
    want = expected(model, IDS[50:73], tokens, GREEDY)
    assert [r.logprob for r in good.results] == [r.logprob for r in want]
    assert not engine.has_work
    engine.index.clear()
    assert engine.allocator.num_free == 96


def test_a_grammar_of_another_vocabulary_is_refused_before_it_is_queued(model):
    engine = engine_of(model)
    with pytest.raises(RequestError, match=r"constraint: got a mask of \(500,\)"):
        engine.add(IDS[:5], replace(GREEDY, constraint=Grammar(500)))
    assert not engine.has_work


def test_log_probabilities_that_raise_leave_the_neighbours_right(model, monkeypatch):
    engine = engine_of(model, max_batch_tokens=24)
    engine.add(IDS[:60], replace(GREEDY, prompt_logprobs=0), request_id="bad")
    engine.add(IDS[100:150], GREEDY, request_id="good")

    def broken(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr("finwhale.engine.engine.token_logprobs", broken)
    good, errors = results(engine, "good")
    assert list(errors) == [("bad", 0)]
    want = expected(model, IDS[100:150], [r.token for r in good.results], GREEDY)
    assert [r.logprob for r in good.results] == [r.logprob for r in want]


def test_a_pass_that_raises_can_be_tried_again(model, monkeypatch):
    engine = engine_of(model, max_batch_tokens=24)
    for n in range(3):
        engine.add(IDS[60 * n : 60 * n + 50 + n], GREEDY, request_id=str(n))
    run = engine.runner.run

    def sometimes(works, calls=[]):  # noqa: B006
        calls.append(1)
        if len(calls) % 3 == 0:
            raise MemoryError("for once")
        return run(works)

    monkeypatch.setattr(engine.runner, "run", sometimes)
    found = {}
    while engine.has_work:
        try:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.new)
        except MemoryError:
            continue
    for n in range(3):
        prompt = IDS[60 * n : 60 * n + 50 + n]
        want = expected(model, prompt, [r.token for r in found[str(n)]], GREEDY)
        assert [r.logprob for r in found[str(n)]] == [r.logprob for r in want]


def test_a_restored_start_that_never_ran_saves_no_older_windows(model):
    engine = engine_of(model)
    engine.generate([IDS[:300]], GREEDY)
    held = set(engine.scheduler.windows._kept)
    engine.add([*IDS[:299], 7, 8], GREEDY, request_id="x")
    # Memory is taken between the plan of a step and its pass, as an interrupt would do it.
    ((_, work),) = engine.scheduler.schedule()
    assert work.span.start == 296
    assert engine.cancel("x")
    engine.step()
    assert set(engine.scheduler.windows._kept) == held


def test_nan_logits_name_the_head_and_the_position(model):
    own = build(preset("unit"), Numerics())
    with torch.no_grad():
        own.head.weight[77] = torch.nan
    engine = engine_of(own)
    engine.add(IDS[:9], GREEDY, request_id="a")
    served = drain(engine)
    assert "head" in served[("a", 0)].error
    assert "position 8" in served[("a", 0)].error


@pytest.mark.parametrize("salt", [None, 3, b"x"])
def test_a_salt_that_is_no_string_is_refused(model, salt):
    engine = engine_of(model)
    with pytest.raises(RequestError, match="salt"):
        engine.add(IDS[:9], GREEDY, salt=salt)
    assert not engine.has_work


@pytest.mark.parametrize("prompt", [[1.5], [True, 2], ["7"], [None]])
def test_a_prompt_of_other_things_than_ids_is_refused(model, prompt):
    with pytest.raises(RequestError, match="prompt"):
        engine_of(model).add(prompt, GREEDY)


def test_a_prompt_that_fills_the_pool_is_refused_where_it_could_never_start(model):
    engine = engine_of(model, num_blocks=8)
    params = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
    with pytest.raises(RequestError, match="num_blocks"):
        engine.add(IDS[:65], params)
    with pytest.raises(RequestError, match="at most 64 tokens in all"):
        engine.add(IDS[:64], replace(params, max_new_tokens=1))
    engine.add(IDS[:64], params, request_id="a")
    engine.add(IDS[:5], GREEDY, request_id="b")
    served = drain(engine)
    assert {name for name, one in served.items() if one.reason == "length"} == {
        ("a", 0),
        ("b", 0),
    }


def test_an_engine_made_in_inference_mode_serves_hits(model):
    own = build(preset("unit"), Numerics())
    with torch.inference_mode():
        engine = engine_of(own)
    first = engine.generate([IDS[:60]], GREEDY)
    again = engine.generate([IDS[:60]], GREEDY)
    assert engine.scheduler.stats.restored_windows == 1
    assert first == again


def test_changed_weights_forget_what_was_cached():
    model = build(preset("unit"), Numerics())
    engine = engine_of(model)
    engine.generate([IDS[:60]], GREEDY)
    before = engine.namespace
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    engine.add(IDS[:5], GREEDY, request_id="x")
    with pytest.raises(RuntimeError, match="served"):
        engine.weights_changed()
    engine.cancel("x")
    engine.weights_changed()
    assert engine.namespace != before
    got = engine.generate([IDS[:60]], GREEDY)
    assert got == engine_of(model).generate([IDS[:60]], GREEDY)
    assert engine.scheduler.stats.cached_tokens == 0


def test_a_cleared_index_under_running_requests_changes_nothing(model):
    engine = engine_of(model)
    engine.add(IDS[:60], replace(GREEDY, max_new_tokens=12), request_id="a")
    for _ in range(4):
        engine.step()
    engine.index.clear()
    served = drain(engine)
    assert served[("a", 0)].reason == "length"
    engine.index.clear()
    assert engine.allocator.num_free == 96


def test_generate_leaves_nothing_behind_when_a_prompt_is_refused(model):
    engine = engine_of(model, max_waiting=2)
    with pytest.raises(RequestError):
        engine.generate([IDS[:9], []], GREEDY)
    with pytest.raises(QueueFullError):
        engine.generate([IDS[:9]], replace(GREEDY, n=3))
    engine.step()
    assert not engine.has_work
    # More prompts than may wait are fed as the queue drains; parameters may come one by one.
    got = engine.generate([IDS[n : n + 9] for n in range(7)], (GREEDY for _ in range(7)))
    assert [len(choices[0]) for choices in got] == [4] * 7


def test_names_made_by_the_engine_do_not_meet_the_callers(model):
    engine = engine_of(model)
    engine.add(IDS[:5], GREEDY, request_id="request-1")
    assert engine.add(IDS[:6], GREEDY) != engine.add(IDS[:7], GREEDY) != "request-1"


def test_bounded_prefill_does_not_promise_equal_bits(model):
    assert "no, a bounded" in engine_of(model, prefill="bounded").memory_plan()[-1]
    assert engine_of(model).memory_plan()[-1].endswith("batch invariant: yes")


@pytest.mark.parametrize(
    "numerics",
    [Numerics.release(), Numerics(dtype=torch.bfloat16), Numerics(weight_dtype=torch.bfloat16)],
    ids=["release", "bf16", "bf16 weights"],
)
def test_a_model_of_other_numerics_is_refused(numerics):
    with pytest.raises(ConfigError, match="numerics"):
        Engine(build(preset("unit"), numerics))
