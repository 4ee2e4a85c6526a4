"""Blocks that come back from a slower tier: the same bits, wherever a hit ends, or a miss.

The reference is `tests/uncached_engine.py`, one whole pass from nothing. The tier here is a
dictionary that outlives engines and can lose, refuse or spoil what it holds; the last tests use
the disk.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from finwhale.cache.block_bytes import group_bytes, read_block, write_block
from finwhale.cache.disk_store import DiskStore, DiskStoreConfig
from finwhale.cache.paged_pools import PagedLayout, PagedPools
from finwhale.cache.tier import Retention, TierStats
from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine
from finwhale.engine.prefill import exact_decoder_rows, exact_encoder_rows
from finwhale.engine.request import SamplingParams
from finwhale.model import Numerics
from tests.models import token_ids, unit_model
from tests.uncached_engine import drain, expected

MODEL = unit_model(Numerics())
TEXT = MODEL.config.text_config
BLOCK = 8
# Behind this many tokens an exact start no longer begins at 0.
REACH = exact_encoder_rows(TEXT) + exact_decoder_rows(TEXT)
LONG = -(-(REACH + 5 * BLOCK) // BLOCK) * BLOCK
IDS = token_ids(1, LONG + 40, seed=5)[0].tolist()
GREEDY = SamplingParams(max_new_tokens=3, temperature=0, logprobs=True)


class Shelf:
    """A tier in memory: blocks by (namespace, tenant, key)."""

    def __init__(self) -> None:
        self.held: dict[tuple[bytes, str, bytes], tuple[bytes, ...]] = {}
        self.loads = 0
        self.lost: set[int] = set()
        self.is_closed = False

    def open(self, namespace: bytes, sizes: tuple[int, ...]) -> Shelf:
        self.namespace, self.sizes = namespace, sizes
        return self

    def lookup(self, keys, *, tenant=""):
        found = 0
        for key in keys:
            if (self.namespace, tenant, key) not in self.held:
                break
            found += 1
        return found

    def load(self, key, *, tenant=""):
        self.loads += 1
        if self.loads in self.lost:
            return None
        return self.held.get((self.namespace, tenant, key))

    def store(self, key, groups, *, tokens, tenant="", retention=Retention.NORMAL):
        assert tuple(map(len, groups)) == self.sizes
        assert tokens[1] - tokens[0] == BLOCK
        self.held[self.namespace, tenant, key] = tuple(map(bytes, groups))
        return True

    def pin(self, key, *, tenant=""):
        return False

    def unpin(self, key, *, tenant=""):
        return None

    def evict(self, key, *, tenant=""):
        return False

    def stats(self):
        return TierStats(num_blocks=len(self.held))

    def flush(self):
        return None

    def close(self):
        self.is_closed = True


def engine_of(open_tier=None, model=MODEL, **settings) -> Engine:
    plain = {"block_size": BLOCK, "num_blocks": 160, "max_sequences": 4, "max_batch_tokens": 64}
    config = EngineConfig(**{"kernels": "numba", "poison": True, **plain, **settings})
    return Engine(model, config, open_tier=open_tier)


def served(engine, prompt, params=GREEDY, salt=""):
    name = engine.add(prompt, params, salt=salt)
    return drain(engine)[name, 0]


def assert_uncached(found, prompt, params=GREEDY, model=MODEL):
    want = expected(model, prompt, found.tokens, params, seed=11, kernels="numba")
    assert found.results == want


@pytest.fixture(scope="module")
def written():
    shelf = Shelf()
    served(engine_of(shelf.open), IDS[:LONG])
    assert len(shelf.held) == LONG // BLOCK
    return shelf


@pytest.fixture
def shelf(written):
    """A tier of one's own that holds every whole block of IDS[:LONG]."""
    own = Shelf()
    own.held = dict(written.held)
    return own


