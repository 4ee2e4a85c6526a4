"""A sequence state on disk, and what can be said of it without loading a tensor.

The file is what `SequenceState.to_bytes` returns, replaced atomically, so a reader sees one whole
state or the one before. `describe` reads the header alone and needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finwhale.config.files import FileError, kind_of_file, parse_object, replace_file, take

FORMAT = "finwhale-sequence-state-2"
_MAX_HEADER = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePart:
    """One stream of one layer: rows held, the positions or entries they stand for, bytes held."""

    kind: str
    layer: int | None
    rows: int
    first: int
    stop: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFacts:
    """A state file's header: token count, where windows may begin, and every part."""

    num_tokens: int
    numerics: str
    max_rollback: int
    window_start: dict[str, int]
    parts: tuple[StatePart, ...]


def write_state(path: str | Path, blob: bytes) -> None:
    """Replace `path` by `blob` in one step. Raises FileError; what was there is then untouched."""
    replace_file(path, blob)


def read_facts(header: bytes, file: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts and the tensor entries of a safetensors header, their types checked.

    file  what errors name. Raises FileError.
    """
    entries = parse_object(header, file, expected=FORMAT)
    text = take(entries.pop("__metadata__", None), "facts", str, file, at="__metadata__.")
    facts = parse_object(text, file, expected=FORMAT)
    if facts.get("format") != FORMAT:
        raise FileError(file, f"format: got {facts.get('format')!r}", FORMAT)
    for name in ("num_tokens", "max_rollback"):
        take(facts, name, int, file)
    for name in ("config", "numerics", "sha256"):
        take(facts, name, str, file)
    for name in ("window_start", "stops"):
        for part in take(facts, name, dict, file):
            take(facts[name], part, int, file, at=f"{name}.")
    take(facts, "tensors", dict, file)
    return facts, entries


def describe(path: str | Path) -> StateFacts:
    """Return the facts of a state file. Raises FileError naming the file if it is not one."""
    path = Path(path)
    kind = kind_of_file(path)
    if kind != "a file":
        raise FileError(path, kind, FORMAT)
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        raw = file.read(size) if size <= _MAX_HEADER else b""
    facts, entries = read_facts(raw, path)
    try:
        parts = [_part(name, entry, facts) for name, entry in entries.items()]
        order = {"entries": 0, "index_keys": 1, "window": 2, "open_groups": 3, "recent_ids": 4}
        parts.sort(key=lambda part: (order[part.kind], part.layer or 0))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise FileError(path, "not a state file: a part of another form", FORMAT) from None
    return StateFacts(
        num_tokens=facts["num_tokens"],
        numerics=facts["numerics"],
        max_rollback=facts["max_rollback"],
        window_start=facts["window_start"],
        parts=tuple(parts),
    )


def _part(name: str, entry: dict, facts: dict) -> StatePart:
    kind, _, layer = name.partition(".")
    rows, (begin, end) = entry["shape"][0], entry["data_offsets"]
    stop = facts["stops"].get(name, rows)  # global KV counts entries from 0
    return StatePart(
        kind=kind,
        layer=int(layer) if layer else None,
        rows=rows,
        first=stop - rows,
        stop=stop,
        num_bytes=end - begin,
    )
