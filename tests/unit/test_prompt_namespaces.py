"""Tools in namespaces: the prompt has their whole names, and nothing else differs."""

from __future__ import annotations

import pytest

from finwhale.text.prompt import PromptError, render_prompt

USER = {"role": "user", "content": "q"}


def tool(name, **fields):
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


def history(name):
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": '{"x": "y"}'}}
    calls = {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "namespaced-000000"}
    return [{"role": "system", "content": "S"}, USER, calls, result]


def text(*arguments, **fields):
    return "".join(segment.text for segment in render_prompt(*arguments, **fields))


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize(
    "fields", [{}, {"thinking": False}, {"effort": "max"}, {"tool_choice": "none"}], ids=str
)
def test_a_namespaced_name_is_the_only_difference(strict, fields):
    # A stand-in's own spelling, in a result and as a tool's name, stays what it is.
    tools = [tool("ns::f", strict=strict), tool("namespaced-000000", strict=strict)]
    plain = [tool("ns-f", strict=strict), tools[1]]
    want = text(history("ns-f"), tools=plain, **fields)
    assert "ns-f" in want
    assert text(history("ns::f"), tools=tools, **fields) == want.replace("ns-f", "ns::f")


def test_a_named_choice_may_name_it_and_only_a_declared_one():
    choice = {"type": "function", "function": {"name": "ns::f"}}
    whole = text([USER], tools=[tool("ns::f")], tool_choice=choice, thinking=False)
    named = {"type": "function", "function": {"name": "ns-f"}}
    want = text([USER], tools=[tool("ns-f")], tool_choice=named, thinking=False)
    assert whole == want.replace("ns-f", "ns::f")
    choice = {"type": "function", "function": {"name": "ns::g"}}
    with pytest.raises(PromptError, match="ns::g"):
        text([USER], tools=[tool("ns::f")], tool_choice=choice, thinking=False)


@pytest.mark.parametrize("name", ["a::b::c", "::f", "ns::", "ns::f f", "ns:f", 'ns::"'])
def test_a_name_of_another_form_is_refused_as_ever(name):
    with pytest.raises(PromptError, match="pattern"):
        text([USER], tools=[tool(name)])
