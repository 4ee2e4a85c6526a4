"""`release` products against exact rational arithmetic that shares no code with the package.

Inputs and weights have few bits, so every fp32 sum is exact and each rounding step of section 9.1
has one right answer: bf16 in, FP8 groups of 32, exact product, bf16 out.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from finwhale.config import preset
from finwhale.model import Numerics
from finwhale.model.layers import Linear, Parts
from finwhale.model.moe import Expert
from finwhale.ops import REFERENCE
from tests.exact_formats import E2M1, E4M3, rounded_block
from tests.models import unit_model

WIDTH = 64


def to_bf16(x: Fraction) -> Fraction:
    """Round to 8 significant bits, ties to even (no subnormals in these tests)."""
    if x == 0:
        return x
    exponent = math.floor(math.log2(abs(x)))
    while Fraction(2) ** exponent > abs(x):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(x):
        exponent += 1
    unit = Fraction(2) ** (exponent - 7)
    return Fraction(round(x / unit)) * unit  # Python rounds halves to even


def round_fp8(row: list[Fraction]) -> list[Fraction]:
    """Round groups of 32 to E4M3 with power-of-two scales."""
    groups = [row[i : i + 32] for i in range(0, len(row), 32)]
    return [Fraction(v) for g in groups for v in rounded_block([float(x) for x in g], E4M3)]


def product(row: list[Fraction], weight: list[list[Fraction]]) -> list[Fraction]:
    """Return the exact product, rounded once to bf16."""
    return [to_bf16(sum(x * w for x, w in zip(row, line, strict=True))) for line in weight]


def draw(rng: random.Random, rows: int, columns: int) -> list[list[Fraction]]:
    """Return E2M1 weights times a power of two, as an FP4 matrix holds them."""
    signed = list(E2M1) + [-v for v in E2M1]
    return [[rng.choice(signed) / 8 for _ in range(columns)] for _ in range(rows)]


def activations(rng: random.Random, rows: int, columns: int) -> list[list[Fraction]]:
    """Return rows of bf16 numbers with 8 significant bits, so that FP8 must round them."""
    return [
        [Fraction(rng.randrange(-255, 256), 2 ** rng.choice((6, 7, 8))) for _ in range(columns)]
        for _ in range(rows)
    ]


def tensor(values: list[list[Fraction]]) -> torch.Tensor:
    exact = torch.tensor([[float(v) for v in row] for row in values])
    assert torch.equal(exact, exact.bfloat16().float())
    return exact.bfloat16()


def parts(**changes) -> Parts:
    config = replace(preset("unit").text_config, hidden_size=WIDTH, moe_intermediate_size=WIDTH)
    return Parts(config=config, numerics=Numerics.release(), ops=replace(REFERENCE, **changes))


def linear(weight: list[list[Fraction]], kind: str, **changes) -> Linear:
    module = Linear(parts(**changes), WIDTH, len(weight), kind)
    module.weight.data.copy_(tensor(weight))
    return module


@pytest.mark.parametrize("case", range(4))
def test_release_linear_equals_exact_arithmetic(case):
    rng = random.Random(case)
    rows, weight = activations(rng, 3, WIDTH), draw(rng, 5, WIDTH)
    expected = tensor([product(round_fp8(row), weight) for row in rows])
    with torch.no_grad():
        got = linear(weight, "quantized")(tensor(rows))
        unrounded = linear(weight, "plain")(tensor(rows))
        off = linear(weight, "quantized", round_input=lambda x: x)(tensor(rows))
    assert torch.equal(got, expected)
    # A matrix that is not quantised takes bf16 inputs as they are (section 9.1).
    assert torch.equal(unrounded, tensor([product(row, weight) for row in rows]))
    # Negative control: without activation rounding the vector is missed.
    assert not torch.equal(off, expected)


def expert_by_hand(row, w1, w2, w3, weight: float | None, *, weight_after: bool = False):
    """Return one expert's output, every step as sections 8 and 9.1 have it."""
    x = round_fp8(row)
    gate, up = product(x, w1), product(x, w3)
    inner = []
    for g, u in zip(gate, up, strict=True):
        g, u = min(float(g), 10.0), max(-10.0, min(10.0, float(u)))
        value = g / (1 + math.exp(-g)) * u
        if weight is not None and not weight_after:
            value *= weight
        inner.append(to_bf16(Fraction(value)))
    out = product(round_fp8(inner), w2)
    if weight_after and weight is not None:
        out = [to_bf16(v * Fraction(weight)) for v in out]
    return out


@pytest.mark.parametrize("weight", [None, 0.7265625], ids=["shared", "routed"])
def test_release_expert_equals_exact_arithmetic(weight):
    rng = random.Random(11)
    rows = activations(rng, 4, WIDTH)
    w1, w2, w3 = (draw(rng, WIDTH, WIDTH) for _ in range(3))
    expert = Expert(parts())
    for module, values in ((expert.w1, w1), (expert.w2, w2), (expert.w3, w3)):
        module.weight.data.copy_(tensor(values))
    scale = None if weight is None else torch.full((4, 1), weight)
    with torch.no_grad():
        got = expert(tensor(rows), scale)
    expected = tensor([expert_by_hand(row, w1, w2, w3, weight) for row in rows])
    assert torch.equal(got, expected)
    assert any(abs(v) > 10 for row in rows for v in product(round_fp8(row), w1 + w3)), (
        "no value reaches the clamp"
    )
    if weight is not None:
        late = [expert_by_hand(row, w1, w2, w3, weight, weight_after=True) for row in rows]
        assert not torch.equal(got, tensor(late)), "the routing weight is inside the rounding"


def test_release_rounds_which_matrices():
    # The table of section 9.1, typed from the text.
    model = unit_model()
    rounded, plain, wide = set(), set(), set()
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            leaf = ".".join(p for p in name.split(".")[2:] if not p.isdigit())
            {"quantized": rounded, "plain": plain, "fp32": wide}[module.input].add(leaf)
    assert rounded == {
        "attn.wq_a",
        "attn.wq_b",
        "attn.wkv",
        "attn.wo_b",
        "attn.indexer.wq_b",
        "ffn.experts.w1",
        "ffn.experts.w2",
        "ffn.experts.w3",
        "ffn.shared_experts.w1",
        "ffn.shared_experts.w2",
        "ffn.shared_experts.w3",
        "engram.wkv",
    }
    # compressor.wkv is bf16 at ratio 1 and fp32 at ratio 2.
    assert plain == {
        "attn.wo_a",
        "attn.compressor.wkv",
        "attn.indexer.wk",
        "attn.indexer.weights_proj",
    }
    assert wide == {"attn.compressor.wkv", "attn.compressor.wgate"}
