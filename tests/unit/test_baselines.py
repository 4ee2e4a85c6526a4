"""The two baselines: what reaches a token, packed rows, sizes, and the shared training loop."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from finwhale.baselines import dense_baseline as dense_module
from finwhale.baselines.dense_baseline import DenseBaseline, dense_baseline, document_masks
from finwhale.checkpoint.hashed_weights import fill_hashed
from finwhale.config import AttentionMode, ConfigError, ModelConfig, preset
from finwhale.config.accounting import account
from finwhale.config.presets import (
    DENSE_HEAD_DIM,
    dense_shape,
    unit,
    window_only,
    with_compressed_vocab,
)
from finwhale.config.run import (
    IndexerConfig,
    OptimConfig,
    QuantizationConfig,
    RunConfig,
    ScheduleConfig,
)
from finwhale.data.packing import NO_TARGET, pack
from finwhale.model import Backbone, Numerics, Packing
from finwhale.ops import FAST
from finwhale.train import record
from finwhale.train.evaluate import answer_accuracy, bits_per_byte
from finwhale.train.loop import build_model, build_optimizers, train
from finwhale.train.loss import Batch, loss_sum
from finwhale.train.step import TrainStep
from recipes.pretrain import unit_smoke

CONFIG = with_compressed_vocab(unit(), 512)
TEXT = CONFIG.text_config
W, LAYERS = TEXT.sliding_window, TEXT.num_hidden_layers
REACH = LAYERS * (W - 1)


def dense_of(seed: int = 3, spread: float = 4.0) -> DenseBaseline:
    """Return a dense baseline whose attention is far from even: weights `spread` times wider."""
    model = dense_baseline(CONFIG, ops=FAST)
    model.init_weights(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 2:
                tensor *= spread
    return model


def run_of(baseline: str, **more) -> RunConfig:
    return RunConfig(
        model=CONFIG,
        baseline=baseline,
        **{
            "batch_rows": 4,
            "micro_batch_rows": 4,
            "sequence_length": 40,
            "cache_rounding": False,
            "optim": OptimConfig(scheme="report", lr=2e-3),
            "schedule": ScheduleConfig(steps=10, warmup_steps=0),
            **more,
        },
    )


def batch_of() -> Batch:
    generator = np.random.default_rng(0)
    documents = [generator.integers(3, 500, n).tolist() for n in (41, 30, 9, 25, 14, 38)]
    return Batch.of(pack(documents, sequence_length=40, pad_id=2), np.arange(4))


def training_of(run: RunConfig) -> TrainStep:
    model = build_model(run, CONFIG, torch.arange(512))
    return TrainStep(run, model, build_optimizers(run, model))


# The window-only model.


def far_gradients(config: ModelConfig, tokens: int) -> torch.Tensor:
    """Return [tokens], the size of the last logits' gradient at the embedding of each token."""
    model = Backbone(config, torch.arange(512), Numerics(cache_rounding=False), FAST)
    fill_hashed(model, 0)
    # Every position has an id of its own, so a row of the embedding belongs to one position.
    ids = torch.randperm(500, generator=torch.Generator().manual_seed(1))[:tokens]
    model(ids.unsqueeze(0))[0, -1].square().sum().backward()
    return model.embed.weight.grad[ids].abs().amax(-1)


def test_no_token_behind_the_windows_of_all_layers_reaches_a_logit():
    found = far_gradients(window_only(CONFIG), REACH + 12)
    assert torch.equal(found[:11], torch.zeros(11))
    # Control: the last token that the windows reach does, and so does every nearer one.
    assert (found[11:] > 0).all()


def test_negative_control_the_whole_model_reaches_further():
    assert (far_gradients(CONFIG, REACH + 12)[:11] > 0).any()


def test_another_id_behind_the_windows_leaves_the_logits_alone():
    """With it the discrete paths, which no gradient shows: routing and n-grams."""
    model = Backbone(window_only(CONFIG), torch.arange(512), Numerics(cache_rounding=False), FAST)
    fill_hashed(model, 0)
    ids = torch.arange(3, 3 + REACH + 4).unsqueeze(0)
    other = ids.clone()
    other[0, 2] = 500
    with torch.no_grad():
        difference = (model(ids) - model(other)).abs().amax(-1)[0]
    assert (difference[:2] < 1e-5).all()
    assert (difference[2 : 2 + W] > 1e-3).all()
    # REACH + 3 is the first token that does not see position 2.
    assert difference[REACH + 3] < 1e-5


