"""Bits by position and recall grids against slow references, plain readers and hand arithmetic."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from finwhale.checkpoint.save import save_checkpoint
from finwhale.config.presets import nano, unit, with_compressed_vocab
from finwhale.data.long_tasks import alphabet
from finwhale.data.packing import NO_TARGET, pack
from finwhale.data.shards import write_shards
from finwhale.evals.command import Evaluate, summary
from finwhale.evals.figures import (
    POSITIONS_FILE,
    RECORDS_FILE,
    folder_digest,
    line_place,
    matching_preset,
    position_figure,
    read_positions,
    recall_figure,
    write_report,
)
from finwhale.evals.position_bits import (
    BucketBits,
    EvaluationError,
    added,
    default_buckets,
    forward_passes,
    position_bits,
    token_bytes,
    whole,
)
from finwhale.evals.recall_grid import (
    recall_example,
    recall_grid,
    rows_answered,
    selection_limits,
    wilson_interval,
)
from finwhale.model import Backbone
from finwhale.ops import FAST
from finwhale.text.engram_map import token_map
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import train_tokenizer
from finwhale.train.evaluate import bits_per_byte

V = 512
VOCAB = range(1, V - 1)
ROLES = alphabet(VOCAB)
WINDOW = 8  # of the preset unit


@pytest.fixture(scope="module")
def model() -> Backbone:
    model = Backbone(with_compressed_vocab(unit(), V), ops=FAST)
    model.init_weights(0)
    return model


def documents(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, V, size=n).astype(np.uint16) for n in lengths]


def bytes_by_id() -> np.ndarray:
    return np.arange(V) % 5  # every fifth id stands for no text, as markers do


class Reader:
    """A model that says what followed the token at hand when it was first seen.

    reach   tokens it looks back; None: all
    wrong   answers one id beside
    """

    def __init__(self, *, reach: int | None = None, wrong: bool = False):
        self.config, self.specs, self.reach, self.wrong = unit(), (), reach, wrong
        self.embed = SimpleNamespace(weight=torch.zeros(1))
        self.shapes = []

    def hidden(self, ids, *, packing, plan):
        self.shapes.append(tuple(ids.shape))
        said = torch.zeros_like(ids)
        for row, tokens in enumerate(ids.tolist()):
            for at, token in enumerate(tokens):
                start = 0 if self.reach is None else max(0, at - self.reach)
                first = tokens.index(token, start)
                said[row, at] = tokens[first + 1] if first < at else 0
        return said.unsqueeze(-1)

    def logits(self, hidden):
        said = (hidden.squeeze(-1) + self.wrong) % V
        return torch.nn.functional.one_hot(said, V).float()


# Bits by position.


@pytest.mark.parametrize("batch_rows", [None, 1, 3])
def test_buckets_are_the_nats_of_each_document_read_alone(model, batch_rows):
    """Reference: one pass per document, one log-softmax, position by position."""
    docs = documents(40, 1, 2, 9, 10, 0, 17, 33)
    firsts, sizes = (0, 8, 9, 16), bytes_by_id()
    want = np.zeros((4, 4))  # nats, targets, bytes, documents
    for document in docs:
        if len(document) < 2:
            continue
        ids = torch.from_numpy(document.astype(np.int64))
        with torch.no_grad():
            scores = model(ids[:-1].view(1, -1))[0].log_softmax(-1)
        seen = set()
        for position, target in enumerate(ids[1:].tolist()):
            place = max(i for i, first in enumerate(firsts) if first <= position)
            want[place, :3] += [-float(scores[position, target]), 1, sizes[target]]
            seen.add(place)
        want[sorted(seen), 3] += 1
    got = position_bits(
        model, docs, num_bytes=sizes, sequence_length=40, buckets=firsts, batch_rows=batch_rows
    )
    found = [[b.nats, b.num_targets, b.num_bytes, b.num_documents] for b in got]
    np.testing.assert_allclose(found, want, rtol=2e-5)
    assert [(b.first, b.stop) for b in got] == [(0, 8), (8, 9), (9, 16), (16, None)]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 1024])
def test_weighted_buckets_are_the_score_of_the_training(model, chunk_tokens):
    docs, sizes = documents(40, 1, 2, 9, 17), bytes_by_id()
    got = position_bits(model, docs, num_bytes=sizes, sequence_length=24, chunk_tokens=chunk_tokens)
    cut = [document[:25] for document in docs]
    total = sum(int(sizes[document[1:]].sum()) for document in cut)
    packed = pack(cut, sequence_length=24, pad_id=0)
    want = bits_per_byte(model, packed, total, chunk_tokens=64)
    sums = whole(got)
    assert sums.num_bytes == total
    assert sums.num_targets == packed.num_targets
    assert sums.bits_per_byte == pytest.approx(want, rel=1e-5)
    weighted = sum(b.bits_per_byte * b.num_bytes for b in got if b.num_bytes) / total
    assert weighted == pytest.approx(want, rel=1e-5)
    # Control: the plain mean of the buckets is another number.
    means = [b.bits_per_byte for b in got if b.num_bytes]
    assert sum(means) / len(means) != pytest.approx(want, rel=1e-5)


def test_position_is_that_of_the_document_not_of_the_row(model):
    """Four documents of five pairs fill one row of twenty; none leaves the first bucket."""
    got = position_bits(
        model, documents(6, 6, 6, 6), num_bytes=bytes_by_id(), sequence_length=20, buckets=(0, 5)
    )
    assert [b.num_targets for b in got] == [20, 0]
    assert got[1].num_documents == 0


@pytest.mark.parametrize("pairs", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_first_bucket_is_what_one_window_holds(model, pairs):
    got = position_bits(model, documents(pairs + 1), num_bytes=bytes_by_id(), sequence_length=pairs)
    assert [b.num_targets for b in got[:2]] == [min(pairs, WINDOW), max(0, pairs - WINDOW)]


@pytest.mark.parametrize("docs", [[], documents(1), documents(0, 1)])
def test_what_has_no_pair_gives_empty_buckets(model, docs):
    got = position_bits(model, docs, num_bytes=bytes_by_id(), sequence_length=16)
    for bucket in (*got, whole(got)):
        assert bucket.num_targets == bucket.num_bytes == bucket.num_documents == 0
        assert bucket.nats_per_token is None
        assert bucket.bits_per_byte is None


def test_a_bucket_of_markers_has_nats_and_no_bits_per_byte(model):
    got = position_bits(
        model, documents(9), num_bytes=np.zeros(V, np.int64), sequence_length=8, buckets=(0,)
    )
    assert got[0].bits_per_byte is None
    assert got[0].nats_per_token > 0


def test_bits_by_hand():
    bucket = BucketBits(
        first=0, stop=8, num_documents=1, num_targets=4, num_bytes=6, nats=12 * math.log(2)
    )
    assert bucket.bits_per_byte == pytest.approx(2.0)
    assert bucket.nats_per_token == pytest.approx(3 * math.log(2))
    assert bucket.label == "0-8"


@pytest.mark.parametrize(
    ("window", "want"),
    [(32, (0, 32, 1024, 4096, 16384)), (1024, (0, 1024, 4096, 16384)), (5000, (0, 5000, 16384))],
)
def test_default_buckets_begin_with_the_window(window, want):
    assert default_buckets(window) == want


def test_added_buckets_are_those_of_all_documents(model):
    docs = documents(30, 12, 7)
    options = {"num_bytes": bytes_by_id(), "sequence_length": 32, "buckets": (0, 8)}
    parts = [position_bits(model, docs[:1], **options), position_bits(model, docs[1:], **options)]
    for got, want in zip(added(parts), position_bits(model, docs, **options), strict=True):
        assert got.nats == pytest.approx(want.nats, rel=1e-5)
        assert (got.num_targets, got.num_bytes) == (want.num_targets, want.num_bytes)
        assert got.num_documents == want.num_documents
    other = position_bits(model, docs, **{**options, "buckets": (0, 9)})
    with pytest.raises(EvaluationError, match="equal buckets"):
        added([parts[0], other])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"buckets": ()}, "buckets"),
        ({"buckets": (1, 8)}, "buckets"),
        ({"buckets": (0, 8, 8)}, "buckets"),
        ({"num_bytes": np.ones(V - 1)}, "num_bytes"),
        ({"sequence_length": 4097}, "max_position_embeddings = 4096"),
    ],
)
def test_impossible_positions_are_refused(model, change, match):
    options = {"num_bytes": bytes_by_id(), "sequence_length": 16, **change}
    with pytest.raises(EvaluationError, match=match):
        position_bits(model, documents(5), **options)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_ids_of_another_vocabulary_are_refused(model, place):
    """A pass with a plan, as on a GPU, would not look; the last id is a target only."""
    document = np.arange(3, 9).astype(np.uint16)
    document[place] = V
    with pytest.raises(EvaluationError, match="tokenizer"):
        position_bits(model, [document], num_bytes=bytes_by_id(), sequence_length=16)


def test_passes_have_the_rows_asked_for(model):
    reader = Reader()
    packed = pack(documents(9, 9, 9, 9, 9), sequence_length=8, pad_id=0)
    rows = [rows.tolist() for rows, _, _ in forward_passes(reader, packed, batch_rows=2)]
    assert rows == [[0, 1], [2, 3], [4]]
    assert reader.shapes == [(2, 8), (2, 8), (1, 8)]


# Recall.


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [
        # z^2 = 3.8415: 8 / (8 + z^2), z^2 / (8 + z^2), and the textbook's 5 of 10 and 1 of 1.
        (8, 8, 0.6756, 1.0),
        (0, 8, 0.0, 0.3244),
        (5, 10, 0.2366, 0.7634),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_wilson_interval_by_hand(right, of, low, high):
    assert wilson_interval(right, of) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("right", "of"), [(0, 0), (2, 1), (-1, 3)])
def test_shares_that_are_none_have_no_interval(right, of):
    with pytest.raises(EvaluationError, match="num_right"):
        wilson_interval(right, of)


@pytest.mark.parametrize(("depth", "at"), [(0.0, 0), (0.4, 14), (1.0, 35)])
@pytest.mark.parametrize("bos_id", [None, 0])
def test_needle_places_by_hand(depth, at, bos_id):
    """41 tokens, fact of 3 and question of 3: 35 fillers; a begin marker takes one of them."""
    example, distance = recall_example(
        "needle", seed=1, index=0, length=40 + (bos_id is not None), depth=depth,
        vocab=VOCAB, bos_id=bos_id, num_distractors=0,
    )  # fmt: skip
    tokens = example.tokens if bos_id is None else example.tokens[1:]
    assert len(example.tokens) == len(example.answer_mask) == 41 + (bos_id is not None)
    assert tokens[at] == ROLES.fact
    assert tokens[38] == ROLES.query
    assert tokens[39] == tokens[at + 1]
    assert tokens[40] == tokens[at + 2]
    assert distance == 39 - (at + 2)
    assert example.answer_mask == [False] * (len(example.tokens) - 1) + [True]
    assert bos_id is None or example.tokens[0] == 0


@pytest.mark.parametrize(("depth", "at"), [(0.0, 0), (0.5, 17), (1.0, 34)])
def test_recall_places_by_hand(depth, at):
    """41 tokens, two pairs of 2 and a question of 3: 34 fillers, the pairs one block."""
    for index in range(4):
        example, distance = recall_example(
            "associative_recall", seed=1, index=index, length=40, depth=depth, vocab=VOCAB,
            num_pairs=2,
        )  # fmt: skip
        tokens = example.tokens
        assert [t for t in tokens[:at] + tokens[at + 4 : 38] if t not in ROLES.fillers] == []
        key = at + tokens[at : at + 4].index(tokens[39])
        assert key in (at, at + 2)
        assert tokens[40] == tokens[key + 1]
        assert distance == 39 - (key + 1)
        assert example.chance == 0.5


@pytest.mark.parametrize(("depth", "low", "high"), [(0.0, 0, 30), (0.5, 30, 60), (1.0, 60, 90)])
def test_spread_pairs_stay_whole_and_inside_their_bucket(depth, low, high):
    """109 tokens, eight pairs, a question: 90 fillers, of which a third lies among the pairs."""
    at_once = 0
    for index in range(6):
        example, _ = recall_example(
            "associative_recall", seed=2, index=index, length=108, depth=depth, vocab=VOCAB,
            spread=1 / 3,
        )  # fmt: skip
        tokens = example.tokens[:-3]
        keys = [i for i, token in enumerate(tokens) if token in ROLES.keys]
        before = [sum(t in ROLES.fillers for t in tokens[:i]) for i in keys]
        assert len(keys) == 8
        assert all(tokens[i + 1] in ROLES.values for i in keys)
        assert low <= min(before) <= max(before) <= high
        at_once += len(set(before)) == 1
    assert at_once == 0  # control: without spread it is 6


@pytest.mark.parametrize("kind", ["needle", "associative_recall"])
def test_depths_of_one_length_differ_in_places_only(kind):
    made = [
        recall_example(kind, seed=3, index=7, length=60, depth=depth, vocab=VOCAB)[0].tokens
        for depth in (0.0, 0.3, 1.0)
    ]
    assert sorted(made[0]) == sorted(made[1]) == sorted(made[2])
    assert made[0][-3:] == made[1][-3:] == made[2][-3:]
    assert made[0] != made[1] != made[2]
    other = recall_example(kind, seed=3, index=8, length=60, depth=0.3, vocab=VOCAB)[0].tokens
    assert sorted(other) != sorted(made[1])


def test_text_replaces_fillers_and_only_them():
    haystack = np.arange(600, 900)  # outside the vocabulary: a collision is impossible
    options = {"seed": 4, "index": 2, "length": 50, "depth": 0.4, "vocab": VOCAB}
    plain, plain_distance = recall_example("needle", **options)
    text, distance = recall_example("needle", haystack=haystack, **options)
    kept = [t not in ROLES.fillers for t in plain.tokens]
    assert [t for t, k in zip(text.tokens, kept, strict=True) if k] == [
        t for t, k in zip(plain.tokens, kept, strict=True) if k
    ]
    filler = [t for t, k in zip(text.tokens, kept, strict=True) if not k]
    assert {(b - a) % 300 for a, b in itertools.pairwise(filler)} == {1}
    assert distance == plain_distance


def test_text_loses_the_ids_that_mean_something():
    """The text holds every key and value: left in, they would make a second, wrong fact."""
    haystack = np.tile(np.arange(V), 3)
    for index in range(3):
        example, _ = recall_example(
            "needle", seed=4, index=index, length=300, depth=1.0, vocab=VOCAB, haystack=haystack
        )
        facts = [i for i, token in enumerate(example.tokens) if token == ROLES.fact]
        assert len(facts) == 4
        assert all(example.tokens.count(example.tokens[i + 1]) <= 2 for i in facts)
    with pytest.raises(EvaluationError, match="give more text"):
        recall_example(
            "needle", seed=4, index=0, length=300, depth=1.0, vocab=VOCAB, haystack=haystack[:200]
        )
    with pytest.raises(EvaluationError, match="give more text"):
        recall_example(
            "needle", seed=4, index=0, length=30, depth=1.0, vocab=VOCAB, haystack=haystack[:0]
        )


GRID = {"lengths": (33, 64), "depths": (0, 0.5, 1), "num_examples": 5}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("needle", {}), ("needle", {"num_values": 3}), ("associative_recall", {"num_pairs": 4})],
)
@pytest.mark.parametrize("bos_id", [None, 0])
def test_a_reader_that_knows_answers_all_and_one_that_errs_nothing(kind, options, bos_id):
    options = {**GRID, **options, "kind": kind, "bos_id": bos_id}
    right, wrong = recall_grid(Reader(), **options), recall_grid(Reader(wrong=True), **options)
    assert [cell.accuracy for cell in right.cells] == [1.0] * 6
    assert [cell.accuracy for cell in wrong.cells] == [0.0] * 6
    assert [(c.length, c.depth) for c in right.cells] == [
        (length, depth) for length in (33, 64) for depth in (0, 0.5, 1)
    ]
    assert right.cell(64, 0.5) is right.cells[4]
    assert right.chance == 0.25


def test_a_reader_with_a_reach_answers_near_facts_only():
    """The control of the grid: what is farther than it looks is wrong, what is nearer is right."""
    grid = recall_grid(
        Reader(reach=24), kind="needle", lengths=(40, 80), depths=(0, 0.5, 1),
        num_examples=4, num_distractors=0, reach=24,
    )  # fmt: skip
    # 35 and 75 fillers; Python rounds 17.5 to 18 and 37.5 to 38.
    assert [c.min_distance for c in grid.cells] == [37, 19, 2, 77, 39, 2]
    assert [c.max_distance for c in grid.cells] == [37, 19, 2, 77, 39, 2]
    assert [c.accuracy for c in grid.cells] == [0, 1, 1, 0, 0, 1]
    assert [c.beyond_reach for c in grid.cells] == [True, False, False, True, True, False]


@pytest.mark.parametrize(("reach", "beyond"), [(36, True), (37, False), (38, False)])
def test_reach_is_passed_by_more_than_its_tokens(reach, beyond):
    grid = recall_grid(
        Reader(), kind="needle", lengths=(40,), depths=(0,), num_examples=1,
        num_distractors=0, reach=reach,
    )  # fmt: skip
    assert grid.cells[0].beyond_reach is beyond


def test_reach_of_a_model_is_window_times_layers(model):
    grid = recall_grid(
        model, kind="needle", lengths=(24, 80), depths=(0,), num_examples=2, num_distractors=0
    )
    assert grid.reach == 8 * 8
    # 80 tokens read, question last, value third: 79 - 2.
    assert [(c.max_distance, c.beyond_reach) for c in grid.cells] == [(21, False), (77, True)]


def test_an_answer_with_one_wrong_token_is_wrong():
    packed = SimpleNamespace(
        inputs=np.array([[1, 2, 3, 1, 2], [1, 2, 3, 1, 2]], np.int32),
        targets=np.array([[NO_TARGET] * 3 + [2, 3], [NO_TARGET] * 3 + [2, 4]], np.int32),
        lengths=((5,), (5,)),
        num_rows=2,
    )
    assert rows_answered(Reader(), packed, batch_rows=1).tolist() == [True, False]


def test_batches_change_no_answer(model):
    options = {"kind": "associative_recall", "num_pairs": 2}
    small = {"lengths": (17,), "depths": (0, 1), "num_examples": 2, **options}
    one = recall_grid(model, batch_tokens=1, **small)
    assert recall_grid(model, batch_tokens=10_000, **small) == one
    reader = Reader()
    recall_grid(reader, batch_tokens=140, **GRID, **options)
    assert set(reader.shapes) == {(4, 33), (3, 33), (2, 64), (1, 64)}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"lengths": (10,)}, "a row of 10 tokens"),
        ({"lengths": ()}, "lengths"),
        ({"lengths": (40, 40)}, "lengths"),
        ({"lengths": (4097,)}, "max_position_embeddings"),
        ({"depths": (1.01,)}, "depths"),
        ({"depths": ()}, "depths"),
        ({"num_examples": 0}, "num_examples"),
        ({"kind": "long_copy"}, "kind"),
        ({"num_pairs": 3}, "num_pairs"),
        ({"kind": "associative_recall", "spread": 1.5}, "spread"),
        ({"vocab": range(400, 520)}, "ids"),
    ],
)
def test_impossible_grids_are_refused(change, match):
    options = {"kind": "needle", "lengths": (40,), "depths": (0.5,), "num_examples": 2, **change}
    with pytest.raises(EvaluationError, match=match):
        recall_grid(Reader(), **options)


@pytest.mark.parametrize(("length", "fits"), [(13, False), (14, True), (15, True)])
def test_shortest_row_holds_facts_and_question(length, fits):
    """Four facts of 3 and question with answer of 3 are 15 tokens; the row reads all but one."""
    options = {"seed": 0, "index": 0, "depth": 1.0, "vocab": VOCAB, "length": length}
    if not fits:
        with pytest.raises(EvaluationError, match="expected at least 15"):
            recall_example("needle", **options)
        return
    example, _ = recall_example("needle", **options)
    assert sum(token in ROLES.fillers for token in example.tokens) == length - 14


def test_limits_of_the_selection_by_hand(model):
    """Top-k 8 at ratios 2 and 1; a pool of 4 blocks of 4 entries at ratio 1."""
    want = {"top-k, ratio 2": 16, "top-k, ratio 1": 8, "pool, ratio 1": 16}
    assert selection_limits(model) == want
    assert selection_limits(Reader()) == {}


# Pictures and records.


@pytest.mark.parametrize(
    ("tokens", "place"), [(255, -0.5), (256, 0.5), (300, 0.5), (512, 1.5), (9999, 1.5)]
)
def test_a_line_stands_behind_the_lengths_within_it(tokens, place):
    assert line_place((256, 512), tokens) == place


def test_grid_figure_says_lengths_limits_and_every_share():
    grid = recall_grid(Reader(), kind="needle", **GRID)
    figure = recall_figure(grid, trained_length=33, limits={"top-k": 64, "pool": 16})
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["33", "64"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0%", "50%", "100%"]
    assert len(axes.texts) == 6
    assert all(text.get_text().startswith("1.00") for text in axes.texts)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["trained length: 33", "top-k: 64", "pool: 16"]
    bare = recall_figure(grid)
    assert not bare.legends


def test_position_figure_has_a_line_per_model_and_gaps_for_no_text(model):
    full = position_bits(
        model, documents(20), num_bytes=np.ones(V), sequence_length=20, buckets=(0, 8, 16)
    )
    short = position_bits(
        model, documents(10), num_bytes=np.ones(V), sequence_length=20, buckets=(0, 8, 16)
    )
    axes = position_figure({"a": full, "b": short}).axes[0]
    heights = [line.get_ydata() for line in axes.get_lines()]
    assert np.isfinite(heights[0]).all()
    assert np.isnan(heights[1]).tolist() == [False, False, True]
    with pytest.raises(EvaluationError, match="buckets"):
        position_figure({"a": full, "b": short[:2]})
    with pytest.raises(EvaluationError, match="series"):
        position_figure({})


def test_report_names_the_model_in_every_line_and_reads_back(model, tmp_path):
    buckets = position_bits(model, documents(12), num_bytes=bytes_by_id(), sequence_length=16)
    grid = recall_grid(Reader(), kind="needle", **GRID)
    files = write_report(
        tmp_path / "r", about={"digest": "d"}, positions={"all": buckets}, grids=[grid],
        trained_length=33, limits={"top-k": 8},
    )  # fmt: skip
    assert [file.name for file in files] == [
        RECORDS_FILE, POSITIONS_FILE, "recall_needle_ids.png"
    ]  # fmt: skip
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files[1:])

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    lines = files[0].read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert len(records) == len(buckets) + 1 + 6
    assert {record["digest"] for record in records} == {"d"}
    assert [r["bits_per_byte"] for r in records[2 : len(buckets)]] == [None] * (len(buckets) - 2)
    assert records[len(buckets)]["whole"] is True
    assert records[-1]["interval"] == [pytest.approx(5 / (5 + 3.8415), abs=1e-4), 1.0]
    assert records[-1]["trained_length"] == 33
    assert read_positions(tmp_path / "r") == {"all": buckets}
    with pytest.raises(EvaluationError, match="another folder"):
        write_report(tmp_path / "r", about={})


def test_preset_is_found_whatever_the_tokenizer():
    assert matching_preset(with_compressed_vocab(nano(), 77)) == "nano"
    assert matching_preset(unit()) == "unit"


# The command.


def _corpus(folder: Path, texts: list[str]) -> Path:
    """Write a corpus folder by hand, as build_corpus lays it out."""
    for side in ("train", "validation"):
        (folder / side).mkdir(parents=True)
        rows = [
            json.dumps({"name": str(i), "package": "one", "text": text})
            for i, text in enumerate(texts)
        ]
        (folder / side / "one.jsonl").write_text("".join(row + "\n" for row in rows))
    sides = {side: {"documents": len(texts)} for side in ("train", "validation")}
    source = {"record": {"name": "one"}, "sides": sides}
    record = {"format": 1, "digest": "d" * 64, "sources": [source]}
    (folder / "corpus.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path, list[str]]:
    """A checkpoint with a tokenizer of its own size, shards of four documents, and their texts."""
    folder = tmp_path_factory.mktemp("trained")
    text = Path(__file__).read_text(encoding="utf-8")
    train_tokenizer([text], V, folder / "tokenizer.json")
    ids = token_map(Tokenizer.from_file(folder / "tokenizer.json"))
    config = with_compressed_vocab(unit(), int(ids.max()) + 1)
    model = Backbone(config, token_map=torch.from_numpy(ids), ops=FAST)
    model.init_weights(1)
    save_checkpoint(
        model, folder / "model", quantized=False, tokenizer_file=folder / "tokenizer.json"
    )
    texts = [text[:300], text[300:500], "na\u00efve", "x"]
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    write_shards(_corpus(folder / "corpus", texts), tokenizer, folder / "shards", 64)
    return folder / "model", folder / "shards", texts


def test_bytes_of_tokens_add_up_to_the_text(trained):
    tokenizer = Tokenizer.from_file(trained[0])
    sizes = token_bytes(tokenizer)
    for text in trained[2]:
        document = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        assert sizes[document].sum() == len(text.encode("utf-8"))


def test_command_measures_both_and_names_the_model(trained, tmp_path, capsys):
    folder, shards, texts = trained
    Evaluate(
        model=folder, shards=shards, out=tmp_path / "r", sequence_length=512, lengths=(40, 50),
        depths=(1,), examples=1, text_filler=True, trained_length=64,
    ).run()  # fmt: skip
    lines = (tmp_path / "r" / RECORDS_FILE).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    total = next(r for r in records if r.get("whole") and r["series"] == "all")
    assert total["num_bytes"] == sum(len(text.encode("utf-8")) for text in texts)
    assert {r["digest"] for r in records} == {folder_digest(folder)}
    assert {r["preset"] for r in records} == {"unit"}
    assert len([r for r in records if r["measure"] == "recall"]) == 2 * 2 * 1
    names = {file.name for file in (tmp_path / "r").glob("*.png")}
    assert names == {
        POSITIONS_FILE, "recall_needle_text.png", "recall_associative_recall_text.png"
    }  # fmt: skip
    assert "bits per byte" in capsys.readouterr().out


def test_command_measures_recall_without_text(trained, tmp_path):
    Evaluate(
        model=trained[0], out=tmp_path / "r", recall=True, lengths=(40,), depths=(0.5,), examples=1
    ).run()
    assert not (tmp_path / "r" / POSITIONS_FILE).exists()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({}, "--shards"),
        ({"recall": True, "text_filler": True}, "--shards"),
        ({"recall": True, "examples": 0}, "--examples"),
        ({"positions": True, "sequence_length": 0}, "--sequence-length"),
        ({"recall": True, "device": "cuda"}, "torch sees no GPU"),
    ],
)
def test_command_refuses_before_it_reads(trained, tmp_path, change, match):
    if torch.cuda.is_available() and change.get("device"):
        return
    with pytest.raises(ValueError, match=match):
        Evaluate(model=trained[0], out=tmp_path / "r", **change).run()
    assert not (tmp_path / "r").exists()


def test_command_refuses_shards_without_long_documents(trained, tmp_path):
    with pytest.raises(EvaluationError, match="--min-tokens"):
        Evaluate(model=trained[0], shards=trained[1], out=tmp_path / "r", min_tokens=10_000).run()


def test_digest_depends_on_the_weights(trained, tmp_path):
    folder, names = trained[0], ("config.json", "model.safetensors")
    before = folder_digest(folder)
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    assert folder_digest(tmp_path) != before
    other = folder_digest(tmp_path)
    (tmp_path / names[1]).write_bytes(b"y")
    assert folder_digest(tmp_path) != other
    assert summary({}, []) == []
