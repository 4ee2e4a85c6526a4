"""Memory, windows and the chain: what is kept, what goes first, and that a pin holds."""

import hashlib
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finwhale.tiers.chain import TierChain
from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig
from finwhale.tiers.memory_store import OVERHEAD_BYTES, MemoryStore
from finwhale.tiers.tier import Retention, StoreError, Tier, TierStats
from finwhale.tiers.window_pool import WindowPool
from tests.fault_disk import FaultDisk

GROUP = 100
BLOCK_BYTES = 2 * GROUP + OVERHEAD_BYTES


def key_of(n) -> bytes:
    return hashlib.sha256(f"block {n}".encode()).digest()


def groups_of(n) -> tuple[bytes, ...]:
    return tuple(hashlib.shake_256(f"{n} {i}".encode()).digest(GROUP) for i in range(2))


def memory_of(blocks: float, **options) -> MemoryStore:
    return MemoryStore(int(blocks * BLOCK_BYTES), **options)


def put(tier: Tier, *numbers, after=None, **how) -> list[bool]:
    """Store blocks, each behind the one before; the first behind `after` or at a root."""
    taken, before = [], after
    for n in numbers:
        parent = b"" if before is None else key_of(before)
        place = {"tokens": (0, 64), "parent": parent}
        taken.append(tier.store(key_of(n), groups_of(n), **place, **how))
        before = n
    return taken


def held(tier: Tier, *numbers, **how) -> list[int]:
    return [n for n in numbers if tier.lookup([key_of(n)], **how)]


# Memory.


def test_memory_gives_back_what_it_took_and_counts_it():
    memory: Tier = memory_of(8)
    assert put(memory, 0, 1, 2) == [True] * 3
    assert memory.load(key_of(1)) == groups_of(1)
    assert memory.load(key_of(7)) is None
    assert memory.lookup([key_of(0), key_of(1), key_of(9), key_of(2)]) == 2
    assert memory.lookup([]) == 0
    stats = memory.stats()
    assert (stats.hits, stats.misses, stats.stored, stats.num_blocks) == (1, 1, 3, 3)
    assert (stats.loaded_bytes, stats.num_bytes) == (2 * GROUP, 3 * BLOCK_BYTES)
    assert stats.load_s > 0
    assert stats.store_s > 0
    assert memory.figures() == {"memory": memory.stats()}
    memory.close()
    assert (memory.stats().num_blocks, memory.stats().num_bytes) == (0, 0)


def test_memory_keeps_its_own_copy_of_what_may_change():
    memory, block = memory_of(1), bytearray(b"x" * GROUP)
    memory.store(key_of(0), [block, memoryview(block)], tokens=(0, 64))
    block[0] = 0
    assert memory.load(key_of(0)) == (b"x" * GROUP, b"x" * GROUP)


def test_memory_evicts_a_chain_from_its_end_and_the_least_recently_used_first():
    memory = memory_of(6)
    put(memory, 0, 1, 2)
    put(memory, 10, 11, 12)
    # Only the end of the first chain is asked for: it is used, and all before it with it.
    memory.load(key_of(2))
    put(memory, 20)
    assert held(memory, 0, 1, 2, 10, 11, 12, 20) == [0, 1, 2, 10, 11, 20]
    put(memory, 21, 22, after=20)
    assert held(memory, 0, 1, 2, 10, 11, 20, 21, 22) == [0, 1, 2, 20, 21, 22]
    # A block without those before it pushes nothing out.
    assert put(memory, 31, after=30) == [False]
    memory.touch([key_of(n) for n in (0, 1, 2, 3)])
    put(memory, 30)
    assert held(memory, 0, 1, 2, 20, 21, 22, 30) == [0, 1, 2, 20, 21, 30]
    assert memory.stats().evicted == 4


def test_a_chain_longer_than_the_memory_keeps_its_beginning():
    memory = memory_of(3)
    assert put(memory, 0, 1, 2, 3, 4) == [True, True, True, False, False]
    assert held(memory, *range(5)) == [0, 1, 2]
    assert memory.stats().rejected == 2


def test_without_parents_the_beginning_would_go():
    """Negative control of the chains: the same blocks, nobody knows whose they are."""
    memory = memory_of(3)
    for n in range(5):
        put(memory, n)
    assert held(memory, *range(5)) == [2, 3, 4]


def test_lower_classes_go_first_and_never_push_out_higher_ones():
    memory = memory_of(3)
    put(memory, 0, retention=Retention.LONG)
    put(memory, 1, retention=Retention.BRIEF)
    put(memory, 2)
    memory.load(key_of(1))
    put(memory, 3)
    assert held(memory, 0, 1, 2, 3) == [0, 2, 3]
    assert put(memory, 4, retention=Retention.BRIEF) == [False]
    put(memory, 5, 6, retention=Retention.LONG)
    assert held(memory, 0, 2, 3, 5, 6) == [0, 5, 6]
    assert put(memory, 7) == [False]


