"""Sparse attention kernels against the reference, in Triton's interpreter where there is no GPU.

Launch sizes are made small, so that tiny inputs still cross tile and block borders. The mass
references have their own slow loop in float64 and need no Triton.
"""

import importlib.util
import math
import os

import pytest
import torch

from finwhale.ops.attention import (
    sparse_attention_masked,
    sparse_attention_ref,
    sparse_attention_with_mass_masked,
    sparse_attention_with_mass_ref,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads this when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
if HAS_TRITON:
    from finwhale.kernels import sparse_attention as kernels
    from finwhale.kernels import sparse_attention_tiles as tiling


@pytest.fixture(autouse=True)
def _small_launches(monkeypatch):
    if HAS_TRITON:
        small = tiling.Launch(rows=64, key_rows=32, key_block=16, num_warps=4, num_stages=1)
        monkeypatch.setattr(kernels, "launch_for", lambda dim, dtype: small)


def case(tokens, heads=2, dim=32, entries=0, k=0, batch=1, earlier=0, documents=False, seed=0):
    """Inputs of every form; token 0 of each sequence and every seventh token select nothing."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, tokens, heads, dim, generator=g)
    window_kv = torch.randn(batch, earlier + tokens, dim, generator=g)
    sink = torch.randn(heads, generator=g)
    positions = torch.arange(earlier, earlier + tokens).expand(batch, tokens).clone()
    if documents:
        cut = tokens // 2 + 1
        positions[:, cut:] = torch.arange(tokens - cut)
    rows = torch.randn(batch, entries, dim, generator=g) if k else None
    topk = torch.full((batch, tokens, k), -1) if k else None
    for b in range(batch if k else 0):
        for t in range(tokens):
            count = 0 if t % 7 == 0 else min(k, t, entries)
            # Empty slots stand anywhere.
            slots = torch.randperm(k, generator=g)[:count]
            topk[b, t, slots] = torch.randperm(entries, generator=g)[:count]
    moved = [x if x is None else x.to(DEVICE) for x in (q, window_kv, rows, topk, sink, positions)]
    return tuple(moved)


def mass_by_loops(q, window_kv, entries, topk, sink, positions, window):
    """One token, head and entry at a time, in Python floats."""
    batch, tokens, heads, dim = q.shape
    mass = torch.zeros(batch, tokens, entries.shape[1], dtype=torch.float64)
    earlier = window_kv.shape[1] - tokens
    for b in range(batch):
        for t in range(tokens):
            first = max(0, earlier + t - min(int(positions[b, t]), window - 1))
            chosen = [m for m in topk[b, t].tolist() if m >= 0]
            for h in range(heads):
                query = q[b, t, h].double() / math.sqrt(dim)
                local = [float(query @ k.double()) for k in window_kv[b, first : earlier + t + 1]]
                picked = [float(query @ entries[b, m].double()) for m in chosen]
                total = sum(math.exp(e) for e in [*local, *picked, float(sink[h])])
                for m, e in zip(chosen, picked, strict=True):
                    mass[b, t, m] += math.exp(e) / total
    return mass


def gradients(form, inputs, window, weights):
    """Return out and the gradients of sum(out * weights) for q, window_kv, entries and sink."""
    q, window_kv, entries, topk, sink, positions = inputs
    q, window_kv, entries, _, sink, _ = [
        x if x is None or not x.is_floating_point() else x.detach().clone().requires_grad_()
        for x in inputs
    ]
    out = form(q, window_kv, entries, topk, sink, positions, window)
    leaves = [x for x in (q, window_kv, entries, sink) if x is not None]
    return out.detach(), torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)


def relative(got, want):
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def compare(inputs, window):
    """Check out, mass and all gradients of the kernels against autograd through the reference."""
    weights = torch.randn(inputs[0].shape, device=DEVICE)
    masses = []

    def with_mass(form):
        def run(*args):
            out, mass = form(*args)
            masses.append(mass)
            return out

        return run

    got, got_grads = gradients(
        with_mass(kernels.sparse_attention_with_mass_triton), inputs, window, weights
    )
    want, want_grads = gradients(with_mass(sparse_attention_with_mass_ref), inputs, window, weights)
    assert relative(got, want) < 2e-5
    assert masses[0].shape == masses[1].shape
    torch.testing.assert_close(masses[0], masses[1], rtol=2e-5, atol=1e-6)
    assert len(got_grads) == len(want_grads)
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        theirs = torch.zeros_like(mine) if theirs is None else theirs
        assert torch.isfinite(mine).all()
        # Where the reference has exactly 0 (nothing selected), so have the kernels.
        assert relative(mine, theirs) < 2e-5 if theirs.any() else not mine.any()


@needs_triton
@pytest.mark.parametrize(
    ("tokens", "window", "shape"),
    [
        (1, 8, {"entries": 1, "k": 1, "dim": 64}),
        (1, 16, {"entries": 33, "k": 5, "earlier": 20, "heads": 4}),
        (15, 16, {"heads": 4}),
        (16, 8, {"entries": 1, "k": 5}),
        (17, 16, {"entries": 17, "k": 5}),
        (3, 8, {"entries": 17, "k": 5, "heads": 64}),
        (33, 8, {"entries": 16, "k": 5, "batch": 2}),
        (63, 16, {"documents": True}),
        (63, 8, {"entries": 33, "k": 1, "earlier": 3, "dim": 64}),
        (65, 8, {"entries": 33, "k": 5, "documents": True}),
    ],
)
def test_sparse_attention_equals_reference_with_gradients(tokens, window, shape):
    compare(case(tokens, **shape), window)


@needs_triton
def test_sparse_attention_with_no_entries_yet_is_window_attention():
    # Before the first entry is made M = 0, and every slot is empty.
    q, window_kv, entries, topk, sink, positions = case(1, entries=0, k=1)
    out, grads = gradients(
        kernels.sparse_attention_triton,
        (q, window_kv, entries, topk, sink, positions),
        8,
        torch.ones_like(q),
    )
    plain = (q, window_kv, None, None, sink, positions)
    want, want_grads = gradients(sparse_attention_ref, plain, 8, torch.ones_like(q))
    assert grads[2].shape == entries.shape
    for mine, theirs in zip((out, *grads[:2], grads[3]), (want, *want_grads), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-6)


@needs_triton
def test_sparse_attention_of_a_blind_query_is_zero_with_zero_gradients():
    inputs = list(case(9, entries=5, k=2))
    inputs[5][:, 7] = -1  # token 7 selects nothing either
    compare(tuple(inputs), 8)
    out, mass = kernels.sparse_attention_with_mass_triton(*inputs, 8)
    assert not out[:, 7].any()
    assert not mass[:, 7].any()
    assert out[:, 6].any()


@needs_triton
def test_sparse_attention_reads_nothing_past_the_last_row():
    # Inputs are slices of larger tensors filled with NaN, as the allocator might leave them.
    q, window_kv, entries, topk, sink, positions = case(5, entries=3, k=2)
    want = kernels.sparse_attention_triton(q, window_kv, entries, topk, sink, positions, 8)

    def poisoned(x):
        pool = torch.full((x.numel() + 4096,), torch.nan, device=DEVICE)
        pool[: x.numel()] = x.flatten()
        return pool[: x.numel()].view(x.shape)

    moved = [poisoned(x) for x in (q, window_kv, entries)]
    got = kernels.sparse_attention_triton(*moved, topk, sink, positions, 8)
    assert torch.equal(got, want)


@needs_triton
@pytest.mark.parametrize("empty", ["tokens", "batch"])
def test_sparse_attention_without_queries_has_zero_gradients(empty):
    q, window_kv, entries, topk, sink, positions = case(4, entries=3, k=2)
    if empty == "tokens":
        q, topk, positions = q[:, :0], topk[:, :0], positions[:, :0]
    else:
        q, window_kv, entries, topk, positions = (
            x[:0] for x in (q, window_kv, entries, topk, positions)
        )
    inputs = (q, window_kv, entries, topk, sink, positions)
    out, grads = gradients(kernels.sparse_attention_triton, inputs, 8, torch.ones_like(q))
    assert out.shape == q.shape
    assert [g.shape for g in grads] == [q.shape, window_kv.shape, entries.shape, sink.shape]
    assert not any(g.any() for g in grads)
    _, mass = kernels.sparse_attention_with_mass_triton(*inputs, 8)
    assert mass.shape == (*q.shape[:2], entries.shape[1])


@needs_triton
@pytest.mark.parametrize("broken", ["selection", "sink", "positions", "window"])
def test_sparse_attention_comparison_notices_a_mistake(broken):
    q, window_kv, entries, topk, sink, positions = case(9, entries=6, k=2)
    got = kernels.sparse_attention_triton(q, window_kv, entries, topk, sink, positions, 8)
    window = 8
    if broken == "selection":
        topk = topk.clone()
        topk[0, 4] = torch.where(topk[0, 4] < 0, topk[0, 4], (topk[0, 4] + 1) % 6)
    elif broken == "sink":
        sink = torch.full_like(sink, -torch.inf)
    elif broken == "positions":
        positions = positions.clone()
        positions[0, 5:] -= 5
    else:
        window = 7
    want = sparse_attention_ref(q, window_kv, entries, topk, sink, positions, window)
    assert relative(got, want) > 1e-3


@needs_triton
def test_sparse_attention_takes_a_sink_of_any_size():
    # exp(sink) alone overflows at 89.
    q, window_kv, entries, topk, _, positions = case(3, entries=2, k=1)
    for value, share in ((-torch.inf, None), (200.0, 0.0)):
        sink = torch.full((2,), value, device=DEVICE)
        inputs = (q, window_kv, entries, topk, sink, positions)
        out, grads = gradients(kernels.sparse_attention_triton, inputs, 8, torch.ones_like(q))
        assert torch.isfinite(out).all()
        assert all(torch.isfinite(g).all() for g in grads)
        if share == 0.0:
            assert not out.any()
        else:
            torch.testing.assert_close(out, sparse_attention_ref(*inputs, 8), rtol=2e-5, atol=1e-6)


@needs_triton
def test_selection_lists_every_touched_block_once_ascending():
    # Two tokens a tile, four entries a block: tile 0 needs blocks 0 and 2, tile 1 only block 1.
    topk = torch.tensor([[[9, -1], [0, 3], [5, 4]]], device=DEVICE)
    touched = tiling.touched_blocks(topk, 10, 2, 4)
    assert touched.tolist() == [[[1, 0, 1], [0, 1, 0]]]
    places, counts = tiling.listed(touched)
    assert counts.tolist() == [[2, 1]]
    assert places[0, 0, :2].tolist() == [0, 2]
    assert places[0, 1, :1].tolist() == [1]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 64, 128, 256, 512])
def test_launch_tiles_fit_one_multiprocessor(dim, dtype):
    launch = tiling.launch_for(dim, dtype)
    # The dq kernel keeps q and dout tiles beside the key blocks in flight: 227 KiB at most.
    rows = 2 * launch.rows + launch.num_stages * launch.key_block
    assert rows * dim * dtype.itemsize <= 227 * 1024
    for size in (launch.rows, launch.key_rows, launch.key_block):
        assert size >= 16  # the smallest product Triton takes
        assert size & (size - 1) == 0


def meta(dtype=torch.float32, heads=4, dim=64, **changes):
    q = torch.empty(1, 3, heads, dim, dtype=dtype, device=DEVICE)
    inputs = {
        "q": q,
        "window_kv": q[:, :, 0],
        "entries": q[:, :2, 0],
        "topk": torch.zeros(1, 3, 1, dtype=torch.int64, device=DEVICE),
        "sink": torch.zeros(heads, device=DEVICE),
        "positions": torch.zeros(1, 3, dtype=torch.int64, device=DEVICE),
        "window": 8,
    }
    return inputs | changes


@needs_triton
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"heads": 3}, "heads 3"),
        ({"heads": 128}, "heads 128"),
        ({"dim": 16}, "head dim 16"),
        ({"dim": 96}, "head dim 96"),
        ({"dim": 1024}, "head dim 1024"),
        ({"dtype": torch.float16}, "q.dtype"),
        ({"window_kv": torch.empty(1, 3, 64, dtype=torch.bfloat16)}, "window_kv.dtype"),
        ({"sink": torch.zeros(4, dtype=torch.bfloat16)}, "sink.dtype"),
        ({"topk": None}, "give both or neither"),
        ({"window": 0}, "window 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sparse_attention_refuses_with_the_reason(change, reason):
    inputs = meta(**change)
    assert reason in kernels.sparse_attention_unsupported(**inputs)
    with pytest.raises(kernels.SparseAttentionUnsupportedError, match=reason):
        kernels.sparse_attention_triton(**inputs)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (8, 128), (32, 512)])
def test_sparse_attention_accepts_its_range(dtype, heads, dim):
    assert kernels.sparse_attention_unsupported(**meta(dtype, heads, dim)) is None


@pytest.mark.parametrize(
    "form", [sparse_attention_with_mass_ref, sparse_attention_with_mass_masked]
)
@pytest.mark.parametrize(
    ("tokens", "shape"),
    [
        (1, {"entries": 1, "k": 1}),
        (7, {"entries": 4, "k": 3, "documents": True, "batch": 2}),
        (9, {"entries": 7, "k": 7, "earlier": 2}),
    ],
)
def test_mass_equals_loops_and_leaves_the_output_alone(form, tokens, shape):
    inputs = tuple(x.cpu() for x in case(tokens, dim=8, **shape))
    out, mass = form(*inputs, 4)
    torch.testing.assert_close(mass.double(), mass_by_loops(*inputs, 4), rtol=1e-5, atol=1e-6)
    plain = sparse_attention_ref if "ref" in form.__name__ else sparse_attention_masked
    assert torch.equal(out, plain(*inputs, 4))
    assert not mass.requires_grad


@pytest.mark.parametrize(
    "form", [sparse_attention_with_mass_ref, sparse_attention_with_mass_masked]
)
def test_mass_slices_do_not_change_the_result(form, monkeypatch):
    from finwhale.ops import attention

    inputs = tuple(x.cpu() for x in case(23, dim=8, entries=9, k=4, earlier=2))
    monkeypatch.setattr(attention, "_SLICE_BYTES", 1)
    monkeypatch.setattr(attention, "_CACHE_BYTES", 1)
    _, mass = form(*inputs, 4)
    torch.testing.assert_close(mass.double(), mass_by_loops(*inputs, 4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "form", [sparse_attention_with_mass_ref, sparse_attention_with_mass_masked]
)
def test_mass_without_a_sink_and_window_is_one_share_per_head(form):
    # A query with no window and no sink spends its whole softmax, 1 per head, on its entries.
    q, window_kv, entries, topk, sink, positions = (x.cpu() for x in case(5, entries=4, k=3, dim=8))
    positions = torch.full_like(positions, -1)
    _, mass = form(q, window_kv, entries, topk, torch.full_like(sink, -1e9), positions, 4)
    has_entries = (topk >= 0).any(-1)
    torch.testing.assert_close(mass.sum(-1), has_entries * 2.0)
    _, shared = form(q, window_kv, entries, topk, torch.zeros_like(sink), positions, 4)
    assert (shared.sum(-1)[has_entries] < 1.99).all()


@pytest.mark.parametrize(
    "form", [sparse_attention_with_mass_ref, sparse_attention_with_mass_masked]
)
def test_mass_of_a_window_layer_is_empty(form):
    out, mass = form(*(x if x is None else x.cpu() for x in case(3)), 4)
    assert mass.shape == (1, 3, 0)
    assert out.shape == (1, 3, 2, 32)
