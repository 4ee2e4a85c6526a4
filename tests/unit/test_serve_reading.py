"""Bodies are planned alike in a thread and in the process beside it, whose end harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from finwhale.config.server import ServerConfig
from finwhale.serve import errors
from finwhale.serve.body_process import MAX_CHILD_BYTES, Asked, BodyProcess, plan_body
from finwhale.serve.errors import (
    InvalidRequestError,
    OverloadedError,
    ServeError,
    TooLargeError,
)
from finwhale.serve.messages_body import MessagesBody
from finwhale.serve.planning import Planner
from finwhale.serve.reading import BodyReader
from finwhale.serve.responses_body import ResponsesBody
from finwhale.serve.schema import ChatBody, CompletionBody
from tests.scripted_engine import CONTEXT_TOKENS, USER, WEATHER, byte_tokenizer

BODIES = [
    (ChatBody, {"messages": USER, "tools": [WEATHER], "seed": 3, "stream": True, "stop": "x"}),
    (ChatBody, {"messages": USER, "response_format": {"type": "regex", "regex": "a+"}}),
    (CompletionBody, {"prompt": ["one", "two"], "max_tokens": 3, "echo": True, "logprobs": 2}),
    (CompletionBody, {"prompt": [5, 6, 7]}),
    (ResponsesBody, {"input": "say", "instructions": "Be brief.", "metadata": {"a": "b"}}),
    (MessagesBody, {"messages": USER, "max_tokens": 5, "system": "Be brief."}),
]
REFUSED = [
    (ChatBody, b"{"),
    (ChatBody, b'{"messages": [{"role": "user", "content": "x"}], "n": 0.5}'),
    (ChatBody, b'{"messages": []}'),
    (CompletionBody, b'{"prompt": "' + b"a" * (CONTEXT_TOKENS + 1) + b'"}'),
    (MessagesBody, b'{"messages": [], "max_tokens": 0}'),
]


@pytest.fixture(scope="module")
def planner(tmp_path_factory):
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Planner(tokenizer, ServerConfig(max_choices=4), context_tokens=CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def process(planner):
    process = BodyProcess(planner, timeout_s=60)
    yield process
    process.close()


def child_of(process: BodyProcess) -> subprocess.Popen:
    process.start()
    assert process._child is not None
    return process._child


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("kind", "fields"), BODIES)
def test_plans_of_the_process_equal_those_of_a_thread(planner, process, kind, fields):
    raw = json.dumps(fields).encode()
    here, there = plan_body(planner, raw, kind, "t"), process.plan(raw, kind, "t")
    assert there.options == here.options
    assert len(there.plans) == len(here.plans)
    for own, other in zip(here.plans, there.plans, strict=True):
        assert own.prompt.tolist() == other.prompt.tolist()
        assert len(own.prompt) > 0
        for name in (slot for slot in own.__slots__ if slot != "prompt"):
            assert getattr(own, name) == getattr(other, name), name
        assert own.tenant == "t"


@pytest.mark.parametrize(("kind", "raw"), REFUSED)
def test_refusals_of_the_process_equal_those_of_a_thread(planner, process, kind, raw):
    told = []
    for plan in (lambda: plan_body(planner, raw, kind, "t"), lambda: process.plan(raw, kind, "t")):
        with pytest.raises(ServeError) as refused:
            plan()
        told.append((type(refused.value), vars(refused.value)))
    assert told[0] == told[1]


def test_every_error_travels_whole():
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, ServeError)]
    assert len(kinds) > 10
    for kind in kinds:
        error = kind("a message", param="p", code="c", retry_after_s=7)
        twin = pickle.loads(pickle.dumps(error))
        assert (type(twin), vars(twin), twin.args) == (kind, vars(error), error.args)


def test_a_process_that_ends_refuses_its_body_and_the_next_one_is_served(planner):
    process = BodyProcess(planner, timeout_s=60)
    raw = json.dumps({"messages": USER}).encode()
    child = child_of(process)
    # Stopped, so that it is ended while it holds the body.
    os.kill(child.pid, signal.SIGSTOP)
    killer = threading.Timer(0.2, child.kill)
    killer.start()
    with pytest.raises(OverloadedError, match="ended") as refused:
        process.plan(raw, ChatBody, "")
    assert refused.value.retry_after_s
    assert process.plan(raw, ChatBody, "").plan.prompt.size
    assert child_of(process).pid != child.pid
    process.close()
    assert not is_alive(child.pid)
    with pytest.raises(OverloadedError, match="shutting down"):
        process.plan(raw, ChatBody, "")


def test_a_body_that_takes_too_long_is_refused_and_the_next_one_is_served(planner):
    process = BodyProcess(planner, timeout_s=0.3)
    raw = json.dumps({"messages": USER}).encode()
    child = child_of(process)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(TooLargeError, match=r"within 0\.3 s"):
        process.plan(raw, ChatBody, "")
    process._timeout_s = 60
    assert process.plan(raw, ChatBody, "").plan.prompt.size
    process.close()


def test_memory_that_the_child_does_not_get_is_a_refusal(planner):
    """A list of 40 million ids wants more than this child may have."""
    process = BodyProcess(planner, timeout_s=60)
    child = child_of(process)
    used = 1 << 30
    resource.prlimit(child.pid, resource.RLIMIT_AS, (used, used))
    raw = b'{"prompt": [' + b"100000," * 40_000_000 + b"1]}"
    with pytest.raises((TooLargeError, OverloadedError)):
        process.plan(raw, CompletionBody, "")
    assert process.plan(b'{"prompt": "a"}', CompletionBody, "").plan.prompt.size
    process.close()


def test_the_child_ends_with_its_parent(planner, tmp_path):
    """Also where the parent is killed and can close nothing."""
    program = tmp_path / "parent.py"
    program.write_text(
        "import os, pickle, sys\n"
        "from finwhale.serve.body_process import BodyProcess\n"
        "process = BodyProcess(pickle.load(sys.stdin.buffer), timeout_s=60)\n"
        "process.start()\n"
        "print(process._child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(program)],
        input=pickle.dumps(planner),
        capture_output=True,
        env=environment,
        timeout=60,
    )
    pid = int(done.stdout)
    until = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_large_bodies_go_to_the_process_and_small_ones_do_not(planner):
    reader = BodyReader(planner, timeout_s=60, small_body_bytes=200)
    small = json.dumps({"messages": USER}).encode()
    large = json.dumps({"messages": [{"role": "user", "content": "a" * 300}]}).encode()

    async def read(raw):
        return (await reader.read(raw, ChatBody, "t")).plan.prompt.tolist()

    assert asyncio.run(read(small)) == plan_body(planner, small, ChatBody, "t").plan.prompt.tolist()
    assert reader._child._child is None
    assert asyncio.run(read(large)) == plan_body(planner, large, ChatBody, "t").plan.prompt.tolist()
    assert reader._child._child is not None
    reader.close()


def test_the_child_has_limits_of_its_own_and_imports_nothing_of_the_working_folder(
    planner, tmp_path, monkeypatch
):
    (tmp_path / "msgspec.py").write_text("open('imported', 'w').close()")
    monkeypatch.chdir(tmp_path)
    process = BodyProcess(planner, timeout_s=60)
    child = child_of(process)
    try:
        assert resource.prlimit(child.pid, resource.RLIMIT_AS) == (MAX_CHILD_BYTES,) * 2
        assert os.getpriority(os.PRIO_PROCESS, child.pid) > os.getpriority(os.PRIO_PROCESS, 0)
        assert process.plan(b'{"prompt": "a"}', CompletionBody, "").plan.prompt.size
    finally:
        process.close()
    assert not (tmp_path / "imported").exists()


# Fields that travel to the prompt, to the options of an answer, or to both.
_CALL = {"type": "local_shell_call", "call_id": "c", "action": {"DEEP": 1}}
_USE = {"type": "tool_use", "id": "i", "name": "n", "input": {"DEEP": 1}}
_RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i"}]}
DEEP = [
    (ResponsesBody, {"input": "q", "tool_choice": {"DEEP": 1}}),
    (ResponsesBody, {"input": "q", "tools": [{"type": "custom", "x": {"DEEP": 1}}]}),
    (ResponsesBody, {"input": "q", "text": {"format": {"type": "text", "x": {"DEEP": 1}}}}),
    (ResponsesBody, {"input": [_CALL, *USER]}),
    (
        MessagesBody,
        {
            "max_tokens": 1,
            "messages": [*USER, {"role": "assistant", "content": [_USE]}, _RESULT],
        },
    ),
    (ChatBody, {"messages": USER, "response_format": {"DEEP": 1}}),
]


@pytest.mark.parametrize(("kind", "body"), DEEP)
def test_a_body_of_any_depth_is_served_or_refused_and_the_child_lives(planner, process, kind, body):
    pid = child_of(process).pid
    for depth in (10, 300, 450, 500, 700, 940, 970, *range(980, 1000), 1100):
        deep = '{"a":' * depth + "{}" + "}" * depth
        raw = json.dumps(body).replace('{"DEEP": 1}', deep).encode()
        for read in (partial(plan_body, planner), process.plan):
            # 400; anything else, such as a failure of the child, is raised.
            with contextlib.suppress(InvalidRequestError):
                read(raw, kind, "t")
    assert child_of(process).pid == pid


def test_a_tenant_waits_for_one_large_body_of_each_other(planner, monkeypatch):
    """Six of one tenant come first; the other's is read second or third."""
    reader = BodyReader(planner, timeout_s=60, small_body_bytes=0)
    order: list[str] = []

    def plan(raw, kind, tenant):
        order.append(tenant)
        time.sleep(0.02)
        return Asked(None, [])

    monkeypatch.setattr(reader._child, "plan", plan)

    async def main():
        ours = [asyncio.ensure_future(reader.read(b"{}", ChatBody, "a")) for _ in range(6)]
        await asyncio.sleep(0.01)
        await asyncio.gather(reader.read(b"{}", ChatBody, "b"), *ours)

    asyncio.run(main())
    reader.close()
    assert order.index("b") <= 2
    assert order.count("a") == 6
    assert not reader._turns