def test_pinned_blocks_and_those_before_them_stay():
    memory = memory_of(3)
    put(memory, 0, 1)
    put(memory, 2)
    assert not memory.pin(key_of(9))
    assert memory.pin(key_of(1))
    assert memory.pin(key_of(1))
    put(memory, 3)
    put(memory, 4)
    assert held(memory, 0, 1, 2, 3, 4) == [0, 1, 4]
    assert not memory.evict(key_of(1))
    memory.unpin(key_of(1))
    put(memory, 5)
    assert held(memory, 0, 1, 4, 5) == [0, 1, 5]
    memory.unpin(key_of(1))
    memory.unpin(key_of(1))
    put(memory, 6)
    put(memory, 7)
    assert held(memory, 0, 1, 5, 6, 7) == [5, 6, 7]
    assert memory.evict(key_of(7))
    assert not memory.evict(key_of(7))


def test_a_memory_full_of_pins_turns_away():
    memory = memory_of(2)
    put(memory, 0, 1)
    memory.pin(key_of(1))
    assert put(memory, 2) == [False]
    assert held(memory, 0, 1, 2) == [0, 1]


def test_tenants_share_nothing_but_the_space():
    memory = memory_of(4, tenant_quota_bytes=2 * BLOCK_BYTES)
    put(memory, 0, tenant="a")
    assert held(memory, 0, tenant="b") == []
    assert memory.load(key_of(0), tenant="b") is None
    assert not memory.pin(key_of(0), tenant="b")
    assert not memory.evict(key_of(0), tenant="b")
    # The quota takes from its own tenant alone.
    put(memory, 1, tenant="b")
    put(memory, 2, tenant="b")
    put(memory, 3, tenant="b")
    assert held(memory, 0, tenant="a") == [0]
    assert held(memory, 1, 2, 3, tenant="b") == [2, 3]
    memory.pin(key_of(2), tenant="b")
    memory.pin(key_of(3), tenant="b")
    assert put(memory, 4, tenant="b") == [False]
    assert put(memory_of(4, tenant_quota_bytes=0), 0) == [False]


@pytest.mark.parametrize(
    "options", [{"max_bytes": 0}, {"max_bytes": 9, "tenant_quota_bytes": -1}], ids=str
)
def test_memory_sizes_that_make_no_sense_are_refused(options):
    with pytest.raises(StoreError, match=list(options)[-1]):
        MemoryStore(**options)
    with pytest.raises(StoreError, match="tokens: got"):
        memory_of(1).store(key_of(0), groups_of(0), tokens=(64, 64))


def test_a_block_larger_than_the_memory_pushes_nothing_out():
    memory = memory_of(2)
    put(memory, 0, 1)
    assert not memory.store(key_of(2), [bytes(3 * BLOCK_BYTES)], tokens=(0, 64))
    assert held(memory, 0, 1) == [0, 1]


def test_memory_counts_at_least_what_python_takes():
    blocks, groups = 300, 8
    memory = MemoryStore(1 << 30)
    keys = [key_of(n) for n in range(blocks)]
    tracemalloc.start()
    for n in range(blocks):
        content = [bytes([n % 251]) * 100 for _ in range(groups)]
        parent = keys[n - 1] if n else b""
        memory.store(keys[n], content, tokens=(0, 64), tenant="t", parent=parent)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * memory.stats().num_bytes < taken <= memory.stats().num_bytes


_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("store", "load", "pin", "unpin", "touch")),
        st.integers(0, 4),
        st.integers(0, 5),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(_ACTIONS, st.integers(1, 9))
def test_any_use_of_the_memory_keeps_bounds_pins_and_whole_chains(actions, blocks):
    """Five chains of six blocks; one is offered behind one that is here, as the engine does."""
    memory, pins = memory_of(blocks), {}
    for action, chain, place in actions:
        keys = [key_of((chain, n)) for n in range(6)]
        found = memory.lookup(keys)
        if action == "store" and found < 6:
            parent = keys[found - 1] if found else b""
            content = groups_of((chain, found))
            taken = memory.store(keys[found], content, tokens=(0, 64), parent=parent)
            assert taken == (memory.lookup(keys) == found + 1)
        elif action == "load":
            assert (memory.load(keys[place]) is not None) == (place < found)
        elif action == "pin":
            pins[keys[place]] = pins.get(keys[place], 0) + memory.pin(keys[place])
        elif action == "unpin" and pins.get(keys[place]):
            memory.unpin(keys[place])
            pins[keys[place]] -= 1
        elif action == "touch":
            memory.touch(keys[: place + 1])
        stats = memory.stats()
        assert stats.num_bytes == stats.num_blocks * BLOCK_BYTES <= memory.max_bytes
        whole = 0
        for other in range(5):
            chain_keys = [key_of((other, n)) for n in range(6)]
            length = memory.lookup(chain_keys)
            # No block is here without all before it.
            assert not any(memory.lookup([key]) for key in chain_keys[length:])
            whole += length
        assert whole == stats.num_blocks
        assert all(memory.lookup([key]) for key, count in pins.items() if count)


