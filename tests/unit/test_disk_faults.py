"""Crashes, damage and failing devices: a miss or a refusal, never wrong bytes.

The crash law, in every state that `FaultDisk.after_crash` gives: files are within the bound,
whatever is loaded is what was stored under that key, and all that was committed is there. Each sync
in the code is switched off in turn, and then the law must fail.
"""

import hashlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from finwhale.tiers.disk_segments import ALIGNMENT
from finwhale.tiers.disk_store import DiskStore
from finwhale.tiers.tier import Retention, StoreError
from tests.fault_disk import BAD_DEVICE, CRASHES, NO_SPACE, READ_ONLY, FaultDisk, write_files
from tests.unit.test_disk_store import file_bytes, groups_of, has, key_of, open_store, put

NUM_BLOCKS = 10
SEGMENTS = 3
# Each place that syncs, and what breaks without it.
SYNCED_PLACES = {
    ("_take_directory", "directory"): "lost {0}",
    ("_segment_for", "directory"): "lost {0}",
    ("_commit", "file"): "lost {0}",
    ("_empty", "file"): "lost {0}",
    ("_empty", "directory"): "bound",
}


def note(disk, store, number=NUM_BLOCKS):
    """Write into the log what a reader could see now."""
    here = [str(n) for n in range(number) if has(store, n)]
    disk.note(" ".join(here))


def small_store(directory, disk, **settings):
    return open_store(directory, segments=SEGMENTS, records=3, disk=disk, **settings)


def put_together(store, *numbers) -> None:
    """Store blocks that reach the writer as one batch: it cannot look while we hold its lock."""
    with store._wake:
        for n in numbers:
            assert store.store(key_of(n), groups_of(n), tokens=(0, 64))
    store.flush()


def scenario(directory, skipped=None) -> FaultDisk:
    """Fill a store over its bound twice; block 0 moves each time. Return the log."""
    disk = FaultDisk(skipped=skipped)
    with small_store(directory, disk) as store:
        put(store, 0, retention=Retention.LONG)
        note(disk, store)
        for n in range(1, NUM_BLOCKS, 2):
            put_together(store, n, n + 1)
            note(disk, store)
    return disk


def promised(log, upto) -> set[int]:
    """Blocks visible at the last note before the crash, without those that were leaving."""
    notes = [(i, set(map(int, c.name.split()))) for i, c in enumerate(log) if c.kind == "note"]
    before = [blocks for i, blocks in notes if i < upto]
    after = [blocks for i, blocks in notes if i >= upto]
    return (before[-1] if before else set()) & (after[0] if after else set(range(NUM_BLOCKS + 1)))


def broken_law(files, expected, target) -> str | None:
    """Return which part of the crash law fails when a store opens these files, or None."""
    write_files(target, files)
    with small_store(target, FaultDisk()) as store:
        if sum(len(files[name]) for name in files if ".kv" in name) > store.config.max_bytes:
            return "bound"
        loaded = {n: store.load(key_of(n)) for n in range(NUM_BLOCKS + 1)}
        if file_bytes(target) > store.config.max_bytes:
            return "bound after opening"
    if any(groups not in (None, tuple(groups_of(n))) for n, groups in loaded.items()):
        return "wrong bytes"
    lost = {n for n in expected if loaded[n] is None}
    return f"lost {lost}" if lost else None


def first_broken_law(disk, path, kinds=CRASHES, indexes=(-1, None, -3, -2)) -> str | None:
    """Crash behind every call in every kind, with each index in turn; equal states once."""
    seen = set()
    for upto in range(1, len(disk.log) + 1):
        expected = promised(disk.log, upto)
        for turn, kind in enumerate(kinds):
            index = indexes[(upto + turn) % len(indexes)]
            files = disk.after_crash(upto, kind=kind, index=index)
            state = hashlib.sha256(repr((sorted(expected), sorted(files.items()))).encode())
            if state.digest() in seen:
                continue
            seen.add(state.digest())
            broken = broken_law(files, expected, path / f"{upto}-{kind}")
            if broken:
                return f"after call {upto} ({disk.log[upto - 1].kind}), {kind}, {index}: {broken}"
    return None


