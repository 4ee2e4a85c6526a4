"""The `openai` package's Responses client, unchanged, against a server on loopback.

Answers come from a scripted engine, so every expected text is this file's own.
"""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import openai
import pytest

from finwhale.text.special_tokens import END_THINK
from tests.e2e.test_server_openai import CALL, SCHEMA
from tests.scripted_engine import WEATHER, answer_ids, until

TOOL = {"type": "function", "strict": False, **WEATHER["function"]}
OFF = {"effort": "none"}


def asked(**fields):
    return {"model": "finwhale", "input": "say", "reasoning": OFF, **fields}


def create(world, *parts, **fields):
    world.parts = parts
    return world.client().responses.create(**asked(**fields))


def events_of(world, *parts, **fields):
    return list(create(world, *parts, stream=True, **fields))


def either(world, is_stream, *parts, **fields):
    if not is_stream:
        return create(world, *parts, **fields)
    world.parts = parts
    with world.client().responses.stream(**asked(**fields)) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_a_thinking_answer_has_a_reasoning_item_and_the_counts_of_its_tokens(world, stream):
    answer = either(world, stream, "why", END_THINK, "Zürich", reasoning={"effort": "high"})
    thought, message = answer.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "why", [])
    assert (message.type, message.phase, message.status) == ("message", "final_answer", "completed")
    assert answer.output_text == "Zürich"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    usage = answer.usage
    # 3 bytes, one marker, 7 bytes, end of sentence.
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (12, 3)
    assert usage.input_tokens == len(world.engine.added[0][0])
    assert usage.total_tokens == usage.input_tokens + 12


def test_cached_tokens_are_told(world):
    first, again = (create(world, "a", input="never asked before").usage for _ in range(2))
    assert first.input_tokens_details.cached_tokens == 0
    assert again.input_tokens_details.cached_tokens == again.input_tokens - 1


def test_events_are_numbered_and_join_to_the_whole_answer(world):
    events = events_of(world, "why", END_THINK, "text", reasoning={"effort": "low"})
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-1] == "completed"
    for kind, want in (("reasoning_text", "why"), ("output_text", "text")):
        pieces = [e.delta for e in events if e.type == f"response.{kind}.delta"]
        assert "".join(pieces) == want
        assert [e.text for e in events if e.type == f"response.{kind}.done"] == [want]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in events[-1].response.output]


def test_a_raw_stream_is_named_events_without_done(world):
    world.parts = ("hi",)
    connection = http.client.HTTPConnection(urlsplit(world.url).netloc, timeout=10)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/responses", json.dumps(asked(stream=True)), headers)
    response = connection.getresponse()
    assert response.getheader("content-type").startswith("text/event-stream")
    chunks = [chunk.splitlines() for chunk in response.read().decode().split("\n\n") if chunk]
    connection.close()
    fields = [json.loads(data.removeprefix("data: ")) for _, data in chunks]
    assert [name for name, _ in chunks] == [f"event: {each['type']}" for each in fields]
    assert fields[-1]["response"]["output"][0]["content"][0]["text"] == "hi"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_dsml_is_a_function_call_behind_a_commentary(world, stream):
    message, call = either(world, stream, "text", *CALL, tools=[TOOL]).output
    assert (message.content[0].text, message.phase) == ("text", "commentary")
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments) == {"city": "Zürich"}


def test_without_declared_tools_the_same_markup_is_text(world):
    answer = create(world, *CALL)
    assert [item.type for item in answer.output] == ["message"]
    assert "invoke" in answer.output_text


def test_a_tool_loop_goes_on_from_the_very_tokens_of_its_first_turn(world, tokenizer):
    thinking = {"effort": "high"}
    parts = ("why", END_THINK, "text", *CALL)
    first = create(world, *parts, tools=[TOOL], reasoning=thinking)
    result = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": "rain",
    }
    history = [{"role": "user", "content": "say"}, *first.output, result]
    second = create(world, END_THINK, "so", tools=[TOOL], reasoning=thinking, input=history)
    assert second.output_text == "so"
    (before, _, _), (after, _, _) = world.engine.added
    said = answer_ids(tokenizer, *parts)
    assert after[: len(before) + len(said)] == before + said
    assert "<tool_result>rain</tool_result>" in tokenizer.decode(after)


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_makes_an_answer_incomplete(world, stream):
    fields = {"reasoning": {"effort": "high"}, "max_output_tokens": 3}
    if stream:
        last = events_of(world, "why not", **fields)[-1]
        assert last.type == "response.incomplete"
        answer = last.response
    else:
        answer = create(world, "why not", **fields)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.content[0].text for item in answer.output] == ["why"]
    assert answer.output[0].status == "incomplete"


def test_a_schema_holds_for_the_answer_and_is_echoed(world):
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    fields = {"input": "json", "text": {"format": form}}
    answer = create(world, '{"a":"x"}', **fields)
    assert json.loads(answer.output_text) == {"a": "x"}
    assert answer.text.format.name == "n"
    # The engine's constraint sees what breaks the schema.
    with pytest.raises(openai.InternalServerError):
        create(world, '{"a":"z"}', **fields)


def test_instructions_and_effort_reach_the_prompt(world, tokenizer):
    create(world, END_THINK, "a", instructions="Be brief.", reasoning={"effort": "xhigh"})
    prompt = tokenizer.decode(world.engine.added[0][0])
    assert "Reasoning Effort: 75" in prompt
    assert "Be brief." in prompt


def test_the_server_says_that_it_keeps_no_answers(world):
    first = create(world, "a", store=True)
    assert (first.store, first.previous_response_id) == (False, None)
    for name in (first.id, "resp_never"):
        with pytest.raises(openai.BadRequestError, match="whole history") as caught:
            create(world, "b", previous_response_id=name)
        assert caught.value.param == "previous_response_id"
    assert len(world.engine.added) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"model": "other"}, "model"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"tools": [{"type": "functoin"}]}, "tools"),
        ({"input": "x" * 5000}, "input"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "r"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input"),
        ({"input": 7}, "input"),
    ],
)
def test_a_wrong_body_is_a_bad_request_that_names_its_field(world, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        create(world, "a", **fields)
    assert caught.value.param == param
    assert create(world, "next").output_text == "next"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"input":[7]}', b'{"input":[{"type":1}]}'])
def test_bytes_that_are_no_body_are_never_an_internal_error(world, raw):
    status, _, body = world.post("/v1/responses", raw)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def test_closing_a_stream_of_the_client_ends_the_request(world):
    world.engine.step_s = 0.01
    stream = create(world, "x" * 3000, max_output_tokens=3000, stream=True)
    next(iter(stream))
    assert world.engine.has_work
    stream.close()
    until(lambda: not world.engine.has_work)
    until(lambda: world.service.worker.num_in_flight == 0)


def test_a_failure_inside_a_stream_is_its_last_event(world):
    world.engine.step_s = 0.01
    stream = create(world, "x" * 300, stream=True)
    events = [next(iter(stream))]
    world.engine.num_failures = 1
    events += stream
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert create(world, "next").output_text == "next"
