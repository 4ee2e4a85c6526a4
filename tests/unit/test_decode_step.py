"""Whole decode steps of `finwhale.gpu` over a model's weights, against the model's own steps.

Same stored weights in both, prompts of mixed lengths, so groups of two close for some rows only.
Every entry is selected, so that no near-tie decides.
"""

import contextlib
import itertools
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip(
        "sums of a GPU have another order; compiled: tests/gpu/test_gpu_decoder.py",
        allow_module_level=True,
    )
os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.cache.paged_reads import unpack_entry, unpack_window
from finwhale.decode_kernels import launch as launch_module
from finwhale.engine.generate import generate
from finwhale.engine.gpu_generation import generate_one
from finwhale.engine.request import SamplingParams
from finwhale.engine.sampler import draw, uniform
from finwhale.engine.step import forward_step
from finwhale.gpu import step as step_module
from finwhale.gpu.decoder import GpuDecoder, NotFiniteError
from finwhale.gpu.weights import pack_backbone
from finwhale.ops.rope import apply_rope
from tests.stored_models import prefilled, small_config, stored_model

DEVICE = "cpu"
TOLERANCE = 1e-5  # the interpreter sums as the model does
slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(600)  # the interpreter on a busy machine
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [7]]


def attention_of_the_model(
    q, ring, window_index, main, entry_index, sink, rotation, *, invariant=False, settled=False,
    overlaps=(0, 0),
):  # fmt: skip
    """Gathered attention with probabilities rounded as the model rounds them (D04).

    With the kernel's own rounding, half of the outputs differ in their last bit, and a few layers
    of FP8 roundings turn that into another choice of experts. `gather_attention` has its own tests.
    """
    dim, out = q.shape[-1], torch.zeros_like(q)
    for t, one in enumerate(q.float()):
        keys = unpack_window(ring[window_index[t][window_index[t] >= 0]], "fp4", dim)
        if main is not None:
            entries = entry_index[t][entry_index[t] >= 0]
            keys = torch.cat((keys, unpack_entry(main[entries], "fp4", dim)))
        if not len(keys):
            continue
        keys = keys.float()
        scores = one @ keys.T * dim**-0.5
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        total = p.sum(-1, keepdim=True) + (sink[:, None] - scores.amax(-1, keepdim=True)).exp()
        out[t] = p.bfloat16().float() @ keys / total
    return apply_rope(out, rotation, inverse=True)


@pytest.fixture(autouse=True)
def _attention(monkeypatch):
    monkeypatch.setattr(step_module, "gather_attention", attention_of_the_model)


def packed(config):
    # Another seed may meet a sum that falls on the other side of a rounding (D31): with 3, one of
    # 15 rows differs, as one stream of layer 2's second site is one bf16 step away (4.5625).
    model = stored_model(config, seed=4)
    return model, pack_backbone(model, DEVICE)


@pytest.fixture(scope="module")
def pair():
    return packed(small_config())


@pytest.fixture(scope="module")
def few():
    """Three layers, one of a kind: window, full at ratio 2 with Engram, full at ratio 1."""
    text = {
        "num_hidden_layers": 3, "kv_source_layer_ids": (1, 2), "index_source_layer_ids": (1, 2),
        "compress_ratios": (0, 2, 1), "candidate_source_layer_id": 2, "engram_layer_ids": (1,),
        "engram_num_embeddings": small_config().text_config.engram_num_embeddings[:1],
        "hc_sinkhorn_iters": 2,
    }  # fmt: skip
    return packed(small_config(**text))


def started(pair, prompts, first, **options):
    """Return a decoder, its sequences, and the states they were copied from."""
    model, weights = pair
    options = {
        "max_sequences": 4, "num_blocks": 16, "block_size": 8, "mode": "eager",
        "keep_logits": True, "poison": True,
    } | options  # fmt: skip
    decoder = GpuDecoder(weights, **options)
    states = [prefilled(model, ids)[0] for ids in prompts]
    names = [
        decoder.admit(state, token, max_new_tokens=8)
        for state, token in zip(states, first, strict=True)
    ]
    return decoder, names, states


