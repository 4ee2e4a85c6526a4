"""The stored reference of greedy text belongs to the shipped model, and the CPU still gives it."""

import hashlib
import json
from pathlib import Path

import torch

from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.shipped import shipped_model
from finwhale.engine.generate import generate
from finwhale.model import Numerics
from finwhale.ops import FAST

REFERENCE = json.loads(Path(__file__).with_name("gpu-greedy.json").read_text(encoding="utf-8"))


def test_reference_is_whole_and_its_margins_are_none_below_zero():
    assert len(REFERENCE["prompts"]) == 24
    for row in REFERENCE["prompts"]:
        count = len(row["tokens"])
        assert 1 <= count <= 64
        assert {len(row[name]) for name in ("seconds", "logits", "margins")} == {count}
        assert min(row["margins"]) >= 0
        assert all(a != b for a, b in zip(row["tokens"], row["seconds"], strict=True))


def test_release_pass_gives_the_first_tokens_of_the_reference():
    """Where its margin is far above the noise of another machine's sums."""
    folder = shipped_model()
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    # New weights need a new reference: python bench/gpu_greedy.py --write
    assert digest.hexdigest() == REFERENCE["weights_sha256"]
    model = load_model(folder, numerics=Numerics.release(), ops=FAST).model
    short = [row for row in REFERENCE["prompts"] if len(row["ids"]) < 60]
    clear = [row for row in short if row["margins"][0] > 2]
    assert len(clear) >= 3
    for row in clear[:4]:
        with torch.no_grad():
            assert next(generate(model, row["ids"], max_new_tokens=1)) == row["tokens"][0]
            assert row["tokens"][0] != row["seconds"][0]
