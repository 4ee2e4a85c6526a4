"""Folders of strangers: overlays as their index says, and one sentence for all that is no model."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
import torch

from finwhale.checkpoint import load_model
from finwhale.checkpoint.folder import MAX_HEADER_BYTES, read_folder, read_header
from finwhale.config import ConfigError
from finwhale.text.tokenizer import Tokenizer, TokenizerError
from tests.checkpoint_files import (
    INDEX,
    ONE_SHARD,
    read_raw,
    read_tensors,
    refusal,
    write_raw,
    write_smallest,
    write_tensors,
)

NORM = "norm.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_smallest(tmp_path_factory.mktemp("source") / "one")


@pytest.fixture
def folder(source, tmp_path):
    return shutil.copytree(source, tmp_path / "copy")


def overlay(folder, name: str, *, moved: dict | None = None, extra: dict | None = None):
    """Add a shard `name` that holds another norm.weight, and give it that tensor in the index."""
    dtype, shape, data = read_tensors(folder / ONE_SHARD)[NORM]
    new = bytes(reversed(data)) if data != bytes(reversed(data)) else b"\x40\x40" * (len(data) // 2)
    assert new != data
    write_tensors(folder / name, {NORM: (dtype, shape, new), **(extra or {})})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= {NORM: name, **(moved or {})}
    (folder / INDEX).write_text(json.dumps(index))
    return torch.frombuffer(bytearray(new), dtype=torch.bfloat16).float()


@pytest.mark.parametrize("name", ["a-first.safetensors", "z-last.safetensors"])
def test_an_overlay_is_read_as_its_index_says(folder, source, caplog, name):
    """Case 194, both orders of shards: a superseded copy is passed over, and counted."""
    plain = load_model(source).model.state_dict()
    with caplog.at_level(logging.INFO, logger="finwhale"):
        wanted = overlay(folder, name)
        loaded = load_model(folder).model.state_dict()
    assert torch.equal(loaded[NORM], wanted)
    assert not torch.equal(plain[NORM], wanted)
    for other in plain:
        assert other == NORM or torch.equal(loaded[other], plain[other]), other
    lines = [record.getMessage() for record in caplog.records if "passed over" in record.message]
    assert len(lines) == 1
    assert "1 tensors passed over" in lines[0]


def test_copies_in_several_shards_are_counted(folder):
    overlay(folder, "b.safetensors")
    wanted = overlay(folder, "a.safetensors", moved={})
    # The index names b no more, so it is no part of the model.
    assert {file.name for file in read_folder(folder).files} == {ONE_SHARD, "a.safetensors"}
    assert torch.equal(load_model(folder).model.state_dict()[NORM], wanted)


def test_the_shard_that_the_index_names_must_hold_the_tensor(folder):
    """Case 193: another shard's copy does not stand in."""
    overlay(folder, "a.safetensors", moved={"embed.weight": "a.safetensors"})
    error = refusal(load_model, folder)
    assert (error.file.name, error.tensor) == ("a.safetensors", "embed.weight")
    assert "no such name" in error.found


def test_a_tensor_that_no_index_lists_is_refused(folder):
    overlay(folder, "a.safetensors", extra={"ghost.weight": ("BF16", [1], b"\0\0")})
    error = refusal(load_model, folder)
    assert (error.tensor, error.found) == ("ghost.weight", "a tensor that it lacks")


PLACES = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a link that leads nowhere": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", [ONE_SHARD, INDEX, "config.json", "tokenizer.json"])
def test_what_is_no_file_is_named_for_what_it_is(folder, name, kind):
    (folder / name).unlink()
    PLACES[kind](folder / name)
    if name == "config.json" and kind == "a link that leads nowhere":
        kind = "a link"
    with pytest.raises(ValueError, match=f"{name}.*{kind}") as error:
        load_model(folder) if name != "tokenizer.json" else Tokenizer.from_file(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["a pipe", "a folder"])
