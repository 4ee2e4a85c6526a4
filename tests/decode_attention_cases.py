"""Inputs and comparisons for the attention side of a decode step, on any device.

The same laws run in Triton's interpreter (tests/unit) and compiled (tests/gpu); a file there picks
sizes and a device. What is not visible is filled with 0xFF, which reads as NaN in every format.
"""

from __future__ import annotations

import torch

from finwhale.cache.paged_reads import pack_entry, pack_index, pack_window
from finwhale.decode_kernels import attention_refs as refs
from finwhale.ops.rope import rope_frequencies, rope_rotation

EPS = 1e-20


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rotation_of(positions, dim: int):
    return rope_rotation(positions, rope_frequencies(10000.0, dim, None))


def attention_inputs(tokens, heads, dim, width, k, device, *, seed=0, rows=60, turning=None):
    """Query 1 sees nothing, query 2 no entry; elsewhere about a fifth of the slots is empty."""
    g = generator(seed)
    q = torch.randn(tokens, heads, dim, generator=g).bfloat16()
    ring = pack_window(torch.randn(rows, dim, generator=g) * 2, "fp4")
    main = pack_entry(torch.randn(rows + 9, dim, generator=g) * 2, "fp4")
    window = torch.randint(0, rows - 1, (tokens, width), generator=g)
    entries = torch.randint(0, rows + 8, (tokens, k), generator=g)
    window[torch.rand(tokens, width, generator=g) < 0.2] = -1
    entries[torch.rand(tokens, k, generator=g) < 0.2] = -1
    window[:, 0] = torch.arange(tokens) % (rows - 1)
    if tokens > 1:
        window[1], entries[1] = -1, -1
    if tokens > 2:
        entries[2] = -1
    ring[-1], main[-1] = 255, 255
    sink = torch.randn(heads, generator=g)
    turn = None if turning is None else rotation_of(torch.arange(tokens) * 37 + 5, turning)
    values = q, ring, window, main, entries, sink, turn
    return [x if x is None else x.to(device) for x in values]


def relative(got, want) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))


