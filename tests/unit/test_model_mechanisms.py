"""Each mechanism of the backbone where it can be seen alone."""

from dataclasses import replace

import pytest
import torch

from finwhale.config import AttentionMode, preset
from finwhale.config.inventory import checkpoint_tensors
from finwhale.model import Backbone, Numerics, Packing
from finwhale.model.stale_slot import stale_slot_logits
from tests.models import build, token_ids, token_map, unit_model


@pytest.mark.parametrize("name", ["unit", "demo", "nano", "mini", "small"])
def test_state_dict_names_and_shapes_are_the_checkpoints(name):
    config = preset(name)
    mapped = token_map(config)
    with torch.device("meta"):
        model = Backbone(config, mapped)
    names = {s.name: s.shape for s in checkpoint_tensors(config) if s.is_text}
    assert names == {k: tuple(v.shape) for k, v in model.state_dict().items()}


def test_initialisation_defines_every_tensor_and_is_deterministic():
    config = preset("unit")
    model = Backbone(config, token_map(config))
    for tensor in model.state_dict().values():
        tensor.data.fill_(float("nan"))
    model.init_weights(3)
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    again = Backbone(config, token_map(config))
    again.init_weights(3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )
    assert not torch.equal(model.embed.weight, _initialised(config, 4).embed.weight)


def _initialised(config, seed):
    model = Backbone(config, token_map(config))
    model.init_weights(seed)
    return model


def test_image_tokens_route_by_their_own_bias_and_skip_engram():
    model = build(preset("unit"))
    ids = token_ids(1, 12)
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[0, 4:7] = True
    with torch.no_grad():
        plain, spans = {}, {}
        model(ids, trace=plain)
        model(ids, image_mask=mask, trace=spans)
        # Before any image token is seen nothing changes.
        for layer in range(len(model.specs)):
            got, want = spans[f"streams.{layer}"][:, :4], plain[f"streams.{layer}"][:, :4]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        boosted = build(preset("unit"))
        for layer in boosted.layers:
            layer.ffn.gate.bias_vl[:2] += 100.0
        trace = {}
        boosted(ids, image_mask=mask, trace=trace)
    for layer in range(len(model.specs)):
        ids_of = trace[f"gate_ids.{layer}"].view(1, 12, -1).sort(-1).values
        assert (ids_of[0, 4:7] == torch.tensor([0, 1])).all()
        assert not (ids_of[0, 7:] == torch.tensor([0, 1])).all()
    # Engram leaves image rows alone: the streams after the lookup equal those before.
    engram = model.layers[1].engram
    state = model.forward_state(ids, image_mask=mask)
    streams = spans["streams.1"]
    updated = engram(streams, state, 0)
    assert torch.equal(updated[0, 4:7], streams[0, 4:7])
    assert not torch.equal(updated[0, :4], streams[0, :4])


def test_engram_changes_its_layers_only_where_rows_are_not_zero():
    model = build(preset("unit"))
    state = model.forward_state(token_ids(1, 9))
    streams = torch.randn(1, 9, 4, 64)
    for spec, layer in zip(model.specs, model.layers, strict=True):
        if spec.has_engram:
            assert (layer.engram(streams, state, 0) - streams).abs().max() > 1e-2
            layer.engram.embed.weight.data.zero_()
            assert torch.equal(layer.engram(streams, state, 0), streams)


def test_reuse_layers_read_their_owners_selection_and_entries():
    model = unit_model()
    state = model.forward_state(token_ids(1, 40))
    with torch.no_grad():
        model.hidden(token_ids(1, 40), state=state)
    owners = {s.layer_id for s in model.specs if s.owns_kv}
    assert set(state.entries) == set(state.index_keys) == owners
    assert set(state.topk) == {s.layer_id for s in model.specs if s.owns_topk}
    for spec in model.specs:
        if spec.mode is not AttentionMode.WINDOW:
            assert state.entries[spec.kv_owner].shape[1] == 40 // spec.ratio
            assert int(state.topk[spec.topk_owner].max()) < 40 // spec.ratio