def test_groups_are_all_of_a_block_and_come_back_to_another_place():
    layout = PagedLayout(config=TEXT, block_size=BLOCK, storage="fp4")
    pools = PagedPools(layout, num_blocks=3, num_slots=1, poison=True)
    assert sum(group_bytes(layout)) == layout.block_bytes
    generator = torch.Generator().manual_seed(0)
    for pool in (*pools.main.values(), *pools.index_k.values()):
        pool.copy_(torch.randint(0, 256, pool.shape, generator=generator, dtype=torch.uint8))
    taken = read_block(pools, 0)
    before = read_block(pools, 2)
    write_block(pools, 1, taken)
    assert read_block(pools, 1) == taken != before
    assert read_block(pools, 2) == before
    with pytest.raises(ValueError, match="groups: got lengths"):
        write_block(pools, 2, taken[:-1])
    assert read_block(pools, 2) == before


@pytest.mark.parametrize("more", [1, BLOCK - 1, BLOCK, BLOCK + 1, 30])
def test_a_restart_loads_the_prefix_and_answers_with_the_same_bits(shelf, more):
    prompt = IDS[: LONG + more]
    engine = engine_of(shelf.open)
    assert_uncached(served(engine, prompt), prompt)
    # The last token is never taken from a block.
    assert engine.scheduler.stats.loaded_tokens == (min(LONG, len(prompt) - 1) // BLOCK) * BLOCK
    assert engine.scheduler.stats.replayed_tokens > 0


@pytest.mark.parametrize("prefill", ["exact", "bounded", "full"])
def test_modes_read_what_their_own_kind_wrote(prefill):
    shelf = Shelf()
    cold = served(engine_of(shelf.open, prefill=prefill), IDS[:LONG])
    warm_engine = engine_of(shelf.open, prefill=prefill)
    warm = served(warm_engine, IDS[:LONG])
    loaded = warm_engine.scheduler.stats.loaded_tokens
    assert bool(loaded) == (prefill != "full")
    if prefill != "bounded":
        assert warm.results == cold.results
    # The kind of replay is in the key: an exact engine never reads a bounded one's blocks.
    other = engine_of(shelf.open, prefill="bounded" if prefill == "exact" else "exact")
    served(other, IDS[:LONG])
    assert other.scheduler.stats.loaded_tokens == 0


def test_short_prompts_load_nothing_that_would_not_save_a_block(shelf):
    shelf.loads = 0
    prompt = IDS[: exact_encoder_rows(TEXT)]
    engine = engine_of(shelf.open)
    assert_uncached(served(engine, prompt), prompt)
    assert shelf.loads == 0


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_a_block_that_is_gone_after_all_ends_the_hit_and_nothing_else(shelf, lost):
    shelf.loads, shelf.lost = 0, {lost}
    prompt = IDS[: LONG + 3]
    engine = engine_of(shelf.open)
    assert_uncached(served(engine, prompt), prompt)
    assert engine.scheduler.stats.loaded_tokens == (lost - 1) * BLOCK
    shelf.lost = set()
    held = engine.index.num_cached
    assert engine.allocator.num_free + held == engine.config.num_blocks


def test_a_tier_that_raises_ends_no_step_and_spoils_no_windows(shelf):
    """Rings are ahead when a block is offered: an error must not leave sequences uncounted."""

    class Broken(Shelf):
        def store(self, *args, **options):
            raise RuntimeError("no room at all")

    broken = Broken()
    engine = engine_of(broken.open, max_batch_tokens=24)
    first, second = IDS[:32], IDS[40:72]
    names = [engine.add(prompt, GREEDY) for prompt in (first, second)]
    for _ in range(2):
        engine.step()
    for name in names:
        engine.cancel(name)
    for prompt in (first, second):
        assert_uncached(served(engine, prompt), prompt)
    assert engine.scheduler.stats.tier_errors
    # Blocks of another layout are refused and cost nothing else.
    shelf.held = {key: groups[:-1] for key, groups in shelf.held.items()}
    other = engine_of(shelf.open)
    assert_uncached(served(other, IDS[: LONG + 3]), IDS[: LONG + 3])
    assert other.scheduler.stats.tier_errors == 1
    assert other.allocator.num_free + other.index.num_cached == other.config.num_blocks


def test_spoiled_bytes_would_be_seen():
    """Negative control: what is loaded is what is read."""
    shelf = Shelf()
    prompt = IDS[: LONG + 3]
    right = served(engine_of(shelf.open), prompt)
    shelf.held = {
        key: tuple(bytes(255 - byte for byte in group) for group in groups)
        for key, groups in shelf.held.items()
    }
    engine = engine_of(shelf.open)
    wrong = served(engine, prompt)
    assert engine.scheduler.stats.loaded_tokens
    assert wrong.results != right.results


def test_another_tenant_other_weights_and_another_tokenizer_miss(shelf):
    engine = engine_of(shelf.open)
    served(engine, IDS[:LONG], salt="other")
    assert engine.scheduler.stats.loaded_tokens == 0
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        model.head.weight[0, 0] += 1
    other = engine_of(shelf.open, model)
    served(other, IDS[:LONG])
    assert other.scheduler.stats.loaded_tokens == 0
    config = engine.config
    mapped = copy.deepcopy(MODEL)
    mapped.token_map = mapped.token_map.flip(0)
    another_map = engine_of(shelf.open, mapped)
    served(another_map, IDS[:LONG])
    assert another_map.scheduler.stats.loaded_tokens == 0
    third = Engine(MODEL, config, tokenizer_digest="another", open_tier=shelf.open)
    served(third, IDS[:LONG])
    assert third.scheduler.stats.loaded_tokens == 0
    # Control: the same again is a hit.
    fourth = engine_of(shelf.open)
    served(fourth, IDS[:LONG])
    assert fourth.scheduler.stats.loaded_tokens


def test_memory_comes_first_and_the_tier_goes_on_from_there(shelf):
    engine = engine_of(shelf.open, snapshot_bytes=0)
    served(engine, IDS[: 2 * BLOCK + 1])
    shelf.loads = 0
    prompt = IDS[: LONG + 3]
    assert_uncached(served(engine, prompt), prompt)
    assert shelf.loads == LONG // BLOCK - 2


def test_a_preempted_sequence_comes_back_through_the_tier():
    """Too small for two: blocks of the younger are evicted, and come back from the tier."""
    shelf = Shelf()
    blocks = LONG // BLOCK + 6
    engine = engine_of(shelf.open, num_blocks=blocks, snapshot_bytes=0)
    first, second = IDS[:LONG], list(reversed(IDS[:LONG]))
    for prompt in (first, second, first):
        assert_uncached(served(engine, prompt), prompt)
    assert engine.scheduler.stats.loaded_tokens


def test_changed_weights_close_the_tier_and_open_it_under_another_name(shelf):
    model = copy.deepcopy(MODEL)  # not the one that all tests share
    engine = engine_of(shelf.open, model)
    before = shelf.namespace
    shelf.is_closed = False
    with torch.no_grad():
        model.head.weight[0, 0] += 1
    engine.weights_changed()
    assert shelf.is_closed
    assert shelf.namespace != before
    assert engine.tier is shelf
    engine.close()
    assert engine.tier is None


def disk_of(folder):
    def open_tier(namespace: bytes, sizes: tuple[int, ...]) -> DiskStore:
        return DiskStore(
            DiskStoreConfig(
                directory=folder,
                namespace=namespace,
                max_bytes=64 << 20,
                segment_bytes=1 << 20,
                group_bytes=sizes,
            )
        )

    return open_tier


def test_a_directory_keeps_the_prefix_over_a_restart(tmp_path):
    prompt = IDS[: LONG + 11]
    first = engine_of(disk_of(tmp_path / "cache"))
    cold = served(first, prompt)
    first.close()
    second = engine_of(disk_of(tmp_path / "cache"))
    warm = served(second, prompt)
    second.close()
    assert warm.results == cold.results
    assert_uncached(warm, prompt)
    assert second.scheduler.stats.loaded_tokens == (len(prompt) - 1) // BLOCK * BLOCK


def test_a_chain_of_turns_resumed_from_disk_equals_the_uncached_pass(tmp_path):
    """Every turn in an engine of its own; the answer of one is part of the next prompt."""
    tokens = IDS[:LONG]
    for turn in range(4):
        engine = engine_of(disk_of(tmp_path / "cache"))
        found = served(engine, tokens, replace(GREEDY, max_new_tokens=2))
        assert_uncached(found, tokens, replace(GREEDY, max_new_tokens=2))
        assert bool(engine.scheduler.stats.loaded_tokens) == bool(turn)
        engine.close()
        tokens = [*tokens, *found.tokens, *IDS[turn : turn + 9]]
