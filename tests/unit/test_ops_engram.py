"""Engram hashing against the vectors of section 7, and its gate by hand."""

import math

import pytest
import torch

from finwhale.config import TextConfig
from finwhale.ops.engram import engram_gate, engram_multipliers, engram_rows

IDS = [0, 17, 4242, 99091, 5]
COLUMNS = (0, 1, 8, 9, 16, 17, 23)
# Section 7.5: (layer, t) -> rows in COLUMNS.
VECTORS = {
    (1, 0): (5702652, 24393184, 131476717, 152385926, 257520185, 283540304, 380066193),
    (1, 4): (12391924, 30601786, 132657239, 157873043, 264715540, 283099490, 379053117),
    (14, 1): (7864655, 24417387, 130014105, 158864006, 266200367, 275449579, 369748760),
    (14, 4): (743092, 18408009, 135617406, 151828766, 269636926, 277332720, 382060632),
}


def rows(layer, ids=IDS, dead=None, positions=None):
    c = TextConfig()
    buckets = c.engram_buckets()[c.engram_layer_ids.index(layer)]
    positions = torch.arange(len(ids)) if positions is None else torch.tensor(positions)
    return engram_rows(
        torch.tensor([ids], dtype=torch.int64),
        positions.unsqueeze(0),
        dead,
        engram_multipliers(layer, 4, 99092),
        torch.tensor(buckets.primes).view(3, 8),
        torch.tensor(buckets.offsets).view(3, 8),
        2,
    )[0]


def test_multipliers_equal_released_values():
    want = [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert engram_multipliers(1, 4, 99092).tolist() == want
    want = [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    assert engram_multipliers(14, 4, 99092).tolist() == want
    # A double between here and there would show: at least one value is not a multiple of 2.
    assert all(m % 2 == 1 for m in want)


@pytest.mark.parametrize(("layer", "t"), VECTORS)
def test_rows_equal_released_vectors(layer, t):
    got = rows(layer)[t]
    assert tuple(got[c].item() for c in COLUMNS) == VECTORS[layer, t]


def test_dead_position_hides_itself_and_everything_behind():
    dead = torch.tensor([[False, False, True, False, False]])
    got = rows(1, dead=dead)[3]
    assert tuple(got[c].item() for c in (0, 8, 16)) == (2008568, 134138602, 264495124)
    # Sticky: what stands before the dead position cannot matter any more.
    assert torch.equal(rows(1, [7, 9, 4242, 99091, 5], dead=dead)[3], got)


def test_rows_depend_on_the_last_four_ids_of_the_document_only():
    whole = rows(1, [11, 12, 13, 14, 15, 16])
    assert torch.equal(whole[5], rows(1, [99, 98, 13, 14, 15, 16])[5])
    assert not torch.equal(whole[5], rows(1, [11, 12, 99, 14, 15, 16])[5])
    packed = rows(1, [11, 12, 13, 14, 15, 16], positions=[0, 1, 2, 0, 1, 2])
    assert torch.equal(packed[3:], rows(1, [14, 15, 16]))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 13])
def test_rows_have_one_shape_for_every_length(length):
    assert rows(14, list(range(length))).shape == (length, 24)


def test_rows_stay_inside_the_table():
    c = TextConfig()
    ids = torch.randint(0, 99092, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    for n, layer in enumerate(c.engram_layer_ids):
        got = rows(layer, ids)
        assert int(got.min()) >= 0
        assert int(got.max()) < c.engram_num_embeddings[n]


def test_gate_equals_hand_arithmetic():
    # X = (2,2,2,2), key = (1,-1,1,1): rms 2 and 1; dot = (2-2+2+2) * 3 / 2 / 1 / sqrt(4) = 3.
    streams, keys = torch.full((1, 4), 2.0), torch.tensor([[1.0, -1, 1, 1]])
    ones = torch.ones(1, 4)
    out = engram_gate(streams, keys, torch.tensor([1.0, 2, 3, 4]), 3 * ones, ones, 1e-20)
    gate = 1 / (1 + math.exp(-math.sqrt(3.0)))
    assert out[0].tolist() == pytest.approx([2 + gate * v for v in (1, 2, 3, 4)])
    # A negative dot takes the signed root, not the sigmoid of the dot itself.
    out = engram_gate(streams, -keys, torch.ones(4), 3 * ones, ones, 1e-20)
    assert out[0, 0].item() == pytest.approx(2 + 1 / (1 + math.exp(math.sqrt(3.0))))


def test_gate_at_zero_follows_the_sign_of_zero():
    # D06: sigmoid(+-1e-3) at dot = +-0.
    zero, one = torch.zeros(1, 2), torch.ones(2)
    out = engram_gate(zero, torch.ones(1, 2), one, torch.ones(1, 2), torch.ones(1, 2), 1e-20)
    assert out[0, 0].item() == pytest.approx(1 / (1 + math.exp(-1e-3)), abs=1e-7)