# Windows.


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pool_of(max_bytes=10, lifetime_s=60.0):
    clock = Clock()
    return WindowPool(max_bytes, lifetime_s, clock=clock), clock


def test_the_longest_prefix_with_windows_answers():
    pool, _ = pool_of(100)
    assert pool.longest([b"0", b"1"]) is None
    pool.put(b"0", "first", 10)
    pool.put(b"1", "second", 10)
    assert pool.longest([b"0", b"1", b"2"]) == (2, "second")
    assert pool.longest([b"0"]) == (1, "first")
    assert pool.longest([]) is None
    assert pool.stats().hits == 2


def test_windows_stay_within_their_bytes_the_oldest_go():
    pool, _ = pool_of(10)
    assert pool.put(b"a", 1, 5)
    assert pool.put(b"b", 2, 5)
    assert pool.renew(b"a")
    assert pool.put(b"c", 3, 1)
    assert [key in pool for key in (b"a", b"b", b"c")] == [True, False, True]
    # In place of an older one, which must not answer for one that did not fit.
    assert pool.put(b"c", 4, 5)
    assert pool.stats().num_bytes == 10
    assert not pool.put(b"c", 5, 11)
    assert (b"c" in pool, pool.stats().num_bytes, pool.stats().num_snapshots) == (False, 5, 1)
    assert (pool.stats().evicted, pool.stats().rejected) == (1, 1)
    pool.clear()
    assert (pool.stats().num_bytes, pool.stats().num_snapshots) == (0, 0)
    assert not pool_of(0)[0].put(b"a", 1, 1)


def test_windows_live_their_time_since_they_were_of_use():
    pool, clock = pool_of(100, lifetime_s=60)
    pool.put(b"a", 1, 5)
    pool.put(b"b", 2, 5)
    clock.now += 59.9
    assert pool.longest([b"a"]) == (1, 1)
    clock.now += 0.1
    assert (b"a" in pool, b"b" in pool) == (True, False)
    assert not pool.renew(b"b")
    assert pool.longest([b"b"]) is None
    assert (pool.stats().expired, pool.stats().num_bytes) == (1, 5)
    clock.now += 60
    assert pool.longest([b"a"]) is None
    assert pool.stats().expired == 2


def test_windows_that_are_too_old_go_without_being_asked_for():
    pool, clock = pool_of(100, lifetime_s=60)
    assert pool.expire() is None
    pool.put(b"a", 1, 5)
    clock.now += 20
    pool.put(b"b", 2, 5)
    assert pool.expire() == 40
    clock.now += 40
    assert pool.expire() == 20
    assert (pool.stats().expired, pool.stats().num_bytes) == (1, 5)
    clock.now += 1000
    assert pool.expire() is None
    assert (pool.stats().expired, pool.stats().num_bytes) == (2, 0)


@pytest.mark.parametrize("lifetime_s", [0, -1, float("nan")])
def test_a_lifetime_that_is_none_is_refused(lifetime_s):
    with pytest.raises(ValueError, match="lifetime_s: got"):
        WindowPool(10, lifetime_s)
    with pytest.raises(ValueError, match="max_bytes: got -1"):
        WindowPool(-1, 1)


# The chain.


def test_a_chain_writes_to_both_and_promotes_what_it_finds_behind():
    memory, behind = memory_of(2), memory_of(9)
    chain: Tier = TierChain(memory, behind)
    assert put(chain, 0, 1, 2, 3) == [True] * 4
    assert held(memory, 0, 1, 2, 3) == [0, 1]
    assert held(behind, 0, 1, 2, 3) == [0, 1, 2, 3]
    for n in (0, 1):
        memory.evict(key_of(n))
    assert chain.lookup([key_of(n) for n in range(5)]) == 4
    assert chain.load(key_of(0)) == groups_of(0)
    assert held(memory, 0, 1, 2, 3) == [0]
    assert chain.load(key_of(0)) == groups_of(0)
    figures = chain.figures()
    assert set(figures) == {"memory"}  # two of one kind: the one behind has the name
    assert (memory.stats().hits, behind.stats().hits) == (1, 1)
    assert chain.load(key_of(8)) is None
    total = chain.stats()
    assert (total.hits, total.misses) == (2, 1)
    assert chain.evict(key_of(0))
    assert not chain.lookup([key_of(0)])
    assert not chain.evict(key_of(0))
    chain.flush()
    chain.close()
    assert chain.stats().num_blocks == 0


