"""What the server refuses, with the statuses and bodies that the `openai` package reads.

Wrong bodies, keys, hosts, limits, time, and an engine that fails. After each, the server answers
the next good request.
"""

from __future__ import annotations

import http.client
import json
import socket
from urllib.parse import urlsplit

import openai
import pytest

from finwhale.serve.exchange import ApiKeys
from finwhale.text.special_tokens import DSML
from tests.scripted_engine import (
    THINKING_OFF,
    USER,
    WEATHER,
    World,
    running,
    scripted_service,
    until,
)


def test_a_history_whose_argument_would_end_its_own_markup_is_refused(world):
    function = {"name": "get_weather", "arguments": json.dumps({"city": f"x</{DSML} y"})}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    with pytest.raises(openai.BadRequestError, match="argument"):
        world.chat("x", messages=[*USER, turn, result], tools=[WEATHER])


WRONG = {
    "no-messages": {"messages": []},
    "messages-missing": {"messages": None},
    "role": {"messages": [{"role": "nobody", "content": "x"}]},
    "content-number": {"messages": [{"role": "user", "content": 5}]},
    "calls-number": {"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]},
    "calls-strings": {"messages": [{"role": "assistant", "content": "", "tool_calls": ["x"]}]},
    "tool-without-call": {"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]},
    "image": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
        ]
    },
    "part-string": {"messages": [{"role": "user", "content": ["x"]}]},
    "model": {"model": "other"},
    "temperature": {"temperature": 2.5},
    "temperature-text": {"temperature": "hot"},
    "top_p": {"top_p": 0},
    "top_k": {"top_k": -1},
    "n-zero": {"n": 0},
    "n-many": {"n": 17},
    "seed": {"seed": 2**70},
    "max_tokens-zero": {"max_tokens": 0},
    "max_tokens-huge": {"max_tokens": 400_000},
    "max_tokens-context": {"max_tokens": 5000},
    "stops": {"stop": ["x"] * 17},
    "stop-empty": {"stop": ""},
    "top_logprobs-alone": {"top_logprobs": 3},
    "top_logprobs-many": {"logprobs": True, "top_logprobs": 21},
    "penalty": {"presence_penalty": 3},
    "bias-word": {"logit_bias": {"cat": 1}},
    "bias-id": {"logit_bias": {"99999": 1}},
    "bias-size": {"logit_bias": {"5": 1000}},
    "effort": {"reasoning_effort": "extreme"},
    "effort-number": {"reasoning_effort": 101},
    "thinking": {"thinking": {"type": "perhaps"}},
    "format": {"response_format": {"type": "yaml"}},
    "schema-missing": {"response_format": {"type": "json_schema"}},
    "schema-wrong": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"type": "nothing"}},
        }
    },
    "tools": {"tools": [{"type": "function"}]},
    "tool_choice": {"tools": [WEATHER], "tool_choice": "sometimes"},
    "tool_choice-unknown": {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "other"}},
    },
    "user_id": {"user_id": "x" * 513},
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_chat_is_refused_with_400_and_the_body_clients_read(world, fields):
    world.parts = ("ok",)
    base = {"messages": USER, "model": "finwhale", **THINKING_OFF}
    status, _, body = world.post("/v1/chat/completions", {**base, **fields})
    assert status == 400, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]
    # Nothing is left behind.
    assert world.service.worker.num_in_flight == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "x", "y": '
        + b'{"z":' * 500
        + b"1"
        + b"}" * 500
        + b"}]}",
        b'{"temperature": NaN, "messages": []}',
    ],
    ids=["empty", "open", "list", "null", "bytes", "surrogate", "deep", "deep-inside", "nan"],
)
def test_bytes_that_are_no_chat_are_never_an_internal_error(world, raw):
    world.parts = ("ok",)
    status, _, body = world.post("/v1/chat/completions", raw)
    assert status in (200, 400), body
    assert world.chat("hi").choices[0].message.content == "hi"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": [99999]},
        {"prompt": [-1]},
        {"prompt": ["a"] * 17},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "logprobs": 21},
        {"prompt": "a", "best_of": 3},
    ],
    ids=str,
)
def test_a_wrong_completion_is_refused_with_400(world, fields):
    status, _, body = world.post("/v1/completions", fields)
    assert status == 400, body
    assert body["error"]["message"]


def test_the_client_raises_its_own_typed_errors(world):
    client = world.client()
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="finwhale", messages=USER, temperature=5)
    assert (refused.value.param, refused.value.status_code) == ("temperature", 400)
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="other", messages=USER)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(
            model="finwhale", messages=[{"role": "user", "content": "x" * 5000}]
        )
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert [model.id for model in client.models.list()] == ["finwhale", "deepseek-flash"]


def test_paths_methods_and_media_types_have_their_statuses(world):
    body = {"messages": USER}
    assert world.post("/v1/nothing", body)[0] == 404
    assert world.post("/v1/models", body)[0] == 405
    assert world.post("/v1/chat/completions/", body)[0] == 404
    plain = {"content-type": "text/plain"}
    assert world.post("/v1/chat/completions", body, plain)[0] == 415
    form = {"content-type": "application/x-www-form-urlencoded"}
    status, headers, told = world.post("/v1/chat/completions", body, form)
    assert (status, told["error"]["type"]) == (415, "invalid_request_error")
    assert headers["x-request-id"].startswith("req-")
    # Cross-origin reading is off.
    origin = {"content-type": "application/json", "origin": "http://elsewhere"}
    assert "access-control-allow-origin" not in world.post("/v1/models", body, origin)[1]


