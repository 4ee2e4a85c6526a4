"""The disk tier: what went in comes out, in bounds, for the right reader only."""

import hashlib
import subprocess
import sys
import threading
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finwhale.tiers.disk_segments import ALIGNMENT, Disk
from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig
from finwhale.tiers.tier import Retention, StoreError, Tier
from tests.fault_disk import FaultDisk

NAMESPACE = hashlib.sha256(b"weights").digest()


def key_of(n) -> bytes:
    return hashlib.sha256(f"block {n}".encode()).digest()


def groups_of(n, lengths=(900, 340)) -> list[bytes]:
    return [hashlib.shake_256(f"{n} {i}".encode()).digest(size) for i, size in enumerate(lengths)]


def open_store(
    directory, *, segments=4, records=4, disk=None, kind=DiskStore, **settings
) -> DiskStore:
    """Return a store whose segments have room for `records` records of 4 KiB.

    Without a disk of its own it never waits for the device.
    """
    size = (records + 1) * ALIGNMENT
    settings = {"namespace": NAMESPACE, "segment_bytes": size} | settings
    settings.setdefault("max_bytes", segments * size)
    return kind(DiskStoreConfig(directory=directory, **settings), disk or FaultDisk())


def put(store, *numbers, **how) -> None:
    for n in numbers:
        assert store.store(key_of(n), groups_of(n), tokens=(64 * n, 64 * n + 64), **how)
    store.flush()


def has(store, n, tenant="") -> bool:
    return store.lookup([key_of(n)], tenant=tenant) == 1


def file_bytes(directory) -> int:
    return sum(path.stat().st_size for path in directory.glob("segment-*"))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 255, 4095, 4096, 4097, 9000]), max_size=5), max_size=5)
)
def test_load_returns_what_was_stored_before_and_after_a_restart(tmp_path_factory, shapes):
    directory = tmp_path_factory.mktemp("store")
    with open_store(directory, segments=3, records=60, disk=Disk()) as store:
        for n, lengths in enumerate(shapes):
            assert store.store(key_of(n), groups_of(n, lengths), tokens=(n, n + 1))
        store.flush()
        assert store.stats().stored == len(shapes)
        for n, lengths in enumerate(shapes):
            assert store.load(key_of(n)) == tuple(groups_of(n, lengths))
    with open_store(directory, segments=3, records=60, disk=Disk()) as store:
        for n, lengths in enumerate(shapes):
            assert store.load(key_of(n)) == tuple(groups_of(n, lengths))


def test_lookup_stops_at_the_first_hole(tmp_path):
    with open_store(tmp_path) as disk_store:
        store: Tier = disk_store
        put(store, 0, 1, 3)
        assert store.lookup([]) == 0
        assert store.lookup([key_of(n) for n in range(4)]) == 2
        assert store.lookup([key_of(2), key_of(3)]) == 0


def test_only_the_same_namespace_and_tenant_hit(tmp_path):
    with open_store(tmp_path) as store:
        put(store, 1, tenant="a")
        assert store.load(key_of(1), tenant="a") == tuple(groups_of(1))
        for tenant in ("", "b", "A"):
            assert not has(store, 1, tenant)
            assert store.load(key_of(1), tenant=tenant) is None
        assert not store.pin(key_of(1))
        assert not store.evict(key_of(1))
    other = hashlib.sha256(b"other weights").digest()
    with open_store(tmp_path, namespace=other) as store:
        assert store.stats().num_blocks == 1
        assert store.load(key_of(1), tenant="a") is None
        put(store, 1, tenant="a")
        assert store.stats().num_blocks == 2


def test_other_group_lengths_than_the_layouts_are_refused_or_missed(tmp_path):
    with open_store(tmp_path) as store:
        put(store, 1)
    with open_store(tmp_path, group_bytes=(900, 341)) as store:
        assert store.load(key_of(1)) is None
        with pytest.raises(StoreError, match=r"groups: got lengths \(900, 340\)"):
            store.store(key_of(2), groups_of(2), tokens=(0, 64))