@pytest.mark.parametrize("order", ["mbmb", "bmbm", "mmbb", "bbmm", "m-bm", "b--b", "----"])
def test_a_prefix_may_lie_here_and_there(order):
    memory, behind = memory_of(9), memory_of(9)
    for n, place in enumerate(order):
        if place != "-":
            put(memory if place == "m" else behind, n)
    want = order.index("-") if "-" in order else len(order)
    assert TierChain(memory, behind).lookup([key_of(n) for n in range(len(order))]) == want


def test_a_promoted_block_remembers_its_parent():
    memory, behind = memory_of(2), memory_of(9)
    chain = TierChain(memory, behind)
    put(behind, 0, 1)
    chain.load(key_of(0))
    chain.load(key_of(1), parent=key_of(0))
    put(memory, 5)
    assert held(memory, 0, 1, 5) == [0, 5]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(("store", "load", "pin", "unpin", "evict")), st.integers(0, 3)),
        max_size=50,
    )
)
def test_a_pin_holds_in_the_chain_whatever_comes_and_goes(actions):
    memory, behind = memory_of(1), memory_of(3)
    chain, pins = TierChain(memory, behind), dict.fromkeys(range(4), 0)
    for action, n in actions:
        if action == "store":
            put(chain, n)
        elif action == "load":
            chain.load(key_of(n))
        elif action == "evict":
            chain.evict(key_of(n))
        elif action == "pin":
            pins[n] += chain.pin(key_of(n))
        elif pins[n]:
            chain.unpin(key_of(n))
            pins[n] -= 1
        assert held(chain, *(n for n in pins if pins[n])) == [n for n in pins if pins[n]]
    for n, count in pins.items():
        for _ in range(count):
            chain.unpin(key_of(n))
    # Nothing stays pinned by mistake.
    assert not any(block.pins for place in (memory, behind) for block in place._held.values())


def disk_of(folder, disk=None) -> DiskStore:
    config = DiskStoreConfig(
        directory=folder, namespace=bytes(32), max_bytes=3 << 16, segment_bytes=1 << 16
    )
    return DiskStore(config, disk or FaultDisk())


def test_memory_in_front_of_a_disk(tmp_path):
    chain = TierChain(memory_of(2), disk_of(tmp_path / "cache"))
    put(chain, 0, 1, 2)
    chain.flush()
    assert [chain.load(key_of(n)) for n in range(4)] == [*map(groups_of, range(3)), None]
    figures = chain.figures()
    assert (figures["memory"].hits, figures["disk"].hits) == (2, 1)
    assert (figures["memory"].loaded_bytes, figures["disk"].loaded_bytes) == (4 * GROUP, 2 * GROUP)
    assert figures["disk"].stored == 3
    # A record of two groups of 100 bytes fills a page.
    assert figures["disk"].stored_bytes == 3 * 4096
    assert figures["disk"].load_s > 0
    assert figures["disk"].store_s > 0
    chain.close()
    # The memory is gone with the process, the disk is not.
    again = TierChain(memory_of(2), disk_of(tmp_path / "cache"))
    assert [again.load(key_of(n)) for n in range(3)] == list(map(groups_of, range(3)))
    assert again.figures()["disk"].hits == 3
    again.close()


def test_a_damaged_block_behind_the_memory_is_a_miss_and_is_not_promoted(tmp_path):
    chain = TierChain(memory_of(4), disk_of(tmp_path / "cache"))
    put(chain.behind, 0)
    chain.flush()
    (path,) = (tmp_path / "cache").glob("segment-*")
    data = bytearray(path.read_bytes())
    data[4096 + 300] ^= 1
    path.write_bytes(data)
    assert chain.load(key_of(0)) is None
    assert chain.memory.stats().num_blocks == 0
    assert chain.figures()["disk"].damaged == 1
    chain.close()


def test_touching_a_chain_on_disk_makes_its_beginning_the_last_to_go(tmp_path):
    with disk_of(tmp_path / "cache") as store:
        put(store, 0, 1, 2)
        store.flush()
        store.touch([key_of(n) for n in range(3)])
    with disk_of(tmp_path / "cache") as store:
        ticks = [store._find(store._address(key_of(n), "")).last_used for n in range(3)]
        assert ticks == sorted(ticks, reverse=True)
        assert len(set(ticks)) == 3


def test_sums_of_counters_are_counter_by_counter():
    a, b = TierStats(hits=1, load_s=0.5, num_bytes=7), TierStats(hits=2, misses=4, load_s=0.25)
    assert a + b == TierStats(hits=3, misses=4, load_s=0.75, num_bytes=7)
