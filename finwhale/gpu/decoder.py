"""Many sequences decoded together on a GPU: slots, blocks, buckets of rows, graphs.

    decoder = GpuDecoder(pack_backbone(model, "cuda"), max_sequences=32, num_blocks=1024)
    name = decoder.admit(state, first_token, max_new_tokens=64)
    tokens = decoder.decode([name], 16)     # [1, 16]

Takes over where a prefill ended (`SequenceState` in release numerics) and keeps everything that a
step needs on the device: the token drawn by one step is the input of the next without a look at the
host, which reads tokens once per `decode`. Rows of a batch are padded to a bucket; each bucket has
one graph, captured the first time. A sequence gets its blocks for its whole length when it is
admitted, so no step can run out of them. Refused: a cut window (bounded prefill), image tokens.
The easy mistake: `decode` counts every step it ran; who stops at an earlier token must release.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from finwhale.cache.block_allocator import BlockAllocator, NoBlockError
from finwhale.cache.paged_pools import PagedLayout, PagedPools
from finwhale.cache.paged_reads import pack_entry, pack_index, pack_window
from finwhale.cache.sequence_state import SequenceState
from finwhale.decode_kernels.head import draw_tokens
from finwhale.gpu.places import PositionTables
from finwhale.gpu.step import MAX_ROWS, DecodeStep, Launches
from finwhale.gpu.weights import GpuUnsupportedError, StepWeights
from finwhale.model import Numerics

MODES = ("graph", "eager")
# Returns the number in [0, 1) that a sequence's token `index` is drawn with.
Uniform = Callable[[int], float]


class NotFiniteError(ValueError):
    """A row's logits are not finite; the message names the sequence and the token."""


@dataclass(kw_only=True)
class _Sequence:
    """A sequence on the device. num_tokens counts those whose rows are in the pools."""

    slot: int
    blocks: list[int]
    num_tokens: int
    most_tokens: int
    num_drawn: int
    recent: list[int]
    temperature: float
    uniform: Uniform | None


class _Rows(NamedTuple):
    """Buffers of a batch that a step reads and writes in place; all on the device.

    at            [B] position plus one of the token that the next step runs on; 0 no sequence
    moves         [B] 1 for a row with a sequence
    slots         [B]; tables [B, NB]
    ids           [B] that token; recent [B, n] compressed ids, the newest first
    temperatures  [B]; uniforms [B, steps] float64
    drawn         [B, steps]; step [1] counts the steps of a `decode`
    """

    at: Tensor
    moves: Tensor
    slots: Tensor
    tables: Tensor
    ids: Tensor
    recent: Tensor
    temperatures: Tensor
    uniforms: Tensor
    drawn: Tensor
    step: Tensor


def buckets(most: int) -> tuple[int, ...]:
    """Return the batch sizes that are launched for up to `most` rows: powers of two, and `most`."""
    sizes = [1 << n for n in range(most.bit_length()) if 1 << n < most]
    return (*sizes, most)


