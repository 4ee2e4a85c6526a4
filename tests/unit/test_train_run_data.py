"""What a run reads: generated tasks, tokenised shards, and refusals that name their field."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from finwhale.config.model import ConfigError
from finwhale.config.presets import unit
from finwhale.config.run import DataConfig, OptimConfig, RunConfig
from finwhale.data.long_tasks import task_example
from finwhale.data.packing import NO_TARGET
from finwhale.data.shards import ShardError, write_shards
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import train_tokenizer
from finwhale.train.evaluate import answer_accuracy, bits_per_byte
from finwhale.train.loop import build_model, build_optimizers
from finwhale.train.loss import Batch
from finwhale.train.run_data import prepare_data
from finwhale.train.step import TrainStep


def task_run(kind="associative_recall", options=("num_pairs=6", "num_queries=3"), seed=0, **more):
    data = DataConfig(corpus=f"task:{kind}", task_rows=20, task_seed=seed, task_options=options)
    return RunConfig(
        model=unit(), data=data, batch_rows=2, micro_batch_rows=2, sequence_length=48, **more
    )


def test_targets_of_a_task_are_its_answers_and_nothing_else(tmp_path):
    data = prepare_data(task_run(), tmp_path)
    assert data.train.inputs.shape == (20, 48)
    assert data.validation.num_rows == 1
    assert data.is_task
    assert data.baselines() == ()
    for inputs, targets in zip(data.train.inputs, data.train.targets, strict=True):
        pairs = dict(zip(inputs[:12:2].tolist(), inputs[1:12:2].tolist(), strict=True))
        asked = [t for t in range(48) if targets[t] != NO_TARGET]
        assert len(asked) == 3
        # A question is QUERY key *value*: the input at an answer's place is the key.
        assert all(targets[t] == pairs[int(inputs[t])] for t in asked)
    assert data.train_bytes == data.train.num_targets == 60
    assert data.validation_bytes == 3


def test_task_rows_are_the_generators_examples_shifted_by_one(tmp_path):
    data = prepare_data(task_run(seed=3), tmp_path)
    for side, packed in enumerate((data.train, data.validation)):
        example = task_example(
            "associative_recall",
            seed=6 + side, index=0, length=49, vocab=range(1, 511), num_pairs=6, num_queries=3,
        )  # fmt: skip
        tokens = list(example.tokens)
        assert packed.inputs[0].tolist() == tokens[:-1]
        wanted = zip(tokens[1:], example.answer_mask[1:], strict=True)
        assert packed.targets[0].tolist() == [t if a else NO_TARGET for t, a in wanted]


def test_task_data_depends_on_the_seed_and_its_sides_differ(tmp_path):
    one, again = (prepare_data(task_run(seed=1), tmp_path) for _ in range(2))
    other = prepare_data(task_run(seed=2), tmp_path)
    assert one.digest == again.digest != other.digest
    rows = {row.tobytes() for row in one.train.inputs}
    assert len(rows) == 20
    assert not rows & {row.tobytes() for row in one.validation.inputs}
    # Neither is another seed's training side.
    assert not rows & {row.tobytes() for row in other.train.inputs}
    # The run's own seed draws weights and the order of rows, not the rows.
    data = replace(task_run(seed=1), seed=5)
    assert prepare_data(data, tmp_path).digest == one.digest


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("juggling", (), r"data\.corpus: task juggling: kind: got 'juggling', expected one of"),
        ("associative_recall", ("pairs=3",), r"data\.corpus: task associative_recall: .*'pairs'"),
        ("associative_recall", ("num_pairs=90",), r"data\.corpus: task associative_recall: "),
        ("associative_recall", ("seed=9",), r"data\.corpus: task associative_recall: .*'seed'"),
        ("associative_recall", ("num_pairs=many",), r"data\.task_options: .*many"),
    ],
)
def test_wrong_tasks_and_options_are_refused_by_field(tmp_path, kind, options, message):
    with pytest.raises(ConfigError, match=message):
        prepare_data(task_run(kind, options), tmp_path)


def test_option_without_a_number_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"data\.task_options: got 'num_pairs', expected NAME="):
        task_run(options=("num_pairs",))


def test_accuracy_counts_answers_that_rank_first(tmp_path):
    """A head that always says one token is right where that token is the answer."""
    run = task_run(precision="fp32")
    data = prepare_data(run, tmp_path)
    model = build_model(run, data.model, torch.from_numpy(data.token_map))
    answers = data.train.targets[data.train.targets != NO_TARGET]
    with torch.no_grad():
        model.head.weight.zero_()
    # All logits equal: the lowest id ranks first, and no task answers with id 0.
    assert answer_accuracy(model, data.train) == 0.0
    bits = bits_per_byte(model, data.train, data.train_bytes, chunk_tokens=64)
    assert bits == pytest.approx(9.0, rel=1e-5)
    marked = replace(data.train, targets=np.where(data.train.targets == NO_TARGET, NO_TARGET, 0))
    assert answer_accuracy(model, marked) == 1.0
    assert len(answers) == 60


def test_a_step_on_a_task_learns_answers(tmp_path):
    run = task_run(optim=OptimConfig(scheme="adamw"))
    data = prepare_data(run, tmp_path)
    model = build_model(run, data.model, torch.from_numpy(data.token_map))
    training = TrainStep(run, model, build_optimizers(run, model))
    batch = Batch.of(data.train, np.arange(2))
    assert batch.num_targets == 6
    losses = []
    for step in range(3):
        losses.append(training.gradients(batch, step).loss)
        training.update(3e-3)
    assert losses[-1] < losses[0]


WORDS = "the quick brown fox jumps over the lazy dog 0123456789 and some more of them\n"


@pytest.fixture(scope="module")
def shard_folder(tmp_path_factory):
    """Shards of a corpus of one source, and the file of its tokenizer of 512 ids."""
    root = tmp_path_factory.mktemp("shards")
    texts = {"train": [WORDS * (2 + n) for n in range(8)], "validation": [WORDS * 3]}
    for side in ("train", "validation", "evaluation"):
        (root / "corpus" / side).mkdir(parents=True)
        rows = [
            json.dumps({"name": str(n), "package": "one", "text": text})
            for n, text in enumerate(texts.get(side, []))
        ]
        (root / "corpus" / side / "one.jsonl").write_text("".join(row + "\n" for row in rows))
    sides = {side: {"documents": len(texts.get(side, []))} for side in texts}
    record = {
        "format": 1, "digest": "d" * 64, "sources": [{"record": {"name": "one"}, "sides": sides}],
    }  # fmt: skip
    (root / "corpus" / "corpus.json").write_text(json.dumps(record))
    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    many = " ".join("".join(generator.choice(letters, 5)) for _ in range(2000))
    file = train_tokenizer([WORDS * 50, many], 512, root / "tokenizer.json")
    write_shards(root / "corpus", Tokenizer.from_file(file), root / "out", 64)
    return root / "out", file


def shard_run(folder, file, **more) -> RunConfig:
    data = DataConfig(corpus=str(folder), tokenizer=None if file is None else str(file), **more)
    return RunConfig(
        model=unit(), data=data, batch_rows=2, micro_batch_rows=1, sequence_length=64,
        optim=OptimConfig(scheme="adamw"),
    )  # fmt: skip


def test_a_shard_folder_trains_a_step(shard_folder, tmp_path):
    run = shard_run(*shard_folder)
    data = prepare_data(run, tmp_path)
    assert data.train_bytes == sum(len(WORDS) * (2 + n) for n in range(8))
    assert data.validation_bytes == 3 * len(WORDS)
    tokenizer = Tokenizer.from_file(shard_folder[1])
    held_out = [tokenizer.bos_id, *tokenizer.encode(WORDS * 3), tokenizer.eos_id]
    assert data.validation.num_targets == len(held_out) - 1
    assert data.validation.inputs[0, : min(64, len(held_out) - 1)].tolist() == held_out[:-1][:64]
    assert data.baselines() == ()
    model = build_model(run, data.model, torch.from_numpy(data.token_map))
    training = TrainStep(run, model, build_optimizers(run, model))
    before = training.gradients(Batch.of(data.train, np.arange(2)), 0).loss
    training.update(3e-3)
    assert training.gradients(Batch.of(data.train, np.arange(2)), 0).loss < before


def test_shards_are_cut_to_the_bytes_asked_for(shard_folder, tmp_path):
    whole = prepare_data(shard_run(*shard_folder), tmp_path)
    half = prepare_data(shard_run(*shard_folder, train_bytes=whole.train_bytes // 2), tmp_path)
    assert whole.train_bytes // 2 <= half.train_bytes < whole.train_bytes * 0.8
    assert half.train.num_targets < whole.train.num_targets
    assert half.digest != whole.digest


def test_shards_of_another_tokenizer_are_refused(shard_folder, tmp_path):
    folder, _ = shard_folder
    other = train_tokenizer([WORDS * 30 + "x y z" * 900], 512 - 200, tmp_path / "small.json")
    with pytest.raises(ConfigError, match=r"small\.json: 312 ids, expected vocab_size = 512"):
        prepare_data(shard_run(folder, other), tmp_path)
    with pytest.raises(ConfigError, match=r"data\.tokenizer: got None, expected the tokenizer"):
        prepare_data(shard_run(folder, None), tmp_path)
    generator = np.random.default_rng(1)
    many = " ".join("".join(generator.choice(list("xyzuvw"), 6)) for _ in range(3000))
    same_size = train_tokenizer([many], 512, tmp_path / "other.json")
    with pytest.raises(ShardError, match=r"tokenizer: got .*, expected .*; write the shards"):
        prepare_data(shard_run(folder, same_size), tmp_path)


def mixed_run(folder, file, mixture, **more) -> RunConfig:
    run = shard_run(folder, file, mixture=mixture, mixture_min_tokens=96, **more)
    return replace(
        run, sequence_length=128, schedule=replace(run.schedule, steps=20, warmup_steps=1)
    )


def test_a_mixture_fills_the_run_in_its_shares(shard_folder, tmp_path):
    run = mixed_run(*shard_folder, ("needle=0.2", "repeated_recall=0.3"), max_epochs=50.0)
    data = prepare_data(run, tmp_path)
    total = 20 * 2 * 128
    # Enough rows that no step begins a second epoch: generated documents never come twice.
    assert 20 * 2 <= data.train.num_rows < 1.3 * 20 * 2
    for name, share in (("text", 0.5), ("needle", 0.2), ("repeated_recall", 0.3)):
        got = data.facts["mixture_tokens"][name]
        assert share * total <= got < share * total + 300, name
    alone = prepare_data(shard_run(*shard_folder), tmp_path)
    # Validation is the text alone, in rows of this run.
    assert data.validation.num_targets == alone.validation.num_targets
    assert data.digest != alone.digest
    again = prepare_data(run, tmp_path)
    assert again.digest == data.digest
    assert np.array_equal(again.train.inputs, data.train.inputs)
    # Not every position is a target: documents answer, text predicts.
    assert 0.4 < data.train.num_targets / data.train.targets.size < 0.9


def test_conversations_come_with_their_own_targets(shard_folder, tmp_path, monkeypatch):
    folder = tmp_path / "chat"
    folder.mkdir()
    (folder / "meta.json").write_text("{}")
    ids, wanted = np.arange(30, 60), np.arange(30) >= 20
    import finwhale.train.run_data as room

    monkeypatch.setattr(
        room, "read_chat_shards", lambda name, side, tokenizer: [(ids, wanted)] * 40
    )
    run = mixed_run(*shard_folder, (f"{folder}=0.5",), max_epochs=50.0)
    data = prepare_data(run, tmp_path)
    rows = data.train
    places = [(r, t) for r in range(rows.num_rows) for t in np.flatnonzero(rows.inputs[r] == 30)]
    starts = [(r, t) for r, t in places if rows.inputs[r, t : t + 5].tolist() == [*range(30, 35)]]
    assert starts
    for row, at in starts:
        own = rows.targets[row, at : at + 29]
        assert (own[:19] == NO_TARGET).all()
        assert own[19:].tolist() == [*range(50, 60)]


@pytest.mark.parametrize(
    ("mixture", "more", "message"),
    [
        (("needle=0.5",), {"max_epochs": 1.0}, "at most 1 "),
        (("no_kind=0.5",), {"max_epochs": 50.0}, "expected one of repeated_recall"),
        (("needle",), {"max_epochs": 50.0}, "NAME=SHARE"),
    ],
)
def test_wrong_mixtures_are_refused_by_field(shard_folder, tmp_path, mixture, more, message):
    with pytest.raises(ConfigError, match=message):
        prepare_data(mixed_run(*shard_folder, mixture, **more), tmp_path)


def test_a_mixture_without_shards_is_refused(tmp_path):
    run = task_run()
    run = replace(run, data=replace(run.data, mixture=("needle=0.5",)))
    with pytest.raises(ConfigError, match=r"data\.mixture: .* expected a folder of tokenised"):
        prepare_data(run, tmp_path)
