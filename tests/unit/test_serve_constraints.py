"""What a request may demand of its answer, and what is refused with the field at fault."""

from __future__ import annotations

import json
import sys

import deepseek_recipe
import pytest

from finwhale.checkpoint import load_model
from finwhale.checkpoint.shipped import shipped_model
from finwhale.config.server import ServerConfig
from finwhale.engine import Engine, EngineConfig
from finwhale.serve import preparation
from finwhale.serve.errors import InvalidRequestError
from finwhale.serve.planning import ChatRequest, CompletionRequest, Sampling
from finwhale.serve.preparation import Preparer
from finwhale.text import grammar
from finwhale.text.output_parser import OutputParser
from finwhale.text.prompt import render_prompt
from finwhale.text.special_tokens import DSML, END_THINK, THINK
from finwhale.text.tokenizer import Tokenizer
from tests.scripted_engine import CONTEXT_TOKENS, USER, VOCAB_SIZE, WEATHER, byte_tokenizer

STRING = {"type": "string"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
OK = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def preparer(tokenizer) -> Preparer:
    return Preparer(tokenizer, ServerConfig(), vocab_size=VOCAB_SIZE, context_tokens=CONTEXT_TOKENS)


def formed(schema: dict, **more) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


def function(parameters: dict, **more) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def refused(preparer: Preparer, **fields) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        preparer.chat(ChatRequest(**{"messages": USER, **fields}))
    return caught.value


def text_of(tokenizer: Tokenizer, prompt: list[int]) -> str:
    return tokenizer.decode(prompt)


def allowed(prepared) -> list[int]:
    return prepared.params.constraint.mask().nonzero()[:, 0].tolist()


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_without_tools_is_refused(preparer, tools, choice):
    error = refused(preparer, tools=tools, tool_choice=choice)
    assert error.param == "tool_choice"
    assert "expected a tool of this request" in error.message


@pytest.mark.parametrize(
    "choice",
    [{"type": "function", "function": {"name": "nobody"}}, {"type": "function"}, "any", "x"],
)
def test_a_choice_that_names_no_declared_tool_is_refused(preparer, choice):
    assert refused(preparer, tools=[WEATHER], tool_choice=choice).param == "tool_choice"


def test_choices_that_force_nothing_need_no_tools(preparer):
    for choice in (None, "auto", "none"):
        prepared = preparer.chat(ChatRequest(messages=USER, tool_choice=choice))
        assert prepared.params.constraint is None
        assert prepared.notes == ()


@pytest.mark.parametrize("thinking", [None, True])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_turns_thinking_off_and_says_so(preparer, tokenizer, thinking, choice):
    prepared = preparer.chat(
        ChatRequest(messages=USER, tools=[WEATHER], tool_choice=choice, thinking=thinking)
    )
    (note,) = prepared.notes
    assert note.startswith("thinking is off")
    assert text_of(tokenizer, prepared.prompt).endswith(f"{END_THINK}\n\n<{DSML} calls>\n")
    off = preparer.chat(
        ChatRequest(messages=USER, tools=[WEATHER], tool_choice=choice, thinking=False)
    )
    assert (off.prompt, off.notes) == (prepared.prompt, ())


def test_the_strict_flag_keeps_the_refusal(tokenizer):
    config = ServerConfig(strict_tool_choice=True)
    strict = Preparer(tokenizer, config, vocab_size=VOCAB_SIZE, context_tokens=CONTEXT_TOKENS)
    error = refused(strict, tools=[WEATHER], tool_choice="required")
    assert error.param == "tool_choice"
    assert "thinking" in error.message
    request = ChatRequest(messages=USER, tools=[WEATHER], tool_choice="required", thinking=False)
    assert strict.chat(request).notes == ()


def test_a_tool_whose_arguments_follow_no_grammar_is_named(preparer):
    odd = function({"type": "object", "oneOf": [{"required": ["a"]}]})
    request = ChatRequest(messages=USER, tools=[odd], tool_choice="required", thinking=False)
    (note,) = preparer.chat(request).notes
    assert note.startswith("arguments that follow no grammar: f (")


def test_without_the_library_the_first_line_is_forced_and_a_note_says_so(
    preparer, tokenizer, monkeypatch
):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammar._vocabulary.cache_clear()
    monkeypatch.setattr(grammar, "_templates", grammar._Templates(grammar.MAX_CACHE_BYTES))
    request = ChatRequest(messages=USER, tools=[WEATHER], tool_choice="required", thinking=False)
    prepared = preparer.chat(request)
    assert any("llguidance" in note for note in prepared.notes)
    walker = prepared.params.constraint.copy()
    line = f'<{DSML} invoke name="get_weather">\n'
    for token in tokenizer.encode(line, parse_markers=True):
        assert walker.mask().nonzero()[:, 0].tolist() == [token]
        walker.advance(token)
    assert walker.mask().all()
    assert refused(preparer, response_format=formed(OK)).code == "not_installed"


def test_one_call_at_a_time_is_told_to_grammar_and_parser(preparer, monkeypatch, tokenizer):
    asked = []

    def parser(**settings):
        asked.append(settings.pop("max_calls", None))
        return OutputParser(**settings)

    monkeypatch.setattr(preparation, "OutputParser", parser)
    empty = function({"type": "object"})
    text = f'<{DSML} invoke name="f">\n\n</{DSML} invoke>\n'
    for parallel in (True, False):
        request = ChatRequest(
            messages=USER,
            tools=[empty],
            tool_choice="required",
            parallel_tool_calls=parallel,
            thinking=False,
        )
        walker = preparer.chat(request).params.constraint.copy()
        for token in tokenizer.encode(text, parse_markers=True):
            walker.advance(token)
        # Another call begins with `<`, the end of the block with `</`.
        walker.advance(tokenizer.encode("<")[0])
        mask = walker.mask()
        assert mask[tokenizer.encode("/")[0]]
        assert bool(mask[tokenizer.marker_id(DSML)]) is parallel
    assert asked == [None, 1]


PET = {"type": "object", "properties": {"name": STRING, "next": {"$ref": "#/$defs/Pet"}}}
PET_OR_NULL = {"anyOf": [{"$ref": "#/$defs/Pet"}, {"type": "null"}]}
STRICT = {
    "nullable model": {"type": "object", "properties": {"pet": PET_OR_NULL}, "$defs": {"Pet": PET}},
    "formats": {
        "type": "object",
        "properties": {
            name: {**STRING, "format": name}
            for name in (
                "date",
                "time",
                "date-time",
                "duration",
                "email",
                "hostname",
                "ipv4",
                "ipv6",
                "uuid",
            )
        },
    },
    "bounds": {
        "type": "object",
        "properties": {
            "a": {"type": "number", "minimum": 0.5, "maximum": 9.5},
            "b": {"type": "integer", "multipleOf": 5},
            "c": {"type": "array", "items": STRING, "minItems": 1, "maxItems": 3},
            "d": {**STRING, "pattern": "^[a-z]+$"},
            "e": {"type": ["object", "null"], "properties": {"x": STRING}},
            "f": {"enum": ["a", 1, None]},
            "g": {"const": "x"},
        },
    },
    "no fields": {"type": "object", "properties": {}},
    "recursive": {
        "type": "object",
        "properties": {"child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    },
    "flat": {"type": "object", "properties": {"city": STRING}},
}


def test_strict_tools_stand_beside_others(preparer, tokenizer):
    """The prompt's library refuses the mixture; each tool is shown all the same."""
    names = iter("abcd")
    tools = [WEATHER] + [
        {
            "type": "function",
            "function": {**function(STRICT[key], strict=True)["function"], "name": next(names)},
        }
        for key in ("flat", "nullable model")
    ]
    for declared in (tools, tools[1:], tools[::-1]):
        prepared = preparer.chat(ChatRequest(messages=USER, tools=declared))
        text = text_of(tokenizer, prepared.prompt)
        for tool in declared:
            assert f'{{"name": "{tool["function"]["name"]}"' in text
        assert '"$defs": {"Pet"' in text
        assert '"anyOf"' in text


@pytest.mark.parametrize("name", STRICT)
def test_what_the_strict_subset_has_is_admitted_everywhere(preparer, name):
    schema = STRICT[name]
    preparer.chat(ChatRequest(messages=USER, response_format=formed(schema, strict=True)))
    tool = function(schema, strict=True)
    for choice in (None, "required"):
        prepared = preparer.chat(ChatRequest(messages=USER, tools=[tool], tool_choice=choice))
        assert not any("no grammar" in note for note in prepared.notes)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (
            {"type": "object", "properties": {"a": STRING, "b": STRING}, "required": ["a"]},
            "required",
        ),
        (
            {"type": "object", "properties": {}, "additionalProperties": True},
            "additionalProperties",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "object", "additionalProperties": STRING}},
            },
            "properties.a.additionalProperties",
        ),
        ({"type": "object", "properties": {"a": {"allOf": [STRING]}}}, "properties.a.allOf"),
        ({"type": "object", "properties": {"a": {}}}, "properties.a"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "properties.a.type"),
        ({"type": "object", "properties": {"a": {"type": "array"}}}, "properties.a.items"),
        (
            {"type": "object", "properties": {"a": {**STRING, "format": "uri"}}},
            "properties.a.format",
        ),
        ({"type": "array", "items": STRING}, "type"),
        (
            {"type": "object", "properties": {"a": PET_OR_NULL}, "$defs": {"Pet": {"type": 1}}},
            "$defs.Pet.type",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_strict_subset_refuses_is_refused_with_its_path(preparer, schema, path):
    error = refused(preparer, response_format=formed(schema, strict=True))
    assert error.param == "response_format"
    assert error.message.startswith(f"response_format.json_schema.schema.{path}: strict: ")
    error = refused(preparer, tools=[WEATHER, function(schema, strict=True)])
    assert error.param == "tools"
    assert error.message.startswith(f"tools[1].function.parameters.{path}: strict: ")


def test_without_the_word_a_schema_is_not_held_to_the_subset(preparer):
    schema = {"type": "object", "properties": {"a": STRING, "b": {"allOf": [STRING]}}}
    preparer.chat(ChatRequest(messages=USER, tools=[function(schema)]))
    preparer.chat(ChatRequest(messages=USER, response_format=formed(schema)))


def test_strict_says_what_it_means_to_the_grammar(preparer, tokenizer):
    """Spec section B.2: strict adds additionalProperties false and fills required."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}}
    for strict, ends in ((True, False), (False, True)):
        request = ChatRequest(
            messages=USER, response_format=formed(schema, strict=strict), thinking=False
        )
        walker = preparer.chat(request).params.constraint.copy()
        for token in tokenizer.encode('{"a": true'):
            walker.advance(token)
        assert bool(walker.mask()[tokenizer.encode("}")[0]]) is ends


def test_a_format_is_shown_as_it_was_sent_and_a_strict_tool_as_the_library_writes_it():
    schema = STRICT["nullable model"]
    text = "".join(s.text for s in render_prompt(USER, response_format=formed(schema, strict=True)))
    assert json.dumps(schema) in text
    # The order of keys is the library's own, of spec section B.2.
    tool = function(STRICT["flat"], strict=True)
    line = '{"type": "object", "properties": {"city": {"type": "string"}}, '
    line += '"additionalProperties": false, "required": ["city"]}'
    assert line in "".join(s.text for s in render_prompt(USER, tools=[tool]))


def test_the_prompt_of_what_the_library_takes_is_the_librarys(preparer):
    """Strict schemas of its own subset: byte for byte what it renders when nobody steps between."""
    inner = {"type": "object", "description": "d", "properties": {"x": {**STRING, "default": "y"}}}
    union = {"anyOf": [inner, {"type": "null"}]}
    schemas = [
        STRICT["flat"],
        {"type": "object", "properties": {"b": {"type": "integer", "minimum": 1}, "a": union}},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/I", "description": "e"}},
            "$defs": {"I": inner},
            "required": ["a"],
            "additionalProperties": False,
        },
    ]
    for schema in schemas:
        for fields in (
            {"tools": [function(schema, strict=True)]},
            {"response_format": formed(schema, strict=True)},
        ):
            body = {"model": "DeepSeek-V4.1-Flash", "messages": USER, **fields}
            request = deepseek_recipe.ChatCompletionRequest(body)
            conversation = request.convert(deepseek_recipe.ConversionOptions()).conversation
            encoding = deepseek_recipe.DeepseekV41Encoding()
            wanted = encoding.render_conversation(conversation).prompt
            assert "".join(s.text for s in render_prompt(USER, **fields)) == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, {"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"response_format": {"type": "nothing"}}, "response_format"),
        ({"response_format": formed({"$ref": "#"}), "thinking": False}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "(a{1000}){1000}"}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_refusal_names_the_field_at_fault(preparer, fields, param):
    assert refused(preparer, **fields).param == param


def test_a_schema_over_a_limit_is_refused_and_a_wide_one_is_served(tokenizer):
    wide = Preparer(tokenizer, ServerConfig(), vocab_size=VOCAB_SIZE, context_tokens=1 << 20)
    schema = {"type": "object", "properties": {f"p{i}": STRING for i in range(10_000)}}
    error = refused(wide, response_format=formed(schema), thinking=False)
    assert error.param == "response_format"
    assert "10000 optional properties" in error.message
    schema = {"type": "object", "properties": {f"p{i}": STRING for i in range(499)}}
    request = ChatRequest(messages=USER, response_format=formed(schema), thinking=False)
    assert allowed(wide.chat(request)) == tokenizer.encode("{")


def chain(links: int, depth: int) -> dict:
    """Definitions that each lead to the next one, `depth` lists deep."""
    table: dict = {f"d{links}": STRING}
    for i in range(links):
        link: dict = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(depth):
            link = {"type": "array", "items": link}
        table[f"d{i}"] = link
    return {"type": "object", "$defs": table, "properties": {"x": {"$ref": "#/$defs/d0"}}}


@pytest.mark.parametrize(("links", "depth"), [(3000, 0), (201, 0), (190, 20), (30, 40)])
def test_a_chain_of_references_that_overruns_a_stack_is_refused(preparer, links, depth):
    """The prompt's library recurses over it and takes the whole process along."""
    schema = chain(links, depth)
    for strict in (None, True, False):
        error = refused(preparer, response_format=formed(schema, strict=strict), thinking=False)
        assert error.param == "response_format"
        error = refused(preparer, tools=[WEATHER, function(schema, strict=strict)])
        assert error.message.startswith("tools[1].function.parameters: got ")


def test_a_chain_of_references_within_the_limits_is_served(preparer):
    for links, depth in ((150, 0), (20, 20)):
        schema = chain(links, depth)
        preparer_ = Preparer(
            preparer.tokenizer, ServerConfig(), vocab_size=VOCAB_SIZE, context_tokens=1 << 16
        )
        request = ChatRequest(messages=USER, response_format=formed(schema), thinking=False)
        assert allowed(preparer_.chat(request)) == preparer.tokenizer.encode("{")
        preparer_.chat(ChatRequest(messages=USER, tools=[function(schema)]))


def prefixed(content: str, **more) -> list[dict]:
    return [*USER, {"role": "assistant", "content": content, "prefix": True, **more}]


def test_an_answer_goes_on_from_its_prefix_under_the_schema(preparer, tokenizer):
    whole = '{"ok": true}'
    for thinking in (True, False):
        # With thinking an empty prefix opens a reasoning.
        for cut in range(thinking, len(whole) + 1):
            request = ChatRequest(
                messages=prefixed(whole[:cut]), response_format=formed(OK), thinking=thinking
            )
            prepared = preparer.chat(request)
            assert text_of(tokenizer, prepared.prompt).endswith(END_THINK + whole[:cut])
            walker = prepared.params.constraint.copy()
            for token in tokenizer.encode(whole[cut:]):
                walker.advance(token)
            assert walker.is_finished


def test_a_prefix_that_begins_no_valid_answer_is_refused(preparer):
    for form in (formed(OK), {"type": "regex", "regex": "a+"}):
        for content in ("no", ' {"'):
            error = refused(
                preparer, messages=prefixed(content), response_format=form, thinking=False
            )
            assert (error.param, "prefix" in error.message) == ("messages", True)


def test_a_grammar_waits_for_the_end_of_a_reasoning_that_a_prefix_opens(preparer, tokenizer):
    messages = [
        *USER,
        {"role": "assistant", "content": "", "reasoning_content": "so", "prefix": True},
    ]
    prepared = preparer.chat(ChatRequest(messages=messages, response_format=formed(OK)))
    text = text_of(tokenizer, prepared.prompt)
    walker = prepared.params.constraint.copy()
    if not text.endswith(THINK + "so"):
        pytest.fail(text[-40:])
    for token in tokenizer.encode(" far"):
        walker.advance(token)
    walker.advance(tokenizer.marker_id(END_THINK))
    assert walker.mask().nonzero()[:, 0].tolist() == tokenizer.encode("{")


def test_an_empty_system_message_alone_is_refused_in_its_own_words(preparer):
    error = refused(preparer, messages=[{"role": "system", "content": ""}])
    assert error.param == "messages"
    assert "empty system message" in error.message
    assert "recipe" not in error.message


@pytest.mark.parametrize("size", [5_000, 2_000_000])
def test_what_the_context_cannot_hold_names_the_field_of_its_request(preparer, size):
    text = "é" * size
    error = refused(preparer, messages=[{"role": "user", "content": text}])
    assert (error.param, error.code) == ("messages", "context_length_exceeded")
    with pytest.raises(InvalidRequestError) as caught:
        preparer.text(CompletionRequest(prompt=text))
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(InvalidRequestError) as caught:
        preparer.text(CompletionRequest(prompt=[5] * size))
    assert caught.value.param == "prompt"


def test_a_text_that_cannot_fit_is_not_encoded(tokenizer, monkeypatch):
    small = Preparer(tokenizer, ServerConfig(), vocab_size=VOCAB_SIZE, context_tokens=64)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("encoded"))
    most = 64 * tokenizer.longest_token_bytes
    parts = [{"type": "text", "text": "a" * most}, {"type": "text", "text": "b"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * most}}
    for message in (
        {"role": "user", "content": "a" * (most + 1)},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "aa", "tool_calls": [call]},
        {"role": "assistant", "content": "a", "reasoning_content": "é" * (most // 2)},
    ):
        error = refused(small, messages=[message])
        assert error.code == "context_length_exceeded"


@pytest.fixture(scope="module")
def mini():
    """The shipped model with its tokenizer, as the server runs it."""
    folder = shipped_model()
    model = load_model(folder).model
    engine = Engine(model, EngineConfig(num_blocks=256))
    text = model.config.text_config
    preparer = Preparer(
        Tokenizer.from_file(folder),
        ServerConfig(),
        vocab_size=text.vocab_size,
        context_tokens=text.max_position_embeddings,
    )
    return engine, preparer


def answered(mini, request: ChatRequest) -> tuple[str, list[int]]:
    engine, preparer = mini
    prepared = preparer.chat(request)
    ((results,),) = engine.generate([prepared.prompt], prepared.params)
    ids = [result.token for result in results]
    return preparer.tokenizer.decode(ids, skip_hidden=True), ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("says_closed", [False, True])
def test_a_small_schema_ends_in_a_few_tokens(mini, temperature, says_closed):
    sampling = Sampling(max_tokens=120, temperature=temperature, seed=1)
    messages = [{"role": "user", "content": "Give me JSON."}]
    schema = {k: v for k, v in OK.items() if says_closed or k != "additionalProperties"}
    text, ids = answered(
        mini,
        ChatRequest(
            messages=messages, response_format=formed(schema), thinking=False, sampling=sampling
        ),
    )
    assert set(json.loads(text)) == {"ok"}
    assert len(ids) < 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_shipped_model_calls_a_forced_tool_with_valid_arguments(mini, temperature):
    unit = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    schema = {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": unit},
        "required": ["days", "unit"],
    }
    request = ChatRequest(
        messages=[{"role": "user", "content": "What will the weather be?"}],
        tools=[function(schema)],
        tool_choice="required",
        parallel_tool_calls=True,
        sampling=Sampling(max_tokens=200, temperature=temperature, seed=1),
    )
    text, _ = answered(mini, request)
    parser = OutputParser(thinking=False, tools_declared=True, starts_in_calls=True)
    deltas = [*parser.feed(text), *parser.finish()]
    names = [delta.name for delta in deltas if delta.kind == "tool_call"]
    assert set(names) == {"f"}
    first = "".join(d.text for d in deltas if d.kind == "arguments" and d.index == 0)
    arguments = json.loads(first)
    assert 1 <= arguments["days"] <= 9
    assert arguments["unit"] in unit["enum"]
