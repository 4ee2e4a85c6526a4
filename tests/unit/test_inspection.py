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


def test_state_of_a_generation_is_printed_and_as_json(tmp_path, capsys):
    import json

    from finwhale import cli
    from finwhale.cache.state_file import write_state
    from finwhale.engine.generate import GenerationStats, generate
    from tests.models import unit_model

    stats = GenerationStats()
    list(generate(unit_model(), [5, 6, 7, 8, 9], max_new_tokens=3, stats=stats))
    write_state(tmp_path / "state", stats.held().to_bytes())
    assert cli.main(["inspect", "--state", str(tmp_path / "state")]) == 0
    printed = capsys.readouterr().out
    assert "state after 7 tokens" in printed
    rows = [line.split() for line in printed.splitlines()]
    # 7 tokens make 3 ratio-2 entries and leave a group open; an entry has 64 fp32 channels.
    assert ["entries", "L1", "3", "0", "to", "2", "768"] in rows
    assert ["open_groups", "L3", "1", "6", "to", "6", "512"] in rows
    assert cli.main(["inspect", "--state", str(tmp_path / "state"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 7
