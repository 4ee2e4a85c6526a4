"""The memory tier and the windows' lifetime in an engine: the same bits, whatever was kept where.

The reference is `tests/uncached_engine.py`, one whole pass from nothing.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from finwhale.cache.block_bytes import group_bytes
from finwhale.cache.paged_pools import PagedLayout
from finwhale.config import ConfigError
from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine
from finwhale.engine.prefill import exact_decoder_rows, exact_encoder_rows
from finwhale.engine.request import SamplingParams
from finwhale.model import Numerics
from finwhale.tiers.chain import TierChain
from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig
from finwhale.tiers.memory_store import OVERHEAD_BYTES, MemoryStore
from finwhale.tiers.window_pool import WindowPool
from tests.fault_disk import FaultDisk
from tests.models import token_ids, unit_model
from tests.uncached_engine import drain, expected, scheduler_of, sequence_of

MODEL = unit_model(Numerics())
TEXT = MODEL.config.text_config
BLOCK = 8
REACH = exact_encoder_rows(TEXT) + exact_decoder_rows(TEXT)
LONG = -(-(REACH + 5 * BLOCK) // BLOCK) * BLOCK
IDS = token_ids(1, LONG + 40, seed=5)[0].tolist()
OTHER = list(reversed(IDS[:LONG]))
GREEDY = SamplingParams(max_new_tokens=3, temperature=0, logprobs=True)
LAYOUT = PagedLayout(config=TEXT, block_size=BLOCK, storage="fp4")
BLOCK_BYTES = LAYOUT.block_bytes + OVERHEAD_BYTES


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def engine_of(tier=None, model=MODEL, clock=None, **settings) -> Engine:
    """Return an engine whose pool is too small for two long prompts."""
    blocks = LONG // BLOCK + 8
    plain = {"block_size": BLOCK, "num_blocks": blocks, "max_sequences": 4, "max_batch_tokens": 64}
    config = EngineConfig(**{"kernels": "numba", "poison": True, **plain, **settings})
    engine = Engine(model, config, open_tier=None if tier is None else lambda *_: tier)
    if clock is not None:
        config = engine.config
        lifetime = config.snapshot_lifetime_s
        windows = WindowPool(config.snapshot_bytes, lifetime, clock=clock)
        engine.scheduler.windows = windows
    return engine


def served(engine, prompt, params=GREEDY, salt=""):
    name = engine.add(prompt, params, salt=salt)
    return drain(engine)[name, 0]


def assert_uncached(found, prompt, params=GREEDY, model=MODEL):
    want = expected(model, prompt, found.tokens, params, seed=11, kernels="numba")
    assert found.results == want


def disk_of(folder, namespace=bytes(32)) -> DiskStore:
    config = DiskStoreConfig(
        directory=folder,
        namespace=namespace,
        max_bytes=3 << 20,
        segment_bytes=1 << 20,
        group_bytes=group_bytes(LAYOUT),
    )
    return DiskStore(config, FaultDisk())


@pytest.fixture(scope="module")
def written():
    """A memory that holds every whole block of IDS[:LONG]; to be read only."""
    memory = MemoryStore(1 << 30)
    engine = engine_of(memory)
    served(engine, IDS[:LONG])
    assert memory.stats().num_blocks == LONG // BLOCK
    return memory


@pytest.fixture
def memory(written):
    """The same in a memory of one's own."""
    own = MemoryStore(1 << 30)
    copied(written, own)
    return own


def copied(memory: MemoryStore, *into) -> None:
    for address, block in memory._held.items():
        parent = b"" if block.parent is None else block.parent[1]
        for tier in into:
            tier.store(address[1], block.groups, tokens=(0, BLOCK), parent=parent)
            tier.flush()