def test_index_keys_come_from_the_latent_before_rotation():
    model = unit_model()
    trace = {}
    ids = token_ids(1, 40)
    with torch.no_grad():
        model(ids, trace=trace)
        attn = model.layers[4].attn
        latent = attn.compressor.norm(attn.compressor.wkv(trace["attn_in.4"]))
        keys = attn.indexer.k_norm(attn.indexer.wk(latent))
    got = trace["index_k_raw.4"]
    # Rotation keeps the norm of every pair and the leading channels.
    torch.testing.assert_close(got[..., :16], keys[..., :16])
    torch.testing.assert_close(got.norm(dim=-1), keys.norm(dim=-1))


def test_general_ced_equals_the_released_form_with_one_decoder_owner():
    ids = token_ids(2, 45)
    with torch.no_grad():
        plain = unit_model()(ids)
        general = unit_model(ced_kv_from="encoder_output")(ids)
    torch.testing.assert_close(general, plain, rtol=0, atol=0)


def test_general_ced_differs_with_two_decoder_owners():
    two = {"kv_source_layer_ids": (1, 3, 4, 6), "index_source_layer_ids": (1, 3, 4, 6)}
    ids = token_ids(1, 45)
    with torch.no_grad():
        own, general = unit_model(**two), unit_model(**two, ced_kv_from="encoder_output")
        own_trace, trace = {}, {}
        own(ids, trace=own_trace)
        general(ids, trace=trace)
        # L6 projects the collapsed streams that left the encoder, under its own norm.
        entry = general.layers[6]
        state = general.forward_state(ids)
        general.hidden(ids, state=state)
        latent = entry.attn.compressor(entry.attn_norm(state.encoder_output), state)
        rotated = general.parts.ops.apply_rope(latent, state.entry_rotation(general.specs[6]))
    torch.testing.assert_close(trace["entries_raw.6"], rotated, rtol=0, atol=1e-6)
    assert (trace["entries_raw.6"] - own_trace["entries_raw.6"]).abs().max() > 0.1
    torch.testing.assert_close(trace["entries_raw.4"], own_trace["entries_raw.4"], rtol=0, atol=0)


@pytest.mark.parametrize("prefill", [40, 41])
def test_stale_slot_rule_moves_decode_steps_with_an_open_group_and_what_follows(prefill):
    # D08. Cases 1 and 2: odd and even context, then decode.
    model, ids = unit_model(), token_ids(1, 52)
    with torch.no_grad():
        owner = model(ids)
    stale = stale_slot_logits(model, ids, prefill)
    moved = (stale - owner).abs().amax(-1)[0] > 1e-3
    assert not moved[:prefill].any()
    first_open = prefill + prefill % 2  # the first even position that is decoded
    assert not moved[prefill:first_open].any()
    assert moved[first_open:].any()


def test_stale_slot_rule_is_the_owners_rule_while_selection_is_exhaustive():
    # With at most top-k entries every visible entry is selected, whatever its score.
    model, ids = unit_model(index_topk=64, candidate_topk_blocks=64), token_ids(1, 44)
    with torch.no_grad():
        owner = model(ids)
    torch.testing.assert_close(stale_slot_logits(model, ids, 30), owner, rtol=0, atol=2e-5)


def test_384_experts_and_six_choices():
    config = preset("unit")
    text = replace(config.text_config, n_routed_experts=384, num_experts_per_tok=6)
    model = build(replace(config, text_config=text))
    trace = {}
    with torch.no_grad():
        out = model(token_ids(1, 24), trace=trace)
    assert torch.isfinite(out).all()
    assert int(trace["gate_ids.0"].max()) > 255
    assert trace["gate_weights.0"].sum(-1).allclose(torch.tensor(1.5))


