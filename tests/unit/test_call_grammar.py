"""Forced calls: whatever is drawn under the mask parses to calls whose arguments are valid.

The output parser of the server reads the drawn text; what is valid is decided by a small check of
JSON schema written here, and the shape of the text by section B.5 of the spec.
"""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from finwhale.engine.request import Constraint
from finwhale.text.call_grammar import CalledTool, call_grammar, calls_constraint
from finwhale.text.grammar import GrammarError
from finwhale.text.output_parser import OutputParser, message_of
from finwhale.text.prompt import Segment, encode_segment, render_reply
from finwhale.text.special_tokens import DSML
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import train_tokenizer

TEXTS = (
    '<invoke name="weather">\n<parameter name="city" string="true">Oslo</parameter>\n</invoke>\n'
    * 4,
    '"days" string="false">12</ {"a": [1, true]}\n' * 3,
    "naïve größe\n",
)
MOST_TOKENS = 3000
STRING = {"type": "string"}
MODEL = {
    "type": "object",
    "properties": {"k": {"type": "boolean"}, "next": {"$ref": "#/$defs/Model"}},
    "required": ["k"],
    "additionalProperties": False,
}
FORECAST = {
    "type": "object",
    "properties": {
        "city": STRING,
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"type": "string", "enum": ["C", "F</x", "größe", ""]},
        "model": {"anyOf": [{"$ref": "#/$defs/Model"}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[a-z]{2}$"},
        "note": {"type": ["string", "null"], "description": "a word"},
        "level": {"const": 3},
        "mixed": {"enum": ["low", 7, None]},
    },
    "required": ["city", "unit", "model"],
    "$defs": {"Model": MODEL},
}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}}
TOOLS = [
    CalledTool("forecast", FORECAST),
    CalledTool("fore", {"type": "object", "properties": {}}),
    CalledTool("nothing", {}),
    CalledTool("optional", OPTIONAL),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return Tokenizer.from_file(train_tokenizer(TEXTS, 340, path))


def drawn(constraint, tokenizer, rng: random.Random) -> list[int]:
    """Draw under the mask to the end, mostly ids that close something."""
    closing = {i for text in ("</", '"', "}", "]") for i in tokenizer.encode(text)}
    closing.add(tokenizer.marker_id(DSML))
    ids: list[int] = []
    while not constraint.is_finished:
        allowed = constraint.mask().nonzero()[:, 0].tolist()
        assert allowed, tokenizer.decode(ids)
        closers = [i for i in allowed if i in closing]
        token = rng.choice(closers if closers and rng.random() < 0.6 else allowed)
        constraint.advance(token)
        ids.append(token)
        # A text without a bound is as long as the draws make it.
        assert len(ids) < MOST_TOKENS
    return [i for i in ids if i != tokenizer.eos_id]


def calls_of(text: str) -> list[tuple[str, dict]]:
    parser = OutputParser(thinking=False, tools_declared=True, starts_in_calls=True)
    message = message_of([*parser.feed(text), *parser.finish()])
    assert not message["content"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def is_valid(value, schema: dict, root: dict) -> bool:
    """The keywords that the schemas of this file use."""
    if "$ref" in schema:
        assert schema["$ref"] == "#/$defs/Model"
        return is_valid(value, root["$defs"]["Model"], root)
    if "anyOf" in schema:
        return any(is_valid(value, each, root) for each in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    kinds = schema.get("type", [])
    names = {str: "string", bool: "boolean", int: "integer", dict: "object", type(None): "null"}
    if kinds and names[type(value)] not in ([kinds] if isinstance(kinds, str) else kinds):
        return False
    if type(value) is int and not schema.get("minimum", value) <= value <= schema.get(
        "maximum", value
    ):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return (
            set(schema.get("required", ())) <= set(value)
            and set(value) <= set(properties)
            and all(is_valid(each, properties[name], root) for name, each in value.items())
        )
    return True


def test_the_check_of_this_file_tells_valid_from_invalid():
    good = {"city": "x", "unit": "C", "model": None}
    assert is_valid(good, FORECAST, FORECAST)
    for bad in (
        {**good, "days": 100},
        {**good, "days": True},
        {**good, "more": 1},
        {**good, "unit": "K"},
        {**good, "model": {"next": {"k": True}}},
        {**good, "code": "abc"},
        {"city": "x", "unit": "C"},
    ):
        assert not is_valid(bad, FORECAST, FORECAST), bad


def test_constraint_has_the_shape_that_the_engine_expects(small):
    assert isinstance(calls_constraint(small, TOOLS)[0], Constraint)


@pytest.mark.parametrize("parallel", [True, False])
def test_masked_draws_are_calls_of_declared_tools_with_valid_arguments(small, seed, parallel):
    schemas = {tool.name: dict(tool.parameters) for tool in TOOLS}
    constraint, loose = calls_constraint(small, TOOLS, parallel=parallel)
    assert not loose
    counts, found = [], []
    for number in range(80):
        ids = drawn(constraint.copy(), small, random.Random(seed * 1000 + number))
        calls = calls_of(small.decode(ids))
        for name, arguments in calls:
            assert is_valid(arguments, schemas[name], schemas[name]), (name, arguments)
            # In the schema's order.
            order = [key for key in schemas[name].get("properties", {}) if key in arguments]
            assert list(arguments) == order
        counts.append(len(calls))
        found += calls
    assert min(counts) == 1
    assert max(counts) > 1 if parallel else max(counts) == 1
    assert {name for name, _ in found} == set(schemas)


def test_every_parameter_is_both_written_and_left_out(small, seed):
    tools = [CalledTool("forecast", FORECAST)]
    constraint, _ = calls_constraint(small, tools, parallel=False)
    seen = [
        set(calls_of(small.decode(drawn(constraint.copy(), small, random.Random(seed + n))))[0][1])
        for n in range(40)
    ]
    required = set(FORECAST["required"])
    for name in FORECAST["properties"]:
        times = sum(name in keys for keys in seen)
        assert times == 40 if name in required else 0 < times < 40, name


def ids_of_call(tokenizer: Tokenizer, name: str, arguments: dict) -> list[int]:
    """Ids of the call as the model is taught to write it, behind the opener of its block."""
    call = {"id": "a", "type": "function"}
    call["function"] = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    segments = render_reply(turn, thinking=False)
    opener = next(i for i, s in enumerate(segments) if s.text.startswith(" calls>\n"))
    rest = Segment(segments[opener].text.removeprefix(" calls>\n"), False)
    return [
        i for segment in (rest, *segments[opener + 1 :]) for i in encode_segment(tokenizer, segment)
    ]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("nothing", {}),
        ("optional", {}),
        ("optional", {"b": None}),
        ("forecast", {"city": 'a "b"\n</i> {', "unit": "F</x", "model": None}),
        (
            "forecast",
            {
                "city": "",
                "days": 12,
                "unit": "größe",
                "model": {"k": True, "next": {"k": False}},
                "code": "no",
                "note": "n",
                "level": 3,
                "mixed": 7,
            },
        ),
        ("forecast", {"city": "x", "unit": "", "model": None, "note": None, "mixed": "low"}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_call_is_allowed_as_the_template_writes_it(small, name, arguments):
    """The mask forbids no call of section B.5 that is valid, but for how ids are cut."""
    if arguments.get("code"):
        # The template writes strings raw; one with a pattern is held to JSON.
        arguments = {key: value for key, value in arguments.items() if key != "code"}
    constraint, _ = calls_constraint(small, TOOLS)
    text = small.decode(ids_of_call(small, name, arguments)[:-1])
    for part in re.split(f"({DSML})", text):
        ids = [small.marker_id(DSML)] if part == DSML else small.encode(part)
        for token in ids:
            constraint._inner._settle()
            assert constraint._inner._matcher.consume_token(token), (part, small.decode([token]))
            constraint._inner._mask = None
    assert constraint.is_finished


@pytest.mark.parametrize(
    "text",
    [
        f'<{DSML} invoke name="other">\n',
        f'<{DSML} invoke name="optional">\n<{DSML} parameter name="c"',
        f'<{DSML} invoke name="optional">\n<{DSML} parameter name="b" string="false">null</{DSML}'
        f' parameter>\n<{DSML} parameter name="a"',
        f'<{DSML} invoke name="optional">\n<{DSML} parameter name="a" string="true"',
        f'<{DSML} invoke name="forecast">\n</{DSML}',
        f"</{DSML} calls>",
        "plain",
    ],
)
def test_what_is_no_valid_call_is_stopped(small, text):
    constraint, _ = calls_constraint(small, TOOLS)

    def walk() -> None:
        for part in re.split(f"({DSML})", text):
            ids = [small.marker_id(DSML)] if part == DSML else small.encode(part)
            for letter in itertools.chain(ids):
                constraint._inner._settle()
                inner = constraint._inner._matcher
                if not inner.consume_token(letter):
                    raise GrammarError("stopped")
                constraint._inner._mask = None

    with pytest.raises(GrammarError):
        walk()


def test_no_plain_token_completes_the_markers_text(small):
    """The parser reads text, so the marker in plain tokens would end a value."""
    tools = [
        CalledTool("f", {"properties": {"s": STRING, "j": {"type": "array", "items": STRING}}})
    ]
    constraint, _ = calls_constraint(small, tools)
    marker = small.marker_id(DSML)
    for part in ("<", DSML, ' invoke name="f">\n<', DSML, ' parameter name="s" string="true">ab</'):
        ids = [marker] if part == DSML else [i for c in part for i in small.encode(c)]
        for token in ids:
            constraint._inner._settle()
            constraint._inner._matcher.consume_token(token)
            constraint._inner._mask = None
    letters = [i for c in DSML for i in small.encode(c)]
    for token in letters[:-1]:
        constraint.advance(token)
    last = letters[-1]
    assert not constraint.mask()[last]
    with pytest.raises(GrammarError):
        constraint.advance(last)
    # Control: the grammar alone allows it.
    assert constraint._inner.mask()[last]
    twin = constraint.copy()
    assert not twin.mask()[last]
    # Another character that begins with the same bytes, and the marker's last byte once more.
    for token in small.encode("｝")[-1:] + letters[:-1]:
        twin.advance(token)
    assert not twin.mask()[last]


def test_a_schema_that_no_parameters_express_keeps_its_first_line(small, seed):
    odd = CalledTool("odd", {"anyOf": [{"type": "object"}, {"type": "object"}]})
    refused = CalledTool("refused", {"properties": {"a": {"not": STRING}}})
    constraint, loose = calls_constraint(small, [odd, refused, TOOLS[3]])
    reasons = dict(loose)
    assert set(reasons) == {"odd", "refused"}
    assert "anyOf" in reasons["odd"]
    assert "not" in reasons["refused"]
    names = set()
    for number in range(30):
        walker, rng, text = constraint.copy(), random.Random(seed + number), ""
        while not walker.is_finished and "</" not in text and '">\n' not in text:
            allowed = walker.mask().nonzero()[:, 0].tolist()
            token = rng.choice(allowed)
            walker.advance(token)
            text += small.decode([token])
        names.add(re.match(f'<{DSML} invoke name="(\\w+)">', text)[1])
        if "optional" not in text:
            # Free: any text, and the end.
            assert walker.mask()[small.eos_id]
            assert walker.mask()[small.encode("z")[0]]
    assert names == {"odd", "refused", "optional"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "array"},
        {"properties": {'a"b': STRING}},
        {"properties": {"a\nb": STRING}},
        {"properties": {"a": {"$ref": "#/$defs/gone"}}},
        {"required": ["a"], "properties": {}, "additionalProperties": False},
        {"properties": {"a": {"const": f"</{DSML}"}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"properties": {f"p{i}": STRING for i in range(1500)}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_format_cannot_hold_is_loose_with_a_reason(parameters):
    grammar = call_grammar([CalledTool("f", parameters)], 5, parallel=True)
    ((name, reason),) = grammar.loose
    assert name == "f"
    assert reason


def test_arguments_that_are_required_and_not_described_may_be_anything(small):
    tools = [CalledTool("f", {"type": "object", "required": ["x"]})]
    constraint, loose = calls_constraint(small, tools, parallel=False)
    assert not loose
    for number in range(5):
        ((_, arguments),) = calls_of(
            small.decode(drawn(constraint.copy(), small, random.Random(number)))
        )
        assert set(arguments) == {"x"}
