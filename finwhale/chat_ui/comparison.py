"""What a mechanism is worth to a reply: its log-probabilities with it and without it.

Owns the mechanisms that can be switched off and the teacher-forced passes of both sides, on the
single-sequence path and with the engine's weights: no copy, no second checkpoint. It refuses long
conversations and a second comparison at the same time. A newcomer's mistake: reading "no change"
as "no use"; a conversation below the pool's or the window's size never meets the mechanism, and
the answer then says so. Source: spec/backbone.md sections 3, 5.5 and 7; deviation A01 for replay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from finwhale.cache.sequence_state import fresh_state
from finwhale.engine.prefill import Prefill, encoder_only_unsupported
from finwhale.engine.step import forward_step
from finwhale.model import Backbone
from finwhale.ops import FAST, Ops
from finwhale.serve.errors import InvalidRequestError, OverloadedError
from finwhale.serve.planning import ChatRequest
from finwhale.serve.preparation import Preparer
from finwhale.text.prompt import PromptError, encode_segment, render_reply, thinking_and_effort

MAX_TOKENS = 2048
# Tenant, ids of the prompt, ids of the reply.
_Compared = tuple[str, list[int], list[int]]

ENGRAM = "engram"
CANDIDATE_POOL = "candidate_pool"
EXACT_REPLAY = "exact_replay"
# What each is, for a person; and what happens without it.
MECHANISMS: Mapping[str, tuple[str, str]] = {
    ENGRAM: ("Engram", "n-gram memory; off: its layers add nothing to the streams"),
    CANDIDATE_POOL: (
        "Candidate pool",
        "Reindex layers search chosen blocks; off: they search every entry",
    ),
    EXACT_REPLAY: (
        "Exact replay",
        "the decoder runs on all rows that exactness needs; off: on the last window (A01)",
    ),
}
# Changes that need other weights or other model code, so that no switch can show them honestly.
NOT_SWITCHABLE = (
    "sparse attention, hyper-connections and experts: the model has no meaning without them",
)


class Comparison:
    """Compares replies of one model; `run` may be called from any thread, one at a time.

    max_tokens  longest conversation, reply included
    """

    def __init__(
        self, model: Backbone, preparer: Preparer, *, max_tokens: int = MAX_TOKENS
    ) -> None:
        """Share the weights of `model`, which stays as it is; `preparer` is the service's."""
        self._preparer, self._tokenizer = preparer, preparer.tokenizer
        self._max_tokens = max_tokens
        self._model = _twin(model)
        self._base = model
        self._busy = threading.Lock()
        # The side with everything on, of the conversation asked last: a person tries each switch.
        # With its tenant, since the time of an answer would tell others what was compared.
        self._last: tuple[_Compared, tuple[list[float], list[int]]] | None = None
        reason = encoder_only_unsupported(model.config.text_config)
        self.unsupported: dict[str, str] = {} if reason is None else {EXACT_REPLAY: reason}
        if not model.config.text_config.engram_layer_ids:
            self.unsupported[ENGRAM] = "this model has no Engram layer"

    def run(
        self, request: ChatRequest, reply: Mapping[str, Any], off: Sequence[str]
    ) -> dict[str, Any]:
        """Return the reply's tokens with log-probabilities of both sides.

        request  what was asked, messages before the reply
        reply    the assistant's message: content, reasoning_content, tool_calls
        off      names of MECHANISMS to switch off together
        returns  tokens (text, with, without, best_with, best_without), means, notes, seconds

        Raises InvalidRequestError, and OverloadedError while another comparison runs.
        """
        for name in off:
            if name not in MECHANISMS or name in self.unsupported:
                known = ", ".join(n for n in MECHANISMS if n not in self.unsupported)
                why = self.unsupported.get(name, "not a mechanism with a switch")
                raise InvalidRequestError(
                    f"off: got {name[:80]!r} ({why}), expected names of {known}", param="off"
                )
        prompt, answer = self._ids(request, reply)
        if not self._busy.acquire(blocking=False):
            raise OverloadedError(
                "another comparison runs; ask again when it has ended",
                code="comparison_busy",
                retry_after_s=2,
            )
        try:
            started_s = time.perf_counter()
            compared = request.tenant, prompt, answer
            if self._last is None or self._last[0] != compared:
                self._last = compared, self._side(prompt, answer, ())
            whole = self._last[1]
            sides = [whole, self._side(prompt, answer, off) if off else whole]
        finally:
            self._busy.release()
        (with_, best_with), (without, best_without) = sides
        tokens = [
            {
                "text": self._text(token),
                "with": with_[place],
                "without": without[place],
                "best_with": self._text(best_with[place]),
                "best_without": self._text(best_without[place]),
            }
            for place, token in enumerate(answer)
        ]
        return {
            "tokens": tokens,
            "mean_with": sum(with_) / len(answer),
            "mean_without": sum(without) / len(answer),
            "num_choices_changed": sum(
                a != b for a, b in zip(best_with, best_without, strict=True)
            ),
            "prompt_tokens": len(prompt),
            "notes": self._notes(off, len(prompt), len(prompt) + len(answer)),
            "seconds": round(time.perf_counter() - started_s, 3),
        }

    def _ids(self, request: ChatRequest, reply: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Return prompt and reply; the latter as its text encodes, EOS included."""
        prompt = self._preparer.chat(request).prompt
        thinking, _ = thinking_and_effort(request.thinking, request.effort)
        try:
            segments = render_reply(_checked_reply(reply), thinking=thinking)
        except PromptError as error:
            raise InvalidRequestError(str(error), param="messages") from None
        answer = [
            token for segment in segments for token in encode_segment(self._tokenizer, segment)
        ]
        total = len(prompt) + len(answer)
        if total > self._max_tokens:
            raise InvalidRequestError(
                f"messages: got {total} tokens, expected at most {self._max_tokens}; "
                "compare a shorter conversation",
                param="messages",
                code="too_long_to_compare",
            )
        return prompt, answer

    def _side(
        self, prompt: Sequence[int], reply: Sequence[int], off: Sequence[str]
    ) -> tuple[list[float], list[int]]:
        model = self._model
        if ENGRAM in off or CANDIDATE_POOL in off:
            model = self._without(off)
        has_cut = not encoder_only_unsupported(model.config.text_config)
        mode = "bounded" if EXACT_REPLAY in off else "exact" if has_cut else "full"
        return reply_logprobs(model, prompt, reply, prefill=mode)

    def _without(self, off: Sequence[str]) -> Backbone:
        ops, config = FAST, self._base.config
        if ENGRAM in off:
            ops = replace(ops, engram_gate=_streams_alone)
        if CANDIDATE_POOL in off:
            text = config.text_config
            # A pool with room for everything chooses nothing.
            room = max(
                text.candidate_topk_blocks, -(-self._max_tokens // text.candidate_block_size)
            )
            config = replace(config, text_config=replace(text, candidate_topk_blocks=room))
        return _twin(self._base, ops=ops, config=config)

    def _notes(self, off: Sequence[str], num_prompt: int, num_tokens: int) -> list[str]:
        """Return why a switch could not have changed anything here."""
        c, notes = self._base.config.text_config, []
        entries = c.candidate_topk_blocks * c.candidate_block_size
        if CANDIDATE_POOL in off and num_tokens <= entries:
            notes.append(
                f"Candidate pool: it holds {entries:,} entries and this conversation makes at most "
                f"{num_tokens:,}, so it leaves nothing out"
            )
        if EXACT_REPLAY in off and num_prompt <= c.sliding_window:
            notes.append(
                f"Exact replay: the prompt of {num_prompt} tokens lies inside the window of "
                f"{c.sliding_window}, so both run the same rows"
            )
        return notes

    def _text(self, token: int) -> str:
        known = token < self._tokenizer.vocab_size
        raw = self._tokenizer.token_bytes(token) if known else b""
        return raw.decode("utf-8", errors="backslashreplace")


def _checked_reply(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reply says, and nothing else that a client may have put into it."""
    texts = {name: reply.get(name) or "" for name in ("content", "reasoning_content")}
    calls = reply.get("tool_calls") or []
    is_sound = all(isinstance(text, str) for text in texts.values()) and isinstance(calls, list)
    functions = [
        call.get("function") if isinstance(call, dict) else None
        for call in (calls if isinstance(calls, list) else ())
    ]
    told = [
        {"name": f["name"], "arguments": f["arguments"]}
        for f in functions
        if isinstance(f, dict) and all(isinstance(f.get(n), str) for n in ("name", "arguments"))
    ]
    if reply.get("role") != "assistant" or not is_sound or len(told) != len(functions):
        raise InvalidRequestError(
            "messages: expected a conversation that ends with the assistant's reply, its content "
            "and reasoning_content texts, its tool_calls a list of calls",
            param="messages",
        )
    return {
        "role": "assistant",
        **texts,
        "tool_calls": [{"type": "function", "function": function} for function in told],
    }


@torch.inference_mode()
def reply_logprobs(
    model: Backbone, prompt: Sequence[int], reply: Sequence[int], *, prefill: str
) -> tuple[list[float], list[int]]:
    """Return log p(reply[t] | prompt, reply[:t]) for every t, and the best token there.

    prefill  "exact", "full" or "bounded": how the prompt enters the state
    """
    state = fresh_state(model, max_rollback=0)
    session = Prefill(model, state, mode=prefill)
    session.feed(torch.tensor([list(prompt)]))
    hidden = [session.finish()]  # [1, C], of the prompt's last token
    if len(reply) > 1:
        hidden.append(forward_step(model, state, torch.tensor([list(reply[:-1])]))[0])
    logits = model.logits(torch.cat(hidden))  # [T, V] fp32
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(list(reply)).unsqueeze(-1))[:, 0]
    return chosen.tolist(), logits.argmax(-1).tolist()


def _streams_alone(streams: Tensor, *_: Any) -> Tensor:
    """Stand for `Ops.engram_gate` and add nothing to the streams [B, T, N, C]."""
    return streams


def _twin(model: Backbone, *, ops: Ops = FAST, config: Any = None) -> Backbone:
    """Return a Backbone on the weights of `model`, with other operations or another config."""
    with torch.device("meta"):
        twin = Backbone(config or model.config, model.token_map, model.numerics, ops)
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin.requires_grad_(False).eval()
