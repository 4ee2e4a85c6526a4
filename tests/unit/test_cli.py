"""The command line: what it prints, what it refuses, and that it starts without torch.

Its plots and closing table as well: they are read from figures and rows, never from pixels.
"""

import functools
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
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
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["shards", "--help"],
        ["inspect", "flash"],
        ["inspect", "flash", "--json"],
        ["pretrain", "--list"],
    ],
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


def test_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"finwhale {cli.__version__}, Python 3.")


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
        (["pretrain", "--out", "x"], "--recipe: got nothing"),
        (["pretrain", "--recipe", "recipes.pretrain:unit_smoke"], "--out: got nothing"),
        (["corpus", "--cache", "x", "--out", "y", "--only", "no"], "only: got 'no'"),
        (["shards", "--corpus", "y", "--tokenizer", "absent", "--out", "x"], "absent"),
        (
            ["shards", "--corpus", "y", "--tokenizer", "t", "--out", "x", "--sequence-length", "0"],
            "--sequence-length: got 0",
        ),
        (
            ["train-tokenizer", "--out", "x", "--vocab-size", "900", "--corpus", "absent"],
            "build the corpus first",
        ),
        (
            "train-tokenizer --out x --vocab-size 900 --corpus a --files b".split(),
            "--files, --corpus: got both",
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


@pytest.mark.parametrize(
    "words",
    [["--set", "a=1", "b=2"], ["--set", "a=1", "--set", "b=2"], ["--set", "--set", "a=1", "b=2"]],
    ids=" ".join,
)
def test_repeated_flag_adds_to_the_first(words):
    import tyro

    parsed = tyro.cli(cli.Pretrain, args=words, config=cli._MARKERS)
    assert cli._flat(parsed.set) == ("a=1", "b=2")


def test_both_settings_of_a_repeated_flag_reach_the_run(tmp_path, capsys):
    # The first is wrong, so it must be the one that is refused.
    arguments = [
        "pretrain",
        "--recipe",
        "recipes.pretrain:unit_smoke",
        "--out",
        str(tmp_path / "x"),
    ]
    assert cli.main([*arguments, "--set", "device=tpu", "--set", "precision=bf16"]) == 1
    assert "device: got 'tpu', expected one of cpu, cuda" in one_sentence(capsys)


def test_list_names_every_recipe_with_its_first_line(capsys):
    import recipes.pretrain

    assert cli.main(["pretrain", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("demo_cpu", "nano_cpu", "unit_smoke"):
        (line,) = (line for line in lines if line.startswith(f"recipes.pretrain:{name} "))
        assert line.endswith(getattr(recipes.pretrain, name).__doc__.splitlines()[0])
    # What a recipe is made of is no recipe.
    assert not any("RunConfig" in line or ":unit " in line for line in lines)


def texts_of(seed: int, count: int, words: int = 120) -> dict[str, str]:
    """Return documents of random words: none is a copy of another."""
    import random

    draw = random.Random(seed)
    return {
        f"{n:03d}.txt": " ".join(
            "".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(words)
        )
        for n in range(count)
    }


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two made packages in tmp_path/cache that `finwhale corpus` takes for the pinned ones."""
    from finwhale.data import build_corpus as room
    from finwhale.data.packages import Package

    def package(name: str, texts: dict[str, str], **fields) -> Package:
        with tarfile.open(cache / f"{name}.tgz", "w:gz") as tar:
            for path, text in {**texts, "LICENSE": "do as you like"}.items():
                info = tarfile.TarInfo(path)
                info.size = len(text.encode())
                tar.addfile(info, io.BytesIO(text.encode()))
        return Package(
            name=name,
            registry="npm",
            package=name,
            version="1",
            file=f"{name}.tgz",
            sha256="0" * 64,
            licence_file="LICENSE",
            extractor="text",
            include=("*.txt",),
            why="a test",
            **fields,
        )

    def fetch(packages, cache, *, progress=None):
        return {package.name: cache / package.file for package in packages}

    cache = tmp_path / "cache"
    cache.mkdir()
    made = (
        package("many", texts_of(1, 40), licence="MIT", tier="A"),
        package("held", texts_of(2, 3), licence="CC0-1.0", tier="A", held_out=True),
        package("extra", texts_of(3, 2), licence="GPL-3", tier="B"),
    )
    fake = functools.partial(room.build_corpus, packages=made, fetch=fetch)
    monkeypatch.setattr(room, "build_corpus", fake)
    return cache


def build(cache: Path, out: Path, *more: str) -> int:
    return cli.main(["corpus", "--cache", str(cache), "--out", str(out), *more])


def table_rows(text: str) -> dict[str, list[str]]:
    """Return the cells of each printed row by its first cell; two blanks part cells."""
    lines = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in lines}


def counted(files: list[Path]) -> list[str]:
    """Return documents and bytes of text in JSON-lines files, as the table shows them."""
    texts = [json.loads(line)["text"] for file in files for line in file.open(encoding="utf-8")]
    return [f"{len(texts):,}", f"{sum(len(text.encode()) for text in texts):,}"]


def test_corpus_table_counts_what_was_written(packages, tmp_path, capsys):
    out = tmp_path / "out"
    assert build(packages, out, "--tiers", "A", "B") == 0
    text = capsys.readouterr().out
    for step in ("many: reading", "held: reading", "extra: reading", "removing copies"):
        assert text.splitlines().count(step) == 1
    rows = table_rows(text)
    for name, licence, tier in (
        ("many", "MIT", "A"),
        ("held", "CC0-1.0", "A"),
        ("extra", "GPL-3", "B"),
    ):
        assert rows[name] == [licence, tier, *counted(list(out.glob(f"*/{name}.jsonl")))]
    for side in ("train", "validation", "evaluation"):
        assert rows[f"all, {side}"] == counted(list((out / side).glob("*.jsonl")))
    assert rows["many"][2] == "40"


def test_corpus_takes_the_named_sources_and_caps_them(packages, tmp_path, capsys):
    # 120 words of 6 letters, a blank or a line end after each: 840 bytes.
    chosen = ["--only", "many", "--only", "held", "--max-bytes", "2000"]
    assert build(packages, tmp_path / "out", *chosen) == 0
    rows = table_rows(capsys.readouterr().out)
    assert rows["many"][2:] == ["2", "1,680"]
    assert rows["held"][2:] == ["2", "1,680"]
    assert "extra" not in rows


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "many", "no"], "only: got 'no', expected some of held, many"),
        (["--tiers", "C"], "tiers: got 'C'"),
        (["--max-bytes", "0"], "max_bytes: got 0"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_corpus_refusal_costs_one_sentence(packages, tmp_path, more, message, capsys):
    assert build(packages, tmp_path / "out", *more) == 1
    assert message in one_sentence(capsys)
    assert not (tmp_path / "out").exists()


def test_failed_fetches_are_told_in_one_sentence(packages, tmp_path, monkeypatch, capsys):
    from finwhale.data import build_corpus as room
    from finwhale.data.fetch import FetchError

    def failing(packages, cache, *, progress=None):
        raise FetchError("many: no such version\nheld: no such version")

    monkeypatch.setattr(room, "build_corpus", functools.partial(room.build_corpus, fetch=failing))
    assert build(packages, tmp_path / "out") == 1
    sentence = one_sentence(capsys)
    assert sentence == "finwhale corpus: many: no such version held: no such version"


def test_corpus_becomes_a_tokenizer_and_shards(packages, tmp_path, capsys):
    from finwhale.text.tokenizer import Tokenizer

    corpus, file, out = tmp_path / "corpus", tmp_path / "tokenizer.json", tmp_path / "shards"
    assert build(packages, corpus) == 0
    learn = ["train-tokenizer", "--corpus", str(corpus), "--out", str(file), "--vocab-size", "300"]
    assert cli.main(learn) == 0
    train = [json.loads(line)["text"] for line in (corpus / "train" / "many.jsonl").open("rb")]
    assert f"texts {len(train)} documents of {corpus}" in capsys.readouterr().out
    arguments = ["shards", "--corpus", str(corpus), "--tokenizer", str(file), "--out", str(out)]
    assert cli.main([*arguments, "--sequence-length", "64"]) == 0
    text = capsys.readouterr().out
    tokenizer = Tokenizer.from_file(file)
    # One begin and one end marker around each document; the first token of one is no target.
    lengths = [len(tokenizer.encode(t)) + 2 for t in train]
    rows = table_rows(text)
    assert rows["many"][0] == f"{sum(lengths):,}"
    assert rows["held"][0] == "0"
    ids = (out / "validation.ids").stat().st_size // 2
    assert rows["all"] == [f"{sum(lengths):,}", f"{ids:,}", "0"]
    found = re.search(r"packed for training: (\d+) rows of 64, padding ([\d.]+)%", text)
    assert found is not None
    padding = 1 - sum(n - 1 for n in lengths) / (64 * int(found[1]))
    assert float(found[2]) == pytest.approx(100 * padding, abs=0.006)
    assert cli.main(arguments) == 1
    assert "is there already" in capsys.readouterr().err


def test_tokenizer_cap_takes_whole_documents(packages, tmp_path, capsys):
    corpus = tmp_path / "corpus"
    assert build(packages, corpus) == 0
    learn = ["train-tokenizer", "--corpus", str(corpus), "--vocab-size", "290"]
    learn += ["--out", str(tmp_path / "t.json")]
    # 840 bytes a document: one byte short of three of them leaves two.
    assert cli.main([*learn, "--max-bytes", "2519"]) == 0
    assert "texts 2 documents" in capsys.readouterr().out


RECORDS = [
    {"step": 1, "loss": 3.0, "index_loss": {"L2": 2.0, "L10": 4.0}, "tokens_per_s": 1.0},
    {
        "step": 2,
        "loss": 2.0,
        "validation_bpb": 1.75,
        "index_loss": {"L2": 1.0, "L10": 3.0},
        "index_recall": {"L2": 0.5, "L10": None},
        "tokens_per_s": 900.0,
    },
    {
        "step": 3,
        "loss": 1.0,
        "validation_bpb": 1.5,
        "index_loss": {"L2": 0.5, "L10": 2.0},
        "index_recall": {"L2": 0.75, "L10": None},
        "tokens_per_s": 1100.0,
    },
]


def lines_of(axes) -> dict[str, list[tuple[float, float]]]:
    """Return the points of every labelled line; one across the whole axes goes from 0 to 1."""
    return {line.get_label(): [(x, y) for x, y in line.get_xydata()] for line in axes.get_lines()}


def test_loss_figure_converts_nats_per_token_to_bits_per_byte():
    from finwhale.train.record import loss_figure

    figure = loss_figure(RECORDS, {"token unigram": 2.5}, 4.0, is_task=False)
    (axes,) = figure.axes
    lines = lines_of(axes)
    # 1 nat is 1.442695 bits, and one token stands for 4 bytes.
    expected = [(1, 3 * 1.442695 / 4), (2, 2 * 1.442695 / 4), (3, 1.442695 / 4)]
    assert np.allclose(lines["training batch"], expected, rtol=1e-6)
    assert lines["validation"] == [(2, 1.75), (3, 1.5)]
    assert lines["token unigram, validation: 2.500"] == [(0, 2.5), (1, 2.5)]
    assert axes.get_ylabel() == "bits per byte"


def test_loss_figure_of_a_task_has_an_axis_for_right_answers():
    from finwhale.train.record import loss_figure

    records = [dict(RECORDS[0]), {**RECORDS[1], "answer_accuracy": 0.25}]
    figure = loss_figure(records, {}, 4.0, is_task=True)
    loss, share = figure.axes
    # Bytes mean nothing for a task: 3 nats are 4.328085 bits per answer token.
    assert lines_of(loss)["training batch"][0] == pytest.approx((1, 4.328085))
    assert loss.get_ylabel() == "bits per answer token"
    assert lines_of(share) == {"right answers": [(2, 0.25)]}
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["training batch", "validation", "right answers"]


@pytest.mark.parametrize(
    ("records", "labels"),
    [
        ([], set()),
        ([{"step": 1, "loss": 1.0}], {"training batch"}),
        ([{"step": 1, "loss": 1.0, "answer_accuracy": 0.0}], {"training batch"}),
    ],
    ids=["empty", "loss alone", "accuracy alone"],
)
@pytest.mark.parametrize("is_task", [False, True])
def test_loss_figure_without_validation_and_baselines_is_drawn(records, labels, is_task):
    from finwhale.train.record import loss_figure

    figure = loss_figure(records, {}, 1.0, is_task=is_task)
    assert set(lines_of(figure.axes[0])) == labels


def test_indexer_figure_has_points_of_recall_and_lines_of_loss_per_layer():
    from finwhale.train.record import indexer_figure

    recall, loss = indexer_figure(RECORDS).axes
    # L10 never had a choice, so it has a loss and no recall.
    assert lines_of(recall) == {"L2": [(2, 0.5), (3, 0.75)]}
    assert lines_of(loss) == {
        "L2": [(1, 2.0), (2, 1.0), (3, 0.5)],
        "L10": [(1, 4.0), (2, 3.0), (3, 2.0)],
    }
    (points,), (line, _) = recall.get_lines(), loss.get_lines()
    assert (points.get_linestyle(), points.get_marker()) == ("None", "o")
    assert (line.get_linestyle(), line.get_marker()) == ("-", "None")
    assert points.get_color() == line.get_color()
    # Layers in the order of the model: L10 is not before L2.
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["L2", "L10"]


@pytest.mark.parametrize(
    ("loss", "scale"), [(0.1, "log"), (0.0, "linear")], ids=["positive", "zero"]
)
def test_indexer_figure_shows_a_zero_loss(loss, scale):
    from finwhale.train.record import indexer_figure

    records = [{"step": 1, "index_loss": {"L2": 1.0}}, {"step": 2, "index_loss": {"L2": loss}}]
    lower = indexer_figure(records).axes[1]
    assert lower.get_yscale() == scale
    assert lines_of(lower)["L2"][-1] == (2, loss)


def write_records(out: Path, records: list[dict], keep_bytes: int = 0) -> int:
    from finwhale.train.record import Metrics

    metrics = Metrics(out, keep_bytes)
    for record in records:
        metrics.write(record)
    metrics.close()
    return metrics.length_bytes


def test_plots_are_written_and_found_again(tmp_path):
    from finwhale.train.record import draw_plots, plots_of

    write_records(tmp_path, RECORDS)
    assert plots_of(tmp_path) == ()
    files = draw_plots(tmp_path, {"token unigram": 2.5}, 4.0, False)
    assert files == (tmp_path / "loss.png", tmp_path / "indexer.png") == plots_of(tmp_path)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_run_without_an_indexer_has_one_plot(tmp_path):
    from finwhale.train.record import draw_plots, plots_of

    write_records(tmp_path, [{"step": 1, "loss": 1.0, "answer_accuracy": 0.5}])
    assert draw_plots(tmp_path, {}, 1.0, True) == (tmp_path / "loss.png",) == plots_of(tmp_path)


def test_resumed_run_shows_every_step_once(tmp_path):
    from finwhale.train.record import loss_figure, read_metrics

    kept = write_records(tmp_path, RECORDS[:1])
    write_records(tmp_path, RECORDS[1:2], kept)  # a step that is lost and taken again
    write_records(tmp_path, RECORDS[1:], kept)
    figure = loss_figure(read_metrics(tmp_path), {}, 1.0, is_task=False)
    assert [x for x, _ in lines_of(figure.axes[0])["training batch"]] == [1, 2, 3]


def test_closing_rows_give_the_last_value_of_each_measurement(tmp_path):
    from finwhale.train.progress import closing_rows

    rows = closing_rows(
        RECORDS,
        validation_bpb=1.5,
        baselines=[("token unigram", 2.5)],
        is_task=False,
        plots=[tmp_path / "loss.png"],
    )
    assert rows == (
        ("validation", "1.5000 bits per byte"),
        ("token unigram", "2.5000 bits per byte"),
        ("recall of indexer L2", "0.750"),
        ("recall of indexer L10", "no query had a choice"),
        ("tokens/s", "900"),  # of 1, 900 and 1100: the slow first step does not count
        ("plot", str(tmp_path / "loss.png")),
    )


def test_closing_rows_of_a_task_tell_its_accuracy():
    from finwhale.train.progress import closing_rows

    # Measured at step 1 and not at the last: the value that there is.
    records = [{"step": 1, "answer_accuracy": 0.875}, {"step": 2}]
    rows = closing_rows(records, validation_bpb=0.5, baselines=[], is_task=True, plots=[])
    assert rows == (("validation", "0.5000 bits per answer token"), ("right answers", "87.50%"))


def test_closing_rows_without_any_measurement_say_so():
    from finwhale.train.progress import closing_rows

    rows = closing_rows([], validation_bpb=float("nan"), baselines=[], is_task=False, plots=[])
    assert rows == (("validation", "nothing held out"),)
