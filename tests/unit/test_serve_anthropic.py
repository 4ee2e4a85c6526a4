"""Bodies of the Anthropic protocol against DeepSeek's own converter and stream writer."""

from __future__ import annotations

import json
from dataclasses import replace

import deepseek_recipe
import pytest

from finwhale.config.server import ServerConfig
from finwhale.serve.anthropic_api import AnswerBlocks, anthropic_body, claude_model
from finwhale.serve.errors import (
    EngineFailedError,
    InvalidRequestError,
    OverloadedError,
    ServeError,
    TooLargeError,
)
from finwhale.serve.messages_body import ERROR_MARK, CountTokensBody, MessagesBody
from finwhale.serve.preparation import Preparer
from finwhale.serve.schema import decode
from finwhale.text.output_parser import OutputParser
from finwhale.text.prompt import render_prompt, thinking_and_effort
from finwhale.text.special_tokens import DSML, IMAGE
from tests.scripted_engine import VOCAB_SIZE, byte_tokenizer

TOOL = {
    "name": "f",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}},
}
CALL = (
    f'\n\n<{DSML} calls>\n<{DSML} invoke name="f">\n'
    f'<{DSML} parameter name="x" string="true">v</{DSML} parameter>\n'
    f"</{DSML} invoke>\n</{DSML} calls>"
)
ONE_CALL = CALL.removesuffix(f"</{DSML} calls>")
IMAGE_BLOCK = {"type": "image", "source": {"type": "url", "url": "x"}}
PDF_BLOCK = {"type": "document", "source": {"type": "url", "url": "x"}}
OFF = {"thinking": {"type": "disabled"}}
USER = {"role": "user", "content": "q"}


def text(words):
    return {"type": "text", "text": words}


def thought(words):
    return {"type": "thinking", "thinking": words, "signature": "s"}


def use(name, **arguments):
    return {"type": "tool_use", "id": name, "name": "f", "input": arguments}


def result(name, content, **fields):
    return {"type": "tool_result", "tool_use_id": name, "content": content, **fields}


LOOP = [
    USER,
    {
        "role": "assistant",
        "content": [thought("t"), text("a"), text("b"), use("1", x="é"), use("2")],
    },
    {
        "role": "user",
        "content": [
            result("2", [text("p"), text("q")]),
            result("1", "r", is_error=False),
            text("after"),
        ],
    },
]


def decode_body(**fields):
    return decode(json.dumps({"max_tokens": 9, **fields}).encode(), MessagesBody)


def request_of(**fields):
    return decode_body(**fields).request("")


def prompt_of(request):
    thinking, effort = thinking_and_effort(request.thinking, request.effort)
    segments = render_prompt(
        request.messages,
        tools=request.tools,
        thinking=thinking,
        effort=effort,
        response_format=request.response_format,
        tool_choice=request.tool_choice,
    )
    return "".join(segment.text for segment in segments)


def prompt_of_recipe(kind, body):
    markers = deepseek_recipe.SpecialTokens(image=IMAGE)
    options = deepseek_recipe.ConversionOptions().with_special_tokens(markers)
    conversation = kind({"model": "DeepSeek-V4.1-Flash", **body}).convert(options).conversation
    encoding = deepseek_recipe.DeepseekV41Encoding().with_special_tokens(markers)
    return encoding.render_conversation(conversation).prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER]},
        {"messages": [USER], **OFF},
        {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [USER], "output_config": {"effort": "low"}},
        {"messages": [USER], "thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
        {"messages": [USER], "system": "s"},
        {"messages": [USER], "system": [text("a"), {**text("b"), "cache_control": {}}]},
        {"messages": [{"role": "user", "content": [text("a"), text("b")]}], **OFF},
        {"messages": [{"role": "user", "content": "<think><｜User｜>"}]},
        {"messages": [USER, {"role": "assistant", "content": "prefill"}]},
        {"messages": LOOP, "tools": [TOOL]},
        {"messages": LOOP, "tools": [TOOL], **OFF},
        {
            "messages": [*LOOP, {"role": "assistant", "content": [thought("u"), text("c")]}, USER],
            "tools": [TOOL],
        },
        {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}, **OFF},
        {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "none"}},
        {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "auto"}},
    ],
)
def test_a_prompt_is_the_one_that_deepseeks_converter_writes(fields):
    want = prompt_of_recipe(deepseek_recipe.MessagesRequest, {"max_tokens": 9, **fields})
    assert prompt_of(request_of(**fields)) == want


def test_a_lost_system_text_would_be_seen_by_the_comparison():
    plain = prompt_of(request_of(messages=[USER]))
    assert plain != prompt_of(request_of(messages=[USER], system="s"))
    assert plain != prompt_of(request_of(messages=[USER], **OFF))


def test_any_tool_is_required_and_text_documents_and_redacted_blocks_are_read():
    request = request_of(messages=[USER], tools=[TOOL], tool_choice={"type": "any"}, **OFF)
    assert request.tool_choice == "required"
    document = {"type": "document", "source": {"type": "text", "data": "D"}}
    redacted = {"type": "redacted_thinking", "data": "?"}
    turns = [
        {"role": "user", "content": [document, text("e")]},
        {"role": "assistant", "content": [redacted, text("y")]},
        USER,
    ]
    prompt = prompt_of(request_of(messages=turns))
    assert "D\n\ne<" in prompt
    assert "</think>y" in prompt
    assert "?" not in prompt