def test_window_only_keeps_everything_but_the_global_parts():
    for name in ("unit", "demo", "nano", "mini"):
        config = preset(name)
        found, whole = account(window_only(config)), account(config)
        gone = set(whole.parameters) - set(found.parameters)
        assert gone == {"compressors", "indexers"}, name
        # Norms of compressors and indexers count as theirs or as norms; nothing else may change.
        kept = {k: v for k, v in whole.parameters.items() if k not in {*gone, "norms"}}
        assert {k: found.parameters[k] for k in kept} == kept, name
        assert found.kv_bytes_per_token == 0
        text = config.text_config
        assert found.exact_tail_rows == 1 + text.num_hidden_layers * (text.sliding_window - 1)
        assert ModelConfig.from_json(window_only(config).to_json()) == window_only(config)


def test_schedule_without_global_entries_must_be_whole():
    """One remaining source, ratio, or a cut outside the layers is still refused."""
    text = window_only(CONFIG).text_config
    for field, value in (
        ("kv_source_layer_ids", (1,)),
        ("index_source_layer_ids", (1,)),
        ("compress_ratios", (0, 2) + (0,) * (LAYERS - 2)),
        ("candidate_source_layer_id", LAYERS),
        ("candidate_source_layer_id", -1),
    ):
        with pytest.raises(ConfigError):
            replace(text, **{field: value})


# The dense transformer.


@pytest.mark.parametrize("name", ["unit", "demo", "nano", "mini", "small"])
def test_dense_active_parameters_are_those_of_the_model(name):
    config = preset(name)
    shape = dense_shape(config)
    wanted = sum(account(config).activated_decode.values())
    assert abs(shape.activated_parameters - wanted) <= 0.02 * wanted
    assert shape.num_attention_heads * DENSE_HEAD_DIM == shape.hidden_size
    assert 1.5 < shape.intermediate_size / shape.hidden_size < 4


def test_dense_formula_counts_what_was_built():
    model = dense_baseline(CONFIG)
    built = sum(p.numel() for p in model.parameters())
    assert built - model.embed.weight.numel() == model.shape.activated_parameters


def test_dense_refuses_a_budget_below_one_layer():
    tiny = replace(TEXT, vocab_size=1 << 19, engram_compressed_vocab_size=512)
    wide = replace(CONFIG, text_config=replace(tiny, hidden_size=96, engram_layer_ids=(),
                                               engram_num_embeddings=()))  # fmt: skip
    with pytest.raises(ConfigError, match="narrower model or a smaller vocabulary"):
        dense_shape(wide)


def slow_logits(model: DenseBaseline, ids: torch.Tensor) -> torch.Tensor:
    """Return logits [T, V] of one document in float64: complex rotations, one query at a time."""
    w = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def norm(x, name):
        return x / (x * x).mean(-1, keepdim=True).sqrt() * w[f"{name}.weight"]

    def turned(x):  # [T, C]
        pairs = torch.view_as_complex(x.reshape(len(ids), -1, 32, 2))
        theta = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
        angles = torch.arange(len(ids), dtype=torch.float64)[:, None] * theta
        whole = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])
        return whole.reshape(len(ids), -1, 64)  # [T, H, D]

    x = w["embed.weight"][ids]
    for layer in range(model.shape.num_hidden_layers):
        at = f"layers.{layer}"
        y = norm(x, f"{at}.attn_norm")
        q, k = (turned(y @ w[f"{at}.attn.{n}.weight"].T) for n in ("wq", "wk"))
        v = (y @ w[f"{at}.attn.wv.weight"].T).view(len(ids), -1, 64)
        rows = []
        for t in range(len(ids)):
            p = (torch.einsum("hd,shd->hs", q[t], k[: t + 1]) / 8).softmax(-1)
            rows.append(torch.einsum("hs,shd->hd", p, v[: t + 1]).flatten())
        x = x + torch.stack(rows) @ w[f"{at}.attn.wo.weight"].T
        y = norm(x, f"{at}.ffn_norm")
        gate = y @ w[f"{at}.ffn.w1.weight"].T
        up = y @ w[f"{at}.ffn.w3.weight"].T
        x = x + (gate / (1 + (-gate).exp()) * up) @ w[f"{at}.ffn.w2.weight"].T
    return norm(x, "norm") @ w["head.weight"].T


