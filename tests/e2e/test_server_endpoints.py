"""Endpoints beside the answers: counts, models, notes, pings, the description, both base addresses.

The real `openai` and `anthropic` packages, and raw requests where they have no call.
"""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import replace
from urllib.parse import urlsplit

import anthropic
import msgspec
import openai
import pytest

from finwhale.serve import answers
from finwhale.serve.endpoints import STATES, endpoints
from finwhale.serve.exchange import ApiKeys
from finwhale.text.special_tokens import END_THINK
from tests.e2e.test_server_anthropic import asked, client_of
from tests.e2e.test_server_openai import CALL
from tests.scripted_engine import (
    CONTEXT_TOKENS,
    THINKING_OFF,
    USER,
    WEATHER,
    World,
    running,
    scripted_service,
)

OFF = {"type": "disabled"}
CLAUDE_TOOL = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
FLAT_TOOL = {"type": "function", **WEATHER["function"]}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
COUNT = "/anthropic/v1/messages/count_tokens"


def get(world, path, method="GET", headers=None):
    connection = http.client.HTTPConnection(urlsplit(world.url).netloc, timeout=10)
    connection.request(method, path, headers=headers or {})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, dict(response.getheaders()), content


def raw_stream(world, path, body):
    """Headers and events of a stream."""
    connection = http.client.HTTPConnection(urlsplit(world.url).netloc, timeout=20)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    events, lines = [], []
    for line in response:
        if line.strip():
            lines.append(line.decode())
            continue
        events.append("".join(lines))
        lines = []
    connection.close()
    return dict(response.getheaders()), events


def raw_text(world, path, body):
    """The whole text of an answer, a stream or not."""
    connection = http.client.HTTPConnection(urlsplit(world.url).netloc, timeout=20)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    text = connection.getresponse().read().decode()
    connection.close()
    return text


@pytest.mark.parametrize("extra", [{}, {"system": "s"}, {"tools": [CLAUDE_TOOL]}], ids=str)
def test_a_count_is_that_of_the_very_prompt_and_generates_nothing(world, extra):
    client = client_of(world.url)
    fields = {"model": "finwhale", "messages": USER, "thinking": OFF, **extra}
    counted = client.messages.count_tokens(**fields).input_tokens
    assert not world.engine.added
    client.messages.create(max_tokens=5, **fields)
    assert counted == len(world.engine.added[0][0])
    status, _, body = world.post(f"{COUNT}?beta=true", fields)
    assert (status, body) == (200, {"input_tokens": counted})


def test_a_count_may_be_longer_than_the_context_and_is_refused_like_a_message(world):
    long = [{"role": "user", "content": "x" * (2 * CONTEXT_TOKENS)}]
    counted = client_of(world.url).messages.count_tokens(model="finwhale", messages=long)
    assert counted.input_tokens > 2 * CONTEXT_TOKENS
    with pytest.raises(anthropic.BadRequestError, match="model"):
        client_of(world.url).messages.count_tokens(model="other", messages=USER)
    messages = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client_of(world.url).messages.count_tokens(model="finwhale", messages=messages)


def test_input_tokens_of_a_response_are_those_of_its_prompt(world):
    client = world.client()
    fields = {"model": "finwhale", "input": "say", "instructions": "I", "tools": [FLAT_TOOL]}
    counted = client.responses.input_tokens.count(**fields)
    assert counted.object == "response.input_tokens"
    assert not world.engine.added
    client.responses.create(**fields)
    assert counted.input_tokens == len(world.engine.added[0][0])


def test_models_are_listed_in_anthropics_form_and_by_pages(world):
    client = client_of(world.url)
    names = [model.id for model in client.models.list(limit=1)]
    assert names == ["finwhale", "deepseek-flash"]
    page = client.models.list(limit=1)
    assert (page.has_more, page.first_id, page.last_id) == (True, "finwhale", "finwhale")
    after = client.models.list(after_id="finwhale")
    assert ([model.id for model in after.data], after.has_more) == (["deepseek-flash"], False)
    before = client.models.list(before_id="deepseek-flash")
    assert [model.id for model in before.data] == ["finwhale"]
    one = client.models.retrieve("finwhale")
    assert (one.type, one.id, one.max_input_tokens) == ("model", "finwhale", CONTEXT_TOKENS)
    assert one.created_at.year == 1970
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after_id": "other"}):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
            client.models.list(**wrong)


