"""The shipped weights of finwhale-mini against nemo-automodel's stored answers on fixed prompts.

Random weights leave every mechanism equally likely to matter; trained ones say whether routes,
selections and the Engram of a model that reads text are right. Stored are fp32 answers with cache
rounding off; `tests/oracles/mini_trained.py` made them and says what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from finwhale.checkpoint.load import load_model
from finwhale.evals.figures import folder_digest
from finwhale.model import Backbone, Numerics
from finwhale.ops import FAST, REFERENCE, Ops
from finwhale.text.tokenizer import Tokenizer
from tests.oracles.golden_file import read_golden, read_manifest, unpack_bits
from tests.oracles.mini_trained import NAME, STREAM_LAYERS, direction, read_prompts
from tests.parity.compare import relative_errors
from tests.parity.ours import chosen_mask
from tests.parity.tolerances import FP32_STREAM

SHIPPED = Path(__file__).parents[2] / "models" / NAME
# Beginning of the long prompt that drops entries at both ratios: 300 and 150 of 128.
BEGINNING = 300

golden = cache(read_golden)


@cache
def shipped(ops: Ops = FAST) -> Backbone:
    """Return the shipped checkpoint in fp32, cache rounding off."""
    return load_model(SHIPPED, numerics=Numerics(cache_rounding=False), ops=ops).model


def changed(change: Callable[[dict[str, Tensor]], None]) -> Backbone:
    """Return the shipped model with some weights changed."""
    base = shipped()
    model = Backbone(base.config, base.token_map, Numerics(cache_rounding=False), FAST)
    state = {name: value.clone() for name, value in base.state_dict().items()}
    change(state)
    model.load_state_dict(state)
    return model


def disagreements(name: str, model: Backbone, length: int | None = None) -> dict[str, float]:
    """Return what differs from the golden of prompt `name`, by kind; empty if all agrees.

    length  tokens read, by default all; what is stored of later tokens is left out

    Values are the worst relative error of streams, projections and logits, and counts of tokens or
    rows of engram, topk and routes.
    """
    prefix = f"{name}."
    stored = {
        key.removeprefix(prefix): value
        for key, value in golden(NAME).items()
        if key.startswith(prefix)
    }
    ids = read_prompts()[name][:length]
    total, trace = len(ids), {}
    with torch.no_grad():
        logits = model(torch.tensor([ids]), trace=trace)[0]
    layers = len(model.specs)
    streams = torch.stack([trace[f"streams.{n}"][0] for n in range(layers + 1)])  # [L + 1, T, N, C]
    found: dict[str, float] = {}

    positions = stored["positions"].long()
    kept = positions < total
    positions = positions[kept]
    errors = relative_errors(logits[positions], stored["logits"][kept], token_dims=1)
    found["logits"] = float(errors.max()) if len(positions) else 0.0
    theirs = stored["streams"][:, kept]
    errors = relative_errors(streams[list(STREAM_LAYERS)][:, positions], theirs)
    found["streams"] = float(errors.max()) if len(positions) else 0.0

    steps = stored["steps"].long()
    steps, projections = steps[steps < total], stored["projections"][:, steps < total].double()
    own = streams[:, steps].double()
    distance = ((own * direction(*own.shape[2:])).sum((2, 3)) - projections).abs()
    found["projections"] = float((distance / own.square().sum((2, 3)).sqrt()).max())
    found = {kind: error for kind, error in found.items() if error > FP32_STREAM}

    engram = model.config.text_config.engram_layer_ids
    sums = torch.stack([trace[f"engram_rows.{layer}"][0].sum(-1) for layer in engram], dim=-1)
    found["engram"] = int((sums != stored["engram_sums"][:total]).any(-1).sum())
    routes = torch.stack([trace[f"gate_ids.{n}"].view(total, -1) for n in range(layers)])
    same = (routes.sort(-1).values == stored["gate_ids"][:, :total].long()).all(-1)
    clear = unpack_bits(stored["clear"], stored["gate_ids"].shape[1])[:, :total]
    found["routes"] = int((clear & ~same).sum())
    found["topk"] = 0
    for key in stored:
        if key.startswith("topk."):
            layer = int(key.removeprefix("topk."))
            rows = stored[f"rows.{layer}"].long()
            ratio, width = model.specs[layer].ratio, total // model.specs[layer].ratio
            wanted = unpack_bits(stored[key], stored["gate_ids"].shape[1] // ratio)
            wanted = wanted[rows < total][:, :width]
            own_topk = trace[f"topk.{layer}"][0, rows[rows < total]]
            found["topk"] += int((chosen_mask(own_topk, width) != wanted).any(-1).sum())
    return {kind: value for kind, value in found.items() if value}


def test_golden_is_of_the_shipped_checkpoint():
    assert read_manifest(NAME)["checkpoint_digest"] == folder_digest(SHIPPED)


@pytest.mark.parametrize("name", ["short", "long", "chat"])
def test_shipped_weights_compute_what_nemo_computes(name):
    assert disagreements(name, shipped()) == {}


def test_reference_operations_compute_what_nemo_computes_too():
    assert disagreements("chat", shipped(REFERENCE)) == {}


def test_beginning_of_a_prompt_is_that_of_the_whole():
    # Causality lets the controls read less.
    assert disagreements("long", shipped(), BEGINNING) == {}


@pytest.mark.parametrize("name", ["short", "long", "chat"])
def test_prompt_is_its_text_in_the_shipped_tokenizer(name):
    tokenizer, ids = Tokenizer.from_file(SHIPPED), read_prompts()[name]
    assert ids[0] == tokenizer.bos_id
    assert len(ids) == {"short": 40, "long": 700, "chat": 62}[name]
    assert tokenizer.encode(tokenizer.decode(ids), parse_markers=True) == ids


def test_long_golden_drops_entries_at_both_ratios():
    model, total = shipped(), len(read_prompts()["long"])
    limit, ratios = model.config.text_config.index_topk, set()
    for layer in model.config.text_config.index_source_layer_ids:
        rows, ratio = golden(NAME)[f"long.rows.{layer}"].long(), model.specs[layer].ratio
        counts = unpack_bits(golden(NAME)[f"long.topk.{layer}"], total // ratio).sum(-1)
        visible = (rows + 1) // ratio
        assert torch.equal(counts, visible.clamp_max(limit)), f"L{layer}"
        dropping = rows[visible > limit]
        assert len(dropping) > 10
        assert int(dropping.min()) < BEGINNING, f"L{layer}: the controls read no such row"
        ratios.add(ratio)
    assert ratios == {1, 2}


def test_golden_leaves_few_routes_open():
    for name, ids in read_prompts().items():
        clear = unpack_bits(golden(NAME)[f"{name}.clear"], len(ids))
        assert float(clear.float().mean()) > 0.999, name


def without_engram(state: dict[str, Tensor]) -> None:
    for name in [n for n in state if n.endswith("engram.embed.weight")]:
        state[name] = torch.zeros_like(state[name])


def scrambled_indexer(state: dict[str, Tensor]) -> None:
    # Weights of another order: norms stay, so only what they point at is lost.
    for name in [n for n in state if n.endswith("indexer.wq_b.weight")]:
        order = torch.randperm(state[name].shape[0], generator=torch.Generator().manual_seed(7))
        state[name] = state[name][order]


def without_routing_bias(state: dict[str, Tensor]) -> None:
    for name in [n for n in state if n.endswith("ffn.gate.bias")]:
        state[name] = torch.zeros_like(state[name])


def one_step_of_one_scale(state: dict[str, Tensor]) -> None:
    # What a block read with a scale of the wrong power of two leaves behind.
    state["layers.8.attn.wkv.weight"][:32, :32] *= 2


@pytest.mark.parametrize(
    ("change", "name", "length", "kinds"),
    [
        (without_engram, "short", None, {"streams", "projections", "logits"}),
        (scrambled_indexer, "long", BEGINNING, {"topk", "projections"}),
        (without_routing_bias, "chat", None, {"routes", "streams", "projections", "logits"}),
        (one_step_of_one_scale, "chat", None, {"streams", "projections", "logits"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_control_is_noticed(change, name, length, kinds, record_property):
    found = disagreements(name, changed(change), length)
    record_property("found", found)
    assert kinds <= found.keys()
    assert found["projections"] > 10 * FP32_STREAM
    # Hash rows come from ids and are right in all of them.
    assert "engram" not in found


def test_changed_model_without_a_change_agrees():
    assert disagreements("short", changed(lambda state: None)) == {}


def test_wrong_token_is_noticed(monkeypatch):
    ids = {name: list(row) for name, row in read_prompts().items()}
    ids["short"][20] += 1
    monkeypatch.setattr("tests.parity.test_trained_mini.read_prompts", lambda: ids)
    # Engram reads up to four tokens: the changed one and the three after it.
    assert disagreements("short", shipped())["engram"] == 4
