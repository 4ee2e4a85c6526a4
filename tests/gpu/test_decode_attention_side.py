"""Decode kernels of the attention side compiled for a GPU: released shapes, graphs, far offsets."""

import pytest
import torch

if not torch.cuda.is_available():
    # Before triton is imported: the interpreter's tests must be the first to do that on a CPU.
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from finwhale.cache import paged_reads
from finwhale.decode_kernels import attention_refs as refs
from finwhale.decode_kernels import gather_attention as attention
from finwhale.decode_kernels import index_scores as scoring
from finwhale.decode_kernels import select_topk as selection
from finwhale.decode_kernels import store_rows as rows_kernels
from finwhale.decode_kernels.launch import Overlap
from tests import decode_attention_cases as cases

DEVICE = "cuda"
KINDS = ["window", "entry", "index_key"]
LAUNCHES = [None, "invariant", *attention.BENCHED]


@pytest.fixture(autouse=True)
def _full_precision():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def attend(inputs, launch):
    if launch == "invariant":
        return attention.gather_attention(*inputs, invariant=True)
    return attention.gather_attention(*inputs, launch=launch)


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_every_launch_of_gathered_attention_equals_reference(launch):
    inputs = cases.attention_inputs(5, 64, 512, 128, 512, DEVICE, rows=900, turning=64)
    got, want = attend(inputs, launch), refs.gather_attention_ref(*inputs)
    assert not got[1].any()
    assert cases.relative(got, want) < 6e-3
    broken = [*inputs[:4], torch.where(inputs[4] < 0, -1, inputs[4] ^ 1), *inputs[5:]]
    assert cases.relative(attend(broken, launch), want) > 6e-2


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "width", "k"),
    [
        (1, 64, 512, 128, 512), (63, 64, 512, 128, 512), (65, 64, 512, 127, 511),
        (1000, 4, 512, 63, 65), (4097, 2, 64, 33, 17), (3, 1, 64, 1, 1), (2, 24, 256, 128, 1000),
        (2, 64, 512, 128, 0),
    ],
)  # fmt: skip
def test_gathered_attention_at_odd_shapes(tokens, heads, dim, width, k):
    inputs = cases.attention_inputs(tokens, heads, dim, width, k, DEVICE, rows=777, turning=32)
    want = refs.gather_attention_ref(*inputs)
    assert cases.relative(attend(inputs, None), want) < 6e-3
    assert cases.relative(attend(inputs, "invariant"), want) < 6e-3


@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_every_launch_of_attention_repeats_its_bits(tokens):
    inputs = cases.attention_inputs(tokens, 64, 512, 128, 512, DEVICE, rows=900, turning=64)
    want = refs.gather_attention_ref(*inputs)
    launches = [attention.attention_launch(t, inputs[0].device) for t in (1, 8, 64)]
    for launch in (*launches, *attention.BENCHED):
        got = attend(inputs, launch)
        assert cases.relative(got, want) < 6e-3, launch
        assert all(torch.equal(got, attend(inputs, launch)) for _ in range(5)), launch


def test_gathered_attention_reads_every_code_and_scale():
    codes = torch.arange(256, dtype=torch.uint8)
    main = torch.zeros(127, 288, dtype=torch.uint8)
    main[:, :256], main[:, 256:] = codes, torch.arange(127, dtype=torch.uint8)[:, None]
    ring = torch.zeros(100, 528, dtype=torch.uint8)
    ring[:, :512] = torch.tensor([c for c in range(256) if c & 127 != 127] * 3)[:512].byte()
    ring[:, 512:] = torch.arange(80, 180, dtype=torch.uint8)[:, None]
    sink = torch.full((64,), -torch.inf)
    for rows, is_entry in ((127, True), (100, False)):
        at, none = torch.arange(rows)[:, None], torch.full((rows, 1), -1)
        q = torch.zeros(rows, 64, 512).bfloat16()
        window, entry = (none, at) if is_entry else (at, none)
        inputs = [x.to(DEVICE) for x in (q, ring, window, main, entry, sink)]
        if is_entry:
            want = paged_reads.unpack_entry(main, "fp4", 512)
        else:
            want = paged_reads.unpack_window(ring, "fp4", 512)
        for launch in LAUNCHES:
            got = attend(inputs, launch).float().cpu()
            assert torch.equal(got, want[:, None].expand_as(got)), launch


