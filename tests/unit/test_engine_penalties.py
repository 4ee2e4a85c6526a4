"""Penalties in the engine: they are applied; preemption, batch and choice change no bit."""

from dataclasses import replace

from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine
from finwhale.engine.request import SamplingParams
from finwhale.engine.sampler import choice_seed
from finwhale.model import Numerics
from tests.models import token_ids, unit_model
from tests.uncached_engine import drain, expected

MODEL = unit_model(Numerics())
PROMPT = token_ids(1, 9, seed=5)[0].tolist()
PENALISED = SamplingParams(
    max_new_tokens=24, temperature=0, presence_penalty=2, frequency_penalty=2, logprobs=True
)
PLAIN = replace(PENALISED, presence_penalty=0, frequency_penalty=0)


def served(*params: SamplingParams, after_step=None):
    config = EngineConfig(block_size=4, num_blocks=64, max_sequences=4, max_batch_tokens=16)
    engine = Engine(MODEL, config)
    for number, one in enumerate(params):
        engine.add(PROMPT, one, request_id=str(number))
    harm = None if after_step is None else lambda step: after_step(engine, step)
    found = drain(engine, harm)
    return [found[str(number), 0].results for number in range(len(params))]


def test_penalties_change_what_is_drawn_as_the_definition_says():
    # Constant logits would repeat one token for ever: a bias makes this model repeat itself.
    repeats = replace(PLAIN, logit_bias={3: 3.0, 4: 2.5})
    penalised = replace(PENALISED, logit_bias={3: 3.0, 4: 2.5})
    plain, other = served(repeats, penalised)
    for params, results in ((repeats, plain), (penalised, other)):
        tokens = [result.token for result in results]
        assert results == expected(MODEL, PROMPT, tokens, params)
    assert plain[0] == other[0], "nothing has been drawn before the first token"
    assert plain != other
    most = max(map([r.token for r in plain].count, {r.token for r in plain}))
    least = max(map([r.token for r in other].count, {r.token for r in other}))
    assert least < most


def test_preemption_keeps_the_penalised_tokens():
    alone, _ = served(PENALISED, PLAIN)

    def harm(engine: Engine, step: int) -> None:
        if step % 5 == 0:
            engine.preempt("0")

    disturbed, _ = served(PENALISED, PLAIN, after_step=harm)
    assert disturbed == alone


def test_choices_count_their_own_tokens():
    params = replace(PENALISED, n=2, temperature=0.9, seed=4)
    config = EngineConfig(block_size=4, num_blocks=64, max_sequences=4, max_batch_tokens=16)
    engine = Engine(MODEL, config)
    engine.add(PROMPT, params, request_id="a")
    found = drain(engine)
    for index in range(2):
        results = found["a", index].results
        tokens = [result.token for result in results]
        own = choice_seed(4, index)
        assert results == expected(MODEL, PROMPT, tokens, params, seed=own)
