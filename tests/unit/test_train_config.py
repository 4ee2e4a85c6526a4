"""The run value: typed overrides, refusals by path, no field that nothing reads."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path

import pytest

import finwhale
import recipes.pretrain
from finwhale.config.model import ConfigError, ModelConfig
from finwhale.config.presets import demo, nano
from finwhale.config.run import RunConfig, with_overrides
from recipes.pretrain import unit_smoke

RUN = RunConfig(model=demo())


@pytest.mark.parametrize(
    ("setting", "read", "value"),
    [
        ("optim.lr=6e-4", lambda r: r.optim.lr, 6e-4),
        ("schedule.steps=1_500", lambda r: r.schedule.steps, 1500),
        ("cache_rounding=False", lambda r: r.cache_rounding, False),
        ("data.corpus=texts/a=b", lambda r: r.data.corpus, "texts/a=b"),
        ("data.tokenizer=t.json", lambda r: r.data.tokenizer, "t.json"),
        ("data.tokenizer=none", lambda r: r.data.tokenizer, None),
        ("model=nano", lambda r: r.model, nano()),
        ("model.text_config.n_routed_experts=8", lambda r: r.model.text_config.n_routed_experts, 8),
        (
            "model.text_config.candidate_topk_blocks=16",
            lambda r: r.model.text_config.candidate_topk_blocks,
            16,
        ),
    ],
)
def test_overrides_are_typed_by_their_field(setting, read, value):
    changed = read(with_overrides(RUN, [setting]))
    assert changed == value
    assert type(changed) is type(value)


def test_overrides_apply_in_order_and_leave_the_rest():
    changed = with_overrides(RUN, ["seed=3", "seed=4"])
    assert changed.seed == 4
    assert {**changed.to_json(), "seed": 0} == RUN.to_json()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.lr", "expected path=value"),
        ("=3", "expected path=value"),
        ("steps=3", "steps: unknown field; expected one of model, data"),
        ("schedule.step=3", "schedule.step: unknown field; did you mean 'steps'?"),
        ("schedule.steps=3.5", "schedule.steps: got '3.5', expected a whole number"),
        ("optim.lr=fast", "optim.lr: got 'fast', expected a number"),
        ("cache_rounding=1", "cache_rounding: got '1', expected true or false"),
        ("optim=3", "optim: is a group of fields; set one of optim.scheme, optim.lr"),
        ("seed.x=3", "seed: is a int and has no fields"),
        ("optim.lr=-1", "optim.lr: got -1.0, expected above 0"),
        ("optim.lr=nan", "optim.lr: got nan, expected above 0"),
        ("schedule.warmup_steps=9999", "warmup_steps: got 9999, expected between 0"),
        ("micro_batch_rows=3", "micro_batch_rows: got 3, expected a divisor of batch_rows = 8"),
        ("sequence_length=100000", "sequence_length: got 100000, expected at most"),
        ("model=foo", "model: preset: got 'foo', expected one of unit"),
        ("model.text_config.o_groups=3", "o_groups: got 3, expected a divisor"),
    ],
)
def test_wrong_overrides_are_refused_by_path(setting, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        with_overrides(RUN, [setting])
    assert str(error.value).startswith(f"--set {setting}: ")


def test_run_is_a_value_that_json_carries():
    with pytest.raises(FrozenInstanceError):
        RUN.seed = 1
    stored = json.loads(json.dumps(RUN.to_json()))
    assert ModelConfig.from_json(stored["model"]) == RUN.model
    assert stored["optim"]["lr"] == RUN.optim.lr


@pytest.mark.parametrize("name", ["demo_cpu", "nano_cpu", "unit_smoke"])
def test_recipes_return_whole_runs(name):
    run = getattr(recipes.pretrain, name)()
    assert isinstance(run, RunConfig)
    assert run == getattr(recipes.pretrain, name)()


def test_every_field_is_used_outside_the_configuration():
    package = Path(finwhale.__file__).parent
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
        if path.parent.name != "config"
    )
    run = unit_smoke()
    owners = [run, *(getattr(run, f.name) for f in fields(run) if f.name != "model")]
    names = [f.name for owner in owners if is_dataclass(owner) for f in fields(owner)]
    assert [name for name in names if f".{name}" not in source] == []
