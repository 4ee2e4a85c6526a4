"""Generation with state equals generation without; sampling by hand."""

import pytest
import torch

from finwhale.engine.generate import (
    GenerationStats,
    generate,
    generate_uncached,
    next_token_probabilities,
)
from finwhale.engine.prefill import exact_decoder_rows
from finwhale.model import Numerics
from tests.models import token_ids, unit_model

MODEL = unit_model()
PROMPT = token_ids(1, 41)[0].tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1], PROMPT[:8]])
def test_cached_tokens_equal_uncached_tokens(prompt, options):
    cached = list(generate(MODEL, prompt, max_new_tokens=12, **options))
    assert cached == list(generate_uncached(MODEL, prompt, max_new_tokens=12, **options))
    assert cached == list(generate(MODEL, prompt, max_new_tokens=12, prefill="full", **options))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5}])
def test_cached_tokens_equal_uncached_tokens_with_cache_rounding(options):
    model = unit_model(Numerics())
    cached = list(generate(model, PROMPT, max_new_tokens=24, **options))
    assert cached == list(generate_uncached(model, PROMPT, max_new_tokens=24, **options))


def test_seeds_differ_and_repeat():
    draws = [
        list(generate(MODEL, PROMPT, max_new_tokens=16, temperature=1.0, seed=s)) for s in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_bounded_prefill_runs_the_decoder_on_one_window():
    stats = GenerationStats()
    list(generate(MODEL, PROMPT, max_new_tokens=1, prefill="bounded", stats=stats))
    assert stats.prefill_layer_tokens == {n: 41 if n < 4 else 8 for n in range(8)}
    with pytest.raises(ValueError, match="mode: got 'quick'"):
        list(generate(MODEL, PROMPT, max_new_tokens=1, prefill="quick"))


def test_stop_id_is_given_and_ends_the_stream():
    tokens = list(generate(MODEL, PROMPT, max_new_tokens=12))
    for form in (generate, generate_uncached):
        cut = list(form(MODEL, PROMPT, max_new_tokens=12, stop_ids=(tokens[4],)))
        assert cut == tokens[: tokens.index(tokens[4]) + 1]
        assert list(form(MODEL, PROMPT, max_new_tokens=0)) == []


def test_stats_count_what_ran():
    stats = GenerationStats()
    tokens = list(generate(MODEL, PROMPT, max_new_tokens=5, stats=stats))
    tail = exact_decoder_rows(MODEL.config.text_config)
    assert stats.prefill_layer_tokens == {n: 41 if n < 4 else tail for n in range(8)}
    assert stats.decode_layer_tokens == dict.fromkeys(range(8), 4)
    assert (stats.prompt_tokens, stats.new_tokens) == (41, len(tokens))
    # 45 tokens are in the state: the fifth was drawn and never fed.
    assert stats.state_bytes["main_kv"] == (22 + 22 + 45) * 36
    assert stats.decode_tps > 0
    lines = stats.lines()
    assert lines[0].startswith(f"prefill  41 tokens, {4 * 41 + 4 * tail} layer-tokens of 328, ")
    assert lines[1].startswith("decode   5 tokens, 32 layer-tokens, ")
    assert lines[2].startswith(
        f"state    {sum(stats.state_bytes.values()):,} bytes: main_kv 3,204, "
    )
    assert GenerationStats().decode_tps == 0


def test_probabilities_by_hand():
    logits = torch.tensor([2.0, 1.0, 2.0]).log()  # 0.4, 0.2, 0.4
    assert next_token_probabilities(logits, 0, 1.0).tolist() == [1, 0, 0]
    assert next_token_probabilities(logits, 1.0, 1.0).tolist() == pytest.approx([0.4, 0.2, 0.4])
    assert next_token_probabilities(logits, 1.0, 0.5).tolist() == pytest.approx([0.5, 0, 0.5])
    assert next_token_probabilities(logits, 1.0, 0.01).tolist() == [1, 0, 0]
    assert next_token_probabilities(logits, 1e-45, 1.0).tolist() == [0.5, 0, 0.5]
    # Temperature 0.5 squares the odds: 4 : 1 : 4.
    assert next_token_probabilities(logits, 0.5, 1.0).tolist() == pytest.approx(
        [4 / 9, 1 / 9, 4 / 9]
    )


@pytest.mark.parametrize("form", [generate, generate_uncached])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": []}, "prompt: got no tokens"),
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"top_p": 0.0}, "top_p: got 0.0"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"max_new_tokens": -1}, "max_new_tokens: got -1"),
    ],
)
def test_bad_options_are_refused(form, options, message):
    options = {"ids": PROMPT, "max_new_tokens": 1, **options}
    with pytest.raises(ValueError, match=message):
        list(form(MODEL, **options))


def test_damage_stops_the_stream():
    from finwhale.config import preset
    from tests.models import build

    broken = build(preset("unit"))
    broken.layers[6].attn_norm.weight.data.fill_(float("nan"))
    for form in (generate, generate_uncached):
        with pytest.raises(ValueError, match="not finite"):
            list(form(broken, PROMPT, max_new_tokens=1))
