"""Grammars wait in a queue of their own: nobody else waits for them, and it has bounds."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from finwhale.serve import grammar_queue
from finwhale.serve.errors import OverloadedError, RateLimitError
from finwhale.serve.grammar_queue import GrammarQueue
from finwhale.serve.planning import Plan, Sampling

PLAIN = Plan(prompt=np.array([1], np.int32), sampling=Sampling(), tenant="a", reads_chat=True)
FORMED = replace(PLAIN, response_format={"type": "json_object"})


class Slow:
    """Prepares plans with a grammar when `free` is set, and others at once."""

    def __init__(self):
        self.free = threading.Event()

    def prepared(self, plan):
        if plan.has_grammar:
            self.free.wait(20)
        return plan


@pytest.mark.parametrize(
    ("fields", "has_grammar"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        # Said in the prompt, not enforced.
        ({"response_format": {"type": "json_object"}, "may_call": True}, False),
        ({"must_call": (("f", {}),), "may_call": True}, True),
    ],
)
def test_a_plan_knows_whether_its_answer_follows_a_grammar(fields, has_grammar):
    assert replace(PLAIN, **fields).has_grammar == has_grammar


def test_others_do_not_wait_and_the_bounds_are_of_all_and_of_a_tenant(monkeypatch):
    monkeypatch.setattr(grammar_queue, "MAX_WAITING", 9)
    monkeypatch.setattr(grammar_queue, "MAX_TENANT_WAITING", 6)
    slow = Slow()
    queue = GrammarQueue(slow)

    async def main():
        waiting = [asyncio.ensure_future(queue.prepared(FORMED)) for _ in range(6)]
        await asyncio.sleep(0.05)
        # More wait than there are threads, and a plain one is served.
        assert await asyncio.wait_for(queue.prepared(PLAIN), 5) is PLAIN
        with pytest.raises(RateLimitError, match="6 of this key"):
            await queue.prepared(FORMED)
        other = replace(FORMED, tenant="b")
        waiting += [asyncio.ensure_future(queue.prepared(other)) for _ in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError) as refused:
            await queue.prepared(replace(FORMED, tenant="c"))
        assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
        # A client that leaves gives its place back when its thread has ended.
        waiting[0].cancel()
        slow.free.set()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert list(done[1:]) == [FORMED] * 5 + [other] * 3
        await asyncio.sleep(0.05)
        assert not queue._num_waiting
        assert await queue.prepared(FORMED) is FORMED

    asyncio.run(main())
    queue.close()
