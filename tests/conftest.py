"""What holds for every test: the folder gives the marker, the test's id gives the seed.

`--seed N` shifts all seeds at once. A test that draws without a generator of its own still
draws the same numbers alone, in the whole suite and on any worker.
"""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
FOLDERS = ("unit", "property", "parity", "golden", "e2e", "gpu")
_HERE = Path(__file__).resolve().parent


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="added to the seed of every test")


def pytest_configure(config):
    import torch
    from hypothesis import settings

    torch.set_num_threads(1)
    # No time limit per example: two workers on two cores have no steady clock.
    settings.register_profile("house", deadline=None, derandomize=True)
    settings.load_profile("house")


def pytest_collection_modifyitems(items):
    for item in items:
        folder = item.path.relative_to(_HERE).parts[0]
        if folder in FOLDERS:
            item.add_marker(getattr(pytest.mark, folder))


def seed_of(node_id: str, offset: int) -> int:
    """Return the 63-bit seed of a test: SHA-256 of its id, shifted by `--seed`."""
    digest = hashlib.sha256(node_id.encode()).digest()
    return (int.from_bytes(digest[:8], "big") + offset) % 2**63


@pytest.fixture
def seed(request) -> int:
    """This test's own seed, for generators it makes itself."""
    return seed_of(request.node.nodeid, request.config.getoption("--seed"))


@pytest.fixture(autouse=True)
def _seeded(seed):
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
