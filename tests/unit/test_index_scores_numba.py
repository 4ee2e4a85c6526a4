"""Index scores by bytes: the bits of the floats, exact groups, and a path per row.

The floats are the same file's other path, which `test_kernels_numba.py` compares with the
reference; sums in float64 come from the formula.
"""

import numpy as np
import pytest
import torch

from finwhale.cache.paged_reads import pack_index, unpack_index
from finwhale.kernels import index_scores_numba as kernel
from finwhale.kernels.index_scores_numba import (
    paged_index_scores,
    paged_listed_scores,
    select_topk,
)
from finwhale.ops.index import select_topk_ref
from finwhale.ops.rounding import round_index

needs_bytes = pytest.mark.skipif(not kernel.HAS_DOT, reason="this processor has no byte products")


def case_of(tokens, heads, dim, entries, *, spread=1.0):
    """Return arguments of `paged_index_scores` for one sequence, queries on the grid."""
    q = round_index(torch.randn(tokens, heads, dim) * spread)
    keys = pack_index(torch.randn(entries, dim) * 2 ** torch.randint(-6, 6, (entries, 1)), "fp4")
    tables = torch.arange(-(-entries // 4))[None]
    keys = torch.cat((keys, torch.full((4, keys.shape[1]), 255, dtype=torch.uint8)))
    visible = torch.randint(0, entries + 1, (tokens,))
    zero = torch.zeros(tokens, dtype=torch.int64)
    return [q, torch.randn(tokens, heads), keys, tables, zero, visible, 4]


def with_floats(monkeypatch, *case) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "HAS_DOT", False)
        return paged_index_scores(*case)


def num_coded(q: torch.Tensor) -> int:
    return int(kernel._coded(q.numpy(), 0)[3].sum())


@needs_bytes
@pytest.mark.parametrize("entries", [1, 63, 64, 65, 200])
@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (2, 64), (3, 32), (24, 128)])
def test_bytes_give_the_bits_of_floats(heads, dim, entries, monkeypatch):
    case = case_of(7, heads, dim, entries)
    assert num_coded(case[0]) == 7
    got = paged_index_scores(*case)
    assert torch.equal(got, with_floats(monkeypatch, *case))
    listed = torch.randint(0, entries, (7, 70))
    by_list = paged_listed_scores(case[0], case[1], case[2], listed)
    case[5] = torch.full((7,), entries)
    assert torch.equal(by_list, paged_index_scores(*case).gather(1, listed))


@needs_bytes
def test_a_row_takes_the_path_of_its_own_values(monkeypatch):
    case = case_of(9, 4, 64, 130)
    whole = paged_index_scores(*case)
    mixed = [case[0].clone(), *case[1:]]
    mixed[0][3] = torch.randn(4, 64)
    mixed[0][5, 2, 7] *= 1.0001
    assert num_coded(mixed[0]) == 7
    got = paged_index_scores(*mixed)
    other = torch.tensor([n not in (3, 5) for n in range(9)])
    assert torch.equal(got[other], whole[other])
    assert torch.equal(got, with_floats(monkeypatch, *mixed))


@needs_bytes
def test_every_code_of_both_sides_takes_part():
    """One group, one head: a score is a product of integers by hand, times its two scales."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))
    q = values.repeat(2)[None, None] * 4.0  # [1, 1, 32]
    keys = pack_index(torch.stack([values.roll(n).repeat(2) for n in range(16)]) / 8, "fp4")
    assert num_coded(q) == 1
    tables, zero, seen = torch.zeros(1, 1).long(), torch.zeros(1).long(), torch.tensor([16])
    got = paged_index_scores(q, torch.ones(1, 1), keys, tables, zero, seen, 16)[0]
    want = torch.stack([(values * values.roll(n)).sum() for n in range(16)])
    assert want.unique().numel() > 8
    assert torch.equal(got, want.clamp_min(0))  # 2 halves * 4 / 8


@needs_bytes
@pytest.mark.parametrize("spread", [2.0**-30, 1.0, 2.0**30])
def test_scores_are_near_the_formula_in_float64(spread):
    case = case_of(5, 24, 128, 90, spread=spread)
    case[5] = torch.full((5,), 90)
    assert num_coded(case[0]) == 5
    keys = unpack_index(case[2][:90], "fp4", 128).double()
    dots = (case[0].double() @ keys.T).relu()
    parts = dots * case[1].double()[..., None]
    error = (paged_index_scores(*case).double() - parts.sum(1)).abs()
    assert (error <= 3e-7 * parts.abs().sum(1)).all()


@needs_bytes
def test_a_wrong_start_is_noticed(monkeypatch):
    """Negative control: what the offset of key codes is paid with, off by one query code."""
    case = case_of(2, 2, 32, 40)
    right, coded = paged_index_scores(*case), kernel._coded

    def wrong(q, kind):
        codes, scales, starts, is_coded = coded(q, kind)
        return codes, scales, starts + 12, is_coded

    monkeypatch.setattr(kernel, "_coded", wrong)
    assert not torch.equal(paged_index_scores(*case), right)


def test_only_queries_on_the_grid_are_coded():
    if not kernel.HAS_DOT:
        assert num_coded(torch.zeros(2, 1, 32)) == 0
        return
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(4)
    rows = torch.stack((grid, -grid, grid / 2, torch.zeros(32), grid.clamp_max(3)))[:, None]
    assert num_coded(rows) == 5
    for value in (5.0, 0.25, 7.0, torch.nan, torch.inf, 1e-9):
        row = grid.clone()
        row[3] = value
        assert num_coded(row[None, None]) == 0
    # The largest is off the grid of the others, or too large for the exponents that are taken.
    assert num_coded(grid[None, None] * 1.1) == 0
    assert num_coded(grid[None, None] * 2.0**50) == 0


@pytest.mark.parametrize("num", [1, 15, 16, 17, 300, 5000])
def test_selection_of_close_values_is_the_reference(num):
    scores = torch.randn(12, num)
    scores[1] = scores[1].round()
    scores[2] = 1 + scores[2] * 1e-6  # all in one part
    scores[3], scores[4, ::3] = -torch.inf, torch.nan
    scores[5], scores[5, ::2] = 0.0, -0.0
    scores[6] = -scores[6].abs()
    scores[7, num // 2 :] = -torch.inf
    scores[8] *= 1e38
    scores[9] *= 1e-42
    scores[10, 0] = torch.inf
    for k in (1, 2, 128, num):
        assert torch.equal(select_topk(scores, k), select_topk_ref(scores, k))


def test_rank_is_in_the_order_of_numbers():
    values = torch.tensor([-torch.inf, -1e30, -2.0, -1.0, -1e-40, 0.0, 1e-40, 1.0, 3.0, torch.inf])
    ranks = [kernel._rank(bits) for bits in values.numpy().view(np.int32)]
    assert ranks == sorted(ranks)
    assert (ranks[0], kernel._rank(np.float32(-3.4e38).view(np.int32))) == (3, 4)
    assert 0 <= min(ranks) <= max(ranks) < 2048
