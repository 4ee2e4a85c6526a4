"""TensorBoard events: every number of a record under its name, and nothing without TensorBoard."""

from __future__ import annotations

import sys
import types
from typing import ClassVar

from finwhale.train.events import Events


class Writer:
    """Stands in for SummaryWriter: keeps what it is given."""

    made: ClassVar[list] = []

    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.scalars, self.is_closed = folder, purge_step, [], False
        Writer.made.append(self)

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))

    def close(self):
        self.is_closed = True


def _with_writer(monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "made", [])


def test_every_number_is_written_under_its_name(tmp_path, monkeypatch):
    _with_writer(monkeypatch)
    events = Events(tmp_path, 4)
    assert events.is_on
    record = {"step": 5, "loss": 2.5, "index_loss": {"L1": 0.5, "L4": None}, "note": "text"}
    events.write(record)
    events.write({"step": 6, "loss": 2.0})
    events.close()
    (writer,) = Writer.made
    assert writer.folder == str(tmp_path / "events")
    assert writer.scalars == [("loss", 2.5, 5), ("index_loss/L1", 0.5, 5), ("loss", 2.0, 6)]
    assert writer.is_closed
    # A resumed run repeats step 5: events from there on are dropped.
    assert writer.purge_step == 5


def test_without_tensorboard_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    events = Events(tmp_path, 0)
    assert not events.is_on
    events.write({"step": 1, "loss": 2.5})
    events.close()
    assert list(tmp_path.iterdir()) == []
