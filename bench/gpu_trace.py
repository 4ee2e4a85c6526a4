"""Where a greedy difference of a GPU comes from: the CPU's own spread at that place, and a trace.

`gpu_greedy.py --trace N` calls it for its first N differences. `spread`: the same tokens on the
CPU, as one pass, with the terms of every product in a random order: what its margin at that place
is worth. `trace`: the step at that place on the GPU, from three states: the CPU's state just before
it, the CPU's prefill, the GPU's own; beside each the input of every sub-layer, relative to the
CPU's, the first that differs by more than any of the CPU's random orders, and the layers whose
experts or entries differ. The easy mistake: comparing with a noise of other prompts. Places differ
in it by ten times.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from gpu_lines import GpuLines

from finwhale.checkpoint.load import load_model
from finwhale.engine.gpu_generation import prefilled
from finwhale.engine.step import forward_step
from finwhale.gpu.decoder import GpuDecoder
from finwhale.gpu.step import DecodeStep
from finwhale.model import Numerics
from finwhale.ops import FAST, Ops

DRAWS = 40


def shuffled_ops(generator: torch.Generator) -> Ops:
    """Return operations whose products add their terms in a random order, another each time."""

    def product(whole: Callable) -> Callable:
        def shuffled(x, weight, *rest, **options):
            order = torch.randperm(x.shape[-1], generator=generator)
            x, weight = x[..., order].contiguous(), weight[..., order].contiguous()
            return whole(x, weight, *rest, **options)

        return shuffled

    def mix(streams, fn, *rest, **options):
        order = torch.randperm(streams.shape[-1], generator=generator)
        fn = fn.unflatten(-1, (streams.shape[-2], -1))[..., order].flatten(-2)
        return FAST.hyper_mix(streams[..., order].contiguous(), fn.contiguous(), *rest, **options)

    names = ("linear", "linear_release", "grouped_linear")
    return replace(FAST, hyper_mix=mix, **{name: product(getattr(FAST, name)) for name in names})


class TracedStep(DecodeStep):
    """A step that keeps what row 0 gave every sub-layer and what it chose, as the model's trace."""

    def begin(self, ids, recent, places):
        super().begin(ids, recent, places)
        self.trace, self._sites = {}, 0

    def site(self, *inputs):
        out = super().site(*inputs)
        layer, half = divmod(self._sites, 2)
        self._sites += 1
        if layer < len(self.weights.layers):
            self.trace[f"{('attn', 'ffn')[half]}_in.{layer}"] = out.x[0].clone()
        return out

    def experts(self, layer, x, rounded):
        out = super().experts(layer, x, rounded)
        self.trace[f"gate_ids.{layer.spec.layer_id}"] = self.active[-1].clone()
        return out

    def select(self, layer, x, qr):
        super().select(layer, x, qr)
        self.trace[f"topk.{layer.spec.layer_id}"] = self.topk[layer.spec.layer_id][0].clone()


