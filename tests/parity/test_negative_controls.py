"""Each mechanism switched off or bent, one at a time: the parity gate must then fail.

A gate that passes without a mechanism says nothing about it. Every control goes through
`check_parity`, the very check that the unchanged model passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from finwhale.model.indexer import Indexer
from finwhale.model.layers import ForwardState
from finwhale.model.packing import Packing
from finwhale.ops import FAST, REFERENCE, Ops
from finwhale.ops.hyper_connection import HyperMix
from finwhale.ops.rope import rope_rotation
from tests.oracles.geometries import RUNS
from tests.parity.compare import relative_errors
from tests.parity.ours import changed_model, check_parity, forward, golden, tolerance


def scaled(pattern: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    """Multiply every weight whose name ends in `pattern`."""

    def change(state: dict[str, Tensor]) -> None:
        hit = [name for name in state if name.endswith(pattern)]
        assert hit, f"no tensor ends in {pattern}"
        for name in hit:
            state[name] = state[name] * factor

    return change


def filled(pattern: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    """Set every weight whose name ends in `pattern`."""

    def change(state: dict[str, Tensor]) -> None:
        hit = [name for name in state if name.endswith(pattern)]
        assert hit, f"no tensor ends in {pattern}"
        for name in hit:
            state[name] = torch.full_like(state[name], value)

    return change


def swap_biases(state: dict[str, Tensor]) -> None:
    for name in [n for n in state if n.endswith("gate.bias")]:
        state[name], state[f"{name}_vl"] = state[f"{name}_vl"], state[name]


def swap_w1_w3(state: dict[str, Tensor]) -> None:
    for name in [n for n in state if n.endswith("w1.weight")]:
        other = name.replace("w1.weight", "w3.weight")
        state[name], state[other] = state[other], state[name]


def no_inverse(x, rotation, inverse=False):
    return x if inverse else REFERENCE.apply_rope(x, rotation)


def half_split(x, rotation, inverse=False):
    cos, sin = rotation
    if x.dim() == cos.dim() + 1:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    sin = -sin if inverse else sin
    width = 2 * cos.shape[-1]
    first, second = x[..., -width:].chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.cat((x[..., :-width], *turned), dim=-1)


def first_channels(x, rotation, inverse=False):
    width = 2 * rotation.shape[-1]
    return REFERENCE.apply_rope(x.roll(-width, -1), rotation, inverse).roll(width, -1)


def normed_query(x, rotation, inverse=False):
    # The query is what is rotated forward with a head dimension of 4 heads.
    if x.dim() == 4 and x.shape[-2] == 4 and not inverse:
        x = REFERENCE.rms_norm(x, torch.ones(x.shape[-1]), 1e-20)
    return REFERENCE.apply_rope(x, rotation, inverse)


def without_yarn(theta, dim, scaling):
    return REFERENCE.rope_frequencies(theta, dim, None)


def yarn_everywhere(theta, dim, scaling):
    scaling = scaling or RUNS["tiny"].config().text_config.rope_scaling
    return REFERENCE.rope_frequencies(theta, dim, scaling)


def expand_transposed(y, streams, post, comb):
    return REFERENCE.hyper_expand(y, streams, post, comb.transpose(-1, -2))


def with_iterations(count: int):
    def mix(streams, fn, base, scale, *, iterations, norm_eps, eps):
        return REFERENCE.hyper_mix(
            streams, fn, base, scale, iterations=count, norm_eps=norm_eps, eps=eps
        )

    return mix


def doubly_stochastic(streams, fn, base, scale, **constants):
    pre, post, comb = REFERENCE.hyper_mix(streams, fn, base, scale, **constants)
    return HyperMix(pre, post, comb / comb.sum(-1, keepdim=True))


def single_post(streams, fn, base, scale, **constants):
    pre, post, comb = REFERENCE.hyper_mix(streams, fn, base, scale, **constants)
    return HyperMix(pre, post / 2, comb)


def per_stream_norm(streams, fn, base, scale, *, iterations, norm_eps, eps):
    rms = streams.square().mean(-1, keepdim=True).add(norm_eps).rsqrt()
    return REFERENCE.hyper_mix(
        streams * rms, fn, base, scale, iterations=iterations, norm_eps=norm_eps, eps=eps
    )


def unlagged() -> Ops:
    """Collapse with the site's own mix, which is the last one computed."""
    seen = SimpleNamespace(pre=None)

    def mix(*args, **constants):
        result = REFERENCE.hyper_mix(*args, **constants)
        seen.pre = result.pre
        return result

    def collapse(streams, pre):
        return REFERENCE.hyper_collapse(streams, seen.pre)

    return replace(REFERENCE, hyper_mix=mix, hyper_collapse=collapse)


