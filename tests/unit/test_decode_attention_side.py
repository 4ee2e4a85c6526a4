"""Decode kernels of the attention side against their references, in the interpreter on a CPU.

Launches are made small, so that tiny inputs still cross the borders of tiles, stretches and levels.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.cache import paged_reads
from finwhale.decode_kernels import attention_refs as refs
from finwhale.decode_kernels import gather_attention as attention
from finwhale.decode_kernels import index_scores as scoring
from finwhale.decode_kernels import select_topk as selection
from finwhale.decode_kernels import store_rows as rows_kernels
from tests import decode_attention_cases as cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["window", "entry", "index_key"]


def attend(inputs, splits=3, shares=2):
    launch = attention.AttentionLaunch(heads=16, keys=16, splits=splits, num_warps=4, shares=shares)
    return attention.gather_attention(*inputs, launch=launch)


def scored(inputs, *pool, keys=32, programs=5, **options):
    launch = scoring.ScoresLaunch(keys=keys, programs=programs, num_warps=4)
    return scoring.index_scores(*inputs, *pool, launch=launch, **options)


def selected(scores, lengths, k, stretch=64):
    launch = selection.SelectLaunch(stretch=stretch, num_warps=4)
    return selection.select_topk_rows(scores, lengths, k, launch=launch)


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "width", "k", "turning", "splits", "shares"),
    [
        (1, 1, 64, 1, 1, None, 3, 1),
        (3, 5, 64, 9, 20, 16, 1, 2),
        (3, 5, 64, 9, 20, None, 3, 1),
        (2, 20, 128, 17, 31, 64, 3, 2),
        (1, 3, 64, 8, 0, 16, 1, 1),
    ],
)
def test_gathered_attention_equals_reference(tokens, heads, dim, width, k, turning, splits, shares):
    inputs = cases.attention_inputs(tokens, heads, dim, width, k, DEVICE, turning=turning)
    got, want = attend(inputs, splits, shares), refs.gather_attention_ref(*inputs)
    assert cases.relative(got, want) < 5e-3
    if tokens > 1:
        assert not got[1].any()


def test_gathered_attention_reference_equals_the_engines():
    q, ring, window, main, entries, sink, _ = cases.attention_inputs(3, 5, 64, 9, 20, "cpu")
    fresh = ring.new_empty(0, ring.shape[1])
    want = paged_reads.paged_attention_ref(q.float(), fresh, ring, window, main, entries, sink)
    got = refs.gather_attention_ref(q, ring, window, main, entries, sink)
    assert cases.relative(got, want) < 5e-3


def test_gathered_attention_without_entries_reads_the_window_alone():
    inputs = cases.attention_inputs(3, 5, 64, 9, 7, DEVICE)
    inputs[3] = None
    assert cases.relative(attend(inputs), refs.gather_attention_ref(*inputs)) < 5e-3


@pytest.mark.parametrize("broken", ["sink", "entry", "window", "rotation"])
def test_gathered_attention_comparison_notices_a_mistake(broken):
    inputs = cases.attention_inputs(3, 5, 64, 9, 20, DEVICE, turning=16)
    inputs[5].fill_(2.0)
    want = refs.gather_attention_ref(*inputs)
    q, ring, window, main, entries, sink, turn = inputs
    if broken == "sink":
        sink = torch.full_like(sink, -torch.inf)
    elif broken == "entry":
        main = main ^ 8  # the sign of every even channel
    elif broken == "window":
        window = torch.where(window < 0, -1, (window + 1) % 59)
    elif broken == "rotation":
        turn = torch.stack((turn[0], -turn[1]))
    else:
        entries = torch.where(torch.arange(20, device=DEVICE) % 2 == 0, -1, entries)
    assert cases.relative(attend([q, ring, window, main, entries, sink, turn]), want) > 1e-2


def test_a_query_has_the_same_bits_alone_and_beside_others():
    inputs = cases.attention_inputs(4, 5, 64, 9, 20, DEVICE, turning=16)
    together = attend(inputs)
    q, ring, window, main, entries, sink, turn = inputs
    for t in (0, 3):
        one = slice(t, t + 1)
        alone = [q[one], ring, window[one], main, entries[one], sink, turn[:, one].contiguous()]
        assert torch.equal(attend(alone)[0], together[t])


def test_one_visible_row_comes_back_bit_for_bit():
    # The softmax of one key without a sink is 1, so attention shows what it unpacked: every pair
    # of codes under every finite scale.
    codes = torch.arange(256, dtype=torch.uint8)
    main = torch.zeros(127, 576 // 2, dtype=torch.uint8)
    main[:, :256], main[:, 256:] = codes, torch.arange(127, dtype=torch.uint8)[:, None]
    ring = torch.zeros(127, 528, dtype=torch.uint8)
    ring[:, :512] = torch.tensor([c for c in range(256) if c & 127 != 127] * 3)[:512].byte()
    ring[:, 512:] = torch.arange(80, 207, dtype=torch.uint8)[:, None]
    sink = torch.full((1,), -torch.inf)
    none = torch.full((1, 1), -1)
    picks = (126,) if DEVICE == "cpu" else range(127)
    for row in picks:
        at = torch.tensor([[row]])
        q = torch.zeros(1, 1, 512).bfloat16()
        for window, entry in ((at, none), (none, at)):
            inputs = [x.to(DEVICE) for x in (q, ring, window, main, entry, sink)]
            got = attention.gather_attention(*inputs)
            if entry is at:
                want = paged_reads.unpack_entry(main[row], "fp4", 512)
            else:
                want = paged_reads.unpack_window(ring[row], "fp4", 512)
            assert torch.equal(got.cpu().flatten().float(), want)


def test_no_query_gives_an_empty_result():
    inputs = cases.attention_inputs(3, 5, 64, 9, 20, DEVICE)
    empty = [inputs[0][:0], inputs[1], inputs[2][:0], inputs[3], inputs[4][:0], inputs[5]]
    assert attention.gather_attention(*empty).shape == (0, 5, 64)


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "columns"), [(1, 1, 32, 1), (3, 6, 64, 100), (2, 32, 128, 65)]
)
def test_index_scores_and_block_bests_equal_reference(tokens, heads, dim, columns):
    inputs = cases.index_inputs(tokens, heads, dim, columns, DEVICE)
    cases.assert_scores_near(scored(inputs), refs.index_scores_ref(*inputs), inputs)
    scores, best = scored(inputs, want_best=False)
    assert torch.equal(scores[0], scored(inputs)[0][0])
    assert best.shape == (tokens, 0)


def test_the_scan_measured_on_hopper_equals_other_tiles_bit_for_bit():
    """The pool is searched in tiles of another size: one key's score must not show which."""
    inputs = cases.index_inputs(2, 32, 128, 65, DEVICE)
    keys = scoring._LAUNCHES["hopper"].keys
    cases.assert_scores_near(scored(inputs, keys=keys), refs.index_scores_ref(*inputs), inputs)
    seen = int(inputs[4][0])
    for other in (32, scoring._POOL_LAUNCHES["any"].keys):
        got = scored(inputs, keys=other)[0][0, :seen]
        assert torch.equal(got, scored(inputs, keys=keys)[0][0, :seen])


