"""Many requests at once: token ids in, increments of token ids out.

    engine = Engine(model, EngineConfig(num_blocks=512))
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=8, temperature=0), request_id="a")
    while engine.has_work:
        for output in engine.step():
            ...

Each request gets the tokens and log-probabilities that it would get alone, bit for bit, whoever
else is served (`batch_invariant`). One thread drives an engine; nothing here waits or locks.
A newcomer's mistake: reading a step as one token of every request; a step may draw none.
Source: spec/backbone.md section 3, spec/kv-cache.md sections 4.3 and 8.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import os
import platform
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version

import torch

import finwhale
from finwhale.cache.block_allocator import BlockAllocator
from finwhale.cache.block_bytes import group_bytes
from finwhale.cache.paged_pools import PagedLayout, PagedPools
from finwhale.cache.prefix_index import PrefixIndex
from finwhale.cache.prefix_key import Namespace
from finwhale.checkpoint.budget import available_memory_bytes
from finwhale.config import ConfigError
from finwhale.config.engine import EngineConfig
from finwhale.engine.hand_over import HandOver, HandOverError, decode, encode, read_sequence
from finwhale.engine.invariance import broken_promises, engine_ops
from finwhale.engine.live_rows import Work
from finwhale.engine.prefill import encoder_only_unsupported
from finwhale.engine.request import (
    Constraint,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokenResult,
)
from finwhale.engine.runner import Runner, with_ops
from finwhale.engine.sampler import LogitsError, choice_seed, sample_batch, token_logprobs
from finwhale.engine.scheduler import Scheduler
from finwhale.engine.sequence import Sequence
from finwhale.model import Backbone
from finwhale.telemetry import get_logger
from finwhale.tiers.tier import Tier

logger = get_logger("engine")
# What the bytes of a block mean; raised by whatever changes global KV for the same tokens.
_KV_VERSION = 2
# Opens the slower tier of the prefix cache for a namespace digest and a block's groups in bytes.
OpenTier = Callable[[bytes, tuple[int, ...]], Tier]


class QueueFullError(RuntimeError):
    """Too many requests wait; try again later."""


class Engine:
    """Serves one model from one set of pools; see the module's example.

    tokenizer_digest  of whoever makes the ids: prefixes are shared within one tokenizer alone
    open_tier         opens a slower tier behind the blocks in memory; the engine closes it
    """

    def __init__(
        self,
        model: Backbone,
        config: EngineConfig | None = None,
        *,
        tokenizer_digest: str = "",
        open_tier: OpenTier | None = None,
    ):
        """Allocate the pools and check the promise of equal bits.

        Raises ConfigError for settings that this model cannot be served with.
        """
        self.config = config or EngineConfig()
        _check_model(model, self.config)
        c = model.config.text_config
        try:
            ops, reads = engine_ops(
                self.config.kernels, batch_invariant=self.config.batch_invariant
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._source, self._ops = model, ops
        self.model = with_ops(model, ops)
        layout = PagedLayout(
            config=c, block_size=self.config.block_size, storage=self.config.storage
        )
        _check_memory(layout, self.config)
        # Pools are written to outside of inference mode, too.
        with torch.inference_mode(mode=False):
            self.pools = PagedPools(
                layout,
                num_blocks=self.config.num_blocks,
                num_slots=self.config.max_sequences,
                poison=self.config.poison,
            )
        self.allocator = BlockAllocator(self.config.num_blocks)
        self.namespace = Namespace(
            weights_digest=weights_digest(self.model),
            layout=f"{_KV_VERSION} {self.config.storage} {self.config.block_size} {asdict(c)}",
            # A tier outlives the process, and may be carried to another machine.
            numerics=f"{model.numerics} {reads.name} {self.config.batch_invariant} {_machine()}",
            tokenizer=tokenizer_digest,
            # A longer replay leaves other windows, so what is computed behind it differs.
            replay_mode=self.config.prefill
            if self.config.replay_windows == 1
            else f"{self.config.prefill} {self.config.replay_windows}",
        )
        self.index = self._new_index()
        self._open_tier = open_tier
        self.scheduler = Scheduler(
            self.config, self.pools, self.allocator, self.index, self._new_tier()
        )
        self.runner = Runner(self.model, self.pools, ops, reads)
        self.kernels = reads.name
        self.broken: list[str] = []
        if self.config.batch_invariant:
            self.broken = broken_promises(self.model, ops, most_rows=self.config.max_batch_tokens)
        self._sequences: dict[tuple[str, int], Sequence] = {}
        self._held: dict[str, list[Sequence]] = {}
        self._ready: list[RequestOutput] = []
        self._partial_prompts: dict[tuple[str, int], list[TokenResult]] = {}
        self._num_added = 0
        for line in self.memory_plan():
            logger.info(line)
        for name in self.broken:
            logger.warning("batch invariance does not hold on this CPU: %s", name)

    def _new_index(self) -> PrefixIndex:
        return PrefixIndex(
            self.allocator,
            self.namespace,
            self.config.block_size,
            max_blocks=None if self.config.prefix_cache else 0,
        )

    def _new_tier(self) -> Tier | None:
        if self._open_tier is None:
            return None
        return self._open_tier(self.namespace.digest(), group_bytes(self.pools.layout))

    @property
    def tier(self) -> Tier | None:
        """The slower tier of the prefix cache, if there is one."""
        return self.scheduler.tier

    def close(self) -> None:
        """Let the slower tier finish its writes and go; the engine serves on without it."""
        self._open_tier = None
        self._close_tier()

    def _close_tier(self) -> None:
        tier, self.scheduler.tier = self.scheduler.tier, None
        if tier is not None:
            tier.close()

    def memory_plan(self) -> list[str]:
        """Return what a person wants to know at the start, a line each; bytes are measured."""
        size, layout = self.pools.num_bytes(), self.pools.layout
        tokens = self.config.num_blocks * self.config.block_size
        entries = size["main"] + size["index_k"]
        slots = size["window"] + size["open"]
        snapshots = self.config.snapshot_bytes if self.config.prefix_cache else 0
        return [
            f"global KV  {entries:,} bytes for {tokens:,} tokens in {self.config.num_blocks} "
            f"blocks of {self.config.block_size}: {entries / tokens:g} bytes per token",
            f"windows    {slots:,} bytes for {self.config.max_sequences} sequences, "
            f"{layout.slot_bytes:,} each",
            f"snapshots  up to {snapshots:,} bytes, for {self.config.snapshot_lifetime_s:g} s",
            f"kernels    {self.kernels}, prefill {self.config.prefill}, storage "
            f"{self.config.storage}, batch invariant: " + self._promise(),
        ]

    def _promise(self) -> str:
        if not self.config.batch_invariant:
            return "off"
        if self.config.prefill == "bounded":
            return "no, a bounded replay depends on where a hit ended"
        return "no" if self.broken else "yes"

    @property
    def has_work(self) -> bool:
        """Whether a step could bring anything."""
        return bool(self._sequences or self._ready)

    def add(
        self,
        prompt: Tokens[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: str = "",
        hand_over: bytes | None = None,
    ) -> str:
        """Queue a request and return its id.

        prompt     token ids, at least one
        salt       requests share cached prefixes only with requests of the same salt (a tenant)
        hand_over  what `export` gave for the first tokens of `prompt`, perhaps all of them

        Raises RequestError for what could never be served, QueueFullError when too many wait.
        """
        params = params or SamplingParams()
        prompt = _as_ids(prompt)
        if request_id is None:
            taken = {name for name, _ in self._sequences}
            names = (f"request-{n}" for n in itertools.count(self._num_added))
            request_id = next(name for name in names if name not in taken)
        self._check(prompt, params, request_id, salt)
        given = None
        if hand_over is not None:
            given = self._given(hand_over, prompt, params, salt)
        # A request without a seed still gets one, so that a preemption does not change its draws.
        seed = int.from_bytes(os.urandom(8), "big") if params.seed is None else params.seed
        sequences = [
            Sequence(
                request_id=request_id,
                index=index,
                params=params,
                tokens=list(prompt),
                num_prompt=len(prompt),
                arrival=self._num_added + index,
                seed=choice_seed(seed, index),
                salt=salt,
                constraint=None if params.constraint is None else params.constraint.copy(),
                hand_over=None if index else given,
            )
            for index in range(params.n)
        ]
        self._num_added += params.n
        self._sequences |= {sequence.name: sequence for sequence in sequences}
        self.scheduler.waiting.append(sequences[0])
        # The other choices start when the first has read the prompt, and find it cached.
        self._held[request_id] = sequences[1:]
        return request_id

    def _check(self, prompt: list[int], params: SamplingParams, request_id: str, salt: str) -> None:
        c = self.model.config.text_config
        if not prompt:
            raise RequestError("prompt", "no tokens", "at least one (begin with the bos id)")
        if not 0 <= min(prompt) <= max(prompt) < c.vocab_size:
            raise RequestError(
                "prompt", f"ids {min(prompt)} to {max(prompt)}", f"0 to {c.vocab_size - 1}"
            )
        params.check(c.vocab_size)
        if not isinstance(salt, str):
            raise RequestError("salt", repr(salt), "a string")
        if params.constraint is not None:
            mask = params.constraint.mask()
            if mask.shape != (c.vocab_size,) or mask.dtype is not torch.bool:
                raise RequestError(
                    "constraint",
                    f"a mask of {tuple(mask.shape)} {mask.dtype}",
                    f"({c.vocab_size},) torch.bool, the model's vocabulary",
                )
        if any(name[0] == request_id for name in self._sequences):
            raise RequestError("request_id", repr(request_id), "an id that is not being served")
        longest = len(prompt) + params.max_new_tokens
        if longest > c.max_position_embeddings:
            raise RequestError(
                "max_new_tokens",
                f"{params.max_new_tokens} behind a prompt of {len(prompt)}",
                f"at most {c.max_position_embeddings} tokens in all (max_position_embeddings)",
            )
        if self.scheduler.num_blocks_for(longest) > self.config.num_blocks:
            raise RequestError(
                "max_new_tokens",
                f"{params.max_new_tokens} behind a prompt of {len(prompt)}",
                f"at most {self.config.num_blocks * self.config.block_size} tokens in all, or a "
                "larger engine.num_blocks",
            )
        num_waiting = self._num_waiting()
        if num_waiting + params.n > self.config.max_waiting:
            raise QueueFullError(
                f"engine.max_waiting: {num_waiting} requests wait, {self.config.max_waiting} may; "
                "try again later"
            )

    def _given(
        self, hand_over: bytes, prompt: list[int], params: SamplingParams, salt: str
    ) -> HandOver:
        if self.config.prefill == "full" or params.prompt_logprobs is not None:
            raise RequestError(
                "hand_over",
                "global KV for a request whose prompt is read whole",
                "no prompt_logprobs, and prefill 'exact' or 'bounded'",
            )
        root = self.index.root_key(salt)[-32:]
        try:
            return decode(hand_over, self.pools.layout, root=root, tokens=prompt)
        except HandOverError as error:
            want = "what export gave for these tokens, tenant and model"
            raise RequestError("hand_over", str(error), want) from None

    def export(self, request_id: str, *, index: int = 0) -> bytes:
        """Return the global KV of a choice so far, for the `hand_over` of another engine's `add`.

        The tokens to go on from are the prompt and those drawn here; the last drawn one has no
        global KV yet. The choice stays here until it is cancelled. A choice that waits gives no
        token's. Raises RequestError for an unknown one and while its windows are being replayed.
        """
        sequence = self._sequences.get((request_id, index))
        if sequence is None or sequence.num_computed < sequence.stored:
            raise RequestError(
                "request_id", repr(request_id), "one that is served and has caught up; step first"
            )
        count = sequence.num_computed
        taken = read_sequence(self.pools, sequence.blocks, sequence.slot, count)
        root = self.index.root_key(sequence.salt)[-32:]
        return encode(taken, root=root, tokens=sequence.tokens[:count])

    def _num_waiting(self) -> int:
        return len(self.scheduler.waiting) + sum(map(len, self._held.values()))

    def weights_changed(self) -> None:
        """Serve the weights that the model has by now, and forget every cached block.

        Weights may have changed in place, or have been put in the place of others, as by
        `load_state_dict(assign=True)`. Raises RuntimeError while requests are being served, whose
        rows would mix both, and ConfigError for weights that the engine cannot compute with.
        """
        if self._sequences:
            raise RuntimeError("weights_changed: requests are being served; finish them first")
        if not _is_shared(self._source, self.model):
            _check_model(self._source, self.config)
            self.model = self.runner.model = with_ops(self._source, self._ops)
        self.index.clear()
        self.scheduler.windows.clear()
        self.namespace = replace(self.namespace, weights_digest=weights_digest(self.model))
        self.index.close()
        self.index = self.scheduler.index = self._new_index()
        # What the tier holds belongs to the old weights; the new namespace does not see it.
        self._close_tier()
        self.scheduler.tier = self._new_tier()

    def cancel(self, request_id: str) -> bool:
        """End all choices of a request at once and free their memory; False if there are none."""
        own = [s for name, s in self._sequences.items() if name[0] == request_id]
        for sequence in own:
            self._end(sequence, "cancelled")
        return bool(own)

    def rollback(self, request_id: str, num_tokens: int, *, index: int = 0) -> None:
        """Take back the last `num_tokens` new tokens of a choice; it goes on from there.

        Tokens that were already handed out are drawn again, equal by the same seed.
        Raises RequestError if there are not as many.
        """
        sequence = self._sequences.get((request_id, index))
        if sequence is None or not 0 <= num_tokens <= sequence.num_new:
            held = None if sequence is None else sequence.num_new
            raise RequestError("num_tokens", num_tokens, f"0 to {held} of {request_id!r}")
        if not num_tokens:
            return
        if sequence.is_running:
            self.scheduler.preempt(sequence)
        del sequence.tokens[len(sequence.tokens) - num_tokens :]
        if sequence.params.is_penalised:
            sequence.drawn = Counter(sequence.tokens[sequence.num_prompt :])
        if sequence.params.constraint is not None:
            sequence.constraint = sequence.params.constraint.copy()
            for token in sequence.tokens[sequence.num_prompt :]:
                sequence.constraint.advance(token)

    def preempt(self, request_id: str, *, index: int = 0) -> bool:
        """Take a running choice's memory and queue it again; False if it is not running."""
        sequence = self._sequences.get((request_id, index))
        if sequence is None or not sequence.is_running:
            return False
        self.scheduler.preempt(sequence)
        return True

    def rest(self) -> float | None:
        """Give up snapshots whose lifetime is over; return the seconds until the next one's is."""
        return self.scheduler.windows.expire()

    def step(self) -> list[RequestOutput]:
        """Run one forward over whatever is due and return the increments since the last call."""
        work = self.scheduler.schedule()
        if work:
            self.runner.has_committed = False
            try:
                self._run(work)
            except BaseException:
                # Rings may hold rows that nobody counted, and logits may be lost undrawn: whoever
                # still runs begins again from its tokens, and keeps no windows of this residence.
                for sequence, _ in work if self.runner.has_committed else ():
                    if sequence.is_running:
                        sequence.exact_from = 1 << 62
                        self.scheduler.preempt(sequence)
                raise
        ready, self._ready = self._ready, []
        return ready

    def _run(self, work: list[tuple[Sequence, Work]]) -> None:
        """Run the pieces, count their rows and draw."""
        result = self.runner.run([piece for _, piece in work])
        # Rings hold the new rows now, so every sequence counts them before anything is told.
        for (sequence, piece), error in zip(work, result.errors, strict=True):
            if error is None:
                self.scheduler.computed(sequence, piece.span.stop)
        drawing: list[tuple[Sequence, torch.Tensor]] = []
        for (sequence, piece), logits, error in zip(
            work, result.logits, result.errors, strict=True
        ):
            if error is not None:
                self.scheduler.drop(sequence)
                self._end(sequence, "error", error=error, fault="model")
            elif self._guarded(sequence, self._told, sequence, piece.span.start, logits):
                drawing.append((sequence, logits[-1]))
        self._draw(drawing)

    def _guarded(self, sequence: Sequence, call: Callable, *args):
        """Return call(*args); an exception ends this sequence with an error and gives None.

        What a request brings along (a grammar, its logits) must not end the others.
        """
        try:
            return call(*args)
        except Exception as error:
            self._end_by(sequence, error)
            return None

    def _end_by(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence whose rows, options or grammar raised `error`, and no other."""
        text, fault = f"{type(error).__name__}: {error}", "engine"
        if isinstance(error, LogitsError):
            fault = "model"
        elif isinstance(error, RequestError):
            text, fault = str(error), "request"
        else:
            logger.error(
                "request %s, choice %d", sequence.request_id, sequence.index, exc_info=error
            )
        self._end(sequence, "error", error=text, fault=fault)

    def _told(self, sequence: Sequence, start: int, logits: torch.Tensor) -> bool:
        """Hand out what was computed from position `start` on; return whether to draw."""
        if sequence.wants_prompt_results:
            self._add_prompt_results(sequence, start, logits)
        if sequence.num_left:
            return False
        if not sequence.num_new:
            self.scheduler.save_windows(sequence)
            for choice in self._held.pop(sequence.request_id, ()):
                self.scheduler.queue(choice)
        if sequence.params.max_new_tokens == 0:
            self._end(sequence, "length")
            return False
        return True

    def _add_prompt_results(self, sequence: Sequence, start: int, logits) -> None:
        """Collect the log-probabilities of prompt tokens; hand them out when all are there."""
        partial = self._partial_prompts.setdefault(sequence.name, [])
        if not start:
            partial[:] = [TokenResult(token=sequence.tokens[0])]
        stop = min(start + logits.shape[0] + 1, sequence.num_prompt)
        told = sequence.tokens[start + 1 : stop]
        top = sequence.params.prompt_logprobs or 0
        partial += token_logprobs(logits[: len(told)], told, top)
        if len(partial) == sequence.num_prompt:
            sequence.prompt_results = self._partial_prompts.pop(sequence.name)
            self._emit(sequence, prompt_logprobs=tuple(sequence.prompt_results))

    def _draw(self, drawing: list[tuple[Sequence, torch.Tensor]]) -> None:
        """Draw the next token of every sequence that has logits."""
        free = [(s, logits) for s, logits in drawing if s.constraint is None]
        batches = [free] if free else []
        batches += [[(s, logits)] for s, logits in drawing if s.constraint is not None]
        while batches:
            batch = batches.pop()
            try:
                results = self._sampled(batch)
            except Exception as error:
                if len(batch) > 1:
                    # One of them is at fault; rows do not depend on each other.
                    batches += [[one] for one in batch]
                    continue
                self._end_by(batch[0][0], error)
                continue
            for (sequence, _), result in zip(batch, results, strict=True):
                self._guarded(sequence, self._take, sequence, result)

    def _sampled(self, batch: list[tuple[Sequence, torch.Tensor]]) -> list[TokenResult]:
        sequences = [sequence for sequence, _ in batch]
        return sample_batch(
            torch.stack([logits for _, logits in batch]),
            [s.params for s in sequences],
            seeds=[s.seed for s in sequences],
            indexes=[s.num_new for s in sequences],
            masks=[_mask(s) for s in sequences],
            drawn=[s.drawn for s in sequences],
        )

    def _take(self, sequence: Sequence, result: TokenResult) -> None:
        params = sequence.params
        sequence.tokens.append(result.token)
        if params.is_penalised:
            sequence.drawn[result.token] += 1
        constraint, reason = sequence.constraint, None
        is_text_done = constraint is not None and _advance(constraint, result.token)
        if result.token in params.stop_ids or is_text_done:
            reason = "stop"
        elif sequence.num_new >= params.max_new_tokens:
            reason = "length"
        if reason is None:
            self._emit(sequence, new=(result,))
        else:
            self._end(sequence, reason, new=(result,))

    def _emit(self, sequence: Sequence, **fields) -> None:
        self._ready.append(
            RequestOutput(
                request_id=sequence.request_id,
                index=sequence.index,
                num_cached_tokens=sequence.num_cached_tokens,
                **fields,
            )
        )

    def _end(self, sequence: Sequence, reason: str, **fields) -> None:
        self.scheduler.finish(sequence)
        del self._sequences[sequence.name]
        self._partial_prompts.pop(sequence.name, None)
        held = self._held.get(sequence.request_id)
        if held is not None:
            if sequence in held:
                held.remove(sequence)
            elif not sequence.index:
                # The first choice ended before it had read the prompt: the others read it.
                for choice in self._held.pop(sequence.request_id):
                    self.scheduler.queue(choice)
        self._emit(sequence, finish_reason=reason, **fields)

    def generate(
        self, prompts: Iterable[Tokens[int]], params: SamplingParams | Iterable[SamplingParams]
    ) -> list[list[list[TokenResult]]]:
        """Serve prompts to their ends; return [prompt][choice] lists of results.

        Raises RuntimeError with the message of the first request that failed; the others of this
        call are cancelled. Outputs of requests that were added before are not handed out twice:
        they are lost to `step`, so use one way or the other.
        """
        prompts = list(prompts)
        own = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        left = deque(zip(prompts, own, strict=True))
        found: dict[str, list[list[TokenResult]]] = {}
        try:
            while left or self.has_work:
                while left and self._num_waiting() + left[0][1].n <= self.config.max_waiting:
                    prompt, asked = left.popleft()
                    found[self.add(prompt, asked)] = [[] for _ in range(asked.n)]
                if left and not self.has_work:
                    raise QueueFullError(
                        f"engine.max_waiting: {self.config.max_waiting}, but a prompt asks for "
                        f"{left[0][1].n} choices"
                    )
                for output in self.step():
                    if output.request_id not in found:
                        continue
                    if output.error is not None:
                        raise RuntimeError(f"{output.request_id}: {output.error}")
                    found[output.request_id][output.index] += output.new
        except BaseException:
            for name in found:
                self.cancel(name)
            raise
        return list(found.values())


def _check_model(model: Backbone, config: EngineConfig) -> None:
    numerics = model.numerics
    is_fp32 = numerics.dtype is numerics.parameter_dtype is torch.float32
    if numerics.mode != "dequant" or not is_fp32:
        raise ConfigError(
            f"numerics: got {numerics}, expected mode 'dequant' in float32: this engine computes "
            "in fp32 over packed storage"
        )
    if not numerics.cache_rounding and config.storage == "fp4":
        raise ConfigError(
            "engine.storage: got 'fp4' for a model with cache_rounding off; use 'fp32' or turn "
            "cache_rounding on"
        )
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu" or parameter.dtype is not torch.float32:
            raise ConfigError(
                f"{name}: got {parameter.dtype} on {parameter.device}, expected torch.float32 on "
                "the CPU"
            )
    reason = encoder_only_unsupported(model.config.text_config)
    if config.prefill != "full" and reason is not None:
        raise ConfigError(f"engine.prefill: {config.prefill!r} is not possible, {reason}")


def _check_memory(layout: PagedLayout, config: EngineConfig) -> None:
    """Refuse pools that the memory cannot hold, before any is allocated."""
    blocks = config.num_blocks * layout.block_bytes
    slots = config.max_sequences * layout.slot_bytes
    available = available_memory_bytes()
    if available is not None and blocks + slots > available:
        raise ConfigError(
            f"engine: the pools need {blocks + slots:,} bytes, {available:,} are available: "
            f"{blocks:,} for {config.num_blocks} blocks (engine.num_blocks) and {slots:,} for the "
            f"windows of {config.max_sequences} sequences (engine.max_sequences), whose "
            f"sliding_window is {layout.config.sliding_window}; expected less of these"
        )


def _is_shared(model: Backbone, twin: Backbone) -> bool:
    """Return whether the twin still reads every tensor of the model and its id map."""
    held = twin.state_dict()
    return model.token_map is twin.token_map and all(
        tensor.data_ptr() == held[name].data_ptr() and tensor.dtype is held[name].dtype
        for name, tensor in model.state_dict().items()
    )


def _mask(sequence: Sequence) -> torch.Tensor | None:
    """Return the mask of a sequence's grammar, None without one; raise RequestError as it does."""
    if sequence.constraint is None:
        return None
    with _constraint_errors():
        return sequence.constraint.mask()


def _advance(constraint: Constraint, token: int) -> bool:
    """Move a grammar past `token`; return whether its text is finished."""
    with _constraint_errors():
        constraint.advance(token)
        return constraint.is_finished


@contextlib.contextmanager
def _constraint_errors() -> Iterator[None]:
    """Let what a grammar refuses, which the request brought along, be the request's error."""
    try:
        yield
    except ValueError as error:
        want = "a grammar that can be followed to its end; simplify it"
        raise RequestError("constraint", f"{type(error).__name__} ({error})", want) from error


def _as_ids(prompt: Tokens[int]) -> list[int]:
    """Return the ids as ints; a float or a truth value among them is refused."""
    ids = []
    for token in prompt:
        try:
            if isinstance(token, bool):
                raise TypeError
            ids.append(operator.index(token))
        except TypeError:
            raise RequestError("prompt", repr(token), "token ids, whole numbers") from None
    return ids


def _machine() -> str:
    """Return what decides the bits of a sum here: versions, and the instructions that are used."""
    versions = [f"finwhale {finwhale.__version__}", f"torch {torch.__version__}"]
    try:
        versions.append(f"numba {version('numba')}")
        from finwhale.kernels.products_numba import compiled_for

        versions.append(compiled_for())
    except (PackageNotFoundError, ImportError):
        versions.append("no numba")
    return f"{versions} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def weights_digest(model: Backbone) -> str:
    """Return the SHA-256 over names, shapes and values of a model's tensors and Engram's id map."""
    digest = hashlib.sha256()
    if model.token_map is not None:
        digest.update(model.token_map.detach().cpu().contiguous().numpy().tobytes())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
