"""A folder that appears complete or not at all.

Files are written into a sibling folder, flushed to disk, and swapped with the target in one
rename. A crash or kill at any byte leaves the old folder as it was; what a killed process left
behind is removed by the next save to the same place. Refuses to replace a folder that holds
anything a checkpoint does not. The easy mistake: renaming over a folder that is not empty, which
the system refuses, and deleting the old one first, which is not atomic.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finwhale.checkpoint.folder import INDEX_FILE, CheckpointError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# What a folder may hold and still be replaced by `overwrite=True`, beside *.safetensors.
_REPLACEABLE = frozenset(
    {
        INDEX_FILE,
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "expected.json",
        "run.json",
    }
)


@contextmanager
def staged_folder(
    out: str | Path, *, overwrite: bool = False, also_replaceable: frozenset[str] = frozenset()
) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` when the block ends without an exception.

    `out` may be absent or empty; with `overwrite` also a checkpoint folder, whose other files
    must be named in `also_replaceable`. Raises CheckpointError before the block runs, and for a
    write in it that fails half way (a full disk, a limit on file sizes); nothing is left behind.
    """
    out = Path(os.path.abspath(out))
    _remove_stale(out)
    check_target(out, overwrite=overwrite, also_replaceable=also_replaceable)
    staging = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir()
        yield staging
        for file in staging.iterdir():
            _flush(file)
        _flush(staging)
        _swap(staging, out)
        _flush(out.parent)
    except OSError as error:
        cause = error.strerror or str(error)
        named = f" ({Path(error.filename).name})" if isinstance(error.filename, str) else ""
        raise CheckpointError(
            out,
            expected="room and the right to write",
            found=f"{cause}{named}",
            remedy="free some space or choose another place; nothing was written",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_target(
    out: Path, *, overwrite: bool, also_replaceable: frozenset[str] = frozenset()
) -> None:
    """Refuse a target that a save must not touch. Raises CheckpointError."""
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        raise CheckpointError(
            out,
            expected="a folder or nothing",
            found="a link" if out.is_symlink() else "a file",
            remedy="choose another place",
        )
    held = sorted(child.name for child in out.iterdir())
    if not held:
        return
    if not overwrite:
        raise CheckpointError(
            out,
            expected="an empty folder or nothing",
            found=f"{len(held)} files, such as {held[0]}",
            remedy="pass overwrite=True to replace a checkpoint, or choose another place",
        )
    foreign = [
        name
        for name in held
        if name not in _REPLACEABLE | also_replaceable
        and not (name.endswith(".safetensors") and (out / name).is_file())
    ]
    if foreign or "config.json" not in held:
        raise CheckpointError(
            out,
            expected="a checkpoint folder to replace",
            found=f"{foreign[0]}, which is no part of one" if foreign else "no config.json",
            remedy="move the file away, or choose another place; nothing was written",
            more=max(len(foreign) - 1, 0),
        )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    names = (os.fsencode(first), os.fsencode(second))
    return rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _swap(staging: Path, out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        staging.rename(out)
        return
    if _exchange(staging, out):
        return
    # Two renames: a crash between them leaves the old folder under `replaced`, from where
    # `_remove_stale` brings it back.
    replaced = out.parent / f".{out.name}.replaced-{os.getpid()}"
    out.rename(replaced)
    staging.rename(out)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _remove_stale(out: Path) -> None:
    """Remove what killed saves to `out` left behind; bring back a folder lost between renames."""
    for kind in ("replaced", "partial"):
        for left in sorted(out.parent.glob(f".{out.name}.{kind}-*")):
            if _is_running(left.name.rpartition("-")[2]):
                continue
            if kind == "replaced" and not out.exists():
                left.rename(out)
            else:
                shutil.rmtree(left, ignore_errors=True)
