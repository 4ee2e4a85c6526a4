"""The floors of a decode step (bench/decode_floors.py) against sums worked out elsewhere."""

import importlib.util
import sys
from pathlib import Path

import pytest

from finwhale.config import preset


def _floors():
    file = Path(__file__).parents[2] / "bench" / "decode_floors.py"
    spec = importlib.util.spec_from_file_location("decode_floors", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


floors = _floors()
FLASH = preset("flash").text_config


@pytest.mark.parametrize(
    ("batch", "context", "microseconds"),
    [
        (1, 4096, 3037),
        (1, 65536, 3041),
        (1, 1 << 20, 3081),
        (256, 4096, 72600),
        (256, 1 << 20, 83700),
    ],
)
def test_floor_of_the_release_is_the_published_sum(batch, context, microseconds):
    """At 4.3 TB/s and 790 TFLOP/s, as in the performance anchors."""
    got = floors.floor_seconds(floors.decode_costs(FLASH, context, batch), 4.3e12, 790e12) * 1e6
    assert got == pytest.approx(microseconds, rel=1e-3)


def test_operations_have_the_published_megabytes():
    costs = floors.decode_costs(FLASH, 1 << 20, 1)
    published = {
        "index scores, all entries": 178, "index scores, pool": 4.46, "attention core": 8.31,
        "attention projections": 5150, "routed experts": 4512, "shared expert": 1417,
        "router": 157, "mHC": 165, "Engram": 315, "LM head": 1324,
    }  # fmt: skip
    for name, megabytes in published.items():
        assert costs[name].bytes / 1e6 == pytest.approx(megabytes, rel=5e-3), name
    assert costs["attention core"].flops / 1e9 == pytest.approx(3.22, rel=5e-3)


def test_measured_experts_replace_the_expected_ones():
    few = floors.decode_costs(FLASH, 4096, 64, [10.0] * 40)["routed experts"]
    assert few.bytes == 40 * 10 * 3 * 5120 * 2304 * (0.5 + 1 / 32)
    assert few.flops == floors.decode_costs(FLASH, 4096, 64)["routed experts"].flops
    assert floors.expected_distinct(384, 6, 1) == pytest.approx(6)
