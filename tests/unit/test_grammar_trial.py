"""A trial of a grammar: what its machine lacks is no refusal, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from finwhale.serve.errors import OverloadedError, RateLimitError
from finwhale.serve.grammar_queue import GrammarQueue
from finwhale.serve.planning import ChatRequest
from finwhale.text import grammar, grammar_trial
from finwhale.text.grammar import GrammarError, json_schema_constraint, regex_constraint
from finwhale.text.grammar_trial import Trial, TrialError, TrialLateError, TrialLostError
from finwhale.text.schema_limits import closed
from finwhale.text.tokenizer import Tokenizer
from tests.scripted_engine import USER, ScriptedEngine, byte_tokenizer, scripted_service

PATTERN = "^[a-z]{3}$"
COSTLY = {"type": "string", "pattern": PATTERN}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    yield tokenizer
    grammar.end_trials(tokenizer)


@pytest.fixture
def trial(small):
    made = Trial(small.raw.to_str(), vocab_size=small.vocab_size, eos_id=small.eos_id)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(grammar, "_templates", grammar._Templates(grammar.MAX_CACHE_BYTES))


def chat(schema=None, **more) -> ChatRequest:
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return ChatRequest(messages=USER, response_format=asked if schema else None, **more)


def follows(constraint, tokenizer, text) -> bool:
    for token in tokenizer.encode(text):
        if not constraint.mask()[token]:
            return False
        constraint.advance(token)
    return constraint.is_finished or bool(constraint.mask()[tokenizer.eos_id])


def an_object(required, **properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(required)}


NUMBER = {"type": "integer"}


def test_a_value_that_two_branches_of_one_of_allow_is_not_served(small):
    """{"a": 1, "b": 2} follows both branches, so it follows one too many."""
    schema = {"oneOf": [an_object("a", a=NUMBER), an_object("ab", a=NUMBER, b=NUMBER)]}
    for way in (schema, an_object("x", x=schema)):
        assert closed(way) == way
    try:
        constraint = json_schema_constraint(small, schema)
    except GrammarError:
        return
    assert not follows(constraint, small, '{"a": 1, "b": 2}')


def test_branches_that_a_listed_text_tells_apart_are_closed(small):
    kinds = [
        an_object("ka", k={"const": "x"}, a=NUMBER),
        an_object("k", k={"enum": ["y", "z"]}, a=NUMBER, b=NUMBER),
    ]
    for schema in ({"oneOf": kinds}, an_object("o", o={"oneOf": kinds})):
        assert closed(schema) != schema
        for text, is_valid in (
            ('{"k": "x", "a": 1}', True),
            ('{"k": "z", "a": 1, "b": 2}', True),
            ('{"k": "y"}', True),
            ('{"k": "x"}', False),
            ('{"k": "w", "a": 1}', False),
            # Valid, and left out, since its name is not declared.
            ('{"k": "x", "a": 1, "b": 2}', False),
        ):
            constraint = json_schema_constraint(small, schema)
            whole = text if "oneOf" in schema else f'{{"o": {text}}}'
            assert follows(constraint, small, whole) is is_valid, whole
    # The same text in two branches, and a text that may be missing, tell nothing apart.
    same = {"oneOf": [kinds[0], {**kinds[1], "properties": {"k": {"enum": ["x", "y"]}}}]}
    missing = {"oneOf": [kinds[0], {**kinds[1], "required": []}]}
    assert [closed(each) for each in (same, missing)] == [same, missing]


def test_a_trial_works_with_descriptors_above_1023(trial):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = 2048 if hard == resource.RLIM_INFINITY else min(2048, hard)
    if want < 1200:
        pytest.skip(f"the system allows {want} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, want), hard))
    held = []
    try:
        while not held or held[-1] < 1100:
            held.append(os.open(os.devnull, os.O_RDONLY))
        assert trial.run("pattern", PATTERN) >= 0
        (child,) = trial._children
        assert child.stdout.fileno() > 1023
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_unexpected_fault_ends_the_child_and_the_next_trial_has_another(trial, monkeypatch):
    trial.run("pattern", "a")
    (child,) = trial._children
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "_line", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            trial.run("pattern", "b")
    assert child.poll() is not None
    assert trial._children == []
    assert trial.run("pattern", "b") >= 0


def test_a_child_under_a_hard_limit_of_memory_serves(small):
    """The limit is that of a shell's `ulimit -v`; a higher hard limit is refused by the system."""
    start = {"tokenizer": small.raw.to_str(), "vocab_size": small.vocab_size, "eos": small.eos_id}
    start |= {"cpu_seconds": 5.0, "memory_bytes": 256 << 20}
    lines = [start, {"kind": "pattern", "text": PATTERN}, {"kind": "pattern", "text": "("}]
    ran = subprocess.run(
        [sys.executable, "-P", grammar_trial.__file__],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)),
    )
    _, served, refused = map(json.loads, ran.stdout.splitlines())
    assert served["error"] is None
    assert refused["error"]


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.EAGAIN])
def test_a_child_that_does_not_start_refuses_no_grammar(small, monkeypatch, number):
    grammar.end_trials(small)

    def failing(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial.subprocess, "Popen", failing)
        with pytest.raises(TrialLostError, match="does not start"):
            regex_constraint(small, PATTERN)
    assert follows(regex_constraint(small, PATTERN), small, "abc")