def test_invariant_attention_gives_a_query_the_same_bits_in_any_batch():
    inputs = cases.attention_inputs(130, 64, 512, 128, 512, DEVICE, rows=900, turning=64)
    together = attend(inputs, "invariant")
    q, ring, window, main, entries, sink, turn = inputs
    for at in (slice(0, 1), slice(3, 10), slice(60, 129)):
        part = [q[at], ring, window[at], main, entries[at], sink, turn[:, at].contiguous()]
        assert torch.equal(attend(part, "invariant"), together[at])


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "columns"),
    [(1, 32, 128, 1), (3, 32, 128, 63), (2, 32, 128, 4097), (65, 6, 32, 1000), (1, 32, 128, 70001)],
)
def test_index_scores_equal_reference(tokens, heads, dim, columns):
    inputs = cases.index_inputs(tokens, heads, dim, columns, DEVICE, per_block=64)
    want = refs.index_scores_ref(*inputs)
    for launch in (None, *scoring.BENCHED):
        cases.assert_scores_near(scoring.index_scores(*inputs, launch=launch), want, inputs)
    changed = [inputs[0], inputs[1].roll(1, 1), *inputs[2:]]
    with pytest.raises(AssertionError):
        cases.assert_scores_near(scoring.index_scores(*changed), want, inputs)


def test_index_scores_read_every_code_and_scale():
    # One query channel at a time: the score is what the key holds there, if it is positive.
    keys = torch.zeros(2048, 68, dtype=torch.uint8)
    keys[:, :64] = torch.arange(256, dtype=torch.uint8)[torch.arange(2048) % 256, None]
    keys[:, 64:] = (10 + torch.arange(2048) // 9).byte()[:, None]  # 2^-117 to 2^110
    keys[-1, 64:] = 255  # NaN
    q = torch.zeros(4, 32, 128).bfloat16()
    for t, (channel, sign) in enumerate(((0, 1), (1, 1), (126, -1), (33, -1))):
        q[t, 0, channel] = sign
    weights = torch.ones(4, 32)
    tables = torch.arange(32)[None].expand(4, -1).contiguous()
    visible = torch.full((4,), 2048)
    inputs = [x.to(DEVICE) for x in (q, weights, keys, tables, visible)]
    got, _ = scoring.index_scores(*inputs, 64, 2048)
    want, _ = refs.index_scores_ref(*[x.cpu() for x in inputs], 64, 2048)
    assert torch.equal(got.cpu().nan_to_num(-1), want.nan_to_num(-1))
    assert want.isnan().any()


@pytest.mark.parametrize("launch", [None, *scoring.BENCHED], ids=str)
def test_sums_of_products_of_codes_are_exact(launch):
    """The matrix unit's sums of FP8 products keep few bits; 32 products of codes need no more."""
    twice = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (4096, 128), generator=g)
    picks = torch.randint(0, 16, (1, 32, 128), generator=g)
    codes[::3], picks[:, ::4] = 7, 7  # the largest sums: 32 products of 6 and 6
    codes[1::3, 1:], picks[:, 1::4, 1:] = 9, 1  # one large product beside the smallest
    keys = torch.full((4096, 68), 127, dtype=torch.uint8)
    keys[:, :64] = codes[:, ::2] | codes[:, 1::2] << 4
    weights = torch.tensor([1.0, -1.0, 2.0, 0.5]).repeat(8)[None]
    dots = (twice[picks] @ twice[codes].T).clamp_min(0)  # four times the sums
    want = (dots * (weights * 2).long()[:, :, None]).sum(1).double() / 8
    tables = torch.arange(64)[None]
    q = (twice[picks] / 2).bfloat16()
    # A head's other groups are smaller by 2^24: their sums are exact as well.
    small = q.clone()
    small[:, :, 32:] *= 2.0**-24
    alone = (twice[picks][..., 32:] @ twice[codes][..., 32:].T).clamp_min(0)
    wanted = (alone * (weights * 2).long()[:, :, None]).sum(1).double() / 8 * 2.0**-24
    for query, first, expected in ((q, 127, want), (small, 0, wanted)):
        keys[:, 64] = first
        inputs = [x.to(DEVICE) for x in (query, weights, keys, tables, torch.tensor([4096]))]
        got, _ = scoring.index_scores(*inputs, 64, 4096, launch=launch)
        assert torch.equal(got.cpu(), expected.float())
        changed = inputs[2].clone()
        changed[2, 40] ^= 1
        again, _ = scoring.index_scores(*inputs[:2], changed, *inputs[3:], 64, 4096, launch=launch)
        assert (again != got).nonzero()[:, 1].tolist() == [2]


