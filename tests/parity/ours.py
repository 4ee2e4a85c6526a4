"""Our side of a comparison: the same checkpoint, written again and loaded by our own loader.

`check_parity` is the one gate: positive tests must pass it, and negative controls must fail it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from finwhale.checkpoint.load import load_model
from finwhale.config import ModelConfig
from finwhale.model import Backbone, Numerics
from finwhale.ops import REFERENCE, Ops
from tests.oracles.checkpoint import write_checkpoint
from tests.oracles.geometries import RUNS, GoldenRun, paired_map
from tests.oracles.golden_file import read_golden, unpack_bits
from tests.parity.compare import assert_close
from tests.parity.tolerances import FP32_STREAM, FP32_STREAM_40_LAYERS

Change = Callable[[dict[str, Tensor]], None]


@cache
def scratch() -> TemporaryDirectory:
    """Folder of this process's checkpoints; removed when the process ends."""
    return TemporaryDirectory(prefix="finwhale-parity-")


@cache
def checkpoint(name: str) -> Path:
    """Write the checkpoint `name` once per process."""
    run = next(r for r in RUNS.values() if r.checkpoint == name)
    return write_checkpoint(run, Path(scratch().name) / name)


@cache
def loaded(name: str, numerics: Numerics) -> Backbone:
    """Load a checkpoint once per numerics, with the Engram ids known by construction."""
    run = next(r for r in RUNS.values() if r.checkpoint == name)
    token_map = torch.tensor(paired_map(run.config().text_config.vocab_size))
    return load_model(checkpoint(name), numerics=numerics, token_map=token_map, ops=REFERENCE).model


golden = cache(read_golden)


@dataclass(kw_only=True)
class Outcome:
    """What our model computed for a run."""

    logits: Tensor
    trace: dict[str, Tensor] = field(default_factory=dict)


def changed_model(
    run: GoldenRun,
    *,
    ops: Ops = REFERENCE,
    weights: Change | None = None,
    text: Mapping[str, object] | None = None,
    numerics: Numerics | None = None,
) -> Backbone:
    """Return the run's model with other operations, weights or text config fields."""
    numerics = numerics or Numerics(cache_rounding=run.rounding)
    base = loaded(run.checkpoint, numerics)
    config: ModelConfig = base.config
    if text:
        config = replace(config, text_config=replace(config.text_config, **text))
    model = Backbone(config, base.token_map, numerics, ops)
    state = {name: value.clone() for name, value in base.state_dict().items()}
    if weights is not None:
        weights(state)
    model.load_state_dict(state)
    return model.eval()


def forward(run: GoldenRun, model: Backbone) -> Outcome:
    """Run `model` on the golden's input and keep every captured tensor."""
    stored, outcome = golden(run.name), Outcome(logits=torch.empty(0))
    mask = stored.get("image_mask")

    def keep(site: str):
        return lambda _m, _a, out: outcome.trace.__setitem__(site, out)

    handles = []
    for n, layer in enumerate(model.layers):
        handles.append(layer.attn.register_forward_hook(keep(f"attn_out.{n}")))
        handles.append(layer.ffn.register_forward_hook(keep(f"ffn_out.{n}")))
    with torch.no_grad():
        outcome.logits = model(
            stored["input_ids"].long(),
            image_mask=None if mask is None else mask.bool(),
            trace=outcome.trace,
        )
    for handle in handles:
        handle.remove()
    return outcome


@cache
def ours(run_name: str) -> Outcome:
    """Return the unchanged model's outcome."""
    run = RUNS[run_name]
    return forward(run, loaded(run.checkpoint, Numerics(cache_rounding=run.rounding)))


def tolerance(run: GoldenRun) -> float:
    return FP32_STREAM_40_LAYERS if run.geometry == "sched40" else FP32_STREAM