@pytest.mark.parametrize("kind", CRASHES)
def test_every_crash_leaves_the_committed_and_nothing_wrong(tmp_path, kind):
    disk = scenario(tmp_path / "store")
    assert set(disk.places) == SYNCED_PLACES.keys()
    assert sum(call.kind == "unlink" for call in disk.log) >= 2
    assert promised(disk.log, len(disk.log)) >= {0, NUM_BLOCKS - 1}
    assert first_broken_law(disk, tmp_path, [kind]) is None


@pytest.mark.parametrize("place", sorted(SYNCED_PLACES), ids="-".join)
def test_without_one_sync_the_crash_law_fails(tmp_path, place):
    disk = scenario(tmp_path / "store", skipped=place)
    assert place in disk.places
    broken = first_broken_law(disk, tmp_path)
    assert broken is not None
    assert broken.endswith(SYNCED_PLACES[place])


@pytest.mark.parametrize("skipped", [None, ("adopt", "file")])
def test_blocks_adopted_after_a_kill_survive_a_loss_of_power(tmp_path, skipped):
    """They may lie in the system's memory alone when the next process finds them."""
    disk = FaultDisk(skipped=skipped)
    with small_store(tmp_path / "store", disk) as store:
        put(store, 0)
        put(store, 1)
    upto = max(i for i, call in enumerate(disk.log) if call.kind == "write") + 1
    disk = disk.killed(upto, tmp_path / "killed")
    with small_store(tmp_path / "killed", disk) as store:
        note(disk, store)
    assert ("adopt", "file") in disk.places
    assert promised(disk.log, len(disk.log)) == {0, 1}
    files = disk.after_crash(len(disk.log), kind="drop")
    broken = broken_law(files, {0, 1}, tmp_path / "crash")
    assert broken == (None if skipped is None else "lost {1}")


def test_a_kill_at_any_call_costs_no_valuable_block_later_on(tmp_path):
    """A segment just made has taken the last free place; nothing may be emptied into nowhere."""
    disk = FaultDisk()
    with small_store(tmp_path / "store", disk) as store:
        for n in range(7):
            # Two segments of three records, a valuable one at the front of each; then a third.
            put(store, n, retention=Retention.LONG if n in (0, 3) else Retention.NORMAL)
    last = max(i for i, call in enumerate(disk.log) if call.kind == "create")
    for upto in range(last, len(disk.log) + 1):
        disk.killed(upto, tmp_path / f"{upto}")
        with small_store(tmp_path / f"{upto}", FaultDisk()) as store:
            put(store, *range(20, 32))
            assert [has(store, n) for n in (0, 3)] == [True, True], upto


class Killed(BaseException):
    """Stands for the end of the process."""


class KilledDisk(FaultDisk):
    """Ends the process behind the n-th call of the opening thread that reaches the index."""

    def __init__(self, calls: int):
        super().__init__()
        self.calls_left = calls

    def connect(self, target):
        disk, real = self, super().connect(target)

        class Counted:
            def __getattr__(self, name):
                call = getattr(real, name)

                def counted(*args):
                    done = call(*args)
                    opens = threading.current_thread() is threading.main_thread()
                    disk.calls_left -= opens and name != "close"
                    if not disk.calls_left:
                        raise Killed
                    return done

                return counted

        return Counted()


def test_a_kill_while_the_index_is_made_leaves_one_that_opens(tmp_path):
    calls, has_ended = 0, False
    while not has_ended:
        calls += 1
        folder = tmp_path / f"{calls}"
        try:
            open_store(folder, disk=KilledDisk(calls)).close()
            has_ended = True
        except Killed:
            # A copy: the lock of the process that this stands for would be gone.
            shutil.copytree(folder, tmp_path / f"left {calls}")
            with open_store(tmp_path / f"left {calls}") as store:
                put(store, 1)
                assert store.stats().errors == 0, calls
                assert store.load(key_of(1)) == tuple(groups_of(1))
    assert calls > 5


class Hasty(DiskStore):
    """A store with its order turned round: the index first, and then the data."""

    def _commit(self) -> None:
        waits, self._open = self._open, None
        had = bool(self._staged)
        super()._commit()  # without an open segment nothing is flushed
        self._open = waits
        if had and waits:
            waits.flush()


