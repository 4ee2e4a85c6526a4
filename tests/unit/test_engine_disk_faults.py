"""A failing or damaged disk behind an engine: a shorter hit or none, never another token.

The reference is `tests/uncached_engine.py`, one whole pass from nothing. The device is the one of
`tests/fault_disk.py`; damage is done to the files between two engines.
"""

from __future__ import annotations

import copy
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from finwhale.tiers import disk_segments
from finwhale.tiers.disk_segments import ALIGNMENT, Segment, record_bytes
from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig
from finwhale.tiers.tier import StoreError
from tests.fault_disk import BAD_DEVICE, NO_SPACE, READ_ONLY, FaultDisk
from tests.unit.test_engine_tier import (
    BLOCK,
    IDS,
    LONG,
    MODEL,
    assert_uncached,
    engine_of,
    served,
)

PROMPT = IDS[: LONG + 3]
BLOCKS = LONG // BLOCK
# Four records; the last segment of a directory is scanned at the start, the others are trusted.
SEGMENT = 5 * ALIGNMENT


def tier_in(folder, disk=None, **settings):
    def open_tier(namespace: bytes, sizes: tuple[int, ...]) -> DiskStore:
        config = {"max_bytes": 1 << 20, "segment_bytes": SEGMENT, "group_bytes": sizes}
        config |= {"directory": folder, "namespace": namespace}
        return DiskStore(DiskStoreConfig(**(config | settings)), disk or FaultDisk())

    return open_tier


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "cache"
    engine = engine_of(tier_in(folder))
    sizes = engine.tier.config.group_bytes
    served(engine, IDS[:LONG])
    engine.close()
    return folder, record_bytes(sizes)


@pytest.fixture
def cache(written, tmp_path):
    """A directory of one's own that holds every whole block of IDS[:LONG], and a record's bytes."""
    folder, size = written
    shutil.copytree(folder, tmp_path / "cache")
    return tmp_path / "cache", size


def loaded_of(folder, disk=None, model=MODEL, **settings) -> tuple[int, DiskStore]:
    """Serve the prompt from `folder`; it must have the uncached bits. Return blocks loaded."""
    engine = engine_of(tier_in(folder, disk, **settings), model)
    tier = engine.tier
    assert_uncached(served(engine, PROMPT), PROMPT, model=model)
    assert engine.scheduler.stats.tier_errors == 0
    held = engine.index.num_cached
    assert engine.allocator.num_free + held == engine.config.num_blocks
    engine.close()
    return engine.scheduler.stats.loaded_tokens // BLOCK, tier


def segment_of(folder, number=0):
    return sorted(folder.glob("segment-*"))[number]


def places(folder) -> list[tuple[int, int]]:
    """Return (segment, offset) of the prompt's blocks, in the order of its tokens."""
    found = {}
    for n, path in enumerate(sorted(folder.glob("segment-*"))):
        for offset, header in Segment.open(FaultDisk(), path, writable=False).scan():
            found[header.tokens[0]] = n, offset
    return [found[at] for at in sorted(found)]


def change(folder, block: int, *places_in_it: int, mask: int = 1) -> None:
    """Flip bits of some bytes of a block's record."""
    number, offset = places(folder)[block]
    path = segment_of(folder, number)
    raw = bytearray(path.read_bytes())
    for at in places_in_it:
        raw[offset + at] ^= mask
    path.write_bytes(raw)


def test_a_whole_directory_is_a_whole_hit(cache):
    assert loaded_of(cache[0])[0] == BLOCKS


@pytest.mark.parametrize(
    ("block", "at"), [(0, 45), (4, 140), (4, 300), (BLOCKS - 1, 160), (BLOCKS - 1, 300)]
)
def test_a_flipped_bit_ends_the_hit_at_its_block(cache, block, at):
    """Namespace, a group's length, a checksum, a payload."""
    change(cache[0], block, at, mask=1 << at % 8)
    assert loaded_of(cache[0])[0] == block


