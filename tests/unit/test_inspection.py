"""How the tables look: aligned columns for pipes, rich tables for terminals, the same cells."""

import io

import pytest

from finwhale import inspection
from finwhale.config import ConfigError, build_layer_specs, preset
from finwhale.inspection import Table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_table_aligns_names_left_and_numbers_right():
    table = Table(title="t", columns=("name", "n"), rows=(("a", "1"), ("long one", "1,000")))
    out = io.StringIO()
    inspection.write_plain([table], out)
    assert out.getvalue() == "\nt\nname          n\na             1\nlong one  1,000\n"


def test_terminal_gets_every_cell_that_a_pipe_gets(monkeypatch):
    config = preset("unit")
    pipe, terminal = io.StringIO(), Terminal()
    inspection.show("preset unit", config, pipe)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("sys.stdout", terminal)
    inspection.show("preset unit", config)
    shown = terminal.getvalue()
    for table in inspection.tables_of(config):
        assert table.title in pipe.getvalue()
        for row in table.rows:
            for cell in row:
                assert cell in shown
                assert cell in pipe.getvalue()


def test_layer_row_says_which_rope():
    text = preset("flash").text_config
    rows = [inspection.layer_row(s, text) for s in build_layer_specs(text)]
    assert [row[7] for row in rows[:3]] == ["10000", "10000", "160000 + YaRN x16"]


def test_terminal_width_is_no_limit_for_totals():
    tables = inspection.tables_of(preset("flash"))
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)


def test_half_bytes_are_shown():
    assert inspection._numbers([("x", 52.5, 1000)]) == (("x", "52.50", "1,000"),)


@pytest.mark.parametrize("source", ["", "no/such/place", "flash/config.json"])
def test_source_that_is_nothing_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        inspection.resolve_config(source)
