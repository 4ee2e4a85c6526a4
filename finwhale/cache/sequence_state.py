"""All that one sequence needs between two calls, and nothing else.

| part          | rows                                   | valid for                               |
|---------------|----------------------------------------|-----------------------------------------|
| `entries`     | compressed main KV, per KV owner       | every complete group                    |
| `index_keys`  | index keys, per KV owner               | every complete group                    |
| `window`      | window KV of the last tokens, per layer| queries that follow, from `window_start`|
| `open_groups` | (content, gate) fp32, ratio-2 owners   | the unfinished group, and rollback      |
| `recent_ids`  | token ids                              | n-grams that reach back                 |

Global KV (`entries`, `index_keys`) is the part that is worth keeping on a disk; the rest can be
rebuilt from it and the token ids (`finwhale.engine.prefill`). A newcomer's mistake: counting the
decoder's windows as valid after an encoder-only prefill; `num_decoder_tokens` says how far they
reach. Source: spec/kv-cache.md section 1.1, spec/backbone.md section 3.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from finwhale.cache.rows import GrowingRows, RecentRows
from finwhale.cache.state_file import FORMAT, read_facts
from finwhale.config import LayerSpec, TextConfig, build_layer_specs
from finwhale.config.files import FileError
from finwhale.config.layers import Half


class StateError(ValueError):
    """A state that does not fit the call, the model or the bytes it is read from."""


def config_digest(config: TextConfig) -> str:
    """Return the SHA-256 of a text config: states of other geometries are refused."""
    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()


@dataclass(kw_only=True, slots=True)
class SequenceState:
    """The state of one sequence; see the table above.

    max_rollback        tokens that can be taken back after a step (draft tokens, for instance)
    num_tokens          tokens whose encoder rows and global KV are in
    num_decoder_tokens  tokens that the decoder's windows reach to; equal unless a prefill is open
    needs_replay        only global KV is here: windows must be rebuilt before anything else
    id_digests          chained SHA-256 of all token ids, of the last max_rollback + 1 lengths
    window_start        first position that a window may see: 0, or where a bounded replay began
    """

    config: TextConfig
    numerics: str
    max_rollback: int = 8
    num_tokens: int = 0
    num_decoder_tokens: int = 0
    needs_replay: bool = False
    specs: tuple[LayerSpec, ...] = ()
    window_start: dict[Half, int] = field(default_factory=dict)
    window: dict[int, RecentRows] = field(default_factory=dict)
    open_groups: dict[int, RecentRows] = field(default_factory=dict)
    entries: dict[int, GrowingRows] = field(default_factory=dict)
    index_keys: dict[int, GrowingRows] = field(default_factory=dict)
    recent_ids: RecentRows = field(default_factory=lambda: RecentRows(0))
    id_digests: list[bytes] = field(default_factory=lambda: [b""])

    def __post_init__(self) -> None:
        if self.max_rollback < 0:
            raise StateError(f"max_rollback: got {self.max_rollback}, expected 0 or more")
        self.specs = build_layer_specs(self.config)
        self.window_start = {Half.ENCODER: 0, Half.DECODER: 0}
        back = self.max_rollback
        self.recent_ids = RecentRows(self.history_tokens + back)
        for spec in self.specs:
            self.window[spec.layer_id] = RecentRows(self.config.sliding_window - 1 + back)
            if spec.owns_kv:
                self.entries[spec.layer_id] = GrowingRows()
                self.index_keys[spec.layer_id] = GrowingRows()
                if spec.ratio > 1:
                    self.open_groups[spec.layer_id] = RecentRows(spec.ratio - 1 + back)

    @property
    def history_tokens(self) -> int:
        """Earlier token ids that an n-gram can reach: 3 in the release, 0 without Engram."""
        return self.config.engram_max_ngram_size - 1 if self.config.engram_layer_ids else 0

    @property
    def is_open(self) -> bool:
        """A prefill has fed tokens that the decoder has not seen."""
        return self.num_decoder_tokens != self.num_tokens and not self.needs_replay

    def check_ready(self, call: str) -> None:
        """Raise StateError unless a step could follow."""
        if self.is_open:
            raise StateError(f"{call}: a prefill is open on this state; finish it first")
        if self.needs_replay:
            raise StateError(
                f"{call}: only global KV is here; open a prefill and replay the prefix"
            )

    def ids_digest(self, ids: list[int], before: bytes = b"") -> bytes:
        """Return the digest of `ids` behind tokens whose digest is `before`."""
        for token in ids:
            before = hashlib.sha256(before + token.to_bytes(8, "little")).digest()
        return before

    def add_ids(self, ids: list[int]) -> None:
        """Continue the chain of digests by `ids`."""
        for token in ids:
            self.id_digests.append(self.ids_digest([token], self.id_digests[-1]))
        del self.id_digests[: -(self.max_rollback + 1)]

    def rollback(self, tokens: int) -> None:
        """Take the last `tokens` tokens back; the state is then that of the shorter sequence.

        Raises StateError, and changes nothing, if rows that the shorter sequence needs are gone.
        """
        stop = self.num_tokens - tokens
        self.check_ready("rollback")
        if tokens < 0 or stop < 0:
            raise StateError(f"rollback: got {tokens} tokens of {self.num_tokens}")
        for spec in self.specs:
            first = max(self.window_start[spec.half], stop - self.config.sliding_window + 1)
            if self.window[spec.layer_id].start > min(first, stop):
                raise StateError(self._too_far(tokens, f"window rows of layer {spec.layer_id}"))
            if spec.layer_id in self.open_groups:
                group = self.open_groups[spec.layer_id]
                if group.start > stop - stop % spec.ratio and stop % spec.ratio:
                    raise StateError(self._too_far(tokens, f"open group of layer {spec.layer_id}"))
        if tokens >= len(self.id_digests):
            raise StateError(self._too_far(tokens, "digests of the shorter sequence"))
        if self.recent_ids.start > max(0, stop - self.history_tokens):
            raise StateError(self._too_far(tokens, "token ids for n-grams"))
        for rows in (*self.window.values(), *self.open_groups.values(), self.recent_ids):
            rows.truncate(stop)
        for spec in self.specs:
            if spec.owns_kv:
                self.entries[spec.layer_id].truncate(stop // spec.ratio)
                self.index_keys[spec.layer_id].truncate(stop // spec.ratio)
        del self.id_digests[len(self.id_digests) - tokens :]
        self.num_tokens = self.num_decoder_tokens = stop

    def _too_far(self, tokens: int, what: str) -> str:
        return (
            f"rollback: got {tokens} tokens, but the {what} are gone; max_rollback is "
            f"{self.max_rollback} since the last step"
        )

    def global_only(self) -> SequenceState:
        """Return a new state with this one's global KV alone: what a disk cache would hold."""
        other = SequenceState(
            config=self.config, numerics=self.numerics, max_rollback=self.max_rollback
        )
        other.num_tokens, other.needs_replay = self.num_tokens, self.num_tokens > 0
        other.id_digests = self.id_digests[-1:]
        other.entries = {layer: rows.clone() for layer, rows in self.entries.items()}
        other.index_keys = {layer: rows.clone() for layer, rows in self.index_keys.items()}
        return other

    def num_bytes(self) -> dict[str, int]:
        """Return bytes by kind in the deployed records (section 1.1), from the rows held.

        main_kv D/2 + D/16 and index_k DI/2 + DI/32 per entry, window_kv D + D/32 per row,
        open_groups 2 D fp32 per row, recent_ids 8 per id.
        """
        c = self.config
        entry = c.head_dim // 2 + c.head_dim // 16
        key = c.index_head_dim // 2 + c.index_head_dim // 32
        return {
            "main_kv": entry * sum(rows.length for rows in self.entries.values()),
            "index_k": key * sum(rows.length for rows in self.index_keys.values()),
            "window_kv": (c.head_dim + c.head_dim // 32)
            * sum(rows.stop - rows.start for rows in self.window.values()),
            "open_groups": 8
            * c.head_dim
            * sum(r.stop - r.start for r in self.open_groups.values()),
            "recent_ids": 8 * (self.recent_ids.stop - self.recent_ids.start),
        }

    def to_bytes(self) -> bytes:
        """Return the state as one safetensors blob, exact; refuses an open prefill.

        A state of global KV alone is written too: it needs its replay after loading as before.
        """
        if self.is_open:
            raise StateError("to_bytes: a prefill is open on this state; finish it first")
        tensors: dict[str, Tensor] = {}
        stops: dict[str, int] = {}
        for name, rows in self._recent_rows():
            stops[name] = rows.stop
            if rows.rows is not None:
                tensors[name] = rows.rows.contiguous()
        for kind in ("entries", "index_keys"):
            for layer, rows in getattr(self, kind).items():
                if not rows.is_empty:
                    tensors[f"{kind}.{layer}"] = rows.view().contiguous()
        facts = {
            "format": FORMAT,
            "config": config_digest(self.config),
            "numerics": self.numerics,
            "max_rollback": self.max_rollback,
            "num_tokens": self.num_tokens,
            "needs_replay": self.needs_replay,
            "id_digests": [digest.hex() for digest in self.id_digests],
            "window_start": {half.value: start for half, start in self.window_start.items()},
            "stops": stops,
            "tensors": {n: [str(t.dtype), list(t.shape)] for n, t in tensors.items()},
        }
        facts["sha256"] = _digest(facts, tensors)
        # One metadata key: the library writes several in no fixed order.
        return save_tensors(tensors, {"facts": json.dumps(facts)})

    @classmethod
    def from_bytes(cls, blob: bytes, config: TextConfig, numerics: str) -> SequenceState:
        """Return the state that `to_bytes` wrote for the same config and numerics.

        Raises StateError for damage, another format, another geometry or other numerics.
        """
        try:
            return cls._from_facts(*_read_blob(blob), config, numerics)
        except KeyError as error:
            raise StateError(f"state: its list of facts lacks {error}") from None
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"state: its parts do not fit each other ({error})") from None

    @classmethod
    def _from_facts(
        cls, facts: dict, tensors: dict[str, Tensor], config: TextConfig, numerics: str
    ) -> SequenceState:
        for name, want in (("config", config_digest(config)), ("numerics", numerics)):
            if facts.get(name) != want:
                raise StateError(f"state: {name} is {facts.get(name)!r}, this model's is {want!r}")
        state = cls(config=config, numerics=numerics, max_rollback=facts["max_rollback"])
        state.num_tokens, state.needs_replay = facts["num_tokens"], facts["needs_replay"]
        state.num_decoder_tokens = 0 if state.needs_replay else state.num_tokens
        state.id_digests = [bytes.fromhex(digest) for digest in facts["id_digests"]]
        state.window_start = {Half(half): start for half, start in facts["window_start"].items()}
        for name, rows in state._recent_rows():
            rows.stop = facts["stops"][name]
            rows.rows = tensors.get(name)
        for kind in ("entries", "index_keys"):
            for layer, rows in getattr(state, kind).items():
                if f"{kind}.{layer}" in tensors:
                    rows.stage(tensors[f"{kind}.{layer}"])
                    rows.commit()
        state._check_rows()
        return state

    def _recent_rows(self):
        yield "recent_ids", self.recent_ids
        for kind in ("window", "open_groups"):
            for layer, rows in getattr(self, kind).items():
                yield f"{kind}.{layer}", rows

    def _check_rows(self) -> None:
        """Refuse a state whose parts do not belong to `num_tokens` tokens."""
        for name, rows in self._recent_rows():
            if rows.rows is not None and rows.stop != self.num_tokens:
                raise StateError(f"state: {name} ends at {rows.stop}, expected {self.num_tokens}")
        for spec in self.specs:
            if spec.owns_kv:
                want = self.num_tokens // spec.ratio
                for kind in ("entries", "index_keys"):
                    found = getattr(self, kind)[spec.layer_id].length
                    if found != want:
                        raise StateError(
                            f"state: {kind}.{spec.layer_id} has {found} rows, expected {want}"
                        )