def scores_without_relu(q, weights, keys):
    dots = torch.einsum("bthd,bmd->bthm", q, keys)
    return (dots * weights.unsqueeze(-1)).sum(2)


def scores_of_sigmoid_weights(q, weights, keys):
    return REFERENCE.index_scores(q, weights.sigmoid(), keys)


def relu_of_sum(q, weights, keys):
    return scores_without_relu(q, weights, keys).relu()


def unpinned_blocks(scores, visible, num_blocks, block_size, **_):
    # The newest block counted as fully invisible is not forced.
    return REFERENCE.select_pool_blocks(scores, torch.zeros_like(visible), num_blocks, block_size)


def mean_of_group(content, gate):
    return content.mean(dim=-2)


def gate_over_channels(content, gate):
    return (gate.softmax(dim=-1) * content).sum(dim=-2)


def without_overlap(q, window_kv, entries, topk, sink, positions, window):
    if entries is not None and entries.shape[1] == window_kv.shape[1]:
        inside = topk > (positions - window).unsqueeze(-1)
        topk = torch.where(inside, -1, topk)
    return REFERENCE.sparse_attention(q, window_kv, entries, topk, sink, positions, window)


def plain_sigmoid_gate(streams, keys, value, q_weight, k_weight, eps):
    x, key = streams, keys
    dot = (x * q_weight * k_weight * key).sum(-1)
    dot = dot * x.square().mean(-1).add(eps).rsqrt() * key.square().mean(-1).add(eps).rsqrt()
    gate = torch.sigmoid(dot * x.shape[-1] ** -0.5)
    return x + gate.unsqueeze(-1) * value.unsqueeze(-2)


def forgetful_blocking(ids, positions, dead, multipliers, primes, offsets, pad_id):
    # A dead position hides itself but not what lies behind it.
    if dead is not None:
        ids = torch.where(dead, pad_id, ids)
    return REFERENCE.engram_rows(ids, positions, None, multipliers, primes, offsets, pad_id)


def reversed_lookback(ids, positions, dead, multipliers, primes, offsets, pad_id):
    return REFERENCE.engram_rows(ids, positions, dead, multipliers.flip(0), primes, offsets, pad_id)


def biased_weights(logits, bias, k, scaling):
    scores = torch.nn.functional.softplus(logits).sqrt() + bias
    best, ids = scores.topk(k, dim=-1)
    return ids, best / best.sum(-1, keepdim=True) * scaling


def sigmoid_router(logits, bias, k, scaling):
    scores = logits.sigmoid()
    ids = (scores + bias).topk(k, dim=-1).indices
    chosen = scores.gather(-1, ids)
    return ids, chosen / chosen.sum(-1, keepdim=True) * scaling


def one_group(x, weight):
    return REFERENCE.grouped_linear(x.flip(-2), weight)


def plain_weight_plus_one(x, weight, eps):
    return REFERENCE.rms_norm(x, weight + 1, eps)


@dataclass(frozen=True, kw_only=True)
class Control:
    """A broken model: other operations, weights or config, and the golden that must notice."""

    ops: dict | None = None
    weights: Callable | None = None
    text: dict | None = None
    make_ops: Callable[[], Ops] | None = None
    run: str = "tiny"


