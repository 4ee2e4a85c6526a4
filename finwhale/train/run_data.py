"""Everything a run reads, from its DataConfig: packed rows, Engram map, baselines.

One place builds it, so a resumed run, the demo and an evaluation read the same rows. Three
sources: text (the standard library's or a folder), tokenised shards, alone or in a mixture with
generated documents and conversations, and generated tasks, whose documents are one row each and
whose targets are the answers alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from finwhale.config.model import ConfigError, ModelConfig
from finwhale.config.presets import with_compressed_vocab
from finwhale.config.run import RunConfig
from finwhale.conversations.shards import read_chat_shards
from finwhale.data.baselines import Baseline, text_baselines
from finwhale.data.long_tasks import TaskError, task_example, task_options
from finwhale.data.mixture import (
    MIN_MIXED_TOKENS,
    Document,
    generated,
    repeated,
    shares,
    split_documents,
)
from finwhale.data.packing import NO_TARGET, PackedRows, pack
from finwhale.data.shards import Shards, read_shards
from finwhale.data.stdlib_corpus import Corpus, read_corpus
from finwhale.text.engram_map import token_map
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import NUM_FIRST_MARKERS, train_tokenizer
from finwhale.train.record import RUN_FILE

_TASK = "task:"
_ROWS_OF_ONE_PART = 1024
# Ids of text that stand as filler in generated documents: enough never to matter, few to send.
_FILLER_TOKENS = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The data of one run; `model` is the run's model sized for the tokenizer's Engram map.

    token_map        [V] int64
    train_bytes, validation_bytes  of text; for a task, its answers
    facts            counts for run.json
    is_task          targets are answers, so accuracy means something
    """

    model: ModelConfig
    token_map: np.ndarray
    train: PackedRows
    validation: PackedRows
    train_bytes: int
    validation_bytes: int
    digest: str
    facts: dict[str, Any]
    is_task: bool = False
    tokenizer: Tokenizer | None = None
    tokenizer_file: Path | None = None
    _text: tuple[Corpus, list[list[int]], list[list[int]]] | None = field(default=None, repr=False)

    @property
    def text(self) -> tuple[Tokenizer, Path]:
        """Return the tokenizer and its file; a generated task has none."""
        if self.tokenizer is None or self.tokenizer_file is None:
            raise ConfigError("data.corpus: a task has no text, and so no tokenizer")
        return self.tokenizer, self.tokenizer_file

    @property
    def vocab_size(self) -> int:
        return self.model.text_config.vocab_size

    def baselines(self) -> tuple[Baseline, ...]:
        """Return n-gram baselines on the validation text; none for shards and tasks."""
        if self._text is None:
            return ()
        corpus, train_ids, validation_ids = self._text
        return text_baselines(
            [document.text for document in corpus.train],
            [document.text for document in corpus.validation],
            train_ids,
            validation_ids,
            vocab_size=self.vocab_size,
        )


def prepare_data(run: RunConfig, out: Path, *, map_parts: Callable = map) -> RunData:
    """Read, tokenise and pack the data of `run`.

    map_parts  how a task's rows are made, part by part: the built-in map, or that of a process pool

    A tokenizer that the run does not name is trained on the training side and written to
    `out/tokenizer.json`; a run that is already recorded in `out` reads its own back.
    """
    is_shards = run.data.corpus != "stdlib" and (Path(run.data.corpus) / "meta.json").exists()
    if run.data.mixture and not is_shards:
        raise ConfigError(
            f"data.mixture: data.corpus is {run.data.corpus}, expected a folder of tokenised "
            "shards (finwhale shards)"
        )
    if run.data.corpus.startswith(_TASK):
        return _task_data(run, run.data.corpus.removeprefix(_TASK), map_parts)
    if is_shards:
        return _shard_data(run, Path(run.data.corpus), map_parts)
    if run.data.corpus != "stdlib" and (Path(run.data.corpus) / "corpus.json").exists():
        raise ConfigError(
            f"data.corpus: {run.data.corpus} holds what finwhale corpus wrote, expected shards; "
            "write them with finwhale shards and name that folder"
        )
    return _text_data(run, out)


def _text_data(run: RunConfig, out: Path) -> RunData:
    root = None if run.data.corpus == "stdlib" else run.data.corpus
    corpus = read_corpus(
        root,
        max_train_bytes=run.data.train_bytes,
        max_validation_bytes=run.data.validation_bytes,
    )
    file = Path(run.data.tokenizer) if run.data.tokenizer else out / "tokenizer.json"
    is_recorded = (out / RUN_FILE).exists() and file.exists()
    if run.data.tokenizer is None and not is_recorded:
        texts = (document.text for document in corpus.train)
        _train_tokenizer(texts, run.model.text_config.vocab_size, file)
    tokenizer, ids, model = _tokenizer(run, file)
    train_ids, validation_ids = (
        [[tokenizer.bos_id, *x, tokenizer.eos_id] for x in tokenizer.encode_batch(texts)]
        for texts in (
            [document.text for document in corpus.train],
            [document.text for document in corpus.validation],
        )
    )
    return RunData(
        model=model,
        token_map=ids,
        train=_packed(run, train_ids, tokenizer),
        validation=_packed(run, validation_ids, tokenizer),
        train_bytes=corpus.train_bytes,
        validation_bytes=corpus.validation_bytes,
        digest=hashlib.sha256(corpus.digest.encode() + file.read_bytes()).hexdigest(),
        facts={
            "train_documents": len(corpus.train),
            "train_bytes": corpus.train_bytes,
            "validation_documents": len(corpus.validation),
            "validation_bytes": corpus.validation_bytes,
            "unreadable_files": corpus.num_unreadable,
        },
        tokenizer=tokenizer,
        tokenizer_file=file,
        _text=(corpus, train_ids, validation_ids),
    )


