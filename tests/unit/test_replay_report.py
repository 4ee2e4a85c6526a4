"""docs/replay.md holds what the stored lines give, by hand-made lines and by the real ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from finwhale.evals.figures import difference_figure
from finwhale.evals.position_bits import EvaluationError
from tests.models import token_ids, unit_model

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("replay_report", ROOT / "bench" / "replay_report.py")
report = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(report)


def cell(hit: int, mode: str, kl: float, same: float, rows: int = 8) -> dict:
    where = {"part": "boundary", "hit": hit, "suffix": 8, "mode": mode, "rows": rows}
    return {**where, "kl": [kl / 2, kl], "same": [1.0, same], "run": 3}


def write(folder: Path, cells: list[list[dict]]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"unit": f"text {n}", "cells": own}) for n, own in enumerate(cells)]
    (folder / "toy.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_table_is_the_mean_over_documents_and_names_the_worst(tmp_path):
    modes = {"kept": 0.0, "encoder": 1e-3, "decoder": 2e-3, "both": 4e-3}
    cells = [
        [*(cell(300, m, kl * n, 0.5) for m, kl in modes.items()), cell(300, "both", 0.5, 0.25, 0)]
        for n in (1, 3)
    ]
    write(tmp_path / "lines", cells)
    found = report.read(tmp_path / "lines")["toy"]
    row = report.boundary(found).splitlines()[-1]
    # Means of 1 and 3 times; replay of no row is a mode of its own.
    assert (
        row == "| 300 | 0 | 2.0e-3 | 4.0e-3 | 8.0e-3 | 8.0e-3 | 5.0e-1 | 50.0% | 25.0% | 1.2e-2 |"
    )


def test_places_are_filled_and_the_words_stay(tmp_path):
    write(tmp_path / "lines", [[cell(5, m, 0.0, 1.0) for m in report.MODES]])
    models = report.read(tmp_path / "lines")
    text = (
        "before\n<!-- replay:boundary:toy -->\nold\n<!-- end -->\nbetween\n"
        "<!-- replay:long:toy -->\n<!-- end -->\n<!-- replay:chain:gone -->\nx\n<!-- end -->\n"
    )
    filled = report.filled(text, models)
    assert "old" not in filled
    assert "| 5 | 0 | 0 | 0 | 0 | 0 | 0 | 100.0% | 100.0% | 0 |" in filled
    assert "between" in filled
    assert filled.count("Not measured.") == 2
    assert report.filled(filled, models) == filled


def test_the_document_is_that_of_the_stored_lines():
    models = report.read(ROOT / "bench" / "results" / "replay")
    text = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    assert report.filled(text, models) == text
    # A document without places would pass whatever was measured.
    assert text.count("<!-- replay:") >= 10


def test_a_figure_draws_every_line_and_zeros_at_its_floor():
    series = {"a": [(0, 0.5, 0.1), (8, 0.0, 0.0), (16, 1e-3, 5e-3)], "b": [(8, 1e-2, 0.0)]}
    figure = difference_figure(series, xlabel="rows", ylabel="KL", marks={"window": 8}, log_x=True)
    axes = figure.axes[0]
    heights = [list(container[0].get_ydata()) for container in axes.containers]
    assert heights == [[0.5, 1e-9, 1e-3], [1e-2]]
    assert axes.get_yscale() == "log"
    with pytest.raises(EvaluationError, match="series"):
        difference_figure({"a": []}, xlabel="x", ylabel="y")


def test_the_program_measures_what_the_tables_read(monkeypatch):
    """A document of the size of a tiny model, through every part that a text has."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import replay_table as program

    small = {
        "BOUNDARY_HITS": (0, 40),
        "SUFFIXES": (1, 2, 3),
        "SUFFIX_HITS": (20,),
        "DISTANCES": (1, 2, 4),
        "LONG_REPLIES": (),
        "EXACT_HITS": (40,),
        "FIELD_HIT": 60,
        "SUFFIX": 2,
    }
    for name, value in small.items():
        monkeypatch.setattr(program, name, value)

    class Texts:
        def document(self, number, length, device):
            return token_ids(1, length, seed=number + 20)

    held = program.Program(unit_model(), None, Texts(), "cpu")
    assert held.lengths[:4] == [0, 4, 8, 16]
    held.lengths = [0, 8, 80]
    cells = [{**cell, "unit": "text 0"} for cell in (*held.text(0), *held.suffix(0))]
    cells = json.loads(json.dumps(cells))
    for cell in cells:
        if cell.get("mode") == "both" and cell["rows"] == 0:
            cell["mode"] = "none"
    text = report.boundary(cells)
    # One line for each hit below the two of the head.
    assert [line.split(" | ")[0] for line in text.splitlines()[2:]] == ["| 0", "| 40"]
    last = report.chosen(cells, part="boundary", hit=40)
    kl = {cell["mode"]: cell["kl"][1] for cell in last}
    assert max(kl["kept"], kl["exact"]) < 1e-7 < 100 * kl["both"]
    assert kl["twice"] < kl["both"] < kl["none"]
    field = {c["rows"]: c["kl"][1] for c in report.chosen(cells, part="field", mode="encoder")}
    assert field[0] > field[8] > 1000 * field[80]
    assert "20: both" in report.suffixes(cells)
    assert [line[:8] for line in report.floor(cells).splitlines()[2:]] == ["| from 0"]
