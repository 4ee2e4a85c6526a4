"""The backbone once more, one token and one key at a time, in float64: for tests only.

Written from spec/backbone.md sections 3 to 8 with plain loops and no tensor layout, no cache, no
masks, no packing, no rounding. It shares no code with the package beyond the layer table, the hash
buckets and the weights.
"""

from __future__ import annotations

import math

import numpy as np

from finwhale.config import AttentionMode, PoolUse, build_layer_specs
from finwhale.config.layers import Half, RopeKind


def rms(x, weight, eps):
    return weight * x / math.sqrt(float(np.mean(x * x)) + eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class PerToken:
    """`logits(ids)` [T, V] of a Backbone's weights."""

    def __init__(self, model):
        self.slot, self.decode_start, self.left_in_slot = None, 0, None
        self.c = model.config.text_config
        self.w = {k: v.double().numpy() for k, v in model.state_dict().items()}
        self.token_map = model.token_map.tolist()
        self.specs = build_layer_specs(self.c)
        self.multipliers = {
            s.layer_id: model.layers[s.layer_id].engram.multipliers.tolist()
            for s in self.specs
            if s.has_engram
        }

    def frequency(self, pair, kind):
        c, dim = self.c, self.c.qk_rope_head_dim
        if kind is RopeKind.WINDOW:
            return c.rope_theta ** (-2 * pair / dim)
        s, theta = c.rope_scaling, c.compress_rope_theta

        def turns(b):
            span = s.original_max_position_embeddings / (2 * math.pi * b)
            return dim * math.log(span) / (2 * math.log(theta))

        low, high = max(0, math.floor(turns(s.beta_fast))), math.ceil(turns(s.beta_slow))
        ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
        f = theta ** (-2 * pair / dim)
        return f * (1 - ramp) + f / s.factor * ramp

    def rotate(self, x, position, kind, sign=1):
        x, dim = x.copy(), self.c.qk_rope_head_dim
        base = len(x) - dim
        for pair in range(dim // 2):
            a = sign * position * self.frequency(pair, kind)
            even, odd = x[base + 2 * pair], x[base + 2 * pair + 1]
            x[base + 2 * pair] = even * math.cos(a) - odd * math.sin(a)
            x[base + 2 * pair + 1] = even * math.sin(a) + odd * math.cos(a)
        return x

    def mix(self, name, streams):
        c, n = self.c, self.c.hc_mult
        u = streams.reshape(-1)
        m = self.w[f"{name}_fn"] @ u / math.sqrt(float(np.mean(u * u)) + c.rms_norm_eps)
        base, scale = self.w[f"{name}_base"], self.w[f"{name}_scale"]
        pre = sigmoid(scale[0] * m[:n] + base[:n]) + c.hc_eps
        post = 2 * sigmoid(scale[1] * m[n : 2 * n] + base[n : 2 * n])
        r = np.exp((scale[2] * m[2 * n :] + base[2 * n :]).reshape(n, n))
        r = r / r.sum(1, keepdims=True) + c.hc_eps
        for step in range(2 * c.hc_sinkhorn_iters - 1):
            r = r / (r.sum(step % 2, keepdims=True) + c.hc_eps)
        return pre, post, r

    def engram(self, layer, streams, ids):
        c, w, spec = self.c, self.w, self.specs[layer]
        buckets = c.engram_buckets()[spec.engram_index]
        name = f"layers.{layer}.engram"
        pad = self.token_map[c.engram_pad_token_id]
        out = []
        for t, x in enumerate(streams):
            rows, hashed = [], 0
            for back in range(c.engram_max_ngram_size):
                token = self.token_map[ids[t - back]] if t >= back else pad
                hashed ^= token * self.multipliers[layer][back]
                if back:
                    for head in range(c.engram_n_heads):
                        column = (back - 1) * c.engram_n_heads + head
                        rows.append(hashed % buckets.primes[column] + buckets.offsets[column])
            kv = w[f"{name}.wkv.weight"] @ w[f"{name}.embed.weight"][rows].reshape(-1)
            keys, value = kv[: -c.hidden_size].reshape(c.hc_mult, -1), kv[-c.hidden_size :]
            new = x.copy()
            for s in range(c.hc_mult):
                qk = w[f"{name}.q_weight"][s] * w[f"{name}.k_weight"][s]
                dot = float(np.sum(x[s] * qk * keys[s])) / math.sqrt(c.hidden_size)
                dot /= math.sqrt(float(np.mean(x[s] ** 2)) + c.rms_norm_eps)
                dot /= math.sqrt(float(np.mean(keys[s] ** 2)) + c.rms_norm_eps)
                root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
                new[s] = x[s] + sigmoid(root) * value
            out.append(new)
        return out

    def make_entries(self, spec, inputs):
        """Return (main KV, index key) per complete group."""
        c, w, a = self.c, self.w, f"layers.{spec.layer_id}.attn"
        entries = []
        for group in range(len(inputs) // spec.ratio):
            rows = inputs[group * spec.ratio : (group + 1) * spec.ratio]
            content = np.stack([w[f"{a}.compressor.wkv.weight"] @ x for x in rows])
            if spec.ratio > 1:
                gate = np.exp(np.stack([w[f"{a}.compressor.wgate.weight"] @ x for x in rows]))
                content = (gate / gate.sum(0)) * content
            latent = rms(content.sum(0), w[f"{a}.compressor.norm.weight"], c.rms_norm_eps)
            key = rms(
                w[f"{a}.indexer.wk.weight"] @ latent,
                w[f"{a}.indexer.k_norm.weight"],
                c.rms_norm_eps,
            )
            position = group * spec.ratio
            entries.append(
                (self.rotate(latent, position, spec.rope), self.rotate(key, position, spec.rope))
            )
        return entries

    def select(self, spec, x, qr, t, entries, pool):
        """Return the chosen entries of one query, and its pool if this layer builds it."""
        c, w, a = self.c, self.w, f"layers.{spec.layer_id}.attn.indexer"
        q = (w[f"{a}.wq_b.weight"] @ qr).reshape(c.index_n_heads, -1)
        q = [self.rotate(h, t, spec.rope) for h in q]
        weights = w[f"{a}.weights_proj.weight"] @ x / math.sqrt(c.index_head_dim * c.index_n_heads)
        visible = (t + 1) // spec.ratio
        keys = [key for _, key in entries]
        if self.slot is not None and spec.ratio == 2 and t >= self.decode_start and t % 2 == 0:
            keys = self.slot
        scores = [
            float(sum(wh * max(0.0, float(h @ keys[j])) for wh, h in zip(weights, q, strict=True)))
            for j in range(visible)
        ]
        allowed = range(visible)
        if spec.pool is PoolUse.BUILDS:
            size = c.candidate_block_size
            blocks = [max(scores[b : b + size]) for b in range(0, visible, size)]
            if blocks:
                blocks[-1] = math.inf
            best = sorted(range(len(blocks)), key=lambda b: (-blocks[b], b))
            pool = {
                j for b in best[: c.candidate_topk_blocks] for j in range(b * size, b * size + size)
            }
        elif spec.pool is PoolUse.SEARCHES:
            allowed = [j for j in allowed if j in pool]
        best = sorted(allowed, key=lambda j: (-scores[j], j))
        return sorted(best[: c.index_topk]), pool

    def attend(self, spec, t, qr, window_keys, chosen):
        c, w, a = self.c, self.w, f"layers.{spec.layer_id}.attn"
        q = (w[f"{a}.wq_b.weight"] @ qr).reshape(c.num_attention_heads, -1)
        keys = np.stack([*window_keys[max(0, t - c.sliding_window + 1) : t + 1], *chosen])
        outs = []
        for h in range(c.num_attention_heads):
            e = keys @ self.rotate(q[h], t, spec.rope) / math.sqrt(c.head_dim)
            p = np.exp(e - e.max())
            total = p.sum() + math.exp(w[f"{a}.attn_sink"][h] - e.max())
            outs.append(self.rotate(p @ keys / total, t, spec.rope, sign=-1))
        groups = np.concatenate(outs).reshape(c.o_groups, -1)
        wo_a = w[f"{a}.wo_a.weight"].reshape(c.o_groups, c.o_lora_rank, -1)
        return w[f"{a}.wo_b.weight"] @ np.concatenate(
            [wo_a[g] @ groups[g] for g in range(c.o_groups)]
        )

    def experts(self, layer, z):
        c, w, f = self.c, self.w, f"layers.{layer}.ffn"
        score = np.sqrt(np.log1p(np.exp(w[f"{f}.gate.weight"] @ z)))
        biased = score + w[f"{f}.gate.bias"]
        best = sorted(range(c.n_routed_experts), key=lambda e: (-biased[e], e))
        best = best[: c.num_experts_per_tok]
        total = sum(score[e] for e in best)

        def swiglu(name, weight):
            g = np.minimum(w[f"{name}.w1.weight"] @ z, c.swiglu_limit)
            u = np.clip(w[f"{name}.w3.weight"] @ z, -c.swiglu_limit, c.swiglu_limit)
            return w[f"{name}.w2.weight"] @ (g * sigmoid(g) * u * weight)

        y = swiglu(f"{f}.shared_experts", 1.0)
        for e in best:
            y = y + swiglu(f"{f}.experts.{e}", score[e] / total * c.routed_scaling_factor)
        return y

    def stale_slot_logits(self, ids, prefill):
        """Section 5.6: logits of `prefill` prompt tokens, then of one decoded token at a time."""
        self.slot, self.decode_start = None, prefill
        rows = [self.logits(ids[:prefill])]
        for length in range(prefill + 1, len(ids) + 1):
            self.slot = self.left_in_slot
            rows.append(self.logits(ids[:length])[-1:])
        return np.concatenate(rows)

    def logits(self, ids):
        c, w = self.c, self.w
        streams = [np.tile(w["embed.weight"][i], (c.hc_mult, 1)) for i in ids]
        pres = [np.eye(c.hc_mult)[0] for _ in ids]
        entries, chosen, pools, leaving = {}, {}, {}, None
        for spec in self.specs:
            layer = spec.layer_id
            name, a = f"layers.{layer}", f"layers.{layer}.attn"
            if spec.half is Half.DECODER and leaving is None:
                leaving = [p @ x for p, x in zip(pres, streams, strict=True)]
            if spec.has_engram:
                streams = self.engram(layer, streams, ids)
            mixes = [self.mix(f"{name}.hc_attn", x) for x in streams]
            norm = w[f"{name}.attn_norm.weight"]
            inputs = [rms(p @ x, norm, c.rms_norm_eps) for p, x in zip(pres, streams, strict=True)]
            if spec.owns_kv:
                source = inputs
                if spec.half is Half.DECODER and c.ced_kv_from == "encoder_output":
                    source = [rms(z, norm, c.rms_norm_eps) for z in leaving]
                entries[layer] = self.make_entries(spec, source)
                self.left_in_slot = [key for _, key in entries[layer]]
            windows = [
                self.rotate(
                    rms(w[f"{a}.wkv.weight"] @ x, w[f"{a}.kv_norm.weight"], c.rms_norm_eps),
                    t,
                    spec.rope,
                )
                for t, x in enumerate(inputs)
            ]
            for t, x in enumerate(inputs):
                qr = rms(w[f"{a}.wq_a.weight"] @ x, w[f"{a}.q_norm.weight"], c.rms_norm_eps)
                own = entries.get(spec.kv_owner, [])
                if spec.owns_topk:
                    chosen[layer, t], pool = self.select(spec, x, qr, t, own, pools.get(t))
                    pools[t] = pool
                picked = []
                if spec.mode is not AttentionMode.WINDOW:
                    picked = [own[j][0] for j in chosen[spec.topk_owner, t]]
                y = self.attend(spec, t, qr, windows, picked)
                pre, post, r = mixes[t]
                streams[t] = np.outer(post, y) + r.T @ streams[t]
                mixed = self.mix(f"{name}.hc_ffn", streams[t])
                z = rms(pre @ streams[t], w[f"{name}.ffn_norm.weight"], c.rms_norm_eps)
                streams[t] = np.outer(mixed[1], self.experts(layer, z)) + mixed[2].T @ streams[t]
                pres[t] = mixed[0]
        rows = [
            rms(p @ x, w["norm.weight"], c.rms_norm_eps) for p, x in zip(pres, streams, strict=True)
        ]
        return np.stack([w["head.weight"] @ row for row in rows])
