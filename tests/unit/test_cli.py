"""The command line: what it prints, what it refuses, and that it starts without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from finwhale import cli
from finwhale.config import PRESETS, ConfigError, preset

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["generate", "--help"], ["inspect", "flash"], ["inspect", "flash", "--json"]],
    ids=" ".join,
)
def test_command_that_only_tells_never_imports_torch(arguments):
    code = (
        "import sys\n"
        "from finwhale.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'safetensors', 'matplotlib'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("heavy: []\n")


def test_command_that_computes_imports_torch():
    # The control of the test above: the probe sees torch when a command does need it.
    done = run_python("import sys, finwhale.model\nprint('torch' in sys.modules)")
    assert done.stdout == "True\n"


def test_module_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "finwhale", "inspect", "unit"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("resolved: preset unit\n")


def test_reader_that_leaves_early_costs_no_traceback():
    command = f"{sys.executable} -m finwhale inspect flash --json | head -c 10"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("{")


def test_inspect_flash_prints_the_table_and_every_total(capsys):
    assert cli.main(["inspect", "flash"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = [line.split() for line in lines]
    assert [
        "20",
        "decoder",
        "full",
        "1",
        "20",
        "20",
        "builds",
        "160000",
        "+",
        "YaRN",
        "x16",
        "-",
    ] in words
    assert ["1", "encoder", "window", "0", "-", "-", "-", "10000", "before"] in words
    assert [
        "36",
        "decoder",
        "reindex",
        "1",
        "20",
        "36",
        "searches",
        "160000",
        "+",
        "YaRN",
        "x16",
        "-",
    ] in words
    for total in (
        ["text", "backbone", "551,566,180,464"],
        ["engram_tables", "196,613,849,600"],
        ["total", "763,205,315,794"],
        ["all", "96,085", "510,286,023,000"],
        ["sum", "890"],
        ["V4-Flash,", "FP4", "index", "3,514.25", "3.95"],
    ):
        assert total in words
    text = "\n".join(lines)
    for figure in ("7,895,552,824", "16,130,558,064", "2,703,360", "2,414", "933,232,640"):
        assert figure in text


def test_inspect_json_is_one_object_with_everything(capsys):
    assert cli.main(["inspect", "flash", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["resolved"] == "preset flash"
    assert len(shown["layers"]) == 40
    assert shown["layers"][24] == {
        "layer_id": 24,
        "half": "decoder",
        "mode": "reindex",
        "ratio": 1,
        "kv_owner": 20,
        "topk_owner": 24,
        "pool": "searches",
        "rope": "compressed",
        "engram_index": None,
    }
    assert shown["accounting"]["kv_bytes_per_token"] == 890
    assert shown["accounting"]["checkpoint_bytes"] == 510_286_023_000
    assert shown["config"] == preset("flash").to_json()


@pytest.mark.parametrize("name", PRESETS)
def test_inspect_reads_back_what_a_config_file_holds(name, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(preset(name).to_json()), encoding="utf-8")
    for source in (tmp_path, tmp_path / "config.json"):
        assert cli.main(["inspect", str(source), "--json"]) == 0
        from_file = json.loads(capsys.readouterr().out)
        assert from_file.pop("resolved") == f"file {tmp_path / 'config.json'}"
        assert cli.main(["inspect", name, "--json"]) == 0
        from_preset = json.loads(capsys.readouterr().out)
        assert from_preset.pop("resolved") == f"preset {name}"
        assert from_file == from_preset


def one_sentence(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    return captured.err.rstrip("\n")


def test_unknown_source_costs_one_sentence_that_names_the_nearest(capsys):
    assert cli.main(["inspect", "flahs"]) == 1
    sentence = one_sentence(capsys)
    assert sentence.startswith("finwhale inspect: flahs: no such preset")
    assert "did you mean 'flash'?" in sentence


def test_bad_config_costs_one_sentence_that_names_file_and_field(tmp_path, capsys):
    raw = preset("unit").to_json()
    raw["text_config"]["hc_mult"] = 0
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert cli.main(["inspect", str(tmp_path)]) == 1
    sentence = one_sentence(capsys)
    assert str(tmp_path / "config.json") in sentence
    assert "text_config.hc_mult: got 0" in sentence


def test_debug_shows_the_traceback():
    with pytest.raises(ConfigError, match="no such preset"):
        cli.main(["inspect", "flahs", "--debug"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect"], "expected PRESET|PATH or --state FILE"),
        (["inspect", "unit", "--state", "x"], "one of the two"),
        (["inspect", "--state", "x"], "x"),
        (["generate", "--model", "nowhere", "--prompt", "a"], "nowhere"),
        (["pretrain", "--recipe", "recipes", "--out", "x"], "expected MODULE:FUNCTION"),
        (["pretrain", "--recipe", "recipes.no:f", "--out", "x"], "no module 'recipes.no'"),
        (["pretrain", "--recipe", "recipes.pretrain:f", "--out", "x"], "has no function 'f'"),
        (
            ["pretrain", "--recipe", "recipes.pretrain:unit_smoke", "--out", "x", "--set", "a=1"],
            "a: unknown field",
        ),
        (["train-tokenizer", "--out", "x", "--vocab-size", "9"], "vocab_size: got 9"),
        (["train-tokenizer", "--out", "x", "--vocab-size", "900", "--files", "absent"], "absent"),
        (["tiny", "--geometry", "huge", "--out", "x"], "huge: no such preset"),
        (["tiny", "--geometry", "unit", "--out", "x", "--prompt-tokens", "0"], "prompt_tokens"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_user_error_costs_one_sentence_and_writes_nothing(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 1
    assert message in one_sentence(capsys)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("arguments", [[], ["inspect", "unit", "--jsn"], ["sing"]])
def test_misuse_exits_with_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().out == ""


def test_fault_of_the_package_is_not_taken_for_a_user_error(monkeypatch):
    def broken(self):
        raise AssertionError("model and inventory differ")

    monkeypatch.setattr(cli.Inspect, "run", broken)
    with pytest.raises(AssertionError):
        cli.main(["inspect", "unit"])


def test_missing_package_names_the_extra(monkeypatch, capsys):
    def without(self):
        raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

    monkeypatch.setattr(cli.Inspect, "run", without)
    assert cli.main(["inspect", "unit"]) == 1
    assert "pip install 'finwhale[text]'" in one_sentence(capsys)


def test_missing_module_of_another_kind_is_a_fault(monkeypatch):
    def without(self):
        raise ModuleNotFoundError("No module named 'finwhale.gone'", name="finwhale.gone")

    monkeypatch.setattr(cli.Inspect, "run", without)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["inspect", "unit"])


def test_interrupt_exits_with_code_130(monkeypatch, capsys):
    def stopped(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Inspect, "run", stopped)
    assert cli.main(["inspect", "unit"]) == 130
    assert one_sentence(capsys) == "finwhale inspect: interrupted"


def test_error_class_of_ours_is_a_user_error_whatever_its_base(monkeypatch, capsys):
    from finwhale.train.loop import TrainingError

    assert not issubclass(TrainingError, (ValueError, OSError))

    def diverged(self):
        raise TrainingError("step 3: loss is nan;\n lower optim.lr")

    monkeypatch.setattr(cli.Inspect, "run", diverged)
    assert cli.main(["inspect", "unit"]) == 1
    assert one_sentence(capsys) == "finwhale inspect: step 3: loss is nan; lower optim.lr"


def test_recipe_of_the_users_own_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_recipe.py").write_text("def mine():\n    return 41\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert cli._recipe("my_recipe:mine")() == 41


def test_recipe_whose_own_import_fails_is_a_fault(tmp_path, monkeypatch):
    (tmp_path / "broken_recipe.py").write_text("import not_there_at_all\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        cli._recipe("broken_recipe:mine")


def test_train_tokenizer_learns_from_files(tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text("the cat sat on the mat\n" * 200, encoding="utf-8")
    out = tmp_path / "tokenizer.json"
    arguments = ["train-tokenizer", "--out", str(out), "--vocab-size", "290", "--files", str(text)]
    assert cli.main(arguments) == 0
    assert "resolved: texts 1 files, vocab_size 290" in capsys.readouterr().out
    assert len(json.loads(out.read_text(encoding="utf-8"))["model"]["vocab"]) >= 280
