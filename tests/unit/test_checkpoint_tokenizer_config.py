"""tokenizer_config.json: the markers by their part, wherever a tokenizer.json is written (F2).

That transformers 5.24 finds them so was tried by hand: begin, end and padding of the shipped
folder, and the ids of texts with and without markers, as finwhale's tokenizer gives them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from finwhale.checkpoint import load_model, save_checkpoint
from finwhale.checkpoint.tokenizer_config import tokenizer_config_text
from finwhale.checkpoint.toy_tokenizer import toy_tokenizer_json
from finwhale.config import ModelConfig, preset
from finwhale.config.server import ServerConfig
from tests.checkpoint_files import refusal, write_smallest

SHIPPED = Path(__file__).parents[2] / "models" / "finwhale-mini"
# spec/multimodal-serving.md section B.1, ids 0, 1 and 2.
MARKERS = {
    "bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "eos_token": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "pad_token": "<\uff5c\u2581pad\u2581\uff5c>",
}


def named(folder: Path) -> dict:
    return json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_smallest(tmp_path_factory.mktemp("source") / "one")


def test_shipped_folder_names_its_markers():
    values = named(SHIPPED)
    assert {part: values[part] for part in MARKERS} == MARKERS
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert values["add_bos_token"] is False
    assert values["model_max_length"] == 1048576
    assert "chat_template" not in values
    read = tokenizers.Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    assert [read.token_to_id(values[part]) for part in MARKERS] == [0, 1, 2]


def test_shipped_generation_config_says_what_the_server_does():
    values = json.loads((SHIPPED / "generation_config.json").read_text(encoding="utf-8"))
    config, server = ModelConfig.from_json(SHIPPED), ServerConfig()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert values[name] == getattr(config, name)
    assert (values["temperature"], values["top_p"]) == (server.temperature, server.top_p)
    assert values["do_sample"] is True


def test_every_save_with_a_tokenizer_writes_the_file(folder, tmp_path):
    model = load_model(folder).model
    report = save_checkpoint(model, tmp_path / "a", tokenizer_file=folder / "tokenizer.json")
    assert "tokenizer_config.json" in report.files
    assert {part: named(tmp_path / "a")[part] for part in MARKERS} == MARKERS
    # One of one's own is kept; no tokenizer, no file.
    own = {"tokenizer_config.json": b'{"own": 1}'}
    tokenizer = folder / "tokenizer.json"
    save_checkpoint(model, tmp_path / "b", tokenizer_file=tokenizer, extra_files=own)
    assert named(tmp_path / "b") == {"own": 1}
    assert "tokenizer_config.json" not in save_checkpoint(model, tmp_path / "c").files
    # And it may be overwritten.
    save_checkpoint(model, tmp_path / "a", tokenizer_file=tokenizer, overwrite=True)


def test_ids_of_the_configuration_decide(folder):
    """A model whose ids are others names other markers, and one without a marker names none."""
    raw = preset("unit").to_json() | {"bos_token_id": 2, "pad_token_id": 7}
    values = json.loads(
        tokenizer_config_text(ModelConfig.from_json(raw), toy_tokenizer_json(512).encode(), "x")
    )
    assert values["bos_token"] == MARKERS["pad_token"]
    assert values["eos_token"] == MARKERS["eos_token"]
    assert "pad_token" not in values


@pytest.mark.parametrize("content", [b"[]", b"\xff", b"{", b"[" * 100_000])
def test_what_is_no_tokenizer_is_not_copied(folder, tmp_path, content):
    model = load_model(folder).model
    (tmp_path / "tokenizer.json").write_bytes(content)
    out = tmp_path / "out"
    error = refusal(save_checkpoint, model, out, tokenizer_file=tmp_path / "tokenizer.json")
    assert error.file == tmp_path / "tokenizer.json"
    assert not out.exists()


def test_loaders_read_nothing_from_it(folder, tmp_path):
    model = load_model(folder).model
    files = {"tokenizer_config.json": b"[" * 100, "generation_config.json": b"\xff"}
    out = tmp_path / "out"
    save_checkpoint(model, out, tokenizer_file=folder / "tokenizer.json", extra_files=files)
    load_model(out)
