"""Where the rows of a decode step stand: tables on the device against counting by hand."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("for the interpreter; compiled: tests/gpu", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the decoder needs triton")

from finwhale.cache.paged_pools import PagedLayout, PagedPools
from finwhale.config.layers import RopeKind
from finwhale.gpu.places import PositionTables
from finwhale.ops.rope import rope_frequencies, rope_rotation
from tests.stored_models import small_config

CONFIG = small_config().text_config
BLOCK, CAPACITY = 8, 40


def tables_and_layout():
    layout = PagedLayout(config=CONFIG, block_size=BLOCK, storage="fp4")
    pools = PagedPools(layout, num_blocks=12, num_slots=3)
    return PositionTables(pools, CAPACITY, torch.device("cpu")), layout


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 5, 7, 8, 22, 23, CAPACITY - 1])
def test_places_equal_counting_by_hand(position):
    tables, layout = tables_and_layout()
    blocks = torch.tensor([[11, 3, 7, 0, 5], [2, 9, 4, 1, 6]])
    # The second row stands nowhere; its slot and its blocks must not matter.
    found = tables.places(torch.tensor([position + 1, 0]), torch.tensor([2, 1]), blocks)
    first, ring, window = 2 * layout.ring_rows, layout.ring_rows, CONFIG.sliding_window
    seen = [p for p in range(position - window + 1, position + 1) if p >= 0]
    assert sorted(r for r in found.window_index[0].tolist() if r >= 0) == sorted(
        first + p % ring for p in seen
    )
    assert found.window_index[1].tolist() == [-1] * window
    assert found.ring_rows[0] == first + position % ring
    assert found.ring_rows[1] < 0
    for owner, ratio in ((1, 2), (3, 1)):
        own, per_block = found.entries[owner], BLOCK // ratio
        entries = [e for e in range(CAPACITY) if ratio * e + ratio - 1 <= position]
        assert own.visible.tolist() == [len(entries), 0]
        is_last = (position + 1) % ratio == 0
        assert bool(own.closes[0]) is is_last
        # A row that stands nowhere keeps nothing in an open group.
        assert bool(own.closes[1])
        if is_last:
            entry = position // ratio
            assert own.rows[0] == blocks[0, entry // per_block] * per_block + entry % per_block
        else:
            assert own.rows[0] < 0
        assert own.rows[1] < 0
        start = torch.tensor([position - position % ratio])
        frequencies = rope_frequencies(
            CONFIG.compress_rope_theta, CONFIG.qk_rope_head_dim, CONFIG.rope_scaling
        )
        assert torch.equal(own.rotation[:, :1], rope_rotation(start, frequencies))
        in_pool = {e // CONFIG.candidate_block_size for e in entries}
        assert own.pool_lengths.tolist() == [len(in_pool), 0]
        most = min(len(in_pool), CONFIG.candidate_topk_blocks) * CONFIG.candidate_block_size
        assert own.pool_columns.tolist() == [most, 0]
    plain = rope_frequencies(CONFIG.rope_theta, CONFIG.qk_rope_head_dim, None)
    want = rope_rotation(torch.tensor([position]), plain)
    assert torch.equal(found.rotation[RopeKind.WINDOW][:, :1], want)


def test_places_of_one_row_do_not_depend_on_the_others():
    tables, _ = tables_and_layout()
    blocks = torch.tensor([[11, 3, 7, 0, 5], [2, 9, 4, 1, 6]])
    both = tables.places(torch.tensor([6, 21]), torch.tensor([0, 2]), blocks)
    alone = tables.places(torch.tensor([21]), torch.tensor([2]), blocks[1:])
    assert torch.equal(both.window_index[1:], alone.window_index)
    assert torch.equal(both.entries[1].rows[1:], alone.entries[1].rows)
    # And they are no copies of each other: the first row's differ.
    assert not torch.equal(both.window_index[:1], alone.window_index)
