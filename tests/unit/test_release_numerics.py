"""Where `release` numerics round, worked out by hand or from the formulas of section 9."""

import math
from dataclasses import replace

import pytest
import torch

from finwhale.config import preset
from finwhale.model import Numerics
from finwhale.model.compressor import Compressor
from finwhale.model.layers import Linear, Parts
from finwhale.ops import FAST, REFERENCE
from finwhale.ops.attention import sparse_attention_masked, sparse_attention_ref
from tests.models import build, token_ids, unit_model

BF16 = torch.bfloat16


def parts(ops=REFERENCE):
    return Parts(config=preset("unit").text_config, numerics=Numerics.release(), ops=ops)


@pytest.mark.parametrize("form", [sparse_attention_ref, sparse_attention_masked])
def test_release_attention_rounds_probabilities_once(form):
    # D04. Scores 0 and -1, values 0 and 1, no sink: p = exp(-1) = 0.36788 -> 0.3671875 in bf16;
    # 0.3671875 / 1.36788 = 0.26843 -> 0.267578125. Unrounded it would be 0.26894 -> 0.26953125.
    q = torch.tensor([2.0, 0, 0, 0], dtype=BF16).view(1, 1, 1, 4)
    q = torch.cat((torch.zeros_like(q), q), dim=1)
    keys = torch.tensor([[[0.0, 0, 0, 0], [-1.0, 1, 0, 0]]], dtype=BF16)
    sink = torch.tensor([-1e9])
    out = form(q, keys, None, None, sink, torch.tensor([[0, 1]]), 4)
    assert out[0, 1, 0, 1].item() == 0.267578125


def test_release_product_rounds_its_input_to_fp8_groups():
    # One group of 32 with amax 450: 450 / 448 > 1, so the scale is 2.
    linear = Linear(parts(), 32, 1, "quantized")
    linear.weight.data.fill_(1.0)
    x = torch.zeros(1, 32, dtype=BF16)
    x[0, 0], x[0, 1] = 450.0, 1.0
    # 450 / 2 = 225 -> 224 (E4M3 spacing is 16 there), back to 448; 1 / 2 is exact; bf16(449) = 448.
    assert linear(x).item() == 448.0
    plain = Linear(parts(), 32, 1, "plain")
    plain.weight.data.fill_(1.0)
    # Without rounding 451 lies between bf16's 450 and 452: the tie goes to the even 452.
    assert plain(x).item() == 452.0


def test_release_compressor_rounds_before_its_norm():
    # D07.
    spec = unit_model().specs[1]
    compressor = Compressor(parts(), spec)
    g = torch.Generator().manual_seed(0)
    for p in compressor.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) * 0.2)
    x = torch.randn(1, 2, 64, generator=g).to(BF16)
    state = unit_model().forward_state(token_ids(1, 2))
    got = compressor(x, state)[0, 0]
    c = x[0].double() @ compressor.wkv.weight.double().T
    z = x[0].double() @ compressor.wgate.weight.double().T
    pooled = (z.softmax(0) * c).sum(0)

    def normed(latent):
        latent = latent.double()
        scale = 1 / math.sqrt(latent.square().mean().item())
        return (compressor.norm.weight.double() * latent * scale).to(BF16)

    assert torch.equal(got, normed(pooled.to(BF16)))
    assert not torch.equal(got, normed(pooled))


def test_release_rounds_the_inputs_of_quantised_matrices_and_no_others():
    # D10 and the table of section 9.1: wo_a's input (width 128 here) is not among them.
    config = preset("unit")
    text = replace(config.text_config, o_groups=1, o_lora_rank=96)
    widths = []

    def record(x):
        widths.append(x.shape[-1])
        return REFERENCE.round_input(x)

    model = build(
        replace(config, text_config=text), Numerics.release(), replace(FAST, round_input=record)
    )
    state = model.forward_state(token_ids(1, 6))
    with torch.no_grad():
        model.layers[0].attn(torch.randn(1, 6, 64, dtype=BF16), state)
        # wq_a and wkv read 64, wq_b 32, wo_b 96.
        assert sorted(widths) == [32, 64, 64, 96]
        widths.clear()
        model.layers[1].attn(torch.randn(1, 6, 64, dtype=BF16), state)
    # A Full layer adds the index query's matrix (32); compressor, wk and weights_proj stay bf16.
    assert sorted(widths) == [32, 32, 64, 64, 96]


def test_release_wo_a_input_is_not_rounded():
    model = unit_model(Numerics.release())
    seen = {}

    def keep(x, weight):
        seen["input"] = x
        return REFERENCE.grouped_linear(x, weight)

    model = build(preset("unit"), Numerics.release(), replace(FAST, grouped_linear=keep))
    with torch.no_grad():
        model(token_ids(1, 20))
    x = seen["input"]
    assert x.dtype is BF16
    assert not torch.equal(x, REFERENCE.round_input(x))


def test_cache_rounding_off_leaves_values_alone_and_on_is_idempotent():
    ids, kept = token_ids(1, 30), {}

    def spy(name):
        def rounding(x):
            y = getattr(REFERENCE, name)(x)
            kept.setdefault(name, []).append((x, y))
            return y

        return rounding

    names = ("round_window_kv", "round_main_kv", "round_index")
    ops = replace(FAST, **{n: spy(n) for n in names})
    with torch.no_grad():
        build(preset("unit"), Numerics(cache_rounding=False), ops)(ids)
        assert not kept
        build(preset("unit"), Numerics(), ops)(ids)
    # 8 windows, 3 entry streams; index queries of 4 selections and keys of 3 owners.
    assert [len(kept[n]) for n in names] == [8, 3, 4 + 3]
    for name in names:
        for x, y in kept[name]:
            assert (x - y).abs().max() > 1e-3
            assert torch.equal(getattr(REFERENCE, name)(y), y)


def test_later_full_layer_searches_all_its_entries():
    # D05: L6 has entries of its own and is no pool search; L4's pool is one block.
    owners = {"kv_source_layer_ids": (1, 3, 4, 6), "index_source_layer_ids": (1, 3, 4, 6)}
    model = unit_model(**owners, candidate_topk_blocks=1)
    trace = {}
    with torch.no_grad():
        model(token_ids(1, 60), trace=trace)
    newest_block = 4 * (59 // 4)
    chosen = trace["topk.6"][0, -1]
    assert (chosen[chosen >= 0] < newest_block).any()
    searching = unit_model(candidate_topk_blocks=1)
    with torch.no_grad():
        searching(token_ids(1, 60), trace=trace)
    chosen = trace["topk.6"][0, -1]
    assert (chosen[chosen >= 0] >= newest_block).all()


def test_indexer_slices_do_not_change_the_selection(monkeypatch):
    from finwhale.model import indexer

    ids = token_ids(2, 45)
    with torch.no_grad():
        whole, sliced = {}, {}
        unit_model()(ids, trace=whole)
        monkeypatch.setattr(indexer, "_SLICE_BYTES", 1)
        unit_model()(ids, trace=sliced)
    for name in ("topk.1", "topk.3", "topk.4", "topk.6", "candidates.4"):
        assert torch.equal(whole[name], sliced[name]), name


def test_cache_rounding_is_on_by_default():
    assert Numerics().cache_rounding
    assert Numerics.release().cache_rounding