def test_index_scores_take_head_weights_in_bf16():
    """Equal to the same values in fp32; weights of a hundredth more differ."""
    inputs = cases.index_inputs(1, 6, 64, 100, DEVICE)
    q, weights, *rest = inputs
    seen, rounded = int(inputs[4][0]), weights.bfloat16()
    want = scored([q, rounded.float(), *rest])[0][:, :seen]
    assert seen
    assert torch.equal(scored([q, rounded, *rest])[0][:, :seen], want)
    other = scored([q, (rounded.float() * 1.01).bfloat16(), *rest])[0][:, :seen]
    assert not torch.equal(other, want)


def test_index_scores_of_the_pool_are_those_of_the_full_scan():
    inputs = cases.index_inputs(4, 6, 64, 100, DEVICE)
    q, weights, keys, tables, visible, per_block, _ = inputs
    blocks = cases.pool_blocks_of(visible, 7)
    got, _ = scored([*inputs[:5], per_block, 56], blocks)
    want, _ = refs.index_scores_ref(q, weights, keys, tables, visible, per_block, 56, blocks)
    assert torch.equal(got.isneginf(), want.isneginf())
    full, _ = scored(inputs)
    for t in range(4):
        for c in (~want[t].isneginf()).nonzero().flatten().tolist():
            assert got[t, c] == full[t, int(blocks[t, c // 8]) * 8 + c % 8]


@pytest.mark.parametrize("broken", ["relu", "table", "visible", "weights"])
def test_index_scores_comparison_notices_a_mistake(broken):
    inputs = cases.index_inputs(3, 6, 64, 100, DEVICE)
    want = refs.index_scores_ref(*inputs)
    changed = list(inputs)
    if broken == "relu":
        changed[0] = -changed[0]
    elif broken == "table":
        changed[3] = changed[3].roll(1, 1)
    elif broken == "visible":
        changed[4] = changed[4] - 1
    else:
        changed[1] = changed[1].roll(1, 1)
    with pytest.raises(AssertionError):
        cases.assert_scores_near(scored(changed), want, inputs)


@pytest.mark.parametrize("stretch", [64, 256])
@pytest.mark.parametrize("num", [1, 63, 65, 200])
def test_selection_equals_sorted_lists(num, stretch):
    scores, lengths = cases.topk_rows(4, num, DEVICE)
    for k in (1, 32):
        got = selected(scores, lengths, k, stretch)
        assert torch.equal(got.cpu(), cases.listed_topk(scores, lengths, k)), k
        assert torch.equal(got, refs.select_topk_rows_ref(scores, lengths, k))


def test_selection_takes_the_lowest_of_equal_scores_across_stretches():
    scores = torch.zeros(1, 500, device=DEVICE)
    scores[0, 450] = 1.0
    lengths = torch.tensor([500], device=DEVICE)
    assert selected(scores, lengths, 5).tolist() == [[0, 1, 2, 3, 450]]
    backwards = 499 - selected(scores.flip(1), lengths, 5).flip(1)
    assert backwards.tolist() != [[0, 1, 2, 3, 450]]  # the other tie rule


def test_selection_ignores_what_lies_behind_a_row():
    scores, lengths = cases.topk_rows(4, 200, DEVICE)
    lengths = lengths.clamp_max(150)
    want = selected(scores, lengths, 20)
    for t, n in enumerate(lengths.tolist()):
        scores[t, n:] = torch.inf
    assert torch.equal(selected(scores, lengths, 20), want)


def test_chain_from_scores_to_pool_rows_equals_reference():
    class Kernels:
        index_scores = staticmethod(lambda *a: scored(a[:7], *a[7:]))
        select = staticmethod(selected)
        pool_rows = staticmethod(selection.pool_rows)

    inputs = cases.index_inputs(3, 6, 64, 100, DEVICE)
    assert torch.equal(cases.chain(Kernels, inputs, 20), cases.chain(cases.References, inputs, 20))
    blocks = cases.pool_blocks_of(inputs[4], 7)
    inputs[6] = 56
    got = cases.chain(Kernels, inputs, 20, blocks)
    assert torch.equal(got, cases.chain(cases.References, inputs, 20, blocks))
    assert (got >= 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_stored_rows_equal_reference(kind):
    exact = cases.store_inputs(kind, 7, 64, DEVICE, exact=True)
    got = cases.stored(rows_kernels.store_rows, kind, exact, heads=3)
    for mine, theirs in zip(
        got, cases.stored(refs.store_rows_ref, kind, exact, heads=3), strict=True
    ):
        assert torch.equal(mine, theirs)
    inputs = cases.store_inputs(kind, 12, 128, DEVICE)
    got = cases.stored(rows_kernels.store_rows, kind, inputs)[0]
    want = cases.stored(refs.store_rows_ref, kind, inputs)[0]
    # The norm's sum in another order may carry a value over a boundary, rarely.
    assert float((got != want).float().mean()) < 2e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", ["weight", "rotation", "rows"])
def test_stored_rows_comparison_notices_a_mistake(kind, broken):
    inputs = cases.store_inputs(kind, 7, 64, DEVICE, exact=True)
    want, *_ = cases.stored(refs.store_rows_ref, kind, inputs)
    x, weight, turn, pool, rows = inputs
    if broken == "weight":
        weight = torch.ones_like(weight)
    elif broken == "rotation":
        turn = turn.flip(1).contiguous()
    else:
        rows = rows.clone()
        rows[1] = next(r for r in range(12) if r not in rows.tolist())
    got, *_ = cases.stored(rows_kernels.store_rows, kind, [x, weight, turn, pool, rows])
    assert not torch.equal(got, want)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_a_code_is_remembered(value):
    x, weight, turn, pool, rows = cases.store_inputs("window", 7, 64, DEVICE)
    rows = torch.arange(7, device=DEVICE)
    x[3, 5] = value
    finite = torch.ones(7, dtype=torch.bool, device=DEVICE)
    rows_kernels.store_rows("window", x, weight, turn, pool, rows, cases.EPS, finite=finite)
    assert finite.tolist() == [True, True, True, False, True, True, True]


@pytest.mark.parametrize("is_rounded", [False, True])
def test_turned_queries_equal_reference(is_rounded):
    g = cases.generator(0)
    q = torch.randn(3, 6, 64, generator=g).bfloat16().to(DEVICE)
    q[1, 2, 40] = torch.nan
    turn = cases.rotation_of(torch.tensor([0, 7, 4000]), 32).to(DEVICE)
    got, want = q.clone(), q.clone()
    rows_kernels.rotate_queries(got, turn, is_rounded)
    refs.rotate_queries_ref(want, turn, is_rounded)
    assert torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))
    assert not torch.equal(got, q)


def test_closed_groups_equal_reference():
    inputs = cases.group_inputs(7, 64, DEVICE)
    got, kept = cases.closed(rows_kernels.close_groups, inputs)
    want, wanted_rows = cases.closed(refs.close_groups_ref, inputs)
    assert torch.equal(kept, wanted_rows)
    assert cases.relative(got, want) < 1e-3
    assert not got[~inputs[4]].any()
    inputs[1] = -inputs[1]
    assert cases.relative(cases.closed(rows_kernels.close_groups, inputs)[0], want) > 0.1


def test_refusals_name_the_field():
    inputs = cases.attention_inputs(1, 2, 64, 4, 4, DEVICE)
    inputs[0] = inputs[0].float()
    with pytest.raises(attention.GatherAttentionUnsupportedError, match=r"q\.dtype"):
        attention.gather_attention(*inputs)
    with pytest.raises(selection.SelectTopkUnsupportedError, match="k 4096"):
        selection.select_topk_rows(torch.zeros(1, 9, device=DEVICE), torch.tensor([9]), 4096)
    scores = cases.index_inputs(1, 2, 64, 8, DEVICE)
    scores[2] = scores[2][:, :30]
    with pytest.raises(scoring.IndexScoresUnsupportedError, match="30"):
        scoring.index_scores(*scores)
    x, weight, turn, pool, rows = cases.store_inputs("window", 2, 64, DEVICE)
    with pytest.raises(rows_kernels.StoreRowsUnsupportedError, match="kind"):
        rows_kernels.store_rows("keys", x, weight, turn, pool, rows, cases.EPS)
