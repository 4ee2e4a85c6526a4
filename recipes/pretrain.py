"""Pre-training runs on text that is on every machine."""

from __future__ import annotations

from finwhale.config.presets import demo, nano, unit
from finwhale.config.run import DataConfig, OptimConfig, RunConfig, ScheduleConfig


def demo_cpu() -> RunConfig:
    """The five-minute run of `make demo`: about 1M parameters, two CPU cores."""
    return RunConfig(
        model=demo(),
        data=DataConfig(train_bytes=6_000_000, validation_bytes=120_000),
        optim=OptimConfig(lr=3e-3),
        schedule=ScheduleConfig(steps=300, warmup_steps=20, min_ratio=0.05),
        batch_rows=8,
        micro_batch_rows=8,
        eval_every=100,
        save_every=50,
    )


def nano_cpu() -> RunConfig:
    """An hour or so on two CPU cores with the preset `nano`: for ablations."""
    return RunConfig(
        model=nano(),
        data=DataConfig(train_bytes=20_000_000, validation_bytes=400_000),
        optim=OptimConfig(lr=2e-3),
        schedule=ScheduleConfig(steps=2000, warmup_steps=100, min_ratio=0.05),
        batch_rows=8,
        micro_batch_rows=8,
        sequence_length=512,
        eval_every=250,
        save_every=100,
    )


def unit_smoke() -> RunConfig:
    """Seconds: the whole loop on the preset `unit`, for tests."""
    return RunConfig(
        model=unit(),
        data=DataConfig(train_bytes=200_000, validation_bytes=20_000),
        optim=OptimConfig(lr=3e-3),
        schedule=ScheduleConfig(steps=8, warmup_steps=2),
        batch_rows=4,
        micro_batch_rows=2,
        sequence_length=64,
        threads=1,
        eval_every=4,
        save_every=3,
    )