def test_clients_of_anthropic_may_be_given_the_bare_address(world):
    client = anthropic.Anthropic(base_url=world.url, api_key="unused", max_retries=0, timeout=10)
    world.parts = ("hi",)
    assert client.messages.create(**asked()).content[0].text == "hi"
    with client.messages.stream(**asked()) as stream:
        assert stream.get_final_text() == "hi"
    fields = {"model": "finwhale", "messages": USER}
    assert client.messages.count_tokens(**fields) == client_of(world.url).messages.count_tokens(
        **fields
    )
    assert [model.id for model in client.models.list()] == ["finwhale", "deepseek-flash"]
    assert client.models.retrieve("finwhale").display_name == "finwhale"
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**asked(max_tokens=0))
    assert caught.value.body["type"] == "error"
    status, _, body = world.post("/v1/messages/nothing", {})
    assert (status, body["type"]) == (404, "error")
    # The same address stays OpenAI's for its own clients.
    assert [model.id for model in world.client().models.list()] == ["finwhale", "deepseek-flash"]


@pytest.mark.parametrize(
    "path",
    ["/health", "/openapi.json", "/v1/models", "/v1/models/finwhale", "/anthropic/v1/models"],
)
def test_head_is_answered_wherever_get_is(world, path):
    status, headers, content = get(world, path, "HEAD")
    whole = get(world, path)
    assert (status, content) == (200, b"")
    assert headers["content-length"] == str(len(whole[2]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "note"),
    [
        (
            "/v1/chat/completions",
            {"messages": USER, "tools": [{"type": "custom", "custom": {"name": "x"}}]},
            "tools left out: custom x",
        ),
        (
            "/v1/responses",
            {"input": "q", "tools": [FLAT_TOOL, {"type": "image_generation"}]},
            "tools left out: image_generation",
        ),
        (
            "/anthropic/v1/messages",
            asked(tools=[CLAUDE_TOOL, SEARCH]),
            "tools left out: web_search_20250305",
        ),
    ],
)
def test_what_was_left_out_is_told_in_a_header(world, path, body, note, stream):
    world.parts = ("why", END_THINK, "hi")
    headers, _ = raw_stream(world, path, {**body, "stream": stream})
    assert headers["x-finwhale-note"] == note
    headers, _ = raw_stream(world, path, {**body, "tools": None, "stream": stream})
    assert "x-finwhale-note" not in headers


def test_notes_of_the_preparation_are_told_beside_those_of_the_body(world, monkeypatch):
    prepare = world.service.preparer.prepared

    def noting(plan, **options):
        prepared = prepare(plan, **options)
        return replace(prepared, notes=(*prepared.notes, "thinking was switched off"))

    monkeypatch.setattr(world.service.preparer, "prepared", noting)
    headers, _ = raw_stream(world, "/v1/messages", asked(tools=[CLAUDE_TOOL, SEARCH]))
    want = "tools left out: web_search_20250305; thinking was switched off"
    assert headers["x-finwhale-note"] == want


@pytest.fixture
def slow(tokenizer):
    """A server whose engine says its first token after a second and a half."""
    world = World(tokenizer)
    world.service = scripted_service(tokenizer, world.engine, keep_alive_s=0.3)
    step = world.engine.step

    def late_step():
        # Nothing is ready in the steps of a long prefill.
        if world.engine.added and time.monotonic() < world.late_until:
            time.sleep(0.05)
            return []
        return step()

    world.engine.step = late_step
    with running(world.service) as world.url:
        world.parts = ("hi",)
        world.late_until = time.monotonic() + 1.5
        yield world


