"""Chat bodies as agents send them, notes in a header, and errors in each protocol's own words."""

from __future__ import annotations

import json

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finwhale.serve.anthropic_api import anthropic_body
from finwhale.serve.errors import InvalidRequestError
from finwhale.serve.notes import MAX_NOTE, NOTE_HEADER, left_out, note_headers
from finwhale.serve.openai_api import chat_error, completion_error
from finwhale.serve.responses_api import responses_error
from finwhale.serve.schema import ChatBody, decode
from finwhale.text.prompt import render_prompt

USER = {"role": "user", "content": "q"}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def body_of(*messages, **fields):
    return decode(json.dumps({"messages": messages, **fields}).encode(), ChatBody)


def prompt_of(*messages, **fields):
    request = body_of(*messages, **fields).request("")
    return "".join(s.text for s in render_prompt(request.messages, tools=request.tools))


def assistant(**fields):
    return {"role": "assistant", **fields}


def test_a_developer_is_a_system():
    developer = {"role": "developer", "content": "Be brief."}
    assert prompt_of(developer, USER) == prompt_of({**developer, "role": "system"}, USER)
    assert prompt_of(developer, USER) != prompt_of(USER)


@pytest.mark.parametrize(
    "message",
    [
        assistant(content="no"),
        assistant(content=[{"type": "text", "text": "no"}]),
        assistant(content=[{"type": "output_text", "text": "no", "annotations": []}]),
        assistant(content=[{"type": "refusal", "refusal": "no"}]),
        assistant(content=None, refusal="no"),
        assistant(refusal="no"),
        assistant(content="no", refusal=None),
        assistant(content="no", refusal="never looked at beside a content"),
    ],
    ids=str,
)
def test_a_refusal_and_a_text_of_any_protocol_are_what_the_assistant_said(message):
    assert prompt_of(USER, message, USER) == prompt_of(USER, assistant(content="no"), USER)


def test_parts_of_the_responses_protocol_are_text_of_anybody():
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("user", "system"):
        want = prompt_of({"role": role, "content": [{**p, "type": "text"} for p in parts]}, USER)
        assert prompt_of({"role": role, "content": parts}, USER) == want


def test_thinking_parts_are_the_reasoning():
    thoughts = [{"type": "thinking", "thinking": "t"}, {"type": "redacted_thinking", "data": "?"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "r"}
    tools = {"tools": [FUNCTION]}
    plain = assistant(content="", reasoning_content="t", tool_calls=[call])
    want = prompt_of(USER, plain, result, **tools)
    spoken = assistant(content=thoughts, tool_calls=[call])
    assert prompt_of(USER, spoken, result, **tools) == want
    # Some servers and their clients call the field `reasoning`.
    renamed = assistant(content="", reasoning="t", tool_calls=[call])
    assert prompt_of(USER, renamed, result, **tools) == want
    without = assistant(content="", tool_calls=[call])
    assert prompt_of(USER, without, result, **tools) != want


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "refusal"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input_audio"),
        ({"role": "user", "content": [7]}, "None"),
        (assistant(content=[{"type": "text"}]), "text"),
        (assistant(content=[{"type": "thinking", "thinking": 5}]), "thinking"),
        (assistant(content=None), "content"),
    ],
    ids=str,
)
def test_a_part_that_is_no_text_is_refused_by_its_name(message, kind):
    with pytest.raises(ValueError, match=kind):
        prompt_of(message, USER)


def test_a_custom_tool_is_left_out_by_name_and_the_functions_stay():
    custom = {"type": "custom", "custom": {"name": "apply_patch"}}
    body = body_of(USER, tools=[custom, FUNCTION])
    assert body.request("").tools == [FUNCTION]
    assert body.request("").notes == ("tools left out: custom apply_patch",)
    assert body_of(USER, tools=[custom]).request("").tools is None
    assert body_of(USER, tools=[FUNCTION]).request("").notes == ()


def test_one_call_at_a_time_is_passed_on():
    for asked, want in ((None, True), (True, True), (False, False)):
        assert body_of(USER, parallel_tool_calls=asked).request("").parallel_tool_calls is want


@pytest.mark.parametrize(
    ("metadata", "is_served"),
    [
        ({str(n): "" for n in range(16)}, True),
        ({str(n): "" for n in range(17)}, False),
        ({"k" * 64: "v" * 512}, True),
        ({"k" * 65: ""}, False),
        ({"k": "v" * 513}, False),
    ],
    ids=["16", "17", "longest", "key", "value"],
)
def test_metadata_has_the_limits_of_openai(metadata, is_served):
    body = body_of(USER, metadata=metadata)
    if is_served:
        body.request("")
        return
    with pytest.raises(InvalidRequestError) as caught:
        body.request("")
    assert caught.value.param == "metadata"