def chosen_mask(topk: Tensor, width: int) -> Tensor:
    """Turn rows [..., K], -1 padded, into a mask [..., M]; no row may name an entry twice."""
    mask = torch.zeros(*topk.shape[:-1], width + 1, dtype=torch.int64)
    mask.scatter_add_(-1, torch.where(topk < 0, width, topk), torch.ones_like(topk))
    assert bool((mask[..., :width] <= 1).all()), "an entry was selected twice"
    return mask[..., :width].bool()


def check_selection(run: GoldenRun, outcome: Outcome) -> None:
    """Top-k and pool: everything that must be chosen is, nothing that may not be."""
    stored = golden(run.name)
    specs = loaded(run.checkpoint, Numerics(cache_rounding=run.rounding)).specs
    for key in stored:
        kind, _, layer = key.partition(".")
        if kind not in ("topk", "candidates"):
            continue
        width = run.length // specs[int(layer)].ratio
        if kind == "topk":
            own = chosen_mask(outcome.trace[key], width)
            count = (stored[key] >= 0).sum(-1)
        else:
            own = outcome.trace[key]
            count = unpack_bits(stored[key], width).sum(-1)
        assert torch.equal(own.sum(-1), count), f"{key}: number of entries"
        for name, wrong in (
            ("sure", lambda m, own=own: m & ~own),
            ("possible", lambda m, own=own: own & ~m),
        ):
            bad = wrong(unpack_bits(stored[f"{kind}_{name}.{layer}"], width))
            assert not bool(bad.any()), (
                f"{key}: {int(bad.sum())} entries are not as {name}, first at (row, token, entry) "
                f"{bad.nonzero()[0].tolist()}"
            )


def check_router(run: GoldenRun, outcome: Outcome, margin: float) -> None:
    """Expert choices wherever the oracle's lead is above `margin`, and their weights."""
    stored = golden(run.name)
    for n in range(run.config().text_config.num_hidden_layers):
        if f"gate_ids.{n}" not in stored:
            continue
        theirs = stored[f"gate_ids.{n}"].long()
        ids = outcome.trace[f"gate_ids.{n}"].view(theirs.shape)
        order = ids.argsort(-1)
        same = (ids.gather(-1, order) == theirs).all(-1)
        clear = stored[f"gate_margin.{n}"] > margin
        bad = clear & ~same
        assert not bool(bad.any()), (
            f"gate_ids.{n}: {int(bad.sum())} tokens differ, first at {bad.nonzero()[0].tolist()}"
        )
        positions = stored["positions"].long()
        weights = outcome.trace[f"gate_weights.{n}"].view(theirs.shape).gather(-1, order)
        kept = same[:, positions]
        golden_weights = stored[f"gate_weights.{n}"]
        weights = torch.where(kept[..., None], weights[:, positions], golden_weights)
        assert_close(f"gate_weights.{n}", weights, golden_weights, tolerance(run))


def check_parity(run: GoldenRun, outcome: Outcome) -> dict[str, float]:
    """Assert that `outcome` is the golden's; return the worst error per kind of tensor.

    In the order in which a wrong value would spread, so that the first failure is near its cause.
    """
    stored, limit = golden(run.name), tolerance(run)
    positions = stored["positions"].long()
    layers = run.config().text_config.num_hidden_layers
    for column, layer in enumerate(run.config().text_config.engram_layer_ids):
        if "engram_hash_ids" in stored:
            rows = stored["engram_hash_ids"][:, :, column].long()
            assert torch.equal(outcome.trace[f"engram_rows.{layer}"], rows), f"engram_rows.{layer}"
    errors: dict[str, float] = {}
    for n in range(layers + 1):
        for kind in ("streams", "attn_in", "attn_out", "ffn_in", "ffn_out"):
            key = f"{kind}.{n}"
            if key in stored:
                error = assert_close(key, outcome.trace[key][:, positions], stored[key], limit)
                errors[kind] = max(errors.get(kind, 0.0), error)
    check_selection(run, outcome)
    check_router(run, outcome, margin=limit)
    errors["logits"] = assert_close("logits", outcome.logits[:, positions], stored["logits"], limit)
    return errors
