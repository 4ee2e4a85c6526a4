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
from finwhale.ops import rounding
from tests import decode_attention_cases as cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["window", "entry", "index_key"]


def attend(inputs, splits=3, shares=2, *, heads=16, settled=False):
    launch = attention.AttentionLaunch(
        heads=heads, keys=16, splits=splits, num_warps=4, shares=shares
    )
    return attention.gather_attention(*inputs, launch=launch, settled=settled)


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


@pytest.mark.parametrize(
    ("heads", "dim", "splits", "shares", "tile"),
    [(20, 64, 2, 2, 16), (40, 128, 5, 1, 64)],
)
def test_stretches_are_added_with_the_sink(heads, dim, splits, shares, tile):
    """Query 1 sees nothing, and its stretches are all empty; heads do not fill the last tile."""
    inputs = cases.attention_inputs(3, heads, dim, 9, 17, DEVICE, turning=16)
    got = attend(inputs, splits, shares, heads=tile)
    assert cases.relative(got, refs.gather_attention_ref(*inputs)) < 5e-3
    assert not got[1].any()
    assert torch.equal(attend(inputs, splits, shares, heads=tile), got)
    inputs[5] = inputs[5] + 1
    assert not torch.equal(attend(inputs, splits, shares, heads=tile), got)


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


@pytest.mark.parametrize(("width", "k"), [(1, 0), (16, 16), (17, 1), (9, 31), (32, 0)])
@pytest.mark.parametrize("splits", [3, 4])
def test_rows_may_be_read_before_the_wait(width, k, splits):
    """As many tiles as stretches or fewer: each program has one, of the window or of entries."""
    inputs = cases.attention_inputs(3, 5, 64, width, k, DEVICE, turning=16)
    if not k:
        inputs[3] = None
    got = attend(inputs, splits, 1, settled=True)
    assert cases.relative(got, refs.gather_attention_ref(*inputs)) < 5e-3
    assert not got[1].any()
    plain = attend(inputs, splits, 1)
    # Compiled, its products may sum in another order.
    assert torch.equal(got, plain) if DEVICE == "cpu" else cases.relative(got, plain) < 5e-3


def test_a_step_of_one_row_has_a_program_for_each_tile():
    """Or its rows could not be read before the wait: 128 of the window and 512 entries."""
    launch = attention.attention_launch(1, torch.device("cpu"))
    assert launch.shares == 1
    assert launch.splits * launch.keys >= 128 + 512
    assert 128 % launch.keys == 512 % launch.keys == 0


def test_more_tiles_than_stretches_are_not_read_before_the_wait():
    inputs = cases.attention_inputs(3, 5, 64, 17, 31, DEVICE, turning=16)
    for splits, shares in ((3, 1), (4, 2)):
        got = attend(inputs, splits, shares, settled=True)
        assert torch.equal(got, attend(inputs, splits, shares))


@pytest.mark.parametrize(("shares", "settled"), [(1, False), (1, True), (2, False)])
@pytest.mark.parametrize("broken", ["sink", "entry", "window", "rotation", "hidden"])
def test_gathered_attention_comparison_notices_a_mistake(broken, shares, settled):
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
    moved = [q, ring, window, main, entries, sink, turn]
    assert cases.relative(attend(moved, 3, shares, settled=settled), want) > 1e-2


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


def test_scores_of_every_tile_and_number_of_programs_are_equal_bit_for_bit():
    inputs = cases.index_inputs(2, 32, 128, 129, DEVICE)
    want = scored(inputs, keys=64)[0][0]
    cases.assert_scores_near(scored(inputs, keys=64), refs.index_scores_ref(*inputs), inputs)
    for keys, programs in ((32, 5), (64, 1), (128, 2)):
        assert torch.equal(scored(inputs, keys=keys, programs=programs)[0][0], want)