def result_text(content, **fields):
    """What the model reads as the result of a call."""
    calls = {"role": "assistant", "content": [use("1")]}
    turns = [USER, calls, {"role": "user", "content": [result("1", content, **fields)]}]
    prompt = prompt_of(request_of(messages=turns))
    return prompt.partition("<tool_result>")[2].partition("</tool_result>")[0]


def test_text_of_every_kind_is_read_inside_a_tools_result():
    plain = {"type": "text", "media_type": "text/plain", "data": "D"}
    found = {"type": "search_result", "source": "S", "title": "T", "content": [text("x")]}
    assert result_text([{"type": "document", "source": plain}]) == "D"
    blocks = {"type": "content", "content": [text("b"), text("c")]}
    assert result_text([{"type": "document", "source": blocks}]) == "b\n\nc"
    assert result_text([found]) == "T\nS\n\nx"
    assert result_text([text("one"), {"type": "tool_reference", "tool_name": "f"}]) == "one\n\nf"
    for content in ([IMAGE_BLOCK], [PDF_BLOCK], [{"type": "browser_state"}]):
        with pytest.raises(InvalidRequestError, match=r"images|browser_state"):
            result_text(content)


def test_a_failed_tool_says_so_before_its_text_and_once():
    assert result_text("r") == "r"
    assert ERROR_MARK == "Error: "
    for content in ("r", [text("r")], "Error: r"):
        assert result_text(content, is_error=True) == "Error: r"
    for nothing in ("", [], None):
        assert result_text(nothing, is_error=True) == "Error: "
    assert result_text([text("r"), text("s")], is_error=True) == "Error: r\n\ns"


def test_tools_of_anthropics_servers_are_left_out_by_name():
    foreign = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "bash_20250124", "name": "bash"},
    ]
    body = decode_body(messages=[USER], tools=[foreign[0], TOOL, foreign[1]])
    want = request_of(messages=[USER], tools=[TOOL])
    assert replace(body.request(""), notes=()) == want
    assert body.request("").notes == ("tools left out: web_search_20250305, bash_20250124",)
    assert decode_body(messages=[USER], tools=[TOOL]).request("").notes == ()
    assert decode_body(messages=[USER], tools=foreign).request("").tools is None


@pytest.mark.parametrize("kind", ["auto", "any", "tool"])
def test_one_call_at_a_time_is_passed_on(kind):
    choice = {"type": kind, "name": "f"}
    asked = {"messages": [USER], "tools": [TOOL]}
    assert request_of(**asked, tool_choice=choice).parallel_tool_calls
    single = {**choice, "disable_parallel_tool_use": True}
    assert not request_of(**asked, tool_choice=single).parallel_tool_calls


def test_a_count_is_asked_for_with_the_same_conversation_and_no_limit():
    fields = {"messages": LOOP, "tools": [TOOL], "system": "s", **OFF}
    counted = decode(json.dumps({**fields, "max_tokens": 5}).encode(), CountTokensBody).request("")
    assert prompt_of(counted) == prompt_of(request_of(**fields))
    assert decode(json.dumps(fields).encode(), CountTokensBody).request("") == counted


