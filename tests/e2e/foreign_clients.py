"""Client libraries of others, unchanged and in their default modes, against the shipped model.

`make test-clients` runs it: libraries of foreign_clients.txt and, with npm, foreign_clients.json
in an environment of their own, the server from the project's (tests/foreign_server.py, a plugin).
It checks protocols: an answer that parses, a call with arguments of its schema, reasoning and
usage where each client looks for them. Without node the cases of npm are skipped. It is no part of
`make test`, and it does not judge what the small model says.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import anthropic
import instructor
import litellm
import openai
import pytest
from agents import Agent as OpenAIAgent
from agents import (
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponses
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import FinalAnswerTool, OpenAIServerModel

from tests.foreign_server import KEY, MODEL

HERE = Path(__file__).parent
NODE = Path(os.environ.get("FINWHALE_NODE_MODULES", "build/clients/node"))
SAY = [{"role": "user", "content": "Say hello."}]


class Answer(BaseModel):
    """An answer of few tokens, whatever the model thinks."""

    sure: bool
    tone: Literal["warm", "cold"]


def chat_model(address, **fields):
    return ChatOpenAI(
        model=MODEL, base_url=f"{address}/v1", temperature=0, max_tokens=200, **KEY, **fields
    )


def claude_model(address):
    return ChatAnthropic(
        model=MODEL, base_url=f"{address}/anthropic", temperature=0, max_tokens=200, **KEY
    )


def pydantic_model(address, kind=OpenAIChatModel):
    return kind(MODEL, provider=OpenAIProvider(base_url=f"{address}/v1", api_key="unused"))


def test_openai_of_that_environment_reads_a_stream_and_its_usage(address):
    client = openai.OpenAI(base_url=f"{address}/v1", **KEY)
    with client.chat.completions.stream(
        model=MODEL,
        messages=SAY,
        temperature=0,
        max_tokens=64,
        stream_options={"include_usage": True},
    ) as stream:
        whole = stream.get_final_completion()
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert client.responses.input_tokens.count(model=MODEL, input="Say hello.").input_tokens > 5


def test_anthropic_counts_lists_and_is_answered_at_both_addresses(address):
    for base in (address, f"{address}/anthropic"):
        client = anthropic.Anthropic(base_url=base, **KEY)
        counted = client.messages.count_tokens(model=MODEL, messages=SAY).input_tokens
        answer = client.messages.create(model=MODEL, messages=SAY, max_tokens=8)
        usage = answer.usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
        assert [model.id for model in client.models.list()] == [MODEL, "deepseek-flash"]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "deepseek", "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
def test_litellm_reads_reasoning_text_and_usage(address, provider, stream):
    base = f"{address}/anthropic" if provider == "anthropic" else f"{address}/v1"
    fields = {"stream_options": {"include_usage": True}} if stream else {}
    answer = litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=base,
        api_key="unused",
        messages=SAY,
        max_tokens=64,
        temperature=0,
        stream=stream,
        **fields,
    )
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=SAY)
    message = answer.choices[0].message
    assert message.reasoning_content
    assert message.content
    assert answer.usage.completion_tokens <= 64
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_langchain_counts_the_usage_of_a_stream_once(address):
    whole = chat_model(address).invoke("Say hello.")
    joined = None
    for chunk in chat_model(address, stream_usage=True).stream("Say hello."):
        joined = chunk if joined is None else joined + chunk
    assert joined.content == whole.content
    for field in ("input_tokens", "output_tokens"):
        assert joined.usage_metadata[field] == whole.usage_metadata[field]


def test_langchain_reads_responses(address):
    answer = chat_model(address, use_responses_api=True, reasoning={"summary": "auto"})
    kinds = [block["type"] for block in answer.invoke("Say hello.").content]
    assert kinds == ["reasoning", "text"]


@pytest.mark.parametrize("model", [chat_model, claude_model])
def test_langchain_gets_a_forced_call(address, model):
    bound = model(address).bind_tools([Answer], tool_choice="any")
    (call,) = bound.invoke("Are you sure?").tool_calls
    assert Answer(**call["args"])


@pytest.mark.parametrize("model", [chat_model, claude_model])
def test_langchain_gets_structured_output_by_a_call(address, model):
    asked = model(address).with_structured_output(Answer, method="function_calling")
    assert isinstance(asked.invoke("Are you sure?"), Answer)


def test_langchain_gets_structured_output_by_a_schema(address):
    asked = chat_model(address).with_structured_output(Answer, method="json_schema")
    assert isinstance(asked.invoke("Are you sure? Answer in json."), Answer)


def test_langchain_counts_tokens_of_anthropic(address):
    from langchain_core.messages import HumanMessage

    assert claude_model(address).get_num_tokens_from_messages([HumanMessage("Say hello.")]) > 5


def test_instructor_gets_its_model_in_its_default_mode(address):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{address}/v1", **KEY))
    found = client.chat.completions.create(
        model=MODEL, response_model=Answer, messages=SAY, max_retries=0, max_tokens=200
    )
    assert isinstance(found, Answer)


def test_pydantic_ai_reads_reasoning_and_counts_usage_once(address):
    agent = Agent(pydantic_model(address), model_settings={"temperature": 0, "max_tokens": 64})
    whole = agent.run_sync("Say hello.")
    with agent.run_stream_sync("Say hello.") as stream:
        text = stream.get_output()
        usage = stream.usage
    usage = usage() if callable(usage) else usage
    assert text == whole.output
    told = whole.usage() if callable(whole.usage) else whole.usage
    assert (usage.input_tokens, usage.output_tokens) == (told.input_tokens, told.output_tokens)
    parts = whole.all_messages()[-1].parts
    assert [part.part_kind for part in parts] == ["thinking", "text"]


@pytest.mark.parametrize("kind", [OpenAIChatModel, PydanticResponses])
def test_pydantic_ai_gets_its_output_type_by_a_forced_call(address, kind):
    agent = Agent(pydantic_model(address, kind), output_type=Answer, retries=0)
    assert isinstance(agent.run_sync("Are you sure?").output, Answer)


def test_smolagents_gets_a_forced_call(address):
    model = OpenAIServerModel(MODEL, api_base=f"{address}/v1", api_key="unused", max_tokens=200)
    told = model.generate(SAY, tools_to_call_from=[FinalAnswerTool()])
    assert told.tool_calls[0].function.name == "final_answer"


def test_smolagents_reads_a_stream(address):
    model = OpenAIServerModel(MODEL, api_base=f"{address}/v1", api_key="unused", max_tokens=64)
    deltas = list(model.generate_stream(SAY))
    assert "".join(delta.content or "" for delta in deltas)
    counts = [delta.token_usage for delta in deltas if delta.token_usage]
    assert len(counts) == 1


@function_tool
def look(city: Literal["Oslo", "Rome"]) -> str:
    """Look at the weather."""
    return f"rain in {city}"


def openai_agent(address, kind, **settings):
    client = openai.AsyncOpenAI(base_url=f"{address}/v1", **KEY)
    options = ModelSettings(temperature=0, max_tokens=200, **settings)
    model = kind(model=MODEL, openai_client=client)
    return OpenAIAgent(name="a", model=model, model_settings=options, tools=[look])


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
def test_openai_agents_reads_an_answer(address, kind):
    assert Runner.run_sync(openai_agent(address, kind), "Say hello.").final_output is not None


def test_openai_agents_reads_a_summary_of_the_reasoning(address):
    agent = openai_agent(address, OpenAIResponsesModel, reasoning=Reasoning(summary="auto"))
    items = Runner.run_sync(agent, "Say hello.").new_items
    reasoning = [item.raw_item for item in items if item.type == "reasoning_item"]
    assert reasoning[0].summary[0].text


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
def test_openai_agents_gets_a_forced_call_and_goes_on(address, kind):
    agent = openai_agent(address, kind, tool_choice="required")
    items = Runner.run_sync(agent, "How is the weather in Oslo?", max_turns=4).new_items
    outputs = [item.output for item in items if item.type == "tool_call_output_item"]
    assert outputs[0] in ("rain in Oslo", "rain in Rome")


def node(address, case):
    if shutil.which("node") is None or not (NODE / "node_modules").is_dir():
        pytest.skip(f"no node, or no packages in {NODE}")
    program = NODE / "foreign_clients.mjs"
    shutil.copy(HERE / program.name, program)
    command = ["node", str(program), address, case]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    # Warnings of a library stand before it.
    return json.loads(run.stdout.splitlines()[-1])


def test_npm_openai_reads_streams_and_models(address):
    chat = node(address, "openai_chat_stream")
    assert chat["content"]
    assert chat["usage"]["total_tokens"] > chat["usage"]["prompt_tokens"] > 5
    told = node(address, "openai_responses_stream")
    assert told["text"]
    assert told["summary"]
    assert node(address, "openai_models")["names"] == [MODEL, "deepseek-flash"]


def test_npm_anthropic_reads_a_stream_counts_and_models(address):
    told = node(address, "anthropic_stream")
    assert told["kinds"] == ["thinking", "text"]
    usage = told["usage"]
    counted = node(address, "anthropic_count")["input_tokens"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert node(address, "anthropic_models")["names"] == [MODEL, "deepseek-flash"]


@pytest.mark.parametrize("case", ["ai_openai", "ai_compatible", "ai_anthropic"])
def test_the_ai_sdk_reads_text_reasoning_and_usage(address, case):
    told = node(address, case)
    assert told["text"]
    assert told["reasoning"]
    assert told["usage"]["outputTokens"] <= 48


def test_the_ai_sdk_reads_a_chat_of_openai(address):
    told = node(address, "ai_openai_chat")
    assert told["text"]
    assert told["usage"]["outputTokens"] <= 48


@pytest.mark.parametrize(
    "case",
    ["anthropic_any_tool", "ai_openai_tool", "ai_compatible_tool", "ai_anthropic_tool"],
)
def test_npm_clients_get_a_forced_call(address, case):
    assert isinstance(node(address, case)["input"]["sure"], bool)
