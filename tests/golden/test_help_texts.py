"""The command line is what the stored help texts say. `make golden` rewrites them."""

import pytest

from finwhale import cli
from tests.golden.write_help_texts import COLUMNS, FOLDER, help_text, help_texts

NAMES = ["finwhale", *cli.COMMANDS]


@pytest.fixture(autouse=True)
def _width(monkeypatch):
    monkeypatch.setenv("COLUMNS", COLUMNS)


@pytest.mark.parametrize("name", NAMES)
def test_help_equals_the_stored_text(name):
    stored = (FOLDER / f"help_{name}.txt").read_text(encoding="utf-8")
    assert help_text([] if name == "finwhale" else [name]) == stored


def test_every_stored_text_has_its_command():
    assert {path.name for path in FOLDER.glob("help_*.txt")} == set(help_texts())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_every_command_has_an_example_that_parses(name):
    import shlex

    import tyro

    text = " ".join(help_text([name]).split())
    assert f"Example: finwhale {name} " in text
    example = cli.COMMANDS[name].__doc__.split(f"Example: finwhale {name} ")[1].splitlines()[0]
    parsed = tyro.cli(cli.COMMANDS[name], args=shlex.split(example), config=cli._MARKERS)
    assert isinstance(parsed, cli.COMMANDS[name])