@pytest.mark.parametrize("kind", [DiskStore, Hasty])
def test_what_the_index_shows_is_durable_at_that_moment(tmp_path, kind):
    """Readers see a row as soon as it is committed, so it may be committed only behind its data."""
    broken = []
    disk = FaultDisk()
    store = open_store(tmp_path / "store", disk=disk, kind=kind)

    def look() -> None:
        here = {n for n in range(6) if has(store, n)}
        files = disk.after_crash(len(disk.log), kind="drop")
        target = tmp_path / f"{len(disk.log)}"
        write_files(target, files)
        with open_store(target) as other:
            broken.extend(n for n in here if other.load(key_of(n)) != tuple(groups_of(n)))

    disk.after_commit = look
    with store:
        put(store, *range(6))
    assert bool(broken) == (kind is Hasty)


def test_syncs_of_the_code_are_all_in_these_tests():
    """A new one needs a control of its own."""
    cache = Path(sys.modules["finwhale.tiers.disk_store"].__file__).parent
    names = ("disk_segments.py", "disk_store.py", "disk_index.py")
    text = "".join((cache / name).read_text(encoding="utf-8") for name in names)
    # flush: commit, adoption, moving. sync_directory: new store, new segment, removed segment.
    assert text.count(".flush()") == 3
    assert text.count(".sync_directory(") == 3
    assert text.count("disk.sync(") == 1


def committed(directory, count=6, **settings) -> None:
    with open_store(directory, **settings) as store:
        put(store, *range(count))


def segment_files(directory):
    return sorted(directory.glob("segment-*"))


@pytest.mark.parametrize("seed_number", range(3))
def test_flipped_bit_in_a_segment_is_a_miss_of_one_block(tmp_path, seed_number):
    committed(tmp_path)
    draw = random.Random(seed_number)
    path = segment_files(tmp_path)[0]
    clean = path.read_bytes()
    for n in range(4):
        # Inside record n: its header, or its 1,240 bytes of groups.
        at = (n + 1) * ALIGNMENT + draw.choice([draw.randrange(168), draw.randrange(168, 1408)])
        damaged = bytearray(clean)
        damaged[at] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        if seed_number == 2:
            (tmp_path / "index.sqlite").unlink()
        with open_store(tmp_path) as store:
            assert store.load(key_of(n)) is None
            others = [m for m in range(6) if m != n]
            assert all(store.load(key_of(m)) == tuple(groups_of(m)) for m in others)
            assert not has(store, n)
            put(store, n)
            assert store.load(key_of(n)) == tuple(groups_of(n))
        # Back to the start for the next flip.
        for file in tmp_path.iterdir():
            file.unlink()
        committed(tmp_path)
        clean = path.read_bytes()


def test_swapped_records_are_never_served_under_the_others_key(tmp_path):
    committed(tmp_path)
    path = segment_files(tmp_path)[0]
    raw = path.read_bytes()
    one, two = (raw[at * ALIGNMENT : (at + 1) * ALIGNMENT] for at in (1, 2))
    path.write_bytes(raw[:ALIGNMENT] + two + one + raw[3 * ALIGNMENT :])
    with open_store(tmp_path) as store:
        assert store.load(key_of(0)) is None
        assert store.load(key_of(1)) is None
        assert store.stats().damaged == 2
        assert store.load(key_of(2)) == tuple(groups_of(2))


def test_swapped_payloads_and_records_of_another_segment_are_misses(tmp_path):
    committed(tmp_path)
    first, second = segment_files(tmp_path)
    raw, other = bytearray(first.read_bytes()), second.read_bytes()
    # Groups of record 1 under the header of record 0; record 0 of another file as record 2.
    raw[ALIGNMENT + 168 : 2 * ALIGNMENT] = raw[2 * ALIGNMENT + 168 : 3 * ALIGNMENT]
    raw[3 * ALIGNMENT : 4 * ALIGNMENT] = other[ALIGNMENT : 2 * ALIGNMENT]
    first.write_bytes(raw)
    with open_store(tmp_path) as store:
        assert store.load(key_of(0)) is None
        assert store.load(key_of(2)) is None
        assert store.load(key_of(1)) == tuple(groups_of(1))
        assert store.load(key_of(4)) == tuple(groups_of(4))


