"""Hostile grammars are refused with a reason and soon; sound ones of the same size are served."""

from __future__ import annotations

import gc
import json
import threading
import time

import pytest

from finwhale.text import grammar, grammar_trial
from finwhale.text.grammar import (
    GrammarError,
    PrefixError,
    json_object_constraint,
    json_schema_constraint,
    regex_constraint,
)
from finwhale.text.schema_limits import (
    MAX_LEVELS,
    SchemaError,
    _nested_count,
    check_schema,
    without_texts,
)
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import train_tokenizer

STRING = {"type": "string"}
TEXTS = ('{"count": 12, "colour": "red"}\n' * 4, "naïve p1 p2 p3\n")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(train_tokenizer(TEXTS, 304, path))
    yield tokenizer
    grammar._trial(tokenizer).close()


def strings(count: int, **more) -> dict:
    return {"type": "object", "properties": {f"p{i}": STRING for i in range(count)}, **more}


def nested(levels: int) -> dict:
    schema: dict = STRING
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int) -> dict:
    """Definitions that each lead to the next one."""
    links = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(length)
    }
    return {"$defs": {**links, f"d{length}": STRING}, "$ref": "#/$defs/d0"}


PATTERNS = {"allOf": [{**STRING, "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(30)]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, "no text satisfies it"),
        (strings(5001), "5001 optional properties"),
        (strings(5001, required=[f"p{i}" for i in range(5001)]), "5001 properties"),
        (strings(10_000), "optional properties, expected at most 1000"),
        ({"enum": list(range(1001))}, "1001 enum values"),
        ({"const": "x" * 120_001}, "characters of names and values"),
        ({"description": "x" * 1_000_001}, "characters, expected at most 1000000"),
        (nested(MAX_LEVELS), "levels"),
        (nested(500), "levels"),
        # Each of these takes gigabytes, or a native stack, without a bound.
        (PATTERNS, "processor time or"),
        ({"type": "integer", "multipleOf": 999_983}, "processor time or"),
        (chain(3000), "3001 different references"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_takes_too_much_is_refused_with_the_reason(small, schema, message):
    start = time.process_time()
    with pytest.raises(GrammarError, match=message):
        json_schema_constraint(small, schema)
    # Without its bounds the smallest of these takes many times this.
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a{1000}){1000}", "1000000 repetitions in repetitions"),
        ("(?:(x[)]{300}|y)z{7}){90}", "27000 repetitions in repetitions"),
        ("a" * 10_001, "10001 characters"),
    ],
    ids=["two counts", "around a choice", "long"],
)
def test_a_pattern_that_takes_too_much_is_refused(small, pattern, message):
    with pytest.raises(GrammarError, match=f"^pattern: got {message}"):
        regex_constraint(small, pattern)
    with pytest.raises(GrammarError, match=rf"^schema\.pattern: got {message}"):
        json_schema_constraint(small, {**STRING, "pattern": pattern})


def test_counts_multiply_where_they_stand_around_each_other():
    for pattern, count in (
        ("a{1000}b{1000}", 1),
        ("(a{10}b{30}){20}", 600),
        (r"(\p{L}{7}){3}", 21),
        (r"([{9}(]{4}\({5}){6}", 30),
        ("((a{2}){3}){4,}", 24),
        ("a{2}{3}", 6),
        ("(a{2,9})*", 1),
    ):
        assert _nested_count(pattern) == count, pattern


def test_many_optional_properties_are_served_to_the_end(small):
    for count in (499, 1000):
        constraint = json_schema_constraint(small, strings(count))
        value = {f"p{i}": "x" for i in range(0, count, 97)}
        for token in small.encode(json.dumps(value)):
            constraint.advance(token)
        assert constraint.mask()[small.eos_id]


def test_all_required_properties_of_the_published_limit_are_served(small):
    names = [f"p{i}" for i in range(5000)]
    constraint = json_schema_constraint(small, strings(5000, required=names))
    for token in small.encode('{"p0": "a", "p1": "'):
        constraint.advance(token)
    assert constraint.mask().any()


def test_names_that_are_keywords_are_properties(small):
    """A property called pattern is no pattern, and one called enum has no values."""
    schema = {"type": "object", "properties": {"pattern": STRING, "enum": STRING, "allOf": STRING}}
    assert check_schema(schema, json.dumps(schema))
    assert not check_schema({**STRING, "pattern": "a"}, "")
    with pytest.raises(SchemaError, match=r"schema\.properties\.a: got 1001 optional"):
        check_schema({"type": "object", "properties": {"a": strings(1001)}}, "")


def test_texts_of_a_schema_are_not_compiled_and_names_are_no_texts(small, monkeypatch):
    texts = {"title": "T", "description": "x" * 400_000, "$comment": "c"}
    plain = {
        "type": "object",
        "properties": {"title": {"const": {"title": 1}}},
        "required": ["title"],
    }
    told = {**plain, **texts, "properties": {"title": {**plain["properties"]["title"], **texts}}}
    assert without_texts(told) == plain
    json_schema_constraint(small, plain, owner="texts")
    # What is known is not compiled, so this would fail with another text.
    monkeypatch.setattr(grammar, "matcher_of", None)
    constraint = json_schema_constraint(small, told, owner="texts")
    for token in small.encode('{"title": {"title": 1}}'):
        constraint.advance(token)
    assert constraint.is_finished or constraint.mask()[small.eos_id]


def test_a_grammar_after_a_lost_trial_is_compiled(small):
    with pytest.raises(GrammarError, match="processor time"):
        json_schema_constraint(small, {"allOf": [*PATTERNS["allOf"], {"maxLength": 500}]})
    assert regex_constraint(small, "b{3}").mask().any()


def test_a_later_failure_says_why_and_leaves_other_walkers(small):
    """The states of a matcher are bounded; this pattern wants a new one for every letter."""
    constraint = regex_constraint(small, "(.*a.{1,50}b){60}")
    other = constraint.copy()
    letters = [small.encode(letter)[0] for letter in "abab cab"]

    def walk() -> None:
        for step in range(20_000):
            constraint.advance(letters[step * step % 7])

    with pytest.raises(GrammarError, match=r"grammar: .*(states|complex|fuel|constructed)"):
        walk()
    assert other.mask().any()


def longest_gap(work) -> tuple[float, float]:
    """Seconds of `work`, and the longest ones in which another thread did not run meanwhile."""
    gaps, is_over = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.05)
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    is_over.set()
    thread.join()
    return seconds, max(gaps)