def model_step(model, state, token):
    """Return the model's logits [V] of one more token."""
    with torch.no_grad():
        return model.logits(forward_step(model, state, torch.tensor([[token]]))[:, -1])[0]


def relative(got, want):
    return float((got.cpu() - want).norm() / want.norm())


def test_one_step_of_the_fewest_layers_equals_the_models(few):
    """Two rows in a bucket of two, one entry completed and one group left open."""
    model, _ = few
    decoder, names, states = started(few, PROMPTS[:2], [11, 12], max_sequences=2)
    decoder.decode(names, 1)
    for row, (state, token) in enumerate(zip(states, [11, 12], strict=True)):
        want = model_step(model, state, token)
        assert relative(decoder.logits[row], want) < TOLERANCE
        # The other row's logits are not as good: the comparison tells rows apart.
        assert relative(decoder.logits[1 - row], want) > 0.1


@slow
@pytest.mark.parametrize("family", ["any", "hopper"])
def test_steps_of_mixed_lengths_equal_the_models_and_touch_nothing_else(pair, family, monkeypatch):
    """Five steps: windows of four wrap, groups of two close and stay open, one row is padding.

    By the launch tables of a device family. Another order of sums may meet a rounding that falls on
    its other side; none does here. `test_decode_flips.py` looks at one that does.
    """
    monkeypatch.setattr(launch_module, "device_family", lambda device: family)
    model, _ = pair
    decoder, names, states = started(pair, PROMPTS, [11, 12, 13])
    tokens = [11, 12, 13]
    for _ in range(5):
        drawn = decoder.decode(names, 1)[:, 0].tolist()
        for row, state in enumerate(states):
            want = model_step(model, state, tokens[row])
            assert relative(decoder.logits[row], want) < TOLERANCE
            assert int(decoder.logits[row].argmax()) == drawn[row]
        tokens = drawn
    held = {block for s in decoder._sequences.values() for block in s.blocks}
    layout = decoder.pools.layout
    for spec in layout.specs:
        ring = decoder.pools.window[spec.layer_id].view(4, layout.ring_rows, -1)
        assert bool((ring[decoder._free_slots] == 255).all())
        if spec.owns_kv:
            pool = decoder.pools.main[spec.layer_id].view(16, layout.entries_per_block(spec), -1)
            assert bool((pool[[b for b in range(16) if b not in held]] == 255).all())


def test_the_table_of_overlaps_names_the_launches_of_a_step(pair, monkeypatch):
    """A name that a step does not know would silently leave its launch without overlap."""
    asked = set()

    def overlap(step, name):
        asked.add(name)
        return 0

    monkeypatch.setattr(step_module.DecodeStep, "overlap", overlap)
    decoder, names, _ = started(pair, PROMPTS[:1], [11])
    decoder.decode(names, 1)
    monkeypatch.setattr(launch_module, "device_family", lambda device: "hopper")
    assert asked == set(step_module.step_overlaps(1, DEVICE))
    assert not step_module.step_overlaps(64, DEVICE)


@slow
def test_tokens_fed_back_on_the_device_equal_those_sent_by_the_host(few):
    """Three steps at once; one by one; one by one with buffers written anew."""
    found = []
    for form in ("at once", "one by one", "written anew"):
        decoder, names, _ = started(few, PROMPTS[:2], [11, 12], steps_at_once=3)
        steps = []
        for _ in range(1 if form == "at once" else 3):
            steps.append(decoder.decode(names, 3 if form == "at once" else 1))
            if form == "written anew":
                decoder._arranged = ()
        found.append((torch.cat(steps, dim=1), decoder.logits[:2].clone()))
    for drawn, logits in found[1:]:
        assert torch.equal(drawn, found[0][0])
        assert torch.equal(logits, found[0][1])


