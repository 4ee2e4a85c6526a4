"""The disk tier of the prefix cache: stores in the background, loads what checks, stays in bounds.

One process owns a directory at a time. All changes are made by one writer thread in one order:
append, flush, commit the index, and only then remove what was replaced. Refused: a directory that
another owner holds, or that cannot be written unless `read_only` says so. A newcomer's mistake: to
expect exact LRU. Space comes back in whole segments; what is promised is that the most valuable
half of the capacity and all pinned blocks survive. No torch here.
Source: docs/cache-format.md; spec/kv-cache.md sections 3.1, 4.1, 4.2 and 8.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from finwhale.cache.prefix_key import text_bytes
from finwhale.tiers.disk_config import DiskStoreConfig
from finwhale.tiers.disk_index import INDEX_NAME, DiskIndex, Row
from finwhale.tiers.disk_segments import (
    ALIGNMENT,
    MAX_GROUPS,
    Disk,
    RecordHeader,
    Segment,
    block_address,
    is_segment_name,
    is_unfinished,
    make_header,
    record_bytes,
    segment_name,
)
from finwhale.tiers.tier import Groups, Retention, StoreError, TierStats

LOCK_NAME = "LOCK"
# One flush serves this many bytes, so that many small blocks cost few flushes.
_BATCH_BYTES = 32 << 20
_MAX_TOUCHED = 1024
# What reading a record may raise: the device's errors, and those of a row that is no place in it.
_UNREADABLE = (OSError, TypeError, ValueError, OverflowError)


class _Block(NamedTuple):
    """A block that waits for the writer, who also computes its checksums."""

    address: bytes
    key: bytes
    tenant: bytes
    groups: tuple[bytes, ...]
    tokens: tuple[int, int]
    retention: int
    tick: int
    num_bytes: int


class _Forget(NamedTuple):
    """A row to drop, if it still says what it said: a block may have been stored anew."""

    row: Row


class DiskStore:
    """A `Tier` on one directory.

    disk  the calls to the operating system; tests pass one that fails
    """

    name = "disk"

    def __init__(self, config: DiskStoreConfig, disk: Disk | None = None) -> None:
        self.config = config
        self.last_error = ""
        self._disk = disk or Disk()
        self._stats = TierStats()
        self._stats_lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._open: Segment | None = None
        self._owes_room = False
        self._next_number = 1
        self._foreign: dict[str, int] = {}
        # Written and not yet committed; only the writer touches these.
        self._staged: dict[bytes, Row] = {}
        self._dropped: list[bytes] = []
        self._answered = 0
        self._tenant_bytes: Counter[bytes] = Counter()
        self._num_blocks = 0
        # Whoever decides that a block goes holds this lock and looks for pins first.
        self._pins_lock = threading.Lock()
        self._pins: Counter[bytes] = Counter()
        self._forgotten: set[bytes] = set()
        self._wake = threading.Condition()
        self._queue: deque[_Block | _Forget] = deque()
        self._pending_bytes = self._num_queued = self._num_done = self._clock = 0
        self._touched: dict[bytes, int] = {}
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._lock_fd = self._take_directory()
        try:
            self._open_segments()
            self._index = self._open_index()
            self._catch_up()
        except (OSError, sqlite3.Error, StoreError) as error:
            self._open = None
            self._segments.clear()
            self._disk.close(self._lock_fd)
            raise StoreError(
                f"directory: {config.directory} cannot be opened ({error}); repair or empty it"
            ) from error
        if not config.read_only:
            self._thread = threading.Thread(target=self._run, name="disk-store", daemon=True)
            self._thread.start()

    # Serving path: nothing below raises but for a block that no tier could take.

    def lookup(self, keys: Sequence[bytes], *, tenant: str = "") -> int:
        """Return how many of the first `keys` are here without a hole."""
        for count, key in enumerate(keys):
            if self._find(self._address(key, tenant)) is None:
                return count
        return len(keys)

    def load(
        self, key: bytes, *, tenant: str = "", parent: bytes = b""
    ) -> tuple[bytes, ...] | None:
        """Return the groups of a block as they were stored; None for a miss of any kind."""
        began = time.perf_counter()
        address = self._address(key, tenant)
        groups = self._load(address)
        self._count(load_s=time.perf_counter() - began, misses=int(groups is None))
        if groups is not None:
            self._count(hits=1, loaded_bytes=sum(map(len, groups)))
            self._touch(address)
        return groups

    def store(
        self,
        key: bytes,
        groups: Groups,
        *,
        tokens: tuple[int, int],
        tenant: str = "",
        retention: Retention = Retention.NORMAL,
        parent: bytes = b"",
    ) -> bool:
        """Queue a copy of a block for the writer; False if it was turned away at once.

        A block that is here already counts as taken. tokens: first position, one behind the last.
        StoreError: a key, range or group length that this store could never hold.
        """
        copies = tuple(bytes(group) for group in groups)
        num_bytes = self._check_block(key, copies, tokens)
        if self.config.read_only or self._is_closing:
            self._count(rejected=1)
            return False
        address = self._address(key, tenant)
        tick = self._touch(address)
        if self._find(address) is not None:
            return True
        block = _Block(
            address=address,
            key=key,
            tenant=_tenant_digest(tenant),
            groups=copies,
            tokens=tokens,
            retention=int(retention),
            tick=tick,
            num_bytes=num_bytes,
        )
        with self._wake:
            is_full = self._pending_bytes + num_bytes > self.config.max_pending_bytes
            if not is_full and not self._is_closing:
                self._enqueue(block)
                return True
        self._count(rejected=1)
        return False

    def touch(self, keys: Sequence[bytes], *, tenant: str = "") -> None:
        """Note that a chain has been in use; from its end, so that its first block goes last."""
        digest = _tenant_digest(tenant)
        self._touch(*(block_address(self.config.namespace, digest, k) for k in reversed(keys)))

    def pin(self, key: bytes, *, tenant: str = "") -> bool:
        """Keep a block until as many `unpin` calls; False if it is not here. Gone with the process.

        A pin keeps a block from eviction, not from damage.
        """
        address = self._address(key, tenant)
        with self._pins_lock:
            if self._find(address) is None:
                return False
            self._pins[address] += 1
        self._touch(address)
        return True

    def unpin(self, key: bytes, *, tenant: str = "") -> None:
        """Take one pin back; without a pin nothing happens."""
        address = self._address(key, tenant)
        with self._pins_lock:
            self._pins[address] -= 1
            if self._pins[address] < 1:
                del self._pins[address]

    def evict(self, key: bytes, *, tenant: str = "") -> bool:
        """Forget a block; False if pinned, or not here. Its bytes go when its segment goes."""
        address = self._address(key, tenant)
        with self._pins_lock:
            row = self._find(address)
            if row is None or self._pins[address] or self.config.read_only:
                return False
            self._forgotten.add(address)
        with self._wake:
            self._enqueue(_Forget(row))
        self._count(evicted=1)
        return True

    def stats(self) -> TierStats:
        """Return the counters now."""
        with self._stats_lock:
            return replace(
                self._stats,
                num_blocks=self._num_blocks,
                num_bytes=self._num_bytes(),
                pending_bytes=self._pending_bytes,
            )

    def figures(self) -> Mapping[str, TierStats]:
        """Return the counters under this tier's name."""
        return {self.name: self.stats()}

    def flush(self) -> None:
        """Wait until all that was stored before this call is committed or rejected."""
        with self._wake:
            target = self._num_queued
            self._wake.wait_for(lambda: self._num_done >= target)

    def close(self) -> None:
        """Commit what waits and give the directory back; a second call does nothing."""
        with self._wake:
            if self._is_closing:
                return
            self._is_closing = True
            self._wake.notify_all()
        if self._thread:
            self._thread.join()
        self._index.close()
        self._open = None
        self._segments.clear()
        self._disk.close(self._lock_fd)

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _address(self, key: bytes, tenant: str) -> bytes:
        return block_address(self.config.namespace, _tenant_digest(tenant), key)

    def _find(self, address: bytes) -> Row | None:
        if address in self._forgotten:
            return None
        try:
            return self._index.find(address)
        except (sqlite3.Error, TypeError) as error:
            self._note(error)
            return None

    def _load(self, address: bytes) -> tuple[bytes, ...] | None:
        # Twice: the writer may move the block between the look at the index and the read.
        for _ in range(2):
            row = self._find(address)
            if row is None:
                return None
            segment = self._segments.get(row.segment)
            if segment is None:
                continue
            try:
                found = segment.read(row.offset, row.num_bytes)
            except (*_UNREADABLE, MemoryError) as error:
                self._note(error)
                # Kept if nothing could be stored in its place, or if the fault is not its own.
                if self.config.read_only or isinstance(error, MemoryError):
                    return None
                found = None
            if found and found[0].address == address and self._fits(found[0]):
                return found[1]
            self._count(damaged=1)
            self._forgotten.add(address)
            if not self.config.read_only:
                with self._wake:
                    self._enqueue(_Forget(row))
            return None
        return None

    def _fits(self, header: RecordHeader) -> bool:
        expected = self.config.group_bytes
        return expected is None or header.group_bytes == expected

    def _check_block(self, key: bytes, groups: Sequence[bytes], tokens: tuple[int, int]) -> int:
        lengths, expected = tuple(len(group) for group in groups), self.config.group_bytes
        if len(key) != 32:
            raise StoreError(f"key: got {len(key)} bytes, expected a block key of 32")
        if not 0 <= tokens[0] < tokens[1] < 1 << 63:
            raise StoreError(f"tokens: got {tokens}, expected a first position and a later end")
        if expected is not None and lengths != expected:
            raise StoreError(f"groups: got lengths {lengths}, expected {expected} of the layout")
        if len(lengths) > MAX_GROUPS or max(lengths, default=0) >= 1 << 32:
            raise StoreError(f"groups: expected at most {MAX_GROUPS} of less than 4 GiB each")
        num_bytes, segment_bytes = record_bytes(lengths), self.config.segment_bytes
        if num_bytes > segment_bytes - ALIGNMENT:
            raise StoreError(
                f"groups: got a record of {num_bytes} bytes, expected at most a segment; "
                f"raise segment_bytes = {segment_bytes}"
            )
        return num_bytes

    def _touch(self, *addresses: bytes) -> int:
        with self._wake:
            for address in addresses:
                self._clock += 1
                if not self.config.read_only:
                    self._touched[address] = self._clock
            if len(self._touched) >= _MAX_TOUCHED:
                self._wake.notify_all()
            return self._clock

    def _enqueue(self, item: _Block | _Forget) -> None:
        self._queue.append(item)
        self._num_queued += 1
        self._pending_bytes += _item_bytes(item)
        self._wake.notify_all()

    def _count(self, **amounts: float) -> None:
        with self._stats_lock:
            for name, amount in amounts.items():
                setattr(self._stats, name, getattr(self._stats, name) + amount)

    def _note(self, error: BaseException) -> None:
        self.last_error = f"{type(error).__name__}: {error}"
        self._count(errors=1)

    def _num_bytes(self) -> int:
        own = sum(segment.num_bytes for segment in list(self._segments.values()))
        return own + sum(self._foreign.values())

    # The writer thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: self._queue or self._is_closing or len(self._touched) >= _MAX_TOUCHED
                )
                is_last = self._is_closing and not self._queue
                batch: list[_Block | _Forget] = []
                num_bytes = 0
                while self._queue and num_bytes < _BATCH_BYTES:
                    batch.append(self._queue.popleft())
                    num_bytes += _item_bytes(batch[-1])
            began = time.perf_counter()
            try:
                self._write(batch)
            except Exception as error:  # The cache may fail; the server goes on without it.
                self._give_up(error, batch)
            finally:
                self._count(store_s=time.perf_counter() - began)
                with self._wake:
                    self._num_done += len(batch)
                    self._pending_bytes -= num_bytes
                    self._wake.notify_all()
            if is_last:
                return

    def _write(self, batch: list[_Block | _Forget]) -> None:
        self._answered = 0
        for item in batch:
            if isinstance(item, _Block):
                self._append(item)
                continue
            row = self._index.staged(item.row.address)
            self._dropped.append(item.row.address)
            if row and (row.segment, row.offset) == (item.row.segment, item.row.offset):
                self._drop([row])
        self._commit()

    def _append(self, block: _Block) -> None:
        if block.address in self._staged or self._index.staged(block.address):
            self._answered += 1
            return
        has_room = self._make_tenant_room(block.tenant, block.num_bytes)
        segment = self._segment_for(block.num_bytes) if has_room else None
        if segment is None:
            self._answered += 1
            self._count(rejected=1)
            return
        header = make_header(
            namespace=self.config.namespace,
            tenant=block.tenant,
            key=block.key,
            tokens=block.tokens,
            retention=block.retention,
            groups=block.groups,
        )
        self._staged[block.address] = Row(
            address=block.address,
            tenant=block.tenant,
            segment=segment.number,
            offset=segment.append(header, block.groups),
            num_bytes=block.num_bytes,
            retention=block.retention,
            last_used=block.tick,
        )
        self._tenant_bytes[block.tenant] += block.num_bytes
        self._num_blocks += 1

    def _commit(self) -> None:
        """Make what is staged durable, then visible."""
        if self._staged and self._open:
            self._open.flush()
        with self._wake:
            touched, self._touched = self._touched, {}
        self._index.put(self._staged.values())
        self._index.touch(touched)
        self._index.commit()
        num_bytes = sum(row.num_bytes for row in self._staged.values())
        self._count(stored=len(self._staged), stored_bytes=num_bytes)
        self._answered += len(self._staged)
        self._forgotten.difference_update(self._dropped)
        self._staged, self._dropped = {}, []

    def _give_up(self, error: Exception, batch: list[_Block | _Forget]) -> None:
        """Drop what is staged and never append to this segment again.

        After a failed flush the system may have thrown the bytes away, so a second flush that
        succeeds would prove nothing.
        """
        self._note(error)
        num_blocks = sum(isinstance(item, _Block) for item in batch)
        self._count(rejected=num_blocks - self._answered)
        self._forgotten.difference_update(self._dropped)
        # What was to be forgotten is still there, and may be found again.
        forgets = (item for item in batch if isinstance(item, _Forget))
        self._forgotten.difference_update(item.row.address for item in forgets)
        self._staged, self._dropped = {}, []
        abandoned, self._open = self._open, None
        try:
            self._index.rollback()
            if abandoned:
                self._index.seal(abandoned.number)
                self._index.commit()
            self._recount()
        except Exception as second:  # Without its writer the store would let `flush` wait for ever.
            self._note(second)

    def _recount(self) -> None:
        self._tenant_bytes = Counter(self._index.bytes_by_tenant())
        self._num_blocks = self._index.count()

    def _drop(self, rows: list[Row]) -> None:
        self._index.discard(row.address for row in rows)
        self._num_blocks -= len(rows)
        for row in rows:
            self._tenant_bytes[row.tenant] -= row.num_bytes

    def _make_tenant_room(self, tenant: bytes, num_bytes: int) -> bool:
        """Evict the tenant's own least valuable blocks until `num_bytes` more are in its quota."""
        quota = self.config.tenant_quota_bytes
        if quota is None:
            return True
        for _ in range(2):
            excess = self._tenant_bytes[tenant] + num_bytes - quota
            rows: list[Row] = []
            with self._pins_lock:
                for row in self._index.of_tenant(tenant) if excess > 0 else ():
                    if excess <= 0:
                        break
                    if not self._pins[row.address]:
                        rows.append(row)
                        excess -= row.num_bytes
                if excess <= 0:
                    addresses = [row.address for row in rows]
                    self._forgotten.update(addresses)
                    self._dropped += addresses
            if excess <= 0:
                self._drop(rows)
                self._count(evicted=len(rows))
                return True
            # Blocks of this very batch can go as well, once the index knows them.
            self._commit()
        return False

    def _segment_for(self, num_bytes: int) -> Segment | None:
        """Return the open segment with room for a record, or None if the store is full of pins."""
        if self._owes_room:
            # Killed behind the making of a segment. Without a free place the next one could take
            # over nothing, and what is worth keeping would go with the segment that makes room.
            self._owes_room = False
            self._clean(num_bytes)
        if self._open and self._open.room >= num_bytes:
            return self._open
        if self._open:
            self._commit()
            self._index.seal(self._open.number)
            self._index.commit()
            self._open = None
        if self._is_full() and not self._clean(0):
            return None
        number, config = self._next_number, self.config
        while segment_name(number) in self._foreign:
            number += 1
        self._next_number = number + 1
        self._open = Segment.create(self._disk, config.directory, number, config.segment_bytes)
        self._segments[number] = self._open
        # The last place is taken: empty an old segment into this one, and there is one again.
        if self._is_full():
            self._clean(num_bytes)
        return self._open

    def _is_full(self) -> bool:
        return self._num_bytes() + self.config.segment_bytes > self.config.max_bytes

    def _clean(self, num_bytes: int) -> bool:
        """Remove one sealed segment; what is worth it moves to the open one, if there is one.

        The most valuable half of the capacity is kept. It fills half of all segments at most, so
        one of them moves at most half of its bytes.
        """
        capacity = self.config.max_bytes - self.config.segment_bytes
        mark = self._index.watermark(capacity // 2)
        kept = self._index.bytes_by_segment(mark)
        sealed = [s for s in self._segments.values() if s is not self._open]
        sealed.sort(key=lambda s: (kept.get(s.number, 0), s.number))
        return any(self._empty(victim, mark, num_bytes) for victim in sealed)

    def _empty(self, victim: Segment, mark: tuple[int, int], num_bytes: int) -> bool:
        """Move what stays, commit, and only then remove the file; False if pins are in the way."""
        rows = self._index.in_segment(victim.number)
        with self._pins_lock:
            pinned = {row.address for row in rows if self._pins[row.address]}
        room = self._open.room - num_bytes if self._open else 0
        if sum(row.num_bytes for row in rows if row.address in pinned) > room:
            return False
        rows.sort(key=lambda row: (row.address in pinned, row.value), reverse=True)
        moved: dict[bytes, Row] = {}
        damaged: set[bytes] = set()
        for row in rows:
            if (row.address not in pinned and row.value < mark) or row.num_bytes > room:
                continue
            try:
                found = victim.read(row.offset, row.num_bytes)
            except _UNREADABLE as error:
                # Lost, and no more than that: a victim that may not go would be chosen for ever.
                self._note(error)
                found = None
            if self._open is None or found is None or found[0].address != row.address:
                damaged.add(row.address)
                continue
            offset = self._open.append(*found)
            moved[row.address] = row._replace(segment=self._open.number, offset=offset)
            room -= row.num_bytes
        if moved and self._open:
            self._open.flush()
        with self._pins_lock:
            gone = [row for row in rows if row.address not in moved]
            if any(self._pins[row.address] and row.address not in damaged for row in gone):
                return False
            self._index.forget_segment(victim.number)
            self._index.put(moved.values())
            self._index.commit()
        self._num_blocks -= len(gone)
        for row in gone:
            self._tenant_bytes[row.tenant] -= row.num_bytes
        self._count(evicted=len(gone) - len(damaged), damaged=len(damaged))
        self._disk.unlink(victim.path)
        del self._segments[victim.number]
        # Before the next file is made: in a crash both could be there, which is above the bound.
        self._disk.sync_directory(self.config.directory)
        return True

    # Opening.

    def _take_directory(self) -> int:
        directory, read_only = self.config.directory, self.config.read_only
        try:
            if not directory.exists() and not read_only:
                self._disk.make_directory(directory)
                self._disk.sync_directory(directory.parent)
            flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
            fd = self._disk.open(directory / LOCK_NAME, flags)
        except OSError as error:
            remedy = "name one with a store" if read_only else "or read it with read_only=True"
            raise StoreError(
                f"directory: {directory} cannot be used ({error}); make it writable, {remedy}"
            ) from error
        try:
            self._disk.lock(fd, exclusive=not read_only)
        except OSError as error:
            self._disk.close(fd)
            raise StoreError(
                f"directory: {directory} is in use by another server; give each its own"
            ) from error
        return fd

    def _open_segments(self) -> None:
        directory, read_only = self.config.directory, self.config.read_only
        for name in self._disk.names(directory):
            if not is_segment_name(name):
                continue
            path = directory / name
            segment = Segment.open(self._disk, path, writable=not read_only)
            if segment:
                self._segments[segment.number] = segment
            elif not read_only and is_unfinished(self._disk, path):
                self._disk.unlink(path)
            else:
                # Not ours, or damaged beyond use: never deleted, but it takes its space.
                self._foreign[name] = path.stat().st_size
                self._count(damaged=1)
        self._next_number = max(self._segments, default=0) + 1

    def _open_index(self) -> DiskIndex:
        path = self.config.directory / INDEX_NAME
        if self.config.read_only:
            frozen = DiskIndex.open_frozen(self._disk, path)
            return frozen or self._adopted(DiskIndex(self._disk, None))
        try:
            return self._adopted(DiskIndex(self._disk, path))
        except sqlite3.DatabaseError as error:
            self._note(error)
            DiskIndex.remove(self._disk, self.config.directory)
            return self._adopted(DiskIndex(self._disk, path))

    def _adopted(self, index: DiskIndex) -> DiskIndex:
        try:
            self._open = index.adopt(self._segments, durable=not self.config.read_only)
        except (OSError, sqlite3.Error):
            index.close()
            raise
        if self.config.read_only:
            self._open = None
        return index

    def _catch_up(self) -> None:
        try:
            self._clock = self._index.last_tick()
            self._recount()
            if not self.config.read_only:
                self._shrink()
        except (sqlite3.Error, StoreError, OSError):
            self._index.close()
            raise

    def _shrink(self) -> None:
        """Come back into bounds that were lowered since the last time."""
        if self._open and self._num_bytes() > self.config.max_bytes:
            self._index.seal(self._open.number)
            self._open = None
        while self._num_bytes() > self.config.max_bytes:
            if not self._clean(0):
                raise StoreError(
                    f"max_bytes: foreign or damaged segment files ({', '.join(self._foreign)}) "
                    f"leave no room in {self.config.max_bytes}; remove those files"
                )
        self._owes_room = self._open is not None and self._is_full()
        for tenant in list(self._tenant_bytes):
            self._make_tenant_room(tenant, 0)
        self._commit()


def _tenant_digest(tenant: str) -> bytes:
    return hashlib.sha256(text_bytes(tenant)).digest()


def _item_bytes(item: _Block | _Forget) -> int:
    return item.num_bytes if isinstance(item, _Block) else 0
