"""Everything a run reads, from its DataConfig: corpus, tokenizer, packed rows, Engram map.

One place builds it, so a resumed run, the demo and an evaluation read the same rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finwhale.config.model import ConfigError, ModelConfig
from finwhale.config.presets import with_compressed_vocab
from finwhale.config.run import RunConfig
from finwhale.data.baselines import Baseline, text_baselines
from finwhale.data.packing import PackedRows, pack
from finwhale.data.stdlib_corpus import Corpus, read_corpus
from finwhale.text.engram_map import token_map
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import train_tokenizer
from finwhale.train.record import RUN_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The data of one run; `model` is the run's model sized for the tokenizer's Engram map.

    token_map  [V] int64
    """

    corpus: Corpus
    tokenizer: Tokenizer
    tokenizer_file: Path
    model: ModelConfig
    token_map: np.ndarray
    train: PackedRows
    validation: PackedRows
    train_ids: list[list[int]]
    validation_ids: list[list[int]]

    @property
    def digest(self) -> str:
        """SHA-256 over the corpus digest and the tokenizer file."""
        return hashlib.sha256(
            self.corpus.digest.encode() + self.tokenizer_file.read_bytes()
        ).hexdigest()

    def baselines(self) -> tuple[Baseline, Baseline, Baseline]:
        """Return token unigram, token bigram and byte trigram on the validation text."""
        return text_baselines(
            [document.text for document in self.corpus.train],
            [document.text for document in self.corpus.validation],
            self.train_ids,
            self.validation_ids,
            vocab_size=self.model.text_config.vocab_size,
        )


def prepare_data(run: RunConfig, out: Path) -> RunData:
    """Read, tokenise and pack the data of `run`.

    A tokenizer that the run does not name is trained on the training side and written to
    `out/tokenizer.json`; a run that is already recorded in `out` reads its own back.
    """
    root = None if run.data.corpus == "stdlib" else run.data.corpus
    corpus = read_corpus(
        root,
        max_train_bytes=run.data.train_bytes,
        max_validation_bytes=run.data.validation_bytes,
    )
    vocab_size = run.model.text_config.vocab_size
    file = Path(run.data.tokenizer) if run.data.tokenizer else out / "tokenizer.json"
    is_recorded = (out / RUN_FILE).exists() and file.exists()
    if run.data.tokenizer is None and not is_recorded:
        if file.exists() and not (out / RUN_FILE).exists():
            raise ConfigError(
                f"{file}: is there already and belongs to no run; choose another folder, or name "
                "it with --set data.tokenizer=FILE"
            )
        train_tokenizer((document.text for document in corpus.train), vocab_size, file)
    tokenizer = Tokenizer.from_file(file)
    if tokenizer.vocab_size != vocab_size:
        want = f"vocab_size = {vocab_size} of the model"
        raise ConfigError(f"{file}: {tokenizer.vocab_size} ids, expected {want}")
    ids = token_map(tokenizer)
    model = run.model
    if model.text_config.engram_layer_ids:
        model = with_compressed_vocab(model, int(ids.max()) + 1)
    sides = [
        [[tokenizer.bos_id, *x, tokenizer.eos_id] for x in tokenizer.encode_batch(texts)]
        for texts in (
            [document.text for document in corpus.train],
            [document.text for document in corpus.validation],
        )
    ]
    train, validation = (
        pack(side, sequence_length=run.sequence_length, pad_id=tokenizer.pad_id) for side in sides
    )
    return RunData(
        corpus=corpus,
        tokenizer=tokenizer,
        tokenizer_file=file,
        model=model,
        token_map=ids,
        train=train,
        validation=validation,
        train_ids=sides[0],
        validation_ids=sides[1],
    )
