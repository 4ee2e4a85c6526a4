"""What browsers, probes and operators see: origins, states, headers of every answer, log lines."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import zlib
from urllib.parse import urlsplit

import anthropic
import openai
import pytest
from starlette.routing import Route

from finwhale.serve.exchange import ApiKeys
from tests.metrics_page import check_page
from tests.scripted_engine import THINKING_OFF, USER, World, running, scripted_service, until

BODY = {"messages": USER, **THINKING_OFF}
JSON = {"content-type": "application/json"}


def ask(url, method, path, body=None, headers=None):
    """Status, headers with lower-case names, body bytes."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, {k.lower(): v for k, v in response.getheaders()}, content


# --- origins -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paged(tokenizer):
    world = World(tokenizer)
    world.service = scripted_service(tokenizer, world.engine, cors_origins=("http://page:3000",))
    with running(world.service) as world.url:
        yield world


def sdk_headers():
    """Names that the official clients send, from the packages; the browser ones send their like."""
    clients = openai.OpenAI(api_key="x"), anthropic.Anthropic(api_key="x")
    names = {name.lower() for client in clients for name in client.default_headers}
    names -= {"user-agent", "accept"}
    assert any(name.startswith("x-stainless-") for name in names)
    # Of a request, and of the TypeScript packages in a browser.
    more = (
        "x-stainless-retry-count",
        "x-stainless-timeout",
        "anthropic-beta",
        "anthropic-dangerous-direct-browser-access",
        "openai-beta",
        "traceparent",
    )
    return sorted({*names, *more})


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/chat/completions", "POST"),
        ("/anthropic/v1/messages", "POST"),
        ("/v1/models", "GET"),
        ("/v1/responses/resp_1", "DELETE"),
        ("/health", "HEAD"),
    ],
)
def test_an_admitted_origin_may_send_what_the_official_clients_send(paged, path, method):
    wanted = sdk_headers()
    headers = {
        "origin": "http://page:3000",
        "access-control-request-method": method,
        "access-control-request-headers": ",".join(wanted),
    }
    status, told, _ = ask(paged.url, "OPTIONS", path, headers=headers)
    assert status == 200
    assert told["access-control-allow-origin"] == "http://page:3000"
    # Fetch standard: each requested header must be named, and the method.
    allowed = {name.strip().lower() for name in told["access-control-allow-headers"].split(",")}
    assert allowed >= set(wanted)
    assert method in told["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in told


def test_the_answer_lets_the_page_read_the_id_of_the_request(paged):
    status, told, _ = ask(
        paged.url,
        "POST",
        "/v1/chat/completions",
        json.dumps(BODY),
        {**JSON, "origin": "http://page:3000"},
    )
    assert status == 200
    exposed = {name.strip() for name in told["access-control-expose-headers"].split(",")}
    assert exposed >= {"x-request-id", "request-id", "retry-after"}
    assert told["access-control-allow-origin"] == "http://page:3000"


@pytest.mark.parametrize("origin", ["http://page:3001", "https://page:3000", "http://page", "null"])
def test_another_origin_is_refused_before_and_after(paged, origin):
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-stainless-lang",
    }
    status, told, _ = ask(paged.url, "OPTIONS", "/v1/chat/completions", headers=headers)
    assert status == 400
    assert "access-control-allow-origin" not in told
    body = json.dumps(BODY)
    told = ask(paged.url, "POST", "/v1/chat/completions", body, {**JSON, "origin": origin})[1]
    assert "access-control-allow-origin" not in told


# --- codings over HTTP ---------------------------------------------------------------------------


def test_a_coded_body_is_answered_as_the_plain_one(world):
    world.parts = ("same",)
    plain = json.dumps(BODY).encode()
    for coding, sent in (
        ("gzip", gzip.compress(plain)),
        ("deflate", zlib.compress(plain)),
        ("identity", plain),
    ):
        status, _, told = world.post(
            "/v1/chat/completions", sent, {**JSON, "content-encoding": coding}
        )
        assert (status, told["choices"][0]["message"]["content"]) == (200, "same")
    for coding in ("br", "zstd"):
        headers = {**JSON, "content-encoding": coding}
        status, told, content = ask(world.url, "POST", "/v1/chat/completions", plain, headers)
        assert status == 415
        assert told["accept-encoding"] == "gzip, deflate, identity"
        assert coding in json.loads(content)["error"]["message"]


# --- headers of every answer ---------------------------------------------------------------------