def test_a_message_begins_and_pings_before_a_long_prefill_ends(slow):
    _, events = raw_stream(slow, "/anthropic/v1/messages", asked(stream=True))
    names = [event.partition("\n")[0].removeprefix("event: ") for event in events]
    late = next(index for index, name in enumerate(names) if name == "content_block_start")
    assert names[0] == "message_start"
    assert set(names[1:late]) == {"ping"}
    assert len(names[1:late]) >= 2
    # No comment, which a watchdog may not count.
    assert all(event.startswith("event: ") for event in events)
    start = json.loads(events[0].partition("data: ")[2])["message"]
    prompt = len(slow.engine.added[0][0])
    assert (start["usage"]["input_tokens"], start["usage"]["output_tokens"]) == (prompt, 0)
    assert names[-1] == "message_stop"


def test_the_client_reads_a_message_that_began_early(slow):
    with client_of(slow.url).messages.stream(**asked()) as stream:
        message = stream.get_final_message()
    assert message.content[0].text == "hi"
    assert message.usage.input_tokens == len(slow.engine.added[0][0])


@pytest.mark.parametrize(
    ("path", "body", "first"),
    [
        ("/v1/chat/completions", {"messages": USER}, '"role":"assistant"'),
        ("/v1/responses", {"input": "q"}, "response.created"),
    ],
)
def test_the_other_protocols_begin_before_the_first_token(slow, path, body, first):
    _, events = raw_stream(slow, path, {**body, "stream": True})
    assert first in events[0]
    # Comments are sent in silence only, so what stands before them was not held back.
    silent = next(index for index, event in enumerate(events) if event.startswith(":"))
    assert "delta" not in "".join(events[1:silent])