def test_other_threads_run_while_a_grammar_is_compiled(small):
    """The library lets go of Python's lock; sorting, the control, does not."""
    vocabulary = grammar._vocabulary(small)
    text = json.dumps({"type": "integer", "multipleOf": 200_001})
    seconds, gap = longest_gap(lambda: grammar_trial.matcher_of(vocabulary, "schema", text))
    assert gap < seconds / 3
    numbers = [(i * 7919) % 1_000_003 for i in range(1_000_000)]
    seconds, gap = longest_gap(lambda: sorted(numbers))
    assert gap > seconds / 3


def test_a_mask_that_does_not_come_ends_its_own_walk(small, monkeypatch):
    constraint, free = regex_constraint(small, "a+"), threading.Event()
    pool = grammar._pool()
    for _ in range(pool._max_workers):
        pool.submit(free.wait)
    monkeypatch.setattr(grammar, "MASK_SECONDS", 0.05)
    try:
        constraint.advance(small.encode("a")[0])
        with pytest.raises(GrammarError, match="took longer"):
            constraint.mask()
        # A walker that waits for nothing goes on.
        assert json_object_constraint(small).mask().any()
    finally:
        free.set()


def test_a_text_goes_on_from_any_prefix_of_it(small):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    value = {"ok": True, "n": 12}
    for blanks in ({}, {"separators": (",", ":")}, {"indent": 2}):
        text = json.dumps(value, **blanks)
        for cut in range(len(text) + 1):
            begun = json_schema_constraint(small, schema, prefix=small.encode(text[:cut]))
            # As soon as its blanks show, the style of a prefix is the style of the rest.
            if cut < 7 and blanks:
                continue
            for token in small.encode(text[cut:]):
                begun.advance(token)
            assert begun.is_finished or begun.mask()[small.eos_id]
    with pytest.raises(PrefixError, match="prefix: no text of the schema begins with it"):
        json_schema_constraint(small, schema, prefix=small.encode('{"no'))
    with pytest.raises(PrefixError):
        regex_constraint(small, "abc", prefix=small.encode("b"))


@pytest.mark.parametrize("limits", [{"cpu_seconds": 0.005}, {"memory_bytes": 1 << 20}], ids=str)
def test_the_childs_limits_are_what_refuses(small, limits):
    """Control: the same grammar passes with more of one limit and not with less."""
    size = {"vocab_size": small.vocab_size, "eos_id": small.eos_id}
    # It takes 80 MB, more than what the child's allocator has in reserve.
    size["cpu_seconds"] = 30.0
    text = json.dumps({"type": "integer", "multipleOf": 200_001})
    for more, passes in (({}, True), (limits, False)):
        trial = grammar_trial.Trial(small.raw.to_str(), **{**size, **more})
        try:
            if passes:
                assert trial.run("schema", text) >= 0
            else:
                with pytest.raises(grammar_trial.TrialError, match="processor time"):
                    trial.run("schema", text)
        finally:
            trial.close()


def test_a_trials_child_ends_with_its_trial(small):
    trial = grammar_trial.Trial(
        small.raw.to_str(), vocab_size=small.vocab_size, eos_id=small.eos_id
    )
    trial.run("pattern", "a")
    (child,) = trial._children
    assert child.poll() is None
    del trial
    gc.collect()
    assert child.poll() is not None
