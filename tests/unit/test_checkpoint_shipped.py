"""Where the shipped model is looked for."""

import json
from pathlib import Path

import pytest

from finwhale.checkpoint import CheckpointError
from finwhale.checkpoint.shipped import shipped_model

ROOT = Path(__file__).resolve().parents[2]


def test_the_shipped_model_lies_in_the_repository(monkeypatch):
    monkeypatch.delenv("FINWHALE_MINI", raising=False)
    folder = shipped_model()
    assert folder == ROOT / "models" / "finwhale-mini"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "deepseek_v41"
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "unset"])
def test_a_variable_that_says_nothing_changes_nothing(empty, monkeypatch):
    monkeypatch.setenv("FINWHALE_MINI", "")
    if not empty:
        monkeypatch.delenv("FINWHALE_MINI")
    assert shipped_model() == ROOT / "models" / "finwhale-mini"


def test_the_variable_names_another_place(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setenv("FINWHALE_MINI", str(tmp_path))
    assert shipped_model() == tmp_path


def test_a_wrong_variable_is_named_and_not_replaced_by_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("FINWHALE_MINI", str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"no config\.json; correct FINWHALE_MINI or unset it"
    ):
        shipped_model()


def test_a_package_without_the_model_says_how_to_get_it(tmp_path, monkeypatch):
    from finwhale.checkpoint import shipped

    place = tmp_path / "finwhale" / "checkpoint" / "shipped.py"
    monkeypatch.delenv("FINWHALE_MINI", raising=False)
    monkeypatch.setattr(shipped, "__file__", str(place))
    with pytest.raises(CheckpointError, match=r"a clone of the repository, .*--model"):
        shipped_model()
