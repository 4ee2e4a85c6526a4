"""The commands that compute, called as a user calls them, on the smallest preset."""

import json
import re
import shutil

import pytest
import safetensors
import torch

from finwhale import cli

RECIPE = ["pretrain", "--recipe", "recipes.pretrain:unit_smoke"]
SHORT = [
    "--set",
    "schedule.warmup_steps=1",
    "schedule.steps=2",
    "data.train_bytes=100_000",
    "data.validation_bytes=4_000",
    "save_every=1",
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrain") / "run"
    assert cli.main([*RECIPE, "--out", str(out), *SHORT]) == 0
    return out


def test_pretrain_leaves_a_run_and_a_checkpoint_behind(run_folder):
    names = {path.name for path in run_folder.iterdir()}
    assert {"run.json", "metrics.jsonl", "loss.png", "tokenizer.json", "checkpoint"} <= names
    facts = json.loads((run_folder / "run.json").read_text(encoding="utf-8"))
    assert facts["recipe"] == "recipes.pretrain:unit_smoke"
    assert facts["config"]["schedule"]["steps"] == 2
    assert (run_folder / "checkpoint" / "tokenizer.json").is_file()


def test_pretrain_refuses_a_folder_that_holds_a_run(run_folder, capsys):
    assert cli.main([*RECIPE, "--out", str(run_folder), *SHORT]) == 1
    assert "--resume" in capsys.readouterr().err


def test_pretrain_resumes_a_finished_run_without_a_step(run_folder, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    before = (copy / "metrics.jsonl").read_bytes()
    assert cli.main([*RECIPE, "--out", str(copy), "--resume", *SHORT]) == 0
    assert (copy / "metrics.jsonl").read_bytes() == before
    text = capsys.readouterr().out
    records = [json.loads(line) for line in before.splitlines()]
    cells = [re.split(r"\s{2,}", line, maxsplit=1) for line in text.splitlines()]
    closing = {row[0]: row[1] for row in cells if len(row) == 2}
    assert closing["validation"] == f"{records[-1]['validation_bpb']:.4f} bits per byte"
    assert closing["token unigram"].endswith(" bits per byte")
    recalls = {k.split()[-1] for k in closing if k.startswith("recall of indexer L")}
    assert recalls == set(records[-1]["index_recall"]) != set()
    assert float(closing["tokens/s"].replace(",", "")) > 0
    assert f"plot  {copy / 'loss.png'}" in re.sub(" {2,}", "  ", text)


def test_generate_continues_the_prompt_the_same_way_twice(run_folder, capsys):
    arguments = ["generate", "--model", str(run_folder / "checkpoint"), "--prompt", "import os"]
    arguments += ["--max-new-tokens", "6", "--temperature", "0.9", "--seed", "3"]
    texts = []
    for _ in range(2):
        assert cli.main(arguments) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
        assert "decode   6 tokens, 40 layer-tokens" in captured.err  # 5 steps of 8 layers
        assert "bytes: main_kv" in captured.err
        assert "bytes of memory" in captured.err
    assert texts[0] == texts[1]
    assert texts[0].splitlines()[1].startswith("import os")


def test_generate_keeps_its_state_in_a_file(run_folder, tmp_path, capsys):
    arguments = ["generate", "--model", str(run_folder / "checkpoint"), "--prompt", "import os"]
    arguments += ["--max-new-tokens", "4", "--prefill", "bounded"]
    assert cli.main([*arguments, "--state-file", str(tmp_path / "state")]) == 0
    assert cli.main(["inspect", "--state", str(tmp_path / "state")]) == 0
    assert "state after 8 tokens" in capsys.readouterr().out  # 5 of the prompt and 3 fed back
    assert cli.main([*arguments, "--state-file", str(tmp_path / "no" / "state")]) == 1
    assert f"--state-file: no folder {tmp_path / 'no'}" in capsys.readouterr().err


def test_generate_takes_the_shipped_model_where_none_is_named(run_folder, monkeypatch, capsys):
    # The variable puts another folder in its place, so that the test loads a model of 8 layers.
    monkeypatch.setenv("FINWHALE_MINI", str(run_folder / "checkpoint"))
    arguments = ["generate", "--prompt", "import os", "--max-new-tokens", "4"]
    assert cli.main(arguments) == 0
    default = capsys.readouterr().out
    assert default.startswith(f"resolved: model {run_folder / 'checkpoint'}, ")
    assert cli.main([*arguments, "--model", str(run_folder / "checkpoint")]) == 0
    assert capsys.readouterr().out == default


@pytest.mark.parametrize(
    "arguments", [["generate", "--prompt", "a"], ["demo"]], ids=["generate", "demo"]
)
def test_missing_shipped_model_costs_one_sentence(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FINWHALE_MINI", str(tmp_path / "no"))
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"finwhale {arguments[0]}: {tmp_path / 'no'}: expected the shipped")
    assert "FINWHALE_MINI" in error
    assert error.count("\n") == 1


def test_generate_in_release_numerics_runs(run_folder, capsys):
    arguments = ["generate", "--model", str(run_folder / "checkpoint"), "--prompt", "a"]
    assert cli.main([*arguments, "--max-new-tokens", "2", "--numerics", "release"]) == 0
    assert "numerics release" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs --numerics release"),
        (["--numerics", "release", "--top-p", "0.5"], "needs --top-p 1"),
        (["--numerics", "release", "--prefill", "bounded"], "needs --prefill exact"),
        (["--numerics", "release", "--state-file", "s"], "writes no --state-file"),
        (["--numerics", "release"], "torch sees no GPU"),
    ],
    ids=["numerics", "top-p", "prefill", "state-file", "no GPU"],
)
def test_generate_on_a_gpu_refuses_what_it_cannot_do(run_folder, arguments, message, capsys):
    if torch.cuda.is_available() and "GPU" in message:
        pytest.skip("there is one")
    command = ["generate", "--model", str(run_folder / "checkpoint"), "--prompt", "a"]
    assert cli.main([*command, "--device", "cuda", *arguments]) == 1
    assert f"--device cuda: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [("--temperature", "-1", "temperature"), ("--top-p", "0", "top_p")],
)
def test_generate_refuses_a_wrong_sampler(run_folder, flag, value, message, capsys):
    arguments = ["generate", "--model", str(run_folder / "checkpoint"), "--prompt", "a"]
    assert cli.main([*arguments, flag, value]) == 1
    assert f"finwhale generate: {message}: got" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bf16", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quantised", "bf16"]
)
def test_tiny_writes_a_checkpoint_that_inspect_reads(bf16, tmp_path, capsys):
    out = tmp_path / "unit"
    arguments = ["tiny", "--geometry", "unit", "--out", str(out), "--prompt-tokens", "12"]
    arguments += ["--bf16"] if bf16 else []
    assert cli.main(arguments) == 0
    assert "layout " + ("BF16" if bf16 else "FP8 and FP4") in capsys.readouterr().out
    assert cli.main(["inspect", str(out), "--json"]) == 0
    totals = json.loads(capsys.readouterr().out)["accounting"]
    stored = 0
    for file in out.glob("model*.safetensors"):
        with safetensors.safe_open(file, "pt") as opened:
            stored += len(opened.keys())
    assert stored == totals["num_checkpoint_tensors"]
    assert cli.main(arguments) == 1
    assert str(out) in capsys.readouterr().err
    assert cli.main([*arguments, "--overwrite"]) == 0