def _read_blob(blob: bytes) -> tuple[dict, dict[str, Tensor]]:
    size = int.from_bytes(blob[:8], "little")
    try:
        facts, _ = read_facts(blob[8 : 8 + size], "state")
        tensors = load_tensors(blob)
    except FileError as error:
        raise StateError(str(error)) from None
    except (KeyError, ValueError, SafetensorError) as error:
        raise StateError(f"state: not readable as {FORMAT} ({error})") from None
    found = {n: [str(t.dtype), list(t.shape)] for n, t in tensors.items()}
    if found != facts["tensors"] or _digest(facts, tensors) != facts["sha256"]:
        raise StateError("state: damaged, it differs from its own list and digest")
    return facts, tensors


def _digest(facts: dict, tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of the facts but for itself, and of all tensors in order of names."""
    told = {name: value for name, value in facts.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fresh_state(model, *, max_rollback: int = 8) -> SequenceState:
    """Return the empty state of a new sequence for `model`."""
    return SequenceState(
        config=model.config.text_config,
        numerics=str(model.numerics),
        max_rollback=max_rollback,
    )


def as_id_rows(ids: Tensor) -> Tensor:
    """Return ids [1, T] as rows [T, 1]."""
    return ids[0].unsqueeze(-1).to(torch.int64)