def _train_tokenizer(texts: Iterable[str], vocab_size: int, file: Path) -> None:
    """Train the run's tokenizer into `file`.

    One that lies there already may come from a run that was killed before its record: it is
    accepted if it is the same, and never overwritten.
    """
    fresh = file.with_name("tokenizer.partial.json")
    train_tokenizer(texts, vocab_size, fresh)
    if file.exists() and file.read_bytes() != fresh.read_bytes():
        fresh.unlink()
        raise ConfigError(
            f"{file}: is another tokenizer than this run trains and belongs to no run; choose "
            "another folder, or name it with --set data.tokenizer=FILE"
        )
    fresh.replace(file)


def _tokenizer(run: RunConfig, file: Path) -> tuple[Tokenizer, np.ndarray, ModelConfig]:
    """Return the tokenizer, its Engram map and the run's model sized for that map."""
    tokenizer = Tokenizer.from_file(file)
    vocab_size = run.model.text_config.vocab_size
    if tokenizer.vocab_size != vocab_size:
        want = f"vocab_size = {vocab_size} of the model"
        raise ConfigError(f"{file}: {tokenizer.vocab_size} ids, expected {want}")
    ids = token_map(tokenizer)
    return tokenizer, ids, _sized(run.model, int(ids.max()) + 1)


def _sized(model: ModelConfig, compressed_ids: int) -> ModelConfig:
    if not model.text_config.engram_layer_ids:
        return model
    return with_compressed_vocab(model, compressed_ids)


def _packed(run: RunConfig, documents: Sequence, tokenizer: Tokenizer) -> PackedRows:
    return pack(documents, sequence_length=run.sequence_length, pad_id=tokenizer.pad_id)


def _shard_data(run: RunConfig, folder: Path, map_parts: Callable) -> RunData:
    if run.data.tokenizer is None:
        raise ConfigError(
            f"data.tokenizer: got None, expected the tokenizer.json that wrote {folder}"
        )
    file = Path(run.data.tokenizer)
    tokenizer, ids, model = _tokenizer(run, file)
    sides = {
        side: _capped(read_shards(folder, side, tokenizer=tokenizer), limit)
        for side, limit in (
            ("train", run.data.train_bytes),
            ("validation", run.data.validation_bytes),
        )
    }
    (train, train_bytes), (validation, validation_bytes) = sides.values()
    digest = hashlib.sha256((folder / "meta.json").read_bytes())
    digest.update(f"{run.data.train_bytes} {run.data.validation_bytes}".encode())
    facts: dict[str, Any] = {}
    if run.data.mixture:
        packed, facts = _mixed(run, train, tokenizer, map_parts)
        digest.update(packed.inputs.tobytes() + packed.targets.tobytes())
    else:
        packed = _packed(run, train, tokenizer)
    return RunData(
        model=model,
        token_map=ids,
        train=packed,
        validation=_packed(run, validation, tokenizer),
        train_bytes=train_bytes,
        validation_bytes=validation_bytes,
        digest=digest.hexdigest(),
        facts={
            "train_documents": len(train),
            "train_bytes": train_bytes,
            "validation_documents": len(validation),
            "validation_bytes": validation_bytes,
            **facts,
        },
        tokenizer=tokenizer,
        tokenizer_file=file,
    )


def _mixed(
    run: RunConfig, text: list[np.ndarray], tokenizer: Tokenizer, map_parts: Callable
) -> tuple[PackedRows, dict[str, Any]]:
    """Return the rows of the whole run and the tokens of each part of the mixture.

    A document of n tokens takes n - 1 places, so a few more tokens may be needed than places: with
    too few rows some would be read twice.
    """
    num_rows = run.schedule.steps * run.batch_rows
    total = num_rows * run.sequence_length
    while True:
        packed, facts = _mixed_tokens(run, total, text, tokenizer, map_parts)
        if packed.num_rows >= num_rows:
            return packed, facts
        total += (num_rows - packed.num_rows + 1) * run.sequence_length