@pytest.mark.parametrize(
    ("place", "more"),
    [
        ("memory", 1),
        ("memory", 30),
        ("disk", 1),
        ("disk", 30),
        ("memory and disk", 1),
        ("memory and disk", BLOCK),
        ("both", 1),
        ("nowhere", 1),
    ],
)
def test_a_hit_in_memory_equals_one_on_disk_and_a_cold_run(written, tmp_path, place, more):
    memory, disk = MemoryStore(1 << 30), disk_of(tmp_path / "cache")
    copied(written, *([memory] if "memory" in place or place == "both" else []))
    copied(written, *([disk] if "disk" in place or place == "both" else []))
    if place == "memory and disk":
        # Even blocks here, odd ones there.
        for n, (_, key) in enumerate(list(memory._held)):
            (memory if n % 2 else disk).evict(key)
        disk.flush()
    engine = engine_of(TierChain(memory, disk))
    prompt = IDS[: LONG + more]
    assert_uncached(served(engine, prompt), prompt)
    loaded = engine.scheduler.stats.loaded_tokens
    assert loaded == (0 if place == "nowhere" else LONG)
    figures, blocks = engine.tier.figures(), LONG // BLOCK
    by_tier = figures["memory"].hits, figures["disk"].hits
    assert (
        by_tier
        == {
            "memory": (blocks, 0),
            "disk": (0, blocks),
            "memory and disk": (blocks - blocks // 2, blocks // 2),
            "both": (blocks, 0),
            "nowhere": (0, 0),
        }[place]
    )
    # What came from the disk is in memory now.
    assert all(address in memory._held for address in written._held)
    engine.close()


def test_spoiled_bytes_in_memory_would_be_seen(memory):
    """Negative control: what is loaded is what is read."""
    for held in memory._held.values():
        held.groups = tuple(bytes(255 - byte for byte in group) for group in held.groups)
    prompt = IDS[: LONG + 3]
    right, wrong = served(engine_of(), prompt), served(engine_of(memory), prompt)
    assert wrong.results != right.results


def test_windows_outlive_their_blocks_in_the_pool_and_expire():
    """Blocks go to the memory tier, windows stay: nothing is replayed, until their time is over."""
    clock, memory = Clock(), MemoryStore(1 << 30)
    engine = engine_of(memory, clock=clock, snapshot_lifetime_s=60)
    stats, prompt = engine.scheduler.stats, IDS[: LONG + 5]
    served(engine, prompt)
    served(engine, OTHER)  # pushes the blocks of the first out of the pool
    assert stats.restored_windows == 0
    clock.now += 59
    again = [*prompt, 7, 7, 7]
    assert_uncached(served(engine, again), again)
    assert stats.restored_windows == 1
    assert (stats.loaded_tokens > 0, stats.replayed_tokens) == (True, 0)
    served(engine, OTHER)
    clock.now += 60
    loaded, last = stats.loaded_tokens, [*prompt, 9, 9]
    assert_uncached(served(engine, last), last)
    assert stats.restored_windows == 2  # OTHER's own, in between
    assert stats.loaded_tokens > loaded
    assert stats.replayed_tokens > 0
    assert engine.scheduler.windows.stats().expired > 0


def test_spoiled_windows_would_be_seen():
    """Negative control: what is restored is what is read."""
    engine = engine_of(MemoryStore(1 << 30))
    prompt = IDS[: LONG + 5]
    served(engine, prompt)
    again = [*prompt, 7, 7, 7]
    right = served(engine_of(), again)
    for kept in engine.scheduler.windows._kept.values():
        kept.value.bitwise_xor_(1)
    wrong = served(engine, again)
    assert engine.scheduler.stats.restored_windows == 1
    assert wrong.results != right.results


def test_windows_of_another_tenant_or_other_weights_are_never_restored():
    engine = engine_of(MemoryStore(1 << 30))
    prompt = IDS[: LONG + 5]
    served(engine, prompt, salt="a")
    assert_uncached(served(engine, prompt, salt="b"), prompt)
    assert engine.scheduler.stats.restored_windows == 0
    assert engine.scheduler.stats.loaded_tokens == 0
    # Control: the first tenant again.
    served(engine, prompt, salt="a")
    assert engine.scheduler.stats.restored_windows == 1


def test_a_memory_shared_by_engines_serves_each_namespace_its_own(memory):
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        model.head.weight[0, 0] += 1
    other = engine_of(memory, model)
    before = memory.stats().hits
    found = served(other, IDS[:LONG])
    assert_uncached(found, IDS[:LONG], model=model)
    assert memory.stats().hits == before
    assert other.scheduler.stats.loaded_tokens == 0
    same = engine_of(memory)
    served(same, IDS[:LONG])
    assert same.scheduler.stats.loaded_tokens > 0


@pytest.mark.parametrize("blocks", [0.5, 3, 40])
def test_neighbours_and_a_memory_of_any_size_change_no_bit(tmp_path, blocks):
    memory = MemoryStore(int(blocks * BLOCK_BYTES))
    engine = engine_of(
        TierChain(memory, disk_of(tmp_path / "cache")), num_blocks=90, snapshot_bytes=30_000
    )
    prompts = [IDS[: LONG + 3], IDS[:LONG], OTHER, OTHER[:50] + IDS[:60], IDS[: LONG - 9]]
    for _ in range(2):
        names = [engine.add(prompt, GREEDY) for prompt in prompts]
        found = drain(engine)
        for name, prompt in zip(names, prompts, strict=True):
            assert_uncached(found[name, 0], prompt)
        assert memory.stats().num_bytes <= memory.max_bytes
    engine.close()


def test_loading_that_costs_more_than_it_saves_is_left_out(memory):
    prompt = IDS[: LONG + 3]
    engine = engine_of(memory)
    served(engine, prompt)
    first_row = engine.scheduler._first_row(len(prompt), LONG, 0)
    assert first_row >= BLOCK
    # At this cost the rows saved are exactly those that loading takes; a bit less pays.
    for factor, is_loaded in ((1, False), (1.01, False), (0.99, True)):
        gated = engine_of(memory, load_cost=factor * first_row / LONG)
        assert_uncached(served(gated, prompt), prompt)
        stats = gated.scheduler.stats
        assert (stats.loaded_tokens, stats.unloaded_tokens) == (
            (LONG, 0) if is_loaded else (0, LONG)
        )


def test_a_prompt_loads_up_to_its_windows_where_more_brings_nothing(memory):
    """Rows behind the saved windows run anyway, so their blocks are made again, not loaded."""
    scheduler = engine_of(memory).scheduler
    keys = [bytes([n]) * 32 for n in range(LONG // BLOCK)]
    length = LONG + 1
    everything = len(keys)
    assert scheduler._num_worth_loading(length, [], keys) == everything
    scheduler.windows.put(keys[-3], "rows", 1)
    assert scheduler._num_worth_loading(length, [], keys) == everything - 2
    scheduler.windows.put(keys[-1], "rows", 1)
    assert scheduler._num_worth_loading(length, [], keys) == everything
    assert scheduler._num_worth_loading(length, keys, []) == 0
    # Windows at hand already: only what moves the start by a block is loaded.
    assert scheduler._num_worth_loading(length, keys[:-2], keys[-2:]) == 2
    scheduler.windows.clear()
    scheduler.windows.put(keys[-3], "rows", 1)
    assert scheduler._num_worth_loading(length, keys[:-2], keys[-2:]) == 0


@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "control"])
def test_a_preempted_sequences_blocks_stay_in_the_memory(pins):
    """Negative control: without its pins others push them out."""
    memory = MemoryStore(int((LONG // BLOCK + 2) * BLOCK_BYTES))
    engine = engine_of(memory, snapshot_bytes=0)
    if not pins:
        memory.pin = lambda *_, **__: False
    prompt = IDS[:LONG]
    engine.add(prompt, GREEDY, request_id="x")
    while not engine._sequences["x", 0].num_new:
        engine.step()
    assert engine.preempt("x")
    waiting = engine._sequences["x", 0]
    keys = [key for _, key in memory._held]
    assert len(waiting.pinned) == (len(keys) if pins else 0)
    for n in range(30):
        memory.store(bytes([n]) * 32, [bytes(BLOCK_BYTES - OVERHEAD_BYTES)], tokens=(0, BLOCK))
    assert (memory.lookup(keys) == len(keys)) == pins
    drain(engine)
    assert not any(held.pins for held in memory._held.values())


def test_a_preempted_sequence_that_is_cancelled_takes_its_pins_along():
    memory = MemoryStore(1 << 30)
    engine = engine_of(memory)
    engine.add(IDS[:LONG], GREEDY, request_id="x")
    while not engine._sequences["x", 0].num_new:
        engine.step()
    engine.preempt("x")
    assert any(held.pins for held in memory._held.values())
    engine.cancel("x")
    engine.step()
    assert not any(held.pins for held in memory._held.values())


def test_what_is_in_use_is_touched_as_a_whole_chain():
    touched = []
    memory = MemoryStore(1 << 30)
    memory.touch = lambda keys, *, tenant="": touched.append((list(keys), tenant))
    engine = engine_of(memory)
    served(engine, IDS[: 3 * BLOCK + 1], salt="a")
    ((keys, tenant),) = touched
    assert (len(keys), tenant) == (3, "a")
    assert [key for _, key in memory._held] == keys


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("snapshot_lifetime_s", 0.0),
        ("snapshot_lifetime_s", float("nan")),
        ("load_cost", -0.1),
        ("load_cost", float("inf")),
        ("load_cost", float("nan")),
        ("snapshot_bytes", -1),
    ],
)
def test_settings_that_make_no_sense_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"engine.{name}: got"):
        EngineConfig(**{name: value})


def test_a_scheduler_alone_gets_windows_of_its_settings():
    scheduler = scheduler_of(replace(EngineConfig(), snapshot_bytes=5, snapshot_lifetime_s=7))
    assert (scheduler.windows.max_bytes, scheduler.windows.lifetime_s) == (5, 7)
    scheduler.queue(sequence_of(0, [1, 2, 3], 1))
    assert scheduler.schedule()


class Interrupted(MemoryStore):
    """Memory whose `at`-th store is interrupted, as by Ctrl-C in a slow write."""

    def __init__(self, at: int) -> None:
        super().__init__(1 << 30)
        self.at, self.calls = at, 0

    def store(self, *args, **options):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return super().store(*args, **options)


@pytest.mark.parametrize("at", [1, 10, 12, 25])
def test_an_interrupt_between_rows_and_their_count_changes_no_bit(at):
    """Also for whoever finds the blocks later; the caller may simply step again."""
    tier = Interrupted(at)
    engine = engine_of(tier, num_blocks=80, max_batch_tokens=64)
    prompts = {engine.add(ids, GREEDY): ids for ids in (IDS[:LONG], OTHER)}
    found = {name: [] for name in prompts}
    interrupts = 0
    while engine.has_work:
        try:
            for output in engine.step():
                found[output.request_id] += output.new
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    for name, ids in prompts.items():
        tokens = [result.token for result in found[name]]
        assert found[name] == expected(MODEL, ids, tokens, GREEDY, seed=11, kernels="numba")
    for ids in (IDS[: LONG + 7], [*OTHER, *IDS[:5]]):
        assert_uncached(served(engine, ids), ids)


class Full(MemoryStore):
    """Memory that takes nothing while it is full, and outlives engines."""

    is_full = True

    def store(self, *args, **options):
        if self.is_full:
            self._stats.rejected += 1
            return False
        return super().store(*args, **options)

    def close(self):
        return None


def test_what_was_turned_away_is_offered_again_by_the_next_turn():
    tier = Full(1 << 30)
    engine = engine_of(tier, num_blocks=80)
    served(engine, IDS[:LONG])
    assert tier.stats().num_blocks == 0
    tier.is_full = False
    served(engine, IDS[: LONG + 40])
    again = engine_of(tier, num_blocks=80)
    found = served(again, IDS[: LONG + 40])
    assert_uncached(found, IDS[: LONG + 40])
    # All whole blocks but that of the last token.
    assert again.scheduler.stats.loaded_tokens == (LONG + 39) // BLOCK * BLOCK


def test_new_weights_leave_no_watcher_behind():
    engine = engine_of(None, copy.deepcopy(MODEL))
    for _ in range(3):
        engine.weights_changed()
    assert len(engine.allocator._watchers) == 1


@pytest.mark.parametrize("field", ["CPU_NAME", "CPU_FEATURES"])
def test_kernels_compiled_for_another_processor_share_nothing(monkeypatch, field):
    """The compiler regroups sums by processor: equal versions and instructions do not suffice."""
    from numba import config

    here = engine_of().namespace.digest()
    assert engine_of().namespace.digest() == here
    monkeypatch.setattr(config, field, "another")
    assert engine_of().namespace.digest() != here
