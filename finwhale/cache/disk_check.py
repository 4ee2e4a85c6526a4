"""What a cache directory holds, read record by record without its index.

For people: `finwhale cache stat` and `verify`. Every segment is read from front to back and every
checksum recomputed, so the answer does not depend on the index. Nothing is changed. The directory
may be in use: a record that is being written is not whole yet and does not count as damage when
nothing whole follows it. Source: docs/cache-format.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from finwhale.cache.disk_segments import ALIGNMENT, Disk, Segment, is_segment_name
from finwhale.cache.tier import StoreError


@dataclass(kw_only=True, slots=True)
class SegmentReport:
    """One segment file.

    num_bytes     of the file
    blocks        whole records
    record_bytes  of those
    damaged       4 KiB pages before the last whole record that belong to none
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
    for name in sorted(filter(is_segment_name, disk.names(directory))):
        path = directory / name
        own = SegmentReport(name=name, num_bytes=path.stat().st_size)
        report.segments.append(own)
        segment = Segment.open(disk, path, writable=False)
        if segment is None:
            own.is_readable = False
            continue
        last = ALIGNMENT
        for offset, header in segment.scan():
            own.damaged += (offset - last) // ALIGNMENT
            last = offset + header.record_bytes
            own.blocks += 1
            own.record_bytes += header.record_bytes
            report.namespaces[header.namespace] += 1
            report.tenants[header.tenant] += 1
            report.tokens += header.tokens[1] - header.tokens[0]
    return report
