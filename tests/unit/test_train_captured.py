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


def decisions(parts: int, steps: int) -> list[list[str]]:
    """Say what a GPU would do for each call of each step: run, capture or replay."""
    captured, graphs, found = Captured(False), set(), []
    for _ in range(steps):
        captured.begin_step()
        own = []
        for key in ["first", *["later"] * (parts - 1), "norms", "update"]:
            if key in graphs:
                own.append("replay")
            elif captured.runs_plainly(key):
                own.append("run")
            else:
                graphs.add(key)
                own.append("capture")
        found.append(own)
    return found


def test_nothing_is_captured_in_the_step_that_first_uses_it():
    """A pass that later parts share must not be captured before the one whose gradients it adds to.

    By the call instead of the step, the third of four parts would be captured in step 0, on
    gradients that the first pass throws away in step 1.
    """
    first, second, third = decisions(parts=4, steps=3)
    assert first == ["run"] * 6
    assert second == ["capture", "capture", "replay", "replay", "capture", "capture"]
    assert third == ["replay"] * 6


def test_after_forgetting_the_next_step_runs_plainly_again():
    captured = Captured(False)
    captured.begin_step()
    assert captured.runs_plainly("pass")
    captured.begin_step()
    assert not captured.runs_plainly("pass")
    captured.forget()
    assert captured.runs_plainly("pass")