@pytest.mark.parametrize("size", [0, 20, 4096, 4097, 2 * 4096 - 1, 2 * 4096 + 1000, 3 * 4096])
def test_truncated_segment_loses_its_tail_alone(tmp_path, size):
    committed(tmp_path)
    os.truncate(segment_files(tmp_path)[0], size)
    with open_store(tmp_path) as store:
        # The last page of record n is zeros behind byte 1,408, but a short record is no record.
        whole = max(0, size // ALIGNMENT - 1)
        expected = [tuple(groups_of(n)) if n < whole else None for n in range(4)]
        assert [store.load(key_of(n)) for n in range(4)] == expected
        assert store.load(key_of(5)) == tuple(groups_of(5))


def test_foreign_files_are_left_alone_and_take_their_space(tmp_path):
    committed(tmp_path, 2)
    foreign = tmp_path / "segment-00000000000000aa.kv"
    foreign.write_bytes(b"not a segment" * 1000)
    copy = tmp_path / "segment-00000000000000ab.kv"
    copy.write_bytes(segment_files(tmp_path)[0].read_bytes())
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with open_store(tmp_path, segments=6) as store:
        put(store, *range(2, 40))
        assert file_bytes(tmp_path) <= store.config.max_bytes
        assert store.stats().num_bytes == file_bytes(tmp_path)
        assert store.load(key_of(39)) == tuple(groups_of(39))
    assert foreign.read_bytes() == b"not a segment" * 1000
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"
    foreign.write_bytes(bytes(1) + b"x" * (1 << 20))
    with pytest.raises(StoreError, match="foreign or damaged segment files"):
        open_store(tmp_path)


@pytest.mark.parametrize("at", [0, 9, 20, 30, 40, 60])
def test_damaged_segment_header_costs_its_segment_alone(tmp_path, at):
    committed(tmp_path)
    path = segment_files(tmp_path)[1]
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)
    with open_store(tmp_path) as store:
        loaded = [store.load(key_of(n)) for n in range(6)]
        assert loaded == [tuple(groups_of(n)) if n < 4 else None for n in range(6)]
        put(store, 4, 5, 6)
        assert store.load(key_of(5)) == tuple(groups_of(5))
        assert store.stats().errors == 0
    assert path.read_bytes() == raw


@pytest.mark.parametrize("content", [b"", b"not a database, not at all" * 100, "flip"])
def test_damaged_index_is_made_anew(tmp_path, content):
    committed(tmp_path)
    path = tmp_path / "index.sqlite"
    if content == "flip":
        raw = bytearray(path.read_bytes())
        raw[200:-1:97] = bytes(b ^ 0x55 for b in raw[200:-1:97])
        content = bytes(raw)
    path.write_bytes(content)
    with open_store(tmp_path) as store:
        assert all(store.load(key_of(n)) == tuple(groups_of(n)) for n in range(6))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", 2 * ALIGNMENT),
        ("offset", -5),
        ("offset", "x"),
        ("segment", 77),
        ("segment", 2),
        ("num_bytes", 1 << 62),
        ("num_bytes", 2 * ALIGNMENT),
        ("num_bytes", 0),
    ],
)
def test_row_that_points_elsewhere_gives_a_miss(tmp_path, field, value):
    committed(tmp_path)
    index = sqlite3.connect(tmp_path / "index.sqlite")
    query = f"UPDATE records SET {field} = ? WHERE segment = 1 AND offset = ?"
    index.execute(query, (value, ALIGNMENT))
    index.commit()
    index.close()
    with open_store(tmp_path, read_only=True) as store:
        loaded = [store.load(key_of(n)) for n in range(6)]
    assert loaded == [None] + [tuple(groups_of(n)) for n in range(1, 6)]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("preallocate", NO_SPACE),
        ("write", NO_SPACE),
        ("write", BAD_DEVICE),
        ("sync", BAD_DEVICE),
        ("sync_directory", BAD_DEVICE),
        ("commit", BAD_DEVICE),
        ("unlink", BAD_DEVICE),
    ],
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_failing_call_costs_its_blocks_and_no_other(tmp_path, kind, code, number):
    disk = FaultDisk()
    with open_store(tmp_path, segments=3, records=3, disk=disk) as store:
        put(store, 0, 1)
        disk.counts.clear()
        disk.fail = {(kind, number): code}
        for n in range(2, 12):
            assert store.store(key_of(n), groups_of(n), tokens=(0, 64))
            store.flush()
            assert file_bytes(tmp_path) <= store.config.max_bytes
            assert all(store.load(key_of(m)) in (None, tuple(groups_of(m))) for m in range(n + 1))
        stats = store.stats()
        assert stats.errors == (disk.counts[kind] >= number)
        assert stats.stored + stats.rejected == 12
        assert stats.rejected <= 1
        here = [n for n in range(12) if has(store, n)]
        assert has(store, 11)
    with open_store(tmp_path, segments=3, records=3) as store:
        assert all(store.load(key_of(n)) == tuple(groups_of(n)) for n in here)


