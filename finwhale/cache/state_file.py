"""A sequence state on disk, and what can be said of it without loading a tensor.

The file is what `SequenceState.to_bytes` returns, replaced atomically, so a reader sees one whole
state or the one before. `describe` reads the header alone and needs no torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

FORMAT = "finwhale-sequence-state-1"
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
    """Replace `path` by `blob` in one step."""
    path = Path(path)
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with staging.open("wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def describe(path: str | Path) -> StateFacts:
    """Return the facts of a state file. Raises ValueError naming the file if it is not one."""
    path = Path(path)
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        raw = file.read(size) if size <= _MAX_HEADER else b""
    try:
        header = json.loads(raw)
        facts = json.loads(header.pop("__metadata__")["facts"])
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']!r}")
        parts = [_part(name, entry, facts) for name, entry in header.items()]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a state file, expected {FORMAT} ({error})") from None
    order = {"entries": 0, "index_keys": 1, "window": 2, "open_groups": 3, "recent_ids": 4}
    parts.sort(key=lambda part: (order[part.kind], part.layer or 0))
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