@pytest.mark.parametrize("value", [1.125, 1.25, 0.375, 0.125, 2.0**-40, torch.nan, torch.inf])
def test_a_query_that_was_not_rounded_gives_nan(value):
    inputs = cases.index_inputs(3, 32, 128, 300, DEVICE, per_block=64)
    inputs[4][:] = 300
    inputs[2][:] = 0x22
    inputs[2][:, 64:] = 127
    inputs[0][1, 4, 33] = value
    got, _ = scoring.index_scores(*inputs)
    assert got[1].isnan().all()
    assert not got[::2].isnan().any()


def test_pool_scores_are_those_of_the_full_scan():
    inputs = cases.index_inputs(4, 32, 128, 40_000, DEVICE, per_block=64)
    blocks = cases.pool_blocks_of(inputs[4], 2048)
    full, _ = scoring.index_scores(*inputs)
    got, _ = scoring.index_scores(*inputs[:6], 16384, blocks)
    entry = blocks.repeat_interleave(8, 1) * 8 + torch.arange(8, device=DEVICE).repeat(2048)
    seen = (entry >= 0) & (entry < inputs[4][:, None])
    want = torch.where(seen, full.gather(1, entry.clamp(0, 39_999)), -torch.inf)
    assert torch.equal(got, want)


@pytest.mark.parametrize("num", [1, 63, 65, 1000, 4097, 65_537, 300_001])
@pytest.mark.parametrize("k", [1, 512, 2048])
def test_selection_equals_reference(num, k):
    scores, lengths = cases.topk_rows(5, num, DEVICE)
    want = refs.select_topk_rows_ref(scores, lengths, k)
    for launch in (None, *selection.BENCHED):
        if launch is None or launch.stretch >= 2 * k:
            got = selection.select_topk_rows(scores, lengths, k, launch=launch)
            assert torch.equal(got, want), launch
    if num == 4097:
        assert torch.equal(want.cpu(), cases.listed_topk(scores, lengths, k))


def test_selection_of_a_million_equals_reference():
    g = torch.Generator(DEVICE).manual_seed(0)
    scores = torch.randn(3, 1 << 20, generator=g, device=DEVICE).relu_()
    scores[1] = scores[1].bfloat16().float()  # many ties
    scores[2] *= torch.rand(1 << 20, generator=g, device=DEVICE) < 2e-4  # mostly zeros
    lengths = torch.tensor([1 << 20, (1 << 20) - 7, 1 << 20], device=DEVICE)
    want = refs.select_topk_rows_ref(scores, lengths, 512)
    for launch in (None, *selection.BENCHED):
        assert torch.equal(selection.select_topk_rows(scores, lengths, 512, launch=launch), want)


