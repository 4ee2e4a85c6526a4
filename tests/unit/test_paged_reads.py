"""Packed rows and the two reads through them: lossless bytes, the formulas, one row's own bits."""

from __future__ import annotations

import math

import pytest
import torch

from finwhale.cache import paged_reads
from finwhale.cache.paged_reads import (
    PackedRowError,
    all_finite_rows,
    pack_entry,
    pack_index,
    pack_window,
    paged_attention_ref,
    paged_index_scores_ref,
    unpack_entry,
    unpack_index,
    unpack_window,
)
from finwhale.ops.attention import sparse_attention_ref
from finwhale.ops.index import index_scores
from finwhale.ops.rounding import round_fp8, round_index, round_main_kv

ROWS = {
    "window": (pack_window, unpack_window, round_fp8),
    "entry": (pack_entry, unpack_entry, round_main_kv),
    "index": (pack_index, unpack_index, round_index),
}
# Bytes of one row of 64 channels, by hand: codes, then one scale per 32 or 16 channels.
BYTES = {"window": 64 + 2, "entry": 32 + 4, "index": 32 + 2}
POISON = 255


def attention_case(tokens, *, heads=2, dim=64, width=5, chosen=4, storage="fp4"):
    """Return arguments of `paged_attention_ref`; row 0 of every pool is poison no token sees."""
    ring = pack_window(torch.randn(7, dim), storage)
    main = pack_entry(torch.randn(9, dim), storage)
    ring[0] = POISON
    main[0] = POISON
    window_index = torch.randint(1, 7 + tokens, (tokens, width))
    # A window begins somewhere inside its slots; entries stop somewhere.
    starts = torch.randint(0, width + 1, (tokens, 1))
    stops = torch.randint(0, chosen + 1, (tokens, 1))
    window_index = torch.where(torch.arange(width) < starts, -1, window_index)
    entry_index = torch.randint(1, 9, (tokens, chosen))
    entry_index = torch.where(torch.arange(chosen) < stops, entry_index, -1)
    fresh = pack_window(torch.randn(tokens, dim), storage)
    q, sink = 2 * torch.randn(tokens, heads, dim), torch.randn(heads)
    return [q, fresh, ring, window_index, main, entry_index, sink, storage]


