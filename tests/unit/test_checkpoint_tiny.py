"""The tiny checkpoint: complete, readable by others' rules, and its answers notice each part."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

from finwhale.checkpoint import load_model, write_tiny
from finwhale.checkpoint.tiny import GREEDY_TOKENS, hashed_prompt
from finwhale.checkpoint.toy_tokenizer import toy_tokenizer_json, toy_vocabulary
from finwhale.config import preset
from finwhale.model import Numerics
from tests.checkpoint_files import INDEX, ONE_SHARD, refusal, smallest_config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny") / "out"
    report = write_tiny(smallest_config(), out, seed=4, prompt_tokens=40)
    return out, report, load_file(out / "expected.safetensors")


# U+FF5C bars and U+2581 blanks, as released.
MARKERS = [
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<\uff5c\u2581pad\u2581\uff5c>",
]


def relative(got, expected) -> float:
    return float((got - expected).norm() / expected.norm())


def test_folder_holds_everything_another_engine_asks_for(tiny):
    out, report, expected = tiny
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "expected.json",
        "expected.safetensors",
        INDEX,
        ONE_SHARD,
        "tokenizer.json",
        "tokenizer_config.json",
    }
    stored = json.loads((out / "expected.json").read_text())
    assert {**stored, "folder_bytes": report["folder_bytes"]} == report
    assert report["folder_bytes"] == sum(file.stat().st_size for file in out.iterdir())
    assert report["seed"] == 4
    assert report["config_sha256"] == hashlib.sha256((out / "config.json").read_bytes()).hexdigest()
    assert report["expected"]["logits"] == {"shape": [1, 40, 512], "dtype": "float32"}
    assert expected["input_ids"].dtype is torch.int64
    assert expected["greedy_ids"].shape == (GREEDY_TOKENS,)


def test_answers_are_those_of_the_loaded_folder(tiny):
    out, _, expected = tiny
    ids = expected["input_ids"]
    with torch.no_grad():
        logits = load_model(out).model(ids)
        exact = load_model(out, numerics=Numerics(cache_rounding=False)).model(ids)
    assert torch.equal(logits, expected["logits"])
    assert torch.equal(exact, expected["logits_no_cache_rounding"])
    assert relative(logits, exact) > 1e-3
    assert torch.isfinite(logits).all()


def test_greedy_ids_continue_the_prompt(tiny):
    out, report, expected = tiny
    whole = torch.cat((expected["input_ids"][0], expected["greedy_ids"]))[None]
    with torch.no_grad():
        logits = load_model(out).model(whole)[0]
    chosen = logits[39:-1].argmax(-1)
    assert torch.equal(chosen, expected["greedy_ids"])
    margins = expected["greedy_logits"].topk(2).values
    assert report["greedy_min_margin"] == pytest.approx(
        (margins[:, 0] - margins[:, 1]).min().item()
    )


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.engram.embed.weight",
        "layers.1.attn.attn_sink",
        "layers.1.attn.indexer.weights_proj.weight",
        "layers.2.attn.compressor.wkv.weight",
        "layers.0.hc_attn_base",
        "layers.1.ffn.gate.bias",
        "layers.2.ffn.experts.1.w2.weight",
    ],
)
def test_answers_notice_a_zeroed_tensor(tiny, name):
    # Case 133: an engine without Engram must not pass.
    out, _, expected = tiny
    model = load_model(out).model
    with torch.no_grad():
        model.state_dict()[name].zero_()
        assert relative(model(expected["input_ids"]), expected["logits"]) > 1e-3


def test_table_rows_are_given_for_each_engram_layer(tiny):
    _, _, expected = tiny
    rows = expected["engram_rows.1"]
    assert (rows.shape, rows.dtype) == ((1, 40, 6), torch.int64)
    assert 0 <= rows.min() <= rows.max() < smallest_config().text_config.engram_num_embeddings[0]


def test_same_call_writes_the_same_bytes_and_another_seed_does_not(tiny, tmp_path):
    out, _, _ = tiny
    write_tiny(smallest_config(), tmp_path / "again", seed=4, prompt_tokens=40)
    for file in out.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    write_tiny(smallest_config(), tmp_path / "other", seed=5, prompt_tokens=2)
    assert (out / ONE_SHARD).read_bytes() != (tmp_path / "other" / ONE_SHARD).read_bytes()


def test_bf16_variant_and_overwrite(tiny, tmp_path):
    out = tmp_path / "out"
    first = write_tiny(smallest_config(), out, quantized=False, prompt_tokens=3)
    assert not load_model(out).config.quantization_config
    refusal(write_tiny, smallest_config(), out, prompt_tokens=3)
    second = write_tiny(smallest_config(), out, prompt_tokens=3, overwrite=True)
    assert second["payload_bytes"] < first["payload_bytes"]
    assert load_model(out).config.quantization_config


def test_prompt_must_have_a_token(tmp_path):
    with pytest.raises(ValueError, match="prompt_tokens: got 0"):
        write_tiny(smallest_config(), tmp_path / "out", prompt_tokens=0)


def test_prompt_has_ordinary_words_only():
    config = preset("unit")
    ids = hashed_prompt(config, 0, 20_000)
    assert ids.shape == (1, 20_000)
    assert set(ids.unique().tolist()) == set(range(3, 511))  # 511 is the image token


def test_toy_vocabulary_is_pairs_that_differ_by_case():
    words = [word.replace("\u0120", " ") for word in toy_vocabulary(8)]
    assert words == [*MARKERS, " wa", " Wa", " wb", " Wb", " wc"]
    assert list(toy_vocabulary(8).values()) == list(range(8))
    with pytest.raises(ValueError, match="vocab_size: got 4"):
        toy_vocabulary(4)


@pytest.mark.parametrize(("vocab", "compressed"), [(512, 258), (1024, 514), (4096, 2050), (5, 4)])
def test_toy_tokenizer_is_read_by_the_library_and_compresses(tmp_path, vocab, compressed):
    from tokenizers import Tokenizer

    from finwhale.text.engram_map import token_map_from_file

    file = tmp_path / "tokenizer.json"
    file.write_text(toy_tokenizer_json(vocab), encoding="utf-8")
    library = Tokenizer.from_file(str(file))
    assert library.get_vocab_size() == vocab
    for word, token_id in toy_vocabulary(vocab).items():
        text = word.replace("\u0120", " ")
        assert library.encode(text).ids == [token_id]
        assert library.decode([token_id], skip_special_tokens=False) == text
    assert library.encode(f" wa Wa{MARKERS[1]} wa").ids == [3, 4, 1, 3]
    assert library.encode(MARKERS[1] + MARKERS[2]).ids == [1, 2]
    mapped = token_map_from_file(file)
    assert len(set(mapped.tolist())) == compressed
    assert mapped[:5].tolist() == [0, 1, 2, 3, 3]
