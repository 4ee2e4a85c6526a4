"""Pre-training runs on text that is on every machine."""

from __future__ import annotations

from finwhale.config.presets import demo, nano, unit
from finwhale.config.run import DataConfig, IndexerConfig, OptimConfig, RunConfig, ScheduleConfig


def demo_cpu() -> RunConfig:
    """The run of `make demo-train`: about 1M parameters, about five minutes on one core."""
    return RunConfig(
        model=demo(),
        data=DataConfig(train_bytes=6_000_000, validation_bytes=60_000),
        # Few steps: routing biases must move ten times faster than the default to matter, and the
        # Sinkhorn update, whose RMS is 0.18 of the rate, wants a high rate.
        optim=OptimConfig(lr=8e-3, balance_rate=0.01),
        indexer=IndexerConfig(form="explored"),
        schedule=ScheduleConfig(steps=260, warmup_steps=20, min_ratio=0.05),
        batch_rows=8,
        micro_batch_rows=8,
        sequence_length=128,
        # A fifth faster; the loaded checkpoint is scored with rounding on.
        cache_rounding=False,
        eval_every=130,
        save_every=50,
    )


def nano_cpu() -> RunConfig:
    """The preset `nano` on one CPU core, an hour or more: for ablations."""
    return RunConfig(
        model=nano(),
        data=DataConfig(train_bytes=20_000_000, validation_bytes=200_000),
        optim=OptimConfig(lr=2e-3, balance_rate=0.003),
        indexer=IndexerConfig(form="explored"),
        schedule=ScheduleConfig(steps=1500, warmup_steps=50, min_ratio=0.05),
        batch_rows=4,
        micro_batch_rows=4,
        sequence_length=512,
        eval_every=250,
        save_every=100,
    )


def unit_smoke() -> RunConfig:
    """Seconds: the whole loop on the preset `unit`, for tests."""
    return RunConfig(
        model=unit(),
        data=DataConfig(train_bytes=200_000, validation_bytes=6_000),
        optim=OptimConfig(lr=3e-3),
        indexer=IndexerConfig(form="explored"),
        schedule=ScheduleConfig(steps=8, warmup_steps=2),
        batch_rows=4,
        micro_batch_rows=2,
        sequence_length=64,
        eval_every=4,
        save_every=3,
    )


def nano_gpu() -> RunConfig:
    """The preset `nano` on one GPU in minutes, on tokenised shards: for ablations.

    Shards and tokenizer come from `finwhale corpus`, `train-tokenizer` and `shards`.
    """
    return RunConfig(
        model=nano(),
        data=DataConfig(
            corpus="data/shards",
            tokenizer="data/tokenizer.json",
            train_bytes=200_000_000,
            validation_bytes=1_000_000,
        ),
        optim=OptimConfig(lr=2e-3, balance_rate=0.003),
        indexer=IndexerConfig(form="explored"),
        schedule=ScheduleConfig(steps=1000, warmup_steps=50, min_ratio=0.1, shape="report"),
        batch_rows=16,
        micro_batch_rows=16,
        sequence_length=512,
        cache_rounding=False,
        device="cuda",
        precision="bf16",
        eval_every=250,
        save_every=500,
    )
