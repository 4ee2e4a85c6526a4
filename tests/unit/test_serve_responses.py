"""Bodies of the Responses protocol against DeepSeek's own converter and stream writer."""

from __future__ import annotations

import base64
import json

import deepseek_recipe
import pytest

from finwhale.serve.errors import EngineFailedError, InvalidRequestError, OverloadedError
from finwhale.serve.generation import ChoiceEvent, Usage
from finwhale.serve.responses_api import Answer
from finwhale.serve.responses_body import ResponsesBody
from finwhale.serve.schema import decode
from finwhale.text.output_parser import OutputParser
from tests.scripted_engine import byte_tokenizer
from tests.unit.test_serve_anthropic import (
    CALL,
    ONE_CALL,
    count_served_and_refused,
    events_of_recipe,
    prompt_of,
    prompt_of_recipe,
)

TOOL = {
    "type": "function",
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
}
NAMESPACE = {"type": "namespace", "name": "ns", "description": "of ns", "tools": [TOOL]}
USER = {"role": "user", "content": "q"}
OFF = {"reasoning": {"effort": "none"}}


def said(words):
    content = [{"type": "output_text", "text": words}]
    return {"type": "message", "role": "assistant", "content": content}


def thought(words):
    content = [{"type": "reasoning_text", "text": words}]
    return {"type": "reasoning", "summary": [], "content": content}


def call(name):
    arguments = json.dumps({"x": name})
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": arguments}


def output(name, words="r"):
    return {"type": "function_call_output", "call_id": name, "output": words}


LOOP = [
    USER,
    thought("t"),
    said("a"),
    call("1"),
    call("2"),
    output("2"),
    output("1", [{"type": "input_text", "text": "p"}, {"type": "input_text", "text": "q"}]),
]


def body_of(**fields):
    return decode(json.dumps(fields).encode(), ResponsesBody)


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hi"},
        {"input": "<think>", **OFF},
        {"input": "hi", "reasoning": {"effort": "max"}},
        {"input": "hi", "instructions": "I"},
        {"input": [{"role": "developer", "content": "D"}, USER], "instructions": "I", **OFF},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}]},
        {"input": LOOP, "tools": [TOOL]},
        {"input": LOOP, "tools": [TOOL], **OFF},
        {"input": [*LOOP, thought("u"), said("b"), USER], "tools": [TOOL]},
        {"input": [*LOOP, thought("u"), call("3"), output("3")], "tools": [TOOL]},
        {"input": [USER, said("a"), said("b"), USER]},
        {"input": [USER, said("a")]},
        {"input": [USER, thought("t"), thought("u"), said("a"), USER], "tools": [TOOL]},
        {"input": [USER, said("a"), thought("t"), call("1"), output("1")], "tools": [TOOL]},
        {
            "input": "hi",
            "tools": [TOOL, {"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "f"},
            **OFF,
        },
        {
            "input": "json",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        },
        {"input": "json", "text": {"format": {"type": "json_object"}}},
        {"input": "hi", "text": {"format": {"type": "text"}}},
        {"input": "hi", "store": True, "previous_response_id": None},
        {"input": "hi", "tools": [NAMESPACE]},
        {"input": [USER, call("1") | {"namespace": "ns"}, output("1")], "tools": [NAMESPACE, TOOL]},
    ],
)
def test_a_prompt_is_the_one_that_deepseeks_converter_writes(fields):
    want = prompt_of_recipe(deepseek_recipe.ResponsesRequest, fields)
    assert prompt_of(body_of(**fields).request("")) == want


