"""Files that others wrote, read within bounds, and files of ours, replaced whole or not at all.

Every JSON file of the package comes through `read_object`. Refused with one sentence that names
the file: what is not a regular file (a pipe, a device, a folder, a link to itself), what is larger
than its kind can be, and text that is not UTF-8, not JSON, nested too deep, no object, or an object
that has a key twice, of which only one would count. Opening never waits for a writer.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The deepest nesting of a known file is 6: the steps of a tokenizer's regular expressions.
MAX_DEPTH = 64
# Bytes of a small record: a configuration, the record of a run or of shards.
MAX_RECORD_BYTES = 1 << 24


class FileError(ValueError):
    """A file that cannot be read as what it should be, or could not be written.

    file            its path
    found           what is there instead
    expected        what should be there
    """

    def __init__(self, file: str | Path, found: str, expected: str):
        self.file, self.found, self.expected = Path(file), found, expected
        super().__init__(f"{file}: {found}, expected {expected}")


def shown(value: object) -> str:
    """Return `value` as a message can hold it: at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def kind_of_file(path: str | Path) -> str:
    """Return what lies at `path`: "a file", "a folder", "a pipe", "no such file" and so on."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return "a link that leads nowhere" if os.path.islink(path) else _reason(error)
    except ValueError:  # a NUL in the name
        return "no such file"
    return _kind(mode)


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for test, name in kinds if test(mode)), "a device")


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "no such file"
    return error.strerror or str(error)


def read_bytes(path: str | Path, *, max_bytes: int, expected: str) -> bytes:
    """Return the bytes of a regular file of at most `max_bytes`; raise FileError for others.

    expected  what the file should be, for the message: "a released config.json"
    """
    kind = kind_of_file(path)
    if kind != "a file":
        raise FileError(path, kind, expected)
    try:
        # It may have become a pipe since; O_NONBLOCK opens one without a wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FileError(path, _kind(status.st_mode), expected)
            # Files of /proc have size 0 and content, so the bytes themselves are counted, too.
            most = min(max_bytes, status.st_size or 1 << 20)
            data = b"" if status.st_size > max_bytes else file.read(most + 1)
    except OSError as error:
        raise FileError(path, f"not readable ({_reason(error)})", expected) from None
    if status.st_size > max_bytes or len(data) > max_bytes:
        size = max(status.st_size, len(data))
        raise FileError(path, f"a file of {size} bytes", f"{expected}, at most {max_bytes} bytes")
    return data


def read_text(path: str | Path, *, max_bytes: int, expected: str) -> str:
    """Return the text of a regular file in UTF-8, line ends as they are; raise FileError."""
    data = read_bytes(path, max_bytes=max_bytes, expected=expected)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(path, f"not UTF-8 (byte {error.start})", expected) from None


def read_object(
    path: str | Path, *, max_bytes: int = MAX_RECORD_BYTES, expected: str
) -> dict[str, Any]:
    """Return the JSON object that a regular file holds; raise FileError for anything else."""
    return parse_object(
        read_bytes(path, max_bytes=max_bytes, expected=expected), path, expected=expected
    )


def parse_object(data: bytes | str, file: str | Path, *, expected: str) -> dict[str, Any]:
    """Return the JSON object in `data`, which came from `file`; raise FileError.

    Numbers are whole numbers of any size up to 4,300 digits, or floats; NaN and infinities pass and
    are for the caller to refuse by field.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise FileError(file, f"not UTF-8 (byte {error.start})", expected) from None
    except json.JSONDecodeError as error:
        raise FileError(file, f"not valid JSON ({error})", expected) from None
    except RecursionError:
        raise FileError(file, f"JSON nested deeper than {MAX_DEPTH}", expected) from None
    except _TwiceError as error:
        raise FileError(file, f"the key {shown(error.args[0])} twice", expected) from None
    except ValueError:
        # The library's own sentence advises to lift the limit.
        raise FileError(file, "a number of more than 4300 digits", expected) from None
    if not isinstance(value, dict):
        names = {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
        found = names.get(type(value), "a number")
        raise FileError(file, found, f"a JSON object, {expected}")
    if _is_deep(value):
        raise FileError(file, f"JSON nested deeper than {MAX_DEPTH}", expected)
    return value


class _TwiceError(ValueError):
    """An object that has a key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        raise _TwiceError(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return found


def _is_deep(value: dict[str, Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
        if not level:
            return False
    return True


# What `take` accepts, and how a message names it.
_TAKEN = {
    int: ("a whole number of at least 0", lambda v: type(v) is int and v >= 0),
    float: (
        "a finite number of at least 0",
        lambda v: type(v) in (int, float) and 0 <= v <= 1e300 and math.isfinite(v),
    ),
    str: ("a text", lambda v: isinstance(v, str)),
    dict: ("an object", lambda v: isinstance(v, dict)),
    list: ("a list", lambda v: isinstance(v, list)),
}


def take(record: Any, name: str, kind: type, file: str | Path, *, at: str = "") -> Any:
    """Return `record[name]` if it is of `kind`; raise FileError that names file and field.

    kind  int (at least 0), float (finite, at least 0), str, dict or list
    at    path of `record` inside the file, with a dot at its end
    """
    value = record.get(name) if isinstance(record, dict) else None
    want, fits = _TAKEN[kind]
    if not fits(value):
        raise FileError(file, f"{at}{name}: got {shown(value)}", want)
    return value


def replace_file(path: str | Path, data: bytes | str) -> None:
    """Replace `path` by `data`: whole, flushed to the disk, or not at all.

    Raises FileError that names the file and the cause, and leaves nothing else behind.
    """
    path = Path(path)
    data = data.encode("utf-8") if isinstance(data, str) else data
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise not_written(path, error) from None
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` when the block ends without an exception.

    `out` must be absent. Raises FileError for a write that fails; nothing is left behind.
    """
    staging = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-partial-"))
        yield staging
        staging.chmod(0o755)
        staging.rename(out)
    except OSError as error:
        raise not_written(out, error) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError of the block, which knows no file, the name of `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def not_written(path: str | Path, cause: BaseException) -> FileError:
    """Return the error of a write to `path` that failed half way."""
    reason = _reason(cause) if isinstance(cause, OSError) else " ".join(str(cause).split())
    return FileError(
        path, f"not written ({reason}), what was there is untouched", "room and the right to write"
    )
