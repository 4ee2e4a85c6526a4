"""The `anthropic` package, unchanged, against a server on loopback.

Answers come from a scripted engine, so every expected text is this file's own.
"""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import anthropic
import pytest

from finwhale.serve.exchange import ApiKeys
from finwhale.text.special_tokens import DSML, END_THINK
from tests.e2e.test_server_openai import CALL, SCHEMA
from tests.scripted_engine import (
    USER,
    WEATHER,
    World,
    answer_ids,
    running,
    scripted_service,
    until,
)

PATH = "/anthropic/v1/messages"
OFF = {"type": "disabled"}
ON = {"type": "enabled", "budget_tokens": 1024}
TOOL = {
    "name": "get_weather",
    "description": "",
    "input_schema": WEATHER["function"]["parameters"],
}


def client_of(url, key="unused"):
    return anthropic.Anthropic(base_url=f"{url}/anthropic", api_key=key, max_retries=0, timeout=10)


def asked(**fields):
    return {"model": "finwhale", "max_tokens": 400, "messages": USER, "thinking": OFF, **fields}


def create(world, *parts, **fields):
    world.parts = parts
    return client_of(world.url).messages.create(**asked(**fields))


def streamed(world, *parts, **fields):
    """Final message of the client's own accumulator, and its raw events."""
    world.parts = parts
    with client_of(world.url).messages.stream(**asked(**fields)) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def either(world, is_stream, *parts, **fields):
    return streamed(world, *parts, **fields)[0] if is_stream else create(world, *parts, **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_a_thinking_answer_has_a_signed_block_and_the_counts_of_its_tokens(world, stream):
    answer = either(world, stream, "why", END_THINK, "Zürich", thinking=ON, max_tokens=2000)
    thought, text = answer.content
    assert (thought.type, thought.thinking, thought.signature) == ("thinking", "why", answer.id)
    assert (text.type, text.text) == ("text", "Zürich")
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == (
        "end_turn",
        None,
        "assistant",
    )
    # 3 bytes, one marker, 7 bytes, end of sentence.
    assert answer.usage.output_tokens == 12
    hit = answer.usage.cache_read_input_tokens
    assert answer.usage.input_tokens + hit == len(world.engine.added[0][0])
    assert answer.model == "finwhale"


def test_input_tokens_are_those_that_no_cache_had(world):
    messages = [{"role": "user", "content": "never asked before"}]
    first = create(world, "a", messages=messages)
    again, _ = streamed(world, "a", messages=messages)
    prompt = len(world.engine.added[0][0])
    assert (first.usage.input_tokens, first.usage.cache_read_input_tokens) == (prompt, 0)
    assert (again.usage.input_tokens, again.usage.cache_read_input_tokens) == (1, prompt - 1)
    assert again.usage.cache_creation_input_tokens == 0


def test_a_raw_stream_is_named_events_that_begin_and_end_a_message(world):
    world.parts = ("hi",)
    connection = http.client.HTTPConnection(urlsplit(world.url).netloc, timeout=10)
    body = json.dumps(asked(stream=True))
    connection.request("POST", PATH, body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.getheader("content-type").startswith("text/event-stream")
    assert response.getheader("request-id") == response.getheader("x-request-id")
    chunks = [chunk for chunk in response.read().decode().split("\n\n") if chunk]
    connection.close()
    names = [chunk.splitlines()[0].removeprefix("event: ") for chunk in chunks]
    fields = [json.loads(chunk.splitlines()[1].removeprefix("data: ")) for chunk in chunks]
    assert names == [each["type"] for each in fields]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert fields[-2]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_dsml_is_a_tool_use_of_the_client(world, stream):
    answer = either(world, stream, "text", *CALL, tools=[TOOL])
    text, call = answer.content
    assert text.text == "text"
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Zürich"})
    assert answer.stop_reason == "tool_use"


def test_without_declared_tools_the_same_markup_is_text(world):
    answer = create(world, *CALL)
    assert [block.type for block in answer.content] == ["text"]
    assert "invoke" in answer.content[0].text
    assert answer.stop_reason == "end_turn"


def test_a_tool_loop_goes_on_from_the_very_tokens_of_its_first_turn(world, tokenizer):
    first = create(world, "why", END_THINK, "text", *CALL, tools=[TOOL], thinking=ON)
    result = {
        "type": "tool_result",
        "tool_use_id": first.content[-1].id,
        "content": "rain",
        "is_error": True,
    }
    history = [
        *USER,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = create(world, END_THINK, "so rain", tools=[TOOL], thinking=ON, messages=history)
    assert second.content[0].text == "so rain"
    (before, _, _), (after, _, _) = world.engine.added
    said = answer_ids(tokenizer, "why", END_THINK, "text", *CALL)
    assert after[: len(before) + len(said)] == before + said
    assert "<tool_result>Error: rain</tool_result>" in tokenizer.decode(after)


def test_any_tool_starts_inside_the_block_and_wants_an_answer_without_thinking(world):
    inside = ("<", DSML, ' invoke name="get_weather">\n</', DSML, " invoke>\n</", DSML, " calls>")
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        (call,) = create(world, *inside, tools=[TOOL], tool_choice=choice).content
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {})
    # The engine is held to it: free text breaks the constraint.
    with pytest.raises(anthropic.InternalServerError, match="token"):
        create(world, "no", tools=[TOOL], tool_choice={"type": "any"})
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        create(world, "x", tools=[TOOL], tool_choice={"type": "any"}, thinking=ON)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named_and_not_part_of_the_text(world, stream):
    answer = either(world, stream, "one STOP two", stop_sequences=["no", "STOP"])
    assert answer.content[0].text == "one "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")


def test_a_stop_sequence_inside_the_reasoning_ends_nothing(world):
    answer = create(world, "a STOP", END_THINK, "b", stop_sequences=["STOP"], thinking=ON)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_inside_the_reasoning_returns_what_there_is(world, stream):
    answer = either(world, stream, "why not", thinking=ON, max_tokens=3)
    assert [block.thinking for block in answer.content] == ["why"]
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 3


def test_an_answer_that_ends_at_once_has_no_block(world):
    message, events = streamed(world, "")
    assert message.content == []
    assert message.stop_reason == "end_turn"
    assert "content_block_start" not in {event.type for event in events}


def test_a_schema_holds_for_the_answer(world):
    text = '{"a":"x"}'
    fields = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    messages = [{"role": "user", "content": "json"}]
    assert create(world, text, messages=messages, **fields).content[0].text == text
    # The engine's constraint sees what breaks the schema.
    with pytest.raises(anthropic.InternalServerError):
        create(world, '{"a":"z"}', messages=messages, **fields)


def test_effort_and_system_reach_the_prompt(world, tokenizer):
    create(world, END_THINK, "a", thinking=ON, system="Be brief.", output_config={"effort": "max"})
    prompt = tokenizer.decode(world.engine.added[0][0])
    assert "Reasoning Effort: 100" in prompt
    assert "Be brief." in prompt


def test_a_claude_is_served_and_an_opus_is_not(world):
    assert create(world, "a", model="claude-sonnet-5").model == "finwhale"
    with pytest.raises(anthropic.BadRequestError, match="model"):
        create(world, "a", model="claude-opus-4-1")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "message"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"output_config": {"effort": "huge"}}, "effort"),
        ({"extra_body": {"top_k": -1}}, "top_k"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"tool_choice": {"type": "tool", "name": "nobody"}, "tools": [TOOL]}, "nobody"),
    ],
)
def test_a_wrong_body_is_a_bad_request_that_names_its_field(world, fields, word):
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(world, "a", **fields)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert word in caught.value.body["error"]["message"]
    assert create(world, "next").content[0].text == "next"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"messages":[{}]}', b'{"model":1}', b"\xff"])
