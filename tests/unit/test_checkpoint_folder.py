"""Headers of a folder: each kind of damage is refused with file, tensor, expected and found."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from finwhale.checkpoint import load_model
from finwhale.checkpoint.folder import StoredEntry, read_folder, read_header
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

SECOND_SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def one_shard(tmp_path_factory):
    return write_smallest(tmp_path_factory.mktemp("source") / "one")


@pytest.fixture(scope="module")
def three_shards(tmp_path_factory):
    out = write_smallest(tmp_path_factory.mktemp("source") / "three", max_shard_bytes=300_000)
    assert len(list(out.glob("*.safetensors"))) == 3
    return out


@pytest.fixture
def folder(one_shard, tmp_path):
    return shutil.copytree(one_shard, tmp_path / "copy")


@pytest.fixture
def sharded(three_shards, tmp_path):
    return shutil.copytree(three_shards, tmp_path / "sharded")


@pytest.fixture(autouse=True)
def _no_data_is_read(monkeypatch):
    def read(self, part=None):
        raise AssertionError(f"data of {self.name} was read before all headers were checked")

    monkeypatch.setattr(StoredEntry, "rows", read)


def edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_headers_of_shards_and_of_one_file_name_the_same_tensors(folder, sharded):
    one, three = read_folder(folder), read_folder(sharded)
    assert one.entries.keys() == three.entries.keys()
    assert one.num_bytes == three.num_bytes
    assert [len(one.files), len(three.files)] == [1, 3]


def test_single_file_without_index_is_read(folder):
    (folder / INDEX).unlink()
    (folder / ONE_SHARD).rename(folder / "model.safetensors")
    assert len(read_folder(folder).entries) == len(read_tensors(folder / "model.safetensors"))


def test_missing_shard(sharded):
    (sharded / SECOND_SHARD).unlink()
    error = refusal(load_model, sharded)
    assert error.file.name == SECOND_SHARD
    assert INDEX in error.expected
    assert error.found == "no such file"


def test_two_missing_shards_are_counted(sharded):
    (sharded / SECOND_SHARD).unlink()
    (sharded / SECOND_SHARD.replace("2-", "3-")).unlink()
    assert "(1 more like this)" in str(refusal(load_model, sharded))


def test_missing_folder_and_file_in_its_place(tmp_path):
    assert refusal(load_model, tmp_path / "none").found == "no such file"
    (tmp_path / "file").write_text("x")
    assert refusal(load_model, tmp_path / "file").found == "a file"


def test_neither_index_nor_single_file(folder):
    (folder / INDEX).unlink()
    error = refusal(load_model, folder)
    assert error.file == folder
    assert error.found == ONE_SHARD
    assert INDEX in error.expected


@pytest.mark.parametrize("cut", [1, 1000, 200_000])
def test_truncated_file(folder, cut):
    file = folder / ONE_SHARD
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - cut)
    error = refusal(load_model, folder)
    assert error.file.name == ONE_SHARD
    assert error.tensor in read_folder_names(folder)
    assert "truncated" in error.found
    assert str(size - cut) in error.found


def read_folder_names(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


@pytest.mark.parametrize("size", [0, 7, 100])
def test_file_that_ends_within_its_header(folder, size):
    with (folder / ONE_SHARD).open("r+b") as stream:
        stream.truncate(size)
    error = refusal(load_model, folder)
    assert error.file.name == ONE_SHARD
    assert f"file of {size} bytes" in error.found


def test_appended_bytes(folder):
    file = folder / ONE_SHARD
    size = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(b"\0")
    error = refusal(load_model, folder)
    assert (f"{size} bytes" in error.expected, error.found) == (True, str(size + 1))


@pytest.mark.parametrize(
    ("header", "expected"),
    [(b"{not json", "a JSON header"), (b"\xff\xfe", "a JSON header"), (b"[1]", "a JSON object")],
)
def test_header_that_is_no_json_object(folder, header, expected):
    write_raw(folder / ONE_SHARD, header, b"")
    error = refusal(load_model, folder)
    assert error.file.name == ONE_SHARD
    assert error.expected.startswith(expected)


@pytest.mark.parametrize(
    "entry",
    [
        5,
        {},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
        {"dtype": 32, "shape": [1], "data_offsets": [0, 4]},
    ],
    ids=str,
)
def test_header_entry_without_its_parts(tmp_path, entry):
    write_raw(tmp_path / "a.safetensors", {"x": entry}, b"\0" * 4)
    error = refusal(read_header, tmp_path / "a.safetensors")
    assert error.tensor == "x"
    assert "data_offsets" in error.expected
    assert error.found == repr(entry)


def test_unknown_dtype(tmp_path):
    entry = {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}
    write_raw(tmp_path / "a.safetensors", {"x": entry}, b"\0")
    error = refusal(read_header, tmp_path / "a.safetensors")
    assert (error.tensor, error.found) == ("x", "F4")
    assert "F8_E4M3" in error.expected


def test_shape_that_does_not_fit_its_bytes(folder):
    header, data = read_raw(folder / ONE_SHARD)
    header["norm.weight"]["shape"] = [65]
    write_raw(folder / ONE_SHARD, header, data)
    error = refusal(load_model, folder)
    assert error.tensor == "norm.weight"
    assert error.expected == "130 bytes for BF16 [65]"


@pytest.mark.parametrize("offsets", [[4, 8], [8, 12]], ids=["overlap", "hole"])
def test_overlaps_and_holes(tmp_path, offsets):
    entries = {
        "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "y": {"dtype": "F32", "shape": [1], "data_offsets": offsets},
        "z": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    }
    write_raw(tmp_path / "a.safetensors", entries, b"\0" * 12)
    if offsets == [8, 12]:
        del entries["z"]
        write_raw(tmp_path / "a.safetensors", entries, b"\0" * 12)
    error = refusal(read_header, tmp_path / "a.safetensors")
    assert error.tensor in ("y", "z")
    assert "directly after its neighbour" in error.expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "an object 'weight_map' of names to files"),
        ("[]", "an object 'weight_map' of names to files"),
        ('{"metadata": {}}', "an object 'weight_map' of names to files"),
        ('{"weight_map": {}}', "an object 'weight_map' of names to files"),
    ],
)
def test_unreadable_index(folder, text, expected):
    (folder / INDEX).write_text(text)
    error = refusal(load_model, folder)
    assert (error.file.name, error.expected) == (INDEX, expected)


@pytest.mark.parametrize("file", ["../secret.safetensors", "a/b.safetensors", 5])
def test_index_cannot_point_outside_the_folder(folder, file):
    edit_index(folder, lambda index: index["weight_map"].update({"norm.weight": file}))
    error = refusal(load_model, folder)
    assert (error.tensor, error.found) == ("norm.weight", repr(file))
    assert error.expected == "a plain file name"


def test_index_points_to_an_absent_tensor(sharded):
    edit_index(sharded, lambda index: index["weight_map"].update({"ghost.weight": SECOND_SHARD}))
    error = refusal(load_model, sharded)
    assert (error.file.name, error.tensor) == (SECOND_SHARD, "ghost.weight")
    assert INDEX in error.expected
    assert "no such name" in error.found


def test_index_puts_a_tensor_in_another_shard(sharded):
    edit_index(sharded, lambda index: index["weight_map"].update({"embed.weight": SECOND_SHARD}))
    error = refusal(load_model, sharded)
    assert (error.file.name, error.tensor) == (SECOND_SHARD, "embed.weight")
    assert "no such name" in error.found


def test_index_lacks_a_tensor_of_the_file(sharded):
    edit_index(sharded, lambda index: index["weight_map"].pop("embed.weight"))
    error = refusal(load_model, sharded)
    assert error.tensor == "embed.weight"
    assert error.found == "a tensor that it lacks"


def test_rows_are_read_from_their_place(tmp_path, monkeypatch):
    monkeypatch.undo()
    x = torch.arange(12, dtype=torch.int32).view(4, 3)
    raw = x.numpy().tobytes()
    empty = ("I8", [0, 3], b"")
    write_tensors(
        tmp_path / "a.safetensors",
        {"e": empty, "p": ("U8", [5], b"12345"), "x": ("I32", [4, 3], raw)},
    )
    entries = {entry.name: entry for entry in read_header(tmp_path / "a.safetensors")}
    assert torch.equal(entries["x"].rows(), x)
    assert torch.equal(entries["x"].rows(slice(1, 3)), x[1:3])
    assert entries["e"].rows().shape == (0, 3)


def test_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.undo()
    file = tmp_path / "a.safetensors"
    write_tensors(file, {"x": ("U8", [100], bytes(100))})
    (entry,) = read_header(file)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 40)
    error = refusal(entry.rows)
    assert (error.tensor, error.found) == ("x", "60")
    assert error.expected.startswith("100 bytes")
