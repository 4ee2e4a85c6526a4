"""Prompts in, tokens out, on a GPU: prefill by the model's own pass, then `finwhale.gpu` steps.

The prompt runs through the torch pass of the model (wherever its weights are), whose state is
copied into the decoder's pools; the first token is drawn from its logits, all others by steps.
Prompts wait until a slot and blocks are free. Temperature alone, no cuts of the distribution: what
else a request may ask for is the engine's, which serves on a CPU. The easy mistake: tokens come in
runs of `steps_at_once`; a run goes on behind a stop id, and what it drew there is dropped.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from finwhale.cache.sequence_state import SequenceState, fresh_state
from finwhale.engine.prefill import Prefill, encoder_only_unsupported
from finwhale.engine.request import SamplingParams
from finwhale.engine.sampler import draw, uniform
from finwhale.gpu.decoder import GpuDecoder
from finwhale.gpu.operations import decode_operations, table_lines
from finwhale.gpu.weights import pack_backbone
from finwhale.model import Backbone


def prefilled(model: Backbone, ids: Sequence[int]) -> tuple[SequenceState, torch.Tensor]:
    """Return the state behind a prompt and the logits [V] of its last token, on the CPU."""
    state = fresh_state(model, max_rollback=0)
    is_full = encoder_only_unsupported(model.config.text_config) is not None
    session = Prefill(model, state, mode="full" if is_full else "exact")
    session.feed(torch.tensor([list(ids)], dtype=torch.int64, device=model.embed.weight.device))
    with torch.no_grad():
        return state, model.logits(session.finish())[0].cpu()


def generate_batch(
    model: Backbone,
    decoder: GpuDecoder,
    prompts: Iterable[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
) -> Iterator[tuple[int, int]]:
    """Yield (number of the prompt, token) as tokens come; a stop id is yielded and ends its own.

    model    in release numerics, the one whose weights the decoder has

    Raises NotFiniteError: one row that is not finite ends all prompts.

    Prompt n draws with the numbers that the engine uses for the seed `seed + n`.
    """
    waiting = deque(enumerate(prompts))
    running: dict[int, int] = {}  # name in the decoder -> number of the prompt
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
    try:
        while waiting or running:
            while waiting and max_new_tokens and _fits(decoder, waiting[0][1], max_new_tokens):
                number, ids = waiting.popleft()
                state, logits = prefilled(model, ids)
                token = draw(logits, params, seed=seed + number, index=0)
                yield number, token
                if token not in stop_ids and max_new_tokens > 1:
                    name = decoder.admit(
                        state,
                        token,
                        max_new_tokens=max_new_tokens - 1,
                        temperature=temperature,
                        uniform=functools.partial(_later_uniform, seed + number),
                    )
                    running[name] = number
            if not running:
                if waiting and not max_new_tokens:
                    return
                if waiting and not _fits(decoder, waiting[0][1], max_new_tokens):
                    raise ValueError(
                        f"prompt: {len(waiting[0][1])} tokens and {max_new_tokens} new ones are "
                        f"more than the decoder holds, {decoder.capacity}"
                    )
                continue
            names = list(running)
            steps = min(decoder.steps_at_once, *(decoder.num_left(name) for name in names))
            for name, own in zip(names, decoder.decode(names, steps).tolist(), strict=True):
                number = running[name]
                is_done = not decoder.num_left(name)
                for token in own:
                    yield number, token
                    if token in stop_ids:
                        is_done = True
                        break
                if is_done:
                    del running[name]
                    decoder.release(name)
    finally:
        for name in running:
            decoder.release(name)


def generate_one(
    model: Backbone,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    device: str = "cuda",
    say: Callable[[str], object] | None = None,
) -> Iterator[int]:
    """Yield the continuation of one prompt; moves the model to `device`.

    say  gets the lines of the table of operations
    """
    weights = pack_backbone(model, device)
    tokens = len(ids) + max_new_tokens
    decoder = GpuDecoder(
        weights,
        max_sequences=1,
        num_blocks=-(-tokens // 64),
        steps_at_once=8,
        mode="graph" if weights.device.type == "cuda" else "eager",
    )
    if say is not None:
        for line in table_lines(decode_operations(decoder)):
            say(line)
    model.to_device(device)
    for _, token in generate_batch(
        model,
        decoder,
        [ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        stop_ids=stop_ids,
    ):
        yield token


def _fits(decoder: GpuDecoder, ids: Sequence[int], max_new_tokens: int) -> bool:
    total = len(ids) + max_new_tokens - 1
    blocks = decoder.num_blocks_for(total)
    return (
        total <= decoder.capacity and decoder.num_free > 0 and blocks <= decoder.allocator.num_free
    )


def _later_uniform(seed: int, index: int) -> float:
    """Return the number for token `index` of the steps: the prefill drew the one before it."""
    return uniform(seed, index + 1)
