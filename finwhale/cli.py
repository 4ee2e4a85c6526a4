"""The `finwhale` command: one frozen dataclass per subcommand, its rooms imported when it runs.

Owns arguments, what is printed before the work starts, and the one sentence a user error costs.
It refuses nothing itself: rooms raise, `main` prints. The easy mistake: importing a room at the
top of this file; `finwhale --help` must not wait two seconds for torch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from finwhale import telemetry

PROG = "finwhale"
_MARKERS = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)


def _say(**resolved: object) -> None:
    """Print what a command resolved, before it starts."""
    print("resolved: " + ", ".join(f"{name} {value}" for name, value in resolved.items()))
    sys.stdout.flush()


def _recipe(path: str) -> Callable[[], Any]:
    """Return the function that `path` ("package.module:function") names."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"--recipe: got {path!r}, expected MODULE:FUNCTION")
    # A recipe of the user's own lies in the folder they work in.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"--recipe: no module {error.name!r}; expected MODULE:FUNCTION") from None
    recipe = getattr(module, name, None)
    if not callable(recipe):
        own = (n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name)
        known = ", ".join(sorted(own))
        raise ValueError(f"--recipe: {module_name} has no function {name!r}; it has {known}")
    return recipe


def _print_load(loaded: Any) -> None:
    """Say on standard error what was read and what was left aside."""
    report = loaded.report
    lines = [f"read {report.num_tensors} tensors, {report.payload_bytes} bytes; {report.budget}"]
    lines += [f"skipped {part}" for part in loaded.skipped]
    print("\n".join(lines), file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Print the layer table and every total of a preset or a checkpoint.

    Example: finwhale inspect flash --json
    """

    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET|PATH")] = None
    """Preset name, config.json, or a folder that holds one."""
    state: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Print instead what a generation holds: the file that `generate --state-file` writes."""
    json: bool = False
    """Print one JSON object instead of tables."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Print the tables or the object."""
        from finwhale import inspection

        if self.state is not None and self.source is None:
            inspection.show_state(self.state, as_json=self.json)
            return 0
        if self.source is None or self.state is not None:
            raise ValueError("inspect: expected PRESET|PATH or --state FILE, one of the two")
        resolved, config = inspection.resolve_config(self.source)
        if self.json:
            json.dump(inspection.to_json(resolved, config), sys.stdout, indent=1)
            print()
        else:
            inspection.show(resolved, config)
        return 0


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """Write a small random checkpoint in the released layout, with expected logits.

    Example: finwhale tiny --geometry mini --out runs/mini
    """

    geometry: str
    """Preset name, config.json, or a folder that holds one."""
    out: Path
    """Folder to write."""
    seed: int = 0
    """Seed of the weights and of the prompt."""
    bf16: bool = False
    """Write BF16 matrices instead of FP8 and FP4 (Engram tables stay FP8)."""
    prompt_tokens: int = 48
    """Length of the prompt whose logits are stored."""
    overwrite: bool = False
    """Replace a checkpoint that is already there."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Write the folder and print its report."""
        from finwhale.inspection import resolve_config

        resolved, config = resolve_config(self.geometry)
        layout = "BF16" if self.bf16 else "FP8 and FP4"
        _say(geometry=resolved, layout=layout, seed=self.seed, out=self.out)
        from finwhale.checkpoint.tiny import write_tiny

        report = write_tiny(
            config,
            self.out,
            seed=self.seed,
            quantized=not self.bf16,
            prompt_tokens=self.prompt_tokens,
            overwrite=self.overwrite,
        )
        for name, value in report.items():
            print(f"{name}: {value}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text with a checkpoint in the released layout.

    The prompt runs through the encoder half, its last tokens through the decoder half as well; each
    new token is one step on the state. Ends with layer-tokens run, state in bytes and tokens/s.

    Example: finwhale generate --model runs/demo/checkpoint --prompt "import os"
    """

    model: Path
    """Checkpoint folder with config.json, weights and tokenizer.json."""
    prompt: str
    """Text to continue."""
    max_new_tokens: int = 64
    """Stop after so many tokens, or at end-of-sentence."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    seed: int = 0
    """Seed of the sampler."""
    numerics: Literal["dequant", "release"] = "dequant"
    """dequant: fp32, no activation rounding. release: bf16 with FP8 activations, as deployed."""
    prefill: Literal["exact", "full", "bounded"] = "exact"
    """exact and full agree; bounded runs the decoder on the last window only (deviation A01)."""
    state_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Keep the state in this file, for `finwhale inspect --state`."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Load, then print the continuation as it comes."""
        _say(model=self.model, numerics=self.numerics, prefill=self.prefill, seed=self.seed)
        from finwhale.cache.state_file import write_state
        from finwhale.checkpoint.load import load_model
        from finwhale.engine.generate import GenerationStats, check_sampling, generate
        from finwhale.model import Numerics
        from finwhale.ops import FAST
        from finwhale.text.tokenizer import Tokenizer

        # The cheap refusals come first: a tokenizer is read in a moment, a model may take minutes.
        tokenizer = Tokenizer.from_file(self.model)
        ids, stop_ids = [tokenizer.bos_id, *tokenizer.encode(self.prompt)], (tokenizer.eos_id,)
        check_sampling(len(ids), self.max_new_tokens, self.temperature, self.top_p)
        if self.state_file is not None and not self.state_file.absolute().parent.is_dir():
            raise ValueError(f"--state-file: no folder {self.state_file.absolute().parent}")
        numerics = Numerics.release() if self.numerics == "release" else Numerics()
        loaded = load_model(self.model, numerics=numerics, ops=FAST)
        _print_load(loaded)
        print(self.prompt, end="", flush=True)
        stream, stats = tokenizer.stream(skip_hidden=True), GenerationStats()
        for token in generate(
            loaded.model,
            ids,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop_ids=stop_ids,
            prefill=self.prefill,
            stats=stats,
        ):
            print(stream.push(token), end="", flush=True)
            if self.state_file is not None:
                write_state(self.state_file, stats.held().to_bytes())
        print(stream.finish())
        print("\n".join(stats.lines()), file=sys.stderr)
        return 0


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Train a model from a recipe and save it in the released layout.

    Example: finwhale pretrain --recipe recipes.pretrain:demo_cpu --out runs/a --set optim.lr=2e-3
    """

    recipe: Annotated[str, tyro.conf.arg(metavar="MODULE:FUNCTION")]
    """A function that returns a RunConfig."""
    out: Path
    """Folder for run.json, metrics.jsonl, loss.png, the training state and checkpoint/."""
    set: tuple[str, ...] = ()
    """path=value overrides of the recipe, as in optim.lr=6e-4 schedule.steps=100."""
    resume: bool = False
    """Go on from the state in --out; without one, start from the beginning."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Train, then write the checkpoint."""
        from finwhale.config.run import with_overrides

        run = with_overrides(_recipe(self.recipe)(), self.set)
        changes = " ".join(self.set) or "none"
        _say(recipe=self.recipe, steps=run.schedule.steps, overrides=changes, out=self.out)
        from finwhale.checkpoint.save import save_checkpoint
        from finwhale.train.loop import train

        result = train(run, self.out, recipe=self.recipe, resume=self.resume)
        for baseline in result.baselines:
            print(f"{baseline.name}: {baseline.bits_per_byte:.4f} bits per byte")
        print(f"model: {result.validation_bpb:.4f} bits per byte, {result.elapsed_s:.0f} s")
        folder = self.out / "checkpoint"
        saved = save_checkpoint(
            result.model, folder, tokenizer_file=result.data.tokenizer_file, overwrite=True
        )
        print(f"wrote {folder}: {saved.num_tensors} tensors, {saved.payload_bytes} bytes")
        return 0


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer:
    """Learn a small byte-level BPE that keeps the released marker strings.

    Example: finwhale train-tokenizer --out runs/tokenizer.json --vocab-size 1024
    """

    out: Path
    """File to write."""
    vocab_size: int
    """Number of ids in all: markers, 256 bytes, merges."""
    files: tuple[Path, ...] = ()
    """Text files to learn from; by default the Python library's sources and documentation."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Learn and write the file."""
        from finwhale.text.train_tokenizer import train_tokenizer

        if self.files:
            texts = [file.read_text(encoding="utf-8") for file in self.files]
            origin = f"{len(texts)} files"
        else:
            from finwhale.data.stdlib_corpus import read_corpus

            corpus = read_corpus(max_train_bytes=4_000_000, max_validation_bytes=400_000)
            texts = [document.text for document in corpus.train]
            origin = f"{len(texts)} documents of the Python library"
        _say(texts=origin, vocab_size=self.vocab_size, out=self.out)
        print(f"wrote {train_tokenizer(texts, self.vocab_size, self.out)}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train, save, load and talk to a model of about 1M parameters; about five minutes.

    Example: finwhale demo --out runs/demo
    """

    out: Path = Path("runs/demo")
    """Folder for the run and its checkpoint."""
    resume: bool = False
    """Go on from the state in --out; a finished run is shown again without training."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Run the demonstration."""
        _say(out=self.out)
        from finwhale.demo import run_demo

        run_demo(self.out, resume=self.resume)
        return 0


COMMANDS: dict[str, Any] = {
    "inspect": Inspect,
    "tiny": Tiny,
    "generate": Generate,
    "pretrain": Pretrain,
    "train-tokenizer": TrainTokenizer,
    "demo": Demo,
}
_DESCRIPTION = (
    "An open, exact, readable implementation of DeepSeek-V4.1-Flash. "
    "Example: finwhale inspect flash"
)


_EXTRAS = {"tokenizers": "text", "rich": "cli", "matplotlib": "cli"}


def _sentence(error: Exception) -> str | None:
    """Return what to tell the user on one line, or None for a fault of this package.

    User errors are ours by class, and those that every room raises for bad input.
    """
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").split(".")[0]
        if name in _EXTRAS:
            return f"{name} is not installed; pip install 'finwhale[{_EXTRAS[name]}]'"
        return None
    is_ours = type(error).__module__.split(".")[0] == PROG
    if is_ours or isinstance(error, (ValueError, OSError)):
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _attempt(run: Callable[[], int], *, label: str, debug: bool) -> int:
    """Return the exit code of `run`; an error of the user's costs one sentence and code 1."""
    try:
        return run()
    except BrokenPipeError:
        # Whoever read our output has left, as `head` does; nothing may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"{label}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        sentence = None if debug else _sentence(error)
        if sentence is None:
            raise
        print(f"{label}: {sentence}", file=sys.stderr)
        return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` defaults to the process's own."""
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog=PROG, description=_DESCRIPTION, args=arguments, config=_MARKERS
    )
    names = {kind: name for name, kind in COMMANDS.items()}
    label = f"{PROG} {names[type(command)]}"
    telemetry.configure(verbose=command.debug)
    with telemetry.span(names[type(command)], telemetry.get_logger("cli")):
        return _attempt(command.run, label=label, debug=command.debug)
