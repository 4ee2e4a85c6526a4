"""Cache rounding against nemo-automodel: row by row on its own inputs, then in the full forward.

In the full forward the last bits of both sides differ before rounding, so a value that lies on a
halfway point may take either neighbour, and a group whose maximum lies on a power-of-two bracket
either scale. Nothing else may differ as long as the streams agree.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from finwhale.model import Numerics
from finwhale.ops import REFERENCE
from tests.oracles.geometries import RUNS
from tests.parity.compare import relative_errors, worst
from tests.parity.ours import changed_model, forward, golden, ours

KINDS = {
    "window_kv": ("round_window_kv", "window_kv_raw"),
    "main_kv": ("round_main_kv", "entries_raw"),
    "index_k": ("round_index", "index_k_raw"),
    "index_q": ("round_index", "index_q_raw"),
}
# Twice the largest relative difference of the rows before rounding, where streams agree.
NOISE = 4e-6
WITH_ROWS = [name for name, run in RUNS.items() if "rows" in run.keep]


def layers_with(stored: dict[str, Tensor], kind: str) -> list[int]:
    """Return the layers in which the golden has rows of `kind`."""
    prefix = f"{kind}_before."
    return sorted(int(key[len(prefix) :]) for key in stored if key.startswith(prefix))


def pair(stored: dict[str, Tensor], kind: str, layer: int) -> tuple[Tensor, Tensor]:
    """Return the same rows as they entered and left the oracle's rounding."""
    rows = stored[f"{kind}_before_rows.{layer}"].tolist()
    kept = stored[f"{kind}_after_rows.{layer}"].tolist()
    after = stored[f"{kind}_after.{layer}"][:, [kept.index(row) for row in rows]]
    return stored[f"{kind}_before.{layer}"], after.float()


@pytest.mark.parametrize("name", WITH_ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_of_captured_rows_is_bit_equal(name, kind):
    stored = golden(name)
    rounding = getattr(REFERENCE, KINDS[kind][0])
    layers = layers_with(stored, kind)
    assert layers
    for layer in layers:
        before, after = pair(stored, kind, layer)
        ours_after = rounding(before)
        assert torch.equal(ours_after.view(torch.int32), after.view(torch.int32)), (
            f"{kind}.{layer}: {worst(ours_after, after)}"
        )
        assert not torch.equal(before, after), "the rows were not rounded at all"


@pytest.mark.parametrize("name", WITH_ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_captured_rows_tell_the_three_formats_apart(name, kind):
    stored, own = golden(name), KINDS[kind][0]
    before, after = pair(stored, kind, layers_with(stored, kind)[0])
    for other in ("round_window_kv", "round_main_kv", "round_index"):
        if other != own:
            assert not torch.equal(getattr(REFERENCE, other)(before), after), other


def is_at_a_tie(rounding, x: Tensor, theirs: Tensor, noise: float) -> Tensor:
    """Return where `theirs` is a right rounding of x moved by `noise`, relative to its row.

    Either x lies within the noise of the middle between our value and theirs, which makes them
    neighbours; or the group's maximum lies within it of a bracket of the scale, and the same holds
    under the other scale.
    """
    reach = noise * x.abs().amax(-1, keepdim=True)
    found = torch.zeros_like(x, dtype=torch.bool)
    for factor in (1.0, 1 - noise, 1 + noise):
        value = rounding(x * factor)
        found |= (value == theirs) | ((x - (value + theirs) / 2).abs() <= reach)
    return found


def differing_codes(name: str) -> tuple[dict[str, list[int]], int | None]:
    """Return [differing, total] rounded values per kind, and the first layer that differs.

    Where all rows are stored, asserts that up to and including that layer each differing value
    sits at a tie; with some rows only, an earlier difference may lie in a row that is not there.
    """
    complete = "all_rows" in RUNS[name].keep
    stored, trace = golden(name), ours(name).trace
    counts = {kind: [0, 0] for kind in KINDS}
    first = None
    for layer in range(RUNS[name].config().text_config.num_hidden_layers):
        for kind, (operation, raw) in KINDS.items():
            if f"{kind}_after.{layer}" not in stored:
                continue
            rows = stored[f"{kind}_after_rows.{layer}"].long()
            rounding = getattr(REFERENCE, operation)
            x = trace[f"{raw}.{layer}"][:, rows]
            theirs = stored[f"{kind}_after.{layer}"].float()
            differ = rounding(x) != theirs
            counts[kind][0] += int(differ.sum())
            counts[kind][1] += differ.numel()
            if complete and bool(differ.any()) and (first is None or first == layer):
                first = layer
                tied = is_at_a_tie(rounding, x, theirs, NOISE)
                assert bool(tied[differ].all()), f"{kind}.{layer}: {worst(rounding(x), theirs)}"
    return counts, first


@pytest.mark.parametrize("name", WITH_ROWS)
def test_full_forward_differs_by_ties_only(name, record_property):
    counts, first = differing_codes(name)
    for kind, (differing, total) in counts.items():
        record_property(f"{name} {kind}", f"{differing} of {total} rounded values differ")
        # A flip changes all that follows, so a deep run with 512-wide heads drifts further.
        share = 1e-3 if "all_rows" in RUNS[name].keep else 0.1
        assert differing <= share * total, f"{kind}: {differing} of {total} rounded values differ"
    record_property(f"{name} first differing layer", str(first))


def test_streams_agree_up_to_the_first_differing_code():
    stored, trace = golden("tiny-rounded"), ours("tiny-rounded").trace
    first = differing_codes("tiny-rounded")[1]
    layers = RUNS["tiny-rounded"].config().text_config.num_hidden_layers
    positions = stored["positions"].long()
    for layer in range((layers if first is None else first) + 1):
        errors = relative_errors(
            trace[f"streams.{layer}"][:, positions], stored[f"streams.{layer}"]
        )
        assert float(errors.max()) < 1e-5, f"streams.{layer}"


def test_a_format_that_is_off_by_more_than_ties_is_noticed(monkeypatch):
    run = RUNS["tiny-rounded"]
    # Truncation instead of rounding to nearest.
    ops = replace(REFERENCE, round_window_kv=lambda x: REFERENCE.round_window_kv(x * 0.99))
    model = changed_model(run, ops=ops, numerics=Numerics())
    broken = forward(run, model)
    stored = golden(run.name)
    x = broken.trace["window_kv_raw.0"]
    theirs = stored["window_kv_after.0"].float()
    mine = ops.round_window_kv(x)
    differ = mine != theirs
    assert bool(differ.any())
    assert not bool(is_at_a_tie(ops.round_window_kv, x, theirs, NOISE)[differ].all())
