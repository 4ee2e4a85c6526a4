"""Logits, streams, selections and routing against nemo-automodel, in fp32 and `dequant` mode."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from finwhale.ops import FAST
from tests.oracles.geometries import RUNS
from tests.oracles.golden_file import GOLDEN, read_golden, read_manifest
from tests.parity.compare import relative_errors
from tests.parity.ours import changed_model, check_parity, forward, golden, ours

EXACT = [name for name, run in RUNS.items() if not run.rounding]


@pytest.mark.parametrize("name", EXACT)
def test_forward_is_that_of_nemo(name, record_property):
    errors = check_parity(RUNS[name], ours(name))
    for kind, error in errors.items():
        record_property(f"{name} {kind}", f"{error:.2e}")


@pytest.mark.parametrize("name", ["tiny", "tiny-image", "peer-noflip", "mini"])
def test_fast_operations_are_those_of_nemo_too(name):
    run = RUNS[name]
    check_parity(run, forward(run, changed_model(run, ops=FAST)))


@pytest.mark.parametrize("name", ["tiny", "sched40"])
def test_golden_drops_entries_in_topk_and_pool(name):
    # A golden whose selections keep everything would test no selection.
    run, stored = RUNS[name], golden(name)
    text = run.config().text_config
    for layer in text.index_source_layer_ids:
        width = run.length // text.compress_ratios[layer]
        assert width > text.index_topk, f"L{layer}: top-k keeps all {width} entries"
    blocks = -(-run.length // text.candidate_block_size)
    assert blocks > text.candidate_topk_blocks
    assert run.length > text.sliding_window
    last = stored[f"topk.{text.index_source_layer_ids[-1]}"][:, -1]
    assert bool((last >= 0).all())


@pytest.mark.parametrize("name", EXACT)
def test_golden_selections_are_unambiguous(name):
    # Where `sure` and `possible` differ a wrong choice could hide.
    stored = golden(name)
    rows = ties = 0
    for key in stored:
        if key.startswith(("topk_sure.", "candidates_sure.")):
            possible = stored[key.replace("_sure", "_possible")]
            ties += int((stored[key] != possible).any(-1).sum())
            rows += stored[key][..., 0].numel()
    assert ties <= 0.02 * rows, f"{ties} of {rows} selections are free"
    flat = [v.flatten() for k, v in stored.items() if k.startswith("gate_margin.")]
    if flat:
        margins = torch.cat(flat)
        assert float((margins < 1e-4).float().mean()) < 0.02


@pytest.mark.parametrize("name", EXACT)
def test_golden_is_healthy(name):
    stored = golden(name)
    logits = stored["logits"]
    assert bool(torch.isfinite(logits).all())
    assert 0.3 < float(logits.std()) < 3
    ids = [v.flatten() for k, v in stored.items() if k.startswith("gate_ids.")]
    if ids:
        share = torch.bincount(torch.cat(ids).long()).double()
        assert float(share.max() / share.mean()) < 2, "routing is degenerate"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.safetensors")), ids=lambda p: p.stem)
def test_golden_has_provenance(path):
    manifest = read_manifest(path.stem)
    for name in ("package", "version", "command", "seed", "sha256", "python", "notes"):
        assert manifest[name], f"{path.stem}: manifest lacks {name}"
    stored = read_golden(path.stem)
    found = {k: [str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in stored.items()}
    assert found == manifest["tensors"]


def test_goldens_are_small():
    assert sum(path.stat().st_size for path in GOLDEN.glob("*.safetensors")) < 4_000_000


def test_edited_golden_is_refused(tmp_path):
    for suffix in (".json", ".safetensors"):
        content = (GOLDEN / f"tiny{suffix}").read_bytes()
        if suffix == ".safetensors":
            content = content[:-1] + bytes([content[-1] ^ 1])
        (tmp_path / f"tiny{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match="its manifest says"):
        read_golden("tiny", tmp_path)


def test_all_runs_are_stored():
    assert {name for name in RUNS if not (GOLDEN / f"{name}.safetensors").exists()} == set()


def test_two_runs_of_one_checkpoint_differ_by_cache_rounding():
    a, b = golden("tiny-fp8")["logits"], golden("tiny-fp8-rounded")["logits"]
    run, rounded = RUNS["tiny-fp8"], RUNS["tiny-fp8-rounded"]
    shared = [p for p in rounded.positions if p in run.positions]
    a = a[:, [run.positions.index(p) for p in shared]]
    b = b[:, [rounded.positions.index(p) for p in shared]]
    assert float(relative_errors(a, b)[:, 1:].min()) > 1e-3
    assert dataclasses.replace(run, name=rounded.name, rounding=True).checkpoint == run.checkpoint