def test_a_child_that_is_killed_or_late_refuses_no_grammar(small, monkeypatch):
    regex_constraint(small, "a")
    trial = grammar._trial(small)
    (child,) = trial._children
    os.kill(child.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "WALL_SECONDS", 0.05)
        with pytest.raises(TrialLostError, match="longer"):
            regex_constraint(small, PATTERN)
    regex_constraint(small, "b")
    (child,) = trial._children
    os.kill(child.pid, signal.SIGSTOP)
    killer = threading.Timer(0.1, child.kill)
    killer.start()
    with pytest.raises(TrialLostError, match="code -9"):
        regex_constraint(small, PATTERN)
    killer.join()
    assert follows(regex_constraint(small, PATTERN), small, "abc")


def test_a_deadline_behind_which_nothing_is_tried_is_told_apart(trial):
    with pytest.raises(TrialLateError):
        trial.run("pattern", PATTERN, deadline_s=0.0)
    assert trial._children == []
    # The child goes on starting for the next request.
    with pytest.raises(TrialLateError):
        trial.run("pattern", PATTERN, deadline_s=time.monotonic() + 1e-3)
    (child,) = trial._children
    assert child.poll() is None
    assert trial.run("pattern", PATTERN) >= 0
    assert trial._children == [child]
    with pytest.raises(TrialError):
        trial.run("pattern", "(", deadline_s=time.monotonic() + 60)


def test_closing_a_pipe_that_is_broken_ends_a_child_all_the_same():
    class Broken:
        def close(self):
            raise BrokenPipeError

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    real, child.stdin, child.stdout = child.stdin, Broken(), Broken()
    children = [child]
    grammar_trial._end(children)
    assert children == []
    assert child.returncode is not None
    real.close()


@pytest.fixture
def service(small):
    made = scripted_service(small, ScriptedEngine(lambda prompt, index: [small.eos_id]))
    made.grammar_queue = GrammarQueue(
        made.preparer, max_waiting=3, max_tenant_waiting=2, budget_s=5.0
    )
    made.start()
    yield made
    made.close(grace_s=0.0)


def test_blocked_trials_leave_other_requests_and_are_bounded(small, service, monkeypatch):
    free, begun = threading.Event(), threading.Event()

    def blocked(self, kind, text, *, deadline_s):
        if deadline_s <= time.monotonic():
            raise TrialLateError("no time")
        begun.set()
        assert free.wait(30)
        return 0

    monkeypatch.setattr(Trial, "run", blocked)

    def costly(number, tenant):
        return service.chat(chat({**COSTLY, "minLength": number}, tenant=tenant))

    async def main():
        waiting = [asyncio.create_task(costly(i, tenant)) for i, tenant in enumerate("aab")]
        assert await asyncio.to_thread(begun.wait, 30)
        while sum(each.num for each in service.grammar_queue._tenants.values()) < 3:
            await asyncio.sleep(0.01)
        with pytest.raises(RateLimitError) as own:
            await costly(3, "a")
        with pytest.raises(OverloadedError) as everyone:
            await costly(4, "c")
        for error in (own.value, everyone.value):
            assert (error.code, error.retry_after_s) == ("grammars_busy", 1)
        # A free text, and a grammar that is plainly small, of the tenant that waits.
        for request in (chat(tenant="a"), chat({"type": "boolean"}, tenant="a")):
            await asyncio.wait_for(service.chat(request), 10)
        assert not any(task.done() for task in waiting)
        free.set()
        for task in waiting:
            await asyncio.wait_for(task, 10)
        assert service.grammar_queue._tenants == {}

    try:
        asyncio.run(main())
    finally:
        free.set()


def test_all_grammars_of_a_request_have_one_budget(small, service, monkeypatch):
    deadlines = []

    def slow(self, kind, text, *, deadline_s):
        deadlines.append(deadline_s)
        if deadline_s <= time.monotonic():
            raise TrialLateError("no time")
        time.sleep(0.06)
        raise TrialError("refused")

    monkeypatch.setattr(Trial, "run", slow)
    service.grammar_queue._budget_s = 0.2
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": an_object("a", a=COSTLY)}}
        for i in range(12)
    ]
    request = ChatRequest(messages=USER, tools=tools, tool_choice="required", thinking=False)
    with pytest.raises(OverloadedError) as caught:
        asyncio.run(service.chat(request))
    assert caught.value.code == "grammars_busy"
    # The first look has no time for a trial; all others end at the same moment.
    assert deadlines[0] == 0.0
    assert len(set(deadlines[1:])) == 1
    assert len(deadlines) < 12


def test_a_machine_that_cannot_try_answers_503(service, monkeypatch):
    grammar.end_trials(service.tokenizer)

    def failing(*_, **__):
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(grammar_trial.subprocess, "Popen", failing)
    with pytest.raises(OverloadedError) as caught:
        asyncio.run(service.chat(chat(COSTLY)))
    assert (caught.value.status, caught.value.code) == (503, "grammars_unavailable")


def test_closing_the_service_ends_a_trial_that_runs(small, service):
    regex_constraint(small, "a")
    (child,) = grammar._trial(small)._children
    # It is stopped and answers nothing, so only its end frees the thread.
    os.kill(child.pid, signal.SIGSTOP)

    async def main():
        task = asyncio.create_task(service.chat(chat(COSTLY)))
        while not grammar._trial(small)._lock.locked():
            await asyncio.sleep(0.01)
        behind = asyncio.create_task(service.chat(chat(COSTLY, tenant="other")))
        while "other" not in service.grammar_queue._tenants:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(service.close, grace_s=0.0)
        for each in (task, behind):
            with pytest.raises(OverloadedError):
                await asyncio.wait_for(each, 4)

    asyncio.run(main())
    assert child.poll() is not None
    assert grammar._trial(small)._children == []
    for thread in threading.enumerate():
        if thread.name.startswith("finwhale-grammars"):
            thread.join(4)
            assert not thread.is_alive()
