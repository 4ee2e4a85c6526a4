"""`kill -9` at random moments, of the store and of a server; `bench/kill_store.py` has hundreds."""

from __future__ import annotations

import pytest

from tests.checkpoint_files import write_smallest
from tests.killed_server import ServerKilling
from tests.killed_store import Killing


@pytest.mark.parametrize("mode", ["roomy", "tight"])
def test_kills_of_a_store_break_no_promise(tmp_path, mode):
    killing = Killing(tmp_path / "cache", mode, seed=1000)
    # On a busy machine the first ones may come before anything was promised.
    while killing.num_kills < 3 or not killing.promises:
        assert killing.once() == []
        assert killing.num_kills < 60


def test_promises_before_the_flush_are_found_out(tmp_path):
    killing = Killing(tmp_path / "cache", "roomy", control="early")
    # On a quick disk a kill hits the moment between promise and flush one time in ten.
    assert any("lost" in problem for _ in range(150) for problem in killing.once())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["roomy", "tight"])
def test_many_kills_of_a_store_break_no_promise(tmp_path, mode):
    killing = Killing(tmp_path / "cache", mode, seed=2000)
    assert [problem for _ in range(40) for problem in killing.once()] == []
    assert len(killing.moments) > 2


@pytest.mark.slow
def test_kills_of_a_server_change_no_reply_and_lose_no_block(tmp_path):
    folder = write_smallest(tmp_path / "tiny")
    killing = ServerKilling(folder, tmp_path / "cache", tmp_path / "log")
    assert [problem for _ in range(4) for problem in killing.once()] == []
    assert killing.cached_tokens > 0
    same, wrong = killing.compare(tmp_path / "clean")
    assert same
    assert wrong == []