CONTROLS = {
    # Engram, section 7
    "engram rows zeroed": Control(weights=filled("engram.embed.weight", 0.0)),
    "engram rows of L4 zeroed": Control(weights=filled("layers.4.engram.embed.weight", 0.0)),
    "engram gate without the signed root": Control(ops={"engram_gate": plain_sigmoid_gate}),
    "engram look-back reversed": Control(ops={"engram_rows": reversed_lookback}),
    "engram q weight off": Control(weights=filled("engram.q_weight", 1.0)),
    "image positions hide themselves only": Control(
        ops={"engram_rows": forgetful_blocking}, run="tiny-image"
    ),
    # Candidate pool and selection, section 5
    "pool ignored": Control(text={"candidate_topk_blocks": 1000}),
    "newest block not in the pool": Control(ops={"select_pool_blocks": unpinned_blocks}),
    "pool blocks of another size": Control(
        text={"candidate_block_size": 8, "candidate_topk_blocks": 2}
    ),
    "top-k one smaller": Control(text={"index_topk": 7}),
    "ReLU dropped": Control(ops={"index_scores": scores_without_relu}),
    "ReLU after the head sum": Control(ops={"index_scores": relu_of_sum}),
    "index weights through a sigmoid": Control(ops={"index_scores": scores_of_sigmoid_weights}),
    # Attention, section 4
    "sink dropped": Control(weights=filled("attn_sink", -1e30)),
    "sink scaled like a score": Control(weights=scaled("attn_sink", 32**-0.5)),
    "entries inside the window dropped": Control(ops={"sparse_attention": without_overlap}),
    "window one shorter": Control(text={"sliding_window": 7}),
    "window one longer": Control(text={"sliding_window": 9}),
    "query norm kept": Control(ops={"apply_rope": normed_query}),
    "output groups reversed": Control(ops={"grouped_linear": one_group}),
    "compressor gate ignored": Control(ops={"pool_group": mean_of_group}),
    "compressor gate over channels": Control(ops={"pool_group": gate_over_channels}),
    "norm weights stored as 1 + w": Control(ops={"rms_norm": plain_weight_plus_one}),
    # Rotary positions, section 4.7
    "inverse RoPE dropped": Control(ops={"apply_rope": no_inverse}),
    "half-split pairs": Control(ops={"apply_rope": half_split}),
    "first channels rotate": Control(ops={"apply_rope": first_channels}),
    "YaRN off": Control(ops={"rope_frequencies": without_yarn}),
    "YaRN in window layers too": Control(ops={"rope_frequencies": yarn_everywhere}),
    "window base everywhere": Control(text={"compress_rope_theta": 10000.0}),
    "compressed base everywhere": Control(text={"rope_theta": 160000.0}),
    # Hyper-connections, section 6
    "comb contracted over its second index": Control(ops={"hyper_expand": expand_transposed}),
    "pre-mix not lagged": Control(make_ops=unlagged),
    "one Sinkhorn step": Control(ops={"hyper_mix": with_iterations(1)}),
    "post without the factor 2": Control(ops={"hyper_mix": single_post}),
    "RMS per stream": Control(ops={"hyper_mix": per_stream_norm}),
    "19 Sinkhorn steps": Control(ops={"hyper_mix": with_iterations(19)}),
    "comb made doubly stochastic": Control(ops={"hyper_mix": doubly_stochastic}),
    "base of the attention site ignored": Control(weights=filled("hc_attn_base", 0.0)),
    # Experts, section 8
    "router bias off": Control(weights=filled("gate.bias", 0.0)),
    "bias and bias_vl swapped": Control(weights=swap_biases),
    "bias_vl off for images": Control(weights=filled("gate.bias_vl", 0.0), run="tiny-image"),
    "bias enters the weights": Control(ops={"route_experts": biased_weights}),
    "sigmoid router": Control(ops={"route_experts": sigmoid_router}),
    "routed scaling 1": Control(text={"routed_scaling_factor": 1.0}),
    "shared expert dropped": Control(weights=scaled("shared_experts.w2.weight", 0.0)),
    "w1 and w3 swapped": Control(weights=swap_w1_w3),
    "SwiGLU clamped at 0.25": Control(text={"swiglu_limit": 0.25}),
    # The same, where the release's own schedule decides
    "40 layers: pool ignored": Control(text={"candidate_topk_blocks": 1000}, run="sched40"),
    "40 layers: engram rows zeroed": Control(
        weights=filled("layers.14.engram.embed.weight", 0.0), run="sched40"
    ),
    "quantised weights: one scale doubled": Control(
        weights=scaled("layers.3.ffn.experts.5.w2.weight", 2.0), run="tiny-fp8"
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_parity_fails_with(name):
    control = CONTROLS[name]
    run = RUNS[control.run]
    ops = control.make_ops() if control.make_ops else replace(REFERENCE, **(control.ops or {}))
    model = changed_model(run, ops=ops, weights=control.weights, text=control.text)
    outcome = forward(run, model)
    with pytest.raises(AssertionError):
        check_parity(run, outcome)
    # The damage reaches the output, not only a captured intermediate.
    positions = golden(run.name)["positions"].long()
    errors = relative_errors(outcome.logits[:, positions], golden(run.name)["logits"])
    assert float(errors.max()) > 10 * tolerance(run)


def _fails(run_name: str) -> None:
    run = RUNS[run_name]
    with pytest.raises(AssertionError):
        check_parity(run, forward(run, changed_model(run)))


def test_parity_fails_with_index_keys_from_the_rotated_latent(monkeypatch):
    make_keys = Indexer.make_keys

    def rotated_first(self, latent, state):
        return make_keys(self, REFERENCE.apply_rope(latent, state.entry_rotation(self.spec)), state)

    monkeypatch.setattr(Indexer, "make_keys", rotated_first)
    _fails("tiny")


def test_parity_fails_with_entries_rotated_at_their_last_token(monkeypatch):
    def at_the_last(self, spec):
        positions = self.groups(spec).positions + spec.ratio - 1
        return rope_rotation(positions, self.frequencies[spec.rope])

    monkeypatch.setattr(ForwardState, "entry_rotation", at_the_last)
    _fails("tiny")


@pytest.mark.parametrize("shift", [-1, 1])
def test_parity_fails_with_visibility_off_by_one(monkeypatch, shift):
    groups = Packing.groups

    def shifted(self, ratio):
        right = groups(self, ratio)
        visible = (self.positions + 1 + shift).clamp_min(0) // ratio
        return replace(right, visible=visible.clamp_max(right.tokens.shape[1]))

    monkeypatch.setattr(Packing, "groups", shifted)
    _fails("tiny")


def test_parity_fails_with_the_fp32_latent_rotated_for_every_layer_alike(monkeypatch):
    from finwhale.config.layers import RopeKind

    def compressed_always(self, spec):
        return rope_rotation(self.packing.positions, self.frequencies[RopeKind.COMPRESSED])

    monkeypatch.setattr(ForwardState, "token_rotation", compressed_always)
    _fails("tiny")


@pytest.mark.parametrize("operation", ["round_window_kv", "round_main_kv", "round_index"])
def test_parity_fails_without_one_cache_rounding(operation):
    run = RUNS["tiny-rounded"]
    ops = replace(REFERENCE, **{operation: lambda x: x})
    with pytest.raises(AssertionError):
        check_parity(run, forward(run, changed_model(run, ops=ops)))


@pytest.mark.parametrize(
    ("operation", "other"),
    [("round_main_kv", "round_index"), ("round_index", "round_main_kv")],
    ids=["entries with power-of-two scales", "index keys with E4M3 scales"],
)
def test_parity_fails_with_the_other_fp4_format(operation, other):
    run = RUNS["tiny-rounded"]
    ops = replace(REFERENCE, **{operation: getattr(REFERENCE, other)})
    with pytest.raises(AssertionError):
        check_parity(run, forward(run, changed_model(run, ops=ops)))


def check_tie_rule(select) -> None:
    """Assert D01 on rows worked out by hand: among equal scores the lowest position wins.

    nemo-automodel leaves ties open, so no golden can decide this.
    """
    low = -torch.inf
    scores = torch.tensor(
        [
            [0.0, 2.0, 0.0, 0.0, 1.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [3.0, 3.0, 3.0, 3.0, 9.0, low],
            [low, low, 0.0, low, 0.0, 0.0],
        ]
    )
    expected = torch.tensor([[0, 1, 4], [0, 1, 2], [0, 1, 4], [2, 4, 5]])
    assert torch.equal(select(scores, 3), expected)


def highest_wins(scores: Tensor, k: int) -> Tensor:
    last = scores.shape[-1] - 1
    chosen = REFERENCE.select_topk(scores.flip(-1), k)
    return torch.where(chosen < 0, -1, last - chosen).flip(-1)


@pytest.mark.parametrize("ops", [REFERENCE, FAST], ids=["reference", "fast"])
def test_tie_rule_is_the_lowest_position(ops):
    check_tie_rule(ops.select_topk)


def test_reversed_tie_rule_is_noticed():
    with pytest.raises(AssertionError):
        check_tie_rule(highest_wins)


@pytest.mark.parametrize("reverse", [False, True], ids=["lowest", "highest"])
def test_pool_blocks_follow_the_tie_rule(reverse):
    # Blocks of 2: scores 1, 1, 1, 0 and the newest (entry 8) forced; two places are left for three.
    scores = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, -torch.inf]])
    select = highest_wins if reverse else REFERENCE.select_topk
    blocks = REFERENCE.select_pool_blocks(scores, torch.tensor([9]), 3, 2, select=select)
    assert torch.equal(blocks, torch.tensor([[1, 2, 4] if reverse else [0, 1, 4]]))