class GpuDecoder:
    """Decodes sequences over one set of weights; see the module's example.

    steps_at_once  most steps of a `decode` call
    mode           "graph", or "eager": the same launches one by one
    invariant      launches under which a sequence's bits do not depend on the others
    keep_logits    `logits` [B, V] of the last step are kept, for who compares them
    """

    def __init__(
        self,
        weights: StepWeights,
        *,
        max_sequences: int = 32,
        num_blocks: int = 1024,
        block_size: int = 64,
        capacity_tokens: int | None = None,
        steps_at_once: int = 16,
        mode: str = "graph",
        invariant: bool = False,
        keep_logits: bool = False,
        poison: bool = False,
    ):
        """Allocate pools, tables and buffers.

        capacity_tokens  most tokens of one sequence; default: what all blocks hold
        """
        if mode not in MODES:
            raise ValueError(f"mode: got {mode!r}, expected one of {MODES}")
        if not 1 <= max_sequences <= MAX_ROWS:
            raise ValueError(f"max_sequences: got {max_sequences}, expected 1 to {MAX_ROWS}")
        self.weights, self.mode, self.invariant = weights, mode, invariant
        c, self.device = weights.config, weights.device
        if mode == "graph" and self.device.type != "cuda":
            raise GpuUnsupportedError(f"mode: 'graph' needs a CUDA device, got {self.device}")
        layout = PagedLayout(config=c, block_size=block_size, storage="fp4")
        longest = min(capacity_tokens or num_blocks * block_size, num_blocks * block_size)
        self.capacity = min(-(-longest // block_size) * block_size, c.max_position_embeddings)
        with torch.device(self.device):
            self.pools = PagedPools(
                layout, num_blocks=num_blocks, num_slots=max_sequences, poison=poison
            )
        self.places = PositionTables(self.pools, self.capacity, self.device)
        self.step = DecodeStep(weights, self.pools, max_sequences)
        self.allocator = BlockAllocator(num_blocks)
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._sequences: dict[int, _Sequence] = {}
        self._num_admitted = 0
        self.buckets = buckets(max_sequences)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._arranged: tuple[int, ...] = ()
        self.steps_at_once = steps_at_once
        self._token_map = None if weights.token_map is None else weights.token_map.cpu()
        self.logits = torch.zeros(max_sequences if keep_logits else 0, c.vocab_size).to(self.device)
        blocks_each = -(-self.capacity // block_size)
        self.rows = self._new_rows(max_sequences, blocks_each)

    def _new_rows(self, count: int, blocks_each: int) -> _Rows:
        def whole(*shape: int, dtype=torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        return _Rows(
            at=whole(count),
            moves=whole(count),
            slots=whole(count),
            tables=whole(count, blocks_each),
            ids=whole(count),
            recent=whole(count, self.weights.config.engram_max_ngram_size),
            temperatures=whole(count, dtype=torch.float32),
            uniforms=whole(count, self.steps_at_once, dtype=torch.float64),
            drawn=whole(count, self.steps_at_once),
            step=whole(1),
        )

    @property
    def num_free(self) -> int:
        """Sequences that could be admitted, as far as slots go."""
        return len(self._free_slots)

    def num_blocks_for(self, tokens: int) -> int:
        """Return the blocks of a sequence of so many tokens."""
        return -(-tokens // self.pools.layout.block_size)

    def num_bytes(self) -> dict[str, int]:
        """Return bytes on the device by kind, pools as allocated."""
        return {"weights": self.weights.num_bytes()} | self.pools.num_bytes()

    def admit(
        self,
        state: SequenceState,
        next_token: int,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        uniform: Uniform | None = None,
    ) -> int:
        """Copy a sequence's state to the device and return its name.

        state           after a finished prefill in release numerics; it is not changed
        next_token      what was drawn behind it: the first step runs on this token
        max_new_tokens  tokens that steps may draw after it
        uniform         number of a token among those that steps draw, from 0, to [0, 1)

        Raises NoBlockError when slots or blocks are out, GpuUnsupportedError for a state that a
        step cannot go on from.
        """
        total = state.num_tokens + max_new_tokens
        self._check(state, next_token, total)
        if temperature > 0 and uniform is None:
            raise ValueError("uniform: got none, expected numbers to draw with at temperature > 0")
        needed = self.num_blocks_for(total)
        if not self._free_slots or self.allocator.num_free < needed:
            raise NoBlockError(
                f"admit: {len(self._free_slots)} slots and {self.allocator.num_free} blocks are "
                f"free, the sequence needs 1 and {needed}; release others first"
            )
        slot = self._free_slots.pop()
        blocks = [self.allocator.allocate() for _ in range(needed)]
        try:
            self._copy(state, slot, blocks)
        except BaseException:
            self._free_slots.append(slot)
            for block in blocks:
                self.allocator.release(block)
            raise
        recent = state.recent_ids.rows
        earlier = [] if recent is None else recent[:, 0].tolist()
        name, self._num_admitted = self._num_admitted, self._num_admitted + 1
        self._sequences[name] = _Sequence(
            slot=slot,
            blocks=blocks,
            num_tokens=state.num_tokens,
            most_tokens=total,
            num_drawn=0,
            recent=[*earlier, next_token],
            temperature=temperature,
            uniform=uniform,
        )
        return name

    def _check(self, state: SequenceState, next_token: int, total: int) -> None:
        c = self.weights.config
        state.check_ready("admit")
        if state.config != c or state.numerics != str(Numerics.release()):
            raise GpuUnsupportedError(f"state: of another model, or numerics {state.numerics}")
        if any(state.window_start.values()):
            raise GpuUnsupportedError(
                "state: its windows are cut (a bounded prefill); expected 'exact' or 'full'"
            )
        if not 0 <= next_token < c.vocab_size:
            raise ValueError(f"next_token: got {next_token}, expected 0 to {c.vocab_size - 1}")
        if not 0 < state.num_tokens < total <= self.capacity:
            raise GpuUnsupportedError(
                f"tokens: got {state.num_tokens} and {total} at the end, expected at least 1 and "
                f"at most {self.capacity} (capacity_tokens)"
            )

    def _copy(self, state: SequenceState, slot: int, blocks: list[int]) -> None:
        """Pack the rows of a state into the pools. Values are rounded ones, so codes are exact."""
        layout = self.pools.layout
        table = torch.tensor(blocks, device=self.device)
        for spec in layout.specs:
            layer, kept = spec.layer_id, state.window[spec.layer_id]
            if kept.rows is not None:
                at = torch.arange(kept.start, kept.stop, device=self.device)
                rows = slot * layout.ring_rows + at % layout.ring_rows
                self.pools.window[layer][rows] = pack_window(kept.rows.to(self.device), "fp4")
            if not spec.owns_kv:
                continue
            per_block, stored = layout.entries_per_block(spec), state.entries[layer]
            if not stored.is_empty:
                entry = torch.arange(stored.length, device=self.device)
                rows = table[entry // per_block] * per_block + entry % per_block
                entries, keys = stored.view(), state.index_keys[layer].view()
                self.pools.main[layer][rows] = pack_entry(entries.to(self.device), "fp4")
                self.pools.index_k[layer][rows] = pack_index(keys.to(self.device), "fp4")
            if spec.ratio > 1 and state.num_tokens % spec.ratio:
                # At ratio 2 an open group is one row, the last one.
                last = state.open_groups[layer].last(state.num_tokens - 1)
                assert last is not None
                self.pools.open[layer][slot] = last[-1].to(self.device)

    def release(self, name: int) -> None:
        """Forget a sequence and free its slot and blocks."""
        sequence = self._sequences.pop(name)
        self._free_slots.append(sequence.slot)
        for block in sequence.blocks:
            self.allocator.release(block)
            self.pools.forget_block(block)
        self.pools.forget_slot(sequence.slot)
        self._arranged = ()

    def num_left(self, name: int) -> int:
        """Return how many tokens steps may still draw for a sequence."""
        sequence = self._sequences[name]
        return sequence.most_tokens - sequence.num_tokens

    @torch.no_grad()
    def decode(self, names: Sequence[int], steps: int) -> Tensor:
        """Run `steps` steps of these sequences and return the drawn ids [len(names), steps].

        The only wait for the device is the copy of the result. Sequences that are not named stay
        as they are. Raises NotFiniteError; the sequences are then good for `release` alone.
        """
        left = min((self.num_left(name) for name in names), default=0)
        if len(set(names)) != len(names) or not 1 <= steps <= min(self.steps_at_once, left):
            raise ValueError(
                f"decode: got {len(names)} sequences and {steps} steps, expected distinct ones "
                f"and 1 to {min(self.steps_at_once, left)} steps"
            )
        bucket = next(size for size in self.buckets if size >= len(names))
        self._prepare(bucket)
        self._arrange(tuple(names), bucket, steps)
        for _ in range(steps):
            self._run(bucket)
        drawn = self.rows.drawn[: len(names), :steps].to("cpu", copy=True)
        for name, own in zip(names, drawn.tolist(), strict=True):
            sequence = self._sequences[name]
            sequence.recent = [*sequence.recent, *own][-self.rows.recent.shape[1] :]
            sequence.num_tokens += steps
            sequence.num_drawn += steps
        if (drawn < 0).any():
            row, step = (drawn < 0).nonzero()[0].tolist()
            raise NotFiniteError(f"logits of sequence {names[row]} are not finite at step {step}")
        return drawn

    def force(self, name: int, token: int) -> None:
        """Replace the token that a sequence's next step runs on (teacher forcing)."""
        self._sequences[name].recent[-1] = token
        self._arranged = ()

    def _arrange(self, names: tuple[int, ...], bucket: int, steps: int) -> None:
        """Write the buffers of a batch; who goes on unchanged has them on the device already."""
        rows, sequences = self.rows, [self._sequences[name] for name in names]
        rows.step.zero_()
        if any(s.temperature > 0 for s in sequences):
            numbers = [
                [0.0 if s.uniform is None else s.uniform(s.num_drawn + n) for n in range(steps)]
                for s in sequences
            ]
            rows.uniforms[: len(names), :steps] = torch.tensor(numbers, dtype=torch.float64).to(
                self.device
            )
        # The bucket belongs to the arrangement: other rows of it must stand nowhere.
        if self._arranged == (bucket, *names):
            return
        self._arranged = (bucket, *names)
        n, pad = rows.recent.shape[1], self.weights.pad_id
        values = {name: torch.zeros_like(getattr(rows, name), device="cpu") for name in _FIXED}
        for row, s in enumerate(sequences):
            values["at"][row] = s.num_tokens + 1
            values["moves"][row] = 1
            values["slots"][row] = s.slot
            values["tables"][row, : len(s.blocks)] = torch.tensor(s.blocks)
            values["ids"][row] = s.recent[-1]
            values["temperatures"][row] = s.temperature
            last = torch.tensor(s.recent[-n:])
            if self._token_map is not None:
                last = self._token_map[last]
            values["recent"][row] = pad
            values["recent"][row, : len(last)] = last.flip(0)
        for name, value in values.items():
            getattr(rows, name).copy_(value)

    def _launches(self, bucket: int) -> Launches:
        if not self.invariant:
            return Launches()
        return Launches.chosen(bucket, self.device, invariant=True)

    def _step(self, bucket: int) -> None:
        """Run one step of the first `bucket` rows and make their buffers those of the next."""
        rows, step = self.rows, self.step
        step.launches = self._launches(bucket)
        at, ids, recent = rows.at[:bucket], rows.ids[:bucket], rows.recent[:bucket]
        places = self.places.places(at, rows.slots[:bucket], rows.tables[:bucket])
        step.begin(ids, recent, places)
        logits = step.head(step.hidden())
        number = rows.step.expand(bucket, 1)
        uniforms = rows.uniforms[:bucket].gather(1, number).squeeze(1)
        tokens = draw_tokens(logits, rows.temperatures[:bucket], uniforms)
        rows.drawn[:bucket].scatter_(1, number, tokens.unsqueeze(1))
        ids.copy_(tokens)
        token_map = self.weights.token_map
        if token_map is not None:
            recent.copy_(torch.cat((token_map[tokens].unsqueeze(1), recent[:, :-1]), dim=1))
        at.add_(rows.moves[:bucket])
        rows.step.add_(1)
        if len(self.logits):
            self.logits[:bucket].copy_(logits)

    def _run(self, bucket: int) -> None:
        if self.mode == "graph":
            self._graphs[bucket].replay()
        else:
            self._step(bucket)

    @torch.no_grad()
    def _prepare(self, bucket: int) -> None:
        """Capture the bucket's graph if there is none yet; its rows stand nowhere meanwhile."""
        if self.mode != "graph" or bucket in self._graphs:
            return
        self._arranged = ()
        for buffer in self.rows:
            buffer.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Twice: the first call compiles kernels and makes what libraries keep.
            for _ in range(2):
                self.rows.step.zero_()
                self._step(bucket)
        torch.cuda.current_stream().wait_stream(side)
        self.rows.step.zero_()
        graph = torch.cuda.CUDAGraph()
        # Graphs run one after the other, so they may share memory; results lie in own buffers.
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._step(bucket)
        self._graphs[bucket] = graph


# Buffers that depend on who is in the batch.
_FIXED = ("at", "moves", "slots", "tables", "ids", "recent", "temperatures")
