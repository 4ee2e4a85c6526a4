"""Calls that a model writes wrong, read by the official packages, whole and as streams.

The streaming helpers of `openai` and `anthropic` parse arguments while they arrive and raise where
they are no JSON (cases2.md 148), so reading an answer to its end is the first check.
"""

from __future__ import annotations

import json

import pytest

from finwhale.text.special_tokens import DSML, END_THINK
from tests.e2e.test_server_anthropic import ON
from tests.e2e.test_server_anthropic import TOOL as ANTHROPIC_TOOL
from tests.e2e.test_server_anthropic import either as of_messages
from tests.e2e.test_server_responses import TOOL as RESPONSES_TOOL
from tests.e2e.test_server_responses import either as of_responses
from tests.scripted_engine import THINKING_OFF, USER, WEATHER

OPEN = f"\n\n<{DSML} calls>\n"
INVOKE = f'<{DSML} invoke name="get_weather">\n'
CITY = f'<{DSML} parameter name="city" string="true">Oslo</{DSML} parameter>\n'
END = f"</{DSML} invoke>\n"
CLOSE = f"</{DSML} calls>"
STRICT_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def days(body):
    value = f'<{DSML} parameter name="days" string="false">{body}</{DSML} parameter>\n'
    return f"{OPEN}{INVOKE}{CITY}{value}{END}{CLOSE}"


def line(reason):
    return f"[unreadable tool call: {reason}]"


# Text, content, arguments of the call.
ANSWERS = {
    "whole": (days("3"), "", {"city": "Oslo", "days": 3}),
    "word": (days("three"), "", {"city": "Oslo", "days": "three"}),
    "nothing": (days(""), "", {"city": "Oslo", "days": ""}),
    "nan": (days("NaN"), "", {"city": "Oslo", "days": "NaN"}),
    "deep": (days("[" * 150 + "]" * 150), "", {"city": "Oslo", "days": "[" * 150 + "]" * 150}),
    "object": (f'{OPEN}{INVOKE}{{"city": "Oslo"}}\n{END}{CLOSE}', "", {"city": "Oslo"}),
    "empty-block": (f"{OPEN}{CLOSE}", line("the block has no invoke"), None),
    "prose": (f"{OPEN}I call.\n{CLOSE}", f"I call.\n{line('text stands outside an invoke')}", None),
    "no-name": (
        f"{OPEN}<{DSML} invoke>\n{CITY}{END}{CLOSE}",
        "Oslo\n" + line('the invoke has no name="..."'),
        None,
    ),
    "stray": (f"{END}{CLOSE}", line("a closing tag stands alone"), None),
    "cut": (
        f"{OPEN}{INVOKE}{CITY}",
        "Oslo\n" + line('the call of "get_weather" was cut off'),
        None,
    ),
}


def engine_parts(text):
    """Parts for the scripted engine: markers of their own."""
    parts = [part for piece in text.split(DSML) for part in (piece, DSML)]
    return [part for part in parts[:-1] if part]


def limit_of(name, text):
    """The token limit with which `cut` ends behind its text: bytes and a token for each marker."""
    num = len(text.replace(DSML, "").encode()) + text.count(DSML)
    return num if name == "cut" else 2000


@pytest.mark.parametrize("name", list(ANSWERS))
@pytest.mark.parametrize("stream", [False, True])
def test_the_official_clients_read_every_answer(world, name, stream):
    text, content, arguments = ANSWERS[name]
    parts = engine_parts(text)
    limit = limit_of(name, text)
    is_cut, has_call = name == "cut", arguments is not None

    world.parts = tuple(parts)
    asked = {"model": "finwhale", "messages": USER, "tools": [STRICT_TOOL], "max_tokens": limit}
    completions = world.client().chat.completions
    if stream and not is_cut:
        with completions.stream(**asked, extra_body=THINKING_OFF) as chunks:
            for _ in chunks:
                pass
            choice = chunks.get_final_completion().choices[0]
    else:
        choice = completions.create(**asked, extra_body=THINKING_OFF).choices[0]
    reason = "length" if is_cut else "tool_calls" if has_call else "stop"
    assert choice.finish_reason == reason
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [arguments] * has_call
    assert (choice.message.content or "") == content

    fields = {"tools": [ANTHROPIC_TOOL], "max_tokens": limit}
    answer = of_messages(world, stream, *parts, **fields)
    uses = [block.input for block in answer.content if block.type == "tool_use"]
    assert uses == [arguments] * has_call
    assert "".join(block.text for block in answer.content if block.type == "text") == content
    stop = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}[reason]
    assert answer.stop_reason == stop

    fields = {"tools": [RESPONSES_TOOL], "max_output_tokens": limit}
    # That helper wants `response.completed`, which a cut answer does not have.
    response = of_responses(world, stream and not is_cut, *parts, **fields)
    found = [json.loads(item.arguments) for item in response.output if item.type == "function_call"]
    assert found == [arguments] * has_call
    assert response.output_text == content
    assert response.status == ("incomplete" if is_cut else "completed")


@pytest.mark.parametrize("stream", [False, True])
def test_an_unreadable_call_behind_reasoning_is_content(world, stream):
    parts = engine_parts(f"{OPEN}{CLOSE}")
    fields = {"tools": [ANTHROPIC_TOOL], "thinking": ON, "max_tokens": 2000}
    answer = of_messages(world, stream, "why", END_THINK, *parts, **fields)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[1].text == line("the block has no invoke")


def test_a_required_call_that_the_limit_cuts_is_none(world):
    # cases2.md 146.
    text = f"{INVOKE}{CITY}{END}{CLOSE}"
    answer = world.chat(*engine_parts(text), tools=[WEATHER], tool_choice="required", max_tokens=8)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content == line("a call was cut off")


def test_stop_texts_beyond_the_limit_are_refused_by_their_field(world):
    long = "x" * 100_000
    for path, name, body in (
        ("/v1/chat/completions", "stop", {"messages": USER, "stop": [long]}),
        ("/v1/completions", "stop", {"prompt": "a", "stop": [long]}),
        (
            "/anthropic/v1/messages",
            "stop_sequences",
            {"messages": USER, "max_tokens": 9, "stop_sequences": [long]},
        ),
    ):
        status, _, answer = world.post(path, {"model": "finwhale", **body})
        message = answer["error"]["message"]
        assert status == 400
        assert message.startswith(f"{name}: got a text of 100000 characters, expected at most 16")
        assert len(message) < 200
        if "param" in answer["error"]:
            assert answer["error"]["param"] == name
        body = {**body, name: ["x" * 4096, "y"]}
        assert world.post(path, {"model": "finwhale", **body})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_of_a_scored_prompt_lie_in_its_text(world, stream):
    # cases2.md 179; characters before each byte, counted by hand.
    answer = world.client().completions.create(
        model="finwhale", prompt="aé😀日b x", max_tokens=0, echo=True, logprobs=1, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    offsets = [at for choice in choices if choice.logprobs for at in choice.logprobs.text_offset]
    assert "".join(choice.text for choice in choices) == "aé😀日b x"
    assert offsets == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 5, 6]
