"""What the GPU decoder keeps and refuses: packed weights, copied states, blocks, batches."""

import os
from dataclasses import replace

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("for the interpreter; compiled: tests/gpu", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the decoder needs triton")

from finwhale.cache.block_allocator import NoBlockError
from finwhale.cache.paged_reads import unpack_entry, unpack_index, unpack_window
from finwhale.cache.sequence_state import fresh_state
from finwhale.decode_kernels.tiles import unpack_fp4_tiles, unpack_fp8_tiles
from finwhale.engine.gpu_generation import generate_batch
from finwhale.engine.prefill import Prefill
from finwhale.gpu.decoder import GpuDecoder, buckets
from finwhale.gpu.operations import decode_operations
from finwhale.gpu.weights import GpuUnsupportedError, decode_unsupported, pack_backbone
from finwhale.model import Numerics
from finwhale.ops.weight_formats import dequantize_weight
from tests.models import build
from tests.stored_models import prefilled, small_config, stored_model

CONFIG = small_config()


@pytest.fixture(scope="module")
def model():
    return stored_model(CONFIG)


@pytest.fixture(scope="module")
def weights(model):
    return pack_backbone(model, "cpu")


def decoder_of(weights, **options):
    options = {"max_sequences": 2, "num_blocks": 6, "block_size": 8, "mode": "eager"} | options
    return GpuDecoder(weights, **options)


def test_packed_weights_give_back_the_model(model, weights):
    """By the formats' own decoding, and by name: a swap of two matrices would show."""
    layer, block = weights.layers[1], model.layers[1]
    rank = CONFIG.text_config.q_lora_rank
    qkv = dequantize_weight(unpack_fp8_tiles(layer.qkv[0]), layer.qkv[1])
    assert torch.equal(qkv[:rank], block.attn.wq_a.weight.float())
    assert torch.equal(qkv[rank:], block.attn.wkv.weight.float())
    for n, expert in enumerate(block.ffn.experts):
        codes, scales = unpack_fp4_tiles(layer.experts.gate_up[n], layer.experts.gate_up_scales[n])
        whole = dequantize_weight(codes.view(torch.int8), scales)
        assert torch.equal(whole, torch.cat((expert.w1.weight, expert.w3.weight)).float())
    table = dequantize_weight(layer.engram["table"], layer.engram["table_scales"])
    assert torch.equal(table, block.engram.embed.weight.float())
    heads = block.attn.indexer.weights_proj.weight
    scaled = heads * (24 * 64) ** -0.5
    assert torch.equal(layer.index_weights * layer.index_factor, scaled)


def test_weights_that_no_file_holds_are_refused_by_name(model):
    changed = stored_model(CONFIG)
    with torch.no_grad():
        changed.layers[2].attn.wo_b.weight[3, 5] = 0.12345
    with pytest.raises(GpuUnsupportedError, match=r"layers\.2\.attn\.wo_b"):
        pack_backbone(changed, "cpu")
    with pytest.raises(GpuUnsupportedError, match="numerics"):
        pack_backbone(build(CONFIG, Numerics()), "cpu")


def test_scales_that_no_tile_holds_are_refused_by_name():
    changed = stored_model(CONFIG)
    for matrix, name in (
        (changed.layers[1].ffn.experts[1].w2, r"layers\.1\.ffn\.experts\.1: scales"),
        (changed.layers[0].attn.wq_b, r"layers\.0\.attn\.wq_b: scales"),
    ):
        with torch.no_grad():
            matrix.weight.mul_(2.0**40)
        with pytest.raises(GpuUnsupportedError, match=name):
            pack_backbone(changed, "cpu")


@pytest.mark.parametrize(
    ("field", "value"), [("head_dim", 32), ("index_head_dim", 32), ("hc_mult", 2)]
)
def test_geometries_that_no_kernel_serves_are_refused(field, value):
    changed = replace(CONFIG.text_config, **{field: value})
    assert decode_unsupported(CONFIG.text_config, "cpu") is None
    assert field in decode_unsupported(changed, "cpu")


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9, 16, 17])
def test_a_copied_state_reads_back_value_by_value(model, weights, length):
    """Rows of windows, entries, keys and open groups, found by block table and ring by hand."""
    decoder = decoder_of(weights, poison=True)
    other, _ = prefilled(model, list(range(40, 47)))
    decoder.admit(other, 1, max_new_tokens=1)
    state, _ = prefilled(model, list(range(20, 20 + length)))
    name = decoder.admit(state, 1, max_new_tokens=3)
    own, c = decoder._sequences[name], CONFIG.text_config
    ring = decoder.pools.layout.ring_rows
    for spec in weights.specs:
        layer, kept = spec.layer_id, state.window[spec.layer_id]
        rows = [own.slot * ring + p % ring for p in range(kept.start, kept.stop)]
        got = unpack_window(decoder.pools.window[layer][rows], "fp4", c.head_dim)
        assert torch.equal(got, kept.rows.float())
        if spec.owns_kv and length >= spec.ratio:
            each = 8 // spec.ratio
            rows = [own.blocks[e // each] * each + e % each for e in range(length // spec.ratio)]
            got = unpack_entry(decoder.pools.main[layer][rows], "fp4", c.head_dim)
            assert torch.equal(got, state.entries[layer].view().float())
            got = unpack_index(decoder.pools.index_k[layer][rows], "fp4", c.index_head_dim)
            assert torch.equal(got, state.index_keys[layer].view().float())
    if length % 2:
        assert torch.equal(decoder.pools.open[1][own.slot], state.open_groups[1].rows[-1])
    else:
        assert decoder.pools.open[1][own.slot].isnan().all()


def test_states_and_requests_that_cannot_go_on_are_refused(model, weights):
    decoder = decoder_of(weights)
    state, _ = prefilled(model, [5, 6, 7])
    with pytest.raises(ValueError, match="next_token"):
        decoder.admit(state, 512, max_new_tokens=1)
    with pytest.raises(GpuUnsupportedError, match="capacity"):
        decoder.admit(state, 1, max_new_tokens=46)
    with pytest.raises(ValueError, match="uniform"):
        decoder.admit(state, 1, max_new_tokens=1, temperature=0.5)
    cut = fresh_state(model, max_rollback=0)
    session = Prefill(model, cut, mode="bounded", bounded_rows=2)
    session.feed(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]]))
    session.finish()
    with pytest.raises(GpuUnsupportedError, match="cut"):
        decoder.admit(cut, 1, max_new_tokens=1)
    with pytest.raises(GpuUnsupportedError, match="graph"):
        decoder_of(weights, mode="graph")


