"""Bodies, keys, constraints, figures and settings of the server: what is refused and how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from finwhale.chat_ui.serve_command import Serve
from finwhale.config import ConfigError
from finwhale.config.server import ServerConfig
from finwhale.engine.request import RequestOutput, TokenResult
from finwhale.serve.errors import InvalidRequestError, ServeError, UnauthorizedError, openai_body
from finwhale.serve.exchange import ApiKeys
from finwhale.serve.metrics import Metrics
from finwhale.serve.output_constraints import AfterReasoning, OpensCall, opens_call
from finwhale.serve.schema import ChatBody, CompletionBody, decode
from finwhale.text.grammar import json_object_constraint
from finwhale.text.special_tokens import DSML, END_THINK
from tests.scripted_engine import (
    VOCAB_SIZE,
    ScriptedEngine,
    answer_ids,
    byte_tokenizer,
    scripted_service,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def service(tokenizer):
    # Never started: preparing a request touches no engine.
    return scripted_service(tokenizer, ScriptedEngine(lambda prompt, index: []))


def allowed(constraint):
    return set(constraint.mask().nonzero().flatten().tolist())


def walk(constraint, ids):
    for token in ids:
        assert token in allowed(constraint)
        constraint.advance(token)


def test_reasoning_is_free_but_cannot_end_the_text_and_then_the_grammar_holds(tokenizer):
    inner = json_object_constraint(tokenizer, vocab_size=VOCAB_SIZE + 3)
    at_start = allowed(inner)
    walker = AfterReasoning(inner, tokenizer, vocab_size=VOCAB_SIZE + 3)
    assert walker.mask().shape == (VOCAB_SIZE + 3,)
    assert allowed(walker) == set(range(VOCAB_SIZE)) - {tokenizer.eos_id}
    with pytest.raises(ValueError, match="mask"):
        walker.advance(tokenizer.eos_id)
    early = walker.copy()
    walk(walker, answer_ids(tokenizer, "no json", END_THINK, end=False))
    assert allowed(walker) == at_start
    with pytest.raises(ValueError, match="mask"):
        walker.advance(tokenizer.encode("n")[0])
    walk(walker, answer_ids(tokenizer, "{}"))
    assert walker.is_finished
    # A copy goes its own way.
    assert not early.is_finished
    assert allowed(early) == set(range(VOCAB_SIZE)) - {tokenizer.eos_id}


def test_a_tag_spelled_in_plain_tokens_ends_the_reasoning_as_for_the_parser(tokenizer):
    inner = json_object_constraint(tokenizer, vocab_size=VOCAB_SIZE)
    walker = AfterReasoning(inner, tokenizer, vocab_size=VOCAB_SIZE)
    spelled = tokenizer.encode(f"x{END_THINK}")
    assert tokenizer.marker_id(END_THINK) not in spelled
    walk(walker, spelled)
    assert tokenizer.encode("x")[0] not in allowed(walker)


def test_a_call_begins_with_one_of_the_names_and_is_free_behind_it(tokenizer):
    walker = opens_call(tokenizer, ["get", "got"], vocab_size=VOCAB_SIZE)
    dsml = tokenizer.marker_id(DSML)
    assert allowed(walker) == set(tokenizer.encode("<"))
    walk(walker, [*tokenizer.encode("<"), dsml, *tokenizer.encode(' invoke name="g')])
    assert allowed(walker) == {*tokenizer.encode("e"), *tokenizer.encode("o")}
    with pytest.raises(ValueError, match="mask"):
        walker.advance(tokenizer.encode("a")[0])
    walk(walker, tokenizer.encode('ot">\n'))
    assert allowed(walker) == set(range(VOCAB_SIZE))
    assert not walker.is_finished


def test_a_copy_of_a_call_constraint_stands_where_it_was_made():
    walker = OpensCall([(3, 4)], vocab_size=6)
    twin = walker.copy()
    walker.advance(3)
    assert (allowed(walker), allowed(twin)) == ({4}, {3})
    assert walker.mask().dtype is torch.bool


def test_null_and_absent_fields_and_unknown_ones_are_the_same():
    lean = decode(b'{"messages": [], "n": null, "stop": null, "nobody_knows": {}}', ChatBody)
    assert lean.request("t") == decode(b'{"messages": []}', ChatBody).request("t")
    assert lean.request("t").tenant == "t"


def test_names_of_fields_that_two_vendors_spell_differently_mean_one_thing():
    body = {"messages": [], "max_completion_tokens": 5, "stop": "x", "logit_bias": {"7": -1}}
    sampling = decode(json.dumps(body).encode(), ChatBody).request("").sampling
    assert (sampling.max_tokens, sampling.stop, sampling.logit_bias) == (5, ("x",), {7: -1.0})


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("limit", [0, 393_217])
def test_a_limit_out_of_range_is_refused_by_the_name_it_came_with(name, limit):
    body = decode(json.dumps({"messages": [], name: limit}).encode(), ChatBody)
    with pytest.raises(InvalidRequestError, match=f"^{name}: got {limit}, expected") as refused:
        body.request("")
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("raw", "param"),
    [(b'{"messages": 5}', "messages"), (b'{"messages": [], "n": "two"}', "n"), (b"{", None)],
)
def test_a_wrong_type_is_refused_with_the_field_at_fault(raw, param):
    with pytest.raises(InvalidRequestError) as refused:
        decode(raw, ChatBody)
    assert refused.value.param == param
    assert set(openai_body(refused.value)["error"]) == {"message", "type", "param", "code"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system", "x"]) | JSON,
        "content": st.text(max_size=5) | JSON,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "id": JSON,
                    "function": st.fixed_dictionaries({"name": JSON, "arguments": JSON}) | JSON,
                },
            ),
            max_size=2,
        )
        | JSON,
        "tool_call_id": JSON,
        "prefix": JSON,
        "reasoning_content": JSON,
    },
)
TOOL = st.fixed_dictionaries(
    {"type": st.just("function")},
    optional={"function": st.fixed_dictionaries({"name": JSON, "parameters": JSON}) | JSON},
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3)},
    optional={
        "tools": st.lists(TOOL | JSON, max_size=2) | JSON,
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | JSON,
        "response_format": st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "json_object", "json_schema", "regex"])},
            optional={"json_schema": st.fixed_dictionaries({"schema": JSON}) | JSON, "regex": JSON},
        )
        | JSON,
        "reasoning_effort": JSON,
        "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled"])})
        | JSON,
        "stop": JSON,
        "n": st.integers(),
        "seed": st.integers(),
        "temperature": st.floats(allow_nan=False) | JSON,
        "logit_bias": JSON,
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(),
    },
)
FUZZ = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(body=BODY)
def test_any_json_is_either_prepared_or_refused_as_the_clients_fault(service, body):
    # Any other exception than a ServeError fails here.
    refused = None
    try:
        request = decode(json.dumps(body).encode(), ChatBody).request("")
        service.preparer.chat(request)
    except ServeError as error:
        refused = error
    assert refused is None or (refused.status == 400 and refused.message)


@FUZZ
@given(
    body=st.fixed_dictionaries(
        {"prompt": JSON | st.lists(st.integers(-2, 300), max_size=3)},
        optional={"stop": JSON, "n": st.integers(-1, 4), "logprobs": JSON, "max_tokens": JSON},
    )
)
def test_any_completion_is_either_prepared_or_refused_as_the_clients_fault(service, body):
    refused = None
    try:
        requests = decode(json.dumps(body).encode(), CompletionBody).requests("", max_choices=16)
        for request in requests:
            service.preparer.text(request)
    except ServeError as error:
        refused = error
    assert refused is None or (refused.status == 400 and refused.message)


def request_with(**headers):
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": pairs})


def test_a_key_file_gives_each_key_its_tenant(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# for people\none team\ntwo team\n\nthree\nfour\n")
    keys = ApiKeys.from_file(file)
    tenants = {
        name: keys.tenant(request_with(authorization=f"Bearer {name}"))
        for name in ("one", "two", "three", "four")
    }
    assert tenants["one"] == tenants["two"] == "team"
    assert len(set(tenants.values())) == 3
    # A tenant's name says nothing of its key.
    assert "three" not in tenants["three"]
    assert keys.tenant(request_with(x_api_key="one")) == "team"
    for headers in ({}, {"authorization": "Bearer team"}, {"authorization": "Basic one"}):
        with pytest.raises(UnauthorizedError):
            keys.tenant(request_with(**headers))
    assert ApiKeys().tenant(request_with()) == ""


@pytest.mark.parametrize("text", ["", "# none\n", "a b c\n", "a\na\n"])
def test_a_key_file_that_is_empty_or_ambiguous_is_refused(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="api_key_file"):
        ApiKeys.from_file(file)


@pytest.mark.parametrize(
    "settings_",
    [
        {"model_names": ()},
        {"max_requests": 0},
        {"max_body_bytes": 0},
        {"keep_alive_s": 0},
        {"request_timeout_s": float("nan")},
        {"shutdown_grace_s": -1},
        {"temperature": 3},
        {"top_p": 0},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_by_name(settings_):
    with pytest.raises(ConfigError, match=f"server.{next(iter(settings_))}"):
        ServerConfig(**settings_)


def test_buckets_are_cumulative_and_counters_keep_their_labels():
    metrics = Metrics(lambda: {"waiting": ("Waiting.", 2)})
    for seconds in (0.001, 0.02, 1000.0):
        metrics.observe("request_seconds", seconds)
    metrics.count("requests_total", endpoint="chat", outcome="ok")
    metrics.count("requests_total", endpoint="chat", outcome="ok")
    new = (TokenResult(token=1), TokenResult(token=2))
    metrics.step(0.5, [RequestOutput(request_id="a", new=new), RequestOutput(request_id="b")])
    lines = metrics.text().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    name = "finwhale_request_seconds"
    assert values[f'{name}_bucket{{le="0.001"}}'] == "1"
    assert values[f'{name}_bucket{{le="0.025"}}'] == "2"
    assert values[f'{name}_bucket{{le="300"}}'] == "2"
    assert values[f'{name}_bucket{{le="+Inf"}}'] == values[f"{name}_count"] == "3"
    assert float(values[f"{name}_sum"]) == pytest.approx(1000.021)
    assert values['finwhale_requests_total{endpoint="chat",outcome="ok"}'] == "2"
    assert values["finwhale_generated_tokens_total"] == "2"
    assert values["finwhale_waiting"] == "2"
    # Every series is declared before it is used.
    declared = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared))
    with pytest.raises(ValueError, match="expected one of"):
        metrics.count("nothing_total")


def test_an_open_address_without_keys_is_refused_before_anything_is_read():
    missing = Path("nowhere")
    with pytest.raises(ValueError, match=r"--host.*--api-key-file"):
        Serve(model=missing, host="0.0.0.0").run()
    with pytest.raises(ValueError, match="--port"):
        Serve(model=missing, port=70000).run()
    # Loopback gets as far as the files.
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Serve(model=missing).run()