def test_a_lost_item_would_be_seen_by_the_comparison():
    whole = prompt_of(body_of(input=LOOP, tools=[TOOL]).request(""))
    less = [item for item in LOOP if item.get("type") != "reasoning"]
    assert prompt_of(body_of(input=less, tools=[TOOL]).request("")) != whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"user": "u" * 513}, "user"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "functoin", "name": "x"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"tool_choice": {"type": "custom", "name": "x"}}, "tool_choice"),
        ({"input": [USER, {"type": "compaction", "encrypted_content": "x"}]}, "input"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [USER, {"type": "custom_tool_call", "call_id": "1", "name": "x"}]}, "input"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"content": "no role"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "r"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_field(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        body_of(**{"input": "hi", **fields}).request("")
    assert caught.value.param == param


def test_a_foreign_value_at_any_place_is_served_or_refused_and_never_an_exception(tmp_path):
    body = {
        "input": LOOP,
        "instructions": "i",
        "tools": [TOOL],
        "tool_choice": "auto",
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
    }
    counts = count_served_and_refused(body, ResponsesBody, byte_tokenizer(tmp_path))
    assert min(counts.values()) > 20


def events_of(parts, reason, **fields):
    body = body_of(input="q", tools=[TOOL], **fields)
    parser = OutputParser(thinking=True, tools_declared=True)
    answer = Answer("resp_ID", "M", body.options())
    events = list(answer.begin())
    for part in parts:
        events += answer.take(parser.feed(part))
    events += answer.take(parser.finish(reason))
    last = ChoiceEvent(index=0, finish_reason=parser.finish_reason)
    usage = Usage(prompt_tokens=10, completion_tokens=5, reasoning_tokens=2, cached_tokens=4)
    return [*events, *answer.end(last, usage)], answer


def joined(events):
    """Events without ids and response objects, neighbouring deltas joined and numbered anew."""
    found = []
    for event in events:
        event = json.loads(json.dumps(event))
        for item in (event, event.get("item", {})):
            for name in ("id", "item_id", "call_id", "encrypted_content", "sequence_number"):
                item.pop(name, None)
        event["response"] = event.get("response", {}).get("status")
        if found and "delta" in event and event["type"] == found[-1]["type"]:
            found[-1]["delta"] += event["delta"]
        else:
            found.append(event)
    return found


@pytest.mark.parametrize(
    ("parts", "is_cut"),
    [
        (["why", "</think>", "te", "xt"], False),
        (["why"], True),
        (["why</think>te"], True),
        (["why</think>te", "xt", CALL], False),
        (["why", CALL], False),
        (["why</think>", f"{ONE_CALL}{CALL.partition('calls>')[2]}"], False),
        (["why</think>x", CALL.partition("</")[0]], True),
    ],
    ids=["text", "cut", "cut-text", "call", "call-in-reasoning", "two-calls", "cut-call"],
)
def test_the_events_of_a_stream_are_those_of_deepseeks_writer(parts, is_cut):
    reason = deepseek_recipe.InferenceFinishReason
    want = events_of_recipe(
        deepseek_recipe.ResponsesRequest,
        {"input": "q", "tools": [TOOL]},
        parts,
        reason.Length if is_cut else reason.Stop,
    )
    got, _ = events_of(parts, "length" if is_cut else "stop")
    assert joined(got) == joined(want)
    assert [event["sequence_number"] for event in got] == list(range(len(got)))
    # Negative control: one piece left out is a difference.
    assert joined(events_of(parts[:-1], "stop")[0]) != joined(want)


def test_a_response_has_the_fields_and_counts_of_deepseeks_writer():
    parts = ["why</think>text", CALL]
    want = events_of_recipe(
        deepseek_recipe.ResponsesRequest,
        {"input": "q", "tools": [TOOL]},
        parts,
        deepseek_recipe.InferenceFinishReason.Stop,
    )[-1]["response"]
    got = events_of(parts, "stop")[1].response()
    shared = ("object", "status", "error", "incomplete_details", "metadata", "store", "truncation")
    assert {name: got[name] for name in shared} == {name: want[name] for name in shared}
    assert [item["type"] for item in got["output"]] == ["reasoning", "message", "function_call"]
    assert [item["type"] for item in want["output"]] == ["reasoning", "message", "function_call"]
    assert got["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }


def test_encoded_reasoning_comes_back_as_reasoning_and_anothers_is_left_out():
    _, answer = events_of(["wé", "</think>x"], "stop", include=["reasoning.encrypted_content"])
    item = {**answer.response()["output"][0], "content": None}
    assert base64.b64decode(item["encrypted_content"]).decode() == "wé"
    turn = body_of(input=[USER, item, said("x"), USER]).request("").messages[1]
    assert turn == {"role": "assistant", "content": "x", "reasoning_content": "wé"}
    foreign = {**item, "encrypted_content": "gAAAA-foreign_"}
    turn = body_of(input=[USER, foreign, said("x"), USER]).request("").messages[1]
    assert not turn["reasoning_content"]
    assert events_of(["wé"], "stop")[1].response()["output"][0]["encrypted_content"] is None


def test_an_answer_without_text_has_no_items():
    events, answer = events_of([], "stop")
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert answer.response()["output"] == []


def test_a_server_that_ends_an_answer_raises_and_a_failure_is_the_last_event():
    answer = Answer("resp_ID", "M", body_of(input="q").options())
    list(answer.begin())
    with pytest.raises(OverloadedError):
        list(answer.end(ChoiceEvent(index=0, finish_reason="aborted"), Usage(prompt_tokens=1)))
    event = answer.fail(EngineFailedError("it broke"))
    assert (event["type"], event["sequence_number"]) == ("response.failed", 2)
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["message"] == "it broke"
