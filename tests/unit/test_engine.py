"""An engine's answers equal one whole pass from nothing, bit for bit, whatever else it does.

The reference is `tests/uncached_engine.py`: no pools, no blocks, no chunks, no scheduler. Cache
rounding is on and rows are stored as FP4, so a wrong row, a wrong bit or a wrong order shows.
Below it: ends, refusals and errors of single requests, which cost nobody else anything.
"""

from dataclasses import replace

import pytest
import torch

import finwhale.engine.engine
from finwhale.cache.sequence_state import fresh_state
from finwhale.config import ConfigError, preset
from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine, QueueFullError
from finwhale.engine.prefill import Prefill, exact_decoder_rows, exact_encoder_rows
from finwhale.engine.request import RequestError, SamplingParams
from finwhale.engine.sampler import choice_seed
from finwhale.model import Numerics
from finwhale.ops.linear import grouped_linear, linear
from tests.models import build, token_ids, unit_model
from tests.uncached_engine import drain, expected, uncached

MODEL = unit_model(Numerics())
W = MODEL.config.text_config.sliding_window
IDS = token_ids(1, 400)[0].tolist()
OTHER = token_ids(1, 400, seed=1)[0].tolist()
GREEDY = SamplingParams(max_new_tokens=3, temperature=0, logprobs=True)
DRAWN = SamplingParams(max_new_tokens=4, temperature=1.3, seed=11, logprobs=True, top_logprobs=3)
KERNELS = ("numba", "torch")


def engine_of(model=MODEL, **settings) -> Engine:
    plain = {"block_size": 8, "num_blocks": 72, "max_sequences": 9, "max_batch_tokens": 48}
    return Engine(model, EngineConfig(**{"kernels": "numba", "poison": True, **plain, **settings}))


def assert_uncached(served, prompt, params, *, seed=11, model=MODEL, kernels="numba"):
    """Tokens, log-probabilities and alternatives have the bits of the whole pass."""
    assert served.reason == "length"
    assert len(served.results) == params.max_new_tokens
    want = expected(model, prompt, served.tokens, params, seed=seed, kernels=kernels)
    assert served.results == want


def assert_all_uncached(engine, prompts, params=GREEDY, after_step=None, **reference):
    names = [engine.add(prompt, params) for prompt in prompts]
    served = drain(engine, after_step)
    for name, prompt in zip(names, prompts, strict=True):
        assert_uncached(served[name, 0], prompt, params, **reference)
    return [served[name, 0] for name in names]


@pytest.mark.parametrize("kernels", KERNELS)
def test_nine_requests_of_many_lengths_equal_the_uncached_pass(kernels):
    lengths = 1, 2, 5, W - 1, W, W + 1, 16, 33, 70
    prompts = [OTHER[n : n + length] for n, length in enumerate(lengths)]
    together = assert_all_uncached(engine_of(kernels=kernels), prompts, kernels=kernels)
    # Alone, in an engine of another shape.
    for n in (0, 5):
        engine = engine_of(kernels=kernels, block_size=16, max_sequences=1, prefix_cache=False)
        alone = assert_all_uncached(engine, [prompts[n]], kernels=kernels)[0]
        assert alone.results == together[n].results


@pytest.mark.parametrize(
    "text",
    [{"sliding_window": 5, "index_topk": 3}, {"sliding_window": 1, "candidate_topk_blocks": 1}],
    ids=["W5-K3", "W1-K8"],
)
def test_other_windows_and_selections_equal_the_uncached_pass(text):
    model = unit_model(Numerics(), **text)
    engine = engine_of(model)
    assert_all_uncached(engine, [IDS[:1], IDS[1:40], OTHER[:9]], model=model)
    assert_all_uncached(engine, [IDS[1:36], IDS[1:40]], model=model)
    assert engine.scheduler.stats.cached_tokens