@pytest.mark.parametrize(
    ("key", "groups", "tokens", "message"),
    [
        (b"short", [b""], (0, 1), "key: got 5 bytes"),
        (key_of(0), [b""], (1, 1), "tokens: got"),
        (key_of(0), [b""], (-1, 1), "tokens: got"),
        (key_of(0), [bytes(40_000)], (0, 1), "raise segment_bytes"),
        (key_of(0), [b""] * 600, (0, 1), "groups: expected at most"),
    ],
)
def test_blocks_no_tier_could_take_are_refused_by_name(tmp_path, key, groups, tokens, message):
    with open_store(tmp_path) as store, pytest.raises(StoreError, match=message):
        store.store(key, groups, tokens=tokens)


@pytest.mark.parametrize(
    ("field", "value"),
    [("namespace", b"x"), ("segment_bytes", 4096), ("segment_bytes", 9000), ("max_bytes", 9000)],
)
def test_settings_that_cannot_work_are_refused_by_name(tmp_path, field, value):
    settings = {"namespace": NAMESPACE, "max_bytes": 1 << 30, field: value}
    with pytest.raises(StoreError, match=f"{field}: got"):
        DiskStoreConfig(directory=tmp_path, **settings)


# Two groups of 900 and 340 bytes and their header fit one page; 9,000 and a header take three.
@pytest.mark.parametrize(("groups", "record"), [(None, 4096), ((900, 340), 4096), ((9000,), 12288)])
@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("tenant_quota_bytes", "None or at least one record"),
        ("max_pending_bytes", "at least one record"),
    ],
)
def test_bounds_below_one_record_are_refused_with_what_is_expected(
    tmp_path, groups, record, field, expected
):
    settings = {"directory": tmp_path / "s", "namespace": NAMESPACE, "max_bytes": 1 << 30}
    settings["group_bytes"] = groups
    for value in (-1, 0, 1, record - 1):
        told = rf"^{field}: got {value}, expected {expected} \({record}\)$"
        with pytest.raises(StoreError, match=told):
            DiskStoreConfig(**settings, **{field: value})
    assert getattr(DiskStoreConfig(**settings, **{field: record}), field) == record
    assert DiskStoreConfig(**settings).tenant_quota_bytes is None


def test_bounds_of_one_record_still_store(tmp_path):
    bounds = {"tenant_quota_bytes": ALIGNMENT, "max_pending_bytes": ALIGNMENT}
    with open_store(tmp_path, group_bytes=(900, 340), **bounds) as store:
        put(store, 0)
        put(store, 1)
        assert [has(store, n) for n in range(2)] == [False, True]


class CountingDisk(Disk):
    """Keeps the largest sum of the segment files that any call left behind."""

    def __init__(self, directory):
        self.directory, self.largest = directory, 0

    def preallocate(self, fd, num_bytes):
        super().preallocate(fd, num_bytes)
        self.largest = max(self.largest, file_bytes(self.directory))

    def sync(self, fd):
        """Tests of bounds need no device."""

    sync_directory = sync


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(Retention), st.booleans()), max_size=60),
    st.integers(3, 5),
)
def test_files_are_within_the_bound_at_every_moment(tmp_path_factory, steps, segments):
    directory = tmp_path_factory.mktemp("store")
    disk = CountingDisk(directory)
    with open_store(directory, segments=segments, disk=disk) as store:
        for n, retention, flush in steps:
            store.store(key_of(n), groups_of(n), tokens=(0, 64), retention=retention)
            if flush:
                store.flush()
            # What is here is right, whatever was moved or removed behind it.
            assert store.load(key_of(n)) in (None, tuple(groups_of(n)))
        store.flush()
        bound = store.config.max_bytes
        assert disk.largest <= bound
        assert store.stats().num_bytes == file_bytes(directory) <= bound
        here = [n for n in range(31) if has(store, n)]
        assert store.stats().num_blocks == len(here)
        assert all(store.load(key_of(n)) == tuple(groups_of(n)) for n in here)


def test_recently_used_blocks_survive_and_untouched_ones_go(tmp_path):
    with open_store(tmp_path, segments=4, disk=CountingDisk(tmp_path)) as store:
        put(store, 0, 1)
        for n in range(2, 42):
            put(store, n)
            assert store.load(key_of(0)) is not None
        assert has(store, 0)
        assert not has(store, 1)
        # The most valuable half of three segments of four.
        assert all(has(store, n) for n in range(37, 42))