def test_a_single_file_that_is_none_is_named(folder, kind):
    (folder / INDEX).unlink()
    PLACES[kind](folder / "model.safetensors")
    assert refusal(load_model, folder).found == f"{kind} named model.safetensors"
    assert refusal(read_header, folder / "model.safetensors").found == kind


DEEP = b"[" * 200_000
LONG_NUMBER = b'{"a": ' + b"9" * 5000 + b"}"
TWICE = b'{"a": 1, "a": 1}'


@pytest.mark.parametrize("content", [DEEP, LONG_NUMBER, TWICE, b"\xff{}", b"[1]", b""])
@pytest.mark.parametrize("name", ["header", INDEX, "config.json", "tokenizer.json"])
def test_no_content_gets_past_its_reader(folder, name, content):
    """Case [10]: a traceback of RecursionError, or a sentence without a file."""
    if name == "header":
        write_raw(folder / ONE_SHARD, content, b"")
        name = ONE_SHARD
    else:
        (folder / name).write_bytes(content)
    try:
        Tokenizer.from_file(folder) if name == "tokenizer.json" else load_model(folder)
    except (ConfigError, TokenizerError, ValueError) as error:
        message = str(error)
        assert str(folder / name) in message
        assert "\n" not in message
        assert "set_int_max_str_digits" not in message
        assert len(message) < len(str(folder)) + 500
    else:
        raise AssertionError


@pytest.mark.parametrize(
    "shape",
    [
        [10**4000, 10**4000],
        [2**62] * 1000,
        [1] * 100_000,
        [2**63],
        [[1]],
        [True],
        [1.0],
        "11",
        None,
    ],
    ids=lambda shape: str(shape)[:12],
)
def test_absurd_shapes_are_refused_by_tensor(folder, shape):
    """The product of two numbers of 4,000 digits cannot even be printed."""
    header, data = read_raw(folder / ONE_SHARD)
    header[NORM]["shape"] = shape
    write_raw(folder / ONE_SHARD, header, data)
    error = refusal(load_model, folder)
    assert error.tensor == NORM
    assert len(str(error)) < len(str(folder)) + 500


def test_a_long_name_makes_no_long_message(folder):
    header, data = read_raw(folder / ONE_SHARD)
    header["x" * 1_000_000] = header.pop(NORM)
    write_raw(folder / ONE_SHARD, header, data)
    assert len(str(refusal(load_model, folder))) < len(str(folder)) + 500


def test_a_header_larger_than_the_format_allows_is_refused_unread(tmp_path):
    file = tmp_path / "a.safetensors"
    with file.open("wb") as stream:
        stream.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        stream.truncate(MAX_HEADER_BYTES * 2)
    assert f"a length of {MAX_HEADER_BYTES + 1} bytes" in refusal(read_header, file).found


VALUES = [
    ("n_routed_experts", 10**9),
    ("n_routed_experts", 16_384),
    ("engram_n_heads", 10**9),
    ("engram_max_ngram_size", 10**7),
    ("engram_vocab_size", 2**62),
    ("engram_vocab_size", 2**30),
    ("hc_sinkhorn_iters", 10**9),
    ("compress_rope_theta", 10**400),
    ("sliding_window", 10**12),
    ("vocab_size", 2**40),
    ("vocab_size", 2**24),
    ("hidden_size", 2**18),
    ("num_hidden_layers", 1000),
    ("swiglu_limit", float("inf")),
]


@pytest.mark.parametrize(("field", "value"), VALUES)
def test_a_size_that_the_files_do_not_have_costs_a_sentence(folder, field, value):
    """Case [9], in range and out of it: files are compared before anything is allocated."""
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"][field] = value
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="expected") as error:
        load_model(folder)
    message = str(error.value)
    assert str(folder) in message
    assert "\n" not in message
    assert len(message) < len(str(folder)) + 600