@pytest.mark.parametrize("pins", [(), (0,)], ids=["free", "pinned"])
def test_segment_that_cannot_be_read_goes_and_storing_goes_on(tmp_path, pins):
    """Each sealed segment holds a valuable block, so whichever is emptied must be read."""
    disk = FaultDisk()
    valuable = (0, 3)
    with small_store(tmp_path, disk) as store:
        for n in range(6):
            put(store, n, retention=Retention.LONG if n in valuable else Retention.NORMAL)
        assert all(store.pin(key_of(n)) for n in pins)
        bad, good = segment_files(tmp_path)
        disk.unreadable = {bad.name}
        put_together(store, 6, 7)
        put(store, *range(8, 24))
        stats = store.stats()
        assert (stats.rejected, stats.stored) == (0, 24)
        # One read failed, of the one block that was to move; the others went unread.
        assert (stats.errors, stats.damaged) == (1, 1)
        assert "Input/output error" in store.last_error
        assert not {bad, good} & set(segment_files(tmp_path))
        assert file_bytes(tmp_path) <= store.config.max_bytes
        assert [has(store, n) for n in valuable] == [False, True]
        here = [n for n in range(24) if has(store, n)]
        assert stats.num_blocks == len(here)
        assert {3, 22, 23} <= set(here)
        put(store, 0)
        assert store.load(key_of(0)) == tuple(groups_of(0))
    with small_store(tmp_path, FaultDisk()) as store:
        assert all(store.load(key_of(n)) == tuple(groups_of(n)) for n in (0, 3, 23))


def test_full_device_turns_all_blocks_away_and_serves_on(tmp_path):
    disk = FaultDisk()
    with open_store(tmp_path, disk=disk) as store:
        put(store, *range(4))
        disk.fail = {("preallocate", "all"): NO_SPACE}
        put(store, *range(4, 8))
        assert store.stats().rejected == 4
        assert "No space left" in store.last_error
        assert all(store.load(key_of(n)) == tuple(groups_of(n)) for n in range(4))
        disk.fail = {}
        put(store, 9)
        assert has(store, 9)
    assert file_bytes(tmp_path) == 2 * 5 * ALIGNMENT


def test_block_whose_read_failed_is_a_miss_and_is_stored_anew(tmp_path):
    disk = FaultDisk()
    with open_store(tmp_path, disk=disk) as store:
        put(store, *range(6))
        bad = segment_files(tmp_path)[0].name
        disk.unreadable = {bad}
        assert store.load(key_of(0)) is None
        assert (store.stats().errors, store.stats().damaged) == (1, 1)
        # Not here at once, so whoever computes it may hand it over before the writer has looked.
        assert not has(store, 0)
        put(store, 0)
        assert store.stats().stored == 7
        assert store.stats().num_blocks == 6
        assert store.load(key_of(0)) == tuple(groups_of(0))
        # The bad place stays bad, and costs one block at a time.
        assert [has(store, n) for n in range(6)] == [True] * 6
        assert store.load(key_of(1)) is None
        assert [has(store, n) for n in range(6)] == [n != 1 for n in range(6)]
    with open_store(tmp_path, disk=FaultDisk()) as store:
        assert store.load(key_of(0)) == tuple(groups_of(0))


def test_read_error_of_a_passing_kind_costs_no_more_than_the_block(tmp_path):
    disk = FaultDisk()
    with open_store(tmp_path, disk=disk) as store:
        put(store, 0, 1)
        disk.counts.clear()
        disk.fail = {("read", 1): BAD_DEVICE}
        assert store.load(key_of(0)) is None
        assert store.load(key_of(1)) == tuple(groups_of(1))
        store.flush()
        assert store.load(key_of(0)) is None
        put(store, 0)
        assert store.load(key_of(0)) == tuple(groups_of(0))
        assert store.stats().errors == 1