@pytest.mark.parametrize(
    ("retention", "survives"), [(Retention.LONG, True), (0, False), (1, False)]
)
def test_higher_class_outlives_younger_blocks(tmp_path, retention, survives):
    with open_store(tmp_path, disk=CountingDisk(tmp_path)) as store:
        put(store, 0, retention=retention)
        put(store, *range(1, 41))
        assert has(store, 0) is survives


def test_pinned_blocks_are_never_evicted(tmp_path):
    with open_store(tmp_path, disk=CountingDisk(tmp_path)) as store:
        put(store, 0, 1)
        assert store.pin(key_of(0))
        assert store.pin(key_of(0))
        assert not store.evict(key_of(0))
        put(store, *range(2, 42))
        assert store.load(key_of(0)) == tuple(groups_of(0))
        assert not has(store, 1)  # without a pin it goes
        store.unpin(key_of(0))
        put(store, *range(42, 82))
        assert has(store, 0)
        store.unpin(key_of(0))
        store.unpin(key_of(0))  # one too many changes nothing
        put(store, *range(82, 122))
        assert not has(store, 0)


def test_store_full_of_pins_turns_blocks_away_and_recovers(tmp_path):
    with open_store(tmp_path, segments=3, disk=CountingDisk(tmp_path)) as store:
        pinned = []
        for n in range(30):
            store.store(key_of(n), groups_of(n), tokens=(0, 64))
            store.flush()
            if store.pin(key_of(n)):
                pinned.append(n)
        assert 4 <= len(pinned) <= 12
        assert store.stats().rejected == 30 - len(pinned)
        assert all(store.load(key_of(n)) == tuple(groups_of(n)) for n in pinned)
        for n in pinned:
            store.unpin(key_of(n))
        put(store, *range(100, 140))
        assert has(store, 139)


def test_tenant_over_quota_loses_its_own_oldest_blocks(tmp_path):
    quota = 3 * ALIGNMENT
    with open_store(tmp_path, records=30, tenant_quota_bytes=quota) as store:
        put(store, 0, tenant="b")
        for n in range(4):
            assert store.store(key_of(n), groups_of(n), tokens=(0, 64), tenant="a")
        store.flush()
        assert [has(store, n, "a") for n in range(4)] == [False, True, True, True]
        assert has(store, 0, "b")
        for n in (1, 2, 3):
            assert store.pin(key_of(n), tenant="a")
        store.store(key_of(9), groups_of(9), tokens=(0, 64), tenant="a")
        store.flush()
        assert not has(store, 9, "a")
        assert store.stats().rejected == 1
    with open_store(tmp_path, records=30, tenant_quota_bytes=quota // 3) as store:
        assert [has(store, n, "a") for n in range(4)].count(True) == 1


def test_evicted_block_is_a_miss_at_once_and_may_come_again(tmp_path):
    with open_store(tmp_path) as store:
        put(store, 1)
        assert store.evict(key_of(1))
        assert not has(store, 1)
        assert not store.evict(key_of(1))
        put(store, 1)
        assert store.load(key_of(1)) == tuple(groups_of(1))
    with open_store(tmp_path) as store:
        assert has(store, 1)


def test_lowered_bound_holds_after_reopening(tmp_path):
    with open_store(tmp_path, segments=8) as store:
        put(store, *range(28))
    assert file_bytes(tmp_path) == 7 * 5 * ALIGNMENT
    with open_store(tmp_path, segments=3) as store:
        assert file_bytes(tmp_path) <= store.config.max_bytes
        put(store, *range(40, 50))
        assert file_bytes(tmp_path) <= store.config.max_bytes
        assert has(store, 49)


class SlowDisk(Disk):
    """The device answers when the test says so."""

    def __init__(self):
        self.may_go = threading.Event()

    def sync(self, fd):
        assert self.may_go.wait(20)


def test_store_and_load_never_wait_for_the_device(tmp_path):
    disk = SlowDisk()
    store = open_store(tmp_path, disk=disk, max_pending_bytes=3 * ALIGNMENT)
    taken = [store.store(key_of(n), groups_of(n), tokens=(0, 64)) for n in range(5)]
    # Nothing is committed, nothing is visible, and what does not fit in the queue is turned away.
    assert taken == [True, True, True, False, False]
    assert store.lookup([key_of(0)]) == 0
    assert store.load(key_of(0)) is None
    disk.may_go.set()
    store.flush()
    assert [has(store, n) for n in range(5)] == taken
    assert store.stats().pending_bytes == 0
    store.close()
    store.close()


def test_stored_bytes_are_a_copy(tmp_path):
    disk = SlowDisk()
    with open_store(tmp_path, disk=disk) as store:
        groups = [bytearray(part) for part in groups_of(1)]
        store.store(key_of(1), [memoryview(part) for part in groups], tokens=(0, 64))
        groups[0][:] = bytes(900)
        disk.may_go.set()
        store.flush()
        assert store.load(key_of(1)) == tuple(groups_of(1))


def test_second_owner_of_a_directory_is_refused(tmp_path):
    with open_store(tmp_path):
        for read_only in (False, True):
            with pytest.raises(StoreError, match="in use by another server"):
                open_store(tmp_path, read_only=read_only)
    reader, other = open_store(tmp_path, read_only=True), open_store(tmp_path, read_only=True)
    with reader, other, pytest.raises(StoreError, match="in use by another server"):
        open_store(tmp_path)


@pytest.mark.parametrize("lose_index", [False, True])
def test_read_only_serves_and_changes_nothing(tmp_path, lose_index):
    with open_store(tmp_path, disk=Disk()) as store:
        put(store, *range(6))
    if lose_index:
        (tmp_path / "index.sqlite").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with open_store(tmp_path, read_only=True) as store:
        assert [has(store, n) for n in range(7)] == [True] * 6 + [False]
        assert store.load(key_of(5)) == tuple(groups_of(5))
        assert store.store(key_of(7), groups_of(7), tokens=(0, 64)) is False
        assert store.evict(key_of(5)) is False
        store.flush()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_read_only_without_a_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match="name one with a store"):
        open_store(tmp_path / "none", read_only=True)


