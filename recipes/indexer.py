"""Runs that show whether an indexer learns: recall of pairs that left the window, at nano size.

The layer table, widths and heads are those of the preset `nano`; vocabulary and top-k are small, so
that k is a few per cent of the entries and a selection made at random finds nothing.
"""

from __future__ import annotations

from dataclasses import replace

from finwhale.config.model import ModelConfig
from finwhale.config.presets import nano, unit
from finwhale.config.run import DataConfig, IndexerConfig, OptimConfig, RunConfig, ScheduleConfig

_VOCAB = 128


def for_tasks(config: ModelConfig, index_topk: int = 4) -> ModelConfig:
    """Return a preset with a vocabulary of 128 and a top-k of `index_topk`."""
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
    """Recall: 24 pairs again and again; what counts are values whose key left the window.

    Nearly half of the tokens are answers, so a small model learns the lookup in a few hundred
    steps; which value a key has changes with every row.
    """
    return RunConfig(
        model=for_tasks(nano()),
        data=DataConfig(
            corpus="task:repeated_recall",
            # More rows than steps ask for: Engram learns a row by heart that comes twice.
            task_rows=49_152,
            task_options=("num_keys=24", "window=32"),
        ),
        optim=OptimConfig(scheme="muon_adamw", lr=8e-3, balance_rate=0.003),
        indexer=IndexerConfig(form="explored"),
        schedule=ScheduleConfig(steps=500, warmup_steps=50, min_ratio=0.1),
        batch_rows=32,
        micro_batch_rows=32,
        sequence_length=192,
        cache_rounding=False,
        device="cuda",
        precision="bf16",
        eval_every=250,
        save_every=500,
    )


def decoder_recall_gpu() -> RunConfig:
    """Two lookups in a row: the second key exists only once the first was looked up."""
    run = recall_gpu()
    options = ("num_pairs=4", "num_links=4", "num_queries=4", "num_keys=8", "window=32")
    return replace(
        run,
        data=replace(run.data, corpus="task:decoder_recall", task_options=options),
    )


def fixed_keys_gpu(num_keys: int = 4) -> RunConfig:
    """A few pairs of always the same keys among fillers, each asked beyond a window's distance."""
    run = recall_gpu()
    pairs = f"num_pairs={num_keys}", f"num_queries={num_keys}", f"num_keys={num_keys}"
    options = (*pairs, "scattered=1", "window=32")
    return replace(
        run, data=replace(run.data, corpus="task:associative_recall", task_options=options)
    )


def recall_cpu() -> RunConfig:
    """In minutes on one core: preset `unit`, four fixed keys, top-k 2 of 32 or 64 entries."""
    run = recall_gpu()
    options = ("num_pairs=4", "num_queries=4", "num_keys=4", "scattered=1", "window=8")
    return replace(
        run,
        model=for_tasks(unit(), index_topk=2),
        data=replace(
            run.data, corpus="task:associative_recall", task_rows=4096, task_options=options
        ),
        schedule=replace(run.schedule, steps=240, warmup_steps=20),
        batch_rows=16,
        micro_batch_rows=16,
        sequence_length=64,
        device="cpu",
        precision="fp32",
        eval_every=240,
        save_every=240,
    )