def test_a_long_body_is_refused_before_it_is_read(tokenizer):
    world = World(tokenizer)
    world.service = scripted_service(tokenizer, world.engine, max_body_bytes=1000)
    with running(world.service) as world.url:
        body = {"messages": [{"role": "user", "content": "x" * 1000}]}
        status, _, told = world.post("/v1/chat/completions", body)
        assert (status, told["error"]["code"]) == (413, "body_too_large")
        assert world.chat("ok").choices[0].message.content == "ok"


def test_a_server_told_its_names_answers_to_no_other(tokenizer):
    world = World(tokenizer)
    world.service = scripted_service(
        tokenizer, world.engine, allowed_hosts=("127.0.0.1",), cors_origins=("http://page",)
    )
    with running(world.service) as world.url:
        assert world.chat("ok").choices[0].message.content == "ok"
        body = {"messages": USER, **THINKING_OFF}
        headers = {"content-type": "application/json", "host": "elsewhere:80"}
        status, _, told = world.post("/v1/chat/completions", body, headers)
        assert (status, told["error"]["type"]) == (403, "permission_error")
        headers["host"] = "["
        assert world.post("/v1/chat/completions", body, headers)[0] == 403
        assert world.post("/v1/nothing", body, headers)[0] == 404
        for origin, allowed in (("http://page", "http://page"), ("http://other", None)):
            headers = {"content-type": "application/json", "origin": origin}
            found = world.post("/v1/chat/completions", body, headers)[1]
            assert found.get("access-control-allow-origin") == allowed


def test_a_body_that_is_late_or_grows_over_the_limit_is_refused(tokenizer):
    world = World(tokenizer)
    world.service = scripted_service(
        tokenizer, world.engine, body_timeout_s=0.1, max_body_bytes=1000
    )
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with running(world.service) as world.url:
        host = urlsplit(world.url)
        for told, sent, status in (
            ("content-length: 10", b"{", b"408"),
            ("transfer-encoding: chunked", b"3e9\r\n" + b"x" * 1001 + b"\r\n", b"413"),
        ):
            with socket.create_connection((host.hostname, host.port), timeout=5) as connection:
                connection.sendall(f"{head}{told}\r\n\r\n".encode() + sent)
                assert connection.recv(4096).split()[1] == status
        assert world.chat("ok").choices[0].message.content == "ok"


def test_two_tenants_share_no_cached_prefix_and_a_wrong_key_gets_401(tokenizer):
    world = World(tokenizer)
    keys = ApiKeys({"key-a": "a", "key-b": "b"})
    with running(world.service, keys) as world.url:

        def hits(key):
            answer = world.client(key).chat.completions.create(
                model="finwhale", messages=USER, extra_body=THINKING_OFF
            )
            return answer.usage.prompt_cache_hit_tokens

        assert hits("key-a") == 0
        # The scripted engine's rule: a prompt seen under the same salt, but for its last token.
        assert hits("key-a") == len(world.engine.added[0][0]) - 1
        assert hits("key-b") == 0
        for key in ("key-c", "a", "key-"):
            with pytest.raises(openai.AuthenticationError):
                hits(key)
        assert {salt for _, _, salt in world.engine.added} == {"a", "b"}
        connection = http.client.HTTPConnection(urlsplit(world.url).netloc, timeout=10)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 401
        connection.close()


def test_a_full_queue_answers_503_and_a_full_tenant_429_with_retry_after(tokenizer):
    world = World(tokenizer)
    world.engine.step_s = 0.01
    world.service = scripted_service(tokenizer, world.engine, max_requests=3, max_tenant_requests=2)
    with running(world.service, ApiKeys({"a": "a", "b": "b"})) as world.url:
        world.parts = ("x" * 3000,)

        def stream(key, n):
            return world.client(key).chat.completions.create(
                model="finwhale",
                messages=USER,
                n=n,
                max_tokens=3000,
                stream=True,
                extra_body=THINKING_OFF,
            )

        held = stream("a", 2)
        with pytest.raises(openai.RateLimitError) as limited:
            stream("a", 1)
        with pytest.raises(openai.InternalServerError) as overloaded:
            stream("b", 2)
        assert overloaded.value.status_code == 503
        for refused in (limited, overloaded):
            assert refused.value.response.headers["retry-after"] == "1"
        held.close()
        until(lambda: world.service.worker.num_in_flight == 0)
        stream("a", 2).close()


def test_a_failed_step_fails_its_requests_and_the_next_one_is_served(tokenizer):
    world = World(tokenizer)
    with running(world.service) as world.url:
        world.engine.num_failures = 1
        with pytest.raises(openai.InternalServerError) as failed:
            world.chat("x")
        assert "planted" not in str(failed.value)
        assert world.chat("fine").choices[0].message.content == "fine"
        world.engine.step_s = 0.02
        stream = iter(world.chat("x" * 100, stream=True))
        next(stream)
        world.engine.num_failures = 1
        with pytest.raises(openai.APIError):
            list(stream)
        assert world.chat("fine").choices[0].message.content == "fine"


def test_an_answer_over_its_time_is_cut_off_with_an_error(tokenizer):
    world = World(tokenizer)
    world.engine.step_s = 0.02
    world.service = scripted_service(tokenizer, world.engine, request_timeout_s=0.1)
    with running(world.service) as world.url:
        with pytest.raises(openai.InternalServerError) as late:
            world.chat("x" * 3000, max_tokens=3000)
        assert late.value.status_code == 504
        until(lambda: not world.engine.has_work)