def index_inputs(tokens, heads, dim, num_columns, device, *, seed=0, per_block=16):
    """Queries are small integers and keys short of bits, so that a dot product is exact."""
    g = generator(seed)
    q = torch.randint(-2, 3, (tokens, heads, dim), generator=g).bfloat16()
    weights = torch.randn(tokens, heads, generator=g) / heads
    blocks = -(-num_columns // per_block)
    keys = pack_index(torch.randn(tokens * blocks * per_block, dim, generator=g), "fp4")
    tables = torch.randperm(tokens * blocks, generator=g).view(tokens, blocks)
    visible = torch.randint(1, num_columns + 1, (tokens,), generator=g)
    visible[0] = num_columns
    if tokens > 1:
        visible[1] = 0
    for t in range(tokens):  # behind the last visible key nothing may be read
        e = torch.arange(int(visible[t]), blocks * per_block)
        keys[tables[t, e // per_block] * per_block + e % per_block] = 255
    return [x.to(device) for x in (q, weights, keys, tables, visible)] + [per_block, num_columns]


def pool_blocks_of(visible, count: int, seed=0):
    """Return [T, count] ascending block numbers, some of them -1, the newest block among them."""
    g = generator(seed)
    out = torch.full((len(visible), count), -1)
    for t, n in enumerate(visible.tolist()):
        have = -(-n // 8)
        if have:
            size = min(have, max(1, count - 1))
            some = torch.randperm(have, generator=g)[:size]
            some[0] = have - 1
            some = some.unique()
            out[t, : some.numel()] = some
    return out.to(visible.device)


def assert_scores_near(got, want, inputs, tolerance=3e-6):
    """Compare visible columns; the tolerance is a share of the sum of the heads' sizes."""
    (scores, best), (wanted, wanted_best) = got, want
    visible = inputs[4]
    bound = tolerance * wanted[~wanted.isneginf()].abs().amax().clamp_min(1.0)
    for t, n in enumerate(visible.tolist()):
        near = (scores[t, :n] - wanted[t, :n]).abs() <= bound * 4
        assert near.all(), (t, float((scores[t, :n] - wanted[t, :n]).abs().max()))
        m = -(-n // 8)
        if best.numel() and m:
            assert best[t, m - 1] == torch.inf
            assert ((best[t, : m - 1] - wanted_best[t, : m - 1]).abs() <= bound * 4).all()


def topk_rows(rows, num, device, *, seed=0):
    """Scores full of ties, zeros of both signs, NaN and -inf; lengths 0, 1 and in between."""
    g = generator(seed)
    scores = torch.randn(rows, num, generator=g)
    scores[0] = torch.randint(-1, 2, (num,), generator=g).float()
    scores[0, ::5] = -0.0
    if rows > 1:
        scores[1, torch.rand(num, generator=g) < 0.5] = -torch.inf
        scores[1, :: max(1, num // 3)] = torch.nan
        scores[-1, torch.rand(num, generator=g) < 0.1] = torch.inf
        scores[-1, num // 2] = 3e38
    lengths = torch.randint(0, num + 1, (rows,), generator=g)
    lengths[:2] = num
    lengths[-1] = num
    if rows > 3:
        lengths[2], lengths[3] = 0, 1
    return scores.to(device), lengths.to(device)


def listed_topk(scores, lengths, k):
    """Return the selection by plain sorting of Python lists."""
    out = []
    for row, n in zip(scores.cpu().tolist(), lengths.tolist(), strict=True):
        able = [(-s, e) for e, s in enumerate(row[:n]) if s == s and s != -torch.inf]
        best = sorted(e for _, e in sorted(able)[:k])
        out.append(best + [-1] * (k - len(best)))
    return torch.tensor(out)


def store_inputs(kind, tokens, dim, device, *, seed=0, exact=False, turning=16):
    """Some rows are not to be written. `exact`: the mean square is 4, whatever the order."""
    g = generator(seed)
    if exact:
        x = torch.tensor([2.0, -2.0])[torch.randint(0, 2, (tokens, dim), generator=g)]
    else:
        x = torch.randn(tokens, dim, generator=g) * torch.rand(tokens, 1, generator=g) * 3
    weight = (torch.randn(dim, generator=g) + 1).bfloat16()
    width = {"window": dim + dim // 32, "entry": dim // 2 + dim // 16}.get(
        kind, dim // 2 + dim // 32
    )
    pool = torch.randint(0, 256, (tokens + 5, width), generator=g).to(torch.uint8)
    rows = torch.randperm(tokens + 5, generator=g)[:tokens]
    rows[1::3] = -1
    turn = rotation_of(torch.randint(0, 5000, (tokens,), generator=g), turning)
    return [y.to(device) for y in (x.bfloat16(), weight, turn, pool, rows)]


def stored(form, kind, inputs, heads=0):
    """Return the pool, the latent and the queries after a form of `store_rows` ran on copies."""
    x, weight, turn, pool, rows = inputs
    pool, latent, queries = pool.clone(), torch.zeros_like(x), None
    if heads:
        g = generator(1)
        queries = torch.randn(len(x), heads, x.shape[1], generator=g).bfloat16().to(x.device)
    form(kind, x, weight, turn, pool, rows, EPS, latent, queries)
    return pool, latent, queries


def joined_inputs(tokens, columns, dim, device, *, exact=False, turning=16):
    """What `latent_and_window` takes, with the norms' eps left out."""
    kv, kv_weight, turn, ring, rows = store_inputs(
        "window", tokens, dim, device, exact=exact, turning=turning
    )
    g = generator(2)
    if exact:
        latent = torch.tensor([2.0, -2.0])[torch.randint(0, 2, (tokens, columns), generator=g)]
    else:
        latent = torch.randn(tokens, columns, generator=g) * 3
    joined = torch.cat((latent.bfloat16().to(device), kv), dim=1)
    q_weight = torch.randn(columns, generator=g).bfloat16().to(device)
    return [joined, q_weight, kv_weight, turn, ring, rows]


def split(form, inputs):
    """Return the latent and the ring after a form of `latent_and_window` ran on a copy."""
    joined, q_weight, kv_weight, turn, ring, rows = inputs
    ring = ring.clone()
    return form(joined, q_weight, kv_weight, turn, ring, rows, EPS), ring


def chain(forms, inputs, k, blocks=None):
    """Return scores' selection as pool rows, by the kernels or by the references."""
    q, weights, keys, tables, visible, per_block, columns = inputs
    scores, _ = forms.index_scores(q, weights, keys, tables, visible, per_block, columns, blocks)
    lengths = visible if blocks is None else torch.full_like(visible, columns)
    chosen = forms.select(scores, lengths, k)
    return forms.pool_rows(chosen, tables, per_block, blocks)


class References:
    index_scores = staticmethod(refs.index_scores_ref)
    select = staticmethod(refs.select_topk_rows_ref)
    pool_rows = staticmethod(refs.pool_rows_ref)


def group_inputs(tokens, dim, device, *, seed=0):
    """Every third token closes its group; the rows of the others hold something to overwrite."""
    g = generator(seed)
    content, gate = torch.randn(2, tokens, dim, generator=g) * 3
    open_rows = torch.randn(tokens + 3, 2, dim, generator=g) * 3
    slots = torch.randperm(tokens + 3, generator=g)[:tokens]
    closes = torch.arange(tokens) % 3 == 1
    return [x.to(device) for x in (content, gate, open_rows, slots, closes)]


def closed(form, inputs):
    """Return the pooled rows and the open rows after a form of `close_groups` ran on copies."""
    content, gate, open_rows, slots, closes = inputs
    open_rows = open_rows.clone()
    return form(content, gate, open_rows, slots, closes), open_rows
