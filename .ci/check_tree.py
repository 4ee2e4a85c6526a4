"""Limits on the tree itself: lengths, sizes, places. `make check` runs it; it prints what broke.

It reads tracked files (and new ones that git does not ignore), so build outputs never count. The
easy mistake: measuring the working folder, where .venv alone is over a gigabyte.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

MAX_FILE_LINES = 700
MAX_MODEL_ROOM_LINES = 2500
# Room for the repairs of the server, the parser and the loader, until the walls move.
MAX_PACKAGE_LINES = 50_000
MAX_FILES_PER_ROOM = 30
MAX_TRACKED_BYTES = 56 * 1000 * 1000
MAX_MODELS_BYTES = 44 * 1000 * 1000
BANNED_NAMES = re.compile(r"^(utils?|helpers?|common|misc|.*manager|base)\.py$")
# Absolute places that exist on one machine only. Written in pieces, so that this file passes.
_ROOTS = "|".join(("work", "root", "home", "Users", "tmp", "mnt"))
MACHINE_PATH = re.compile(rf"(?<![\w.<>{{}}/-])/(?:{_ROOTS})/\w")
_HOSTS = "|".join(("pypi" + r"\.org", "python" + "hosted", "debian" + r"\.org", "npm" + "js"))
REGISTRY_HOST = re.compile(_HOSTS)
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".sh", ".jsonl", ".cfg", ".yml", ""}


def listed_files(root: Path) -> list[Path]:
    """Return files that git tracks or would add, relative to `root`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted({Path(n) for n in listing.split("\0") if n and (root / n).is_file()})


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def size_problems(root: Path, files: Iterable[Path]) -> list[str]:
    """Return one sentence for each limit on bytes and lines that `files` break."""
    files, problems = list(files), []
    total = sum((root / f).stat().st_size for f in files)
    if total > MAX_TRACKED_BYTES:
        problems.append(f"tracked files: {total} bytes, limit {MAX_TRACKED_BYTES}")
    models = sum((root / f).stat().st_size for f in files if f.parts[0] == "models")
    if models > MAX_MODELS_BYTES:
        problems.append(f"models: {models} bytes, limit {MAX_MODELS_BYTES}")
    python = {f: _lines(root / f) for f in files if f.suffix == ".py"}
    for f, n in python.items():
        if n > MAX_FILE_LINES:
            problems.append(f"{f}: {n} lines, limit {MAX_FILE_LINES}")
        if BANNED_NAMES.match(f.name):
            problems.append(f"{f}: name says nothing about its idea")
    package = {f: n for f, n in python.items() if f.parts[0] == "finwhale"}
    model = sum(n for f, n in package.items() if f.parts[:2] == ("finwhale", "model"))
    if model >= MAX_MODEL_ROOM_LINES:
        problems.append(f"finwhale/model: {model} lines, limit {MAX_MODEL_ROOM_LINES}")
    if sum(package.values()) > MAX_PACKAGE_LINES:
        problems.append(f"finwhale: {sum(package.values())} lines, limit {MAX_PACKAGE_LINES}")
    rooms = {f.parent for f in package if len(f.parts) > 2}
    for room in sorted(rooms):
        count = sum(f.parent == room and f.name != "__init__.py" for f in package)
        if count > MAX_FILES_PER_ROOM:
            problems.append(f"{room}: {count} files, limit {MAX_FILES_PER_ROOM}")
        if len(room.parts) > 2:
            problems.append(f"{room}: a path is never deeper than finwhale/room/file.py")
    return problems


def place_problems(root: Path, files: Iterable[Path]) -> list[str]:
    """Return one sentence for each line that names a place on one machine or a registry host."""
    problems = []
    for f in files:
        if f.suffix not in TEXT_SUFFIXES or f.name == "LICENSE":
            continue
        try:
            text = (root / f).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            for kind, pattern in (("machine path", MACHINE_PATH), ("registry host", REGISTRY_HOST)):
                found = pattern.search(line)
                if found:
                    problems.append(f"{f}:{number}: {kind} {found.group()!r}")
    return problems


def main() -> int:
    """Print every problem; return 1 if there is one."""
    root = Path(__file__).resolve().parents[1]
    files = listed_files(root)
    problems = size_problems(root, files) + place_problems(root, files)
    for problem in problems:
        print(problem)
    total = sum((root / f).stat().st_size for f in files)
    print(f"tree: {len(files)} files, {total} bytes, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
