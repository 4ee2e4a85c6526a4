"""Train finwhale-mini, or what it is compared with, phase after phase in processes of their own.

    python -m recipes.train_mini --out runs/mini                      # every phase, one GPU
    python -m recipes.train_mini --out runs/mini --phases warm base --gpu 0
    python -m recipes.train_mini --out runs/mini-dense --baseline dense --phases warm base long
    python -m recipes.train_mini --out runs/try --try-on-cpu         # seconds: every phase, tiny
Needs data/shards, data/tokenizer.json and data/chat (docs/mini.md says how to make them). A phase
that is finished is skipped and one that was killed goes on from its last saved state, so the same
command resumes. Every phase leaves its training state, its curves, and for the model itself the
checkpoint twice: `checkpoint-bf16` and `checkpoint` in FP8 and FP4.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from finwhale.config.presets import unit
from finwhale.config.run import RunConfig, with_overrides

PHASES = ("warm", "base", "long", "quantized", "quantized_exact", "chat", "pool")


def phase_run(args: argparse.Namespace, phase: str) -> RunConfig:
    """Return the run of one phase: of the model or a baseline, at full size or tiny."""
    from recipes import mini

    run: RunConfig = getattr(mini, phase)()
    if run.init_from is not None:
        run = replace(run, init_from=str(args.out / Path(run.init_from).name))
    run = replace(run, baseline=args.baseline)
    if args.baseline != "none":
        # Neither has an indexer.
        run = replace(run, indexer=replace(run.indexer, form="frozen"))
    if args.data is not None:
        mixture = tuple(
            item.replace(mini.CHAT_SHARDS, str(args.data / "chat")) for item in run.data.mixture
        )
        data = replace(
            run.data,
            corpus=str(args.data / "shards"),
            tokenizer=str(args.data / "tokenizer.json"),
            mixture=mixture,
        )
        run = replace(run, data=data)
    if args.try_on_cpu:
        run = _tiny(run)
    return with_overrides(run, args.set)


def _tiny(run: RunConfig) -> RunConfig:
    """Return the phase with the preset `unit` widened to the vocabulary, two steps, on the CPU."""
    text = replace(
        unit().text_config,
        vocab_size=4096,
        engram_compressed_vocab_size=4096,
        dspark_noise_token_id=4095,
        max_position_embeddings=65_536,
    )
    is_chat = any("/" in item for item in run.data.mixture)
    return replace(
        run,
        model=replace(unit(), image_token_id=4095, text_config=text),
        data=replace(run.data, train_bytes=1_000_000, validation_bytes=5_000),
        schedule=replace(run.schedule, steps=2, warmup_steps=1),
        batch_rows=2,
        micro_batch_rows=1,
        # A conversation is never cut, so its rows keep their length.
        sequence_length=4096 if is_chat else min(512, run.sequence_length // 4),
        indexer=replace(run.indexer, recall_rows=8),
        device="cpu",
        precision="fp32",
    )


def train_phase(args: argparse.Namespace, phase: str) -> None:
    """Train one phase here and save its checkpoints."""
    from finwhale.checkpoint.save import save_checkpoint
    from finwhale.train.loop import train

    run, out = phase_run(args, phase), args.out / phase
    result = train(run, out, recipe=f"recipes.mini:{phase}", resume=True)
    if run.baseline != "dense":
        for name, quantized in (("checkpoint-bf16", False), ("checkpoint", True)):
            save_checkpoint(
                result.model,
                out / name,
                quantized=quantized,
                tokenizer_file=result.data.tokenizer_file,
                overwrite=True,
            )
    (out / "done.json").write_text(
        json.dumps({"validation_bpb": result.validation_bpb, "elapsed_s": result.elapsed_s})
    )


def main() -> int:
    """Run the phases one after the other; return the exit status."""
    say = Console(highlight=False, soft_wrap=True).print
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/mini"))
    parser.add_argument("--phases", nargs="*", default=list(PHASES), choices=PHASES)
    parser.add_argument("--baseline", default="none", choices=("none", "window", "dense"))
    parser.add_argument("--data", type=Path, help="folder of shards/, tokenizer.json and chat/")
    parser.add_argument("--gpu", help="number of the GPU to use")
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE")
    parser.add_argument("--try-on-cpu", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        train_phase(args, args.inside)
        return 0
    environment = dict(os.environ)
    if args.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = args.gpu
    for phase in args.phases:
        done = args.out / phase / "done.json"
        if done.exists():
            say(f"{phase}: done before, {done.read_text()}")
            continue
        began = time.time()
        # A process of its own, so that no phase inherits another's memory or compiled graphs.
        command = [sys.executable, "-m", "recipes.train_mini", *sys.argv[1:], "--inside", phase]
        code = subprocess.run(command, env=environment, check=False).returncode
        took = time.time() - began
        if code:
            say(f"{args.out}/{phase}: failed with exit status {code} after {took:.0f} s")
            return code
        say(f"{args.out}/{phase}: {took:.0f} s, {done.read_text()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
