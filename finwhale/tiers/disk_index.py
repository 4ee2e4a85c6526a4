"""Where each block of the disk store lies: an SQLite table that may be lost.

The segments are the truth; a row is committed only after the bytes it points at are durable, so the
index may be older than the segments, missing or damaged, and never newer. Refused: nothing; what
cannot be read is made anew by scanning. A newcomer's mistake: to serve what a row points at
unchecked; the record's own header decides. No torch here.
Source: docs/cache-format.md; spec/kv-cache.md sections 4.1 and 4.2.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from finwhale.tiers.disk_segments import FORMAT_VERSION, Disk, Segment

INDEX_NAME = "index.sqlite"
_FILES = (INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm", f"{INDEX_NAME}-journal")
_SCHEMA = """
CREATE TABLE records (
    address BLOB PRIMARY KEY, tenant BLOB NOT NULL, segment INTEGER NOT NULL,
    offset INTEGER NOT NULL, num_bytes INTEGER NOT NULL, retention INTEGER NOT NULL,
    last_used INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX by_value ON records (retention, last_used, num_bytes);
CREATE INDEX by_tenant ON records (tenant, retention, last_used, num_bytes);
CREATE INDEX by_segment ON records (segment);
CREATE TABLE sealed (number INTEGER PRIMARY KEY);
"""
_ROW = "address, tenant, segment, offset, num_bytes, retention, last_used"


class Row(NamedTuple):
    """One record: its block's address, whose it is, where it lies and what it is worth.

    last_used  a tick of the store's clock; in one class a smaller one goes first
    """

    address: bytes
    tenant: bytes
    segment: int
    offset: int
    num_bytes: int
    retention: int
    last_used: int

    @property
    def value(self) -> tuple[int, int]:
        """Order of eviction, least valuable first."""
        return self.retention, self.last_used


class DiskIndex:
    """The table, with one connection to write and one to read.

    The journal is a write-ahead log, so `find` never waits for a commit. One thread writes at a
    time; the store sees to that. A commit need not survive a loss of power (see the module), so it
    does not wait for the device either.
    """

    def __init__(self, disk: Disk, path: Path | None) -> None:
        """Open the index at `path`, or an empty one in memory.

        sqlite3.DatabaseError: not an index of this version, or damaged.
        """
        self._lock = threading.Lock()
        # A path as an address: %, ? and # must not be read as syntax.
        target = path.resolve().as_uri() if path else ":memory:"
        self._writer = disk.connect(target)
        self._reader = self._writer
        try:
            if path:
                self._writer.execute("PRAGMA journal_mode = WAL")
                self._writer.execute("PRAGMA synchronous = NORMAL")
                self._writer.execute("PRAGMA journal_size_limit = 4194304")
            self._prepare()
            if path:
                self._reader = disk.connect(target)
        except sqlite3.Error:
            self._writer.close()
            raise

    @classmethod
    def open_frozen(cls, disk: Disk, path: Path) -> DiskIndex | None:
        """Open an index that must not be written; None if it was not closed in order."""
        log = path.with_name(f"{INDEX_NAME}-wal")
        if not path.exists() or (log.exists() and log.stat().st_size):
            return None
        index = cls.__new__(cls)
        index._lock = threading.Lock()
        try:
            index._reader = disk.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1")
            index._writer = index._reader
        except sqlite3.Error:
            return None
        try:
            if index._reader.execute("PRAGMA user_version").fetchone() == (FORMAT_VERSION,):
                return index
        except sqlite3.Error:
            pass
        index._reader.close()
        return None

    @staticmethod
    def remove(disk: Disk, directory: Path) -> None:
        """Delete the index's files."""
        for name in _FILES:
            disk.unlink(directory / name)

    def _prepare(self) -> None:
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            # In one transaction: a kill in between would leave tables of no version.
            self._writer.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT_VERSION}; COMMIT"
            )
            self._writer.commit()
        elif version != FORMAT_VERSION:
            raise sqlite3.DatabaseError(f"index version {version}")
        elif self._writer.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("the index is damaged")

    def adopt(self, segments: dict[int, Segment], *, durable: bool) -> Segment | None:
        """Bring the table up to the segments; return the one that may grow, if there is one.

        Rows of sealed segments are trusted, all others scanned and, if `durable`, flushed before
        their rows are committed: a killed writer may have left them in the system's memory alone.
        """
        growing = None
        sealed = self.sealed()
        for number in (self.segments() | sealed) - segments.keys():
            self.forget_segment(number)
        for number in sorted(segments.keys() - sealed):
            segment = segments[number]
            last_used = {row.address: row.last_used for row in self.in_segment(number)}
            rows = [
                Row(
                    address=header.address,
                    tenant=header.tenant,
                    segment=number,
                    offset=offset,
                    num_bytes=header.record_bytes,
                    retention=header.retention,
                    last_used=last_used.get(header.address, 0),
                )
                for offset, header in segment.scan()
            ]
            if rows and durable:
                segment.flush()
            self.forget_segment(number)
            self.put(rows)
            if number == max(segments):
                growing = segment
                if durable:
                    segment.clear_torn()
            else:
                self.seal(number)
        self.commit()
        return growing

    def find(self, address: bytes) -> Row | None:
        """Return the committed row of a block; from any thread."""
        with self._lock:
            return _row(
                self._reader.execute(f"SELECT {_ROW} FROM records WHERE address = ?", (address,))
            )

    def staged(self, address: bytes) -> Row | None:
        """Return the row of a block, committed or not yet; from the writing thread."""
        return _row(
            self._writer.execute(f"SELECT {_ROW} FROM records WHERE address = ?", (address,))
        )

    def put(self, rows: Iterable[Row]) -> None:
        """Add rows, in place of older ones of the same address."""
        self._writer.executemany("REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def discard(self, addresses: Iterable[bytes]) -> None:
        self._writer.executemany("DELETE FROM records WHERE address = ?", ((a,) for a in addresses))

    def touch(self, ticks: dict[bytes, int]) -> None:
        """Set `last_used` of the addresses that are still here."""
        self._writer.executemany(
            "UPDATE records SET last_used = ?2 WHERE address = ?1", ticks.items()
        )

    def seal(self, number: int) -> None:
        """Mark a segment as complete: a later start trusts its rows and does not scan it."""
        self._writer.execute("REPLACE INTO sealed VALUES (?)", (number,))

    def forget_segment(self, number: int) -> None:
        """Drop the segment's rows and its seal."""
        self._writer.execute("DELETE FROM records WHERE segment = ?", (number,))
        self._writer.execute("DELETE FROM sealed WHERE number = ?", (number,))

    def commit(self) -> None:
        self._writer.commit()

    def rollback(self) -> None:
        self._writer.rollback()

    def sealed(self) -> set[int]:
        return {number for (number,) in self._writer.execute("SELECT number FROM sealed")}

    def segments(self) -> set[int]:
        """Return the numbers of all segments with rows."""
        return {n for (n,) in self._writer.execute("SELECT DISTINCT segment FROM records")}

    def in_segment(self, number: int) -> list[Row]:
        found = self._writer.execute(f"SELECT {_ROW} FROM records WHERE segment = ?", (number,))
        return [Row(*row) for row in found]

    def of_tenant(self, tenant: bytes) -> list[Row]:
        """Return the tenant's rows, least valuable first."""
        query = f"SELECT {_ROW} FROM records WHERE tenant = ? ORDER BY retention, last_used"
        return [Row(*row) for row in self._writer.execute(query, (tenant,))]

    def watermark(self, num_bytes: int) -> tuple[int, int]:
        """Return the value below which blocks are not among the most valuable `num_bytes`."""
        query = """
            SELECT retention, last_used FROM (
                SELECT retention, last_used, sum(num_bytes) OVER (
                    ORDER BY retention DESC, last_used DESC ROWS UNBOUNDED PRECEDING) AS total
                FROM records)
            WHERE total > ? ORDER BY total LIMIT 1"""
        retention, last_used = self._writer.execute(query, (num_bytes,)).fetchone() or (0, -1)
        return retention, last_used + 1

    def bytes_by_segment(self, above: tuple[int, int]) -> dict[int, int]:
        """Return the bytes of rows of at least the value `above`, per segment that has any."""
        query = """SELECT segment, sum(num_bytes) FROM records
                   WHERE (retention, last_used) >= (?, ?) GROUP BY segment"""
        return dict(self._writer.execute(query, above))

    def bytes_by_tenant(self) -> dict[bytes, int]:
        return dict(
            self._writer.execute("SELECT tenant, sum(num_bytes) FROM records GROUP BY tenant")
        )

    def count(self) -> int:
        return self._writer.execute("SELECT count(*) FROM records").fetchone()[0]

    def last_tick(self) -> int:
        """Return the newest tick of any row; 0 without rows."""
        return self._writer.execute("SELECT max(last_used) FROM records").fetchone()[0] or 0

    def close(self) -> None:
        """Close both connections; the last one folds the log into the table."""
        with self._lock:
            if self._reader is not self._writer:
                self._reader.close()
            self._writer.close()


def _row(cursor: sqlite3.Cursor) -> Row | None:
    found = cursor.fetchone()
    return Row(*found) if found else None
