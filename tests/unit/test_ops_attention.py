"""Sparse attention against a loop over keys written from section 4.5."""

import math

import numpy as np
import pytest
import torch

from finwhale.ops.attention import sparse_attention_masked, sparse_attention_ref

FORMS = [sparse_attention_ref, sparse_attention_masked]


def loop(q, window_kv, entries, topk, sink, positions, window):
    """One query, one head, one key at a time, in float64."""
    batch, tokens, heads, dim = q.shape
    out = np.zeros(q.shape)
    for b in range(batch):
        for t in range(tokens):
            first = t - min(int(positions[b, t]), window - 1)
            keys = [window_kv[b, s] for s in range(first, t + 1)]
            if entries is not None:
                keys += [entries[b, m] for m in topk[b, t].tolist() if m >= 0]
            keys = [k.double().numpy() for k in keys]
            for h in range(heads):
                e = [float(q[b, t, h].double().numpy() @ k) / math.sqrt(dim) for k in keys]
                top = max(e)
                p = [math.exp(v - top) for v in e]
                total = sum(p) + math.exp(float(sink[h]) - top)
                out[b, t, h] = sum(w * k for w, k in zip(p, keys, strict=True)) / total
    return torch.from_numpy(out)


def case(tokens, entries=0, k=0, batch=1, heads=2, dim=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, tokens, heads, dim, generator=g)
    window_kv = torch.randn(batch, tokens, dim, generator=g)
    sink = torch.randn(heads, generator=g)
    positions = torch.arange(tokens).expand(batch, tokens)
    if not entries:
        return q, window_kv, None, None, sink, positions
    rows = torch.randn(batch, entries, dim, generator=g)
    topk = torch.full((batch, tokens, k), -1)
    for b in range(batch):
        for t in range(tokens):
            count = min(k, min(t, entries))
            topk[b, t, :count] = torch.randperm(entries, generator=g)[:count].sort().values
    return q, window_kv, rows, topk, sink, positions


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 11])
@pytest.mark.parametrize(("entries", "k"), [(0, 0), (1, 1), (4, 3), (7, 3)])
def test_attention_equals_loop(form, tokens, entries, k):
    inputs = case(tokens, entries, k, batch=2)
    want = loop(*inputs, window=5)
    torch.testing.assert_close(form(*inputs, window=5).double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_attention_window_stops_at_document_start(form):
    q, window_kv, _, _, sink, _ = case(9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3]])
    want = loop(q, window_kv, None, None, sink, positions, window=5)
    got = form(q, window_kv, None, None, sink, positions, 5)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    leaked = form(q, window_kv, None, None, sink, torch.arange(9).unsqueeze(0), 5)
    assert (leaked - got).abs().max() > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_attention_sink_enters_denominator_only(form):
    # One key, q . k = 0: the value is k / (1 + exp(sink)); with sink = ln 3 that is k / 4.
    key = torch.tensor([[[1.0, -2.0, 0.5, 4.0]]])
    q = torch.zeros(1, 1, 2, 4)
    sink = torch.tensor([math.log(3.0), -1e9])
    out = form(q, key, None, None, sink, torch.zeros(1, 1, dtype=torch.int64), 8)
    torch.testing.assert_close(out[0, 0, 0], key[0, 0] / 4)
    torch.testing.assert_close(out[0, 0, 1], key[0, 0])


@pytest.mark.parametrize("form", FORMS)
def test_attention_keeps_an_entry_that_repeats_a_window_row(form):
    # The same vector in the window and as an entry counts twice: 2/3, not 1/2, with sink 0.
    key = torch.ones(1, 1, 4)
    q, sink = torch.zeros(1, 1, 1, 4), torch.zeros(1)
    out = form(
        q, key, key, torch.zeros(1, 1, 1, dtype=torch.int64), sink, torch.zeros(1, 1).long(), 8
    )
    torch.testing.assert_close(out.flatten(), torch.full((4,), 2 / 3))


@pytest.mark.parametrize("form", FORMS)
def test_attention_empty_query_list(form):
    q, window_kv, entries, topk, sink, positions = case(4, 3, 2)
    out = form(q[:, :0], window_kv[:, :0], entries, topk[:, :0], sink, positions[:, :0], 5)
    assert out.shape == (1, 0, 2, 16)


def test_attention_masked_gradients_equal_reference():
    inputs = case(23, 9, 4, batch=2, dim=8, seed=3)
    grads = []
    for form in FORMS:
        leaves = [x.clone().requires_grad_() for x in (*inputs[:3], inputs[4])]
        q, window_kv, entries, sink = leaves
        out = form(q, window_kv, entries, inputs[3], sink, inputs[5], 5)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        grads.append(torch.autograd.grad((out * weights).sum(), leaves))
    for ref, fast in zip(*grads, strict=True):
        torch.testing.assert_close(ref, fast, rtol=1e-5, atol=1e-6)


def test_attention_slices_do_not_change_the_result(monkeypatch):
    from finwhale.ops import attention

    inputs = case(40, 20, 6, batch=2)
    whole = [form(*inputs, window=5) for form in FORMS]
    monkeypatch.setattr(attention, "_SLICE_BYTES", 1)
    monkeypatch.setattr(attention, "_CACHE_BYTES", 1)
    for form, want in zip(FORMS, whole, strict=True):
        torch.testing.assert_close(form(*inputs, window=5), want, rtol=1e-6, atol=1e-6)