@pytest.mark.parametrize("kind", KINDS)
def test_stored_rows_equal_reference(kind):
    dim = 128 if kind == "index_key" else 512
    for exact in (True, False):
        inputs = cases.store_inputs(kind, 1000, dim, DEVICE, exact=exact, turning=64)
        got, latent, queries = cases.stored(rows_kernels.store_rows, kind, inputs, heads=20)
        want, wanted_latent, wanted = cases.stored(refs.store_rows_ref, kind, inputs, heads=20)
        assert float((queries != wanted).float().mean()) < 2e-3
        if exact:
            assert float((got != want).float().mean()) < 1e-4
            assert torch.equal(latent, wanted_latent)
        else:
            assert float((got != want).float().mean()) < 2e-3
            assert cases.relative(latent, wanted_latent) < 1e-3
    inputs[2] = inputs[2].flip(1).contiguous()
    assert not torch.equal(cases.stored(rows_kernels.store_rows, kind, inputs)[0], want)


@pytest.mark.parametrize("tokens", [1, 2, 65])
def test_joined_rows_equal_reference(tokens):
    for exact in (True, False):
        inputs = cases.joined_inputs(tokens, 1536, 512, DEVICE, exact=exact, turning=64)
        latent, ring = cases.split(rows_kernels.latent_and_window, inputs)
        want, wanted_ring = cases.split(refs.latent_and_window_ref, inputs)
        # A product fused into the sum of a rotation may move a value over a boundary.
        assert float((ring != wanted_ring).float().mean()) < 2e-3
        if exact:
            assert torch.equal(latent, want)
        else:
            assert cases.relative(latent, want) < 5e-3
    joined, _, kv_weight, turn, near, rows = inputs
    kv = joined[:, 1536:].contiguous()
    rows_kernels.store_rows("window", kv, kv_weight, turn, near, rows, cases.EPS)
    # The two kernels add the squares over different warps.
    assert float((near != ring).float().mean()) < 2e-3
    inputs[3] = turn.flip(0).contiguous()  # sin for cos
    assert float((cases.split(rows_kernels.latent_and_window, inputs)[1] != ring).sum()) > 20


@pytest.mark.parametrize("is_rounded", [False, True])
def test_turned_queries_equal_reference(is_rounded):
    heads, dim = (32, 128) if is_rounded else (64, 512)
    q = torch.randn(65, heads, dim, device=DEVICE).bfloat16()
    turn = cases.rotation_of(torch.arange(65) * 999, 64).to(DEVICE)
    got, want = q.clone(), q.clone()
    rows_kernels.rotate_queries(got, turn, is_rounded)
    refs.rotate_queries_ref(want, turn, is_rounded)
    # A product fused into the sum of a rotation may move a value over a boundary.
    assert float((got != want).float().mean()) < 2e-3
    assert not torch.equal(got, q)


def test_closed_groups_equal_reference():
    inputs = cases.group_inputs(1000, 512, DEVICE)
    got, kept = cases.closed(rows_kernels.close_groups, inputs)
    want, wanted_rows = cases.closed(refs.close_groups_ref, inputs)
    assert torch.equal(kept, wanted_rows)
    assert cases.relative(got, want) < 1e-3
    assert not got[~inputs[4]].any()
    inputs[1] = -inputs[1]
    assert cases.relative(cases.closed(rows_kernels.close_groups, inputs)[0], want) > 0.1


