"""What a caller asks of the engine and what comes back: values in token ids, no text.

This file owns the sampling options and their refusals, the shape of a grammar as the engine sees
it (`Constraint`), and the increments that the engine emits. It draws nothing and schedules
nothing. A newcomer's mistake: an output is an increment, so the tokens of a choice are the `new`
of all its outputs joined. Source: spec/multimodal-serving.md sections B.7 and D.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast, get_args, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled", "error"]
Fault = Literal["model", "request", "engine"]
FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)
MAX_TOP_LOGPROBS = 20
# Signed and unsigned 64-bit seeds are both in use among clients.
_SEEDS = range(-(2**63), 2**64)


class RequestError(ValueError):
    """An option that no generation could follow.

    rows  the rows of a batch that it concerns; empty where there is no batch
    """

    def __init__(self, field: str, got: object, expected: str, *, rows: tuple[int, ...] = ()):
        """Name the field, the value and what would do."""
        super().__init__(f"{field}: got {got}, expected {expected}")
        self.field, self.got, self.expected, self.rows = field, got, expected, rows


@runtime_checkable
class Constraint(Protocol):
    """A grammar walked token by token. One object belongs to one choice of one request."""

    def mask(self) -> Tensor:
        """Return [V] bool, True where a token may come next; a stop id where the text may end."""
        ...

    def advance(self, token: int) -> None:
        """Move past `token`; raise ValueError, and stay where it was, if the mask forbids it."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether only a stop id may follow, or has followed."""
        ...

    def copy(self) -> Constraint:
        """Return an independent walker at the same place."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and what is told about them.

    max_new_tokens     0 asks for nothing but the prompt's log-probabilities
    temperature        0 is greedy, ties to the lowest id
    top_p              share of the mass that the best tokens have to reach; 1 is off
    top_k              number of best tokens that stay; 0 is off
    min_p              share of the best token's probability below which a token goes; 0 is off
    seed               None lets the engine choose one
    stop_ids           ids that end a choice; the id itself is the last token emitted
    logprobs           whether each new token carries its log-probability
    top_logprobs       alternatives beside it, 0 to 20; needs `logprobs`
    prompt_logprobs    alternatives beside each prompt token, 0 to 20; None is off
    n                  choices for one prompt
    logit_bias         what is added to the logit of an id, -inf forbids it; kept as sorted pairs
    presence_penalty   subtracted from the logit of each id that this choice has drawn, -2 to 2
    frequency_penalty  subtracted once for each time that the choice has drawn the id, -2 to 2
    constraint         a grammar at its start; the engine works on copies of it
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    n: int = 1
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        """Raise RequestError for the first field that is out of its range."""
        _check_whole("max_new_tokens", self.max_new_tokens, 0)
        _check_number("temperature", self.temperature, sys.float_info.max, "a number, 0 or more")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), 2, "a number, -2 to 2", low=-2)
        _check_number("top_p", self.top_p, 1, "a share in (0, 1]")
        if self.top_p == 0:
            raise RequestError("top_p", self.top_p, "a share in (0, 1]")
        _check_whole("top_k", self.top_k, 0)
        _check_number("min_p", self.min_p, 1, "a share in [0, 1]")
        if self.seed is not None:
            _check_whole("seed", self.seed, _SEEDS.start, _SEEDS.stop - 1)
        if not isinstance(self.logprobs, bool):
            raise RequestError("logprobs", repr(self.logprobs), "True or False")
        _check_whole("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", self.top_logprobs, "0 unless logprobs is True")
        if self.prompt_logprobs is not None:
            _check_whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        _check_whole("n", self.n, 1)
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            want = "an object with mask, advance, is_finished and copy"
            raise RequestError("constraint", type(self.constraint).__name__, want)
        # The class is frozen; these two fields are put into one form here, once.
        object.__setattr__(self, "stop_ids", _as_ids("stop_ids", self.stop_ids))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))

    @property
    def is_penalised(self) -> bool:
        """Whether a draw depends on the tokens that its choice has drawn before."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs (id, added), sorted by id."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    def check(self, vocab_size: int) -> None:
        """Raise RequestError for an id that the vocabulary does not have."""
        biased = [token for token, _ in self.bias]
        for field, ids in (("stop_ids", self.stop_ids), ("logit_bias", biased)):
            for token in ids:
                if token >= vocab_size:
                    raise RequestError(field, f"id {token}", f"ids below {vocab_size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenResult:
    """One token, and what the model thought of it.

    logprob  of the model's own distribution; None if nobody asked, and for a prompt's first token
    top      (id, logprob) of the best tokens there, best first
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """An increment of one choice of a request.

    index              which choice, 0 to n - 1
    new                tokens since the last output of this choice, possibly none
    finish_reason      None while more will come
    error              what went wrong; set exactly if the reason is "error"
    fault              of an error: "model" where its rows were not finite, "request" where what
                       the request brought along could not be followed, "engine" for all else
    prompt_logprobs    one result per prompt token, in one output of the request; otherwise None
    num_cached_tokens  prompt tokens that came from a cache
    """

    request_id: str
    index: int = 0
    new: tuple[TokenResult, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    fault: Fault | None = None
    prompt_logprobs: tuple[TokenResult, ...] | None = None
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        """Raise RequestError for an increment that contradicts itself."""
        _check_whole("index", self.index, 0)
        _check_whole("num_cached_tokens", self.num_cached_tokens, 0)
        if self.finish_reason is not None and self.finish_reason not in FINISH_REASONS:
            raise RequestError(
                "finish_reason", repr(self.finish_reason), f"one of {FINISH_REASONS}"
            )
        if (self.error is None) == (self.finish_reason == "error"):
            want = "a message exactly if finish_reason is 'error'"
            raise RequestError("error", f"{self.error!r} with {self.finish_reason!r}", want)
        if (self.error is None) != (self.fault is None):
            raise RequestError("fault", repr(self.fault), "one exactly if there is an error")

    @property
    def is_last(self) -> bool:
        """Whether this choice ends here."""
        return self.finish_reason is not None


def _check_whole(field: str, value: object, low: int, high: int | None = None) -> None:
    """Raise RequestError unless `value` is a whole number in [low, high]; True is not one."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):
        span = f"{low} or more" if high is None else f"{low} to {high}"
        raise RequestError(field, repr(value), f"a whole number, {span}")


def _check_number(field: str, value: object, high: float, want: str, *, low: float = 0) -> None:
    """Raise RequestError unless `value` is a number in [low, high]; NaN and True are not."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise RequestError(field, repr(value), want)


def _as_ids(field: str, ids: Iterable[int]) -> tuple[int, ...]:
    ids = tuple(ids)
    for token in ids:
        _check_whole(field, token, 0)
    return ids


def _as_bias(bias: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple:
    pairs = tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)
    for token, added in pairs:
        _check_whole("logit_bias", token, 0)
        is_number = isinstance(added, (int, float)) and not isinstance(added, bool)
        if not is_number or not (added == -math.inf or abs(added) <= sys.float_info.max):
            raise RequestError("logit_bias", f"{added!r} for id {token}", "a number or -inf")
    if len({token for token, _ in pairs}) < len(pairs):
        raise RequestError("logit_bias", pairs, "each id at most once")
    return tuple(sorted((token, float(added)) for token, added in pairs))
