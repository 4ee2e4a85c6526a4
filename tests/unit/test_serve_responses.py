"""Bodies of the Responses protocol against DeepSeek's own converter and stream writer."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import deepseek_recipe
import pytest

from finwhale.serve.errors import EngineFailedError, InvalidRequestError, OverloadedError
from finwhale.serve.generation import ChoiceEvent, TokenLogprob, Usage
from finwhale.serve.responses_api import Answer
from finwhale.serve.responses_body import ResponsesBody
from finwhale.serve.schema import decode
from finwhale.text.output_parser import Delta, OutputParser
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


def request_of(**fields):
    return body_of(**{"input": "hi", **fields}).request("")


def test_functions_of_a_namespace_are_named_back_in_the_answer():
    tools = [NAMESPACE, {**TOOL, "name": "g"}]
    body = body_of(input="q", tools=tools)
    names = [tool["function"]["name"] for tool in body.request("").tools]
    assert names == ["ns::f", "g"]
    markup = CALL.replace('invoke name="f"', 'invoke name="ns::f"')
    parser = OutputParser(thinking=False, tools_declared=True)
    answer = Answer("resp_ID", "M", body.options())
    events = list(answer.take([*parser.feed(markup), *parser.finish("stop")]))
    events += answer.end(ChoiceEvent(index=0, finish_reason="tool_calls"), Usage(prompt_tokens=1))
    items = [event["item"] for event in events if "item" in event]
    assert {(item["namespace"], item["name"]) for item in items} == {("ns", "f")}
    # As Codex sends it back, the model reads its own words again.
    item = answer.response()["output"][0]
    turn = request_of(input=[USER, item, output(item["call_id"])], tools=tools).messages[1]
    assert turn["tool_calls"][0]["function"] == {"name": "ns::f", "arguments": '{"x": "v"}'}


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"name": "f", "namespace": "ns"}, "ns::f"),
        ({"name": "f"}, "ns::f"),
        ({"name": "ns::f"}, "ns::f"),
        ({"name": "g"}, "g"),
        ({"name": "nobody"}, "nobody"),
    ],
)
def test_a_named_choice_finds_its_function_in_a_namespace(choice, name):
    tools = [NAMESPACE, {**TOOL, "name": "g"}]
    request = request_of(tools=tools, tool_choice={"type": "function", **choice})
    assert request.tool_choice["function"]["name"] == name


FOREIGN_TOOLS = [
    {"type": "custom", "name": "apply_patch"},
    {"type": "image_generation"},
    {"type": "local_shell"},
    {"type": "tool_search"},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "file_search", "vector_store_ids": []},
    {"type": "computer_use_preview"},
    {"type": "mcp", "server_label": "x"},
    {"type": "code_interpreter"},
    {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "exec"}]},
]


@pytest.mark.parametrize("tool", FOREIGN_TOOLS, ids=lambda tool: tool["type"])
def test_one_foreign_tool_is_left_out_by_name_and_the_functions_stay(tool):
    body = body_of(input="hi", tools=[tool, TOOL])
    assert replace(body.request(""), notes=()) == request_of(tools=[TOOL])
    (note,) = body.request("").notes
    assert note.startswith("tools left out: ")
    assert tool["type"] in note or "custom n::exec" in note
    assert body_of(input="hi", tools=[TOOL]).request("").notes == ()
    assert body_of(input="hi", tools=[tool]).request("").tools is None


def test_tools_that_an_item_adds_are_those_of_the_body():
    added = {"type": "additional_tools", "role": "developer", "tools": [TOOL, NAMESPACE]}
    body = body_of(input=[added, USER])
    assert body.request("") == request_of(input=[USER], tools=[TOOL, NAMESPACE])
    assert body.options().namespaces == {"ns::f": ("ns", "f")}


def test_calls_of_foreign_tools_in_a_history_are_calls_and_others_are_left_out():
    custom = {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "P"}
    shell = {"type": "local_shell_call", "id": "2", "action": {"command": ["ls"]}}
    history = [
        USER,
        {"type": "web_search_call", "id": "w"},
        custom,
        shell,
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
        {"type": "local_shell_call_output", "id": "2", "output": "a.py"},
    ]
    body = body_of(input=history)
    user, turn, first, second = body.request("").messages
    functions = [call["function"] for call in turn["tool_calls"]]
    assert functions[0] == {"name": "apply_patch", "arguments": '{"input": "P"}'}
    assert functions[1] == {"name": "local_shell", "arguments": '{"command": ["ls"]}'}
    assert [first["tool_call_id"], second["tool_call_id"]] == ["1", "2"]
    assert user["role"] == "user"
    assert "done" in prompt_of(body.request(""))
    assert body.request("").notes == ("input items left out: web_search_call",)


def test_a_refusal_is_what_the_assistant_said():
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert request_of(input=[USER, refusal, USER]).messages[1]["content"] == "no"


def test_log_probabilities_are_asked_for_by_number_or_by_name():
    for fields, want in (
        ({}, (False, 0)),
        ({"top_logprobs": 0}, (False, 0)),
        ({"top_logprobs": 3}, (True, 3)),
        ({"include": ["message.output_text.logprobs"]}, (True, 0)),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 20}, (True, 20)),
    ):
        sampling = request_of(**fields).sampling
        assert (sampling.logprobs, sampling.top_logprobs) == want


def test_one_call_at_a_time_is_passed_on_and_said_again():
    for given, want in ((None, True), (True, True), (False, False)):
        body = body_of(input="q", parallel_tool_calls=given)
        assert body.request("").parallel_tool_calls is want
        response = Answer("resp_ID", "M", body.options()).response()
        assert response["parallel_tool_calls"] is want


def test_what_is_long_is_not_repeated_in_every_event():
    long = "x" * 40_000
    form = {"type": "json_schema", "name": "n", "schema": {"description": long}}
    body = body_of(
        input="q",
        instructions=long,
        tools=[{**TOOL, "description": long}],
        text={"format": form},
        metadata={"k": "v"},
    )
    response = Answer("resp_ID", "M", body.options()).response()
    assert len(json.dumps(response)) < 2000
    assert (response["instructions"], response["tools"]) == (None, [])
    assert response["text"]["format"]["name"] == "n"
    assert response["metadata"] == {"k": "v"}
    short = Answer("r", "M", body_of(input="q", instructions="I", tools=[TOOL]).options())
    assert (short.response()["instructions"], short.response()["tools"]) == ("I", [TOOL])


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
    ],
    ids=["text", "cut", "cut-text", "call", "call-in-reasoning", "two-calls"],
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


def test_a_summary_that_is_asked_for_is_the_reasoning_in_the_places_of_a_summary():
    events, answer = events_of(["wh", "y</think>x"], "stop", reasoning={"summary": "auto"})
    item, message = answer.response()["output"]
    assert item["summary"] == [{"type": "summary_text", "text": "why"}]
    assert (item["content"], message["content"][0]["text"]) == ([], "x")
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[2:5] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
    ]
    assert "reasoning_text.delta" not in names
    pieces = [e["delta"] for e in events if e["type"].endswith("reasoning_summary_text.delta")]
    assert "".join(pieces) == "why"
    done = [e for e in events if e["type"] == "response.reasoning_summary_text.done"]
    assert [(e["text"], e["summary_index"]) for e in done] == [("why", 0)]
    # Sent back, it is the same reasoning as without a summary.
    turn = request_of(input=[USER, item, said("x"), USER]).messages[1]
    assert turn["reasoning_content"] == "why"
    assert answer.response()["reasoning"]["summary"] == "auto"


def test_log_probabilities_of_an_answer_join_to_its_text_and_reasoning_has_none():
    options = body_of(input="q", top_logprobs=1).options()

    def told(kind, word):
        other = ("o", b"o", -3.0)
        return TokenLogprob(
            kind=kind, token=word, token_bytes=word.encode(), logprob=-1, top=(other,)
        )

    answer = Answer("resp_ID", "M", options)
    events = list(answer.take([Delta(kind="reasoning", text="why")], [told("reasoning", "why")]))
    events += answer.take([Delta(kind="content", text="te")], [told("content", "te")])
    # Held back by the parser, and certain with the end.
    events += answer.take([], [told("content", "xt")])
    events += answer.end(ChoiceEvent(index=0, finish_reason="stop"), Usage(prompt_tokens=1))
    entry = {
        "token": "te",
        "logprob": -1,
        "bytes": [116, 101],
        "top_logprobs": [{"token": "o", "logprob": -3.0, "bytes": [111]}],
    }
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [e["logprobs"] for e in deltas] == [[entry]]
    thought, message = answer.response()["output"]
    assert "logprobs" not in thought["content"][0]
    for whole in (
        message["content"][0]["logprobs"],
        next(e for e in events if e["type"] == "response.output_text.done")["logprobs"],
    ):
        assert [each["token"] for each in whole] == ["te", "xt"]
    silent = Answer("resp_ID", "M", body_of(input="q").options())
    (*_, delta) = silent.take([Delta(kind="content", text="te")], [told("content", "te")])
    assert delta["logprobs"] == []


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