def test_every_kind_of_answer_says_that_its_type_is_its_type(tokenizer):
    world = World(tokenizer)

    async def broken(_):
        raise KeyError("a secret")

    routes = [Route("/broken", broken)]
    keys = ApiKeys({"key-a": "a"})
    key = {"authorization": "Bearer key-a"}
    with running(world.service, keys, routes=routes) as world.url:
        chat = "/v1/chat/completions"
        stream = json.dumps({**BODY, "stream": True})
        cases = [
            ("GET", "/health", None, {}, 200),
            ("POST", chat, json.dumps(BODY), {**JSON, **key}, 200),
            ("POST", chat, stream, {**JSON, **key}, 200),
            ("POST", chat, "{", {**JSON, **key}, 400),
            ("POST", "/anthropic/v1/messages", "{", {**JSON, **key}, 400),
            ("POST", chat, "{}", JSON, 401),
            ("GET", "/<script>", None, {}, 404),
            ("GET", chat, None, {}, 405),
            ("POST", chat, "{}", {"content-type": "text/html", **key}, 415),
            ("GET", "/broken", None, {}, 500),
        ]
        for method, path, body, headers, status in cases:
            found, told, content = ask(world.url, method, path, body, headers)
            assert (found, told["x-content-type-options"]) == (status, "nosniff"), path
            if status >= 400:
                assert told["content-type"] == "application/json"
                assert "secret" not in content.decode()
                assert json.loads(content)["error"]["message"]


# --- states --------------------------------------------------------------------------------------

PROBES = ("/health", "/readyz", "/livez")


def states(url):
    """Statuses of the three probes; None while one changes between its GET and its HEAD."""
    found = []
    for path in PROBES:
        status, _, content = ask(url, "GET", path)
        head_status, head, head_content = ask(url, "HEAD", path)
        assert head_content == b""
        if head_status != status:
            return None
        # HEAD says the same as GET, without a body.
        assert head["content-length"] == str(len(content))
        fields = json.loads(content)
        assert fields["status"] == ("ok" if status == 200 else "unavailable")
        assert (status == 200) == ("reason" not in fields)
        found.append(status)
    return found


def test_ready_is_whether_a_request_would_be_served_and_live_whether_a_restart_would_help(
    tokenizer,
):
    world = World(tokenizer)
    world.service = scripted_service(tokenizer, world.engine, max_requests=2)
    with running(world.service) as world.url:
        assert states(world.url) == [200, 200, 200]
        world.engine.step_s = 0.01
        held = world.chat("x" * 3000, n=2, max_tokens=3000, stream=True)
        until(lambda: world.service.worker.num_in_flight == 2)
        # Full: as the next request finds out.
        assert states(world.url) == [503, 503, 200]
        with pytest.raises(openai.APIStatusError) as refused:
            world.chat("x")
        assert refused.value.status_code in (429, 503)
        held.close()
        until(lambda: states(world.url) == [200, 200, 200])
        world.engine.step_s = 0.0
        # Every step fails: given up after three, whatever is asked between.
        world.engine.num_failures = 10**6
        for _ in range(3):
            with pytest.raises(openai.InternalServerError):
                world.chat("x")
        until(lambda: states(world.url) == [503, 503, 503])
        assert "restart" in json.loads(ask(world.url, "GET", "/livez")[2])["reason"]


# --- the log and the figures ---------------------------------------------------------------------


def refusals(caplog):
    lines = [record.getMessage() for record in caplog.records]
    return [json.loads(line.removeprefix("refused ")) for line in lines if "refused {" in line]


def test_a_line_of_a_refusal_has_path_field_and_tenant_and_no_key(tokenizer, caplog):
    world = World(tokenizer)
    keys = ApiKeys({"secret-a": "team-a"})
    with running(world.service, keys) as world.url, caplog.at_level(logging.INFO):
        key = {**JSON, "authorization": "Bearer secret-a"}
        wrong = {**JSON, "authorization": "Bearer secret-b"}
        body = json.dumps({**BODY, "temperature": 9})
        ask(world.url, "POST", "/v1/chat/completions", body, key)
        ask(world.url, "POST", "/v1/chat/completions", body, wrong)
        ask(world.url, "GET", "/v1/nothing", None, key)
    told = [(n["path"], n["status"], n["param"], n["tenant"]) for n in refusals(caplog)]
    assert told == [
        ("/v1/chat/completions", 400, "temperature", "team-a"),
        ("/v1/chat/completions", 401, None, None),
        ("/v1/nothing", 404, None, None),
    ]
    assert "secret" not in caplog.text


def test_a_path_cannot_write_lines_of_its_own(tokenizer, caplog):
    world = World(tokenizer)
    with running(world.service) as world.url, caplog.at_level(logging.INFO):
        ask(world.url, "GET", "/%0arefused%20%7B%22status%22:1%7D" + "x" * 1000)
    [line] = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert "\n" not in line
    assert len(json.loads(line.removeprefix("refused "))["path"]) == 200


def test_the_figures_follow_the_conventions_and_a_counter_is_a_counter(world):
    world.chat("x")
    status, _, content = ask(world.url, "GET", "/metrics")
    assert status == 200
    kinds = check_page(content.decode())
    assert kinds["finwhale_requests_total"] == "counter"
    assert kinds["finwhale_open_connections"] == "gauge"
    assert kinds["finwhale_responses_in_flight"] == "gauge"
    with pytest.raises(AssertionError):
        check_page("# HELP finwhale_a x\n# TYPE finwhale_a counter\nfinwhale_a 1\n")
