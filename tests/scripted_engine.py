"""An engine that says what a test wrote down, a byte-level tokenizer, and a server on loopback.

The engine has the shape of `finwhale.serve.worker.ServedEngine` and obeys what a request brings
along: stop ids, limits and constraints. It knows no model, so answers are the test's own words.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import openai

from finwhale.config.server import ServerConfig
from finwhale.engine.request import RequestError, RequestOutput, SamplingParams, TokenResult
from finwhale.serve.application import create_application
from finwhale.serve.exchange import ApiKeys
from finwhale.serve.service import Service
from finwhale.serve.web_server import bind, web_server
from finwhale.text.prompt import Segment, encode_segment
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer

VOCAB_SIZE = MIN_VOCAB_SIZE
CONTEXT_TOKENS = 4096


USER = [{"role": "user", "content": "say"}]
THINKING_OFF = {"thinking": {"type": "disabled"}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def byte_tokenizer(folder) -> Tokenizer:
    """One token for each byte and one for each marker."""
    return Tokenizer.from_file(train_tokenizer(["ab ab"], VOCAB_SIZE, folder / "tokenizer.json"))


def answer_ids(tokenizer: Tokenizer, *parts: str, end: bool = True) -> list[int]:
    """Ids of an answer: parts that are markers become marker ids."""
    ids = []
    for part in parts:
        ids += encode_segment(tokenizer, Segment(part, part in tokenizer.markers))
    return [*ids, tokenizer.eos_id] if end else ids


@dataclass
class _Said:
    request_id: str
    index: int
    params: SamplingParams
    left: list[int]
    num_prompt: int
    cached: int
    constraint: object
    prompt: list[int]
    num_told: int = 0


@dataclass
class ScriptedEngine:
    """`script(prompt, index)` gives the ids of a choice; each step says one of each.

    step_s  seconds of a step, for tests of clients that leave
    """

    script: Callable[[list[int], int], Sequence[int]]
    step_s: float = 0.0
    added: list[tuple[list[int], SamplingParams, str]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_failures: int = 0
    _running: dict[tuple[str, int], _Said] = field(default_factory=dict)
    _ready: list[RequestOutput] = field(default_factory=list)
    _seen: dict[str, list[list[int]]] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ready)

    def add(self, prompt, params=None, *, request_id=None, salt=""):
        params = params or SamplingParams()
        params.check(VOCAB_SIZE)
        if not 0 <= min(prompt) <= max(prompt) < VOCAB_SIZE:
            raise RequestError("prompt", max(prompt), f"ids below {VOCAB_SIZE}")
        if len(prompt) + params.max_new_tokens > CONTEXT_TOKENS:
            raise RequestError("max_new_tokens", params.max_new_tokens, "less")
        self.added.append((list(prompt), params, salt))
        seen = self._seen.setdefault(salt, [])
        # A prompt that this tenant has asked before is cached but for its last token.
        cached = len(prompt) - 1 if list(prompt) in seen else 0
        seen.append(list(prompt))
        for index in range(params.n):
            self._running[request_id, index] = _Said(
                request_id=request_id,
                index=index,
                params=params,
                left=list(self.script(list(prompt), index)),
                num_prompt=len(prompt),
                cached=cached,
                constraint=None if params.constraint is None else params.constraint.copy(),
                prompt=list(prompt),
            )
        return request_id

    def cancel(self, request_id):
        self.cancelled.append(request_id)
        own = [name for name in self._running if name[0] == request_id]
        for name in own:
            self._end(self._running[name], "cancelled")
        return bool(own)

    def rest(self):
        return None

    def step(self):
        if self.step_s:
            time.sleep(self.step_s)
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("a planted failure")
        for said in list(self._running.values()):
            self._say(said)
        ready, self._ready = self._ready, []
        return ready

    def _say(self, said):
        if said.params.prompt_logprobs is not None and not said.num_told and not said.index:
            told = [TokenResult(token=said.prompt[0])]
            told += [TokenResult(token=t, logprob=-0.25) for t in said.prompt[1:]]
            self._ready.append(
                RequestOutput(request_id=said.request_id, prompt_logprobs=tuple(told))
            )
        if not said.params.max_new_tokens:
            self._end(said, "length")
            return
        token = said.left.pop(0) if said.left else said.params.stop_ids[0]
        if said.constraint is not None:
            try:
                said.constraint.advance(token)
            except ValueError as error:
                # A token that the mask forbids is this engine's own fault.
                fault = "request" if isinstance(error, RequestError) else "engine"
                self._end(said, "error", error=str(error), fault=fault)
                return
        said.num_told += 1
        asked = said.params
        # Log-probabilities that a test can know: -1, -2, ... by place.
        logprob = -float(said.num_told) if asked.logprobs else None
        top = tuple((other, logprob - 1.0) for other in range(3, 3 + asked.top_logprobs))
        new = (TokenResult(token=token, logprob=logprob, top=top),)
        if token in asked.stop_ids:
            self._end(said, "stop", new=new)
        elif said.num_told >= asked.max_new_tokens:
            self._end(said, "length", new=new)
        else:
            self._emit(said, new=new)

    def _emit(self, said, **fields):
        self._ready.append(
            RequestOutput(
                request_id=said.request_id,
                index=said.index,
                num_cached_tokens=said.cached,
                **fields,
            )
        )

    def _end(self, said, reason, **fields):
        del self._running[said.request_id, said.index]
        self._emit(said, finish_reason=reason, **fields)


def scripted_service(tokenizer: Tokenizer, engine: ScriptedEngine, **settings) -> Service:
    """A service over `engine`; settings are those of ServerConfig."""
    settings = {"model_names": ("finwhale", "deepseek-flash"), **settings}
    return Service(
        engine,
        tokenizer,
        ServerConfig(**settings),
        vocab_size=VOCAB_SIZE,
        context_tokens=CONTEXT_TOKENS,
    )


@contextmanager
def running(service: Service, keys: ApiKeys | None = None, **options) -> Iterator[str]:
    """Serve on a free loopback port in a thread; give the address without a path.

    options  of create_application, such as routes
    """
    application = create_application(service, keys, **options)
    listener = bind("127.0.0.1", 0)
    server = web_server(application, service)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive(), "the server did not stop"


class World:
    """One server for the module; a test sets what the engine says next."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.parts = ("hello",)
        self.engine = ScriptedEngine(lambda prompt, index: self.ids(index))
        self.service = scripted_service(tokenizer, self.engine, keep_alive_s=0.1)
        self.url = ""

    def ids(self, index):
        parts = self.parts[index] if isinstance(self.parts, list) else self.parts
        return answer_ids(self.tokenizer, *parts)

    def client(self, key="unused"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=10)

    def chat(self, *parts, thinking=False, **fields):
        """Answer of a chat in which the engine says `parts`."""
        self.parts = parts
        extra = {} if thinking else THINKING_OFF
        extra = {**extra, **fields.pop("extra_body", {})}
        fields = {"model": "finwhale", "messages": USER, **fields}
        return self.client().chat.completions.create(extra_body=extra, **fields)

    def post(self, path, body, headers=None):
        """Status, headers and JSON of a raw request."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=10)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, raw, headers or {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, dict(response.getheaders()), json.loads(content)


def until(true, seconds=5):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
