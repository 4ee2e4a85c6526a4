"""Segment files of the disk store: their bytes, and the only calls that reach a file.

A segment is preallocated and filled once from the front with 4 KiB-aligned records that describe
themselves, so the index may be lost at any time. Refused: a file whose header does not check. A
newcomer's mistake: to think that a written record is there after a crash. It is once `flush` has
returned, and the name of a new file once `sync_directory` has. No torch here.
Source: docs/cache-format.md; spec/kv-cache.md section 4.2.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import sqlite3
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finwhale.cache.prefix_key import tagged_digest
from finwhale.tiers.tier import Groups

FORMAT_VERSION = 1
ALIGNMENT = 4096
SEGMENT_MAGIC = b"FWKVSEG\0"
RECORD_MAGIC = b"FWKVREC\0"
# magic, version, reserved, number, bytes of the file, nonce
_SEGMENT = struct.Struct("<8sIIQQ16s")
# magic, version, groups, retention, record bytes, first token, stop token, namespace, tenant, key
_RECORD = struct.Struct("<8sHHIQQQ32s32s32s")
_GROUP = struct.Struct("<II")
_DIGEST_BYTES = 16
# The header must lie in the record's first 4 KiB.
MAX_GROUPS = (ALIGNMENT - _RECORD.size - _DIGEST_BYTES) // _GROUP.size


class Disk:
    """Every call of the store that reaches the operating system; tests replace it by a worse one.

    A write that no later `sync` of its file covers may vanish, tear or overtake another one in a
    crash; so may a created, removed or made name without `sync_directory`.
    """

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def lock(self, fd: int, *, exclusive: bool) -> None:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)

    def preallocate(self, fd: int, num_bytes: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)
        else:
            os.ftruncate(fd, num_bytes)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def read(self, fd: int, num_bytes: int, offset: int) -> bytes:
        return os.pread(fd, num_bytes, offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def close(self, fd: int) -> None:
        os.close(fd)

    def connect(self, target: str) -> sqlite3.Connection:
        return sqlite3.connect(target, uri=True, check_same_thread=False, timeout=10)


def block_address(namespace: bytes, tenant: bytes, key: bytes) -> bytes:
    """Return the index's key [32 bytes] of a block; every field behind its length."""
    return tagged_digest(b"finwhale.disk", namespace, tenant, key)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordHeader:
    """What a record says of itself.

    namespace, tenant, key  32 bytes each
    tokens                  first position and the one behind the last
    group_bytes, checksums  per group; CRC-32 as zlib computes it
    """

    namespace: bytes
    tenant: bytes
    key: bytes
    tokens: tuple[int, int]
    retention: int
    group_bytes: tuple[int, ...]
    checksums: tuple[int, ...]

    @property
    def address(self) -> bytes:
        return block_address(self.namespace, self.tenant, self.key)

    @property
    def header_bytes(self) -> int:
        return _RECORD.size + len(self.group_bytes) * _GROUP.size + _DIGEST_BYTES

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.group_bytes)


