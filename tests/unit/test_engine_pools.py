"""Packed pools: bytes by the released arithmetic, values by the model's roundings, poison as NaN.

The byte counts are hand arithmetic: a row of 512 E2M1 codes is 256 bytes and has 32 scales of one
byte, an index key of 128 codes has 4, a window row of 512 E4M3 codes has 16.
"""

import pytest
import torch

from finwhale.cache.paged_pools import PagedLayout, PagedPools
from finwhale.cache.paged_reads import unpack_entry, unpack_index, unpack_window
from finwhale.config import ConfigError, preset
from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine
from finwhale.engine.request import SamplingParams
from finwhale.model import Numerics
from finwhale.ops.rounding import round_fp8, round_index, round_main_kv
from tests.models import token_ids, unit_model
from tests.uncached_engine import reference

UNIT = preset("unit").text_config
STORAGES = ("fp4", "bf16", "fp32")


def layout_of(name: str, block_size: int = 64, storage: str = "fp4") -> PagedLayout:
    config = preset(name).text_config
    return PagedLayout(config=config, block_size=block_size, storage=storage)


@pytest.mark.parametrize("name", ["mini", "flash"])
def test_released_rows_have_the_released_bytes(name):
    layout = layout_of(name)
    assert layout.entry_bytes == 512 // 2 + 512 // 16 == 288
    assert layout.key_bytes == 128 // 2 + 128 // 32 == 68
    assert layout.window_bytes == 512 + 512 // 32 == 528


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_released_token_costs_890_bytes_at_any_block_size(block_size):
    layout = layout_of("flash", block_size)
    # Owners: three of ratio 2 and one of ratio 1, so 2.5 entries and keys a token.
    ratios = [spec.ratio for spec in layout.specs if spec.owns_kv]
    assert sorted(ratios) == [1, 2, 2, 2]
    assert layout.block_bytes == block_size * 5 // 2 * (288 + 68) == block_size * 890
    assert layout.bytes_per_token == 890 < 900


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("block_size", [2, 8, 64])
def test_allocated_tensors_have_the_bytes_of_the_arithmetic(block_size, storage):
    layout = layout_of("unit", block_size, storage)
    pools = PagedPools(layout, num_blocks=5, num_slots=3)
    size = pools.num_bytes()
    width = {"fp4": None, "bf16": 2, "fp32": 4}[storage]
    entry, key, window = (
        (64 // 2 + 64 // 16, 32 // 2 + 32 // 32, 64 + 64 // 32)
        if width is None
        else (64 * width, 32 * width, 64 * width)
    )
    tokens = 5 * block_size
    # Owners 1 and 3 at ratio 2, owner 4 at ratio 1: two entries a token.
    assert size["main"] == 2 * tokens * entry
    assert size["index_k"] == 2 * tokens * key
    assert size["window"] == 3 * 8 * (8 - 1 + block_size) * window
    assert size["open"] == 3 * 2 * 2 * 64 * 4
    assert size["main"] + size["index_k"] == 5 * layout.block_bytes
    assert size["window"] + size["open"] == 3 * layout.slot_bytes


def test_pools_hold_no_float_copy():
    pools = PagedPools(layout_of("unit"), num_blocks=2, num_slots=1)
    for kind in ("main", "index_k", "window"):
        assert {pool.dtype for pool in getattr(pools, kind).values()} == {torch.uint8}
    assert set(pools.main) == {1, 3, 4}
    assert set(pools.window) == set(range(8))


def test_block_that_would_leave_a_group_open_is_refused():
    for block_size in (1, 3, 63):
        with pytest.raises(ConfigError, match="multiple of 2"):
            layout_of("unit", block_size)


@pytest.mark.parametrize("storage", STORAGES)
def test_poison_reads_as_nan_in_every_format(storage):
    pools = PagedPools(layout_of("unit", 8, storage), num_blocks=2, num_slots=1, poison=True)
    for rows, unpack, dim in (
        (pools.main[4], unpack_entry, 64),
        (pools.index_k[4], unpack_index, 32),
        (pools.window[0], unpack_window, 64),
    ):
        assert unpack(rows, storage, dim).isnan().all()
    assert pools.open[1].isnan().all()


def test_given_back_memory_is_poisoned_and_its_neighbours_are_not():
    pools = PagedPools(layout_of("unit", 8), num_blocks=3, num_slots=2, poison=True)
    for kind in ("main", "index_k", "window", "open"):
        for pool in getattr(pools, kind).values():
            pool.zero_()
    pools.forget_block(1)
    pools.forget_slot(0)
    for spec in pools.layout.owners:
        per_block = 8 // spec.ratio
        for pool in (pools.main[spec.layer_id], pools.index_k[spec.layer_id]):
            blocks = pool.view(3, per_block, -1)
            assert (blocks[1] == 0xFF).all()
            assert not blocks[[0, 2]].any()
    for pool in pools.window.values():
        slots = pool.view(2, 15, -1)
        assert (slots[0] == 0xFF).all()
        assert not slots[1].any()
    for owner in (1, 3):
        assert pools.open[owner][0].isnan().all()
        assert not pools.open[owner][1].any()


def filled() -> PagedPools:
    pools = PagedPools(layout_of("unit", 8), num_blocks=3, num_slots=2)
    generator = torch.Generator().manual_seed(0)
    for kind in ("main", "index_k", "window"):
        for pool in getattr(pools, kind).values():
            pool.random_(0, 256, generator=generator)
    for pool in pools.open.values():
        pool.normal_(generator=generator)
    return pools


@pytest.mark.parametrize("stop", [1, 7, 8, 15, 16, 40, 47])
def test_saved_windows_come_back_at_the_positions_they_had(stop):
    pools = filled()
    start = max(0, stop - 7)
    saved = pools.save_windows(1, start, stop)
    assert saved.shape == (8, stop - start, pools.layout.window_bytes)
    # Position p of slot 1 is ring row 15 + p mod 15.
    for layer, pool in pools.window.items():
        for n, position in enumerate(range(start, stop)):
            assert torch.equal(saved[layer, n], pool[15 + position % 15])
    pools.restore_windows(0, stop, saved)
    assert torch.equal(pools.save_windows(0, start, stop), saved)
    other = filled()
    assert torch.equal(pools.window[0][15:], other.window[0][15:])


@pytest.mark.parametrize("kernels", ["numba", "torch"])
def test_stored_rows_decode_to_the_models_roundings(kernels):
    model = unit_model(Numerics())
    ids = token_ids(1, 37)[0].tolist()
    config = EngineConfig(
        block_size=8, num_blocks=8, max_sequences=2, max_batch_tokens=13, kernels=kernels
    )
    engine = Engine(model, config)
    # The request stays, so its block table and rings can be looked at.
    engine.add(ids, SamplingParams(max_new_tokens=9, temperature=0), request_id="a")
    while not (outputs := engine.step()):
        pass
    assert len(outputs[0].new) == 1
    (sequence,) = engine.scheduler.running
    trace: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        reference(model, kernels).hidden(torch.tensor([ids]), trace=trace)
    for layer, ratio in ((1, 2), (3, 2), (4, 1)):
        rows = torch.tensor(
            [
                sequence.blocks[n // (8 // ratio)] * (8 // ratio) + n % (8 // ratio)
                for n in range(37 // ratio)
            ]
        )
        entries = unpack_entry(engine.pools.main[layer][rows], "fp4", 64)
        assert torch.equal(entries, round_main_kv(trace[f"entries_raw.{layer}"][0]))
        keys = unpack_index(engine.pools.index_k[layer][rows], "fp4", 32)
        assert torch.equal(keys, round_index(trace[f"index_k_raw.{layer}"][0]))
    for layer in range(8):
        rows = engine.pools.save_windows(sequence.slot, 37 - 7, 37)[layer]
        window = unpack_window(rows, "fp4", 64)
        assert torch.equal(window, round_fp8(trace[f"window_kv_raw.{layer}"][0, 30:]))
    # 37 is odd: the groups of ratio 2 are open by one token.
    assert engine.pools.open[1][sequence.slot].isfinite().all()


def test_memory_plan_tells_the_bytes_of_the_tensors():
    engine = Engine(unit_model(Numerics()), EngineConfig(block_size=16, num_blocks=12))
    # Two entries a token at 36 + 17 bytes; nothing is hidden by rounding.
    assert "20,352 bytes for 192 tokens in 12 blocks of 16: 106 bytes" in engine.memory_plan()[0]
    size = engine.pools.num_bytes()
    assert size["main"] + size["index_k"] == 12 * 16 * 106
