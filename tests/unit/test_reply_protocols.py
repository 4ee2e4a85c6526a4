"""One answer in three protocols: what a client reads is the same, whole and joined from events.

The deltas come from texts of whole and broken markup; the clients' side is joined by hand here,
and by the official packages in `tests/e2e/test_server_broken_calls.py`.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from finwhale.serve.anthropic_api import AnswerBlocks
from finwhale.serve.generation import ChoiceEvent, ChoiceResult, Usage
from finwhale.serve.openai_api import _chat_answer
from finwhale.serve.responses_api import Answer, ResponsesBody
from finwhale.serve.schema import decode
from finwhale.text.output_parser import OutputParser
from tests.unit.test_tool_calls import FRAGMENTS


def of_chat(batches, reason):
    """Reasoning, content and calls of a chat answer."""
    result = ChoiceResult(index=0)
    for number, deltas in enumerate(batches):
        is_last = number == len(batches) - 1
        finish = reason if is_last else None
        result.add(ChoiceEvent(index=0, deltas=tuple(deltas), finish_reason=finish))
    head = SimpleNamespace(request_id="r", created_s=0, usage=Usage(prompt_tokens=1))
    (choice,) = _chat_answer(head, [result], "M", is_thinking=True)["choices"]
    message = choice["message"]
    calls = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    return message["reasoning_content"], message["content"], calls


def of_messages(batches):
    """The same of a Messages answer, whole and from its events."""
    blocks = AnswerBlocks("ID")
    events = [event for deltas in batches for event in blocks.take(deltas)] + list(blocks.close())
    whole = json.loads(msgspec.json.encode(blocks.content()))
    joined = []
    for event in events:
        if event["type"] == "content_block_start":
            joined.append({"json": "", **event["content_block"]})
        elif event["type"] == "content_block_delta":
            name = {"thinking_delta": "thinking", "text_delta": "text"}.get(event["delta"]["type"])
            if name is not None:
                joined[-1][name] += event["delta"][name]
            elif event["delta"]["type"] == "input_json_delta":
                joined[-1]["json"] += event["delta"]["partial_json"]
    for block in joined:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
        elif block["type"] == "thinking":
            block["signature"] = "ID"
    assert joined == whole
    return _three(whole, "thinking", "text", "tool_use", lambda b: (b["id"], b["name"], b["input"]))


def of_responses(batches, reason):
    """The same of a Responses answer."""
    answer = Answer("resp_ID", "M", decode(b'{"input": "q"}', ResponsesBody).options())
    events = [event for deltas in batches for event in answer.take(deltas)]
    last = ChoiceEvent(index=0, finish_reason=reason)
    events += answer.end(last, Usage(prompt_tokens=1))
    items = answer.response()["output"]
    done = [e["arguments"] for e in events if e["type"].endswith("arguments.done")]
    assert done == [item["arguments"] for item in items if item["type"] == "function_call"]
    for item in items:
        item["text"] = "".join(part["text"] for part in item.get("content", ()))
        item["reasoning"] = item["text"]
    return _three(
        items,
        "reasoning",
        "message",
        "function_call",
        lambda item: (item["call_id"], item["name"], json.loads(item["arguments"])),
        text_name="text",
    )


def _three(parts, thought, said, called, call_of, text_name=None):
    def text(kind):
        name = text_name or kind
        return "".join(part[name] for part in parts if part["type"] == kind)

    return text(thought), text(said), [call_of(p) for p in parts if p["type"] == called]


@settings(max_examples=150)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=10),
    thinking=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
    size=st.integers(1, 30),
)
def test_three_protocols_tell_one_answer(parts, thinking, reason, size):
    text = "".join(parts)
    parser = OutputParser(thinking=thinking, tools_declared=True)
    batches = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)]
    batches.append(parser.finish(reason))
    chat = of_chat(batches, parser.finish_reason)
    assert of_messages(batches) == chat
    assert of_responses(batches, parser.finish_reason) == chat
    assert all(isinstance(arguments, dict) for _, _, arguments in chat[2])
    assert (parser.finish_reason == "tool_calls") == (bool(chat[2]) and reason == "stop")
