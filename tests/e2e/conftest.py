"""A server on loopback whose engine is scripted, shared by the tests of the protocols."""

from __future__ import annotations

import pytest

from tests.scripted_engine import World, byte_tokenizer, running


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def shared(tokenizer):
    world = World(tokenizer)
    with running(world.service) as world.url:
        yield world


@pytest.fixture
def world(shared):
    shared.engine.step_s = 0.0
    shared.engine.added.clear()
    shared.engine.cancelled.clear()
    return shared