def test_without_its_checksum_a_flipped_bit_would_be_another_reply(cache, monkeypatch):
    """Negative control: the damage is one that the model would notice."""
    change(cache[0], 1, *range(200, 1000, 7), mask=0x55)
    decode = disk_segments.decode_header

    def trusting(raw, nonce):
        header = decode(raw, nonce)
        return header and replace(header, checksums=(0,) * len(header.checksums))

    monkeypatch.setattr(disk_segments, "decode_header", trusting)
    monkeypatch.setattr(disk_segments, "zlib", SimpleNamespace(crc32=lambda group: 0))
    engine = engine_of(tier_in(cache[0]))
    found = served(engine, PROMPT)
    engine.close()
    assert engine.scheduler.stats.loaded_tokens == LONG
    with pytest.raises(AssertionError):
        assert_uncached(found, PROMPT)


def test_swapped_blocks_are_misses(cache):
    folder, size = cache
    (number, one), (other, two) = places(folder)[2], places(folder)[3]
    assert number == other
    path = segment_of(folder, number)
    raw = bytearray(path.read_bytes())
    raw[one : one + size], raw[two : two + size] = raw[two : two + size], raw[one : one + size]
    path.write_bytes(raw)
    # The index points at the places before. They were stored anew, and without the index the
    # records say what they are.
    assert loaded_of(folder)[0] == 2
    (folder / "index.sqlite").unlink()
    assert loaded_of(folder)[0] == BLOCKS


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_truncated_segment_ends_the_hit(cache, share):
    path = segment_of(cache[0])
    os.truncate(path, int(share * path.stat().st_size))
    assert loaded_of(cache[0])[0] < BLOCKS


def test_blocks_of_other_weights_under_the_same_tokens_are_misses(cache):
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    assert loaded_of(cache[0], model=model)[0] == 0
    assert loaded_of(cache[0])[0] == BLOCKS


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("preallocate", NO_SPACE),
        ("write", NO_SPACE),
        ("write", BAD_DEVICE),
        ("sync", BAD_DEVICE),
        ("sync_directory", BAD_DEVICE),
        ("commit", BAD_DEVICE),
        ("commit", NO_SPACE),
    ],
)
def test_a_device_that_takes_nothing_costs_nothing_but_the_cache(tmp_path, kind, code):
    disk = FaultDisk()
    tiers = []

    def open_tier(namespace, sizes):
        tiers.append(tier_in(tmp_path / "cache", disk)(namespace, sizes))
        disk.fail = {(kind, "all"): code}
        return tiers[0]

    engine = engine_of(open_tier)
    assert_uncached(served(engine, PROMPT), PROMPT)
    tiers[0].flush()
    stats = tiers[0].stats()
    assert stats.errors
    assert stats.rejected == BLOCKS
    # The device is well again: what comes now is kept.
    disk.fail = {}
    engine.index.clear()
    assert_uncached(served(engine, PROMPT), PROMPT)
    engine.close()
    assert loaded_of(tmp_path / "cache")[0] == BLOCKS


@pytest.mark.parametrize("numbers", [["all"], [4], [2, 3, 7]])
def test_read_errors_are_misses(cache, numbers):
    disk = FaultDisk()

    def open_tier(namespace, sizes):
        tier = tier_in(cache[0], disk)(namespace, sizes)
        disk.counts.clear()
        disk.fail = {("read", number): BAD_DEVICE for number in numbers}
        return tier

    engine = engine_of(open_tier)
    assert_uncached(served(engine, PROMPT), PROMPT)
    assert engine.scheduler.stats.loaded_tokens < LONG
    engine.close()


@pytest.mark.parametrize("most", [61, 999])
def test_short_reads_are_whole_hits(cache, most):
    assert loaded_of(cache[0], FaultDisk(read_at_most=most))[0] == BLOCKS


def test_a_directory_in_use_or_not_writable_is_refused_at_the_start(cache):
    folder = cache[0]
    first = engine_of(tier_in(folder))
    with pytest.raises(StoreError, match="in use by another server"):
        engine_of(tier_in(folder))
    assert_uncached(served(first, PROMPT), PROMPT)
    first.close()
    with pytest.raises(StoreError, match="make it writable"):
        engine_of(tier_in(folder, FaultDisk(fail={("open", "all"): READ_ONLY})))
    # Read alone it serves, stores nothing and changes nothing.
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert loaded_of(folder, read_only=True)[0] == BLOCKS
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
