"""Grammars: whatever is drawn under the mask follows them, and without the mask it does not."""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys

import pytest
import torch

from finwhale.engine.request import Constraint
from finwhale.text import grammar, grammar_trial
from finwhale.text.grammar import (
    GrammarError,
    json_object_constraint,
    json_schema_constraint,
    regex_constraint,
)
from finwhale.text.special_tokens import DSML, EOS, THINK
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import train_tokenizer

TEXTS = ('{"count": 12, "colour": "red"}\n' * 4, '{"a": [1, 2.5, null, true]}\n' * 4, "naïve\n")
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "colour": {"enum": ["red", "blue\n", "grün"]}},
    "required": ["count"],
    "additionalProperties": False,
}
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return Tokenizer.from_file(train_tokenizer(TEXTS, 315, path))


def _random_ids(constraint, eos_id: int, rng: random.Random, closing: frozenset = frozenset()):
    """Draw uniformly under the mask to the end; ids of `closing` first in four of five steps."""
    ids = []
    while len(ids) < MAX_TOKENS:
        allowed = constraint.mask().nonzero()[:, 0].tolist()
        assert allowed
        closers = sorted(closing & set(allowed))
        token = rng.choice(closers if closers and rng.random() < 0.8 else allowed)
        constraint.advance(token)
        if token == eos_id:
            return ids
        ids.append(token)
    raise AssertionError("the grammar did not end")


def _ids_of(tokenizer, pieces) -> frozenset:
    """Ids of single bytes."""
    return frozenset(i for piece in pieces for i in tokenizer.encode(piece))


def _walk(constraint, ids) -> None:
    for token in ids:
        constraint.advance(token)


A = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**A, "additionalProperties": True}, '{"a": null, "x": 1}'),
        ({**A, "additionalProperties": {"type": "integer"}}, '{"a": null, "x": 1}'),
        ({**A, "required": ["a", "x"]}, '{"a": null, "x": 1}'),
        ({"type": "object"}, '{"x": 1}'),
        ({"allOf": [A, B]}, '{"a": null, "b": null}'),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, '{"a": null, "b": null}'),
        ({"anyOf": [A, B]}, '{"b": null}'),
        ({"const": {"properties": {"p": 1}}}, '{"properties": {"p": 1}}'),
        (
            {"type": "object", "properties": {"properties": A}, "required": ["properties"]},
            '{"properties": {"a": null}}',
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_schema_declares_or_admits_is_allowed(small, schema, text):
    constraint = json_schema_constraint(small, schema)
    _walk(constraint, small.encode(text))
    assert constraint.mask()[small.eos_id]


def test_a_property_that_nobody_declared_is_not_written(small):
    """A schema that says nothing of other properties would let a model write them to the limit."""
    nested = {"type": "object", "properties": {"n": A}, "required": ["n"]}
    for schema, begun in (
        (A, '{"a": null'),
        ({"anyOf": [A, B]}, '{"b": null'),
        (nested, '{"n": {"a": null'),
    ):
        constraint = json_schema_constraint(small, schema)
        _walk(constraint, small.encode(begun))
        allowed = {small.decode([i])[:1] for i in constraint.mask().nonzero()[:, 0].tolist()}
        assert allowed == {"}"}
    # Where a prefix has one, the reply goes on with it.
    open_ = json_schema_constraint(small, A, prefix=small.encode('{"a": null, "x'))
    _walk(open_, small.encode('": 1}'))
    assert open_.mask()[small.eos_id]


def test_constraint_has_the_shape_that_the_engine_expects(small):
    assert isinstance(json_object_constraint(small), Constraint)


def test_masked_draws_follow_the_schema(small, seed):
    rng = random.Random(seed)
    with_colour = 0
    for _ in range(25):
        constraint = json_schema_constraint(small, SCHEMA)
        value = json.loads(small.decode(_random_ids(constraint, small.eos_id, rng)))
        assert type(value["count"]) is int
        assert set(value) <= {"count", "colour"}
        assert value.get("colour", "red") in ("red", "blue\n", "grün")
        with_colour += "colour" in value
        assert constraint.is_finished
    assert 0 < with_colour < 25


def test_masked_draws_are_json_objects(small, seed):
    rng, closing = random.Random(seed), _ids_of(small, ('"', "}", "]"))
    values = [
        json.loads(
            small.decode(_random_ids(json_object_constraint(small), small.eos_id, rng, closing))
        )
        for _ in range(25)
    ]
    assert all(isinstance(value, dict) for value in values)
    assert any(values)


def test_masked_draws_match_the_pattern(small, seed):
    pattern = r"(red|blue)-[0-9]{2,3}( é)?"
    for draw in range(15):
        constraint = regex_constraint(small, pattern)
        text = small.decode(_random_ids(constraint, small.eos_id, random.Random(seed + draw)))
        assert re.fullmatch(pattern, text)


def test_unmasked_draws_are_not_json(small, seed):
    """Control: without the mask the laws above are false."""
    rng, parsed = random.Random(seed), 0
    for _ in range(50):
        ids = [rng.randrange(small.vocab_size) for _ in range(12)]
        with contextlib.suppress(ValueError):
            parsed += isinstance(json.loads(small.decode(ids)), dict)
    assert parsed == 0


@pytest.mark.parametrize("value", [{"count": -12, "colour": "grün"}, {"count": 0}])
def test_a_valid_text_is_allowed_as_the_tokenizer_writes_it(small, value):
    """The mask forbids nothing that it should not, spaced as json.dumps spaces."""
    constraint = json_schema_constraint(small, json.dumps(SCHEMA))
    for token in small.encode(json.dumps(value, ensure_ascii=False)):
        assert not constraint.is_finished
        assert constraint.mask()[token]
        constraint.advance(token)
    assert constraint.is_finished
    assert constraint.mask().nonzero()[:, 0].tolist() == [small.eos_id]


@pytest.mark.parametrize(
    "text",
    [
        '{"count": 1.5}',
        '{"count": 01}',
        '{"colour": "red"}',
        "[1]",
        '{"count": 1}}',
        '{"count":1,}',
    ],
)
def test_texts_outside_the_schema_are_stopped(small, text):
    constraint = json_schema_constraint(small, SCHEMA)
    ids = [i for character in text for i in small.encode(character)]
    with pytest.raises(GrammarError, match="expected one that the mask allows"):
        _walk(constraint, ids)


def test_mask_says_exactly_what_advance_takes(small):
    """At each place of a text, over the whole vocabulary and beyond its ends."""
    constraint = json_schema_constraint(small, SCHEMA)
    for token in small.encode('{"count": 1'):
        constraint.advance(token)
    mask = constraint.mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (small.vocab_size,)
    for token in range(-1, small.vocab_size + 1):
        walker = constraint.copy()
        if 0 <= token < small.vocab_size and mask[token]:
            walker.advance(token)
            continue
        with pytest.raises(GrammarError):
            walker.advance(token)
        # Nothing moved, so what was allowed still is.
        assert torch.equal(walker.mask(), mask)


def test_text_may_end_only_where_the_grammar_accepts(small):
    constraint = regex_constraint(small, "ab?")
    a, b = small.encode("a")[0], small.encode("b")[0]
    assert not constraint.mask()[small.eos_id]
    with pytest.raises(GrammarError):
        constraint.advance(small.eos_id)
    constraint.advance(a)
    assert constraint.mask().nonzero()[:, 0].tolist() == sorted([small.eos_id, b])
    assert not constraint.is_finished
    ended = constraint.copy()
    ended.advance(small.eos_id)
    constraint.advance(b)
    for walker in (ended, constraint):
        assert walker.is_finished
        assert walker.mask().nonzero()[:, 0].tolist() == [small.eos_id]
        with pytest.raises(GrammarError):
            walker.advance(b)


def test_copies_walk_apart(small):
    first = regex_constraint(small, "a+b")
    a, b = small.encode("a")[0], small.encode("b")[0]
    first.advance(a)
    second = first.copy()
    first.advance(b)
    assert first.is_finished
    assert not second.is_finished
    assert second.mask()[a]
    second.advance(a)
    second.advance(b)
    assert torch.equal(first.mask(), second.mask())
    # The compiled grammar that both came from is still at its start.
    assert regex_constraint(small, "a+b").mask().nonzero()[:, 0].tolist() == [a]


def test_markers_never_stand_in_a_text(small):
    """A string takes any letters, those of a marker too, but not the marker's id."""
    constraint = json_object_constraint(small)
    for token in small.encode('{"a": "'):
        constraint.advance(token)
    dsml = small.marker_id(DSML)
    assert not constraint.mask()[list(small.markers.values())].any()
    with pytest.raises(GrammarError):
        constraint.advance(dsml)
    for token in small.encode(DSML + EOS):
        assert constraint.mask()[token]
        constraint.advance(token)


def test_a_markers_text_in_a_pattern_is_spelled_in_plain_tokens(small):
    """There the text is forced, which is where the marker's own id would be the short spelling."""
    constraint = regex_constraint(small, f"a{DSML}{THINK}")
    ids = _random_ids(constraint, small.eos_id, random.Random(0))
    assert small.decode(ids) == f"a{DSML}{THINK}"
    assert not set(ids) & set(small.markers.values())
    assert len(ids) > len(small.encode(f"a{DSML}{THINK}", parse_markers=True))


@pytest.mark.parametrize("extra", [0, 1, 31])
def test_mask_has_the_models_vocabulary(small, extra):
    size = small.vocab_size + extra
    mask = json_object_constraint(small, vocab_size=size).mask()
    assert mask.shape == (size,)
    assert not mask[small.vocab_size :].any()
    assert torch.equal(mask[: small.vocab_size], json_object_constraint(small).mask())
    with pytest.raises(GrammarError, match=r"vocab_size: got .*, expected at least"):
        json_object_constraint(small, vocab_size=small.vocab_size - 1)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("nonsense", "schema: not JSON"),
        ({"type": "object", "default": object()}, "schema: got a value that is not JSON"),
        ([1], "schema: .*object or boolean"),
        ({"type": "text"}, "schema: .*Invalid type: text"),
        ({"not": {"type": "string"}}, 'schema: .*Unimplemented keys: \\["not"\\]'),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "schema: .*[Uu]nsatisfiable"),
        ({"$ref": "http://example.org/s"}, "schema: .*example.org"),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused(small, schema, message):
    with pytest.raises(GrammarError, match=message):
        json_schema_constraint(small, schema)


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", "[z-a]"])
def test_patterns_that_cannot_be_followed_are_refused(small, pattern):
    with pytest.raises(GrammarError, match=r"^pattern: "):
        regex_constraint(small, pattern)


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The texts of the grammars that are compiled from here on."""
    found: list[str] = []

    def counted(vocabulary, kind, text):
        found.append(text)
        return grammar_trial.matcher_of(vocabulary, kind, text)

    monkeypatch.setattr(grammar, "matcher_of", counted)
    return found


def test_grammar_is_compiled_once_for_each_owner(small, compiled):
    json_schema_constraint(small, SCHEMA, owner="a")
    num = len(compiled)
    json_schema_constraint(small, json.dumps(SCHEMA), owner="a")
    assert len(compiled) == num
    json_schema_constraint(small, {**SCHEMA, "required": ["colour"]}, owner="a")
    assert len(compiled) == num + 1
    # The time of the answer would tell a tenant what another one has compiled.
    json_schema_constraint(small, SCHEMA, owner="b")
    assert len(compiled) == num + 2


def test_a_refusal_is_remembered_like_a_grammar(small, monkeypatch):
    runs, run = [], grammar_trial.Trial.run

    def counted(self, kind, text, **more):
        runs.append(text)
        return run(self, kind, text, **more)

    monkeypatch.setattr(grammar_trial.Trial, "run", counted)
    for _ in range(3):
        with pytest.raises(GrammarError):
            regex_constraint(small, "once(", owner="c")
    assert runs == ["once("]


def test_what_is_remembered_stays_within_its_bytes(small, monkeypatch, compiled):
    held = grammar._Templates(400_000)
    monkeypatch.setattr(grammar, "_templates", held)
    for number in range(60):
        json_schema_constraint(small, {"const": f"{number}" * 20})
        assert 0 < held.num_bytes <= held.max_bytes
    assert len(compiled) == 60
    before = held.num_bytes
    # One that would push out most of the others is not kept.
    json_schema_constraint(small, {"enum": [f"{number:09}" for number in range(900)]})
    assert held.num_bytes == before


def test_missing_library_is_named(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammar._vocabulary.cache_clear()
    monkeypatch.setattr(grammar, "_templates", grammar._Templates(grammar.MAX_CACHE_BYTES))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'finwhale\[grammar\]'") as caught:
        json_object_constraint(small)
    assert caught.value.name == "llguidance"
