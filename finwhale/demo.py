"""The one-minute demonstration: the shipped model loads, writes, answers, calls tools, is measured.

A composition of rooms that may not see each other, which is why it stands beside the command
line. It adds no mathematics and hides no failure: every answer is what the model just wrote.
Training is shown by `demo_train`. A newcomer's mistake: reading the prompts as chosen at random;
they are of the kinds that the model was taught (README), and sums without a tool are not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.shipped import checkpoint_folder
from finwhale.config.accounting import kv_bytes_per_token
from finwhale.config.model import TextConfig
from finwhale.conversations.tasks import TOOLS, run_tool
from finwhale.engine import Engine, EngineConfig, SamplingParams
from finwhale.engine.generate import GenerationStats, generate
from finwhale.engine.invariance import numba_missing
from finwhale.engine.runner import with_ops
from finwhale.model import Backbone
from finwhale.ops import FAST, Ops
from finwhale.text.output_parser import Delta, OutputParser, TokenOutputParser, message_of
from finwhale.text.prompt import encode_prompt
from finwhale.text.tokenizer import Tokenizer

_BEGINNING = "import os\n\ndef "
_COMPLETION_TOKENS = 48
_TEMPERATURE, _TOP_P, _SEED = 0.7, 0.9, 1
_REPLY_TOKENS = 160
# A tool loop that has not ended by then goes round in circles.
_MOST_TURNS = 4
_NEEDLE = "The code of the northern lighthouse is 4817."
_PASSAGE = (
    "The ferry left before sunrise and the harbor was quiet. Two fishermen mended a net on the "
    "pier. A painter had put her easel beside the old crane. "
    f"{_NEEDLE} Children counted the gulls on the roof of the market. Later the fog came in and "
    "the bell rang every minute. Nobody remembered who had built the wall along the shore. The "
    "baker opened his door and the street smelled of bread. A dog slept in the sun in front of "
    "the museum. In the evening the wind turned and the boats came home. The lamps were lit one "
    "after another. Someone played a slow song in a room above the square. The clock of the tower "
    "struck nine. A letter lay unopened on the table of the inn. The road went down to the river "
    "and over a hill."
)
_QUESTION = "What is the code of the northern lighthouse?"
_TEXT = (
    "The first table of the book lists the names of the towns and the number of people who lived "
    "in them at the end of the century. The second table shows how many of them worked in the "
    "fields, how many in the mills, and how many had left for the United States of America. In "
    "the last chapter the author returns to the question of why so many people left their homes "
    "at the same time, and gives three reasons for it."
)
_STYLES = {"reasoning": "dim italic", "content": "green", "tool_call": "cyan", "arguments": "cyan"}

# Prompt ids in, new ids one by one out; options: max_new_tokens, temperature, top_p.
Draw = Callable[..., Iterator[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """What the demonstration showed.

    conversations       messages of each, tool results included, in the order shown
    kv_bytes_per_token  global KV, measured in the memory that held it
    losses              mean loss in nats per token: by model (whole, or with a mechanism switched
                        off), of a plain text and of the answer to the question about the passage
    """

    completion: str
    conversations: tuple[list[dict[str, Any]], ...]
    kv_bytes_per_token: float
    losses: dict[str, tuple[float, float]]
    elapsed_s: float


class Voice:
    """Draws tokens: through the engine where numba is, else one sequence on float state.

    Counts what it drew, and tells how many bytes a context takes.
    """

    def __init__(self, model: Backbone, tokenizer: Tokenizer):
        """Allocate the engine's pools, and compile its kernels if no earlier run has."""
        self.model, self.stop_ids = model, (tokenizer.eos_id,)
        self.most_tokens, self.num_drawn, self.drawing_s = 0, 0, 0.0
        self.engine = None
        self._stats = GenerationStats()
        if numba_missing() is None:
            self.engine = Engine(model, EngineConfig(num_blocks=64, max_sequences=2))

    def __call__(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int = _REPLY_TOKENS,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> Iterator[int]:
        """Yield new ids one by one; end-of-sentence is yielded and ends the stream."""
        began_s, drawn = time.perf_counter(), 0
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
        for token in self._tokens(ids, {**options, "seed": _SEED, "stop_ids": self.stop_ids}):
            drawn += 1
            self.most_tokens = max(self.most_tokens, len(ids) + drawn)
            yield token
        self.num_drawn += drawn
        self.drawing_s += time.perf_counter() - began_s

    def _tokens(self, ids: Sequence[int], options: dict[str, Any]) -> Iterator[int]:
        if self.engine is None:
            self._stats = GenerationStats()
            yield from generate(self.model, ids, stats=self._stats, **options)
            return
        self.engine.add(ids, SamplingParams(**options))
        while self.engine.has_work:
            for output in self.engine.step():
                if output.error is not None:
                    raise RuntimeError(f"{output.request_id}: {output.error}")
                yield from (result.token for result in output.new)

    def measured(self) -> tuple[int, int, int]:
        """Return bytes of global KV, the tokens they are for, and bytes fixed for a sequence.

        Of the engine the pools as allocated; without it what the last sequence holds.
        """
        if self.engine is not None:
            size, config = self.engine.pools.num_bytes(), self.engine.config
            fixed = (size["window"] + size["open"]) // config.max_sequences
            return size["main"] + size["index_k"], config.num_blocks * config.block_size, fixed
        size, state = self._stats.state_bytes, self._stats.held()
        fixed = size["window_kv"] + size["open_groups"] + size["recent_ids"]
        return size["main_kv"] + size["index_k"], state.num_tokens, fixed


def run_demo(folder: str | Path | None = None, *, console: Console | None = None) -> DemoReport:
    """Show the checkpoint in `folder`, by default the shipped model, and print what it does."""
    began_s = time.perf_counter()
    folder, console = (
        checkpoint_folder(None if folder is None else Path(folder)),
        console or Console(),
    )
    tokenizer = Tokenizer.from_file(folder)
    # The first prompt needs the extra `chat`: to say that it is missing costs nothing here.
    encode_prompt(tokenizer, [{"role": "user", "content": ""}])

    _head(console, "1. The shipped model")
    loaded = load_model(folder, ops=FAST)
    _say_model(console, folder, loaded, time.perf_counter() - began_s)
    started_s = time.perf_counter()
    missing = numba_missing()
    if missing is None:
        _line(console, "engine: compiled kernels (the first run of all compiles, half a minute)")
    else:
        _line(console, f"no engine, one sequence in plain torch: {missing}")
    voice = Voice(loaded.model, tokenizer)
    _line(console, f"ready after another {time.perf_counter() - started_s:.1f} s")

    _head(console, "2. A text goes on")
    completion = complete(voice, tokenizer, _BEGINNING, console)

    _head(console, "3. Conversations")
    conversations = _conversations(voice, tokenizer, console)
    rate = voice.num_drawn / voice.drawing_s
    _line(console, f"\n{voice.num_drawn} tokens written, {rate:.1f} a second, prompts included")

    _head(console, "4. Memory of the context")
    kv_bytes, kv_tokens, fixed_bytes = voice.measured()
    text_config = loaded.config.text_config
    _line(
        console,
        f"global KV, measured: {kv_bytes:,} bytes for {kv_tokens:,} tokens, "
        f"{kv_bytes / kv_tokens:.1f} each ({kv_bytes_per_token(text_config):g} by arithmetic)",
    )
    console.print(memory_table(text_config, voice.most_tokens))
    _line(console, "dense: K and V of every layer, kept in BF16; layers x heads x head dim")
    _line(console, f"beside it, {fixed_bytes:,} bytes of windows a sequence, whatever its length")

    _head(console, "5. Mechanisms switched off")
    losses = switched_off(loaded.model, tokenizer)
    console.print(_loss_table(losses))
    elapsed_s = time.perf_counter() - began_s
    _line(console, f"{elapsed_s:.0f} s in all")
    return DemoReport(
        completion=completion,
        conversations=conversations,
        kv_bytes_per_token=kv_bytes / kv_tokens,
        losses=losses,
        elapsed_s=elapsed_s,
    )


def complete(draw: Draw, tokenizer: Tokenizer, beginning: str, console: Console) -> str:
    """Print `beginning` and how the model goes on, piece by piece; return the continuation."""
    stream, pieces = tokenizer.stream(skip_hidden=True), []
    ids = [tokenizer.bos_id, *tokenizer.encode(beginning)]
    console.out(beginning, end="", highlight=False)
    for token in draw(
        ids, max_new_tokens=_COMPLETION_TOKENS, temperature=_TEMPERATURE, top_p=_TOP_P
    ):
        pieces.append(stream.push(token))
        console.out(pieces[-1], end="", style=_STYLES["content"], highlight=False)
    pieces.append(stream.finish())
    console.out(pieces[-1], style=_STYLES["content"], highlight=False)
    return "".join(pieces)


def _conversations(voice: Voice, tokenizer: Tokenizer, console: Console):
    """Return the messages of every conversation of the demonstration, printed as they come."""
    passage = f"Text:\n{_PASSAGE}\n\nQuestion: {_QUESTION}"
    product = "What is 347 * 29?"
    store = {"lamo": 42, "tiru": 7}
    store_tools = [TOOLS["get_value"], TOOLS["set_value"]]
    found = []
    for question, thinking, tools in (
        ("Hi, who are you?", False, []),
        (passage, True, []),
        (product, True, [TOOLS["calculate"]]),
        ("Copy the value of lamo to tiru.", True, store_tools),
        (product, False, []),
    ):
        messages = converse(
            voice, tokenizer, question, thinking=thinking, tools=tools, store=store, console=console
        )
        found.append(messages)
    _line(console, f"the store now: {store}")
    _line(console, f"the last answer, without a tool, is a guess: 347 * 29 is {347 * 29}")
    return tuple(found)


def converse(
    draw: Draw,
    tokenizer: Tokenizer,
    question: str,
    *,
    thinking: bool,
    tools: Sequence[dict[str, Any]],
    store: dict[str, int],
    console: Console,
) -> list[dict[str, Any]]:
    """Return the messages of one question, its calls run by `run_tool` until an answer stands.

    Prints reasoning, calls and answer as they are written. `store` is what the tools read and
    change. Ends after four turns in any case.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    _line(console, "")
    about = f"thinking {'on' if thinking else 'off'}"
    if tools:
        about += ", tools " + " ".join(tool["function"]["name"] for tool in tools)
    console.out(f"user ({about})> ", end="", style="bold", highlight=False)
    console.out(question, highlight=False)
    for _ in range(_MOST_TURNS):
        message = _turn(draw, tokenizer, messages, thinking=thinking, tools=tools, console=console)
        messages.append(message)
        calls = message.get("tool_calls", ())
        if not calls:
            break
        for call in calls:
            result = _result(call["function"], store)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            console.out("result> ", end="", style="bold", highlight=False)
            console.out(result, highlight=False)
    return messages


def _turn(draw: Draw, tokenizer, messages, *, thinking, tools, console) -> dict[str, Any]:
    """Print one turn of the model while it is written; return it as a message."""
    ids = encode_prompt(tokenizer, messages, tools=tools or None, thinking=thinking)
    parser = TokenOutputParser(
        tokenizer, OutputParser(thinking=thinking, tools_declared=bool(tools))
    )
    deltas: list[Delta] = []
    labels = {"reasoning": "thinks> ", "content": "answers> ", "tool_call": "calls> "}
    last = ""
    for token in draw(ids):
        last = _show(console, parser.feed([token]), deltas, labels, last)
    _show(console, parser.finish(), deltas, labels, last)
    _line(console, "")
    return message_of(deltas)


def _show(console: Console, new: list[Delta], deltas: list[Delta], labels, last: str) -> str:
    """Print new pieces behind a label where their kind changes; return the last kind."""
    for delta in new:
        if delta.kind != last and delta.kind in labels:
            console.out(("\n" if last else "") + labels[delta.kind], end="", style="bold")
        shown = f"{delta.name} " if delta.kind == "tool_call" else delta.text
        console.out(shown, end="", style=_STYLES[delta.kind], highlight=False)
        last = delta.kind
    deltas += new
    return last


def _result(function: dict[str, str], store: dict[str, int]) -> str:
    """Return what the called tool says; arguments that are no object are told to the model."""
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return "error: the arguments are not a JSON object"
    return run_tool(function["name"], arguments, store=store, files={})


def dense_kv_bytes_per_token(config: TextConfig, num_heads: int) -> int:
    """Return what a cache costs that keeps everything: K and V, every layer, in BF16.

    2 tensors * layers * heads * head dim * 2 bytes.
    """
    return 2 * config.num_hidden_layers * num_heads * config.head_dim * 2


def memory_table(config: TextConfig, num_tokens: int) -> Table:
    """Return the bytes of global KV of one token, of `num_tokens` and of the longest context."""
    longest, ours = config.max_position_embeddings, kv_bytes_per_token(config)
    owners, layers = len(config.kv_source_layer_ids), config.num_hidden_layers
    rows = [(f"this model, {owners} KV owners", ours)]
    for heads in sorted({config.num_key_value_heads, config.num_attention_heads}):
        name = f"dense, {layers} x {heads} x {config.head_dim}"
        rows.append((name, dense_kv_bytes_per_token(config, heads)))
    table = Table("bytes", "1 token", f"{num_tokens:,}", f"{longest:,}", "times")
    for name, per_token in rows:
        sizes = (f"{per_token * count:,.0f}" for count in (1, num_tokens, longest))
        table.add_row(name, *sizes, f"{per_token / ours:.1f}")
    return table


def loss_per_token(model: Backbone, ids: Sequence[int], first: int) -> float:
    """Return the mean of -ln p(ids[t] | ids[:t]) over t >= first, in nats.

    One forward pass over the whole sequence; 1 <= first < len(ids).
    """
    if not 1 <= first < len(ids):
        raise ValueError(f"first: got {first}, expected 1 to {len(ids) - 1}, a token with a past")
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0]  # [T, V]
    chosen = torch.tensor(ids[first:])
    return torch.nn.functional.cross_entropy(logits[first - 1 : -1].double(), chosen).item()


def without_engram() -> Ops:
    """Return operations in which what Engram looked up is not added to the streams."""

    def nothing_added(streams, keys, value, q_weight, k_weight, eps):
        return streams

    return replace(FAST, engram_gate=nothing_added)


def within_window() -> Ops:
    """Return operations in which a layer attends to its window alone, not to selected entries."""

    def window_alone(q, window_kv, entries, topk, sink, positions, window):
        return FAST.sparse_attention(q, window_kv, None, None, sink, positions, window)

    return replace(FAST, sparse_attention=window_alone)


def switched_off(model: Backbone, tokenizer: Tokenizer) -> dict[str, tuple[float, float]]:
    """Return the losses (plain text, answer about the passage) by what is switched off."""
    text = [tokenizer.bos_id, *tokenizer.encode(_TEXT)]
    asked = [{"role": "user", "content": f"Text:\n{_PASSAGE}\n\nQuestion: {_QUESTION}"}]
    prompt = encode_prompt(tokenizer, asked, thinking=False)
    answer = [*prompt, *tokenizer.encode(_NEEDLE)]
    window = model.config.text_config.sliding_window
    models = {
        "the whole model": model,
        "Engram off": with_ops(model, without_engram()),
        f"selection off, window {window}": with_ops(model, within_window()),
    }
    return {
        name: (loss_per_token(one, text, 1), loss_per_token(one, answer, len(prompt)))
        for name, one in models.items()
    }


def _loss_table(losses: dict[str, tuple[float, float]]) -> Table:
    table = Table("nats per token", "a text", "the passage's code")
    whole = next(iter(losses.values()))
    for name, values in losses.items():
        cells = [f"{value:.3f}" for value in values]
        if values is not whole:
            cells = [
                f"{value:.3f} ({value - base:+.3f})"
                for value, base in zip(values, whole, strict=True)
            ]
        table.add_row(name, *cells)
    return table


def _say_model(console: Console, folder: Path, loaded: Any, elapsed_s: float) -> None:
    """Print size, parameters and time of a load."""
    total = sum(parameter.numel() for parameter in loaded.model.parameters())
    report = loaded.report
    bits = 8 * report.payload_bytes / total
    storages = ", ".join(f"{count} {name}" for name, count in report.storages.items())
    _line(console, f"{folder}: {report.payload_bytes:,} bytes in {report.num_tensors} tensors")
    _line(console, f"{total:,} parameters, {bits:.1f} bits each in the file ({storages})")
    _line(console, f"read, checked and dequantised in {elapsed_s:.1f} s")


def _head(console: Console, text: str) -> None:
    console.out(f"\n{text}", style="bold", highlight=False)


def _line(console: Console, text: str) -> None:
    console.out(text, highlight=False)
