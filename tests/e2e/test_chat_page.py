"""The chat page's protocol: headers, endpoints, and what a switched-off mechanism changes.

The page itself runs in tests/e2e/chat_page_in_browser.py, which `make test-browser` calls.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import threading
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
import torch

from finwhale.chat_ui.comparison import (
    CANDIDATE_POOL,
    ENGRAM,
    EXACT_REPLAY,
    MECHANISMS,
    Comparison,
    reply_logprobs,
)
from finwhale.chat_ui.demo_tools import STORE
from finwhale.chat_ui.page import page_headers, page_routes, page_text
from finwhale.model import Backbone, Numerics
from finwhale.ops import FAST, REFERENCE
from finwhale.serve.errors import InvalidRequestError, OverloadedError
from finwhale.serve.exchange import ApiKeys
from finwhale.serve.planning import ChatRequest
from finwhale.serve.preparation import Preparer
from finwhale.text.prompt import encode_conversation, encode_prompt
from tests.models import unit_model
from tests.scripted_engine import (
    VOCAB_SIZE,
    ScriptedEngine,
    answer_ids,
    byte_tokenizer,
    running,
    scripted_service,
)

ASKED = [{"role": "user", "content": "a question"}]
REPLY = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model():
    return model_for_text()


def model_for_text(**text) -> Backbone:
    """`unit` with random weights, a row of the head for each token, and other text fields."""
    unit = unit_model(numerics=Numerics())
    config = unit.config
    config = replace(
        config,
        text_config=replace(
            config.text_config,
            vocab_size=VOCAB_SIZE,
            engram_compressed_vocab_size=VOCAB_SIZE,
            **text,
        ),
    )
    made = Backbone(config, torch.arange(VOCAB_SIZE), Numerics(), FAST)
    made.init_weights(3)
    with torch.no_grad():
        # As large as a trained model's, so that each mechanism is heard in the logits.
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return made.eval()


def preparer_of(tokenizer) -> Preparer:
    return scripted_service(tokenizer, ScriptedEngine(lambda prompt, index: [])).preparer


@pytest.fixture(scope="module")
def comparison(model, tokenizer):
    return Comparison(model, preparer_of(tokenizer), max_tokens=1300)


def said(told: dict, side: str) -> list[float]:
    return [token[side] for token in told["tokens"]]


# --- what a comparison is ------------------------------------------------------------------------


@torch.no_grad()
def whole_pass(model, ids, num_prompt, ops=REFERENCE, **text):
    """Log-probabilities of ids[num_prompt:], by one forward pass of another Backbone."""
    config = replace(model.config, text_config=replace(model.config.text_config, **text))
    other = Backbone(config, model.token_map, model.numerics, ops)
    other.load_state_dict(model.state_dict())
    logprobs = other.eval()(torch.tensor([ids]))[0].log_softmax(-1)
    return [float(logprobs[n - 1, ids[n]]) for n in range(num_prompt, len(ids))]


def test_both_sides_are_whole_passes_of_the_conversation(comparison, model, tokenizer):
    told = comparison.run(ChatRequest(messages=ASKED), REPLY, [ENGRAM])
    ids, _ = encode_conversation(tokenizer, [*ASKED, REPLY])
    num_prompt = len(encode_prompt(tokenizer, ASKED))
    assert told["prompt_tokens"] == num_prompt
    # The last token is the end marker: a reply is scored with its end.
    assert len(told["tokens"]) == len(ids) - num_prompt
    assert "".join(t["text"] for t in told["tokens"][:2]) == "hm"
    with_, without = said(told, "with"), said(told, "without")
    assert with_ == pytest.approx(whole_pass(model, ids, num_prompt), abs=2e-3)
    silent = replace(REFERENCE, engram_gate=lambda streams, *rest: streams)
    assert without == pytest.approx(whole_pass(model, ids, num_prompt, silent), abs=2e-3)
    # And the two differ by far more than that.
    assert max(abs(a - b) for a, b in zip(with_, without, strict=True)) > 0.05
    assert told["mean_with"] == pytest.approx(sum(with_) / len(with_))


def test_nothing_switched_changes_nothing(comparison):
    told = comparison.run(ChatRequest(messages=ASKED), REPLY, [])
    assert said(told, "with") == said(told, "without")
    assert told["num_choices_changed"] == 0


def test_a_pool_with_room_for_all_changes_nothing_and_a_small_one_does(model, tokenizer):
    long = [{"role": "user", "content": "a long question " * 20}]
    text = model.config.text_config
    entries = text.candidate_topk_blocks * text.candidate_block_size
    small = Comparison(model, preparer_of(tokenizer), max_tokens=1300)
    told = small.run(ChatRequest(messages=long), REPLY, [CANDIDATE_POOL])
    assert told["prompt_tokens"] > entries
    assert told["notes"] == []
    assert said(told, "with") != said(told, "without")
    ids, _ = encode_conversation(tokenizer, [*long, REPLY])
    everything = whole_pass(model, ids, told["prompt_tokens"], candidate_topk_blocks=1000)
    assert said(told, "without") == pytest.approx(everything, abs=2e-3)
    roomy = model_for_text(candidate_topk_blocks=1000)
    large = Comparison(roomy, preparer_of(tokenizer), max_tokens=1300)
    told = large.run(ChatRequest(messages=long), REPLY, [CANDIDATE_POOL])
    assert said(told, "with") == said(told, "without")
    assert told["notes"][0].startswith("Candidate pool: it holds")


def test_bounded_replay_changes_long_prompts_alone(comparison, model):
    long = [{"role": "user", "content": "a long question " * 20}]
    told = comparison.run(ChatRequest(messages=long), REPLY, [EXACT_REPLAY])
    assert said(told, "with") != said(told, "without")
    assert told["notes"] == []
    window = model.config.text_config.sliding_window
    prompt, reply = list(range(3, 3 + window)), [7, 8, 9]
    exact, _ = reply_logprobs(model, prompt, reply, prefill="exact")
    bounded, _ = reply_logprobs(model, prompt, reply, prefill="bounded")
    assert exact == pytest.approx(bounded, abs=1e-5)
    longer = [3, *prompt, *prompt]
    exact, _ = reply_logprobs(model, longer, reply, prefill="exact")
    full, _ = reply_logprobs(model, longer, reply, prefill="full")
    bounded, _ = reply_logprobs(model, longer, reply, prefill="bounded")
    assert exact == pytest.approx(full, abs=2e-3)
    assert exact != pytest.approx(bounded, abs=2e-3)


def test_a_reply_of_one_token_is_scored(model):
    logprobs, best = reply_logprobs(model, [3, 4, 5], [6], prefill="exact")
    assert len(logprobs) == len(best) == 1
    assert logprobs[0] < 0


def test_a_comparison_leaves_the_served_model_as_it_was(comparison, model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ops, config = model.parts.ops, model.config
    comparison.run(ChatRequest(messages=ASKED), REPLY, [ENGRAM, CANDIDATE_POOL, EXACT_REPLAY])
    assert (model.parts.ops, model.config) == (ops, config)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_second_comparison_at_once_is_refused(comparison):
    comparison._busy.acquire()
    try:
        with pytest.raises(OverloadedError, match="another comparison runs"):
            comparison.run(ChatRequest(messages=ASKED), REPLY, [ENGRAM])
    finally:
        comparison._busy.release()
    comparison.run(ChatRequest(messages=ASKED), REPLY, [ENGRAM])


def test_what_one_tenant_compared_is_computed_anew_for_another(model, tokenizer, monkeypatch):
    made, sides = Comparison(model, preparer_of(tokenizer), max_tokens=1300), []
    side = Comparison._side

    def noted(self, prompt, reply, off):
        sides.append(tuple(off))
        return side(self, prompt, reply, off)

    monkeypatch.setattr(Comparison, "_side", noted)

    def passes(tenant, off=()):
        sides.clear()
        told = made.run(ChatRequest(messages=ASKED, tenant=tenant), REPLY, off)
        return list(sides), told["mean_with"]

    first = passes("a")
    assert first[0] == [()]
    # The side with everything on is remembered for the one who asked, who tries a switch.
    assert passes("a", [ENGRAM])[0] == [(ENGRAM,)]
    assert passes("a")[0] == []
    for other in ("b", ""):
        assert passes(other) == first
        assert passes(other)[0] == []


def test_a_refusal_does_not_keep_the_next_one_out(comparison):
    with pytest.raises(InvalidRequestError, match="at most 1300"):
        comparison.run(
            ChatRequest(messages=[{"role": "user", "content": "x" * 1400}]), REPLY, [ENGRAM]
        )
    assert comparison.run(ChatRequest(messages=ASKED), REPLY, [ENGRAM])["tokens"]


@pytest.mark.parametrize("off", [["sinks"], ["engram", "x" * 500]])
def test_an_unknown_mechanism_is_refused_by_name(comparison, off):
    with pytest.raises(InvalidRequestError, match=f"got '{off[-1][:80]}'"):
        comparison.run(ChatRequest(messages=ASKED), REPLY, off)


def test_a_model_without_engram_offers_no_switch_for_it(tokenizer):
    plain = model_for_text(engram_layer_ids=(), engram_num_embeddings=())
    made = Comparison(plain, preparer_of(tokenizer))
    assert list(made.unsupported) == [ENGRAM]
    with pytest.raises(InvalidRequestError, match="no Engram layer"):
        made.run(ChatRequest(messages=ASKED), REPLY, [ENGRAM])


# --- over HTTP -----------------------------------------------------------------------------------


def ask(url, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    own = {"content-type": "application/json"} if raw is not None else {}
    connection.request(method, path, raw, {**own, **(headers or {})})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    kind = response.getheader("content-type", "")
    return response, json.loads(content) if kind == "application/json" else content.decode()


@pytest.fixture(scope="module")
def url(tokenizer, comparison):
    engine = ScriptedEngine(lambda prompt, index: answer_ids(tokenizer, "hello"))
    service = scripted_service(tokenizer, engine, allowed_hosts=("127.0.0.1",))
    routes = page_routes(service, bytes_per_token=890, comparison=comparison)
    with running(service, routes=routes) as address:
        yield address


class Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.found, self.inline, self._open = [], {"script": [], "style": []}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._open = tag if tag in self.inline else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.inline[self._open].append(data)


def test_the_page_is_one_file_under_a_policy_that_names_its_own_script_and_style(url):
    response, page = ask(url, "GET", "/")
    assert response.status == 200
    assert response.getheader("content-type") == "text/html; charset=utf-8"
    policy = response.getheader("content-security-policy")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    elements = Elements(page)
    for kind, texts in elements.inline.items():
        assert len(texts) == 1
        digest = base64.b64encode(hashlib.sha256(texts[0].encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in policy
    for tag, attributes in elements.found:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{tag} has {name}"
            assert name != "style", f"{tag} has a style that the policy forbids"
            if name in ("src", "href"):
                assert value == "data:,", f"{tag} fetches {value}"
    assert response.getheader("x-content-type-options") == "nosniff"


def test_another_script_has_another_hash():
    page = page_text()
    changed = page.replace('"use strict";', '"use strict"; ')
    own, other = (page_headers(text)["content-security-policy"] for text in (page, changed))
    assert own != other


def test_the_page_makes_no_html_of_text():
    # Ways to turn a string into elements or code; the browser test shows the effect.
    banned = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|setAttribute"
    assert not re.search(banned, page_text())


def test_the_model_tells_its_figures_tools_and_switches(url):
    response, facts = ask(url, "GET", "/finwhale/model")
    assert response.status == 200
    assert facts["model"] == "finwhale"
    assert facts["bytes_per_token"] == 890
    assert facts["store"] == dict(STORE)
    assert {tool["function"]["name"] for tool in facts["tools"]} >= {"calculate", "read_file"}
    assert [m["name"] for m in facts["mechanisms"]] == list(MECHANISMS)


def test_a_tool_call_returns_its_result_and_the_chats_own_store(url):
    body = {"name": "set_value", "arguments": '{"key": "limo", "value": 5}', "store": {"a": 1}}
    response, told = ask(url, "POST", "/finwhale/tool", body)
    assert (response.status, told) == (200, {"result": "ok", "store": {"a": 1, "limo": 5}})
    # Nobody else sees it.
    read = {"name": "get_value", "arguments": '{"key": "limo"}'}
    assert ask(url, "POST", "/finwhale/tool", read)[1]["result"] == "27"


def test_a_comparison_over_http_is_the_comparison(url, comparison):
    body = {"messages": [*ASKED, REPLY], "off": ["engram"]}
    response, told = ask(url, "POST", "/finwhale/compare", body)
    assert response.status == 200
    own = comparison.run(ChatRequest(messages=ASKED), REPLY, ["engram"])
    assert told["tokens"] == own["tokens"]


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "calculate", "arguments": "{}"}}
    ],
}


def test_a_reply_that_calls_a_tool_can_be_compared(url):
    _, facts = ask(url, "GET", "/finwhale/model")
    tool = [t for t in facts["tools"] if t["function"]["name"] == "get_value"]
    body = {"messages": [*ASKED, CALLED], "off": ["engram"], "tools": tool, "thinking": False}
    response, told = ask(url, "POST", "/finwhale/compare", body)
    assert response.status == 200, told
    assert 'invoke name="calculate"' in "".join(token["text"] for token in told["tokens"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("compare", {}),
        ("compare", {"messages": []}),
        ("compare", {"messages": [REPLY]}),
        ("compare", {"messages": ASKED}),
        ("compare", {"messages": [*ASKED, {**REPLY, "content": 5}]}),
        ("compare", {"messages": [*ASKED, {**REPLY, "tool_calls": [5]}]}),
        ("compare", {"messages": [*ASKED, {**REPLY, "tool_calls": {"a": 1}}]}),
        ("compare", {"messages": [*ASKED, REPLY], "off": ["nothing"]}),
        ("compare", {"messages": [*ASKED, REPLY], "effort": 1000}),
        ("compare", {"messages": [*ASKED, REPLY], "more": 1}),
        ("compare", {"messages": [{"role": "user", "content": "x" * 3000}, REPLY]}),
        ("compare", b"{"),
        ("tool", {}),
        ("tool", {"name": "get_value", "arguments": "{}", "store": {"a": "text"}}),
        ("tool", {"name": "x", "arguments": "{}", "store": {str(n): n for n in range(200)}}),
    ],
)
def test_a_wrong_body_is_refused_with_a_sentence(url, path, body):
    response, told = ask(url, "POST", f"/finwhale/{path}", body)
    assert response.status == 400, told
    assert told["error"]["message"]


@pytest.mark.parametrize("path", ["compare", "tool"])
def test_a_body_that_is_decoded_in_the_event_loop_is_small(url, path):
    raw = json.dumps({"name": "x" * (256 << 10), "arguments": "{}"}).encode()
    response, told = ask(url, "POST", f"/finwhale/{path}", raw)
    assert response.status == 413, told


def test_a_body_that_a_foreign_page_could_send_is_refused(url):
    response, _ = ask(url, "POST", "/finwhale/tool", b"{}", {"content-type": "text/plain"})
    assert response.status == 415
    response, _ = ask(url, "GET", "/", headers={"host": "elsewhere.example"})
    assert response.status == 403


def test_two_comparisons_at_once_are_one_answer_and_one_refusal(url, comparison):
    body = {"messages": [*ASKED, REPLY], "off": ["engram"]}
    statuses = []
    # Held as a running comparison holds it.
    assert comparison._busy.acquire(blocking=False)
    try:
        thread = threading.Thread(
            target=lambda: statuses.append(ask(url, "POST", "/finwhale/compare", body)[0])
        )
        thread.start()
        thread.join(timeout=20)
    finally:
        comparison._busy.release()
    assert statuses[0].status == 503
    assert statuses[0].getheader("retry-after") == "2"
    assert ask(url, "POST", "/finwhale/compare", body)[0].status == 200


def test_with_keys_the_page_is_open_and_everything_behind_it_is_not(tokenizer):
    engine = ScriptedEngine(lambda prompt, index: answer_ids(tokenizer, "hello"))
    service = scripted_service(tokenizer, engine)
    keys = ApiKeys({"open": "me"})
    with running(service, keys, routes=page_routes(service, keys)) as address:
        assert ask(address, "GET", "/")[0].status == 200
        call = {"name": "get_value", "arguments": '{"key": "limo"}'}
        assert ask(address, "GET", "/finwhale/model")[0].status == 401
        assert ask(address, "POST", "/finwhale/tool", call)[0].status == 401
        assert ask(address, "POST", "/finwhale/compare", {"messages": []})[0].status == 401
        bearer = {"authorization": "Bearer open"}
        assert ask(address, "POST", "/finwhale/tool", call, bearer)[1]["result"] == "27"
        # A server without a comparison has no mechanisms to show.
        facts = ask(address, "GET", "/finwhale/model", headers=bearer)[1]
        assert (facts["mechanisms"], facts["bytes_per_token"]) == ([], None)
        refused = ask(address, "POST", "/finwhale/compare", {"messages": [REPLY]}, bearer)
        assert refused[0].status == 404