def test_sampling_limits_and_a_schema_are_passed_on():
    schema = {"type": "object"}
    request = request_of(
        messages=[USER],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        stop_sequences=["x", "y"],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.25)
    assert (sampling.top_k, sampling.stop) == (7, ("x", "y"))
    assert request.response_format == {"type": "json_schema", "json_schema": {"schema": schema}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 393_217}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"input_schema": {}}]}, "tools"),
        (
            {
                "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"metadata": {"user_id": "u" * 513}}, "metadata"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "user", "content": [use("1")]}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": [result("1", "r")]}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_field(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        request_of(**{"messages": [USER], **fields})
    assert caught.value.param == param


FOREIGN = (None, 0, -1.5, 10**40, True, "", "x", [], {}, [1], {"type": "text"}, {"name": 7})


def places_of(value, place=()):
    """Every place inside nested objects and lists."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in pairs:
        yield (*place, name)
        if isinstance(inner, (dict, list)):
            yield from places_of(inner, (*place, name))


def with_value(whole, place, value):
    """The same with `value` at a place."""
    if not place:
        return value
    changed = whole.copy()
    changed[place[0]] = with_value(whole[place[0]], place[1:], value)
    return changed


def count_served_and_refused(body, kind, tokenizer):
    """How many changed bodies are served and refused; any other exception fails the test."""
    preparer = Preparer(tokenizer, ServerConfig(), vocab_size=VOCAB_SIZE, context_tokens=4096)
    counts = {"served": 0, "refused": 0}
    for place in [(), *places_of(body)]:
        for value in FOREIGN if place else [body]:
            raw = json.dumps(with_value(body, place, value)).encode()
            try:
                preparer.chat(decode(raw, kind).request(""))
                counts["served"] += 1
            except ServeError:
                counts["refused"] += 1
    return counts


def test_a_foreign_value_at_any_place_is_served_or_refused_and_never_an_exception(tmp_path):
    body = {
        "max_tokens": 5,
        "model": "m",
        "system": [text("s")],
        "messages": LOOP,
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled"},
        "output_config": {"effort": "max"},
        "stop_sequences": ["a"],
        "top_k": 3,
    }
    counts = count_served_and_refused(body, MessagesBody, byte_tokenizer(tmp_path))
    assert min(counts.values()) > 20


def events_of(parts, tools_declared, reason):
    parser = OutputParser(thinking=True, tools_declared=tools_declared)
    blocks = AnswerBlocks("ID")
    deltas = [delta for part in parts for delta in parser.feed(part)] + parser.finish(reason)
    events = [event for delta in deltas for event in blocks.take([delta])]
    return [*events, *blocks.close()], blocks.content()


def events_of_recipe(kind, body, parts, finish):
    body = {**body, "model": "DeepSeek-V4.1-Flash"}
    converted = kind(body).convert(deepseek_recipe.ConversionOptions())
    writer = kind.chunk_generator(converted, "ID", "M")
    if kind is deepseek_recipe.ResponsesRequest:
        writer = writer.with_echo(kind(body).echo())
    stream = deepseek_recipe.StreamProcessor(writer, converted.parsing_options)
    events = stream.push(deepseek_recipe.InferenceChunk.ready())
    for part in parts:
        events += stream.push(deepseek_recipe.InferenceChunk.text(part, 1))
    events += stream.push(deepseek_recipe.InferenceChunk.finish(finish)) + stream.finish()
    return [json.loads(event.to_json()) for event in events]


def joined(events):
    """Events with neighbouring deltas of one block joined, and without the random call ids."""
    found = []
    for event in events:
        event = json.loads(json.dumps(event))
        event.get("content_block", {}).pop("id", None)
        last = found[-1] if found else {}
        kinds = [each.get("delta", {}).get("type") for each in (event, last)]
        if kinds[0] and kinds[0] == kinds[1] and event["index"] == last["index"]:
            name = next(key for key in event["delta"] if key != "type")
            last["delta"][name] += event["delta"][name]
        else:
            found.append(event)
    return found


@pytest.mark.parametrize(
    ("parts", "is_cut"),
    [
        (["why", "</think>", "te", "xt"], False),
        (["why"], True),
        (["why</think>te", "xt", CALL], False),
        (["why", CALL], False),
        (["why</think>", f"{ONE_CALL}{CALL.partition('calls>')[2]}"], False),
    ],
    ids=["text", "cut", "call", "call-in-reasoning", "two-calls"],
)
def test_the_events_of_a_stream_are_those_of_deepseeks_writer(parts, is_cut):
    reason = deepseek_recipe.InferenceFinishReason
    want = events_of_recipe(
        deepseek_recipe.MessagesRequest,
        {"max_tokens": 9, "messages": [USER], "tools": [TOOL]},
        parts,
        reason.Length if is_cut else reason.Stop,
    )
    frame = ("message_start", "message_delta", "message_stop")
    want = [event for event in want if event["type"] not in frame]
    got, _ = events_of(parts, True, "length" if is_cut else "stop")
    assert joined(got) == joined(want)
    # Negative control: one piece left out is a difference.
    assert joined(events_of(parts[:-1], True, "stop")[0]) != joined(want)


def test_whole_blocks_hold_what_the_events_added():
    _, blocks = events_of(["why</think>text", CALL], True, "stop")
    assert blocks[0] == {"type": "thinking", "thinking": "why", "signature": "ID"}
    assert blocks[1] == {"type": "text", "text": "text"}
    assert json.loads(bytes(blocks[2]["input"])) == {"x": "v"}
    assert blocks[2]["name"] == "f"


def test_nothing_said_makes_no_block():
    # DeepSeek's writer opens a thinking block in any case; an empty one tells a reader nothing.
    assert events_of([], False, "stop") == ([], [])
    _, blocks = events_of(["</think>", "x"], False, "stop")
    assert blocks == [text("x")]


def test_a_claude_that_the_hosted_service_takes_for_flash_is_the_served_model():
    config = ServerConfig(model_names=("mine", "deepseek-flash"))
    for name in (None, "mine", "claude-sonnet-4-5", "claude-3-5-haiku-latest"):
        assert claude_model(name, config) == "mine"
    assert claude_model("deepseek-flash", config) == "deepseek-flash"
    for name in ("claude-opus-4-1", "gpt", "", "Claude"):
        with pytest.raises(InvalidRequestError):
            claude_model(name, config)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("m"), "invalid_request_error"),
        (TooLargeError("m"), "request_too_large"),
        (EngineFailedError("m"), "api_error"),
        (OverloadedError("m"), "overloaded_error"),
    ],
)
def test_an_error_has_the_type_that_the_protocol_names(error, kind):
    assert anthropic_body(error) == {"type": "error", "error": {"type": kind, "message": "m"}}