@pytest.mark.parametrize("lengths", [(1,), (2,), (11,), (1, 7, 3), (5, 1, 1, 4)])
def test_dense_equals_the_slow_form_document_by_document(lengths, monkeypatch):
    monkeypatch.setattr(dense_module, "_QUERY_BLOCK", 4)
    model, ids = dense_of(), torch.arange(3, 3 + sum(lengths)).unsqueeze(0)
    with torch.no_grad():
        found = model(ids, packing=Packing.from_lengths([list(lengths)]))[0]
    wanted = torch.cat([slow_logits(model, part) for part in ids[0].split(lengths)])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def packed_batch(lengths: list[int], *, as_one: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(3, 500, (1, sum(lengths)), generator=generator)
    targets = torch.randint(3, 500, (1, sum(lengths)), generator=generator)
    rows = [[sum(lengths)] if as_one else lengths]
    packing = Packing.from_lengths(rows)
    return Batch(ids=ids, targets=targets, is_token=ids > 0, packing=packing)


def loss_and_gradients(model: DenseBaseline, batches: list[Batch]) -> list[torch.Tensor]:
    model.zero_grad()
    total = sum(loss_sum(model, batch, chunk_tokens=64) for batch in batches)
    total.backward()
    return [total.detach(), *(p.grad.clone() for p in model.parameters())]


def separate(batch: Batch) -> list[Batch]:
    lengths = list(batch.packing.lengths[0])
    ids, targets = batch.ids.split(lengths, 1), batch.targets.split(lengths, 1)
    return [
        Batch(ids=i, targets=t, is_token=i > 0, packing=Packing.whole(*i.shape))
        for i, t in zip(ids, targets, strict=True)
    ]


def test_dense_packed_rows_equal_separate_documents_with_gradients(monkeypatch):
    monkeypatch.setattr(dense_module, "_QUERY_BLOCK", 8)
    model, batch = dense_of(), packed_batch([9, 1, 13, 6])
    found = loss_and_gradients(model, [batch])
    for a, b in zip(found, loss_and_gradients(model, separate(batch)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    # Control: without the layout, documents see each other.
    as_one = loss_and_gradients(model, [packed_batch([9, 1, 13, 6], as_one=True)])
    assert abs(float(as_one[0] - found[0])) > 1e-2


def test_dense_sees_its_own_past_and_nothing_else():
    model = dense_of()
    ids = torch.arange(3, 43).unsqueeze(0)
    packing = Packing.from_lengths([[17, 23]])
    model.hidden(ids, packing=packing)[0, 25].square().sum().backward()
    reached = model.embed.weight.grad[3:43].abs().amax(-1) > 0
    assert reached.nonzero().flatten().tolist() == list(range(17, 26))


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 9])
def test_masks_of_blocks_are_the_rows_of_one_mask(tokens, monkeypatch):
    positions = Packing.from_lengths([[tokens], [1] * tokens]).positions
    monkeypatch.setattr(dense_module, "_QUERY_BLOCK", 4)
    blocks = document_masks(positions, torch.float32)
    for row, wanted in enumerate((torch.ones(tokens, tokens).tril(), torch.eye(tokens))):
        at = 0
        for block in blocks:
            size, keys = block.shape[-2:]
            assert torch.equal(block[row, 0] == 0, wanted[at : at + size, :keys].bool())
            assert not wanted[at : at + size, keys:].any()
            at += size
        assert at == tokens


def test_dense_in_bf16_follows_fp32_and_keeps_fp32_parameters():
    wide = dense_of(spread=1.0)
    narrow = dense_baseline(
        CONFIG, numerics=Numerics(dtype=torch.bfloat16, weight_dtype=torch.float32), ops=FAST
    )
    narrow.load_state_dict(wide.state_dict())
    ids = torch.arange(3, 60).unsqueeze(0)
    hidden = narrow.hidden(ids)
    assert hidden.dtype is torch.bfloat16
    assert narrow.head.weight.dtype is torch.float32
    assert (hidden.float() - wide.hidden(ids)).norm() < 0.03 * wide.hidden(ids).norm()


def test_dense_refuses_what_it_cannot_read():
    model = dense_of()
    for ids in (torch.zeros(4, dtype=torch.int64), torch.full((1, 3), 512), torch.zeros(1, 3)):
        with pytest.raises(ValueError, match="ids"):
            model(ids)
    with pytest.raises(ValueError, match="packing"):
        model(torch.ones(1, 3, dtype=torch.int64), packing=Packing.whole(1, 4))
    assert model(torch.zeros(1, 0, dtype=torch.int64)).shape == (1, 0, 512)


# Both in the loop.


def test_dense_parameters_have_the_owners_of_the_scheme():
    run = run_of("dense")
    optimizers = build_optimizers(run, build_model(run, CONFIG, torch.arange(512)))
    rules = optimizers.rules
    heads = dense_shape(CONFIG).num_attention_heads
    for name in ("wq", "wk", "wv", "wo"):
        rule = rules[f"layers.0.attn.{name}.weight"]
        assert (rule.optimizer, rule.heads) == ("muon", 1 if name == "wo" else heads)
    assert all(rules[f"layers.0.ffn.{n}.weight"].optimizer == "muon" for n in ("w1", "w2", "w3"))
    assert rules["embed.weight"].optimizer == rules["head.weight"].optimizer == "sinkhorn"
    assert {r.optimizer for n, r in rules.items() if "norm" in n} == {"adamw"}


@pytest.mark.parametrize("baseline", ["window", "dense"])
@pytest.mark.parametrize("form", ["frozen", "annealed"])
def test_loss_of_one_batch_falls(baseline, form):
    training = training_of(run_of(baseline, indexer=IndexerConfig(form=form)))
    batch, losses = batch_of(), []
    for step in range(3):
        measured = training.gradients(batch, step)
        assert measured.index_losses == {}
        assert measured.index_grad_norm == 0
        losses.append(measured.loss)
        training.update(2e-3)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("baseline", ["window", "dense"])
def test_parts_of_a_batch_add_up_and_the_deployed_phase_runs(baseline):
    """The last phase has stored weights for the window model, and none for the dense one."""
    found = []
    for rows in (4, 1):
        run = run_of(
            baseline,
            micro_batch_rows=rows,
            # The balance loss counts the tokens of a row either way.
            quantization=QuantizationConfig(start=0.5, replay=0.5),
        )
        training = training_of(run)
        measured = training.gradients(batch_of(), 9)
        found.append((measured.loss, measured.grad_norm))
        assert all(torch.isfinite(p.grad).all() for p in training.model.parameters())
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_dense_is_traced_layer_by_layer():
    training = training_of(run_of("dense"))
    (_, trace), *_ = training.traces(batch_of(), 0)
    assert sorted(trace) == sorted(f"streams.{n}" for n in range(len(training.model.specs) + 1))


def test_bits_of_a_dense_model_that_knows_nothing_are_even():
    """A zero head gives every token log2(V) bits; id 0 is then the best of all."""
    model = dense_of()
    with torch.no_grad():
        model.head.weight.zero_()
    packed = pack([[7] * 30, [9] * 12], sequence_length=16, pad_id=2)
    count = int((packed.targets != NO_TARGET).sum())
    assert bits_per_byte(model, packed, count, chunk_tokens=8) == pytest.approx(9.0, abs=1e-5)
    assert answer_accuracy(model, packed) == 0.0


@pytest.fixture(scope="module")
def folder_of_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.default_rng(5)
    letters = np.array(list("etaoinshrdlu"))
    lexicon = ["".join(generator.choice(letters, generator.integers(2, 8))) for _ in range(300)]
    for number in range(60):
        lines = [" ".join(generator.choice(lexicon, 9)) + ".\n" for _ in range(6)]
        (folder / f"text{number}.txt").write_text("".join(lines))
    return folder


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize("baseline", [pytest.param("window", marks=pytest.mark.slow), "dense"])
def test_stopped_and_resumed_run_equals_one_that_went_through(
    baseline, folder_of_text, tmp_path, monkeypatch
):
    """Stopped between two saves, so a step is repeated."""
    # Plots are drawn at the end and cost more than the steps.
    monkeypatch.setattr(record, "draw_plots", lambda *_: None)
    base = unit_smoke()
    run = replace(
        base,
        data=replace(
            base.data, corpus=str(folder_of_text), train_bytes=12_000, validation_bytes=900
        ),
        schedule=replace(base.schedule, steps=4, warmup_steps=1),
        baseline=baseline,
        batch_rows=2,
        sequence_length=32,
        save_every=2,
        eval_every=0,
    )

    def stop(values) -> None:
        if values["step"] == 3:
            raise _StoppedError

    quiet = Console(file=io.StringIO())
    whole = train(run, tmp_path / "whole", console=quiet)
    with pytest.raises(_StoppedError):
        train(run, tmp_path / "stopped", console=quiet, on_step=stop)
    resumed = train(run, tmp_path / "stopped", console=quiet, resume=True)
    assert isinstance(whole.model, DenseBaseline) == (baseline == "dense")
    modes = {spec.mode for spec in whole.model.specs}
    assert modes == {AttentionMode.WINDOW}
    curves = [record.curve(record.read_metrics(tmp_path / name)) for name in ("whole", "stopped")]
    assert curves[0] == curves[1]
    assert curves[0][-1]["loss"] < curves[0][0]["loss"]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
