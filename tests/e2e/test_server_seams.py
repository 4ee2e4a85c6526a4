"""Where rooms of the server meet: ids without text, failures of readers, notes, deep bodies."""

from __future__ import annotations

import http.client
import json
import logging
from urllib.parse import urlsplit

import pytest

from finwhale.config.server import ServerConfig
from finwhale.serve.generation import TextReader
from finwhale.serve.service import Service
from finwhale.text.special_tokens import DSML
from tests.scripted_engine import (
    CONTEXT_TOKENS,
    THINKING_OFF,
    USER,
    VOCAB_SIZE,
    World,
    running,
    until,
)

FUNCTION = {"name": "f", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def ask(world, path, body):
    """Status, headers and text of an answer, a stream or not."""
    connection = http.client.HTTPConnection(urlsplit(world.url).netloc, timeout=10)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, raw, {"content-type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, dict(response.getheaders()), text


@pytest.fixture
def padded(tokenizer):
    """A model whose head has 64 rows more than the tokenizer has tokens; it says one of them."""
    world = World(tokenizer)
    ids = [*tokenizer.encode("a"), VOCAB_SIZE + 7, *tokenizer.encode("b"), tokenizer.eos_id]
    world.engine.script = lambda prompt, index: ids
    world.service = Service(
        world.engine,
        tokenizer,
        ServerConfig(),
        vocab_size=VOCAB_SIZE + 64,
        context_tokens=CONTEXT_TOKENS,
    )
    with running(world.service) as world.url:
        yield world


@pytest.mark.parametrize("stream", [False, True])
def test_an_id_beyond_the_tokenizer_has_no_text_and_holds_nobody_up(padded, stream):
    for path, body in (
        ("/v1/completions", {"prompt": "x", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": USER, "logprobs": True, **THINKING_OFF}),
    ):
        status, _, text = ask(padded, path, {**body, "stream": stream, "max_tokens": 9})
        assert status == 200, text
        assert "internal error" not in text
        # The letters before and after it.
        assert '"ab"' in text or ('"a"' in text and '"b"' in text)
    until(lambda: padded.service.worker.num_in_flight == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reader_that_fails_ends_its_completion_and_no_other(world, monkeypatch, stream):
    world.parts = ("hi",)

    def broken(self, result):
        raise ArithmeticError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(TextReader, "feed", broken)
        status, _, text = ask(world, "/v1/completions", {"prompt": "x", "stream": stream})
    assert status == (200 if stream else 500)
    assert "internal error" in text
    assert world.post("/v1/completions", {"prompt": "x"})[2]["choices"][0]["text"] == "hi"
    until(lambda: world.service.worker.num_in_flight == 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/anthropic/v1/messages/count_tokens",
            {
                "messages": USER,
                "tools": [{"name": "f", "input_schema": {"type": "object"}}, SEARCH],
            },
        ),
        ("/v1/responses/input_tokens", {"input": "q", "tools": [{"type": "image_generation"}]}),
    ],
)
def test_a_count_says_what_was_left_out(world, path, body):
    status, headers, text = ask(world, path, body)
    assert status == 200, text
    assert headers["x-finwhale-note"].startswith("tools left out: ")


def test_the_log_of_a_loose_schema_has_no_words_of_the_client(world, caplog):
    loose = {"type": "function", "function": {"name": "secret_tool"}}
    loose["function"]["parameters"] = {"type": "object", "anyOf": [{"required": ["a"]}]}
    body = {"messages": USER, "tools": [loose], "tool_choice": "required", "max_tokens": 60}
    # The one line that is forced all the same.
    world.parts = ("<", DSML, ' invoke name="secret_tool">\n')
    with caplog.at_level(logging.INFO, logger="finwhale.serve"):
        status, headers, text = ask(world, "/v1/chat/completions", body)
    assert status == 200, text
    assert "arguments that follow no grammar: secret_tool" in headers["x-finwhale-note"]
    assert "arguments that follow no grammar" in caplog.text
    assert "secret_tool" not in caplog.text


@pytest.mark.parametrize("depth", [990, 2000, CONTEXT_TOKENS])
def test_an_answer_that_repeats_a_deep_body_is_a_refusal_and_no_failure(world, depth):
    deep = '{"a":' * depth + "1" + "}" * depth
    raw = '{"input": "q", "tools": [{"type": "custom", "x": ' + deep + "}]}"
    status, _, _ = ask(world, "/v1/responses", raw.encode())
    assert status in (200, 400)