def test_read_error_where_nothing_is_stored_is_tried_again(tmp_path):
    committed(tmp_path)
    disk = FaultDisk()
    with open_store(tmp_path, disk=disk, read_only=True) as store:
        disk.counts.clear()
        disk.fail = {("read", 1): BAD_DEVICE}
        assert store.load(key_of(0)) is None
        assert (store.stats().errors, store.stats().damaged) == (1, 0)
        assert store.load(key_of(0)) == tuple(groups_of(0))


def test_want_of_memory_in_a_read_costs_no_block(tmp_path, monkeypatch):
    with open_store(tmp_path) as store:
        put(store, 0)

        def fail(*_):
            raise MemoryError

        monkeypatch.setattr(store._disk, "read", fail)
        assert store.load(key_of(0)) is None
        monkeypatch.undo()
        assert store.load(key_of(0)) == tuple(groups_of(0))
        assert (store.stats().errors, store.stats().damaged) == (1, 0)


def test_bad_sector_in_the_open_segment_costs_its_block_alone(tmp_path):
    committed(tmp_path)
    # Reading to open: the headers of two segments, then four calls for the first block of two.
    disk = FaultDisk(fail={("read", 3): BAD_DEVICE})
    with open_store(tmp_path, disk=disk) as store:
        assert disk.counts["read"] > 3
        loaded = [store.load(key_of(n)) for n in range(6)]
    assert loaded == [tuple(groups_of(n)) if n != 4 else None for n in range(6)]


def test_readers_beside_the_writer_see_whole_blocks(tmp_path):
    wrong, hits, is_done = [], [], threading.Event()
    with open_store(tmp_path, segments=3, disk=FaultDisk()) as store:

        def read():
            while not is_done.is_set():
                n = random.randrange(60)
                groups = store.load(key_of(n))
                (hits if groups == tuple(groups_of(n)) else wrong).append(groups)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for n in range(120):
            store.store(key_of(n % 60), groups_of(n % 60), tokens=(0, 64))
            if n % 4 == 0:
                store.flush()
        is_done.set()
        for reader in readers:
            reader.join()
        assert store.stats().evicted > 20
        assert store.stats().errors == store.stats().damaged == 0
    assert hits
    assert not any(wrong)  # misses


@pytest.mark.parametrize("most", [1000, 4095])
def test_short_reads_and_writes_are_continued(tmp_path, most):
    with open_store(tmp_path, disk=FaultDisk(read_at_most=most, write_at_most=most)) as store:
        put(store, *range(3))
        assert all(store.load(key_of(n)) == tuple(groups_of(n)) for n in range(3))


@pytest.mark.parametrize("code", [READ_ONLY, BAD_DEVICE])
def test_directory_that_cannot_be_written_is_refused_with_the_way_out(tmp_path, code):
    committed(tmp_path)
    with pytest.raises(StoreError, match="make it writable, or read it with read_only=True"):
        open_store(tmp_path, disk=FaultDisk(fail={("open", "all"): code}))
    # The refusal left no lock behind, and reading needs no call that writes.
    refused = {(k, "all"): code for k in ("open", "write", "preallocate", "unlink", "commit")}
    del refused["commit", "all"]
    with open_store(tmp_path, disk=FaultDisk(fail=refused), read_only=True) as store:
        assert store.load(key_of(5)) == tuple(groups_of(5))


KILLED = """
import sys
from pathlib import Path
from finwhale.tiers.disk_segments import Disk
from tests.unit.test_disk_store import open_store, groups_of, key_of
store = open_store(Path(sys.argv[1]), disk=Disk())
for n in range(10_000):
    store.store(key_of(n), groups_of(n), tokens=(0, 64))
    store.flush()
    sys.stdout.write(f"{n}\\n")
    sys.stdout.flush()
"""


def test_killed_owner_leaves_its_committed_blocks_and_no_lock(tmp_path):
    root = Path(__file__).resolve().parents[2]
    arguments = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=root, text=True) as owner:
        last = [int(owner.stdout.readline()) for _ in range(9)][-1]
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    with open_store(tmp_path) as store:
        assert store.load(key_of(last)) == tuple(groups_of(last))
        for n in range(40):
            assert store.load(key_of(n)) in (None, tuple(groups_of(n)))
