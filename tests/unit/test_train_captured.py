"""Without a GPU nothing is captured: every call runs its function."""

from __future__ import annotations

import torch

from finwhale.train.captured import Captured


def test_every_call_runs_where_nothing_is_captured():
    captured, counted = Captured(False), []

    def count():
        counted.append(len(counted))
        return torch.tensor(len(counted))

    assert [int(captured("key", count)) for _ in range(4)] == [1, 2, 3, 4]
    captured.forget()
    assert int(captured("key", count)) == 5
    assert captured("other", lambda: None) is None
