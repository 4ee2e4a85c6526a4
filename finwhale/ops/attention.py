"""The attention core: one softmax over a token's window rows and its selected entries.

All query heads share one key-value vector per row, and key and value are the same vector. The
sink enters the denominator only. Entries that overlap the window are kept twice, on purpose.
Two forms with one signature: `sparse_attention_ref` gathers what each query sees and is the
definition; `sparse_attention_masked` multiplies slices and masks, which is what a CPU likes.
Source: spec/backbone.md section 4.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of the largest temporary one query slice may make.
_SLICE_BYTES = 1 << 26
# The masked form makes several passes over its scores, so a slice should stay in a CPU's cache.
_CACHE_BYTES = 1 << 22


def _softmax_with_sink(scores: Tensor, keep: Tensor, sink: Tensor, dtype: torch.dtype):
    """Return unnormalised probabilities and their denominator.

    scores [B, C, H, S] fp32, keep [B, C, 1, S], sink [H] fp32. A query that sees nothing gets
    probabilities 0 and denominator 1. Probabilities are rounded to `dtype` before the value
    product, relative to the final maximum (D04); the denominator sums them unrounded.
    """
    scores = scores.masked_fill(~keep, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(torch.isneginf(top), 0.0, top)
    p = (scores - top).exp()  # [B, C, H, S]
    denominator = p.sum(-1, keepdim=True) + (sink.unsqueeze(-1) - top).exp()
    blind = ~keep.any(-1, keepdim=True)
    return p.to(dtype).float(), torch.where(blind, 1.0, denominator)


def sparse_attention_ref(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    topk: Tensor | None,
    sink: Tensor,
    positions: Tensor,
    window: int,
) -> Tensor:
    """Return, for each query and head, the value sum over its window and selected entries.

    e_s = (q_h . k_s) / sqrt(D);  m = max_s e_s
    out_h = sum_s exp(e_s - m) k_s / (sum_s exp(e_s - m) + exp(sink_h - m))

    q          [B, T, H, D]
    window_kv  [B, P + T, D]  the last T rows belong to the queries; P earlier rows stand before
    entries    [B, M, D]   or None for a window-only layer
    topk       [B, T, K] int64 rows of `entries`; -1 is an empty slot
    sink       [H] fp32
    positions  [B, T] int64 rows since the document's (or a replay's) start; no window crosses it
    returns    [B, T, H, D] in the dtype of q

    Section 4.5.
    """
    batch, tokens, heads, dim = q.shape
    back = torch.arange(window - 1, -1, -1, device=q.device)
    earlier = window_kv.shape[1] - tokens
    width = window + (0 if topk is None else topk.shape[-1])
    chunk = max(1, _SLICE_BYTES // (4 * dim * max(1, batch) * width))
    which = torch.arange(batch, device=q.device)[:, None, None]
    out = []
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        rows = torch.arange(start, stop, device=q.device)[None, :, None] - back  # [1, C, W]
        rows = rows + earlier
        keep = (back <= positions[:, start:stop, None]) & (rows >= 0)  # [B, C, W]
        keys = window_kv[which, rows.clamp_min(0)]  # [B, C, W, D]
        if entries is not None:
            chosen = topk[:, start:stop]
            keep = torch.cat((keep, chosen >= 0), dim=-1)
            keys = torch.cat((keys, entries[which, chosen.clamp_min(0)]), dim=-2)
        keys = keys.float()  # [B, C, S, D]
        scores = q[:, start:stop].float() @ keys.transpose(-1, -2) * dim**-0.5  # [B, C, H, S]
        p, denominator = _softmax_with_sink(scores, keep.unsqueeze(2), sink, q.dtype)
        out.append((p @ keys / denominator).to(q.dtype))
    return torch.cat(out, dim=1) if out else q.new_empty(batch, 0, heads, dim)


def sparse_attention_masked(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    topk: Tensor | None,
    sink: Tensor,
    positions: Tensor,
    window: int,
) -> Tensor:
    """Same contract as `sparse_attention_ref`: dense products over slices, masked.

    Reads all entries up to the last selected one, so it is the better form while the entries
    are not many times the selection.
    """
    batch, tokens, heads, dim = q.shape
    num_entries = 0 if entries is None else entries.shape[1]
    earlier = window_kv.shape[1] - tokens
    chunk = max(window, _CACHE_BYTES // (4 * max(1, batch) * heads * (2 * window + num_entries)))
    out = []
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        first = max(0, earlier + start - window + 1)
        keys = window_kv[:, first : earlier + stop]
        distance = (
            torch.arange(earlier + start, earlier + stop, device=q.device)[:, None]
            - torch.arange(first, earlier + stop, device=q.device)[None, :]
        )
        reach = positions[:, start:stop, None].clamp_max(window - 1)
        keep = (distance >= 0) & (distance <= reach)  # [B, C, S_window]
        if entries is not None and num_entries:
            chosen = topk[:, start:stop]
            used = int(chosen.max()) + 1 if chosen.numel() else 0
            picked = torch.zeros(
                batch, stop - start, used + 1, dtype=torch.bool, device=q.device
            ).scatter_(-1, torch.where(chosen < 0, used, chosen), True)
            keep = torch.cat((keep, picked[..., :used]), dim=-1)
            keys = torch.cat((keys, entries[:, :used]), dim=1)
        keys = keys.float()  # [B, S, D]
        size = stop - start
        flat = (q[:, start:stop].float() * dim**-0.5).reshape(batch, size * heads, dim)
        scores = (flat @ keys.transpose(1, 2)).view(batch, size, heads, -1)
        p, denominator = _softmax_with_sink(scores, keep.unsqueeze(2), sink, q.dtype)
        values = p.reshape(batch, size * heads, -1) @ keys
        out.append((values.view(batch, size, heads, dim) / denominator).to(q.dtype))
    return torch.cat(out, dim=1) if out else q.new_empty(batch, 0, heads, dim)


def sparse_attention_with_mass_ref(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    topk: Tensor | None,
    sink: Tensor,
    positions: Tensor,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Return `sparse_attention_ref` and how much attention each entry received.

    mass[b, t, m] = sum_h p[b, t, h, m],  p the probability of entry m in the one softmax over
    window rows, selected entries and sink; 0 where m is not selected. This is the target that
    teaches the indexer, so it carries no gradient and p is not rounded.

    returns    out [B, T, H, D] in the dtype of q, mass [B, T, M] fp32 ([B, T, 0] without entries)

    Arguments as `sparse_attention_ref`. spec/training.md, what teaches the indexer.
    """
    out = sparse_attention_ref(q, window_kv, entries, topk, sink, positions, window)
    batch, tokens, _, dim = q.shape
    num_entries = 0 if entries is None else entries.shape[1]
    mass = torch.zeros(batch, tokens, num_entries, dtype=torch.float32, device=q.device)
    if not num_entries:
        return out, mass
    back = torch.arange(window - 1, -1, -1, device=q.device)
    earlier = window_kv.shape[1] - tokens
    with torch.no_grad():
        for b in range(batch):
            for t in range(tokens):
                rows = earlier + t - back
                rows = rows[(back <= positions[b, t]) & (rows >= 0)]
                chosen = topk[b, t][topk[b, t] >= 0]
                keys = torch.cat((window_kv[b, rows], entries[b, chosen])).float()  # [S, D]
                scores = q[b, t].float() @ keys.T * dim**-0.5  # [H, S]
                p = torch.cat((scores, sink[:, None]), dim=1).softmax(1)  # [H, S + 1]
                taken = p[:, len(rows) : len(rows) + len(chosen)]
                mass[b, t].index_add_(0, chosen, taken.sum(0))
    return out, mass