def record_bytes(group_bytes: Sequence[int]) -> int:
    """Return the bytes of a record in its segment: header and groups, rounded up to 4 KiB."""
    header = _RECORD.size + len(group_bytes) * _GROUP.size + _DIGEST_BYTES
    return -(-(header + sum(group_bytes)) // ALIGNMENT) * ALIGNMENT


def make_header(
    *,
    namespace: bytes,
    tenant: bytes,
    key: bytes,
    tokens: tuple[int, int],
    retention: int,
    groups: Groups,
) -> RecordHeader:
    """Return the header of a block's record; reads every byte for the checksums."""
    return RecordHeader(
        namespace=namespace,
        tenant=tenant,
        key=key,
        tokens=tokens,
        retention=retention,
        group_bytes=tuple(len(group) for group in groups),
        checksums=tuple(zlib.crc32(group) for group in groups),
    )


def encode_record(header: RecordHeader, groups: Groups, nonce: bytes) -> bytes:
    """Return the record's bytes: header, its digest under the segment's nonce, groups, zeros."""
    fixed = _RECORD.pack(
        RECORD_MAGIC,
        FORMAT_VERSION,
        len(groups),
        header.retention,
        header.record_bytes,
        *header.tokens,
        header.namespace,
        header.tenant,
        header.key,
    )
    pairs = zip(header.group_bytes, header.checksums, strict=True)
    fixed += b"".join(_GROUP.pack(*pair) for pair in pairs)
    record = b"".join((fixed, _digest(fixed, nonce), *groups))
    return record.ljust(header.record_bytes, b"\0")


def decode_header(raw: bytes, nonce: bytes) -> RecordHeader | None:
    """Return the header at the front of `raw`, or None if it is not one of this segment."""
    if len(raw) < _RECORD.size or not raw.startswith(RECORD_MAGIC):
        return None
    _, version, num_groups, retention, num_bytes, start, stop, *ids = _RECORD.unpack_from(raw)
    size = _RECORD.size + num_groups * _GROUP.size
    if version != FORMAT_VERSION or num_groups > MAX_GROUPS:
        return None
    if raw[size : size + _DIGEST_BYTES] != _digest(raw[:size], nonce):
        return None
    groups = [_GROUP.unpack_from(raw, at) for at in range(_RECORD.size, size, _GROUP.size)]
    header = RecordHeader(
        namespace=ids[0],
        tenant=ids[1],
        key=ids[2],
        tokens=(start, stop),
        retention=retention,
        group_bytes=tuple(length for length, _ in groups),
        checksums=tuple(checksum for _, checksum in groups),
    )
    return header if header.record_bytes == num_bytes else None


def read_groups(header: RecordHeader, raw: bytes) -> tuple[bytes, ...] | None:
    """Return the groups of a record read whole, or None unless every checksum agrees."""
    if len(raw) != header.record_bytes:
        return None
    groups, at = [], header.header_bytes
    for num_bytes, checksum in zip(header.group_bytes, header.checksums, strict=True):
        group = raw[at : at + num_bytes]
        if zlib.crc32(group) != checksum:
            return None
        groups.append(group)
        at += num_bytes
    return tuple(groups)


class Segment:
    """One open segment file; its descriptor closes with the last reference.

    A reader that still holds a segment which was just removed therefore reads the old bytes.
    end   where the next record goes
    torn  behind the last page that a scan found to hold something, whole record or not
    """

    def __init__(
        self, disk: Disk, path: Path, fd: int, *, number: int, num_bytes: int, nonce: bytes
    ):
        self.disk, self.path, self.fd = disk, path, fd
        self.number, self.num_bytes, self.nonce = number, num_bytes, nonce
        self.end = self.torn = ALIGNMENT

    def __del__(self) -> None:
        self.disk.close(self.fd)

    @property
    def room(self) -> int:
        """Bytes left for records."""
        return self.num_bytes - self.end

    @classmethod
    def create(cls, disk: Disk, directory: Path, number: int, num_bytes: int) -> Segment:
        """Make a segment; its name is durable on return, its header with the first `flush`.

        OSError leaves no file behind.
        """
        path = directory / segment_name(number)
        nonce = secrets.token_bytes(16)
        fixed = _SEGMENT.pack(SEGMENT_MAGIC, FORMAT_VERSION, 0, number, num_bytes, nonce)
        fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        segment = cls(disk, path, fd, number=number, num_bytes=num_bytes, nonce=nonce)
        try:
            disk.preallocate(fd, num_bytes)
            segment._write((fixed + _digest(fixed, b"")).ljust(ALIGNMENT, b"\0"), 0)
            disk.sync_directory(directory)
        except OSError:
            disk.unlink(path)
            raise
        return segment

    @classmethod
    def open(cls, disk: Disk, path: Path, *, writable: bool) -> Segment | None:
        """Open a segment; None for a file that is none, or not the one its name says."""
        fd = disk.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            raw = _read_all(disk, fd, ALIGNMENT, 0)
            size = disk.size(fd)
            fixed = raw[: _SEGMENT.size]
            if len(fixed) < _SEGMENT.size:
                raise ValueError("short")
            magic, version, _, number, num_bytes, nonce = _SEGMENT.unpack(fixed)
            digest = raw[_SEGMENT.size : _SEGMENT.size + _DIGEST_BYTES]
            if (magic, version) != (SEGMENT_MAGIC, FORMAT_VERSION) or digest != _digest(fixed, b""):
                raise ValueError("header")
            # A shorter file has lost its tail; what is left may still be read, record by record.
            if segment_name(number) != path.name or size > num_bytes:
                raise ValueError("other")
        except (OSError, ValueError):
            disk.close(fd)
            return None
        return cls(disk, path, fd, number=number, num_bytes=num_bytes, nonce=nonce)

    def append(self, header: RecordHeader, groups: Groups) -> int:
        """Write a record at the end and return its offset; durable after `flush`."""
        offset = self.end
        self._write(encode_record(header, groups, self.nonce), offset)
        self.end += header.record_bytes
        return offset

    def flush(self) -> None:
        """Make every record so far durable.

        After an OSError append nothing more: the system may have dropped the bytes and would call
        them clean the next time.
        """
        self.disk.sync(self.fd)

    def read(self, offset: int, num_bytes: int) -> tuple[RecordHeader, tuple[bytes, ...]] | None:
        """Return the record at `offset`, or None unless it is whole and every checksum agrees."""
        if num_bytes > self.num_bytes:
            return None
        raw = self._read(num_bytes, offset)
        header = decode_header(raw, self.nonce)
        groups = read_groups(header, raw) if header else None
        return (header, groups) if header and groups is not None else None

    def scan(self) -> Iterator[tuple[int, RecordHeader]]:
        """Yield (offset, header) of every whole record, and leave `end` behind the last one.

        Goes on behind damage and bad sectors, 4 KiB at a time: the nonce in the header's digest
        makes sure that no payload looks like a record.
        """
        at = ALIGNMENT
        while at < self.num_bytes:
            page = b""
            try:
                page = self._read(ALIGNMENT, at)
                header = decode_header(page, self.nonce)
                found = self.read(at, header.record_bytes) if header else None
            except OSError:
                found = None
            if found is None:
                at += ALIGNMENT
                self.torn = at if any(page) else self.torn
                continue
            yield at, found[0]
            at += found[0].record_bytes
            self.end = at

    def clear_torn(self) -> None:
        """Make what lies behind the last whole record zeros: a record that a kill cut short.

        The next one need not cover it, and a check would take it for damage.
        """
        if self.torn > self.end:
            self._write(bytes(self.torn - self.end), self.end)

    def _read(self, num_bytes: int, offset: int) -> bytes:
        return _read_all(self.disk, self.fd, num_bytes, offset)

    def _write(self, data: bytes, offset: int) -> None:
        rest = memoryview(data)
        while rest:
            written = self.disk.write(self.fd, rest, offset)
            if written < 1:
                raise OSError(errno.EIO, "a write of no bytes", str(self.path))
            rest, offset = rest[written:], offset + written


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"segment-{number:016x}.kv"


def is_segment_name(name: str) -> bool:
    """Whether `segment_name` gives this name for some number."""
    digits = name.removeprefix("segment-").removesuffix(".kv")
    try:
        return name == segment_name(int(digits, 16))
    except ValueError:
        return False


def is_unfinished(disk: Disk, path: Path) -> bool:
    """Whether `path` is a segment that a crash left without its header: nothing but zeros."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        return not _read_all(disk, fd, ALIGNMENT, 0).strip(b"\0")
    except OSError:
        return False
    finally:
        disk.close(fd)


def _read_all(disk: Disk, fd: int, num_bytes: int, offset: int) -> bytes:
    """Return `num_bytes`, or fewer at the end of the file; a call may return a part."""
    parts: list[bytes] = []
    while num_bytes > 0:
        part = disk.read(fd, num_bytes, offset)
        if not part:
            break
        parts.append(part)
        num_bytes -= len(part)
        offset += len(part)
    return b"".join(parts)


def _digest(data: bytes, nonce: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=nonce).digest()
