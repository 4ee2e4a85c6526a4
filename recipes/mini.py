"""finwhale-mini, phase by phase: what `python -m recipes.train_mini` runs.

    warm   rows of 1,024, every entry selected: the indexers learn from the whole row
    base   rows of 4,096, the report's sparse selection with exploration
    long   rows of 16,384 at the rate that `base` ended with; from here on the layer that builds
           the candidate pool learns what the layers that search it look for
    quantized, quantized_exact
           rows of 16,384 in the deployed formats with the candidate pool; the first with simulated
           bounded replay in half of the rows, the second without
    chat   rows of 4,096: conversations beside text and recall, in the deployed formats
    pool   rows of 16,384, the same with much more recall
Text is the permissive tier of `finwhale corpus`. Generated documents are a quarter of the tokens.
Source: spec/training.md II.4.5, II.4.6.
"""

from __future__ import annotations

from dataclasses import replace

from finwhale.config.model import ModelConfig
from finwhale.config.presets import mini
from finwhale.config.run import (
    DataConfig,
    IndexerConfig,
    OptimConfig,
    QuantizationConfig,
    RunConfig,
    ScheduleConfig,
)

# Shares of the tokens; recall that repeats is half answers and teaches most per token.
_RECALL = (
    "repeated_recall=0.08",
    "associative_recall=0.06",
    "needle=0.04",
    "long_copy=0.04",
    "variable_tracking=0.02",
)
# Questions from every part of a long row, once the candidate pool is in use.
_MUCH_RECALL = (
    "repeated_recall=0.08",
    "associative_recall=0.12",
    "needles=0.12",
    "needle=0.04",
    "long_copy=0.04",
    "variable_tracking=0.02",
)
_PEAK_RATE, _LONG_RATE, _POOL_RATE = 6e-3, 1.5e-3, 1e-3
CHAT_SHARDS = "data/chat"


def model() -> ModelConfig:
    """Return the preset `mini` with a wider first draw, as narrow matrices need."""
    config = mini()
    return replace(config, text_config=replace(config.text_config, initializer_range=0.04))


# Half of the sampled rows ask for something: of all rows one in a hundred does, and the pool's
# builder does not learn to keep what nobody asks for.
_POOL_INDEXER = IndexerConfig(
    form="combined", phase=1.0, recall_rows=64, rows=128, pool_teacher="searchers", answer_rows=0.5
)


def _run(
    *,
    rows: int,
    tokens: int,
    rate: float,
    schedule: ScheduleConfig,
    after: str | None,
    indexer: IndexerConfig = _POOL_INDEXER,
    mixture: tuple[str, ...] = _RECALL,
) -> RunConfig:
    return RunConfig(
        model=model(),
        init_from=after,
        data=DataConfig(
            corpus="data/shards",
            tokenizer="data/tokenizer.json",
            train_bytes=200_000_000,
            validation_bytes=600_000,
            mixture=mixture,
        ),
        # Few steps: routing biases must move faster than in a long run.
        optim=OptimConfig(lr=rate, balance_rate=0.003),
        indexer=indexer,
        schedule=schedule,
        batch_rows=rows,
        micro_batch_rows=rows,
        sequence_length=tokens,
        cache_rounding=False,
        device="cuda",
        precision="bf16",
        eval_every=0,
        save_every=60,
        # Mixed rows differ in loss by more than a text's do.
        spike_factor=0,
    )


def warm() -> RunConfig:
    """12M tokens; every visible entry is selected, so recall is learned before selection is."""
    return _run(
        rows=16,
        tokens=1024,
        rate=_PEAK_RATE,
        indexer=IndexerConfig(form="dense_warmup", phase=1.0, recall_rows=64),
        schedule=ScheduleConfig(steps=750, warmup_steps=50, min_ratio=1.0),
        after=None,
    )


def base() -> RunConfig:
    """The main phase, with the report's schedule."""
    return _run(
        rows=8,
        tokens=4096,
        rate=_PEAK_RATE,
        indexer=IndexerConfig(form="explored", phase=1.0, recall_rows=64),
        schedule=ScheduleConfig(
            steps=900, warmup_steps=20, min_ratio=_LONG_RATE / _PEAK_RATE, shape="report"
        ),
        after="runs/mini/warm",
    )


def long() -> RunConfig:
    """Rows of 16,384: eight times mini's pool at ratio 2, 128 times its top-k at ratio 1."""
    return _run(
        rows=2,
        tokens=16_384,
        rate=_LONG_RATE,
        schedule=ScheduleConfig(steps=130, warmup_steps=10, min_ratio=1.0),
        after="runs/mini/base",
    )


def quantized() -> RunConfig:
    """The deployed formats from the first step, and bounded replay in half of the rows."""
    run = _run(
        rows=2,
        tokens=16_384,
        rate=_LONG_RATE,
        schedule=ScheduleConfig(steps=110, warmup_steps=10, min_ratio=0.2),
        after="runs/mini/long",
        mixture=_MUCH_RECALL,
    )
    return replace(run, seed=1, quantization=QuantizationConfig(start=0.0, replay=0.5))


def quantized_exact() -> RunConfig:
    """The same without simulated replay: the branch that bounded replay is compared with."""
    return replace(quantized(), quantization=QuantizationConfig(start=0.0))


def _conversations(share: float, *recall: str) -> tuple[str, ...]:
    """Return a mixture with conversations; what is left of the tokens is text."""
    return f"{CHAT_SHARDS}={share}", *recall, "long_copy=0.02", "variable_tracking=0.01"


def chat() -> RunConfig:
    """Conversations, two thirds of the tokens, in the deployed formats with simulated replay."""
    run = _run(
        rows=8,
        tokens=4096,
        rate=_LONG_RATE,
        schedule=ScheduleConfig(steps=320, warmup_steps=10, min_ratio=0.05),
        after="runs/mini/quantized",
        mixture=_conversations(
            0.66, "repeated_recall=0.06", "associative_recall=0.04", "needle=0.03"
        ),
    )
    return replace(run, seed=2, quantization=QuantizationConfig(start=0.0, replay=0.5))


def pool() -> RunConfig:
    """The last phase, in long rows: the last layers learn to look up far beyond the pool."""
    run = _run(
        rows=2,
        tokens=16_384,
        rate=_POOL_RATE,
        schedule=ScheduleConfig(steps=480, warmup_steps=10, min_ratio=0.05),
        after="runs/mini/chat",
        mixture=_conversations(
            0.2,
            "repeated_recall=0.05",
            "associative_recall=0.15",
            "needles=0.15",
            "needle=0.05",
        ),
    )
    return replace(
        run,
        seed=4,
        indexer=replace(run.indexer, rows=256),
        quantization=QuantizationConfig(start=0.0, replay=0.5),
    )