@pytest.mark.parametrize(
    ("max_sequences", "budget"), [(1, 2), (3, 4), (2, 9), (9, 48), (9, 400)], ids=str
)
def test_any_step_budget_changes_no_bit(max_sequences, budget):
    engine = engine_of(max_sequences=max_sequences, max_batch_tokens=budget)
    prompts = [IDS[:1], IDS[1:12], OTHER[:21]]
    assert_all_uncached(engine, prompts, replace(DRAWN, max_new_tokens=2))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("budget", range(10, 90, 7))
def test_long_prompts_in_any_step_budget_change_no_bit(budget, kernels):
    engine = engine_of(kernels=kernels, max_batch_tokens=budget)
    assert_all_uncached(engine, [IDS[:n] for n in (1, 31, 64, 75, 130)], kernels=kernels)


def prefix_prompts(block: int) -> list[list[int]]:
    """Prompts that share n tokens with IDS and go on differently."""
    shared = (1, W - 1, W, W + 1, block - 1, block, block + 1, 2 * block, 2 * block + 3, 39)
    return [IDS[:n] + OTHER[:3] for n in dict.fromkeys(shared)]


@pytest.mark.parametrize(
    ("block", "snapshot_bytes", "kernels"),
    [
        (8, 0, "numba"),
        (8, 1 << 20, "numba"),
        (12, 0, "numba"),
        (12, 1 << 20, "numba"),
        (8, 0, "torch"),
    ],
    ids=str,
)
def test_hits_of_every_length_equal_the_uncached_pass(block, snapshot_bytes, kernels):
    engine = engine_of(kernels=kernels, block_size=block, snapshot_bytes=snapshot_bytes)
    assert_all_uncached(engine, [IDS[:41]], kernels=kernels)
    # The whole prompt again, and with everything in a hit but its last token.
    again = [IDS[:41], IDS[: 40 - 40 % block], IDS[: 41 - 40 % block]]
    params = replace(GREEDY, max_new_tokens=2)
    before = engine.scheduler.stats.cached_tokens
    prompts = again + prefix_prompts(block)
    assert_all_uncached(engine, prompts, params, kernels=kernels)
    want = sum((len(prompt) - 1) // block * block for prompt in again)
    want += sum((len(prompt) - 3) // block * block for prompt in prefix_prompts(block))
    assert engine.scheduler.stats.cached_tokens - before == want
    assert bool(engine.scheduler.stats.restored_windows) == bool(snapshot_bytes)


@pytest.mark.parametrize("shared", [296, 299], ids=str)
def test_exact_replay_that_starts_inside_the_prefix_equals_the_uncached_pass(shared):
    engine = engine_of(snapshot_bytes=0, max_batch_tokens=120)
    assert_all_uncached(engine, [IDS[:300]], replace(GREEDY, max_new_tokens=1))
    before = pool_bytes(engine)
    assert_all_uncached(engine, [IDS[:shared] + OTHER[:5]])
    stats = engine.scheduler.stats
    assert stats.cached_tokens == 296
    config = MODEL.config.text_config
    most = exact_decoder_rows(config) + exact_encoder_rows(config) + engine.config.block_size
    assert 0 < stats.replayed_tokens <= most < stats.cached_tokens
    # A replay makes windows; the rows that others share keep every byte.
    after = pool_bytes(engine)
    assert before
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_replay_that_writes_its_entries_is_noticed(monkeypatch):
    # Negative control: with the floor off, rows behind a cut window write over what others share.
    # Rows that are trimmed layer by layer are exact where they are left and would write the same.
    engine = engine_of(snapshot_bytes=0, max_batch_tokens=120, trim_rows=False)
    assert_all_uncached(engine, [IDS[:300]], replace(GREEDY, max_new_tokens=1))
    before, real = pool_bytes(engine), engine.runner.run
    monkeypatch.setattr(
        engine.runner,
        "run",
        lambda works: real([replace(w, span=replace(w.span, stored=0)) for w in works]),
    )
    engine.add(IDS[:296] + OTHER[:5], GREEDY)
    drain(engine)
    after = pool_bytes(engine)
    changed = {key[0] for key, value in before.items() if not torch.equal(after[key], value)}
    assert 0 < len(changed) <= 8


def pool_bytes(engine) -> dict:
    """Bytes of every block that the index holds, by block and stream."""
    pools, found = engine.pools, {}
    for block in range(engine.config.num_blocks):
        if engine.allocator.num_holders(block):
            for spec in pools.layout.owners:
                rows = pools.block_rows(spec, block)
                found[block, spec.layer_id, "main"] = pools.main[spec.layer_id][rows].clone()
                found[block, spec.layer_id, "key"] = pools.index_k[spec.layer_id][rows].clone()
    return found


def test_windows_at_the_last_block_end_of_a_long_prompt_are_exact():
    engine = engine_of(max_batch_tokens=120)
    assert_all_uncached(engine, [IDS[:300]], replace(GREEDY, max_new_tokens=1))
    assert_all_uncached(engine, [IDS[:299] + OTHER[:40]])
    stats = engine.scheduler.stats
    assert (stats.restored_windows, stats.replayed_tokens, stats.cached_tokens) == (1, 0, 296)


@pytest.mark.parametrize(
    "settings",
    [{}, {"snapshot_bytes": 0}, {"prefix_cache": False}],
    ids=["snapshots", "replay", "no-cache"],
)
def test_preemption_after_every_step_changes_no_bit(settings):
    engine = engine_of(**settings)
    prompts = [IDS[:5], IDS[:20], OTHER[:9]]

    def preempt_all(step):
        for n in range(len(prompts)):
            engine.preempt(f"request-{n}")

    assert_all_uncached(engine, prompts, DRAWN, preempt_all)
    assert engine.scheduler.stats.preemptions >= 3 * len(prompts)


@pytest.mark.parametrize("snapshot_bytes", [0, 1 << 20], ids=["replay", "snapshots"])
def test_preemption_in_the_middle_of_a_prompt_changes_no_bit(snapshot_bytes):
    # After every step of 10 rows would leave no replay the time to end; three times is fine.
    engine = engine_of(max_batch_tokens=10, snapshot_bytes=snapshot_bytes)
    harm = (1, 4, 9)
    assert_all_uncached(
        engine, [IDS[:60]], GREEDY, lambda step: step in harm and engine.preempt("request-0")
    )
    assert engine.scheduler.stats.preemptions == len(harm)
    assert engine.scheduler.stats.cached_tokens


def test_too_few_blocks_for_all_change_no_bit():
    engine = engine_of(num_blocks=7, max_sequences=4)
    prompts = [IDS[:20], IDS[200:230], OTHER[:18], OTHER[:1], IDS[:28]]
    assert_all_uncached(engine, prompts, replace(GREEDY, max_new_tokens=9))
    assert engine.scheduler.stats.preemptions
    assert engine.index.stats.evictions


@pytest.mark.parametrize("back", [1, 2, 3])
def test_rollback_draws_the_same_tokens_again(back):
    engine = engine_of()
    name = engine.add(IDS[:21], DRAWN)
    first = [result for _ in range(3) for output in engine.step() for result in output.new]
    assert len(first) == 3
    engine.rollback(name, back)
    engine.allocator.check()
    served = drain(engine)[name, 0]
    served.results = first[: 3 - back] + served.results
    assert_uncached(served, IDS[:21], DRAWN)


def test_choices_equal_requests_with_the_choice_seeds():
    engine = engine_of()
    name = engine.add(IDS[:19], replace(DRAWN, n=3))
    served = drain(engine)
    for index in range(3):
        assert_uncached(served[name, index], IDS[:19], DRAWN, seed=choice_seed(11, index))
    assert len({tuple(served[name, index].tokens) for index in range(3)}) > 1
    # The later choices find the prompt that the first has read.
    assert [served[name, index].num_cached_tokens for index in range(3)] == [0, 16, 16]


def test_later_choices_wait_in_order_of_arrival():
    engine = engine_of(max_sequences=1)
    engine.add(IDS[:9], replace(GREEDY, n=2), request_id="a")
    engine.add(IDS[:5], GREEDY, request_id="b")
    engine.add(IDS[:7], GREEDY, request_id="c")
    engine.step()
    assert [job.request_id for job in engine.scheduler.waiting] == ["a", "b", "c"]
    drain(engine)


def test_bounded_prefill_equals_the_bounded_prefill_of_one_sequence():
    model = unit_model()
    prompt = IDS[:45]
    engine = engine_of(model, prefill="bounded", storage="fp32", max_batch_tokens=11)
    name = engine.add(prompt, replace(GREEDY, max_new_tokens=1, top_logprobs=20))
    (result,) = drain(engine)[name, 0].results
    prefill = Prefill(model, fresh_state(model), mode="bounded")
    prefill.feed(torch.tensor([prompt]))
    with torch.no_grad():
        want = model.logits(prefill.finish())[0].log_softmax(-1)
        exact = model(torch.tensor([prompt]))[0, -1].log_softmax(-1)
    got = torch.tensor([logprob for _, logprob in result.top])
    ids = [token for token, _ in result.top]
    torch.testing.assert_close(got, want[ids], rtol=0, atol=5e-5)
    # It is an approximation, and the comparison sees it.
    assert (got - exact[ids]).abs().max() > 1e-3


def test_full_prefill_equals_exact_prefill():
    for prefill in ("full", "exact"):
        engine = engine_of(prefill=prefill, max_batch_tokens=30)
        assert_all_uncached(engine, [IDS[:70], IDS[:70], IDS[:9]], DRAWN)
        assert_all_uncached(engine, [IDS[:70]], DRAWN)
        assert bool(engine.scheduler.stats.cached_tokens) == (prefill == "exact")


def counted(monkeypatch) -> dict[str, int]:
    """Count products: those of single routed experts, and all others (a grouped one is one)."""
    counts = {"routed": 0, "other": 0}
    real = finwhale.engine.engine.engine_ops
    experts = {p.data_ptr() for name, p in MODEL.named_parameters() if ".ffn.experts." in name}

    def counting(function):
        def product(x, weight, *rest):
            counts["routed" if weight.data_ptr() in experts else "other"] += 1
            return function(x, weight, *rest)

        return product

    def wrapped(*args, **kwargs):
        ops, reads = real(*args, **kwargs)
        fields = ("linear", "grouped_linear", "grouped_experts")
        own = {name: counting(getattr(ops, name)) for name in fields if getattr(ops, name)}
        return replace(ops, **own), reads

    monkeypatch.setattr(finwhale.engine.engine, "engine_ops", wrapped)
    return counts


@pytest.mark.parametrize("kernels", KERNELS)
def test_products_of_a_step_do_not_grow_with_the_requests(monkeypatch, kernels):
    counts = counted(monkeypatch)
    engine = engine_of(kernels=kernels, max_batch_tokens=100)
    config, seen = MODEL.config.text_config, []
    for number in (2, 8):
        for n in range(number):
            engine.add(OTHER[n : n + 9], replace(GREEDY, max_new_tokens=2))
        engine.step()
        counts.update(routed=0, other=0)
        assert len(engine.step()) == number
        seen.append(dict(counts))
        assert not engine.has_work
        assert counts["routed"] <= 3 * config.num_hidden_layers * config.n_routed_experts
    assert seen[0]["other"] == seen[1]["other"] > 8 * config.num_hidden_layers
    assert bool(seen[1]["routed"]) == (kernels == "torch")


def test_rows_that_depend_on_their_company_are_noticed(monkeypatch):
    # Negative control: products of one row take another path than those of nine.
    real = finwhale.engine.engine.engine_ops

    def company(x, weight):
        """One bit more when there are several rows."""
        y = linear(x, weight)
        return y if x.numel() == x.shape[-1] else torch.nextafter(y, torch.full_like(y, torch.inf))

    def broken(*args, **kwargs):
        ops, reads = real(*args, **kwargs)
        return replace(ops, linear=company, grouped_linear=grouped_linear), reads

    monkeypatch.setattr(finwhale.engine.engine, "engine_ops", broken)
    engine = engine_of()
    assert engine.broken
    prompts = [OTHER[n : n + 9] for n in range(3)]
    names = [engine.add(prompt, GREEDY) for prompt in prompts]
    together = drain(engine)[names[0], 0]
    engine.add(prompts[0], GREEDY, request_id="alone", salt="nothing cached")
    assert drain(engine)["alone", 0].results != together.results


@pytest.mark.parametrize("harm", ["one position off", "not restored"])
def test_wrong_windows_are_noticed(monkeypatch, harm):
    engine = engine_of()
    assert_all_uncached(engine, [IDS[:41]])
    real = engine.pools.restore_windows
    calls = []

    def restore(slot, stop, saved):
        calls.append(stop)
        if harm == "one position off":
            real(slot, stop - 1, saved)

    monkeypatch.setattr(engine.pools, "restore_windows", restore)
    engine.add(IDS[:41], GREEDY, request_id="b")
    served = drain(engine)["b", 0]
    assert calls == [40]
    want = expected(MODEL, IDS[:41], served.tokens, GREEDY) if served.tokens else None
    # A poisoned row reads as NaN and ends the request; a shifted one gives other numbers.
    assert served.reason == "error" or served.results != want


def test_uncached_reference_agrees_with_the_plain_model():
    # The reference itself: other order of arithmetic than the plain pass, same function.
    model = unit_model()
    with torch.no_grad():
        want = model(torch.tensor([IDS[:60]]))[0]
    torch.testing.assert_close(uncached(model, IDS[:60]), want, rtol=0, atol=5e-5)


# Ends, refusals and errors.


def test_cancelled_request_frees_all_it_held_at_once():
    engine = engine_of(prefix_cache=False, max_sequences=2, max_batch_tokens=20)
    engine.add(IDS[:50], replace(DRAWN, n=3), request_id="a")
    engine.add(IDS[:9], GREEDY, request_id="b")
    engine.step()
    assert engine.allocator.num_free < engine.config.num_blocks
    assert engine.cancel("a")
    assert engine.cancel("b")
    assert not engine.cancel("a")
    assert engine.allocator.num_free == engine.config.num_blocks
    assert sorted(engine.scheduler.free_slots) == [0, 1]
    assert not engine.scheduler.waiting
    served = drain(engine)
    assert {name: own.reason for name, own in served.items()} == dict.fromkeys(
        [("a", 0), ("a", 1), ("a", 2), ("b", 0)], "cancelled"
    )
    assert_all_uncached(engine, [IDS[:50]])


def test_cancelling_one_leaves_the_others_their_bits():
    engine = engine_of()
    for name, prompt in (("a", IDS[:20]), ("b", OTHER[:13]), ("c", IDS[:7])):
        engine.add(prompt, DRAWN, request_id=name)
    served = drain(engine, lambda step: step == 2 and engine.cancel("b"))
    assert served["b", 0].reason == "cancelled"
    assert_uncached(served["a", 0], IDS[:20], DRAWN)
    assert_uncached(served["c", 0], IDS[:7], DRAWN)


def test_stop_id_ends_a_choice_and_is_its_last_token():
    engine = engine_of()
    longer = replace(GREEDY, max_new_tokens=6)
    tokens = assert_all_uncached(engine, [IDS[:12]], longer)[0].tokens
    stop = tokens[3]
    engine.add(IDS[:12], replace(longer, stop_ids=(stop, 511)), request_id="s")
    served = drain(engine)["s", 0]
    assert served.reason == "stop"
    assert served.tokens == tokens[: tokens.index(stop) + 1]


def test_logit_bias_forbids_and_forces():
    engine = engine_of()
    row = uncached(MODEL, IDS[:12])[-1].clone()
    best = int(row.argmax())
    row[best] = -torch.inf
    one = replace(GREEDY, max_new_tokens=1)
    engine.add(IDS[:12], replace(one, logit_bias={best: -torch.inf}), request_id="forbid")
    engine.add(IDS[:12], replace(one, logit_bias={77: 1e9}), request_id="force")
    served = drain(engine)
    assert served["forbid", 0].tokens == [int(row.argmax())]
    assert served["force", 0].tokens == [77]
    # The log-probability is the model's own.
    want = uncached(MODEL, IDS[:12])[-1].double().log_softmax(-1)[77]
    assert served["force", 0].results[0].logprob == pytest.approx(float(want), abs=1e-6)


def test_seed_decides_the_draws_and_nothing_else_does():
    engine = engine_of()
    drawn = [assert_all_uncached(engine, [IDS[:12]], DRAWN)[0].tokens]
    drawn += [served.tokens for served in assert_all_uncached(engine, [IDS[:12]] * 2, DRAWN)]
    assert drawn[0] == drawn[1] == drawn[2]
    other = assert_all_uncached(engine, [IDS[:12]], replace(DRAWN, seed=12), seed=12)[0]
    assert other.tokens != drawn[0]


def test_logprobs_are_the_log_softmax_of_the_whole_pass():
    params = replace(GREEDY, top_logprobs=4)
    (served,) = assert_all_uncached(engine_of(), [IDS[:30]], params)
    logits = uncached(MODEL, IDS[:30] + served.tokens[:-1])[29:]
    want = logits.double().log_softmax(-1)
    for row, result in zip(want, served.results, strict=True):
        assert result.logprob == pytest.approx(float(row[result.token]), abs=1e-6)
        best = row.topk(4)
        assert [token for token, _ in result.top] == best.indices.tolist()
        assert [x for _, x in result.top] == pytest.approx(best.values.tolist(), abs=1e-6)


@pytest.mark.parametrize("new", [0, 2])
def test_prompt_logprobs_are_those_of_the_whole_pass_and_use_no_hit(new):
    engine = engine_of(max_batch_tokens=17)
    prompt = IDS[:40]
    assert_all_uncached(engine, [prompt])
    cached = engine.scheduler.stats.cached_tokens
    params = replace(GREEDY, max_new_tokens=new, prompt_logprobs=2)
    engine.add(prompt, params, request_id="p")
    served = drain(engine, lambda step: step == 2 and engine.preempt("p"))["p", 0]
    want = uncached(MODEL, prompt).double().log_softmax(-1)
    assert [result.token for result in served.prompt_logprobs] == prompt
    assert served.prompt_logprobs[0].logprob is None
    for n, result in enumerate(served.prompt_logprobs[1:]):
        assert result.logprob == pytest.approx(float(want[n, prompt[n + 1]]), abs=1e-6)
        assert [token for token, _ in result.top] == want[n].topk(2).indices.tolist()
    assert engine.scheduler.stats.cached_tokens == cached
    assert served.num_cached_tokens == 0
    if new:
        assert_uncached(served, prompt, params)
    assert served.reason == "length"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt: got no tokens"),
        ([1, 512], {}, "ids 1 to 512"),
        ([-1, 3], {}, "ids -1 to 3"),
        ([1] * 575, {"max_new_tokens": 2}, "at most 576 tokens in all"),
        ([1] * 4095, {"max_new_tokens": 2}, "max_position_embeddings"),
        ([1], {"stop_ids": (512,)}, "stop_ids"),
        ([1], {"logit_bias": {600: 1.0}}, "logit_bias"),
        ([1], {"request_id": "there"}, "request_id"),
        ([1], {"n": 3}, "engine.max_waiting"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_request_changes_nothing(prompt, options, message):
    engine = engine_of(max_waiting=3)
    engine.add([1, 2], GREEDY, request_id="there")
    name = options.pop("request_id", None)
    error = QueueFullError if "max_waiting" in message else RequestError
    with pytest.raises(error, match=message):
        engine.add(prompt, replace(GREEDY, **options), request_id=name)
    assert engine.allocator.num_free == engine.config.num_blocks
    assert [sequence.request_id for sequence in engine.scheduler.waiting] == ["there"]
    served = drain(engine)
    assert set(served) == {("there", 0)}
    assert_uncached(served["there", 0], [1, 2], GREEDY)


def test_queue_takes_requests_again_once_some_have_started():
    engine = engine_of(max_waiting=2, max_sequences=2)
    for name in "ab":
        engine.add([1, 2, 3], GREEDY, request_id=name)
    with pytest.raises(QueueFullError):
        engine.add([1, 2, 3], GREEDY, request_id="c")
    engine.step()
    engine.add([1, 2, 3], GREEDY, request_id="c")
    assert len(drain(engine)) == 3


def test_rollback_refuses_more_than_was_drawn():
    engine = engine_of()
    engine.add(IDS[:5], GREEDY, request_id="a")
    engine.step()
    for name, count in (("a", 2), ("a", -1), ("b", 1)):
        with pytest.raises(RequestError, match="num_tokens"):
            engine.rollback(name, count)
    engine.rollback("a", 0)
    assert engine.scheduler.stats.preemptions == 0
    assert drain(engine)["a", 0].reason == "length"


def test_tenants_share_no_prefix():
    engine = engine_of()
    for tenant in ("a", "b", ""):
        engine.add(IDS[:41], GREEDY, request_id=tenant, salt=tenant)
        served = drain(engine)[tenant, 0]
        assert served.num_cached_tokens == 0
        assert_uncached(served, IDS[:41], GREEDY)
    engine.add(IDS[:41], GREEDY, request_id="again", salt="a")
    assert drain(engine)["again", 0].num_cached_tokens == 40


@pytest.fixture(scope="module")
def damaged():
    """A model of its own whose embedding of id 500 is NaN."""
    model = build(preset("unit"), Numerics())
    with torch.no_grad():
        model.embed.weight[500] = torch.nan
    return model


@pytest.mark.parametrize("kernels", KERNELS)
def test_request_that_is_not_finite_ends_alone_and_leaves_nothing(damaged, kernels):
    engine = engine_of(damaged, kernels=kernels)
    bad = [*IDS[:3], 500, *IDS[4:20]]
    for name, prompt in (("a", OTHER[:17]), ("bad", bad), ("b", IDS[:21])):
        engine.add(prompt, GREEDY, request_id=name)
    served = drain(engine)
    assert served["bad", 0].reason == "error"
    assert "layer 0: not finite at position 3" in served["bad", 0].error
    assert not served["bad", 0].results
    # The plain model is the reference: its weights are the same but for a row that nobody reads.
    assert_uncached(served["a", 0], OTHER[:17], GREEDY, model=damaged, kernels=kernels)
    assert_uncached(served["b", 0], IDS[:21], GREEDY, model=damaged, kernels=kernels)
    assert engine.index.num_cached == 17 // 8 + 23 // 8
    assert engine.allocator.num_free == engine.config.num_blocks - engine.index.num_cached
    assert len(engine.scheduler.free_slots) == engine.config.max_sequences
    # Its memory is used again without a trace of it.
    again = [OTHER[n : n + 30] for n in range(6)]
    assert_all_uncached(engine, again, GREEDY, model=damaged, kernels=kernels)


def test_drawn_token_that_is_not_finite_ends_its_request_with_what_it_had(damaged):
    engine = engine_of(damaged)
    engine.add(IDS[:9], replace(GREEDY, logit_bias={500: 1e9}), request_id="bad")
    engine.add(OTHER[:9], GREEDY, request_id="a")
    served = drain(engine)
    assert (served["bad", 0].tokens, served["bad", 0].reason) == ([500], "error")
    assert "at position 9" in served["bad", 0].error
    assert_uncached(served["a", 0], OTHER[:9], GREEDY, model=damaged)


class Alternating:
    """Even and odd ids in turn, five tokens in all; walks like a grammar."""

    def __init__(self, taken: int = 0):
        self.taken = taken

    def mask(self):
        return torch.arange(512) % 2 == self.taken % 2

    def advance(self, token):
        if not self.mask()[token]:
            raise ValueError(f"id {token} after {self.taken} tokens")
        self.taken += 1

    @property
    def is_finished(self):
        return self.taken == 5

    def copy(self):
        return Alternating(self.taken)


def test_constraint_is_obeyed_through_preemption_and_rollback():
    engine = engine_of()
    grammar = Alternating()
    params = replace(DRAWN, max_new_tokens=9, constraint=grammar, n=2)
    plain = engine.add(IDS[:20], params)
    wanted = drain(engine)
    name = engine.add(IDS[:20], params)
    kept = {}

    def harm(step):
        engine.preempt(name, index=step % 2)
        if step == 4:
            engine.rollback(name, 2)
            kept["at"] = step

    served = drain(engine, harm)
    assert kept
    assert grammar.taken == 0
    for index in range(2):
        want = wanted[plain, index]
        assert want.reason == served[name, index].reason == "stop"
        assert [token % 2 for token in want.tokens] == [0, 1, 0, 1, 0]
        # What the rollback took back was handed out before, and came again.
        tokens = served[name, index].tokens
        assert tokens[-5:] == want.tokens or tokens[-3:] == want.tokens[-3:]
    assert len(served[name, 0].tokens) == 7


def test_constraint_that_allows_nothing_ends_its_request_alone():
    class Nothing(Alternating):
        def mask(self):
            return torch.zeros(512, dtype=torch.bool)

        def copy(self):
            return Nothing()

    engine = engine_of()
    engine.add(IDS[:9], replace(GREEDY, constraint=Nothing()), request_id="bad")
    engine.add(IDS[:9], GREEDY, request_id="a")
    served = drain(engine)
    assert served["bad", 0].reason == "error"
    assert "constraint" in served["bad", 0].error
    assert_uncached(served["a", 0], IDS[:9], GREEDY)


def test_unknown_settings_and_models_are_refused():
    with pytest.raises(ConfigError, match="multiple of 2"):
        engine_of(block_size=7)
    with pytest.raises(ConfigError, match="cache_rounding off"):
        engine_of(unit_model())
    with pytest.raises(ConfigError, match="starve"):
        engine_of(max_batch_tokens=9)


def test_engine_made_in_inference_mode_leaves_the_model_trainable():
    model = build(preset("unit"), Numerics())
    with torch.inference_mode():
        engine_of(model)
    assert not any(p.is_inference() for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    # And another engine of the same model answers the same.
    assert_all_uncached(engine_of(model), [IDS[:9]])


def test_engines_of_one_model_share_its_experts():
    model = build(preset("unit"), Numerics())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (Engine(model, EngineConfig(kernels="numba")) for _ in range(2))
    for layer, a, b in zip(model.layers, first.model.layers, second.model.layers, strict=True):
        places = {x.ffn.experts[1].w2.weight.data_ptr() for x in (layer, a, b)}
        places.add(a.ffn.stacks["w2"][a.parts.config.hidden_size :].data_ptr())
        assert len(places) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_search_in_the_pool_alone_selects_what_the_whole_search_does(monkeypatch):
    # 16 entries fit the pool of `unit`; 120 tokens have 120 ratio-1 entries.
    ids = [int(i) for i in token_ids(1, 120, seed=9, vocab=500)[0]]
    params = SamplingParams(max_new_tokens=3, temperature=0, logprobs=True, prompt_logprobs=1)
    model = build(preset("unit"), Numerics())
    calls = []

    def served(lists: bool):
        engine = Engine(model, EngineConfig(kernels="numba", block_size=8, num_blocks=32))
        listed = engine.runner.reads.listed_scores

        def counted(*args):
            calls.append(args[3].shape)
            return listed(*args)

        engine.runner.reads = replace(engine.runner.reads, listed_scores=counted if lists else None)
        engine.add(ids, params, request_id="a")
        return drain(engine)[("a", 0)]

    short = served(True)
    assert calls
    assert all(shape[1] == 16 for shape in calls)
    assert short == served(False)