def rounded_index_inputs(tokens, heads, columns):
    """Queries and keys as a model's: rounded to MXFP4, every group with a size of its own."""
    _, weights, _, tables, visible, _, _ = cases.index_inputs(tokens, heads, 128, columns, "cpu")
    g = cases.generator(3)
    rows = tables.numel() * 16
    q, keys = torch.randn(tokens, heads, 128, generator=g), torch.randn(rows, 128, generator=g)
    for x in (q, keys):
        x.view(-1, 4, 32).mul_(2.0 ** torch.randint(-8, 9, (x.numel() // 128, 4, 1), generator=g))
    q = rounding.round_index(q.bfloat16())
    tables = torch.arange(tables.numel()).view_as(tables)
    visible = torch.full_like(visible, columns)
    packed = paged_reads.pack_index(keys, "fp4")
    return [x.to(DEVICE) for x in (q, weights, packed, tables, visible)]


def exact_scores(q, weights, keys):
    """Return the scores of two rows of 70 entries in float64, and the sums of absolute terms."""
    rows = paged_reads.unpack_index(keys, "fp4", 128).double().view(2, -1, 128)[:, :70]
    dots = (q.double() @ rows.transpose(1, 2)).relu()
    weights = weights[:, :, None].double()
    return (dots * weights).sum(1), (dots * weights.abs()).sum(1)


def index_codes(tokens, heads, columns):
    """Return inputs without scales, all sixteen codes, and the scores as sums of integers."""
    g = cases.generator(4)
    twice = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    blocks = -(-columns // 16)
    codes = torch.randint(0, 16, (tokens * blocks * 16, 128), generator=g)
    picks = torch.randint(0, 16, (tokens, heads, 128), generator=g)
    codes[::3], picks[:, 0] = 7, 7  # the largest sums: 32 products of 6 and 6
    codes[1::3, ::2], picks[:, 1, ::2] = 15, 1
    keys = torch.full((len(codes), 68), 127, dtype=torch.uint8)
    keys[:, :64] = codes[:, ::2] | codes[:, 1::2] << 4
    weights = torch.tensor([1.0, -1.0, 2.0, 0.5]).repeat(heads // 4).expand(tokens, -1)
    tables = torch.arange(tokens * blocks).view(tokens, -1)
    visible = torch.full((tokens,), columns)
    values = twice[codes].view(tokens, -1, 128)[:, :columns]
    dots = (twice[picks] @ values.transpose(1, 2)).clamp_min(0)  # four times the sums
    want = (dots * (weights * 2).long()[:, :, None]).sum(1).double() / 8
    inputs = (twice[picks] / 2).bfloat16(), weights.contiguous(), keys, tables, visible
    return [x.to(DEVICE) for x in inputs] + [16, columns], want.float().to(DEVICE)


def test_scores_of_rounded_queries_with_scales_of_their_own_are_the_exact_sums():
    """Compared in float64; scales of groups differ by up to 2^16, codes and signs are random."""
    q, weights, keys, tables, visible = rounded_index_inputs(2, 6, 70)
    got = scored([q, weights, keys, tables, visible, 16, 70])[0].double()
    want, sizes = exact_scores(q, weights, keys)
    assert ((got - want).abs() <= 1e-6 * sizes).all()
    assert (want != 0).any()
    keys[:, 64] += 1  # the scale of the first group
    moved = scored([q, weights, keys, tables, visible, 16, 70])[0].double()
    assert ((moved - want).abs() > 1e-3 * sizes).any()


@pytest.mark.parametrize("shift", [-30, -60, 24])
def test_groups_of_a_query_may_be_far_apart(shift):
    """Beyond what one factor of a head holds; a tiny group counts where others meet zeros."""
    q, weights, keys, tables, visible = rounded_index_inputs(2, 6, 70)
    q = q.float()
    q[:, 2, 32:64] *= 2.0**shift
    q[:, 3, 96:] *= 2.0 ** (shift - 8)
    q = q.bfloat16()
    keys[::2, :16], keys[::2, 32:64] = 0, 0
    got = scored([q, weights, keys, tables, visible, 16, 70])[0].double()
    want, sizes = exact_scores(q, weights, keys)
    assert ((got - want).abs() <= 1e-6 * sizes).all()
    without = q.clone()
    without[:, 2, 32:64] = 0
    weights[:, [0, 1, 3, 4, 5]] = 0
    alone = scored([q, weights, keys, tables, visible, 16, 70])[0]
    assert (alone != 0).any()
    assert not torch.equal(alone, scored([without, weights, keys, tables, visible, 16, 70])[0])


def test_scores_of_codes_alone_are_exact():
    inputs, want = index_codes(3, 8, 40)
    got, _ = scored(inputs)
    assert torch.equal(got, want)
    changed = inputs[2].clone()
    changed[5, 3] ^= 1
    assert not torch.equal(scored([*inputs[:2], changed, *inputs[3:]])[0], want)


# The largest of its group is 2: 1.25 has a bit too many, and beside 2 or more nothing below 0.25
# nor 0.375 has a code.
@pytest.mark.parametrize("value", [1.125, 1.25, 0.375, 0.125, 2.0**-40, torch.nan, torch.inf])
def test_a_query_that_was_not_rounded_gives_nan_and_no_other_does(value):
    inputs = cases.index_inputs(3, 6, 64, 40, DEVICE)
    inputs[4][:] = 40
    inputs[2].fill_(0x22)  # every key is 1
    inputs[2][:, 32:] = 127
    inputs[0][1, 4, 33] = value
    got, best = scored(inputs)
    assert got[1].isnan().all()
    assert not got[::2].isnan().any()
    assert best[1, :-1].isneginf().all()  # a NaN is the best of no block
    inputs[0][1, 4, 33] = 1.5
    assert not scored(inputs)[0].isnan().any()


@pytest.mark.parametrize("exponent", [-126, -123, -122, 0, 120])
@pytest.mark.parametrize("most", [8, 6, 2])
def test_every_group_of_codes_is_a_rounded_query(exponent, most):
    """All codes up to a largest one, under the smallest scales and large ones."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[:most].double() * 2.0**exponent
    group = torch.cat((values, -values)).repeat(16)[:32]
    q = torch.stack((group, torch.zeros(32))).flatten().bfloat16().view(1, 1, 64).to(DEVICE)
    inputs = cases.index_inputs(1, 1, 64, 40, DEVICE)
    got, _ = scored([q, *inputs[1:]])
    assert not got.isnan().any()


def test_a_key_whose_scale_is_not_a_number_has_no_score():
    inputs = cases.index_inputs(1, 6, 128, 40, DEVICE)
    at = int(inputs[3][0, 1]) * 16 + 3  # entry 19
    for group, code in ((0, 255), (3, 255), (1, 0)):
        keys = inputs[2].clone()
        keys[at, 64 + group] = code
        got, _ = scored([*inputs[:2], keys, *inputs[3:]])
        assert got[0].isnan().nonzero().flatten().tolist() == ([19] if code else [])


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


@pytest.mark.parametrize("kind", ["near", "far", "level", "rising"])
@pytest.mark.parametrize("k", [7, 32])
def test_selection_descends_through_blocks_of_blocks(kind, k):
    """Rows that no program can hold, with the best in one block, in one each, equal, or last."""
    num, spread = 1300, torch.zeros(2, 1300)
    if kind == "near":
        spread[:, 1034 : 1034 + k + 3] = 1.0 + torch.arange(k + 3)
    elif kind == "far":
        spread[:, ::71] = 1.0 + torch.arange(-(-num // 71)) % 5
    elif kind == "rising":
        spread += torch.arange(num)
    scores = (spread - 3.0 * (torch.arange(num) % 2)).to(DEVICE)
    lengths = torch.tensor([num, num - 9], device=DEVICE)
    want = cases.listed_topk(scores, lengths, k)
    assert torch.equal(selected(scores, lengths, k).cpu(), want)
    scores[:, int(want[0, 0])] = -torch.inf
    assert not torch.equal(selected(scores, lengths, k).cpu(), want)


def test_blocks_are_few_enough_for_one_program_and_cover_a_row():
    for k in (1, 5, 512, 2048):
        for stretch in (4096, 16384):
            for capacity in (stretch + 1, 131_072, 1 << 20, (1 << 30) - 1):
                block, width = selection.block_size(capacity, k, stretch), capacity
                assert k * block <= stretch
                for _ in range(20):
                    width = -(-width // block) if width > stretch else width
                assert width <= stretch


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
    # Its codes say so, too: whoever reads the row gets no number.
    is_nan = ((pool[:7, :64] & 127) == 127).any(1)
    assert torch.equal(~is_nan, finite)


@pytest.mark.parametrize(
    ("tokens", "columns", "dim"), [(1, 32, 64), (2, 96, 128), (1, 1536, 512), (9, 32, 64)]
)
def test_a_joined_row_gives_its_latent_and_its_window_row(tokens, columns, dim):
    exact = cases.joined_inputs(tokens, columns, dim, DEVICE, exact=True)
    got = cases.split(rows_kernels.latent_and_window, exact)
    for mine, theirs in zip(got, cases.split(refs.latent_and_window_ref, exact), strict=True):
        assert torch.equal(mine, theirs)
    inputs = cases.joined_inputs(tokens, columns, dim, DEVICE)
    latent, ring = cases.split(rows_kernels.latent_and_window, inputs)
    want, wanted_ring = cases.split(refs.latent_and_window_ref, inputs)
    # The norms' sums in another order may carry a value over a boundary, rarely.
    assert cases.relative(latent, want) < 5e-3
    assert torch.equal(rounding.round_fp8(latent), latent)
    assert float((ring != wanted_ring).float().mean()) < 2e-3
    assert not torch.equal(ring, inputs[4])  # a row was written


@pytest.mark.skipif(DEVICE == "cuda", reason="the compiled kernels sum over different warps")
@pytest.mark.parametrize(
    ("tokens", "value"), [(1, None), (2, None), (65, None), (2, torch.nan), (2, torch.inf)]
)
def test_the_window_row_of_a_joined_row_is_that_of_store_rows(tokens, value):
    inputs = cases.joined_inputs(tokens, 32, 64, DEVICE)
    joined, _, kv_weight, turn, ring, rows = inputs
    latent, got = cases.split(rows_kernels.latent_and_window, inputs)
    if value is not None:
        joined[0, 32 + 5] = value
        again, got = cases.split(rows_kernels.latent_and_window, inputs)
        assert torch.equal(again, latent)  # the key is no part of it
    kv = joined[:, 32:].contiguous()
    rows_kernels.store_rows("window", kv, kv_weight, turn, ring, rows, cases.EPS)
    assert torch.equal(got, ring)
    if value is not None:
        joined[0, 3] = value
        broken, same = cases.split(rows_kernels.latent_and_window, inputs)
        assert broken[0].isnan().all()
        assert torch.equal(broken[1:], latent[1:])
        assert torch.equal(same, ring)


def test_a_joined_row_without_a_place_writes_nothing_and_has_its_latent():
    inputs = cases.joined_inputs(3, 32, 64, DEVICE)
    want = cases.split(rows_kernels.latent_and_window, inputs)[0]
    inputs[5] = torch.tensor([-1, -7, -(1 << 40)], device=DEVICE)
    latent, ring = cases.split(rows_kernels.latent_and_window, inputs)
    assert torch.equal(ring, inputs[4])
    assert torch.equal(latent, want)
    none = [x[:0] for x in (inputs[0], inputs[5])]
    empty = [none[0], *inputs[1:3], inputs[3][:, :0].contiguous(), inputs[4], none[1]]
    latent, ring = cases.split(rows_kernels.latent_and_window, empty)
    assert latent.shape == (0, 32)
    assert torch.equal(ring, inputs[4])


@pytest.mark.parametrize("broken", ["q_weight", "kv_weight", "rotation", "rows", "order"])
def test_joined_rows_comparison_notices_a_mistake(broken):
    inputs = cases.joined_inputs(7, 32, 64, DEVICE, exact=True)
    latent, ring = cases.split(refs.latent_and_window_ref, inputs)
    if broken == "order":
        inputs[0] = inputs[0].roll(64, dims=1)  # the key before the latent
    elif broken == "rows":
        inputs[5] = torch.where(inputs[5] < 0, -1, (inputs[5] + 1) % len(inputs[4]))
    else:
        at = ["", "q_weight", "kv_weight", "rotation"].index(broken)
        inputs[at] = inputs[at].flip(-1 if at < 3 else 1).contiguous()
    got, got_ring = cases.split(rows_kernels.latent_and_window, inputs)
    assert torch.equal(got, latent) == (broken not in ("q_weight", "order"))
    assert torch.equal(got_ring, ring) == (broken == "q_weight")


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
    joined, q_weight, *others = cases.joined_inputs(2, 32, 64, DEVICE)
    for wrong, match in (
        ((joined, q_weight[:31]), "q_weight: 31"), ((joined, q_weight.float()), "q_weight torch"),
        ((joined[:, :-32].contiguous(), q_weight), r"joined: 64 .* 32 \+ 64"),
        ((joined[:, :-32].contiguous(), q_weight, others[0][:32]), "dim 32"),
        ((joined, q_weight, others[0], others[1], others[2][:, :-1]), "pool"),
    ):  # fmt: skip
        arguments = [*wrong, *others[len(wrong) - 2 :]]
        with pytest.raises(rows_kernels.StoreRowsUnsupportedError, match=match):
            rows_kernels.latent_and_window(*arguments, cases.EPS)