LAUNCHING = (
    "hyper_site", "linear_fp8", "latent_and_window", "gather_attention", "close_groups",
    "store_rows", "rotate_queries", "index_scores", "select_topk_rows", "pool_rows", "route",
    "experts_w4", "engram_update",
)  # fmt: skip


@pytest.mark.parametrize(("rows", "invariant"), [(1, False), (1, True), (2, False)])
def test_what_is_read_before_the_wait_was_not_written_by_the_launch_before(
    pair, monkeypatch, rows, invariant
):
    """Three launches read early what a step wrote, on the word of this file: all in their place."""
    calls = []

    def recorded(name, whole):
        def call(*given, **options):
            calls.append((name, given, options, whole(*given, **options)))
            return calls[-1][3]

        return call

    for name in LAUNCHING:
        monkeypatch.setattr(step_module, name, recorded(name, getattr(step_module, name)))
    decoder, names, _ = started(pair, PROMPTS[:rows], [11, 12][:rows], invariant=invariant)
    decoder.decode(names, 1)
    order = [call[0] for call in calls]
    attentions = [n for n, name in enumerate(order) if name == "gather_attention"]
    specs = [layer.spec for layer in pair[1].layers]
    # Owners of entries, of a choice alone, and of neither.
    assert {(s.owns_kv, s.owns_topk) for s in specs} == {
        (True, True),
        (False, True),
        (False, False),
    }
    settled = [calls[n][2]["settled"] for n in attentions]
    assert settled == [not (spec.owns_kv or spec.owns_topk) for spec in specs]
    for n in attentions:
        if calls[n][2]["settled"]:
            # The query, and before it the ring; entries and their choice are of an earlier layer.
            assert order[n - 2 : n] == ["latent_and_window", "linear_fp8"]
            assert calls[n - 1][3].data_ptr() == calls[n][1][0].data_ptr()
    for n, name in enumerate(order):
        if name == "experts_w4":  # the site made its input
            assert order[n - 2 : n] == ["hyper_site", "route"]
            assert calls[n][1][0].data_ptr() == calls[n - 2][3].x_rounded.data_ptr()
    sites = [n for n, name in enumerate(order) if name == "hyper_site"]
    found = [isinstance(calls[n][3].mix, torch.Tensor) for n in sites]
    # All but those before Engram, which adds with coefficients.
    closed = {2 * n - 1 for n, layer in enumerate(pair[1].layers) if layer.engram}
    assert closed
    assert found == [rows == 1 and not invariant and n not in closed for n in range(len(sites))]
    assert min(b - a for a, b in itertools.pairwise(sites)) >= 3


@slow
def test_neighbours_and_padding_do_not_change_a_row(few, monkeypatch):
    """Bit for bit: in one bucket by any launch, across buckets by the invariant ones."""
    monkeypatch.undo()  # the kernel's own attention

    def logits_of(others, **options):
        prompts = [PROMPTS[0], *(PROMPTS[n] for n in others)]
        decoder, names, _ = started(few, prompts, [11, 12, 13][: len(prompts)], **options)
        decoder.decode(names, 1)
        return decoder.logits[0].clone()

    one, other = logits_of([1]), logits_of([2])
    assert torch.equal(one, other)
    alone = logits_of([], invariant=True)
    assert torch.equal(alone, logits_of([1, 2], invariant=True))
    # By the tables, a single row takes a form of its own, which shows in some bit.
    assert not torch.equal(logits_of([]), one)


@slow
@pytest.mark.parametrize("what", ["mix", "entries", "engram", "window", "experts"])
def test_a_step_without_one_of_its_parts_differs(pair, what):
    model, weights = pair
    decoder, names, states = started(pair, PROMPTS[1:2], [11])
    step, biases = decoder.step, [layer.bias for layer in weights.layers]
    if what == "mix":
        whole = step.site
        step.site = lambda s, p, b, i, x, _=True: whole(s, p, b, i.flip(1), x, False)
    elif what == "entries":
        step.publish = lambda layer, x: None
    elif what == "engram":
        gather = step.gather
        step.gather = lambda layer: torch.zeros_like(gather(layer))
    elif what == "window":
        places = decoder.places.places

        def alone(*inputs):
            found = places(*inputs)
            return replace(found, window_index=found.ring_rows[:, None])

        decoder.places.places = alone
    else:
        for layer in weights.layers:
            layer.bias = layer.bias.flip(0) + torch.tensor([9.0, 0, 0, 9], device=DEVICE)
    try:
        for token in (11, 12):
            decoder.decode(names, 1)
            decoder.force(names[0], 12)
            want = model_step(model, states[0], token)
        assert relative(decoder.logits[0], want) > 0.1
    finally:
        for layer, bias in zip(weights.layers, biases, strict=True):
            layer.bias = bias