def _mixed_tokens(
    run: RunConfig,
    total: int,
    text: list[np.ndarray],
    tokenizer: Tokenizer,
    map_parts: Callable,
) -> tuple[PackedRows, dict[str, Any]]:
    """Return rows of about `total` tokens and the tokens of each part."""
    data, length = run.data, run.sequence_length
    try:
        parts = shares(data.mixture)
        documents = repeated(
            [Document.of_text(ids) for ids in text],
            tokens=round(total * (1 - sum(parts.values()))),
            seed=run.seed,
            max_epochs=data.max_epochs,
        )
        facts = {"text": sum(len(d.ids) for d in documents)}
        filler = np.concatenate(text)[:_FILLER_TOKENS] if text else None
        for number, (name, share) in enumerate(parts.items()):
            if (Path(name) / "meta.json").exists():
                read = read_chat_shards(name, "train", tokenizer=tokenizer)
                own = [Document(ids=i, is_target=t) for i, t in read]
                found = repeated(
                    own, tokens=round(total * share), seed=run.seed, max_epochs=data.max_epochs
                )
            else:
                found = generated(
                    name,
                    tokens=round(total * share),
                    seed=(run.seed << 8) + number,
                    # Behind the markers, before the image placeholder.
                    vocab=range(NUM_FIRST_MARKERS, tokenizer.vocab_size - 1),
                    bos_id=tokenizer.bos_id,
                    lengths=(max(MIN_MIXED_TOKENS, data.mixture_min_tokens), length + 1),
                    text=filler,
                    map_parts=map_parts,
                )
            facts[name] = sum(len(d.ids) for d in found)
            documents += found
        pairs = list(split_documents(documents, length))
    except TaskError as error:
        raise ConfigError(str(error)) from None
    ids: list[Any] = [document for document, _ in pairs]
    packed = pack(
        ids,
        sequence_length=length,
        pad_id=tokenizer.pad_id,
        are_targets=[is_target for _, is_target in pairs],
    )
    return packed, {"mixture_tokens": facts}


def _capped(shards: Shards, max_bytes: int) -> tuple[list[np.ndarray], int]:
    """Return documents, taken evenly over all sources, of at most about `max_bytes` of text."""
    documents: list[np.ndarray] = []
    num_bytes = 0
    share = min(1.0, max_bytes / max(1, shards.num_bytes))
    for source in shards.sources:
        own = shards.documents(source.name)
        wanted, taken = share * source.tokens, 0
        for document in own:
            if taken >= wanted:
                break
            documents.append(document)
            taken += len(document)
        num_bytes += round(source.bytes * taken / max(1, source.tokens))
    return documents, num_bytes


def _task_data(run: RunConfig, kind: str, map_parts: Callable) -> RunData:
    """Generate rows of one task: train from seed 2n, validation from 2n + 1, n = data.task_seed."""
    options = dict(_option(option) for option in run.data.task_options)
    vocab = run.model.text_config.vocab_size
    sides = []
    for side, rows in enumerate((run.data.task_rows, max(1, run.data.task_rows // 16))):
        make = partial(
            _task_rows,
            kind=kind,
            seed=2 * run.data.task_seed + side,
            tokens=run.sequence_length,
            # Id 0 begins a document in every tokenizer here; the task leaves it out.
            vocab=range(1, vocab - 1),
            options=options,
        )
        try:
            inputs, targets = (
                np.concatenate(arrays)
                for arrays in zip(*map_parts(make, _parts(rows)), strict=True)
            )
        except TaskError as error:
            raise ConfigError(f"data.corpus: task {kind}: {error}") from None
        except TypeError as error:
            known = ", ".join(task_options(kind)) or "none"
            raise ConfigError(
                f"data.corpus: task {kind}: {error}; its options are {known}"
            ) from None
        lengths = ((run.sequence_length,),) * rows
        sides.append(PackedRows(inputs=inputs, targets=targets, lengths=lengths))
    train, validation = sides
    digest = hashlib.sha256(train.inputs.tobytes() + validation.inputs.tobytes())
    return RunData(
        model=_sized(run.model, vocab),
        token_map=np.arange(vocab),
        train=train,
        validation=validation,
        train_bytes=train.num_targets,
        validation_bytes=validation.num_targets,
        digest=digest.hexdigest(),
        facts={"task": kind, "options": options, "train_rows": train.num_rows},
        is_task=True,
    )


def _task_rows(
    indices: range, *, kind: str, seed: int, tokens: int, vocab: range, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets [rows, tokens] int32 of the examples `indices` of a task."""
    inputs = np.zeros((len(indices), tokens), dtype=np.int32)
    targets = np.full_like(inputs, NO_TARGET)
    for row, index in enumerate(indices):
        example = task_example(
            kind, seed=seed, index=index, length=tokens + 1, vocab=vocab, **options
        )
        ids = np.array(example.tokens)
        inputs[row] = ids[:-1]
        targets[row] = np.where(example.answer_mask[1:], ids[1:], NO_TARGET)
    return inputs, targets


def _parts(rows: int) -> list[range]:
    return [
        range(start, min(start + _ROWS_OF_ONE_PART, rows))
        for start in range(0, rows, _ROWS_OF_ONE_PART)
    ]


def _option(option: str) -> tuple[str, int | float]:
    """Return NAME=NUMBER as name and number."""
    name, _, text = option.partition("=")
    for kind in (int, float):
        try:
            return name, kind(text)
        except ValueError:
            continue
    raise ConfigError(f"data.task_options: got {option!r}, expected NAME=NUMBER")
