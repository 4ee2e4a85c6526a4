"""Files of strangers: one sentence with the name, whatever lies there; our own: whole or not."""

from __future__ import annotations

import json
import os
import socket

import pytest

from finwhale.config import ConfigError, ModelConfig
from finwhale.config.files import (
    MAX_DEPTH,
    FileError,
    new_folder,
    parse_object,
    read_bytes,
    read_object,
    replace_file,
    take,
)


def refusal(path, **options) -> str:
    with pytest.raises(FileError) as error:
        read_object(path, expected="a record", **options)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "a record" in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 200
    return message


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


PLACES = {
    "no such file": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link that leads nowhere": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_no_file_is_named_without_a_wait(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    path = tmp_path / "x"
    PLACES[kind](path if kind != "a socket" else path.relative_to(tmp_path))
    assert kind in refusal(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8 (byte 7)"),
        (b"[1]", "a list"),
        (b"null", "null"),
        (b'"text"', "a text"),
        (b"7", "a number"),
        (b"true", "a truth value"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' twice"),
        (b'{"inner": {"a": 1, "a": 1}}', "the key 'a' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of more than 4300 digits"),
        (b"[" * 200_000, "nested deeper"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested deeper"),
        (b'{"a": ' * 500 + b"1" + b"}" * 500, "nested deeper"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_what_is_no_object_is_refused_with_the_reason(tmp_path, text, why):
    path = tmp_path / "x"
    path.write_bytes(text)
    assert why in refusal(path)


@pytest.mark.parametrize("depth", [1, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1])
def test_depth_is_counted_to_the_level(depth):
    text = '{"a": ' * depth + "1" + "}" * depth
    if depth <= MAX_DEPTH:
        assert parse_object(text, "x", expected="a record") == json.loads(text)
        return
    with pytest.raises(FileError, match="nested deeper"):
        parse_object(text, "x", expected="a record")


@pytest.mark.parametrize("size", [2, 99, 100, 101, 5000])
def test_size_is_bounded_before_the_bytes_are_read(tmp_path, size):
    path = tmp_path / "x"
    path.write_bytes(b"{}".ljust(size))
    if size <= 100:
        assert read_object(path, max_bytes=100, expected="a record") == {}
    else:
        assert f"{size} bytes" in refusal(path, max_bytes=100)


def test_a_huge_file_costs_no_memory(tmp_path):
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    assert "1099511627776 bytes" in refusal(path)


def test_a_file_without_a_size_is_read_to_its_end():
    """Files of /proc say that they have 0 bytes."""
    read = read_bytes("/proc/self/status", max_bytes=1 << 20, expected="a text")
    assert read.startswith(b"Name:")
    with pytest.raises(FileError, match="at most 10 bytes"):
        read_bytes("/proc/self/status", max_bytes=10, expected="a text")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (int, [0, 7, 10**30], [-1, 1.0, True, "1", None]),
        (float, [0, 1.5], [-1.0, float("nan"), float("inf"), 10**400, True, "1", None]),
        (str, ["", "x"], [1, None, []]),
        (dict, [{}], [[], None]),
        (list, [[]], [{}, "x", None]),
    ],
)
def test_fields_are_taken_by_kind_or_refused_by_name(kind, good, bad):
    for value in good:
        assert take({"n": value}, "n", kind, "file") == value
    for value in bad:
        with pytest.raises(FileError, match=r"^file: part\.n: got"):
            take({"n": value}, "n", kind, "file", at="part.")
    for record in ({}, [], None, 3):
        with pytest.raises(FileError, match=r"^file: n: got None"):
            take(record, "n", kind, "file")


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "x"
    replace_file(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"/x: not written \(No space left on device\)"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("no")])
def test_a_folder_appears_whole_or_not_at_all(tmp_path, error):
    with pytest.raises(ValueError), new_folder(tmp_path / "out") as staging:  # noqa: PT011, PT012
        (staging / "half").write_text("x")
        raise error
    assert not list(tmp_path.iterdir())
    with new_folder(tmp_path / "out") as staging:
        (staging / "whole").write_text("x")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["whole"]


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_a_configuration_that_is_no_file_is_refused_by_path(tmp_path, kind):
    """Case [9]: a pipe waited for ever, /dev/zero was read until the memory ended."""
    PLACES[kind](tmp_path / "config.json")
    with pytest.raises(ConfigError, match=rf"config\.json: {kind}, expected a released config"):
        ModelConfig.from_json(tmp_path)
