"""What every protocol stands on: a chat or a completion in, events of text out.

    service = Service.of_engine(engine, tokenizer, ServerConfig())
    service.start()
    generation = await service.chat(ChatRequest(messages=[{"role": "user", "content": "hi"}]))
    async for event in generation.events():    # or: results = await generation.collect()
        ...                                    # event.deltas, .logprobs, .finish_reason
    generation.usage                           # complete now
    service.close()

It owns the life of a request: planned (finwhale/serve/planning.py has `ChatRequest`,
`CompletionRequest`, `Sampling`) and prepared in another thread, queued, read through a
`Generation`, counted and logged. It knows no HTTP and no body of any protocol; whether a client
wants a stream is the protocol's business, since here everything is one. All refusals are
`ServeError`s (finwhale/serve/errors.py), raised by `chat` and `complete` before the first event.
A newcomer's mistake: calling the engine or the tokenizer from a handler; prompts are made in
another thread, those of large bodies in another process (finwhale/serve/reading.py), so that
streams of others go on. Source: spec/multimodal-serving.md B and D.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable

from finwhale.config.server import ServerConfig
from finwhale.engine.engine import Engine
from finwhale.serve.bodies import BodyRoom
from finwhale.serve.cache_figures import cache_figures
from finwhale.serve.errors import ServeError
from finwhale.serve.generation import Generation, Usage
from finwhale.serve.grammar_queue import GrammarQueue
from finwhale.serve.metrics import Gauges, Metrics
from finwhale.serve.planning import ChatRequest, CompletionRequest, Plan
from finwhale.serve.preparation import Preparer
from finwhale.serve.reading import BodyReader
from finwhale.serve.worker import Message, ServedEngine, Worker
from finwhale.telemetry import get_logger
from finwhale.text.tokenizer import Tokenizer

logger = get_logger("serve")


class Service:
    """One model behind a worker. `start` it, then `chat` and `complete` from one event loop.

    vocab_size      rows of the model's head, V
    context_tokens  prompt and answer together, at most
    gauges          figures of the engine for the metrics, read from any thread
    """

    def __init__(
        self,
        engine: ServedEngine,
        tokenizer: Tokenizer,
        config: ServerConfig | None = None,
        *,
        vocab_size: int,
        context_tokens: int,
        gauges: Callable[[], Gauges] | None = None,
    ) -> None:
        """Take the engine; nothing else may touch it until `close`."""
        self.config = config or ServerConfig()
        self.tokenizer = tokenizer
        self.preparer = Preparer(
            tokenizer, self.config, vocab_size=vocab_size, context_tokens=context_tokens
        )
        self.reader = BodyReader(self.preparer.planner, timeout_s=self.config.body_timeout_s)
        self.grammar_queue = GrammarQueue(self.preparer)
        self._engine_gauges = gauges
        self.body_room = BodyRoom(self.config)
        self.metrics = Metrics(self._gauges)
        self.worker = Worker(
            engine,
            max_requests=self.config.max_requests,
            max_tenant_requests=self.config.max_tenant_requests,
            on_step=self.metrics.step,
        )

    @classmethod
    def of_engine(
        cls, engine: Engine, tokenizer: Tokenizer, config: ServerConfig | None = None
    ) -> Service:
        """Return the service of a real engine, whose sizes it reads."""
        text = engine.model.config.text_config
        pool_tokens = engine.config.num_blocks * engine.config.block_size

        def gauges() -> Gauges:
            # Lengths and counts alone, which another thread may read at any moment.
            scheduler, free = engine.scheduler, engine.allocator.num_free
            return {
                "running_sequences": ("Sequences in the batch.", len(scheduler.running)),
                "waiting_sequences": ("Sequences in the queue.", len(scheduler.waiting)),
                "cache_blocks": ("Blocks of the pool.", engine.config.num_blocks),
                "cache_blocks_used": (
                    "Blocks that hold rows, cached prefixes among them.",
                    engine.config.num_blocks - free,
                ),
                "preemptions_total": ("Preemptions so far.", scheduler.stats.preemptions),
                **cache_figures(engine),
            }

        return cls(
            engine,
            tokenizer,
            config,
            vocab_size=text.vocab_size,
            context_tokens=min(text.max_position_embeddings, pool_tokens),
            gauges=gauges,
        )

    def start(self) -> None:
        """Start the worker."""
        self.worker.start()

    def close(self, *, grace_s: float | None = None) -> None:
        """Refuse new requests, let running ones end within the grace time, and stop. Blocks."""
        self.reader.close()
        self.grammar_queue.close()
        self.worker.close(grace_s=self.config.shutdown_grace_s if grace_s is None else grace_s)

    async def chat(self, request: ChatRequest, *, request_id: str | None = None) -> Generation:
        """Queue a chat and return it once the engine has accepted it."""
        started_s = time.perf_counter()
        plan = await asyncio.to_thread(self.preparer.planner.chat, request)
        return await self.begin(plan, request_id=request_id, started_s=started_s)

    async def complete(
        self, request: CompletionRequest, *, request_id: str | None = None
    ) -> Generation:
        """Queue a completion and return it once the engine has accepted it."""
        started_s = time.perf_counter()
        plan = await asyncio.to_thread(self.preparer.planner.text, request)
        return await self.begin(plan, request_id=request_id, started_s=started_s)

    async def begin(
        self, plan: Plan, *, request_id: str | None = None, started_s: float | None = None
    ) -> Generation:
        """Queue what was planned and return it once the engine has accepted it.

        started_s  when the request arrived, of time.perf_counter; None: just now
        """
        started_s = time.perf_counter() if started_s is None else started_s
        request_id = request_id or new_id("chatcmpl-" if plan.reads_chat else "cmpl-")
        prepared = await self.grammar_queue.prepared(plan)
        loop = asyncio.get_running_loop()
        messages: asyncio.Queue[Message] = asyncio.Queue()

        def listener(message: Message) -> None:
            loop.call_soon_threadsafe(messages.put_nowait, message)

        endpoint = "chat" if plan.reads_chat else "completion"
        generation = Generation(
            request_id=request_id,
            tokenizer=self.tokenizer,
            readers=prepared.readers,
            usage=Usage(prompt_tokens=len(prepared.prompt)),
            messages=messages,
            cancel=self.worker.cancel,
            timeout_s=self.config.request_timeout_s,
            started_s=started_s,
            echo=prepared.echo,
            on_end=lambda ended, outcome: self._note(ended, endpoint, outcome),
            notes=prepared.notes,
        )
        self.worker.submit(
            prepared.prompt,
            prepared.params,
            request_id=request_id,
            tenant=plan.tenant,
            listener=listener,
        )
        try:
            # A step of the engine may run first, so the reader can leave while this waits.
            first = await messages.get()
        except asyncio.CancelledError:
            self.worker.cancel(request_id)
            raise
        if isinstance(first, ServeError):
            raise first
        return generation

    def _gauges(self) -> Gauges:
        own = {"requests_in_flight": ("Choices queued or running.", self.worker.num_in_flight)}
        return {**own, **(self._engine_gauges() if self._engine_gauges is not None else {})}

    def _note(self, generation: Generation, endpoint: str, outcome: str) -> None:
        """Put an ended request into the metrics and the log; no text of it."""
        metrics, usage = self.metrics, generation.usage
        seconds = time.perf_counter() - generation.started_s
        first = generation.first_token_s
        metrics.count("requests_total", endpoint=endpoint, outcome=outcome)
        metrics.count("prompt_tokens_total", usage.prompt_tokens)
        metrics.count("cached_prompt_tokens_total", usage.cached_tokens)
        metrics.observe("request_seconds", seconds)
        if first is not None:
            metrics.observe("time_to_first_token_seconds", first)
            # Choices run side by side, so the time between tokens is that of one of them.
            each = usage.completion_tokens / generation.num_choices
            if each > 1:
                metrics.observe("time_per_token_seconds", (seconds - first) / (each - 1))
        record = {
            "request_id": generation.request_id,
            "endpoint": endpoint,
            "outcome": outcome,
            "choices": generation.num_choices,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "first_token_s": None if first is None else round(first, 4),
            "seconds": round(seconds, 4),
        }
        logger.info("request %s", json.dumps(record))


def new_id(prefix: str) -> str:
    """Return a fresh id, `prefix` and 24 letters."""
    return prefix + secrets.token_hex(12)