def refused(message, param):
    return InvalidRequestError(message, param=param)


TOO_LONG = ("messages: got 9 tokens, expected 8", "messages")
NO_MEMBER = ("messages[3].tool_calls: got 7", "messages")
CONVERSATION = ("conversation: Thinking mode", "messages")
SCHEMA = ("schema: got a cycle", "response_format")
LIMIT = ("max_tokens: got 9, expected 8", "max_tokens")
EFFORT = ("effort: got 'huge'", "reasoning_effort")
STOP = ("stop: got 17 texts", "stop")
OWN = ("tools: got 'x'", "tools")


@pytest.mark.parametrize(
    ("write", "error", "param", "message"),
    [
        (chat_error, TOO_LONG, "messages", TOO_LONG[0]),
        (chat_error, NO_MEMBER, "messages", NO_MEMBER[0]),
        (chat_error, CONVERSATION, "messages", "messages: Thinking mode"),
        (chat_error, SCHEMA, "response_format", "response_format: got a cycle"),
        (chat_error, EFFORT, "reasoning_effort", "reasoning_effort: got 'huge'"),
        (chat_error, STOP, "stop", STOP[0]),
        (completion_error, TOO_LONG, "prompt", "prompt: got 9 tokens, expected 8"),
        (completion_error, LIMIT, "max_tokens", LIMIT[0]),
        (responses_error, TOO_LONG, "input", "input: got 9 tokens, expected 8"),
        (responses_error, NO_MEMBER, "input", "input: got 7"),
        (responses_error, CONVERSATION, "input", "input: Thinking mode"),
        (responses_error, SCHEMA, "text.format", "text.format: got a cycle"),
        (responses_error, LIMIT, "max_output_tokens", "max_output_tokens: got 9, expected 8"),
        (responses_error, EFFORT, "reasoning.effort", "reasoning.effort: got 'huge'"),
        (responses_error, OWN, "tools", OWN[0]),
    ],
)
def test_an_error_names_the_field_as_its_protocol_does(write, error, param, message):
    told = write(refused(*error))["error"]
    assert (told["param"], told["message"]) == (param, message)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NO_MEMBER, "messages: got 7"),
        (CONVERSATION, "messages: Thinking mode"),
        (SCHEMA, "output_config.format: got a cycle"),
        (EFFORT, "output_config.effort: got 'huge'"),
        (STOP, "stop_sequences: got 17 texts"),
        (("messages.0.content: got 7", "messages"), "messages.0.content: got 7"),
    ],
)
def test_an_error_of_a_message_names_the_field_in_its_sentence(error, message):
    assert anthropic_body(refused(*error))["error"]["message"] == message


def test_a_note_is_one_printable_bounded_line_and_none_without_notes():
    assert note_headers((), "req-1") == {}
    assert left_out("tools", []) == ()
    assert left_out("tools", ["a", "b", "a"]) == ("tools left out: a, b",)
    names = [f"n{number}" for number in range(100)]
    assert left_out("tools", names)[0].endswith("n7 and 92 more")
    notes = ("thinking was switched off", *left_out("tools", ["custom zürich\r\nx-evil: 1"]))
    told = note_headers(notes, "req-1")[NOTE_HEADER]
    assert told == "thinking was switched off; tools left out: custom z?rich??x-evil: 1"
    for length in (MAX_NOTE, MAX_NOTE + 1, 100_000):
        told = note_headers(("x" * length,), "req-1")[NOTE_HEADER]
        assert len(told) == MAX_NOTE
        assert told.endswith("...") == (length > MAX_NOTE)


@given(st.lists(st.text(max_size=3) | st.text(min_size=505, max_size=520), max_size=3))
@example(["", " "])
@example(["x" * 508 + " " + "x" * 9])
def test_any_note_is_a_header_that_http_allows(names):
    for value in note_headers(left_out("tools", names), "req-1").values():
        # What the server writes its answers with; it raises for a value that HTTP does not allow.
        h11.Response(status_code=200, headers=[(NOTE_HEADER, value)])


def test_the_log_of_a_note_has_no_words_of_the_client(caplog):
    with caplog.at_level("INFO", logger="finwhale.serve"):
        note_headers(left_out("tools", ["custom secret"]), "req-7")
    assert "req-7" in caplog.text
    assert "tools left out" in caplog.text
    assert "secret" not in caplog.text