@slow
@pytest.mark.parametrize("what", ["tables", "slots", "at"])
def test_a_row_that_stands_where_another_does_differs(pair, what):
    """Negative control of everything that says where a row stands: two rows swapped."""
    model, _ = pair
    decoder, names, states = started(pair, PROMPTS[:2], [11, 12], poison=False)
    arrange = decoder._arrange

    def swapped(names, bucket, steps):
        arrange(names, bucket, steps)
        buffer = getattr(decoder.rows, what)
        buffer[:2] = buffer[:2].flip(0)

    decoder._arrange = swapped
    try:
        decoder.decode(names, 1)
    except NotFiniteError:
        return  # it read rows that nobody had written
    for row, (state, token) in enumerate(zip(states, [11, 12], strict=True)):
        assert relative(decoder.logits[row], model_step(model, state, token)) > 0.01


@slow
def test_sampled_tokens_are_the_engines_draws_from_the_same_logits(few):
    model, weights = few
    decoder = GpuDecoder(
        weights, max_sequences=2, num_blocks=8, block_size=8, mode="eager", keep_logits=True
    )
    params = SamplingParams(temperature=2.0, max_new_tokens=9)
    names = []
    for seed, ids in enumerate(PROMPTS[:2]):
        state = prefilled(model, ids)[0]
        numbers = lambda index, seed=seed: uniform(seed, index)  # noqa: E731
        names.append(decoder.admit(state, 5, max_new_tokens=4, temperature=2.0, uniform=numbers))
    greedy = 0
    for index in range(2):
        drawn = decoder.decode(names, 1)[:, 0].tolist()
        for row, token in enumerate(drawn):
            logits = decoder.logits[row].cpu()
            assert token == draw(logits, params, seed=row, index=index)
            greedy += token == int(logits.argmax())
    assert greedy < 4  # or temperature had no effect


@slow
def test_generation_gives_the_greedy_tokens_of_the_models_own(few):
    model, _ = few
    said = []
    options = {"max_new_tokens": 4, "device": DEVICE, "say": said.append}
    got = list(generate_one(model, PROMPTS[0], **options))
    model.to_device("cpu")
    assert got == list(generate(model, PROMPTS[0], max_new_tokens=4))
    assert any("attention" in line for line in said)
    stopped = list(generate_one(model, PROMPTS[0], stop_ids=got[1:2], **options))
    model.to_device("cpu")
    assert stopped == got[:2]


@slow
def test_a_graph_captured_while_others_run_does_not_disturb_them(few, monkeypatch):
    """With graphs that replay by running the step: what a capture does to buffers is the same."""

    class Replayed:
        def replay(self):
            self.step()

        def pool(self):
            return None

    @contextlib.contextmanager
    def capturing(graph, pool=None):
        yield
        bucket = next(size for size in decoder.buckets if size not in decoder._graphs)
        graph.step = lambda: decoder._step(bucket)

    streams = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: streams)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    found = []
    for mode in ("eager", "graph"):
        decoder, names, _ = started(few, PROMPTS[:2], [11, 12], max_sequences=2)
        decoder.mode = mode
        first = decoder.decode(names[:1], 1)
        found.append(torch.cat([first, decoder.decode(names, 1)]))
        if mode == "graph":
            assert sorted(decoder._graphs) == [1, 2]
    assert torch.equal(found[0], found[1])
