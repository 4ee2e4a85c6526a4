"""Training shown in five minutes: train, score, save, load, continue a text, count bytes.

A composition of rooms that may not see each other, which is why it stands beside the command
line: training on one side, checkpoints and generation on the other. It adds no mathematics.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.save import save_checkpoint
from finwhale.config.accounting import kv_bytes_per_token
from finwhale.config.run import RunConfig
from finwhale.engine.generate import GenerationStats, generate
from finwhale.ops import FAST
from finwhale.train.loop import TrainResult, train, validate

CHECKPOINT_FOLDER = "checkpoint"
_PROMPT = "class File:\n    def "
_NEW_TOKENS = 96
_TEMPERATURE, _TOP_P = 0.7, 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedDemoReport:
    """What the demonstration showed."""

    result: TrainResult
    reloaded_bpb: float
    continuation: str
    kv_bytes_per_token: float
    elapsed_s: float


def run_training_demo(
    out: str | Path,
    *,
    run: RunConfig | None = None,
    prompt: str = _PROMPT,
    max_new_tokens: int = _NEW_TOKENS,
    resume: bool = True,
    console: Console | None = None,
) -> TrainedDemoReport:
    """Run the whole path in the folder `out` and print it; `run` defaults to the demo recipe.

    A run that `out` already holds goes on where it stopped, or is shown if it is finished.
    """
    from recipes.pretrain import demo_cpu

    began_s = time.perf_counter()
    out, console = Path(out), console or Console()
    result = train(
        run or demo_cpu(),
        out,
        recipe=None if run else "recipes.pretrain:demo_cpu",
        resume=resume,
        console=console,
    )
    num_parameters = sum(p.numel() for p in result.model.parameters())
    console.print(f"{num_parameters:,} parameters, trained in {result.elapsed_s:.0f} s")
    folder = out / CHECKPOINT_FOLDER
    saved = save_checkpoint(
        result.model,
        folder,
        quantized=True,
        tokenizer_file=result.data.tokenizer_file,
        overwrite=True,
    )
    console.print(
        f"wrote {folder}: {saved.num_tensors} tensors, {saved.payload_bytes:,} bytes, "
        "FP8 and FP4 as released"
    )
    loaded = load_model(folder, ops=FAST)
    reloaded_bpb = validate(run or demo_cpu(), loaded.model, result.data)
    console.print(_score_table(result, reloaded_bpb))
    console.print(f"curve: {out / 'loss.png'}")
    console.print(
        f"continuation by the loaded checkpoint (temperature {_TEMPERATURE}, top-p {_TOP_P}):",
        style="bold",
    )
    continuation = _continue(loaded.model, result, prompt, max_new_tokens, console)
    kv_bytes = kv_bytes_per_token(loaded.config.text_config)
    console.print(f"one token of global KV costs {kv_bytes:g} bytes in this model")
    elapsed_s = time.perf_counter() - began_s
    console.print(f"{elapsed_s:.0f} s in all")
    return TrainedDemoReport(
        result=result,
        reloaded_bpb=reloaded_bpb,
        continuation=continuation,
        kv_bytes_per_token=kv_bytes,
        elapsed_s=elapsed_s,
    )


def _score_table(result: TrainResult, reloaded_bpb: float) -> Table:
    table = Table("bits per byte, validation text", "")
    rows = [(baseline.name, baseline.bits_per_byte) for baseline in result.baselines]
    rows += [("model, as trained", result.validation_bpb)]
    rows += [("model, saved in FP8 and FP4 and loaded back", reloaded_bpb)]
    for name, value in rows:
        table.add_row(name, f"{value:.4f}")
    return table


def _continue(
    model, result: TrainResult, prompt: str, max_new_tokens: int, console: Console
) -> str:
    """Print the prompt and its continuation piece by piece; return the continuation."""
    tokenizer = result.data.text[0]
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    stream, stats = tokenizer.stream(skip_hidden=True), GenerationStats()
    pieces = []
    console.out(prompt, end="", highlight=False)
    for token_id in generate(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=_TEMPERATURE,
        top_p=_TOP_P,
        stop_ids=(tokenizer.eos_id,),
        stats=stats,
    ):
        pieces.append(stream.push(token_id))
        console.out(pieces[-1], end="", highlight=False)
    pieces.append(stream.finish())
    console.out(pieces[-1], highlight=False)
    for line in stats.lines():
        console.print(line, highlight=False)
    return "".join(pieces)
