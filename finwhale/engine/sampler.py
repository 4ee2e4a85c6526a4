"""From logits to one token id, and the log-probabilities that are told about it.

A draw is a function of one row of logits, the options, a seed, the token's number and, with a
penalty, the tokens drawn before. It depends on nothing else: not on neighbours in a batch, on
threads, on chunks or on what was preempted. So its uniform number comes from a hash and not from a
generator with a state, and each drawn row is worked on alone, on the CPU, in float64. A newcomer's
mistake: log-probabilities are the model's own, of the raw logits; temperature, bias, penalties,
mask and the cuts (top-k, top-p, min-p) do not show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from finwhale.engine.request import RequestError, SamplingParams, TokenResult

# A nucleus is seldom wider than this; a flat row is searched in growing slices.
_FIRST_SLICE = 256
NOTHING_DRAWN: Mapping[int, int] = MappingProxyType({})


class LogitsError(ValueError):
    """Logits that no token can be drawn from.

    rows  their positions in the batch
    """

    def __init__(self, rows: Sequence[int]):
        """Name the rows, so that a caller can fail these and keep the others."""
        self.rows = tuple(rows)
        super().__init__(
            f"logits: rows {list(self.rows)} are not finite, expected finite numbers; "
            "look for the first layer whose output is not"
        )


def uniform(seed: int, index: int) -> float:
    """Return the number in [0, 1) that token `index` of a choice is drawn with.

    u = (first 8 bytes of SHA-256 of the text "seed:index", big end first, without the last 11
    bits) / 2^53, so all of u's bits are uniform and u never rounds to 1.
    """
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of choice 0 to n - 1; choice 0 has the seed itself, as a request alone."""
    if not choice:
        return seed
    digest = hashlib.sha256(f"choice:{seed}:{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def draw(
    logits: Tensor,
    params: SamplingParams,
    *,
    seed: int,
    index: int,
    mask: Tensor | None = None,
    drawn: Mapping[int, int] = NOTHING_DRAWN,
) -> int:
    """Return the id of token number `index` of a choice.

    x = logits + bias - frequency_penalty * count - presence_penalty * (count > 0), with count that
    of the id in `drawn`, -inf outside the mask;  w = exp((x - max x) / temperature) in float64
    kept: the top_k best of w; of these the fewest best whose mass reaches top_p of theirs, at
    least one; of these w >= min_p * max w. Equal w rank by lowest id.
    id: the first in id order whose running sum of kept w exceeds u * (sum of kept w)

    logits  [V] fp32, finite
    mask    [V] bool, True allowed; None allows all
    drawn   {id: how often the choice has drawn it}, without its prompt; read with a penalty alone
    Temperature 0 returns the best x, ties to the lowest id, whatever the cuts.

    Raises LogitsError for logits that are not finite, RequestError if bias and mask leave no id.
    """
    return _draw_row(logits, params, seed, index, mask, drawn, row=0, known_finite=False)


def sample_batch(
    logits: Tensor,
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int],
    indexes: Sequence[int],
    masks: Sequence[Tensor | None] | None = None,
    drawn: Sequence[Mapping[int, int]] | None = None,
) -> list[TokenResult]:
    """Return one token per row, each equal to `draw` of that row alone.

    logits   [B, V] fp32
    seeds    seed of each row's choice
    indexes  number of the token in its choice
    masks    [V] bool or None for each row; None for no mask at all
    drawn    {id: how often each row's choice has drawn it}; None where no row has a penalty

    Raises LogitsError and RequestError, both with `rows`: without these rows the call succeeds.
    """
    masks = [None] * len(params) if masks is None else masks
    drawn = [NOTHING_DRAWN] * len(params) if drawn is None else drawn
    lengths = {len(logits), len(params), len(seeds), len(indexes), len(masks), len(drawn)}
    if len(lengths) != 1:
        raise ValueError(f"batch: got lengths {sorted(lengths)}, expected one length for all")
    if not len(logits):
        return []
    _check_finite(logits)
    tokens = [0] * len(params)
    plain = [
        row
        for row, (one, mask) in enumerate(zip(params, masks, strict=True))
        if _is_argmax(one, mask)
    ]
    if plain:
        rows = logits if len(plain) == len(params) else logits[plain]
        for row, token in zip(plain, rows.argmax(dim=-1).tolist(), strict=True):
            tokens[row] = token
    refused: list[RequestError] = []
    for row in sorted(set(range(len(params))) - set(plain)):
        try:
            tokens[row] = _draw_row(
                logits[row],
                params[row],
                seeds[row],
                indexes[row],
                masks[row],
                drawn[row],
                row,
                True,
            )
        except RequestError as error:
            refused.append(error)
    if refused:
        first, rows = refused[0], tuple(row for error in refused for row in error.rows)
        raise RequestError(first.field, first.got, first.expected, rows=rows)
    results = [TokenResult(token=token) for token in tokens]
    for row, one in enumerate(params):
        if one.logprobs:
            results[row] = _result(logits[row], tokens[row], one.top_logprobs)
    return results


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int = 0) -> list[TokenResult]:
    """Return the model's own log-probability of each token, and the `top` best beside it.

    logprob = x[token] - max x - log sum exp(x - max x)

    logits  [B, V] fp32, raw: before temperature, bias, mask and cuts
    tokens  B ids
    The sums are float64, row by row in id order, and the results are rounded to fp32; so a row's
    numbers do not depend on its batch. Equal logits rank by lowest id.
    """
    if len(logits) != len(tokens):
        raise ValueError(f"tokens: got {len(tokens)}, expected {len(logits)}, one for each row")
    if len(logits):
        _check_finite(logits)
    return [_result(row, token, top) for row, token in zip(logits, tokens, strict=True)]