def traced_step(weights, state, tokens: list[int], capacity: int):
    """Return logits [V] behind the last of `tokens`, and its trace, by steps of the decoder."""
    decoder = GpuDecoder(
        weights, max_sequences=1, num_blocks=-(-capacity // 64), capacity_tokens=capacity,
        mode="eager", keep_logits=True,
    )  # fmt: skip
    decoder.step = TracedStep(weights, decoder.pools, 1)
    name = decoder.admit(state, tokens[0], max_new_tokens=len(tokens))
    for following in [*tokens[1:], None]:
        decoder.decode([name], 1)
        if following is not None:
            decoder.force(name, following)
    trace = {key: value.cpu() for key, value in decoder.step.trace.items()}
    blocks = decoder._sequences[name].blocks
    for spec in decoder.pools.layout.specs:
        key = f"topk.{spec.layer_id}"
        if key in trace:  # rows of pools -> entries of the sequence
            owner = next(s for s in decoder.pools.layout.specs if s.layer_id == spec.kv_owner)
            each = decoder.pools.layout.entries_per_block(owner)
            rows = [int(row) for row in trace[key].flatten() if row >= 0]
            entries = [blocks.index(row // each) * each + row % each for row in rows]
            trace[key] = torch.tensor(entries)
    return decoder.logits[0].cpu(), trace


@torch.no_grad()
def cpu_step(model, ids: list[int], tokens: list[int]):
    """Return logits and trace as `traced_step`, and the state just before the last token."""
    state, trace = prefilled(model, ids)[0], {}
    for token in tokens[:-1]:
        forward_step(model, state, torch.tensor([[token]]))
    before = copy.deepcopy(state)
    hidden = forward_step(model, state, torch.tensor([[tokens[-1]]]), trace=trace)
    logits = model.logits(hidden[:, -1])[0]
    return logits, last_rows(trace), before


def last_rows(trace) -> dict[str, torch.Tensor]:
    """Return what a trace of the model holds of its last token, as far as a step keeps it too."""
    found = {}
    for name, value in trace.items():
        kind = name.split(".")[0]
        if kind in ("attn_in", "ffn_in", "topk"):
            found[name] = value[0, -1]
        elif kind == "gate_ids":
            found[name] = value[-1]
    return found


def distances(trace, want) -> dict[str, float]:
    """Return the relative difference of every sub-layer's input."""
    names = [name for name in want if name.split(".")[0] in ("attn_in", "ffn_in")]
    names.sort(key=lambda name: (int(name.split(".")[1]), name))
    return {
        name: float((trace[name].float() - want[name].float()).norm() / want[name].float().norm())
        for name in names
    }


def chosen(value) -> set[int]:
    return {int(x) for x in value.flatten() if x >= 0}


def explain(
    bench: GpuLines, folder: Path, model, weights, device: str, row: dict, place: int, draws: int
) -> None:
    """Print `spread` and `trace` of one place of a reference's prompt; `model` is on the CPU."""
    ids, tokens = row["ids"], row["tokens"][:place]
    best, second = row["tokens"][place], row["seconds"][place]
    line = {"kind": row["kind"], "at": place}
    margin = lambda logits: float(logits[best] - logits[second])  # noqa: E731
    if not tokens:
        bench.say(**line, trace="the prefill alone drew it: no step to look at")
        return
    logits, want, before = cpu_step(model, ids, tokens)
    generator = torch.Generator()
    other = load_model(folder, numerics=Numerics.release(), ops=shuffled_ops(generator)).model
    margins, bests, noise, routes = [], Counter(), [], 0
    for seed in range(draws):
        if bench.is_late and seed:
            break
        generator.manual_seed(seed)
        trace: dict = {}
        with torch.no_grad():
            found = other(torch.tensor([[*ids, *tokens]]), trace=trace)[0, -1]
        trace = last_rows(trace)
        margins.append(margin(found))
        bests[int(found.argmax())] += 1
        noise.append(distances(trace, want))
        routes += any(chosen(trace[k]) != chosen(want[k]) for k in want if "gate_ids" in k)
    spread = torch.tensor(margins)
    largest = {name: max(one[name] for one in noise) for name in noise[0]}
    bench.say(
        **line, spread=len(margins), cpu_margin=round(margin(logits), 4),
        mean=round(float(spread.mean()), 3), std=round(float(spread.std()), 3),
        least=round(float(spread.min()), 3), largest=round(float(spread.max()), 3),
        best=dict(bests.most_common(4)), other_experts=routes,
    )  # fmt: skip
    capacity = len(ids) + len(row["tokens"]) + 1
    cases = {
        "the CPU's state, this step": lambda: (before, tokens[-1:]),
        "the CPU's prefill": lambda: (prefilled(model, ids)[0], tokens),
        "the GPU's prefill": lambda: (prefilled(model.to_device(device), ids)[0], tokens),
    }
    for name, make in cases.items():
        found, trace = traced_step(weights, *make(), capacity)
        each = distances(trace, want)
        beyond = [key for key, value in each.items() if value > largest[key]]
        differ = {
            kind: [int(k.split(".")[1]) for k in trace if kind in k and not same(k, trace, want)]
            for kind in ("gate_ids", "topk")
        }
        bench.say(
            **line, trace=name, margin=round(margin(found), 4), best=int(found.argmax()),
            draws_below=round(float((spread <= margin(found)).float().mean()), 3),
            first_beyond_noise=beyond[0] if beyond else None, beyond=len(beyond),
            experts_differ=differ["gate_ids"], entries_differ=differ["topk"],
            inputs=[float(f"{value:.2g}") for value in each.values()],
            noise=[float(f"{largest[key]:.2g}") for key in each],
        )  # fmt: skip
    model.to_device("cpu")


def same(key: str, trace, want) -> bool:
    return chosen(trace[key]) == chosen(want[key])