def sparse_attention_with_mass_masked(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    topk: Tensor | None,
    sink: Tensor,
    positions: Tensor,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Same contract as `sparse_attention_with_mass_ref`: dense products over slices, masked.

    The denominator needs the window's scores too, so they are made a second time, without
    gradient; the output and its gradients are those of `sparse_attention_masked`, unchanged.
    """
    out = sparse_attention_masked(q, window_kv, entries, topk, sink, positions, window)
    batch, tokens, heads, dim = q.shape
    num_entries = 0 if entries is None else entries.shape[1]
    mass = torch.zeros(batch, tokens, num_entries, dtype=torch.float32, device=q.device)
    if entries is None or not num_entries:
        return out, mass
    earlier = window_kv.shape[1] - tokens
    chunk = max(window, _CACHE_BYTES // (4 * max(1, batch) * heads * (2 * window + num_entries)))
    with torch.no_grad():
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            first = max(0, earlier + start - window + 1)
            distance = (
                torch.arange(earlier + start, earlier + stop, device=q.device)[:, None]
                - torch.arange(first, earlier + stop, device=q.device)[None, :]
            )
            reach = positions[:, start:stop, None].clamp_max(window - 1)
            chosen = topk[:, start:stop]
            picked = torch.zeros(
                batch, stop - start, num_entries + 1, dtype=torch.bool, device=q.device
            ).scatter_(-1, torch.where(chosen < 0, num_entries, chosen), True)[..., :num_entries]
            keep = torch.cat(((distance >= 0) & (distance <= reach), picked), dim=-1)
            keys = torch.cat((window_kv[:, first : earlier + stop], entries), dim=1).float()
            flat = (q[:, start:stop].float() * dim**-0.5).reshape(batch, -1, dim)
            scores = (flat @ keys.transpose(1, 2)).view(batch, stop - start, heads, -1)
            p, denominator = _softmax_with_sink(scores, keep.unsqueeze(2), sink, torch.float32)
            mass[:, start:stop] = (p[..., -num_entries:] / denominator).sum(2)
    return out, mass
