"""Runs that show whether an indexer learns: recall of pairs that left the window, at nano size.

The layer table, widths and heads are those of the preset `nano`; vocabulary and top-k are small, so
that k is a few per cent of the entries and a selection made at random finds nothing.
"""

from __future__ import annotations

from dataclasses import replace

from finwhale.config.model import ModelConfig
from finwhale.config.presets import nano
from finwhale.config.run import DataConfig, IndexerConfig, OptimConfig, RunConfig, ScheduleConfig

_VOCAB = 128


def nano_for_tasks(index_topk: int = 4) -> ModelConfig:
    """Return `nano` with a vocabulary of 128 and a top-k of `index_topk`."""
    config = nano()
    return replace(
        config,
        image_token_id=_VOCAB - 1,
        text_config=replace(
            config.text_config,
            vocab_size=_VOCAB,
            engram_compressed_vocab_size=_VOCAB,
            dspark_noise_token_id=_VOCAB - 1,
            index_topk=index_topk,
            # Narrow matrices need a wider draw than the released 0.02 to learn in few steps.
            initializer_range=0.04,
        ),
    )


def recall_gpu() -> RunConfig:
    """Associative recall: 32 pairs, then every key asked at more than a window's distance."""
    return RunConfig(
        model=nano_for_tasks(),
        data=DataConfig(
            corpus="task:associative_recall",
            task_rows=49_152,
            task_options=("num_pairs=32", "num_queries=32", "window=32"),
        ),
        optim=OptimConfig(scheme="adamw", lr=2e-3, balance_rate=0.003),
        indexer=IndexerConfig(form="explored"),
        schedule=ScheduleConfig(steps=1500, warmup_steps=50, min_ratio=0.1),
        batch_rows=32,
        micro_batch_rows=32,
        sequence_length=192,
        cache_rounding=False,
        device="cuda",
        precision="bf16",
        eval_every=250,
        save_every=1500,
    )


def decoder_recall_gpu() -> RunConfig:
    """Two lookups in a row: the second key exists only once the first was looked up."""
    run = recall_gpu()
    options = ("num_pairs=16", "num_queries=16", "window=32")
    return replace(
        run,
        data=replace(run.data, corpus="task:decoder_recall", task_options=options),
    )
