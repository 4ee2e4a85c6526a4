"""A search for inputs on which the selection misses the fact that the question asks for.

Every input is fillers, one fact, its disturbances, and the question at the end; it asks whether
each owner selects the fact's entries at the position that has to answer, and whether the answer
is right. Disturbances imitate the fact or flood the top-k: near-copies with one token changed,
the same token again and again around the fact, long runs. Refused: a fact that a window of the
last token still reaches. The easy mistake: a copy with another *value* is a second answer, so a
changed value becomes a filler. Source: spec/backbone.md section 5.4.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from finwhale.data.long_tasks import Alphabet, alphabet
from finwhale.model import Backbone, Packing
from finwhale.model.selection_plan import SelectionPlan

# Copies in multiples of the top-k; 0 is the control, the input without a disturbance.
COPIES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
DEPTHS = (0.1, 0.5, 0.9)
FORMS = ("needle", "associative_recall")
CONTROL = "control"
# Tokens of one forward pass on a CPU.
_PASS_TOKENS = 4096


class FailingInputsError(ValueError):
    """A search that cannot be made; the message names the field and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRecord:
    """What happened to the examples of one setting, and the worst of them.

    kind      disturbance, or `control`; `copies` of it; `depth` of the fact, 0 first to 1 last
    recall    owner -> share of examples where an entry that holds the fact's value is selected
    touched   owner -> the same for an entry that holds any token of the fact
    accuracy  share of examples whose answer is ranked first
    tokens    the example that the fewest owners found, with its answer; ties: one answered wrong
    fact      [start, stop) of the fact in `tokens`
    """

    kind: str
    form: str
    copies: int
    depth: float
    length: int
    examples: int
    recall: dict[int, float]
    touched: dict[int, float]
    accuracy: float
    tokens: tuple[int, ...]
    fact: tuple[int, int]

    @property
    def worst_recall(self) -> float:
        """The recall of the owner that finds the fact least often."""
        return min(self.recall.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One input: tokens with the answer last, and [start, stop) of the fact."""

    tokens: tuple[int, ...]
    fact: tuple[int, int]


def _changed_key(rng: np.random.Generator, roles: Alphabet, fact: list[int], n: int):
    others = [key for key in roles.keys if key != fact[-2]]
    keys = [others[int(i)] for i in rng.integers(len(others), size=n)]
    return [[*fact[:-2], key, fact[-1]] for key in keys], [], []


def _other_fact(rng: np.random.Generator, roles: Alphabet, fact: list[int], n: int):
    copies, before, after = _changed_key(rng, roles, fact, n)
    others = [value for value in roles.values if value != fact[-1]]
    values = [others[int(i)] for i in rng.integers(len(others), size=n)]
    return [[*c[:-1], v] for c, v in zip(copies, values, strict=True)], before, after


def _changed_value(rng: np.random.Generator, roles: Alphabet, fact: list[int], n: int):
    fillers = [roles.fillers[int(i)] for i in rng.integers(len(roles.fillers), size=n)]
    return [[*fact[:-1], filler] for filler in fillers], [], []


def _repeated(token: Callable[[Alphabet, list[int]], int]):
    """Return a disturbance that puts a token n times around the fact, half of them before it."""

    def disturb(_: np.random.Generator, roles: Alphabet, fact: list[int], n: int):
        again = token(roles, fact)
        return [], [again] * (n // 2), [again] * (n - n // 2)

    return disturb


def _run(rng: np.random.Generator, roles: Alphabet, _: list[int], n: int):
    """Return one run of a filler that starts where the fact ends."""
    return [], [], [roles.fillers[int(rng.integers(len(roles.fillers)))]] * n


def _repeated_phrase(rng: np.random.Generator, roles: Alphabet, fact: list[int], n: int):
    """Return a phrase, the asked key and a fixed filler, around the fact."""
    phrase = [fact[-2], roles.fillers[int(rng.integers(len(roles.fillers)))]]
    return [], phrase * (n // 2), phrase * (n - n // 2)


# Each returns pieces for random places, and what stands directly before and after the fact.
# Only in the fact does a value follow the asked key. All copies of `changed_key` hold the right
# value, so its accuracy says little; `other_fact` is the same load with other values.
KINDS: dict[str, Callable] = {
    "changed_key": _changed_key,
    "other_fact": _other_fact,
    "changed_value": _changed_value,
    "repeated_key": _repeated(lambda roles, fact: fact[-2]),
    "repeated_value": _repeated(lambda roles, fact: fact[-1]),
    "repeated_filler": _repeated(lambda roles, fact: roles.fillers[0]),
    "repeated_phrase": _repeated_phrase,
    "run": _run,
}


def _check(kind: str, form: str, copies: float, depth: float) -> None:
    if kind not in (*KINDS, CONTROL) or form not in FORMS:
        wanted = f"a kind of {', '.join(KINDS)} and a form of {', '.join(FORMS)}"
        raise FailingInputsError(f"kind, form: got {kind!r} and {form!r}, expected {wanted}")
    if copies < 0 or not 0 <= depth <= 1:
        raise FailingInputsError(
            f"copies, depth: got {copies} and {depth}, expected at least 0 and 0 to 1"
        )


def disturbed_input(
    rng: np.random.Generator,
    *,
    kind: str,
    form: str,
    copies: int,
    depth: float,
    length: int,
    vocab: range,
    far: int,
) -> Input:
    """Return one input of exactly `length` tokens, the answer the last of them.

    form `needle`: FACT k v .. QUERY k *v*; form `associative_recall`: k v .. QUERY k *v*

    far  least distance of the fact's last token from the last token that is read

    Raises FailingInputsError if fact, disturbances and distance have no room.
    """
    _check(kind, form, copies, depth)
    roles = alphabet(vocab)
    key, value = (int(ids[int(rng.integers(len(ids)))]) for ids in (roles.keys, roles.values))
    fact = [roles.fact, key, value] if form == "needle" else [key, value]
    pieces, before, after = KINDS[kind](rng, roles, fact, copies) if copies else ([], [], [])
    core = [*before, *fact, *after]
    room = length - 3 - len(core) - sum(len(piece) for piece in pieces)
    # Fillers behind the core: with what stands after the fact they keep the distance.
    behind = max(0, far - 2 - len(after))
    if room < behind:
        raise FailingInputsError(
            f"length: got {length}, expected at least {length + behind - room} for {copies} of "
            f"{kind} and a distance of {far}; ask for fewer copies or a longer input"
        )
    at = round(depth * (room - behind))
    filler = [roles.fillers[int(i)] for i in rng.integers(len(roles.fillers), size=room)]
    places = np.sort(rng.integers(0, room + 1, size=len(pieces))).tolist()
    # A piece at the core's own place goes before it, the rest follow in order.
    body: list[int] = []
    start = done = 0
    for place, piece, is_core in sorted(
        [(place, piece, False) for place, piece in zip(places, pieces, strict=True)]
        + [(at, core, True)],
        key=lambda item: (item[0], item[2]),
    ):
        body += filler[done:place]
        if is_core:
            start = len(body) + len(before)
        body += piece
        done = place
    tokens = (*body, *filler[done:], roles.query, key, value)
    return Input(tokens=tuple(int(t) for t in tokens), fact=(start, start + len(fact)))


def failing_inputs(
    model: Backbone,
    *,
    vocab: range,
    length: int,
    form: str = "needle",
    kinds: Sequence[str] = tuple(KINDS),
    copies: Sequence[float] = COPIES,
    depths: Sequence[float] = DEPTHS,
    examples: int = 8,
    refinements: int = 0,
    batch_rows: int | None = None,
    seed: int = 0,
    sliced: bool = True,
) -> list[FailureRecord]:
    """Return one record per setting that fits, the worst first.

    Worst: the owner that finds the fact least often, then the mean over owners, then accuracy.
    Example i of every setting asks for the same fact, so settings differ by their disturbance.

    vocab        ids with the roles of `alphabet`, those the model was trained on
    length       tokens of every input, the answer among them; length - 1 are read, in one shape
    copies       disturbances in multiples of `index_topk`; a count that does not fit is left out
    refinements  further settings, each a change of depth or copies of the worst so far
    batch_rows   rows of one pass, filled up by repeating rows; None: about 4,096 tokens
    sliced       as in `selection_errors`

    Raises FailingInputsError if no setting fits. A model that fails at the control was not taught
    the task. A right answer with a recall of 0 came another way, over the windows of other layers.
    """
    for kind, multiple, depth in itertools.product(kinds, copies, depths):
        _check(kind, form, multiple, depth)
    if examples < 1:
        raise FailingInputsError(f"examples: got {examples}, expected at least 1 of a setting")
    topk = model.config.text_config.index_topk
    far = model.config.text_config.sliding_window
    tried: dict[tuple[str, int, float], FailureRecord | None] = {}
    refusals: list[str] = []

    def attempt(kind: str, count: int, depth: float) -> None:
        kind = kind if count else CONTROL
        if (kind, count, depth) in tried:
            return
        tried[kind, count, depth] = None
        setting = {"kind": kind, "form": form, "copies": count, "depth": depth, "length": length}
        try:
            inputs = [
                disturbed_input(np.random.default_rng((seed, i)), **setting, vocab=vocab, far=far)
                for i in range(examples)
            ]
        except FailingInputsError as error:
            refusals.append(str(error))
            return
        found = _selected(model, inputs, batch_rows, sliced)
        tried[kind, count, depth] = _record(setting, inputs, *found)

    for kind, depth, multiple in itertools.product(kinds, depths, copies):
        attempt(kind, round(multiple * topk), depth)
    for _ in range(refinements):
        _refine(tried, attempt)
    records = [record for record in tried.values() if record is not None]
    if not records:
        reason = refusals[0] if refusals else "kinds, copies, depths: empty; name at least one"
        raise FailingInputsError(reason)
    return sorted(records, key=_badness)


def _badness(record: FailureRecord) -> tuple[float, float, float]:
    mean = sum(record.recall.values()) / len(record.recall)
    return record.worst_recall, mean, record.accuracy


def _refine(tried: dict, attempt: Callable[[str, int, float], None]) -> None:
    """Try the first neighbour, of the worst setting that has one, which was not tried yet."""
    settings = sorted(
        (item for item in tried.items() if item[1] is not None), key=lambda item: _badness(item[1])
    )
    for (kind, count, depth), _ in settings:
        if not count:
            continue
        for near in (
            (kind, count + count // 2, depth),
            (kind, count, round(min(1.0, depth + 0.1), 3)),
            (kind, count, round(max(0.0, depth - 0.1), 3)),
            (kind, count - count // 3, depth),
        ):
            if near not in tried:
                attempt(*near)
                return


def _selected(
    model: Backbone, inputs: Sequence[Input], batch_rows: int | None, sliced: bool
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Return `_hits` of every owner, [n, 2] bool, and which answers are right, [n] bool.

    The token that answers is the last but one: the answer itself is not read.
    """
    device = model.embed.weight.device
    tokens = torch.tensor([example.tokens for example in inputs])  # [n, T + 1]
    owners = [spec for spec in model.specs if spec.owns_topk]
    length = tokens.shape[1] - 1
    size = batch_rows or max(1, min(len(inputs), _PASS_TOKENS // length))
    hits: dict[int, list] = {spec.layer_id: [] for spec in owners}
    right: list[bool] = []
    for start in range(0, len(inputs), size):
        part = inputs[start : start + size]
        batch = tokens[start + np.arange(size) % len(part)].to(device)
        ids = batch[:, :-1].contiguous()
        packing = Packing.whole(size, length, device=device)
        if device.type != "cpu":
            packing = packing.prepared({spec.ratio for spec in owners}, device)
        state = model.forward_state(ids, packing=packing)
        state.plan = None if sliced else SelectionPlan(uses_pool=True)
        with torch.no_grad():
            best = model.logits(model.hidden(ids, state=state)[:, -1]).argmax(-1)
        right += (best == batch[:, -1]).tolist()[: len(part)]
        for spec in owners:
            chosen = state.topk[spec.layer_id][:, -1].tolist()
            hits[spec.layer_id] += [
                _hits(selection, example, spec.ratio)
                for selection, example in zip(chosen[: len(part)], part, strict=True)
            ]
    return {owner: np.array(found) for owner, found in hits.items()}, np.array(right)


def _hits(chosen: list[int], example: Input, ratio: int) -> tuple[bool, bool]:
    """Return whether the chosen entries hold the fact's value, and whether any of its tokens.

    An entry m holds the tokens m * ratio to m * ratio + ratio - 1 of the document.
    """
    start, stop = example.fact
    held = {place // ratio for place in range(start, stop)} & set(chosen)
    return (stop - 1) // ratio in held, bool(held)


def _record(
    setting: dict, inputs: Sequence[Input], hits: dict[int, np.ndarray], right: np.ndarray
) -> FailureRecord:
    count = np.sum([found[:, 0] for found in hits.values()], axis=0)
    worst = inputs[min(range(len(inputs)), key=lambda i: (count[i], right[i]))]
    return FailureRecord(
        **setting,
        examples=len(inputs),
        recall={owner: float(found[:, 0].mean()) for owner, found in hits.items()},
        touched={owner: float(found[:, 1].mean()) for owner, found in hits.items()},
        accuracy=float(right.mean()),
        tokens=worst.tokens,
        fact=worst.fact,
    )