@pytest.mark.parametrize("overlap", list(Overlap))
def test_a_graph_of_all_kernels_follows_its_inputs(overlap):
    inputs = cases.index_inputs(5, 32, 128, 40_000, DEVICE, per_block=64)
    held = cases.attention_inputs(5, 64, 512, 128, 512, DEVICE, rows=40_064 * 5, turning=64)
    x, weight, turn, pool, rows = cases.store_inputs("window", 5, 512, DEVICE, turning=64)
    joined = cases.joined_inputs(5, 1536, 512, DEVICE, turning=64)
    lengths, everything = (inputs[4] + 7) // 8, torch.full_like(inputs[4], 16384)

    def step(overlap=overlap):
        more = {"overlap": overlap}
        rows_kernels.store_rows("window", x, weight, turn, pool, rows, cases.EPS, **more)
        latent = rows_kernels.latent_and_window(*joined, cases.EPS, **more)
        _, best = scoring.index_scores(*inputs, **more)
        blocks = selection.select_topk_rows(best, lengths, 2048, **more)
        pooled, _ = scoring.index_scores(*inputs[:6], 16384, blocks, **more)
        chosen = selection.select_topk_rows(pooled, everything, 512, **more)
        q, both = held[0].clone(), (overlap, overlap)
        entries = selection.pool_rows(chosen, inputs[3], 64, blocks, **more)
        rows_kernels.rotate_queries(q, held[6], False, **more)
        # The launch before writes q alone, so rows and indices are read before the wait for it.
        settled = attention.gather_attention(
            q, *held[1:4], entries, *held[5:], settled=True, overlaps=both
        )
        out = attention.gather_attention(*held[:4], entries, *held[5:], overlaps=both)
        return out, settled, entries, pool.clone(), latent, joined[4].clone()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    fresh = cases.index_inputs(5, 32, 128, 40_000, DEVICE, per_block=64, seed=7)
    for old, new in zip(inputs[:5], fresh[:5], strict=True):
        old.copy_(new)
    lengths.copy_((inputs[4] + 7) // 8)
    held[0].mul_(-0.5)
    x.mul_(2.0)
    joined[0].copy_(joined[0].roll(1, dims=0))
    graph.replay()
    replayed = [y.clone() for y in captured]
    for mine, again in zip(replayed, step(overlap=Overlap.NONE), strict=True):
        assert torch.equal(mine, again)
    assert (replayed[2] >= 0).any()
    assert not torch.equal(replayed[0], replayed[1])


def test_offsets_beyond_two_to_the_31_reach_the_last_rows():
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    inputs = cases.attention_inputs(4, 64, 512, 128, 512, DEVICE, rows=600, turning=64)
    q, ring, window, main, entries, sink, turn = inputs
    far_main = torch.zeros((1 << 31) // 288 + 1000, 288, dtype=torch.uint8, device=DEVICE)
    far_ring = torch.zeros((1 << 31) // 528 + 1000, 528, dtype=torch.uint8, device=DEVICE)
    far_main[-len(main) :], far_ring[-len(ring) :] = main, ring
    moved = [
        q, far_ring, torch.where(window < 0, -1, window + len(far_ring) - len(ring)),
        far_main, torch.where(entries < 0, -1, entries + len(far_main) - len(main)), sink, turn,
    ]  # fmt: skip
    assert torch.equal(attend(moved, None), attend(inputs, None))
    del far_main, far_ring, moved
    q, weights, keys, tables, visible, size, columns = cases.index_inputs(
        3, 32, 128, 1000, DEVICE, per_block=64
    )
    far = torch.zeros((1 << 31) // 68 // 64 * 64 + 6400, 68, dtype=torch.uint8, device=DEVICE)
    far[-len(keys) :] = keys
    shift = (len(far) - len(keys)) // 64
    got, _ = scoring.index_scores(q, weights, far, tables + shift, visible, size, columns)
    want, _ = scoring.index_scores(q, weights, keys, tables, visible, size, columns)
    for t, n in enumerate(visible.tolist()):
        assert torch.equal(got[t, :n], want[t, :n])
    x, weight, turn, pool, rows = cases.store_inputs("index_key", 9, 128, DEVICE, turning=64)
    near, *_ = cases.stored(rows_kernels.store_rows, "index_key", [x, weight, turn, pool, rows])
    far[-len(pool) :] = pool
    moved = torch.where(rows < 0, -1, rows + len(far) - len(pool))
    rows_kernels.store_rows("index_key", x, weight, turn, far, moved, cases.EPS)
    assert torch.equal(far[-len(pool) :], near)
    many = torch.randn(2100, 1 << 20, device=DEVICE)  # 2.2 * 10^9 scores
    lengths = torch.full((2100,), 1 << 20, device=DEVICE)
    lengths[:-2] = 5
    got = selection.select_topk_rows(many, lengths, 512)[-2:]
    assert torch.equal(got, refs.select_topk_rows_ref(many[-2:], lengths[-2:], 512))