def test_bytes_that_are_no_body_are_never_an_internal_error(world, raw):
    status, _, body = world.post(PATH, raw)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")


def test_paths_and_methods_have_the_protocols_error_body(world):
    status, _, body = world.post("/anthropic/v1/nothing", {})
    assert (status, body["error"]["type"]) == (404, "not_found_error")
    connection = http.client.HTTPConnection(urlsplit(world.url).netloc, timeout=10)
    connection.request("GET", PATH)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["type"]) == (405, "error")
    connection.close()


def test_closing_a_stream_of_the_client_ends_the_request(world):
    world.engine.step_s = 0.01
    world.parts = ("x" * 3000,)
    with client_of(world.url).messages.stream(**asked(max_tokens=3000)) as stream:
        next(iter(stream.text_stream))
        assert world.engine.has_work
    until(lambda: not world.engine.has_work)
    until(lambda: world.service.worker.num_in_flight == 0)


def test_a_key_is_wanted_and_tenants_share_no_cached_prefix(tokenizer):
    world = World(tokenizer)
    with running(world.service, ApiKeys({"a": "a", "b": "b"})) as url:
        for key in ("a", "b"):
            answer = client_of(url, key).messages.create(**asked())
            assert answer.usage.cache_read_input_tokens == 0
        again = client_of(url, "a").messages.create(**asked())
        assert again.usage.cache_read_input_tokens > 0
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client_of(url, "c").messages.create(**asked())
        assert caught.value.body["error"]["type"] == "authentication_error"


def test_full_queues_and_failed_steps_raise_the_clients_own_errors(tokenizer):
    world = World(tokenizer)
    world.service = scripted_service(tokenizer, world.engine, max_requests=2, max_tenant_requests=1)
    world.engine.step_s = 0.01
    with running(world.service, ApiKeys({"a": "a", "b": "b", "c": "c"})) as url:
        world.parts = ("x" * 3000,)
        with (
            client_of(url, "a").messages.stream(**asked(max_tokens=3000)) as first,
            client_of(url, "b").messages.stream(**asked(max_tokens=3000)) as second,
        ):
            next(iter(first)), next(iter(second))
            with pytest.raises(anthropic.RateLimitError):
                client_of(url, "a").messages.create(**asked())
            with pytest.raises(anthropic.ServiceUnavailableError) as caught:
                client_of(url, "c").messages.create(**asked())
            assert caught.value.body["error"]["type"] == "overloaded_error"
        until(lambda: world.service.worker.num_in_flight == 0)
        world.engine.num_failures = 1
        with pytest.raises(anthropic.InternalServerError) as failed:
            client_of(url, "a").messages.create(**asked())
        assert failed.value.body["error"]["type"] == "api_error"


def test_a_failure_inside_a_stream_is_an_error_event(world):
    world.engine.step_s = 0.01
    world.parts = ("x" * 300,)
    with client_of(world.url).messages.stream(**asked()) as stream:
        events = iter(stream)
        next(events)
        world.engine.num_failures = 1
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            list(events)
    assert create(world, "next").content[0].text == "next"