def test_segment_bytes_are_as_documented(tmp_path):
    """Offsets by hand from docs/cache-format.md."""
    with open_store(tmp_path) as store:
        store.store(key_of(1), [b"main", b"index"], tokens=(64, 128), tenant="t", retention=2)
        store.flush()
    raw = (tmp_path / "segment-0000000000000001.kv").read_bytes()
    assert len(raw) == 5 * 4096

    def number(at, size):
        return int.from_bytes(raw[at : at + size], "little")

    assert raw[:8] == b"FWKVSEG\0"
    assert (number(8, 4), number(16, 8), number(24, 8)) == (1, 1, 5 * 4096)
    nonce = raw[32:48]
    assert raw[48:64] == hashlib.blake2b(raw[:48], digest_size=16).digest()
    at = 4096
    assert raw[at : at + 8] == b"FWKVREC\0"
    assert (number(at + 8, 2), number(at + 10, 2), number(at + 12, 4)) == (1, 2, 2)
    assert (number(at + 16, 8), number(at + 24, 8), number(at + 32, 8)) == (4096, 64, 128)
    assert raw[at + 40 : at + 72] == NAMESPACE
    assert raw[at + 72 : at + 104] == hashlib.sha256(b"t").digest()
    assert raw[at + 104 : at + 136] == key_of(1)
    assert (number(at + 136, 4), number(at + 140, 4)) == (4, zlib.crc32(b"main"))
    assert (number(at + 144, 4), number(at + 148, 4)) == (5, zlib.crc32(b"index"))
    signed = raw[at : at + 152]
    assert raw[at + 152 : at + 168] == hashlib.blake2b(signed, digest_size=16, key=nonce).digest()
    assert raw[at + 168 : at + 177] == b"mainindex"
    assert not any(raw[at + 177 :])


def test_released_block_costs_896_bytes_per_token(tmp_path):
    """64 tokens: 32 entries of three owners, 64 of one, 288 + 68 bytes each; 14 pages."""
    lengths = (32 * 288, 32 * 68) * 3 + (64 * 288, 64 * 68)
    assert sum(lengths) == 64 * 890
    with open_store(tmp_path, records=14) as store:
        store.store(key_of(1), [bytes(n) for n in lengths], tokens=(0, 64))
        store.flush()
        assert store.stats().stored == 1
        assert store._open.end - ALIGNMENT == 64 * 896


def test_disk_tier_needs_no_torch():
    code = "import sys, finwhale.tiers.disk_store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
