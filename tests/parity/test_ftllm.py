"""A second engine with a real cache, from its stored logits: ftllm 1.9.0 on the same checkpoints.

ftllm computes in bf16 and chooses its own next token, so a step is compared as long as both had
read the same ids. Its BF16 export agrees with fp32 to bf16 noise where no selection can flip; its
FP8 and FP4 export also rounds activations, in places of its own, and is reported, not required.
"""

from __future__ import annotations

import pytest
import torch

from finwhale.model import Numerics
from tests.oracles.geometries import RUNS
from tests.parity.compare import assert_close, relative_errors
from tests.parity.ours import changed_model, golden, loaded
from tests.parity.tolerances import BF16_ENGINE, FP32_STREAM

BF16_EXPORTS = [("peer-noflip", "bf16"), ("peer-noflip-fp8", "bf16")]


def steps_of(run_name: str, model) -> tuple[torch.Tensor, torch.Tensor]:
    """Return our logits [S, V] after the prompt and after each of the oracle's greedy ids."""
    stored = golden(run_name)
    ids = torch.cat((stored["input_ids"][0], stored["greedy_ids"][:-1])).long()[None]
    steps = len(stored["greedy_ids"])
    with torch.no_grad():
        return model.logits(model.hidden(ids)[0, -steps:]), stored["greedy_ids"]


@pytest.mark.parametrize("name", [n for n, r in RUNS.items() if r.greedy and not r.rounding])
def test_greedy_steps_are_those_of_nemo(name):
    run = RUNS[name]
    model = loaded(run.checkpoint, Numerics(cache_rounding=False))
    logits, ids = steps_of(name, model)
    assert_close(name, logits, golden(name)["greedy_logits"], FP32_STREAM, token_dims=1)
    assert torch.equal(logits.argmax(-1).int(), ids)


@pytest.mark.parametrize(("name", "export"), BF16_EXPORTS)
def test_bf16_export_agrees_with_ftllm_to_bf16_noise(name, export, record_property):
    theirs = golden(f"ftllm-{name}-{export}")
    model = loaded(RUNS[name].checkpoint, Numerics(cache_rounding=False))
    logits, ids = steps_of(name, model)
    steps = len(theirs["ids"])
    errors = relative_errors(theirs["logits"], logits[:steps], token_dims=1)
    record_property(f"{name} relative difference", [round(float(e), 4) for e in errors])
    assert float(errors.max()) < BF16_ENGINE
    assert steps == len(ids), "the two engines parted before the last step"
    assert torch.equal(theirs["ids"], ids)


def test_bf16_noise_of_ftllm_is_that_of_our_own_bf16(record_property):
    # Our bf16 against our fp32 is as far apart as ftllm is from either.
    name = "peer-noflip"
    exact, _ = steps_of(name, loaded(name, Numerics(cache_rounding=False)))
    half, _ = steps_of(name, loaded(name, Numerics(cache_rounding=False, dtype=torch.bfloat16)))
    own = relative_errors(half, exact, token_dims=1)
    record_property("own bf16 noise", [round(float(e), 4) for e in own])
    theirs = golden(f"ftllm-{name}-bf16")["logits"]
    other = relative_errors(theirs, exact[: len(theirs)], token_dims=1)
    assert 0.3 < float(other.mean() / own.mean()) < 3


def test_ftllm_comparison_would_notice_a_missing_mechanism():
    def without_engram(state):
        for key in state:
            if key.endswith("engram.embed.weight"):
                state[key] = torch.zeros_like(state[key])

    model = changed_model(RUNS["peer-noflip"], weights=without_engram)
    logits, _ = steps_of("peer-noflip", model)
    theirs = golden("ftllm-peer-noflip-bf16")["logits"]
    errors = relative_errors(theirs, logits[: len(theirs)], token_dims=1)
    assert float(errors.min()) > 2 * BF16_ENGINE


@pytest.mark.parametrize("name", ["peer-noflip-fp8", "mini"])
def test_quantised_export_loads_in_ftllm_and_stays_related(name, record_property):
    theirs = golden(f"ftllm-{name}-fp8")["logits"][0]
    ours = golden(name)["greedy_logits"][0]
    cosine = float(torch.nn.functional.cosine_similarity(theirs, ours, dim=0))
    record_property(f"{name} cosine", round(cosine, 4))
    assert bool(torch.isfinite(theirs).all())
    assert cosine > 0.7
