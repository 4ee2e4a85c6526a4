"""A training run as one frozen value, and typed `path=value` overrides of it.

A recipe is a function that returns a `RunConfig`; everything that changes the mathematics of a
run is a field here, so the value written to `run.json` is the run. The number of steps is a
field and never a clock: a run that ended "after five minutes" could not be repeated.
Refused: fields that contradict each other, unknown override paths, values of another type.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from finwhale.config.model import ConfigError, ModelConfig
from finwhale.config.presets import preset


def _require(ok: bool, name: str, got: object, want: str) -> None:
    if not ok:
        raise ConfigError(f"{name}: got {got!r}, expected {want}")


def _one_of(name: str, got: str, known: tuple[str, ...]) -> None:
    _require(got in known, name, got, f"one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is read. Sizes are caps in bytes of text.

    corpus  "stdlib": the Python installation's own library. "task:NAME": generated examples (see
            finwhale.data.long_tasks). A folder of tokenised shards, or a folder of text files.
    """

    corpus: str = "stdlib"
    # Rows that a task generates for training; validation has a sixteenth of it.
    task_rows: int = 4096
    task_seed: int = 0
    # Options of the generator, as in num_pairs=16.
    task_options: tuple[str, ...] = ()
    train_bytes: int = 6_000_000
    validation_bytes: int = 200_000
    # A tokenizer.json; None trains a byte-level BPE of the model's vocabulary on the corpus.
    tokenizer: str | None = None
    # What is read beside tokenised shards, as NAME=SHARE of all tokens: a kind of generated
    # documents (finwhale.data.mixture), or a folder of conversations.
    mixture: tuple[str, ...] = ()
    # Shortest generated document; the longest fills a row.
    mixture_min_tokens: int = 128
    # How often text may be read while a mixture fills the run.
    max_epochs: float = 4.0

    def __post_init__(self) -> None:
        _require(bool(self.corpus), "data.corpus", self.corpus, "'stdlib' or a folder")
        for name in ("train_bytes", "validation_bytes"):
            _require(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "above 0")
        for option in self.task_options:
            _require("=" in option, "data.task_options", option, "NAME=NUMBER")
        _require(self.task_seed >= 0, "data.task_seed", self.task_seed, "at least 0")
        for name in ("task_rows", "mixture_min_tokens", "max_epochs"):
            _require(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Who updates which parameter, and how fast.

    scheme  "report": Muon for matrices, momentum with Sinkhorn balancing for embedding, head and
            Engram tables, AdamW for the rest. "muon_adamw": AdamW for the tables. "adamw": all.
    """

    scheme: str = "report"
    lr: float = 1e-3
    # Of AdamW; the norms' eps is the report's 1e-20.
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    # The router's matrix: "muon" as in the report, or "adamw".
    router: str = "muon"
    # Largest L2 norm of the indexers' gradients together, and of all others together; larger ones
    # are scaled down to it (D24).
    grad_clip: float = 1.0
    # Step of the routing bias against over-used experts; 0 leaves the bias alone.
    balance_rate: float = 0.001
    # Weight of the balance loss over the tokens of one row; the report's is 1e-4.
    sequence_balance: float = 1e-4

    def __post_init__(self) -> None:
        _one_of("optim.scheme", self.scheme, ("report", "muon_adamw", "adamw"))
        _one_of("optim.router", self.router, ("muon", "adamw"))
        for name in ("lr", "eps", "grad_clip"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"optim.{name}", value, "above 0 and finite")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optim.{name}", value, "at least 0 and below 1")
        for name in ("weight_decay", "balance_rate", "sequence_balance"):
            _require(getattr(self, name) >= 0, f"optim.{name}", getattr(self, name), "at least 0")


INDEXER_FORMS = (
    "frozen", "selected", "explored", "annealed", "dense_warmup", "sampled_rows", "combined",
    "dense_combined",
)  # fmt: skip
EXPLORING = ("explored", "combined", "dense_combined")
BY_ROWS = ("sampled_rows", "combined", "dense_combined")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerConfig:
    """How the indexer learns: KL to the head-summed attention of the layers it selects for.

    form  "frozen": it does not. "selected": over the selected entries. "explored": the selection
          gets `explore` random entries as well. "annealed": the selection shrinks geometrically
          from every entry to index_topk over the first `phase` of the steps. "dense_warmup": every
          entry for that phase, then "selected". "sampled_rows": over all visible entries of
          `rows` query rows per packed row, the attention itself staying sparse. "combined":
          "explored" and "sampled_rows" at once, the mean of their losses. "dense_combined": every
          entry for the first `phase` of the steps, taught on sampled rows; then "combined".
    """

    form: str = "dense_warmup"
    # Random entries per query; 0: twice index_topk.
    explore: int = 0
    phase: float = 0.5
    rows: int = 16
    # Share of these rows that ask for something: targets of documents that are not targets
    # throughout, such as the answers of generated tasks. Others are spread evenly.
    answer_rows: float = 0.0
    weight: float = 1.0
    # Whose attention teaches the indexer that builds the candidate pool, on sampled rows: "own",
    # the layers of its selection; "searchers", the layers that search the pool as well.
    pool_teacher: str = "own"
    optimizer: str = "adamw"
    lr_scale: float = 2.0
    # Query rows per packed row on which recall against the full row is measured.
    recall_rows: int = 32
    # Measure recall every so many steps, and after the last; 0: only after the last.
    recall_every: int = 0

    def __post_init__(self) -> None:
        _one_of("indexer.form", self.form, INDEXER_FORMS)
        _one_of("indexer.optimizer", self.optimizer, ("adamw", "muon"))
        _require(0 < self.phase <= 1, "indexer.phase", self.phase, "above 0 and at most 1")
        for name in ("explore", "recall_every"):
            _require(getattr(self, name) >= 0, f"indexer.{name}", getattr(self, name), "at least 0")
        idle = self.explore > 0 and self.form not in EXPLORING
        _require(not idle, "indexer.explore", self.explore, f"0 in the form {self.form}")
        share = self.answer_rows
        _require(0 <= share <= 1, "indexer.answer_rows", share, "between 0 and 1")
        idle = share > 0 and self.form not in BY_ROWS
        want = f"0 in the form {self.form}, which has no sampled rows"
        _require(not idle, "indexer.answer_rows", share, want)
        _one_of("indexer.pool_teacher", self.pool_teacher, ("own", "searchers"))
        idle = self.pool_teacher != "own" and self.form not in BY_ROWS
        want = f"own in the form {self.form}, which has no sampled rows"
        _require(not idle, "indexer.pool_teacher", self.pool_teacher, want)
        for name in ("rows", "recall_rows", "weight", "lr_scale"):
            _require(getattr(self, name) > 0, f"indexer.{name}", getattr(self, name), "above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationConfig:
    """The last part of a run in the deployed formats.

    From `start` (a fraction of the steps; 1: never) weights are read as the checkpoint stores them,
    cached rows are rounded, and Reindex layers search the candidate pool. `replay` is the share of
    rows whose windows are cut as a bounded replay would.
    """

    start: float = 1.0
    replay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("start", "replay"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"quantization.{name}", value, "between 0 and 1")
        idle = self.start == 1 and self.replay > 0
        _require(not idle, "quantization.replay", self.replay, "0 while quantization.start is 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Linear warm-up to the full rate, then down to `min_ratio` of it.

    shape  "cosine": at once, to the last step. "report": flat to `hold_until` of the steps, a
           cosine to `decay_until`, flat again.
    """

    steps: int = 1000
    warmup_steps: int = 50
    min_ratio: float = 0.1
    shape: str = "cosine"
    hold_until: float = 28 / 45
    decay_until: float = 40 / 45

    def __post_init__(self) -> None:
        _one_of("schedule.shape", self.shape, ("cosine", "report"))
        want = f"between 0 and schedule.decay_until = {self.decay_until}, that at most 1"
        ordered = 0 <= self.hold_until <= self.decay_until <= 1
        _require(ordered, "schedule.hold_until", self.hold_until, want)
        _require(self.steps > 0, "schedule.steps", self.steps, "above 0")
        want = f"between 0 and schedule.steps = {self.steps}"
        warmup = self.warmup_steps
        _require(0 <= warmup <= self.steps, "schedule.warmup_steps", warmup, want)
        _require(0 <= self.min_ratio <= 1, "schedule.min_ratio", self.min_ratio, "between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run. One step reads `batch_rows` rows of `sequence_length` tokens."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    indexer: IndexerConfig = field(default_factory=IndexerConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    # "none": the model itself. Otherwise what it is compared with, in the same loop: "window", the
    # same with no attention beyond the window; "dense", a plain transformer of equal active size.
    baseline: str = "none"
    # Folder of an earlier run, or of a checkpoint, whose weights this one starts from, with a fresh
    # optimiser.
    init_from: str | None = None
    batch_rows: int = 8
    # Rows per forward pass; a step accumulates gradients over batch_rows / micro_batch_rows passes.
    micro_batch_rows: int = 8
    sequence_length: int = 256
    # Positions whose logits exist at one time in the loss.
    loss_chunk_tokens: int = 4096
    # Round cached rows to their storage formats while training (straight-through gradients).
    cache_rounding: bool = True
    # "cpu" or "cuda". On a GPU the step is captured in CUDA graphs unless `cuda_graph` is off.
    device: str = "cpu"
    cuda_graph: bool = True
    # Activations: "fp32" or "bf16". Parameters, optimiser, router, hyper-connection coefficients
    # and softmax statistics are fp32 either way.
    precision: str = "fp32"
    seed: int = 0
    # One thread has one order of summation. With two, a product may be split otherwise while the
    # machine is busy, and a curve that must repeat bit for bit does not.
    threads: int = 1
    # Validate every so many steps, and always after the last; 0: only after the last.
    eval_every: int = 0
    # Save the training state every so many steps, and always after the last.
    save_every: int = 200
    # A loss above this many times the median of the last 64 steps stops the run; 0: never.
    spike_factor: float = 3.0

    def __post_init__(self) -> None:
        _one_of("device", self.device, ("cpu", "cuda"))
        _one_of("baseline", self.baseline, ("none", "window", "dense"))
        _one_of("precision", self.precision, ("fp32", "bf16"))
        _require(self.seed < 1 << 31, "seed", self.seed, f"below {1 << 31}")
        has_muon = self.optim.scheme != "adamw" or self.indexer.form == "frozen"
        ok = has_muon or self.indexer.optimizer == "adamw"
        _require(ok, "indexer.optimizer", self.indexer.optimizer, "adamw in optim.scheme adamw")
        ok = self.spike_factor == 0 or self.spike_factor > 1
        _require(ok, "spike_factor", self.spike_factor, "0 or above 1")
        for name in (
            "batch_rows micro_batch_rows sequence_length loss_chunk_tokens threads save_every"
        ).split():
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("eval_every", "seed"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        want = f"a divisor of batch_rows = {self.batch_rows}"
        divides = self.batch_rows % self.micro_batch_rows == 0
        _require(divides, "micro_batch_rows", self.micro_batch_rows, want)
        longest = self.model.text_config.max_position_embeddings
        want = f"at most max_position_embeddings = {longest}"
        _require(self.sequence_length <= longest, "sequence_length", self.sequence_length, want)

    def to_json(self) -> dict[str, Any]:
        """Return the whole run as plain objects; the model as its released config.json."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        plain = {k: dataclasses.asdict(v) if is_dataclass(v) else v for k, v in values.items()}
        return {"model": self.model.to_json(), **plain}


def with_overrides(run: RunConfig, settings: Iterable[str]) -> RunConfig:
    """Return `run` with each `path=value` applied, typed by the field it names.

    All are applied at once, a later one over an earlier one of the same field.
    `optim.lr=6e-4`, `data.tokenizer=none`, `model=nano` (a preset by name),
    `model.text_config.n_routed_experts=8`. Raises ConfigError with path, value and expectation.
    """
    settings, wanted = list(settings), {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set {setting}: expected path=value, as in optim.lr=6e-4")
        names = path.split(".")
        try:
            _check_path(run, names)
        except ConfigError as error:
            raise ConfigError(f"--set {setting}: {error}") from None
        group = wanted
        for name in names[:-1]:
            # A group may be replaced whole before fields of it are: `model=nano`, then one width.
            inner = group.get(name, {})
            group[name] = inner if isinstance(inner, dict) else {_WHOLE: inner}
            group = group[name]
        group[names[-1]] = text
    try:
        return _assigned(run, wanted, "")
    except ConfigError as error:
        shown = " ".join(f"--set {setting}" for setting in settings)
        raise ConfigError(f"{shown}: {error}") from None


# Key of the text that replaces a whole group.
_WHOLE = ""


def _check_path(owner: Any, names: list[str]) -> None:
    """Raise ConfigError unless `names` lead to a field."""
    for depth, name in enumerate(names):
        path = ".".join(names[: depth + 1])
        if not is_dataclass(owner):
            above = ".".join(names[:depth])
            raise ConfigError(f"{above}: is a {type(owner).__name__} and has no fields")
        known = [f.name for f in fields(owner)]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
            raise ConfigError(f"{path}: unknown field; {hint}")
        owner = getattr(owner, name)


def _assigned(owner: Any, wanted: dict[str, Any], above: str) -> Any:
    """Return `owner` with all wanted fields replaced at once.

    One after the other, the order would matter: two fields that bound each other pass a state that
    neither the old nor the new pair forbids.
    """
    changes, kinds = {}, typing.get_type_hints(type(owner))
    for name, value in wanted.items():
        path = f"{above}{name}"
        if isinstance(value, dict):
            inner = getattr(owner, name)
            if _WHOLE in value:
                inner = _parse(kinds[name], value.pop(_WHOLE), path)
            changes[name] = _assigned(inner, value, f"{path}.")
        else:
            changes[name] = _parse(kinds[name], value, path)
    return replace(owner, **changes)


def _parse(kind: Any, text: str, path: str) -> Any:
    """Return `text` read as a value of type `kind`."""
    options = [kind]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        options = list(typing.get_args(kind))
        if types.NoneType in options and text.lower() == "none":
            return None
        options.remove(types.NoneType)
    option = options[0]
    if option is ModelConfig:
        try:
            return preset(text)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
    if is_dataclass(option):
        inner = ", ".join(f"{path}.{f.name}" for f in fields(option))
        raise ConfigError(f"{path}: is a group of fields; set one of {inner}")
    if typing.get_origin(option) is tuple:
        parts = [part for part in text.strip("()[]").split(",") if part.strip()]
        return tuple(_parse_scalar(typing.get_args(option)[0], p.strip(), path) for p in parts)
    return _parse_scalar(option, text, path)


def _parse_scalar(kind: type, text: str, path: str) -> Any:
    if kind is str:
        return text
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ConfigError(f"{path}: got {text!r}, expected true or false")
    try:
        # Underscores only between digits, as in Python: 6_000_000.
        return kind(text)
    except ValueError:
        example = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{path}: got {text!r}, expected {example} ({kind.__name__})") from None
