"""What a cache directory holds, read record by record without its index.

For people: `finwhale cache stat` and `verify`. Every segment is read from front to back and every
checksum recomputed, so the answer does not depend on the index. Nothing is changed. The directory
may be in use, so in the newest segment pages behind the last whole record are not counted: a record
may be on its way there. Source: docs/cache-format.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from finwhale.tiers.disk_segments import (
    ALIGNMENT,
    Disk,
    Segment,
    is_segment_name,
    is_unfinished,
)
from finwhale.tiers.disk_store import LOCK_NAME
from finwhale.tiers.tier import StoreError


@dataclass(kw_only=True, slots=True)
class SegmentReport:
    """One segment file.

    num_bytes     of the file
    blocks        whole records
    record_bytes  of those
    damaged       4 KiB pages that hold something and belong to no whole record
    is_readable   the segment's own header is right
    """

    name: str
    num_bytes: int
    blocks: int = 0
    record_bytes: int = 0
    damaged: int = 0
    is_readable: bool = True


@dataclass(kw_only=True, slots=True)
class DirectoryReport:
    """All segments, and blocks by namespace and tenant digest [32 bytes] each."""

    segments: list[SegmentReport] = field(default_factory=list)
    namespaces: Counter[bytes] = field(default_factory=Counter)
    tenants: Counter[bytes] = field(default_factory=Counter)
    tokens: int = 0

    @property
    def blocks(self) -> int:
        return sum(segment.blocks for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def record_bytes(self) -> int:
        return sum(segment.record_bytes for segment in self.segments)

    @property
    def problems(self) -> list[str]:
        """Return one sentence per damaged segment; a damaged record is a miss, never an error."""
        found = []
        for segment in self.segments:
            if not segment.is_readable:
                found.append(f"{segment.name}: its header is damaged; none of its blocks is used")
            elif segment.damaged:
                found.append(f"{segment.name}: {segment.damaged} damaged pages of 4 KiB")
        return found


def survey(directory: str | Path) -> DirectoryReport:
    """Read every record of a cache directory. Raises StoreError if there is no such directory."""
    directory, disk = Path(directory), Disk()
    if not directory.is_dir():
        raise StoreError(f"directory: {directory} is no folder; name one that --cache-dir made")
    report = DirectoryReport()
    if not (directory / LOCK_NAME).exists():
        raise StoreError(f"directory: {directory} is no cache; name one that --cache-dir made")
    names = sorted(filter(is_segment_name, disk.names(directory)))
    for name in names:
        try:
            _read_segment(disk, directory / name, report, is_newest=name == names[-1])
        except FileNotFoundError:
            continue  # its server has just given it up
    return report


def _read_segment(disk: Disk, path: Path, report: DirectoryReport, *, is_newest: bool) -> None:
    own = SegmentReport(name=path.name, num_bytes=path.stat().st_size)
    segment = Segment.open(disk, path, writable=False)
    report.segments.append(own)
    if segment is None:
        own.is_readable = is_unfinished(disk, path)
        return
    last = ALIGNMENT
    for offset, header in segment.scan():
        own.damaged += (offset - last) // ALIGNMENT
        last = offset + header.record_bytes
        own.blocks += 1
        own.record_bytes += header.record_bytes
        report.namespaces[header.namespace] += 1
        report.tenants[header.tenant] += 1
        report.tokens += header.tokens[1] - header.tokens[0]
    if is_newest:
        return
    with path.open("rb") as file:
        file.seek(last)
        while page := file.read(ALIGNMENT):
            own.damaged += any(page)
