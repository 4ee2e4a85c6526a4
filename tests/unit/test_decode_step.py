"""A whole decode step (bench/decode_step.py), token after token, against the model's forward pass.

Same stored weights in both. The model runs in release numerics over the whole sequence; the step
sees one token per sequence and its caches. Every entry is selected, so that no near-tie decides.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.cache.paged_reads import unpack_entry, unpack_window
from finwhale.config import preset
from finwhale.config.inventory import Storage
from finwhale.decode_kernels.experts_w4 import ExpertWeights
from finwhale.decode_kernels.hyper_site import Site
from finwhale.decode_kernels.tiles import pack_fp4_tiles
from finwhale.model import Numerics
from finwhale.ops.rope import apply_rope
from finwhale.ops.weight_formats import dequantize_weight, quantize_weight
from tests.models import build

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import decode_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter sums as the model does; on a GPU the order differs, and FP8 roundings amplify.
TOLERANCE = 1e-3 if DEVICE == "cpu" else 0.05


def stored(weight, storage=Storage.FP8_BLOCK):
    """Return codes and scales of a parameter, and leave their values in it."""
    codes, scales = quantize_weight(weight.detach().float(), storage)
    with torch.no_grad():
        weight.copy_(dequantize_weight(codes, scales))
    return codes, scales.view(torch.uint8)


def joined(*pairs):
    """Return several stored matrices as one; rows of each are a multiple of 32."""
    codes, scales = zip(*pairs, strict=True)
    whole = torch.cat([c.view(torch.uint8) for c in codes]).view(torch.float8_e4m3fn)
    return whole, torch.cat(scales)


def expert_weights(moe):
    def stack(*names):
        found = [
            [stored(getattr(expert, n).weight, Storage.FP4_ROW) for n in names]
            for expert in moe.experts
        ]
        codes = torch.stack([torch.cat([c for c, _ in pairs]) for pairs in found])
        scales = torch.stack([torch.cat([s for _, s in pairs]) for pairs in found])
        return pack_fp4_tiles(codes, scales), scales

    shared = moe.shared_experts
    return ExpertWeights(
        *stack("w1", "w3"),
        *stack("w2"),
        *joined(stored(shared.w1.weight), stored(shared.w3.weight)),
        *stored(shared.w2.weight),
    )


def layer_of(block, spec, c):
    attn = block.attn
    layer = decode_step.Layer(
        spec=spec,
        attn_site=Site(
            block.hc_attn_fn, block.hc_attn_base, block.hc_attn_scale, block.attn_norm.weight
        ),
        ffn_site=Site(
            block.hc_ffn_fn, block.hc_ffn_base, block.hc_ffn_scale, block.ffn_norm.weight
        ),
        qkv=joined(stored(attn.wq_a.weight), stored(attn.wkv.weight)),
        q_norm=attn.q_norm.weight,
        wq_b=stored(attn.wq_b.weight),
        kv_norm=attn.kv_norm.weight,
        wo_a=stored(attn.wo_a.weight),
        wo_b=stored(attn.wo_b.weight),
        sink=attn.attn_sink,
        gate=block.ffn.gate.weight,
        bias=block.ffn.gate.bias,
        experts=expert_weights(block.ffn),
    )
    if attn.compressor is not None:
        parts = [attn.compressor.wkv.weight]
        parts += [attn.compressor.wgate.weight] if spec.ratio > 1 else []
        layer.compressor, layer.compressor_norm = torch.cat(parts), attn.compressor.norm.weight
        layer.index_wk, layer.index_k_norm = attn.indexer.wk.weight, attn.indexer.k_norm.weight
    if attn.indexer is not None:
        layer.index_wq_b = stored(attn.indexer.wq_b.weight)
        factor = (c.index_n_heads * c.index_head_dim) ** -0.5
        layer.index_weights = attn.indexer.weights_proj.weight * factor
    if block.engram is not None:
        engram = block.engram
        table, table_scales = stored(engram.embed.weight, Storage.FP8_ROW)
        wkv, wkv_scales = stored(engram.wkv.weight)
        layer.engram = {
            "multipliers": engram.multipliers, "primes": engram.primes, "offsets": engram.offsets,
            "table": table, "table_scales": table_scales, "wkv": wkv, "wkv_scales": wkv_scales,
            "q_weight": engram.q_weight, "k_weight": engram.k_weight,
        }  # fmt: skip
    return layer


def on_device(value):
    if isinstance(value, torch.Tensor):
        return value.detach().to(DEVICE)
    if isinstance(value, tuple):
        moved = [on_device(v) for v in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return {n: on_device(v) for n, v in value.items()} if isinstance(value, dict) else value


@pytest.fixture(scope="module")
def pair():
    """A model whose weights are stored values, and the same weights as the step reads them."""
    text = {
        "index_head_dim": 64, "index_n_heads": 16, "index_topk": 32, "sliding_window": 4,
        "candidate_topk_blocks": 16,
    }  # fmt: skip
    config = preset("unit")
    config = replace(config, text_config=replace(config.text_config, **text))
    backbone, c = build(config, Numerics.release(), seed=3), config.text_config
    layers = []
    for block, spec in zip(backbone.layers, backbone.specs, strict=True):
        layer = layer_of(block, spec, c)
        for name, value in vars(layer).items():
            setattr(layer, name, on_device(value))
        layers.append(layer)
    final = Site(*(torch.zeros(n) for n in ((24, 4 * c.hidden_size), 24, 3)), backbone.norm.weight)
    model = SimpleNamespace(
        config=c, device=DEVICE, specs=backbone.specs, layers=layers, final=on_device(final),
        embed=on_device(backbone.embed.weight), head=on_device(backbone.head.weight),
    )  # fmt: skip
    return backbone, model


def decoded(backbone, model, ids, change=None):
    """Return the logits [B, T, V] of the steps over ids [B, T]."""
    batch, tokens = ids.shape
    c = model.config
    cache = decode_step.Cache(model, batch, 2 * tokens, is_random=False)
    step = decode_step.Step(model, cache)
    if change is not None:
        change(step)
    compressed = torch.nn.functional.pad(
        backbone.token_map[ids], (c.engram_max_ngram_size - 1, 0), value=backbone.pad_id
    )
    out = []
    for t in range(tokens):
        cache.at(t)
        step.ids = ids[:, t].to(DEVICE)
        step.recent = compressed[:, t : t + c.engram_max_ngram_size].flip(1).to(DEVICE)
        step.run()
        assert torch.equal(step.tokens, step.logits.argmax(-1))
        out.append(step.logits.cpu())
    return torch.stack(out, dim=1)


def attention_of_the_model(
    q, ring, window_index, main, entry_index, sink, rotation, *, invariant=False, overlap=False
):
    """Gathered attention with probabilities rounded as the model rounds them (D04).

    With the kernel's own rounding, half of the outputs differ in their last bit, and eight layers
    of FP8 roundings turn that into another choice of experts. `gather_attention` has its own tests.
    """
    dim, out = q.shape[-1], torch.empty_like(q)
    for t, one in enumerate(q.float()):
        keys = unpack_window(ring[window_index[t][window_index[t] >= 0]], "fp4", dim)
        if main is not None:
            entries = entry_index[t][entry_index[t] >= 0]
            keys = torch.cat((keys, unpack_entry(main[entries], "fp4", dim)))
        keys = keys.float()
        scores = one @ keys.T * dim**-0.5
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        total = p.sum(-1, keepdim=True) + (sink[:, None] - scores.amax(-1, keepdim=True)).exp()
        out[t] = p.bfloat16().float() @ keys / total
    return apply_rope(out, rotation, inverse=True)


@pytest.fixture(autouse=True)
def _attention(monkeypatch):
    monkeypatch.setattr(decode_step, "gather_attention", attention_of_the_model)


def relative(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.slow  # in the interpreter; compiled it is fast
@pytest.mark.parametrize(("batch", "tokens"), [(1, 7), (2, 5)])
def test_steps_equal_the_forward_pass(pair, batch, tokens):
    """Seven tokens: the window of four wraps, groups of two close and stay open."""
    backbone, model = pair
    ids = torch.randint(0, 500, (batch, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = backbone(ids)
    got = decoded(backbone, model, ids)
    assert relative(got, want) < TOLERANCE


@pytest.mark.slow  # in the interpreter; compiled it is fast
@pytest.mark.parametrize("what", ["mix", "entries", "engram", "window", "experts"])
def test_a_step_without_one_of_its_parts_differs(pair, what):
    backbone, model = pair
    ids = torch.randint(0, 500, (1, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = backbone(ids)

    def change(step):
        if what == "mix":
            step.first_mix = step.first_mix.flip(1)
            whole = step.site
            step.site = lambda s, p, b, i, x: whole(s, p, b, i.flip(1), x)
        elif what == "entries":
            step.publish = lambda layer, x: None
        elif what == "engram":
            gather = step.gather
            step.gather = lambda layer: torch.zeros_like(gather(layer))
        elif what == "window":
            at = step.cache.at

            def alone(position):
                at(position)
                step.cache.window_index = step.cache.ring_rows[:, None]

            step.cache.at = alone
        else:
            for layer in model.layers:
                layer.bias = layer.bias.flip(0) + torch.tensor([9.0, 0, 0, 9], device=DEVICE)

    biases = [layer.bias for layer in model.layers]
    try:
        assert relative(decoded(backbone, model, ids, change), want) > 0.1
    finally:
        for layer, bias in zip(model.layers, biases, strict=True):
            layer.bias = bias
