"""`finwhale cache` on directories that are whole, damaged, too large, or none."""

from __future__ import annotations

import os

import pytest

from finwhale.cache.prefix_key import tagged_digest
from finwhale.cache_command import Cache
from finwhale.chat_ui.sizes import size_in_bytes
from finwhale.tiers.disk_check import survey
from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig
from finwhale.tiers.tier import StoreError

SEGMENT = 1 << 16
SIZES = (3000, 700)


def filled(folder, blocks: int, *, namespace: bytes = b"n" * 32, tenant: str = ""):
    config = DiskStoreConfig(
        directory=folder, namespace=namespace, max_bytes=64 * SEGMENT, segment_bytes=SEGMENT
    )
    with DiskStore(config) as store:
        for n in range(blocks):
            groups = tuple(bytes([n % 251]) * size for size in SIZES)
            store.store(
                tagged_digest(b"k", bytes([n])), groups, tokens=(8 * n, 8 * n + 8), tenant=tenant
            )
        store.flush()
    return folder


def test_a_survey_counts_what_was_stored_without_the_index(tmp_path):
    filled(tmp_path / "c", 30)
    filled(tmp_path / "c", 5, namespace=b"m" * 32, tenant="t")
    os.remove(tmp_path / "c" / "index.sqlite")
    report = survey(tmp_path / "c")
    assert report.blocks == 35
    assert report.tokens == 35 * 8
    assert report.namespaces == {b"n" * 32: 30, b"m" * 32: 5}
    assert sorted(report.tenants.values()) == [5, 30]
    assert report.problems == []
    assert report.num_bytes == len(report.segments) * SEGMENT


def test_damage_is_counted_where_it_is(tmp_path):
    filled(tmp_path / "c", 30)
    before = survey(tmp_path / "c")
    first = tmp_path / "c" / before.segments[0].name
    raw = bytearray(first.read_bytes())
    # A byte in the middle of the second record's payload: records are 4 KiB here.
    raw[4096 + 4096 + 2000] ^= 1
    first.write_bytes(bytes(raw))
    after = survey(tmp_path / "c")
    assert after.blocks == before.blocks - 1
    assert after.segments[0].damaged == 1
    assert [before.segments[0].name in problem for problem in after.problems] == [True]
    raw[0] ^= 1
    first.write_bytes(bytes(raw))
    assert not survey(tmp_path / "c").segments[0].is_readable


def test_damage_to_the_last_record_of_a_full_segment_is_seen(tmp_path):
    filled(tmp_path / "c", 40)
    before = survey(tmp_path / "c")
    assert len(before.segments) > 2
    first = tmp_path / "c" / before.segments[0].name
    raw = bytearray(first.read_bytes())
    last = 4096 + before.segments[0].record_bytes - 4096
    raw[last + 1000] ^= 1
    first.write_bytes(bytes(raw))
    after = survey(tmp_path / "c")
    assert after.segments[0].blocks == before.segments[0].blocks - 1
    assert after.segments[0].damaged == 1


def test_a_segment_that_was_never_begun_is_no_damage(tmp_path):
    filled(tmp_path / "c", 3)
    (tmp_path / "c" / "segment-00000000000000ff.kv").write_bytes(bytes(SEGMENT))
    assert survey(tmp_path / "c").problems == []


def test_a_record_cut_short_by_a_kill_is_no_damage_once_its_segment_is_full(tmp_path):
    """What comes next may be too long for the place, so nothing covers what was left there."""
    folder = filled(tmp_path / "c", 13)
    segment = folder / survey(folder).segments[0].name
    raw = bytearray(segment.read_bytes())
    # Half a record behind the last whole one: its end never came.
    raw[14 * 4096 : 15 * 4096 + 100] = raw[13 * 4096 : 13 * 4096 + 50] + b"x" * 4146
    segment.write_bytes(bytes(raw))
    config = DiskStoreConfig(
        directory=folder, namespace=b"n" * 32, max_bytes=64 * SEGMENT, segment_bytes=SEGMENT
    )
    with DiskStore(config) as store:
        store.store(b"k" * 32, (bytes(9000),), tokens=(0, 8))
        store.flush()
    report = survey(folder)
    assert [part.blocks for part in report.segments] == [13, 1]
    assert report.problems == []


def test_verify_says_by_its_exit_code_whether_every_record_is_whole(tmp_path, capsys):
    filled(tmp_path / "c", 12)
    assert Cache(action="verify", directory=tmp_path / "c").run() == 0
    assert "12 blocks, 96 tokens" in capsys.readouterr().out
    segment = tmp_path / "c" / survey(tmp_path / "c").segments[0].name
    raw = bytearray(segment.read_bytes())
    raw[4096 + 500] ^= 1
    segment.write_bytes(bytes(raw))
    assert Cache(action="verify", directory=tmp_path / "c").run() == 1
    assert Cache(action="stat", directory=tmp_path / "c").run() == 0


def test_prune_keeps_the_bound_and_the_rest_still_loads(tmp_path):
    filled(tmp_path / "c", 200)
    assert survey(tmp_path / "c").num_bytes > 4 * SEGMENT
    assert Cache(action="prune", directory=tmp_path / "c", size=str(4 * SEGMENT)).run() == 0
    report = survey(tmp_path / "c")
    assert report.num_bytes <= 4 * SEGMENT
    assert 0 < report.blocks < 200
    assert report.problems == []


def test_wrong_requests_are_refused_and_change_nothing(tmp_path):
    filled(tmp_path / "c", 20)
    before = survey(tmp_path / "c").blocks
    with pytest.raises(ValueError, match="three of its segments"):
        Cache(action="prune", directory=tmp_path / "c", size="1KB").run()
    with pytest.raises(ValueError, match=r"--size: got None with prune"):
        Cache(action="prune", directory=tmp_path / "c").run()
    with pytest.raises(ValueError, match=r"--size: got '1GB' with stat"):
        Cache(action="stat", directory=tmp_path / "c", size="1GB").run()
    with pytest.raises(StoreError, match="is no folder"):
        Cache(action="stat", directory=tmp_path / "nowhere").run()
    assert survey(tmp_path / "c").blocks == before


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200GB", 200 * 10**9),
        ("64mb", 64 * 10**6),
        ("1.5k", 1500),
        ("4096", 4096),
        ("2 T", 2 * 10**12),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert size_in_bytes(text, "--size") == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "ten", "1e400", "nan", "5XB"])
def test_what_is_no_size_is_refused_with_its_flag(text):
    with pytest.raises(ValueError, match=r"--size: got .* as in 200GB"):
        size_in_bytes(text, "--size")
