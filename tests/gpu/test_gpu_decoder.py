"""The decoder compiled, on the shipped model: graphs, buckets, waits, and the CPU's logits."""

import inspect

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.shipped import shipped_model
from finwhale.engine.generate import generate
from finwhale.engine.gpu_generation import generate_batch
from finwhale.engine.step import forward_step
from finwhale.gpu import step as step_module
from finwhale.gpu.decoder import GpuDecoder
from finwhale.gpu.weights import pack_backbone
from finwhale.model import Numerics
from finwhale.ops import FAST
from finwhale.text.tokenizer import Tokenizer
from tests.stored_models import prefilled

# Odd and even, below and above a window and a selection of 128.
LENGTHS = (1, 2, 63, 127, 128, 129, 300)


@pytest.fixture(scope="module")
def model():
    return load_model(shipped_model(), numerics=Numerics.release(), ops=FAST).model


@pytest.fixture(scope="module")
def weights(model):
    return pack_backbone(model, "cuda")


@pytest.fixture(scope="module")
def states(model):
    """States on the CPU and first tokens of prompts of all lengths."""
    tokenizer = Tokenizer.from_file(shipped_model())
    text, found = tokenizer.encode(inspect.getsource(inspect)), []
    for n, length in enumerate(LENGTHS):
        ids = [tokenizer.bos_id, *text[400 * n :]][:length]
        state, logits = prefilled(model, ids)
        found.append((ids, state, int(logits.argmax())))
    return found


def started(weights, states, **options):
    options = {"max_sequences": 8, "num_blocks": 32, "keep_logits": True} | options
    decoder = GpuDecoder(weights, **options)
    return decoder, [decoder.admit(s, token, max_new_tokens=40) for _, s, token in states]


def test_graph_and_eager_give_equal_tokens_and_logits(weights, states):
    """For the whole bucket of eight with one row of padding, and for smaller buckets of it."""
    for some in (states, states[:3], states[:1]):
        found = []
        for mode in ("graph", "eager"):
            decoder, names = started(weights, some, mode=mode)
            drawn = torch.cat([decoder.decode(names, 9), decoder.decode(names, 4)], dim=1)
            found.append((drawn, decoder.logits[: len(names)].clone()))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


def test_steps_whose_launches_overlap_have_the_bits_of_those_that_do_not(
    weights, states, monkeypatch
):
    if not step_module.step_overlaps(1, "cuda"):
        pytest.skip("launches of this device do not overlap")
    for some in (states, states[:1]):
        found = []
        for rows in (16, 0):
            monkeypatch.setitem(step_module._OVERLAPPED_ROWS, "hopper", rows)
            decoder, names = started(weights, some)
            found.append((decoder.decode(names, 9), decoder.logits[: len(names)].clone()))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


def late(whole, stream):
    """Return a part of a step that begins some ten milliseconds later, on its stream."""

    def part(*inputs):
        assert torch.cuda.current_stream() == stream
        torch.cuda._sleep(20_000_000)
        whole(*inputs)

    return part


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_what_is_launched_beside_a_layers_products_is_waited_for(weights, states, mode):
    """Bits without a side, with one, and with one that is late by some ten milliseconds each time.

    Attention that did not wait would read entries that nobody has chosen yet.
    """
    found = []
    for form in ("none", "side", "late"):
        decoder, names = started(weights, states[:3], mode=mode)
        step = decoder.step
        assert step.side is not None
        if form == "none":
            step.side = None
        if form == "late":
            step.publish, step.select = late(step.publish, step.side), late(step.select, step.side)
        found.append((decoder.decode(names, 5), decoder.logits[:3].clone()))
    for drawn, logits in found[1:]:
        assert torch.equal(drawn, found[0][0])
        assert torch.equal(logits, found[0][1])


def test_a_step_waits_for_nothing(weights, states):
    decoder, names = started(weights, states, mode="eager")
    decoder.decode(names, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder._step(8)
        # The control: a look at a value is what the mode refuses.
        with pytest.raises(RuntimeError, match="synchroniz"):
            decoder.rows.drawn[0, 0].item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_logits_are_near_those_of_the_cpu(model, weights, states):
    """Fed with the CPU's tokens; another row's logits are far away."""
    decoder, names = started(weights, states)
    decoder.decode(names, 1)
    with torch.no_grad():
        for row, (ids, _, token) in enumerate(states):
            state, _ = prefilled(model, ids)
            hidden = forward_step(model, state, torch.tensor([[token]]))[:, -1]
            want = model.logits(hidden)[0]
            got = decoder.logits[: len(states)].cpu()
            error = (got - want).norm(dim=-1) / want.norm()
            assert float(error[row]) < 0.1
            assert float(error[(row + 1) % len(states)]) > 0.3


def test_neighbours_and_buckets_do_not_change_bits_of_the_invariant_launches(weights, states):
    found = []
    for some in (states[3:4], states[3:5], states[3:7]):
        decoder, names = started(weights, some, invariant=True)
        decoder.decode(names, 8)
        found.append(decoder.logits[0].clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_rows_that_come_and_go_keep_their_tokens(weights, states):
    """Sequence 3 decodes with others, alone, with others again: as if nobody had been there."""
    decoder, names = started(weights, states, invariant=True)
    parts = [decoder.decode(names[3:], 5)[0], decoder.decode(names[3:4], 4)[0]]
    decoder.release(names[5])
    parts.append(decoder.decode([names[0], names[3], names[6]], 3)[1])
    alone, name = started(weights, states[3:4], invariant=True)
    assert torch.equal(torch.cat(parts), alone.decode(name, 12)[0])


def test_batches_of_256_equal_their_own_rows(weights, states):
    """Experts go in portions of 64 rows: equal prompts must give equal tokens everywhere."""
    decoder = GpuDecoder(weights, max_sequences=256, num_blocks=768, capacity_tokens=448)
    names = [
        decoder.admit(states[n % 7][1], states[n % 7][2], max_new_tokens=9) for n in range(256)
    ]
    drawn = decoder.decode(names, 8)
    for n in range(7, 256):
        assert torch.equal(drawn[n], drawn[n % 7])


def test_generation_continues_as_the_cpu_does_for_a_confident_prompt(model, weights):
    tokenizer = Tokenizer.from_file(shipped_model())
    ids = [tokenizer.bos_id, *tokenizer.encode("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,")]
    want = list(generate(model, ids, max_new_tokens=4))
    decoder = GpuDecoder(weights, max_sequences=2, num_blocks=4)
    got = [[], []]
    for number, token in generate_batch(model, decoder, [ids, ids], max_new_tokens=4):
        got[number].append(token)
    assert got[0] == got[1]
    assert got[0][0] == want[0]  # the same pass drew it
    assert len(got[0]) == 4
