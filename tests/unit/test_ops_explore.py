"""Exploration: random visible entries behind a selection, drawn by seed, layer and position."""

from __future__ import annotations

import pytest
import torch

from finwhale.ops.index import add_explored, drawn_fractions, mixed

SEED = torch.tensor(11)


def explored(topk, first, visible, positions, count, seed=SEED, salt=3, num_entries=40):
    return add_explored(
        topk, first, visible, positions, count=count, seed=seed, salt=salt, num_entries=num_entries
    )


def layout(lengths, k=3):
    """Return selection, first, visible and positions of one row of documents at ratio 1."""
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    starts = torch.tensor([sum(lengths[:n]) for n in range(len(lengths))])
    first = torch.repeat_interleave(starts, torch.tensor(lengths)).unsqueeze(0)
    visible = positions + 1
    slots = torch.arange(k)
    topk = torch.where(slots < visible.unsqueeze(-1), first.unsqueeze(-1) + slots, -1)
    return topk, first, visible, positions


@pytest.mark.parametrize("count", [1, 2, 5, 9, 30])
@pytest.mark.parametrize("lengths", [(1,), (17,), (4, 9, 1, 12)])
def test_explored_entries_are_visible_new_and_different(count, lengths):
    topk, first, visible, positions = layout(lengths)
    found = explored(topk, first, visible, positions, count)
    assert found.shape == (1, sum(lengths), 3 + count)
    assert torch.equal(found[..., :3], topk)
    for t in range(sum(lengths)):
        low = int(first[0, t])
        row = [m for m in found[0, t].tolist() if m >= 0]
        assert len(row) == len(set(row))
        assert all(low <= m < low + int(visible[0, t]) for m in row)


def test_explored_counts_at_no_entry_fewer_equal_and_more():
    """With nothing selected: min(count, visible) different entries, however they divide."""
    for visible in (0, 1, 2, 3, 4, 5, 7, 8, 9):
        for count in (1, 3, 4, 5):
            topk = torch.full((1, 6, 2), -1)
            shape = (1, 6)
            found = explored(
                topk, torch.full(shape, 10), torch.full(shape, visible), torch.arange(6)[None],
                count,
            )  # fmt: skip
            for row in found[0].tolist():
                drawn = [m for m in row if m >= 0]
                assert len(set(drawn)) == len(drawn) == min(count, visible)


def test_no_exploration_leaves_the_selection_alone():
    topk, first, visible, positions = layout((5,))
    assert torch.equal(explored(topk, first, visible, positions, 0), topk)


def test_explored_entries_depend_on_seed_layer_and_position_alone():
    topk, first, visible, positions = layout((40,), k=1)
    base = explored(topk, first, visible, positions, 4)
    assert torch.equal(base, explored(topk, first, visible, positions, 4))
    assert not torch.equal(base, explored(topk, first, visible, positions, 4, torch.tensor(12)))
    assert not torch.equal(base, explored(topk, first, visible, positions, 4, salt=4))
    # Seeds of neighbouring steps and layers do not give shifted copies of one another.
    for other in (torch.tensor(12), torch.tensor(11 + (1 << 32))):
        moved = explored(topk, first, visible, positions, 4, other)
        assert float((moved[..., 1:] == base[..., 1:]).float().mean()) < 0.6


def test_batch_layout_does_not_matter():
    """A document alone, behind another one and in another row of the batch draws the same."""
    alone = explored(*layout((12,)), 5)
    topk, first, visible, positions = layout((9, 12))
    packed = explored(topk, first, visible, positions, 5)[:, 9:]
    assert torch.equal(torch.where(packed < 0, -1, packed - 9), alone)
    stacked = [torch.cat((x, x)) for x in layout((12,))]
    rows = explored(*stacked, 5)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[:1], alone)


def test_every_visible_entry_is_drawn_sooner_or_later():
    topk = torch.full((1, 1, 1), -1)
    seen = dict.fromkeys(range(13), 0)
    for seed in range(300):
        found = explored(
            topk, torch.zeros(1, 1).long(), torch.tensor([[13]]), torch.tensor([[20]]), 4,
            torch.tensor(seed),
        )  # fmt: skip
        for m in found[0, 0, 1:].tolist():
            seen[m] += 1
    # Stretches of 3, 3, 3 and 4 entries: each entry comes up in a third or a quarter of the draws.
    assert min(seen.values()) > 45
    assert max(seen.values()) < 140


def mixed_by_hand(x: int) -> int:
    """The 64-bit finaliser on Python integers."""
    wrap = (1 << 64) - 1
    x &= wrap
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & wrap
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & wrap
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def test_hash_equals_python_integers():
    values = [0, 1, -1, 2**40, -(2**63), 2**63 - 1, 123456789]
    assert mixed(torch.tensor(values)).tolist() == [mixed_by_hand(v) for v in values]


def test_fractions_are_24_bits_and_even():
    drawn = drawn_fractions(torch.tensor(5), 1, torch.arange(500), 8)
    assert drawn.shape == (500, 8)
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < 2**24
    assert float(drawn.float().mean()) / 2**24 == pytest.approx(0.5, abs=0.02)
    assert drawn.unique().numel() > 3990