def test_experts_output_is_the_weighted_sum_of_the_chosen():
    model = unit_model()
    trace = {}
    with torch.no_grad():
        model(token_ids(1, 10), trace=trace)
        z, ffn = trace["ffn_in.2"][0], model.layers[2].ffn
        want = torch.zeros_like(z)
        for n in range(10):
            for e, w in zip(trace["gate_ids.2"][n], trace["gate_weights.2"][n], strict=True):
                want[n] += ffn.experts[e](z[n : n + 1], w.view(1, 1))[0]
            want[n] += ffn.shared_experts(z[n : n + 1])[0]
        got = ffn(trace["ffn_in.2"], model.forward_state(token_ids(1, 10)))[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_experts_are_summed_in_ascending_order_and_rounded_once():
    # D12. 2^24 - 2^24 + (1 + 2^-8) keeps the last term in this order alone; with the shared
    # expert's 2^-8 it is 1 + 2^-7, which bf16 holds. Rounding before that sum would lose both.
    config = preset("unit")
    text = replace(config.text_config, n_routed_experts=3, num_experts_per_tok=3)
    model = build(replace(config, text_config=text), Numerics(dtype=torch.bfloat16))
    ffn = model.layers[0].ffn
    values = {0: 2.0**24, 1: -(2.0**24), 2: 1 + 2.0**-8}

    class Constant(torch.nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, x, weight=None):
            return torch.full(x.shape, self.value, dtype=torch.float32)

    ffn.experts = torch.nn.ModuleList(Constant(v) for v in values.values())
    ffn.shared_experts = Constant(2.0**-8)
    ffn.gate.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))  # routing order 2, 1, 0
    ids = token_ids(1, 4)
    with torch.no_grad():
        y = ffn(torch.randn(1, 4, 64).bfloat16(), model.forward_state(ids))
    assert torch.equal(y, torch.full((1, 4, 64), 1 + 2.0**-7).bfloat16())


def test_release_numerics_are_bf16_by_definition():
    with pytest.raises(ValueError, match=r"numerics.dtype.*bfloat16"):
        Numerics(mode="release")
    with pytest.raises(ValueError, match="float16"):
        Numerics(dtype=torch.float16)
    with pytest.raises(ValueError, match=r"numerics.mode: got 'fast'"):
        Numerics(mode="fast")


def test_release_mode_rounds_activations_and_dequant_does_not():
    config, ids = preset("unit"), token_ids(1, 30)
    outs = {}
    with torch.no_grad():
        for name, numerics in (
            ("release", Numerics.release()),
            ("dequant", Numerics(dtype=torch.bfloat16)),
            ("exact", Numerics()),
        ):
            outs[name] = build(config, numerics)(ids).double()
    assert all(torch.isfinite(o).all() for o in outs.values())
    spread = outs["exact"].std()
    assert 1e-3 < (outs["release"] - outs["dequant"]).std() / spread < 1.0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), r"ids: got \(3,\)"),
        (torch.zeros(1, 3, dtype=torch.int32), "int32"),
        (torch.tensor([[1, 512]]), r"ids: range 1\.\.512, expected 0\.\.511"),
        (torch.tensor([[-1, 5]]), r"range -1\.\.5"),
    ],
)
def test_bad_ids_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        unit_model()(ids)


def test_contexts_beyond_the_configured_length_are_refused():
    from finwhale.cache.sequence_state import fresh_state
    from finwhale.engine.prefill import Prefill
    from finwhale.engine.step import forward_step

    model = unit_model(max_position_embeddings=20)
    message = "21 tokens, but max_position_embeddings is 20"
    model(token_ids(1, 20))
    with pytest.raises(ValueError, match=message):
        model(token_ids(1, 21))
    state = fresh_state(model)
    forward_step(model, state, token_ids(1, 20))
    for call in (
        lambda: forward_step(model, state, token_ids(1, 1)),
        lambda: Prefill(model, state).feed(token_ids(1, 1)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_bad_layouts_and_maps_are_refused():
    with pytest.raises(ValueError, match="row 0 has lengths"):
        Packing.from_lengths([[0, 4]])
    with pytest.raises(ValueError, match="at most 5"):
        Packing.from_lengths([[3, 3]], tokens=5)
    with pytest.raises(ValueError, match=r"packing: layout of \(1, 4\), ids are \(1, 5\)"):
        unit_model()(token_ids(1, 5), packing=Packing.from_lengths([[4]]))
    with pytest.raises(ValueError, match="token_map: missing"):
        Backbone(preset("unit"))
    with pytest.raises(ValueError, match="engram_compressed_vocab_size = 258"):
        Backbone(preset("unit"), torch.arange(512))


def test_entries_are_not_kept_between_calls():
    model = unit_model()
    with torch.no_grad():
        first = model(token_ids(1, 21))
        model(token_ids(1, 50, seed=9))
        again = model(token_ids(1, 21))
    assert torch.equal(first, again)