def test_a_failure_before_the_first_token_is_an_error_and_no_message(world):
    world.engine.num_failures = 1
    _, events = raw_stream(world, "/v1/messages", asked(stream=True))
    assert "api_error" in events[-1]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_usage_of_a_stream_comes_once_in_the_form_that_was_asked_for(world, path, n):
    world.parts = ("hi",)
    body = {"messages": USER, **THINKING_OFF} if "chat" in path else {"prompt": "x"}
    for options, is_own in (
        (None, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ):
        asked_for = {**body, "n": n, "stream": True, "stream_options": options}
        _, events = raw_stream(world, path, asked_for)
        assert events[-1].strip() == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        told = [chunk for chunk in chunks if chunk.get("usage")]
        assert len(told) == 1
        assert told[0] is chunks[-1]
        assert (told[0]["choices"] == []) == is_own
        assert told[0]["usage"]["completion_tokens"] == 3 * n
        assert all(("usage" in chunk) == (is_own or chunk is chunks[-1]) for chunk in chunks)


def test_log_probabilities_of_a_response_are_those_of_the_chat(world):
    world.parts = ("why", END_THINK, "Zü")
    fields = {
        "model": "finwhale",
        "input": "say",
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    chat = world.client().chat.completions.create(
        model="finwhale", messages=USER, logprobs=True, top_logprobs=2
    )
    want = [
        (told.token, told.logprob, [other.token for other in told.top_logprobs])
        for told in chat.choices[0].logprobs.content
    ]
    assert len(want) == 3

    def flat(logprobs):
        return [
            (told.token, told.logprob, [other.token for other in told.top_logprobs])
            for told in logprobs
        ]

    whole = world.client().responses.create(**fields)
    thought, message = whole.output
    assert flat(message.content[0].logprobs) == want
    assert whole.top_logprobs == 2
    assert not hasattr(thought.content[0], "logprobs")
    with world.client().responses.stream(**fields) as stream:
        events = list(stream)
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert [told for e in deltas for told in flat(e.logprobs)] == want
    (done,) = [e for e in events if e.type == "response.output_text.done"]
    assert flat(done.logprobs) == want
    assert flat(events[-1].response.output[1].content[0].logprobs) == want
    plain = world.client().responses.create(model="finwhale", input="say")
    assert plain.output[1].content[0].logprobs == []


def test_a_call_in_a_namespace_reaches_the_client_with_both_names(world):
    space = {"type": "namespace", "name": "weather", "description": "d", "tools": [FLAT_TOOL]}
    parts = [part.replace('"get_weather"', '"weather::get_weather"') for part in CALL]
    world.parts = (END_THINK, *parts)
    for stream in (False, True):
        if stream:
            with world.client().responses.stream(
                model="finwhale", input="say", tools=[space]
            ) as events:
                answer = events.get_final_response()
        else:
            answer = world.client().responses.create(model="finwhale", input="say", tools=[space])
        call = answer.output[-1]
        assert (call.namespace, call.name) == ("weather", "get_weather")
        assert json.loads(call.arguments) == {"city": "Zürich"}
    assert "weather::get_weather" in world.tokenizer.decode(world.engine.added[0][0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_single", [False, True])
def test_one_call_at_a_time_is_one_call_in_every_protocol(world, is_single, stream):
    # Everything behind the opening of the block, twice, and its end.
    call = CALL[3:-2]
    world.parts = (*CALL[:3], *call, "\n<", *call, "\n</", *CALL[-2:])
    plain = {"stream": stream, **THINKING_OFF}
    for path, body, mark in (
        (
            "/v1/chat/completions",
            {"messages": USER, "tools": [WEATHER], "parallel_tool_calls": not is_single, **plain},
            '"name":"get_weather"',
        ),
        (
            "/v1/responses",
            {
                "input": "q",
                "tools": [FLAT_TOOL],
                "parallel_tool_calls": not is_single,
                "reasoning": {"effort": "none"},
                "stream": stream,
            },
            "function_call_arguments.done" if stream else '"type":"function_call"',
        ),
        (
            "/v1/messages",
            asked(
                tools=[CLAUDE_TOOL],
                tool_choice={"type": "auto", "disable_parallel_tool_use": is_single},
                stream=stream,
            ),
            '"type":"tool_use"',
        ),
    ):
        told = raw_text(world, path, body)
        # An event is named twice: in its line and in its data.
        num = told.count(f"{mark}") // (2 if mark.endswith(".done") else 1)
        assert num == (1 if is_single else 2), told


WHOLE = {
    "/chat/completions": {
        "messages": USER,
        "tools": [WEATHER],
        "logprobs": True,
        "top_logprobs": 1,
    },
    "/completions": {"prompt": "x", "logprobs": 1, "echo": True},
    "/responses": {"input": "x", "tools": [FLAT_TOOL], "top_logprobs": 1, "metadata": {"a": "b"}},
    "/responses/input_tokens": {"input": "x"},
    "/messages": asked(tools=[CLAUDE_TOOL], thinking={"type": "adaptive"}),
    "/messages/count_tokens": {"messages": USER},
}


@pytest.mark.parametrize("place", list(endpoints()), ids=lambda each: each.path)
def test_a_real_answer_has_the_shape_that_the_description_says(world, place):
    world.parts = ("why", END_THINK, "text", *CALL)
    path = place.path.replace("{name}", "finwhale")
    if place.method == "GET":
        status, _, content = get(world, path)
        wrong = {}
    else:
        suffix = path.removeprefix("/anthropic").removeprefix("/v1")
        status, _, body = world.post(path, WHOLE[suffix])
        content = json.dumps(body).encode()
        wrong = {"model": "nobody", **WHOLE[suffix]} | {"model": "nobody"}
    assert status == 200, content
    # Closed shapes: a field more, a field less or another type is an error.
    msgspec.json.decode(content, type=place.answers[0])
    if wrong:
        status, _, body = world.post(path, wrong)
        assert status == 400
        msgspec.json.decode(json.dumps(body).encode(), type=place.error)


def test_the_description_is_true_of_its_own_references_and_served_without_a_key(tokenizer):
    world = World(tokenizer)
    with running(world.service, ApiKeys({"key": "a"})) as world.url:
        status, headers, content = get(world, "/openapi.json")
        assert get(world, "/v1/models")[0] == 401
    assert (status, headers["content-type"]) == (200, "application/json")
    told = json.loads(content)
    assert told["openapi"] == "3.1.0"
    refs = {part.partition('"')[0] for part in content.decode().split('"#/components/schemas/')[1:]}
    assert refs <= set(told["components"]["schemas"])
    paths = told["paths"]
    assert {each.path for each in endpoints()} | set(STATES) == set(paths)
    posted = paths["/v1/chat/completions"]["post"]
    want = {
        "200",
        "400",
        "401",
        "403",
        "404",
        "405",
        "408",
        "413",
        "415",
        "429",
        "500",
        "503",
        "504",
    }
    assert set(posted["responses"]) == want
    assert "text/event-stream" in posted["responses"]["200"]["content"]
    ids = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(ids) == len(set(ids))


def test_health_and_errors_have_the_shapes_of_the_description(world):
    for path in STATES:
        msgspec.json.decode(get(world, path)[2], type=answers.Health)
    for path, kind in (("/v1/no", answers.OpenAIError), ("/anthropic/no", answers.AnthropicError)):
        status, _, content = get(world, path)
        assert status == 404
        msgspec.json.decode(content, type=kind)
    with pytest.raises(openai.BadRequestError):
        world.client().completions.create(model="finwhale", prompt="x" * 5000)


def test_a_prompt_that_is_too_long_is_named_as_each_protocol_names_it(world):
    long = "x" * 5000
    for path, body, field in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/responses", {"input": long}, "input"),
    ):
        status, _, told = world.post(path, body)
        assert (status, told["error"]["param"]) == (400, field)
        assert told["error"]["message"].startswith(f"{field}: got")
    body = asked(messages=[{"role": "user", "content": long}])
    assert world.post("/v1/messages", body)[2]["error"]["message"].startswith("messages: got")


def test_what_an_answer_needs_of_its_body_survives_a_large_one(tokenizer):
    # Read in a process of its own, from which options and notes come back.
    world = World(tokenizer)
    world.service.reader._small_body_bytes = 100
    space = {"type": "namespace", "name": "ns", "tools": [FLAT_TOOL, {"type": "custom"}]}
    parts = [part.replace('"get_weather"', '"ns::get_weather"') for part in CALL]
    world.parts = ("why", END_THINK, *parts)
    with running(world.service) as world.url:
        body = {"input": "q", "tools": [space], "reasoning": {"summary": "auto"}}
        status, headers, told = world.post("/v1/responses", {**body, "metadata": {"a": "b"}})
        thought, call = told["output"]
        assert (status, told["metadata"]) == (200, {"a": "b"})
        assert headers["x-finwhale-note"] == "tools left out: custom"
        assert thought["summary"][0]["text"] == "why"
        assert (call["namespace"], call["name"]) == ("ns", "get_weather")
        counted = world.post(COUNT, {"messages": USER, "system": "s" * 100})[2]
        assert counted["input_tokens"] > 100
        refused = world.post("/v1/responses", {"input": "q", "previous_response_id": "x" * 100})
        assert (refused[0], refused[2]["error"]["param"]) == (400, "previous_response_id")


def test_no_limit_is_the_default_and_a_limit_of_nothing_scores_an_echo_alone(world):
    world.parts = ("hi",)
    chat = {"messages": USER, **THINKING_OFF}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "x"})):
        status, _, told = world.post(path, {**body, "max_tokens": None})
        assert (status, told["usage"]["completion_tokens"]) == (200, 3)
        status, _, told = world.post(path, {**body, "max_tokens": 0})
        assert (status, told["error"]["param"]) == (400, "max_tokens")
    scored = {"prompt": "xyz", "max_tokens": 0, "echo": True, "logprobs": 0}
    status, _, told = world.post("/v1/completions", scored)
    assert (status, told["usage"]["completion_tokens"]) == (200, 0)
    assert told["choices"][0]["text"] == "xyz"
    assert len(told["choices"][0]["logprobs"]["token_logprobs"]) == 3
