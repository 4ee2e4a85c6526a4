"""JSON from a random model: the engine follows a grammar, alone and in company."""

import json
from dataclasses import replace

import pytest

from finwhale.config import preset
from finwhale.engine import Engine, EngineConfig, SamplingParams
from finwhale.model import Numerics
from finwhale.text.grammar import json_schema_constraint, regex_constraint
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import train_tokenizer
from tests.models import build

TEXTS = ('{"count": 12, "colour": "red"}\n' * 4, '{"a": [1, 2.5, null, true]}\n' * 4)
# Bounded on every side: a random model would write digits for ever.
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "colour": {"enum": ["red", "blue"]},
    },
    "required": ["count", "colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return Tokenizer.from_file(train_tokenizer(TEXTS, 310, path))


@pytest.fixture(scope="module")
def model():
    return build(preset("unit"), Numerics())


def served(model, tokenizer, requests, **options):
    """Return the tokens of every request, served together."""
    engine = Engine(model, EngineConfig(num_blocks=32, block_size=16, **options))
    results = engine.generate([[0, 5, 9, n] for n in range(len(requests))], requests)
    return [[result.token for result in choices[0]] for choices in results]


def request(tokenizer, model, seed: int) -> SamplingParams:
    vocab = model.config.text_config.vocab_size
    return SamplingParams(
        max_new_tokens=80,
        temperature=1.0,
        seed=seed,
        stop_ids=(tokenizer.eos_id,),
        constraint=json_schema_constraint(tokenizer, SCHEMA, vocab_size=vocab),
    )


def test_constrained_text_is_json_of_the_schema_and_the_same_in_company(model, tokenizer):
    requests = [request(tokenizer, model, seed) for seed in range(5)]
    together = served(model, tokenizer, requests)
    for ids in together:
        value = json.loads(tokenizer.decode([i for i in ids if i != tokenizer.eos_id]))
        assert 0 <= value["count"] <= 99
        assert value["colour"] in ("red", "blue")
    # Little memory: sequences are preempted and walk their grammar on from where they were.
    few = served(model, tokenizer, requests, max_sequences=2, max_batch_tokens=3)
    assert few == together


def test_a_finished_pattern_stops_without_a_stop_id(model, tokenizer):
    vocab = model.config.text_config.vocab_size
    params = SamplingParams(
        max_new_tokens=40,
        seed=1,
        constraint=regex_constraint(tokenizer, "[ab]{3}", vocab_size=vocab),
    )
    (ids,) = served(model, tokenizer, [params])
    assert len(tokenizer.decode([i for i in ids if i != tokenizer.eos_id])) == 3


def test_without_the_constraint_the_same_model_writes_no_json(model, tokenizer):
    free = replace(request(tokenizer, model, 0), constraint=None)
    (ids,) = served(model, tokenizer, [free])
    with pytest.raises(ValueError, match=r"Expecting|Extra|Invalid|delimiter"):
        json.loads(tokenizer.decode([i for i in ids if i < 310]))


def test_a_grammar_that_is_given_up_ends_its_own_choice_and_no_other(model, tokenizer):
    """Its matcher may have 20,000 states, and every letter here makes new ones."""
    vocab = model.config.text_config.vocab_size
    letters = dict.fromkeys(range(vocab), 0.0)
    for letter in "ab":
        letters[tokenizer.encode(letter)[0]] = 100.0
    hostile = SamplingParams(
        max_new_tokens=480,
        seed=1,
        logit_bias=letters,
        constraint=regex_constraint(tokenizer, "(.*a.{1,50}b){60}", vocab_size=vocab),
    )
    honest = [request(tokenizer, model, seed) for seed in range(2)]
    alone = served(model, tokenizer, honest)
    engine = Engine(model, EngineConfig(num_blocks=96, block_size=16))
    names = [engine.add([0, 5, 9, n], params) for n, params in enumerate([*honest, hostile])]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    reasons, errors, faults = {}, {}, {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += [result.token for result in output.new]
            if output.is_last:
                reasons[output.request_id] = output.finish_reason
                errors[output.request_id] = output.error
                faults[output.request_id] = output.fault
    assert [reasons[name] for name in names] == ["stop", "stop", "error"]
    assert errors[names[2]].startswith("constraint: got GrammarError (grammar: ")
    assert [faults[name] for name in names] == [None, None, "request"]
    assert [tokens[name] for name in names[:2]] == alone
