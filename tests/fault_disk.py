"""A disk that remembers every call of the store, and what a crash after any of them may leave.

`FaultDisk` works on a real directory and keeps a log. `after_crash` gives the files as they may be
after a loss of power behind the first calls of the log: a write, a name made or a name removed that
no sync covers is kept, dropped or torn, each on its own. `skipped` turns all syncs of one place in
the code off: the negative control. The index is given back as any of its commits, or not at all.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from finwhale.tiers.disk_index import INDEX_NAME
from finwhale.tiers.disk_segments import Disk

SECTOR = 512
CRASHES = ("drop", "keep", "tear", "late", "names", "random")


@dataclass(frozen=True)
class Call:
    """One call: what it did to which file, with the bytes or the size it gave."""

    kind: str
    name: str
    offset: int = 0
    data: bytes = b""


class FaultDisk(Disk):
    """A real disk with a log.

    skipped  place (function of the store, "file" or "directory") whose syncs do nothing
    fail     {(kind, number of the call of this kind): errno}, from 1
    read_at_most, write_at_most  bytes that one call moves (short reads and writes)
    unreadable  names of files whose every read fails
    after_commit  called behind every commit of the index, by the thread that commits
    """

    def __init__(self, *, skipped=None, fail=None, read_at_most=None, write_at_most=None):
        self.skipped, self.fail = skipped, fail or {}
        self.read_at_most, self.write_at_most = read_at_most, write_at_most
        self.log: list[Call] = []
        self.places: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self._names: dict[int, str] = {}
        self.unreadable: set[str] = set()
        self.after_commit = lambda: None

    def note(self, name: str) -> None:
        self.log.append(Call("note", name))

    def _may_fail(self, kind: str) -> None:
        self.counts[kind] += 1
        code = self.fail.get((kind, self.counts[kind])) or self.fail.get((kind, "all"))
        if code:
            raise OSError(code, os.strerror(code))

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.log.append(Call("make", "."))

    def open(self, path: Path, flags: int) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            self._may_fail("open")
        fd = super().open(path, flags)
        self._names[fd] = path.name
        if flags & os.O_EXCL:
            self.log.append(Call("create", path.name))
        return fd

    def close(self, fd: int) -> None:
        self._names.pop(fd, None)
        super().close(fd)

    def preallocate(self, fd: int, num_bytes: int) -> None:
        self._may_fail("preallocate")
        super().preallocate(fd, num_bytes)
        self.log.append(Call("size", self._names[fd], num_bytes))

    def read(self, fd: int, num_bytes: int, offset: int) -> bytes:
        self._may_fail("read")
        if self._names[fd] in self.unreadable:
            raise OSError(BAD_DEVICE, os.strerror(BAD_DEVICE))
        return super().read(fd, min(num_bytes, self.read_at_most or num_bytes), offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._may_fail("write")
        data = data[: self.write_at_most or len(data)]
        written = super().write(fd, data, offset)
        self.log.append(Call("write", self._names[fd], offset, bytes(data[:written])))
        return written

    def sync(self, fd: int) -> None:
        self._may_fail("sync")
        self._synced("file", self._names[fd])

    def sync_directory(self, path: Path) -> None:
        self._may_fail("sync_directory")
        inside = any(name.startswith("segment-") or name == "LOCK" for name in os.listdir(path))
        self._synced("directory", "." if inside else "..")

    def _synced(self, kind: str, name: str) -> None:
        # The real device is left alone: the log is the device.
        frame = sys._getframe(1)
        while not frame.f_code.co_filename.endswith(("disk_store.py", "disk_index.py")):
            frame = frame.f_back
        place = frame.f_code.co_name, kind
        self.places.append(place)
        if place != self.skipped:
            self.log.append(Call("sync", name))

    def unlink(self, path: Path) -> None:
        self._may_fail("unlink")
        super().unlink(path)
        self.log.append(Call("unlink", path.name))

    def connect(self, target: str) -> sqlite3.Connection:
        disk = self

        class Logged(sqlite3.Connection):
            def commit(self):
                disk._may_fail("commit")
                super().commit()
                disk.log.append(Call("index", INDEX_NAME, data=self.serialize()))
                disk.after_commit()

            def execute(self, query, *values):
                # The log is the device here as well.
                off = query.startswith("PRAGMA synchronous")
                return super().execute("PRAGMA synchronous = OFF" if off else query, *values)

        return sqlite3.connect(target, uri=True, check_same_thread=False, factory=Logged)

    def after_crash(self, upto: int, *, kind: str, index: int | None = -1) -> dict[str, bytes]:
        """Return the files that a crash behind the first `upto` calls may leave.

        kind   what becomes of the calls that no sync covers: all "drop", all "keep", writes "tear",
               of the writes only the "late"st stays, "names" are made but not removed, "random"
        index  which commit the index is at, from the last (-1) backwards; None: it is lost
        """
        draw = random.Random(f"{upto} {kind}")
        files: dict[str, bytearray] = {}
        names: set[str] = set()
        waiting: list[Call] = []
        for call in self.log[:upto]:
            if call.kind != "sync":
                waiting.append(call)
                continue
            covered = [c for c in waiting if _covers(call.name, c)]
            waiting = [c for c in waiting if not _covers(call.name, c)]
            for c in covered:
                _apply(c, files, names)
        last = {c.name: i for i, c in enumerate(waiting) if c.kind == "write"}
        for i, call in enumerate(waiting):
            kept = {
                "drop": False,
                "keep": True,
                "tear": "half" if call.kind == "write" else True,
                "late": call.kind != "write" or i == last[call.name],
                "names": call.kind not in ("unlink",),
                "random": draw.choice((False, True, "half")),
            }[kind]
            if kept == "half" and call.kind == "write":
                middle = max(SECTOR, len(call.data) // 2 // SECTOR * SECTOR)
                call = Call(call.kind, call.name, call.offset, call.data[:middle])
            if kept:
                _apply(call, files, names)
        if "." not in names and any(c.kind == "make" for c in self.log[:upto]):
            names = set()
        left = {name: bytes(files[name]) for name in sorted(names & files.keys())}
        commits = [call.data for call in self.log[:upto] if call.kind == "index"]
        if index is not None and commits:
            left[INDEX_NAME] = commits[max(index, -len(commits))]
        return left

    def killed(self, upto: int, target: Path) -> FaultDisk:
        """Return the disk after the process was killed behind `upto` calls; power stayed on."""
        write_files(target, self.after_crash(upto, kind="keep"))
        disk = FaultDisk(skipped=self.skipped)
        disk.log = self.log[:upto]
        return disk


def write_files(target: Path, files: dict[str, bytes]) -> None:
    """Make a directory with these files."""
    target.mkdir(parents=True)
    for name, data in files.items():
        (target / name).write_bytes(data)


def _covers(synced: str, call: Call) -> bool:
    if call.kind == "make":
        return synced == ".."
    if call.kind in ("create", "unlink"):
        return synced == "."
    return synced == call.name


def _apply(call: Call, files: dict[str, bytearray], names: set[str]) -> None:
    if call.kind in ("create", "make"):
        names.add(call.name)
        files.setdefault(call.name, bytearray()) if call.kind == "create" else None
    elif call.kind == "unlink":
        names.discard(call.name)
    elif call.kind in ("size", "write"):
        data = files.setdefault(call.name, bytearray())
        stop = call.offset + len(call.data)
        data.extend(bytes(max(0, stop - len(data))))
        data[call.offset : stop] = call.data


NO_SPACE, BAD_DEVICE, READ_ONLY = errno.ENOSPC, errno.EIO, errno.EROFS