def test_slots_and_blocks_run_out_and_come_back(model, weights):
    decoder = decoder_of(weights)
    state, _ = prefilled(model, [5, 6, 7])
    first = decoder.admit(state, 1, max_new_tokens=14)  # 17 tokens: 3 blocks of 6
    with pytest.raises(NoBlockError, match="3 blocks"):
        decoder.admit(state, 1, max_new_tokens=30)
    decoder.admit(state, 1, max_new_tokens=1)
    with pytest.raises(NoBlockError, match="0 slots"):
        decoder.admit(state, 1, max_new_tokens=1)
    decoder.release(first)
    assert (decoder.num_free, decoder.allocator.num_free) == (1, 5)
    with pytest.raises(ValueError, match="2 steps"):
        decoder.decode([1], 2)  # one token is left to draw


def test_buckets_are_powers_of_two_and_the_most():
    assert buckets(1) == (1,)
    assert buckets(2) == (1, 2)
    assert buckets(7) == (1, 2, 4, 7)
    assert buckets(256) == (1, 2, 4, 8, 16, 32, 64, 128, 256)


class CountingDecoder:
    """Draws id 100, 101, ... for each sequence, in runs; records who was together."""

    steps_at_once, capacity = 4, 64

    def __init__(self, slots, blocks=100):
        self.left, self.drawn, self.together = {}, {}, []
        self.slots, self.allocator = slots, type("Free", (), {"num_free": blocks})()

    @property
    def num_free(self):
        return self.slots - len(self.left)

    def num_blocks_for(self, tokens):
        return -(-tokens // 16)

    def admit(self, state, token, *, max_new_tokens, temperature, uniform):
        name = len(self.drawn)
        self.left[name], self.drawn[name] = max_new_tokens, 0
        return name

    def num_left(self, name):
        return self.left[name]

    def decode(self, names, steps):
        self.together.append(len(names))
        rows = []
        for name in names:
            rows.append([100 + self.drawn[name] + n for n in range(steps)])
            self.drawn[name] += steps
            self.left[name] -= steps
        return torch.tensor(rows)

    def release(self, name):
        del self.left[name]


def collected(decoder, model, prompts, **options):
    found = [[] for _ in prompts]
    for number, token in generate_batch(model, decoder, prompts, **options):
        found[number].append(token)
    return found


@pytest.mark.parametrize("most", [0, 1, 2, 6])
def test_generation_gives_each_prompt_its_tokens_and_frees_slots(model, most):
    decoder = CountingDecoder(slots=2)
    prompts = [[1, 2], [3], [4, 5, 6]]
    found = collected(decoder, model, prompts, max_new_tokens=most)
    for prompt, tokens in zip(prompts, found, strict=True):
        first = [int(prefilled(model, prompt)[1].argmax())] if most else []
        assert tokens == first + [100 + n for n in range(most - 1)]
    assert not decoder.left
    assert max(decoder.together, default=0) <= 2


def test_generation_drops_what_a_run_drew_behind_a_stop_id(model):
    decoder = CountingDecoder(slots=2)
    found = collected(decoder, model, [[1, 2], [3]], max_new_tokens=12, stop_ids=(102,))
    assert [tokens[1:] for tokens in found] == [[100, 101, 102]] * 2
    assert not decoder.left
    with pytest.raises(ValueError, match="more than the decoder holds"):
        collected(decoder, model, [[1] * 60], max_new_tokens=12)


def test_every_operation_of_a_step_is_named_with_a_reason(weights):
    found = decode_operations(decoder_of(weights))
    assert all(one.uses and one.why for one in found)
    names = {one.operation for one in found}
    assert {"attention", "experts", "index scores", "selection", "prefill"} <= names
