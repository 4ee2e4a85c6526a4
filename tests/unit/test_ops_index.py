"""Index scores, top-k and the candidate pool against plain Python."""

import pytest
import torch

from finwhale.ops.index import (
    index_scores,
    index_scores_matmul,
    pool_mask,
    select_pool_blocks,
    select_topk,
    select_topk_ref,
)

FORMS = [select_topk_ref, select_topk]
INF = float("inf")


def best(row, k):
    """Positions of the k best finite scores, ties to the lowest position, padded with -1."""
    usable = [(-v, i) for i, v in enumerate(row) if v > -INF]
    chosen = sorted(i for _, i in sorted(usable)[:k])
    return chosen + [-1] * (min(k, len(row)) - len(chosen))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 9])
def test_topk_equals_sorted_list_at_counts_around_k(form, count):
    g = torch.Generator().manual_seed(count)
    scores = torch.randint(-2, 3, (6, 5, 9), generator=g).float()  # many ties
    scores[..., count:] = -INF
    want = torch.tensor([[best(r.tolist(), 4) for r in m] for m in scores])
    assert torch.equal(form(scores, 4), want)


@pytest.mark.parametrize("form", FORMS)
def test_topk_ties_go_to_the_lowest_position(form):
    assert form(torch.tensor([1.0, 2.0, 0.0, 0.0, 0.0]), 3).tolist() == [0, 1, 2]
    assert form(torch.zeros(6), 2).tolist() == [0, 1]
    assert form(torch.tensor([-0.0, 0.0, -0.0]), 2).tolist() == [0, 1]


@pytest.mark.parametrize("form", FORMS)
def test_topk_treats_nan_as_unreachable(form):
    assert form(torch.tensor([1.0, float("nan"), 0.5]), 3).tolist() == [0, 2, -1]
    assert form(torch.tensor([float("nan")] * 3), 2).tolist() == [-1, -1]


@pytest.mark.parametrize("form", FORMS)
def test_topk_of_no_entries_is_empty(form):
    assert form(torch.zeros(2, 3, 0), 4).shape == (2, 3, 0)


@pytest.mark.parametrize("form", [index_scores, index_scores_matmul])
def test_scores_sum_over_heads_after_relu(form):
    # dots: head 0 (2, -1), head 1 (-3, 4); w = (0.5, -2): 0.5 * 2 + 0 = 1 and 0 - 2 * 4 = -8.
    q = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    keys = torch.tensor([[[2.0, -3.0], [-1.0, 4.0]]])
    weights = torch.tensor([[[0.5, -2.0]]])
    assert form(q, weights, keys).tolist() == [[[1.0, -8.0]]]


def test_scores_in_bf16_round_each_step():
    # 1 + 2^-9 is a tie in bf16 and goes to even, 1: the product is rounded before the sum.
    q = torch.tensor([[[[1.0, 2.0**-9]]]], dtype=torch.bfloat16)
    keys = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    assert index_scores(q, torch.ones(1, 1, 1), keys).item() == 1.0
    assert index_scores(q.float(), torch.ones(1, 1, 1), keys.float()).item() == 1.0 + 2.0**-9


def test_scores_matmul_equals_reference():
    g = torch.Generator().manual_seed(0)
    q, w = torch.randn(2, 7, 24, 32, generator=g), torch.randn(2, 7, 24, generator=g)
    keys = torch.randn(2, 11, 32, generator=g)
    for dtype, atol in ((torch.float32, 1e-4), (torch.bfloat16, 0)):
        inputs = q.to(dtype), w.to(dtype), keys.to(dtype)
        got, want = index_scores_matmul(*inputs), index_scores(*inputs)
        torch.testing.assert_close(got, want, rtol=0, atol=atol)


def pool(scores, visible, num_blocks, size):
    row = [v if i < visible else -INF for i, v in enumerate(scores)]
    blocks = [max(row[i : i + size]) for i in range(0, len(row), size)]
    if visible:
        blocks[(visible - 1) // size] = INF
    return best(blocks, num_blocks)


@pytest.mark.parametrize("visible", [0, 1, 3, 4, 5, 11, 12, 13, 17])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 9])
def test_pool_blocks_equal_plain_python(visible, num_blocks):
    g = torch.Generator().manual_seed(visible)
    scores = torch.randint(-3, 4, (5, 17), generator=g).float()
    scores[:, visible:] = -INF
    got = select_pool_blocks(scores, torch.full((5,), visible), num_blocks, 4)
    want = [pool(r.tolist(), visible, num_blocks, 4) for r in scores]
    assert got.tolist() == want


def test_pool_always_holds_the_newest_block_and_pins_nothing_else():
    scores = torch.tensor([[9.0, 9.0, 5.0, 5.0, 7.0, 7.0, -8.0, -8.0]])
    assert select_pool_blocks(scores, torch.tensor([8]), 2, 2).tolist() == [[0, 3]]
    assert select_pool_blocks(scores, torch.tensor([8]), 1, 2).tolist() == [[3]]


def test_pool_mask_covers_whole_blocks_and_a_ragged_last_one():
    mask = pool_mask(torch.tensor([[0, 2, -1]]), 10, 4)
    assert mask.tolist() == [[True] * 4 + [False] * 4 + [True] * 2]
