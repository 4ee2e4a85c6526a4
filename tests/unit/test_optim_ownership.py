"""Who owns which parameter, all optimisers as one, and the schedules: each against a table."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

from finwhale.config import preset
from finwhale.config.inventory import checkpoint_tensors
from finwhale.config.presets import unit, with_compressed_vocab
from finwhale.config.run import ScheduleConfig
from finwhale.model import Backbone
from finwhale.optim.optimizers import OptimizerError, Optimizers, learning_rate
from finwhale.optim.ownership import OwnershipError, Rule, owners, rule_for

REPORT = {"scheme": "report", "indexer": "muon", "router": "muon"}
# One layer with window attention, one Full, one of experts and one of Engram, in released names;
# (optimizer, heads, lr_scale, weight_decay, eps of AdamW) written down from the report.
_MUON, _SCALE = ("muon", 1, 1, 0.1), ("adamw", 1, 1, 0, 1e-8)
_NORM = ("adamw", 1, 1, 0.1, 1e-20)
EXPECTED = {
    "embed.weight": ("sinkhorn", 1, 1, 0),
    "head.weight": ("sinkhorn", 1, 1, 0),
    "norm.weight": _NORM,
    "layers.1.engram.embed.weight": ("sinkhorn", 1, 5, 0),
    "layers.1.engram.wkv.weight": _MUON,
    "layers.1.engram.q_weight": _SCALE,
    "layers.1.engram.k_weight": _SCALE,
    "layers.1.attn_norm.weight": _NORM,
    "layers.1.ffn_norm.weight": _NORM,
    "layers.1.attn.wq_a.weight": _MUON,
    "layers.1.attn.q_norm.weight": _NORM,
    "layers.1.attn.wq_b.weight": ("muon", 2, 1, 0.1),
    "layers.1.attn.wkv.weight": _MUON,
    "layers.1.attn.kv_norm.weight": _NORM,
    "layers.1.attn.wo_a.weight": ("muon", 2, 1, 0.1),
    "layers.1.attn.wo_b.weight": _MUON,
    "layers.1.attn.attn_sink": _SCALE,
    "layers.1.attn.compressor.wkv.weight": _MUON,
    "layers.1.attn.compressor.wgate.weight": _MUON,
    "layers.1.attn.compressor.norm.weight": _NORM,
    "layers.1.attn.indexer.wq_b.weight": ("muon", 24, 3, 0.1),
    "layers.1.attn.indexer.weights_proj.weight": ("muon", 1, 3, 0.1),
    "layers.1.attn.indexer.wk.weight": ("muon", 1, 3, 0.1),
    "layers.1.attn.indexer.k_norm.weight": ("adamw", 1, 3, 0, 1e-8),
    "layers.1.hc_attn_fn": _MUON,
    "layers.1.hc_attn_base": _SCALE,
    "layers.1.hc_attn_scale": _SCALE,
    "layers.1.hc_ffn_fn": _MUON,
    "layers.1.hc_ffn_base": _SCALE,
    "layers.1.hc_ffn_scale": _SCALE,
    "layers.1.ffn.gate.weight": _MUON,
    "layers.1.ffn.experts.3.w1.weight": _MUON,
    "layers.1.ffn.experts.3.w2.weight": _MUON,
    "layers.1.ffn.experts.3.w3.weight": _MUON,
    "layers.1.ffn.shared_experts.w1.weight": _MUON,
    "layers.1.ffn.shared_experts.w2.weight": _MUON,
    "layers.1.ffn.shared_experts.w3.weight": _MUON,
}


def _meta_model(name: str) -> Backbone:
    config = preset(name)
    with torch.device("meta"):
        return Backbone(with_compressed_vocab(config, config.text_config.vocab_size))


def _model(seed: int = 0) -> Backbone:
    """One layer of each kind is enough: the unit preset with two experts."""
    config = with_compressed_vocab(unit(), 512)
    text = replace(config.text_config, n_routed_experts=2)
    model = Backbone(replace(config, text_config=text))
    model.init_weights(seed)
    return model


def _give_gradients(model: Backbone, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def _fields(rule: Rule) -> tuple:
    values = (rule.optimizer, rule.heads, rule.lr_scale, rule.weight_decay)
    return (*values, rule.eps) if rule.optimizer == "adamw" else values


def test_the_report_scheme_is_the_table():
    shapes = {n: tuple(p.shape) for n, p in _meta_model("unit").named_parameters()}
    rules = owners(_meta_model("unit"), **REPORT, indexer_lr_scale=3.0)
    kinds = {re.sub(r"layers\.\d+", "layers.1", name): name for name in shapes}
    kinds = {re.sub(r"experts\.\d+", "experts.3", kind): name for kind, name in kinds.items()}
    assert {kind: _fields(rules[name]) for kind, name in kinds.items()} == EXPECTED


@pytest.mark.parametrize("name", ["unit", "demo", "nano", "mini"])
@pytest.mark.parametrize("scheme", ["report", "adamw", "muon_adamw"])
def test_every_parameter_of_a_preset_has_one_rule(name, scheme):
    model = _meta_model(name)
    rules = owners(model, scheme=scheme, indexer="adamw", router="adamw")
    names = [name for name, _ in model.named_parameters()]
    assert sorted(rules) == sorted(names)
    for parameter_name, parameter in model.named_parameters():
        rule = rules[parameter_name]
        if rule.optimizer != "adamw":
            assert parameter.dim() == 2
            assert parameter.shape[0] % rule.heads == 0


def test_every_text_tensor_of_the_release_has_a_rule_but_the_routing_biases():
    config = preset("flash")
    for tensor in checkpoint_tensors(config):
        if not tensor.is_text:
            continue
        if tensor.name.endswith((".bias", ".bias_vl")):
            with pytest.raises(OwnershipError, match="bias"):
                rule_for(tensor.name, tensor.shape, config.text_config, **REPORT)
        else:
            rule = rule_for(tensor.name, tensor.shape, config.text_config, **REPORT)
            assert tensor.shape[0] % rule.heads == 0


def test_heads_are_those_of_the_release():
    text = preset("flash").text_config

    def heads(name: str, *shape: int) -> int:
        return rule_for(f"layers.2.attn.{name}.weight", shape, text, **REPORT).heads

    assert heads("wq_b", 64 * 512, 1280) == 64
    assert heads("indexer.wq_b", 32 * 128, 1280) == 32
    assert heads("wo_a", 8 * 1024, 4096) == 8
    assert heads("wkv", 512, 5120) == 1


def test_adamw_scheme_decays_matrices_and_gives_tables_five_times_the_rate():
    rules = owners(_meta_model("unit"), scheme="adamw", indexer="frozen", router="muon")
    assert {rule.optimizer for rule in rules.values()} == {"adamw", "frozen"}
    decayed = {name for name, rule in rules.items() if rule.weight_decay}
    for part in ("norm", "attn_sink", "_base", "_scale", "q_weight", "k_weight", "engram.embed"):
        assert not [name for name in decayed if part in name], part
    for part in ("wq_a", "w1", "gate.weight", "hc_attn_fn", "wkv"):
        assert [name for name in decayed if part in name], part
    assert {"embed.weight", "head.weight"} <= decayed
    tables = [rule for name, rule in rules.items() if "engram.embed" in name]
    assert {rule.lr_scale for rule in tables} == {5.0}
    assert {rule.eps for rule in rules.values()} == {1e-8}


def test_muon_adamw_differs_from_the_report_in_the_tables_only():
    model = _meta_model("unit")
    report, ablation = (
        owners(model, **{**REPORT, "scheme": scheme}) for scheme in ("report", "muon_adamw")
    )
    differ = {name for name in report if report[name] != ablation[name]}
    assert differ == {name for name in report if name.endswith(("embed.weight", "head.weight"))}
    assert {ablation[name].optimizer for name in differ} == {"adamw"}


@pytest.mark.parametrize("choice", ["frozen", "adamw", "muon"])
def test_the_indexer_choice_moves_the_indexer_alone(choice):
    model = _meta_model("unit")
    base = owners(model, scheme="report", indexer="frozen", router="muon")
    rules = owners(model, scheme="report", indexer=choice, router="muon", indexer_lr_scale=2.0)
    for name, rule in rules.items():
        if ".attn.indexer." not in name:
            assert rule == base[name]
        elif choice == "frozen":
            assert rule.optimizer == "frozen"
        else:
            assert rule.lr_scale == 2.0
            expected = "adamw" if "norm" in name else choice
            assert rule.optimizer == expected
            assert rule.weight_decay == (0.1 if expected == "muon" else 0.0)


def test_the_router_choice_moves_gate_weight_alone():
    model = _meta_model("unit")
    muon, adamw = (
        owners(model, scheme="report", indexer="frozen", router=r) for r in ("muon", "adamw")
    )
    differ = {name for name in muon if muon[name] != adamw[name]}
    assert differ == {name for name in muon if name.endswith("gate.weight") and "ffn" in name}
    assert {_fields(adamw[name]) for name in differ} == {("adamw", 1, 1.0, 0.1, 1e-8)}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scheme": "sgd"}, "scheme"),
        ({"indexer": "dense"}, "indexer"),
        ({"router": "sinkhorn"}, "router"),
        ({"scheme": "adamw", "indexer": "muon"}, "indexer"),
    ],
    ids=str,
)
def test_unknown_and_contradicting_choices_are_refused(change, field):
    with pytest.raises(OwnershipError, match=field):
        rule_for("embed.weight", (4, 4), unit().text_config, **{**REPORT, **change})


@pytest.mark.parametrize(
    ("name", "shape"),
    [("layers.0.attn.new.weight", (4, 4)), ("layers.0.ffn.experts.0.w1.weight", (2, 4, 4))],
    ids=str,
)
def test_a_parameter_without_a_rule_is_refused_by_name(name, shape):
    with pytest.raises(OwnershipError, match=re.escape(name)):
        rule_for(name, shape, unit().text_config, **REPORT)


def test_a_tensor_under_two_names_is_refused():
    model = _model()
    model.head.weight = model.embed.weight
    with pytest.raises(OwnershipError, match="same tensor"):
        owners(model, **REPORT)


def test_groups_hold_every_parameter_once_and_freezing_follows_the_rules():
    model = _model()
    optimizers = Optimizers(model)
    names = [name for group in optimizers.groups for name in group.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    total = sum(group.num_parameters for group in optimizers.groups)
    assert total == sum(p.numel() for p in model.parameters())
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".indexer." in name}
    Optimizers(model, indexer="adamw")
    assert all(p.requires_grad for p in model.parameters())


def test_parts_divide_the_parameters():
    model = _model()
    optimizers = Optimizers(model, indexer="muon")
    trained = optimizers.parameters_of("trained")
    assert len(trained) == len(list(model.parameters()))
    indexer, backbone = (optimizers.parameters_of(p) for p in ("indexer", "backbone"))
    assert len(indexer) + len(backbone) == len(trained)
    expected = [p for n, p in model.named_parameters() if ".attn.indexer." in n]
    assert [id(p) for p in indexer] == [id(p) for p in expected]
    kinds = [len(optimizers.parameters_of(k)) for k in ("muon", "sinkhorn", "adamw", "frozen")]
    assert sum(kinds) == len(trained)
    assert Optimizers(model).parameters_of("indexer") == []
    with pytest.raises(OptimizerError, match="part"):
        optimizers.parameters_of("experts")


def test_one_step_moves_each_part_by_its_own_size():
    """Sinkhorn rows by 0.18 lr, tables by five times that, Muon by 0.18 lr, AdamW by lr."""
    model = _model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = Optimizers(model, weight_decay=0.0)
    _give_gradients(model, 1)
    optimizers.step(0.01)
    rms = {
        name: float((p.detach() - before[name]).square().mean().sqrt())
        for name, p in model.named_parameters()
    }
    assert rms["embed.weight"] == pytest.approx(0.0018, rel=1e-3)
    assert rms["head.weight"] == pytest.approx(0.0018, rel=1e-3)
    assert rms["layers.1.engram.embed.weight"] == pytest.approx(0.009, rel=1e-3)
    assert rms["layers.1.attn.wq_b.weight"] == pytest.approx(0.0018, rel=0.05)
    assert rms["layers.1.attn_norm.weight"] == pytest.approx(0.01, rel=1e-3)
    assert all(rms[name] == 0 for name in rms if ".indexer." in name)
    optimizers.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_missing_gradient_is_a_zero_gradient():
    models = [_model(), _model()]
    for model, is_static in zip(models, (False, True), strict=True):
        optimizers = Optimizers(model, indexer="adamw")
        _give_gradients(model, 1)
        optimizers.step(0.01)
        optimizers.zero_grad(set_to_none=not is_static)
        assert all((p.grad is None) != is_static for p in model.parameters())
        optimizers.step(0.01)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_tensor_rate_equals_a_number():
    models = [_model(), _model()]
    for model, lr in zip(models, (0.01, torch.tensor(0.01, dtype=torch.float64)), strict=True):
        optimizers = Optimizers(model)
        _give_gradients(model, 1)
        optimizers.step(lr)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "choices",
    [
        {"scheme": "report", "indexer": "muon"},
        {"scheme": "muon_adamw", "indexer": "adamw", "router": "adamw"},
        {"scheme": "adamw"},
    ],
    ids=str,
)
def test_resumed_steps_equal_uninterrupted_ones(choices, tmp_path):
    def steps(model: Backbone, optimizers: Optimizers, first: int, last: int) -> None:
        for n in range(first, last):
            _give_gradients(model, n)
            optimizers.step(0.01 / (n + 1))

    whole = _model()
    steps(whole, Optimizers(whole, **choices), 0, 3)
    stopped = _model()
    optimizers = Optimizers(stopped, **choices)
    steps(stopped, optimizers, 0, 1)
    torch.save({"model": stopped.state_dict(), "o": optimizers.state_dict()}, tmp_path / "s.pt")
    state = torch.load(tmp_path / "s.pt", weights_only=True)
    resumed, forgetful = _model(seed=1), _model(seed=1)
    for model in (resumed, forgetful):
        model.load_state_dict(state["model"])
    optimizers = Optimizers(resumed, **choices)
    optimizers.load_state_dict(state["o"])
    steps(resumed, optimizers, 1, 3)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    # Without the optimiser state the same steps lead elsewhere.
    steps(forgetful, Optimizers(forgetful, **choices), 1, 3)
    assert not torch.equal(whole.embed.weight, forgetful.embed.weight)


def test_the_state_of_other_owners_is_refused():
    model = _model()
    state = Optimizers(model).state_dict()
    with pytest.raises(OptimizerError, match="adamw, muon"):
        Optimizers(model, router="adamw").load_state_dict(state)
    with pytest.raises(OptimizerError, match="sinkhorn"):
        Optimizers(model, engram_lr_scale=1.0).load_state_dict(state)
    with pytest.raises(OptimizerError, match="owners"):
        Optimizers(model).load_state_dict({"state": {}, "param_groups": []})


def test_report_schedule_at_its_corners():
    """100 steps: warm-up to 9, flat to 60, cosine to a tenth at 80, constant to the end."""
    schedule = ScheduleConfig(steps=100, warmup_steps=10, min_ratio=0.1)
    rates = [
        learning_rate(step, 2.0, schedule, shape="report", hold_until=0.6, decay_until=0.8)
        for step in range(100)
    ]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9:61] == [2.0] * 52
    assert rates[61] < 2.0
    assert rates[65] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + 0.5**0.5) / 2))  # cos(45 degrees)
    assert rates[70] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[79] > 0.2
    assert rates[80:] == [pytest.approx(0.2)] * 20
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


def test_report_schedule_defaults_are_its_token_counts():
    schedule = ScheduleConfig(steps=45, warmup_steps=0, min_ratio=0.1)
    rates = [learning_rate(step, 2.6e-4, schedule, shape="report") for step in range(45)]
    assert rates[28] == 2.6e-4
    assert rates[29] < 2.6e-4
    assert rates[40] == pytest.approx(2.6e-5)
    assert rates[39] > rates[40] == rates[44]


@pytest.mark.parametrize(
    ("corner", "expected"), [(1, [2.0] * 4), (0, [0.2] * 4), (0.5, [2.0, 2.0, 0.2, 0.2])], ids=str
)
def test_report_schedule_without_a_slope_is_a_step(corner, expected):
    schedule = ScheduleConfig(steps=4, warmup_steps=0, min_ratio=0.1)
    rates = [
        learning_rate(step, 2.0, schedule, shape="report", hold_until=corner, decay_until=corner)
        for step in range(4)
    ]
    assert rates == pytest.approx(expected)


def test_impossible_schedules_are_refused():
    schedule = ScheduleConfig(steps=4, warmup_steps=0)
    with pytest.raises(OptimizerError, match="shape"):
        learning_rate(0, 1.0, schedule, shape="linear")
    for hold, decay in ((0.8, 0.6), (-0.1, 0.5), (0.5, 1.1)):
        with pytest.raises(OptimizerError, match="hold_until"):
            learning_rate(0, 1.0, schedule, hold_until=hold, decay_until=decay)