def score_case(tokens, *, heads=3, dim=32, per_block=4, storage="fp4", lengths=(9, 0, 17)):
    """Return arguments of `paged_index_scores_ref`; unowned and unwritten rows are poison."""
    blocks = torch.randperm(12)
    keys = torch.full((12 * per_block, paged_reads.index_row_bytes(dim, storage)), POISON)
    keys = keys.to(torch.uint8)
    tables = torch.full((len(lengths), 6), -1)
    for s, length in enumerate(lengths):
        used = -(-length // per_block)
        tables[s, :used], blocks = blocks[:used], blocks[used:]
        entry = torch.arange(length)
        rows = tables[s, entry // per_block] * per_block + entry % per_block
        keys[rows] = pack_index(torch.randn(length, dim), storage)
    sequence = torch.randint(0, len(lengths), (tokens,))
    visible = (torch.rand(tokens) * (torch.tensor(lengths)[sequence] + 1)).long()
    q, weights = torch.randn(tokens, heads, dim), torch.randn(tokens, heads)
    return [q, weights, keys, tables, sequence, visible, per_block, storage]


def seen_keys(case, t) -> torch.Tensor:
    """Return the float64 rows [S, D] that token t of an attention case sees, in slot order."""
    _, fresh, ring, window_index, main, entry_index, _, storage = case
    dim = case[0].shape[-1]
    keys = []
    for row in window_index[t].tolist():
        if row >= 0:
            packed = ring[row] if row < len(ring) else fresh[row - len(ring)]
            keys.append(unpack_window(packed, storage, dim).double())
    for row in entry_index[t].tolist():
        if row >= 0:
            keys.append(unpack_entry(main[row], storage, dim).double())
    return torch.stack(keys) if keys else torch.zeros(0, dim).double()


def exact_attention(case) -> torch.Tensor:
    """Return the formula of section 4.5, one head and one key at a time, in float64."""
    q, sink = case[0].double(), case[6].double()
    out = torch.zeros_like(q)
    for t in range(q.shape[0]):
        keys = seen_keys(case, t)
        for h in range(q.shape[1]):
            e = [float(q[t, h] @ k) / math.sqrt(q.shape[-1]) for k in keys]
            if e:
                top = max(e)
                below = sum(math.exp(x - top) for x in e) + math.exp(float(sink[h]) - top)
                for x, k in zip(e, keys, strict=True):
                    out[t, h] += math.exp(x - top) / below * k
    return out


def exact_scores(case, num_columns) -> torch.Tensor:
    """Return the formula of section 5.3 in float64, entry by entry through the tables."""
    q, weights, keys, tables, sequence, visible, per_block, storage = case
    out = torch.full((q.shape[0], num_columns), -math.inf).double()
    for t in range(q.shape[0]):
        for e in range(min(num_columns, int(visible[t]))):
            row = int(tables[sequence[t], e // per_block]) * per_block + e % per_block
            k = unpack_index(keys[row], storage, q.shape[-1]).double()
            out[t, e] = sum(
                float(w) * max(0.0, float(x.double() @ k))
                for w, x in zip(weights[t], q[t], strict=True)
            )
    return out


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("storage", ["fp4", "bf16"])
def test_a_packed_row_reads_back_as_the_rounded_row(kind, storage):
    pack, unpack, rounded = ROWS[kind]
    x = torch.randn(3, 5, 64) * 10 ** torch.linspace(-6, 4, 5).unsqueeze(-1)
    x[0, 0] = 0
    x[1, 1, ::2] *= -0.0
    rows = pack(x, storage)
    assert rows.dtype == torch.uint8
    assert rows.is_contiguous()
    assert rows.shape == (3, 5, BYTES[kind] if storage == "fp4" else 128)
    expected = rounded(x) if storage == "fp4" else x.bfloat16().float()
    got = unpack(rows, storage, 64)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


def test_a_row_that_is_not_finite_is_named_and_not_refused():
    x = torch.zeros(2, 3, 64)
    x[0, 1, 5], x[1, 2, 63] = math.nan, -math.inf
    assert all_finite_rows(x).tolist() == [[True, False, True], [True, True, False]]
    assert pack_window(x, "fp4").shape == (2, 3, 66)


def test_a_wrong_storage_width_or_dim_is_refused_with_its_value():
    with pytest.raises(PackedRowError, match="'int8'"):
        pack_entry(torch.zeros(1, 64), "int8")
    with pytest.raises(PackedRowError, match="got 66 bytes each, expected 128"):
        unpack_window(torch.zeros(1, 66, dtype=torch.uint8), "bf16", 64)
    with pytest.raises(PackedRowError, match="got 48"):
        pack_index(torch.zeros(1, 48), "fp4")


@pytest.mark.parametrize("storage", ["fp4", "bf16"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_paged_attention_equals_the_formula_in_float64(storage, tokens):
    case = attention_case(tokens, storage=storage)
    got = paged_attention_ref(*case).double()
    torch.testing.assert_close(got, exact_attention(case), rtol=1e-5, atol=1e-6)


def test_paged_attention_equals_sparse_attention_over_the_unpacked_rows():
    window, tokens, earlier, dim = 4, 5, 3, 64
    rows = pack_window(torch.randn(earlier + tokens, dim), "fp4")
    main = pack_entry(torch.randn(6, dim), "fp4")
    topk = torch.tensor([[-1, -1], [0, -1], [1, 5], [0, 4], [2, 3]])
    position = torch.arange(earlier, earlier + tokens)
    window_index = position[:, None] - torch.arange(window - 1, -1, -1)  # [T, W]
    q, sink = torch.randn(tokens, 2, dim), torch.randn(2)
    expected = sparse_attention_ref(
        q[None],
        unpack_window(rows, "fp4", dim)[None],
        unpack_entry(main, "fp4", dim)[None],
        topk[None],
        sink,
        position[None],
        window,
    )[0]
    # Ring row r holds position r, so row numbers are positions and go on in `fresh`.
    got = paged_attention_ref(
        q, rows[earlier:], rows[:earlier], window_index.clamp_min(-1), main, topk, sink
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_paged_attention_without_entries_without_tokens_or_without_sight():
    q, fresh, ring, window_index, main, entry_index, sink, _ = attention_case(3)
    none = entry_index[:, :0]
    window_only = paged_attention_ref(q, fresh, ring, window_index, None, none, sink)
    hidden = torch.full_like(entry_index, -1)
    assert torch.equal(
        window_only, paged_attention_ref(q, fresh, ring, window_index, main, hidden, sink)
    )
    blind = torch.full_like(window_index, -1)
    assert not paged_attention_ref(q, fresh, ring[:0], blind, main, hidden, sink).any()
    assert paged_attention_ref(*attention_case(0)).shape == (0, 2, 64)


def test_a_row_of_paged_attention_has_its_own_bits(monkeypatch):
    case = attention_case(37)
    q, fresh, ring, window_index, main, entry_index, sink, _ = case
    whole = paged_attention_ref(*case)
    padded = torch.nn.functional.pad(entry_index, (0, 3), value=-1)
    for t in range(37):
        one = slice(t, t + 1)
        # Alone, all rows of the call are rows of earlier calls.
        pool = torch.cat((ring, fresh))
        alone = paged_attention_ref(
            q[one], fresh[one], pool, window_index[one], main, padded[one], sink
        )
        assert torch.equal(alone[0], whole[t])
    monkeypatch.setattr(paged_reads, "_SLICE_BYTES", 1)
    assert torch.equal(paged_attention_ref(*case), whole)


def test_the_sink_and_every_scale_take_part():
    case = attention_case(5)
    right = exact_attention(case)
    without_sink = [*case]
    without_sink[6] = torch.full_like(case[6], -math.inf)
    assert (paged_attention_ref(*without_sink).double() - right).abs().max() > 1e-2
    doubled = [*case]
    doubled[1], doubled[2] = case[1].clone(), case[2].clone()
    for rows in doubled[1:3]:
        rows[:, 64:] += 1  # UE8M0: twice the value
    assert (paged_attention_ref(*doubled).double() - right).abs().max() > 1e-2


@pytest.mark.parametrize("storage", ["fp4", "bf16"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_paged_scores_equal_the_formula_in_float64(storage, tokens):
    case = score_case(tokens, storage=storage)
    got = paged_index_scores_ref(*case)
    assert got.shape[1] == int(case[5].max())
    torch.testing.assert_close(got.double(), exact_scores(case, got.shape[1]), atol=1e-5, rtol=1e-5)


def test_paged_scores_equal_index_scores_over_the_unpacked_keys():
    length = 600
    q, weights = torch.randn(2, 3, 32), torch.randn(2, 3)
    keys = pack_index(torch.randn(length, 32), "fp4")
    tables, zero = torch.arange(150)[None], torch.zeros(2, dtype=torch.int64)
    got = paged_index_scores_ref(q, weights, keys, tables, zero, zero + length, 4)
    expected = index_scores(q[None], weights[None], unpack_index(keys, "fp4", 32)[None])[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_columns", [0, 1, 16, 17, 18, 40])
def test_columns_may_be_fewer_or_more_than_visible(num_columns):
    case = score_case(5)
    got = paged_index_scores_ref(*case, num_columns)
    assert got.shape == (5, num_columns)
    torch.testing.assert_close(got.double(), exact_scores(case, num_columns), atol=1e-5, rtol=1e-5)


def test_scores_of_no_token_and_of_a_token_that_sees_nothing():
    assert paged_index_scores_ref(*score_case(0)).shape == (0, 0)
    assert paged_index_scores_ref(*score_case(0), 5).shape == (0, 5)
    case = score_case(3)
    case[5] = torch.zeros_like(case[5])
    assert paged_index_scores_ref(*case).shape == (3, 0)
    assert torch.isneginf(paged_index_scores_ref(*case, 4)).all()


def test_a_row_of_paged_scores_has_its_own_bits():
    case = score_case(37)
    whole = paged_index_scores_ref(*case)
    q, weights, keys, tables, sequence, visible, per_block, _ = case
    for t in range(37):
        one = slice(t, t + 1)
        table, zero = tables[sequence[one]], torch.zeros_like(sequence[one])
        alone = paged_index_scores_ref(
            q[one], weights[one], keys, table, zero, visible[one], per_block
        )
        assert torch.equal(alone[0], whole[t, : alone.shape[1]])
        assert torch.isneginf(whole[t, alone.shape[1] :]).all()


def test_poison_spoils_the_scores_only_where_it_is_seen():
    case = score_case(1, lengths=(9,))
    case[5] = torch.tensor([9])
    assert torch.isfinite(paged_index_scores_ref(*case)).all()
    case[5] = torch.tensor([10])
    assert paged_index_scores_ref(*case).isnan().tolist() == [[False] * 9 + [True]]