_LEFT = "at least one id that mask and bias allow"


def _check_finite(logits: Tensor) -> None:
    """Raise LogitsError that names the rows of [B, V] that hold NaN or an infinity."""
    # NaN and infinities survive every sum, so one fast pass clears a sound batch. A sum of sound
    # logits may overflow; then the elements decide.
    if torch.isfinite(logits.sum(dim=-1)).all():
        return
    bad = ~torch.isfinite(logits).all(dim=-1)
    if bad.any():
        raise LogitsError(bad.nonzero()[:, 0].tolist())


def _is_argmax(params: SamplingParams, mask: Tensor | None) -> bool:
    """Return whether the draw is the largest raw logit."""
    is_raw = mask is None and not params.bias and not params.is_penalised
    return params.temperature == 0 and is_raw


def _draw_row(logits, params, seed, index, mask, drawn, row, known_finite) -> int:
    """Draw from one row [V]; `row` is its position, for errors."""
    if not known_finite:
        _check_finite(logits[None])
    if _is_argmax(params, mask):
        return int(logits.argmax())
    x = _allowed(logits, params, mask, drawn, row)
    if params.temperature == 0:
        return int(x.argmax())
    weights = ((x - x.max()) / params.temperature).exp()
    ids = _kept(weights, params)
    weights = weights if ids is None else weights[ids]
    # cumsum runs in order on a CPU, so its last element is a sum that no thread count changes.
    mass = weights.cumsum(0)
    target = uniform(seed, index) * mass[-1]
    place = int(torch.searchsorted(mass, target, right=True))
    return place if ids is None else int(ids[place])


def _allowed(
    logits: Tensor,
    params: SamplingParams,
    mask: Tensor | None,
    drawn: Mapping[int, int],
    row: int,
) -> Tensor:
    """Return [V] float64 on the CPU: penalised and biased logits, -inf where the mask forbids."""
    x = logits.to("cpu", torch.float64, copy=True)
    if params.is_penalised and drawn:
        counts = torch.tensor(list(drawn.values()), dtype=torch.float64)
        x[list(drawn)] -= params.presence_penalty + params.frequency_penalty * counts
    for token, added in params.bias:
        if token >= len(x):
            raise RequestError("logit_bias", f"id {token}", f"ids below {len(x)}", rows=(row,))
        x[token] += added
    if mask is not None:
        if mask.shape != x.shape or mask.dtype != torch.bool:
            got = f"{tuple(mask.shape)} {mask.dtype}"
            raise ValueError(f"mask: got {got}, expected {tuple(x.shape)} torch.bool")
        x.masked_fill_(~mask.to("cpu"), -torch.inf)
    if x.max() == -torch.inf:
        field = "logit_bias" if mask is None else "constraint"
        raise RequestError(field, "no id left", _LEFT, rows=(row,))
    return x


def _kept(weights: Tensor, params: SamplingParams) -> Tensor | None:
    """Return the ids that the cuts keep, in id order; None for all of them."""
    ids = None
    if 0 < params.top_k < len(weights) or params.top_p < 1:
        ids = _nucleus(weights, params)
    if params.min_p > 0:
        # The best weight is exp(0) = 1.
        enough = weights >= params.min_p
        ids = enough.nonzero()[:, 0] if ids is None else ids[enough[ids]]
    return ids


def _nucleus(weights: Tensor, params: SamplingParams) -> Tensor:
    """Return the ids that top-k and top-p keep, in id order."""
    V = len(weights)
    limit = min(params.top_k or V, V)
    if limit < V:
        best = best_ids(weights, limit)
        if params.top_p < 1:
            mass = weights[best].cumsum(0)
            best = best[: _reach(mass, params.top_p * mass[-1])]
        return best.sort().values
    needed, width = params.top_p * weights.cumsum(0)[-1], min(_FIRST_SLICE, V)
    while True:
        best = best_ids(weights, width)
        mass = weights[best].cumsum(0)
        if mass[-1] >= needed or width == V:
            return best[: _reach(mass, needed)].sort().values
        width = min(8 * width, V)


def _reach(mass: Tensor, needed: Tensor) -> int:
    """Return how many terms of the running sums `mass` it takes to reach `needed`, at least 1."""
    return int(torch.searchsorted(mass, needed)) + 1


def best_ids(values: Tensor, count: int) -> Tensor:
    """Return [min(count, V)] ids of the largest of `values` [V], best first, ties to lowest id.

    A full stable sort would say the same; this one sorts what reaches the last place only.
    """
    count = min(count, len(values))
    if not count:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    last = values.topk(count).values[-1]
    ids = (values >= last).nonzero()[:, 0]
    order = values[ids].sort(descending=True, stable=True).indices
    return ids[order[:count]]


def _result(logits: Tensor, token: int, top: int) -> TokenResult:
    """Return log-probabilities of one finite row [V]."""
    if not 0 <= token < len(logits):
        raise ValueError(f"tokens: got id {token}, expected 0 to {len(logits) - 1}")
    x = logits.to("cpu", torch.float64)
    x = x - x.max()
    logprobs = (x - x.exp().cumsum(0)[-1].log()).float()
    best = best_ids(x, top)
    pairs = tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True))
    return TokenResult(token=token, logprob=float(logprobs[token]), top=pairs)
