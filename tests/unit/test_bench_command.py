"""`finwhale bench gpu`: refusals, the programs it starts, and the tables of what they print."""

import json
import sys

import pytest
import torch

from finwhale import bench_command, cli
from finwhale.bench_command import Bench, failures, kernel_rows, parse_lines, step_rows

LINES = [
    {"read_gbs": 4448, "copy_gbs": 4181, "bf16_tflops": 771, "device": "a GPU"},
    {"kernel": "experts", "T": 1, "form": "chosen", "us": 80.0, "floor_us": 33.3, "ratio": 2.4},
    {"kernel": "experts", "T": 1, "form": "other", "us": 70.0, "floor_us": 33.3, "ratio": 2.1},
    {"kernel": "experts", "T": 1, "form": "peer slow one", "us": 204.0},
    {"kernel": "experts", "T": 1, "form": "peer fast one", "us": 99.0},
    {"kernel": "experts", "T": 1, "form": "peer absent one", "failed": "Error: no module"},
    {"kernel": "experts", "T": 8, "form": "peer fast one", "us": 5.0},
    {"kernel": "chain", "T": 1, "context": 64, "form": "overlap", "us": 3.0, "floor_us": 0.0,
     "ratio": None},
    {"kernel": "tune site", "T": 1, "form": "table", "us": 9.0},
    {"best": "experts", "T": 1, "form": "other", "us": 70.0},
    {"step": True, "batch": 1, "context": 4096, "us": 7700.0, "floor_us": 2900.0, "ratio": 2.655,
     "tokens_per_s": 129.9, "finite": True, "graph_equals_eager": True},
    {"step": True, "batch": 1, "context": 4096, "profile": {}},
    {"step": True, "batch": 8, "context": 4096, "us": 9.0, "void": "a logit is not finite"},
    {"step": True, "batch": 64, "context": 1 << 20, "impossible": "does not fit"},
    {"part": "kernels", "failed": "Traceback\n  somewhere\nMemoryError: all of it\n"},
]  # fmt: skip


def test_what_is_no_json_object_is_left_out():
    texts = ["warning: something\n", "[1]\n", '{"a": 1}\n', "", '{"cut": \n']
    assert list(parse_lines(texts)) == [{"a": 1}]


def test_an_operation_stands_beside_its_floor_and_its_best_peer():
    assert kernel_rows(LINES) == [
        ("experts", "T 1", "80.0", "33.3", "2.40", "99.0", "fast one"),
        ("chain", "T 1 context 64", "3.0", "-", "-", "-", ""),
    ]
    without = [x for x in LINES if x.get("form") != "chosen"]
    assert kernel_rows(without)[0][2] == "70.0"  # the best of ours where none is the table's


def test_a_step_says_why_it_has_no_ratio():
    assert step_rows(LINES) == [
        ("1", "4096", "7.70", "2.90", "2.65", "130", ""),
        ("8", "4096", "0.01", "-", "-", "-", "void: a logit is not finite"),
        ("64", "1048576", "-", "-", "-", "-", "impossible: does not fit"),
    ]
    differs = {"step": True, "batch": 1, "context": 1, "us": 1.0, "graph_equals_eager": False}
    assert step_rows([differs])[0][-1] == "graph and eager differ"


def test_what_failed_is_named_once_with_its_reason():
    assert failures(LINES + LINES) == [
        "experts, peer absent one: Error: no module",
        "kernels: MemoryError: all of it",
    ]


def test_programs_share_the_time_and_get_what_was_asked(tmp_path):
    one = Bench(device="gpu", batches=(1, 8), contexts=(64,), limit_s=100.0, tune=True, layers=3)
    weights, attention = one.commands(tmp_path)
    text = " ".join(weights[2:])
    assert text == (
        "--chosen-only --parts step kernels --batches 1 8 --contexts 64 --layers 3 "
        "--tune experts linear site route scores attention --limit-s 65.0"
    )
    assert attention[1:] == [
        str(tmp_path / "gpu_decode_attention.py"), "--chosen-only", "--limit-s", "35.0",
    ]  # fmt: skip
    (alone,) = Bench(device="gpu", parts=("attention",), limit_s=9.0).commands(tmp_path)
    assert alone[-1] == "9.0"
    with pytest.raises(ValueError, match="--parts"):
        list(Bench(device="gpu", parts=()).commands(tmp_path))


def test_options_are_ones_that_the_programs_know():
    """The programs import torch and record at once, so their own --help is asked."""
    import subprocess
    from pathlib import Path

    folder = Path(bench_command.__file__).parents[1] / "bench"
    for command in Bench(device="gpu", tune=True, layers=2, out=Path("x")).commands(folder):
        asked = subprocess.run([*command[:2], "--help"], capture_output=True, text=True, check=True)
        for word in command[2:]:
            assert not word.startswith("--") or word in asked.stdout, word


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_machine_without_a_device_is_refused_in_one_sentence(capsys):
    assert cli.main(["bench", "gpu"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("finwhale bench: torch ")
    assert "no CUDA device" in said
    assert said.count("\n") == 1


def test_an_installed_package_without_benchmarks_is_refused(tmp_path):
    with pytest.raises(bench_command.BenchUnsupportedError, match="checkout"):
        bench_command._require(tmp_path)


@pytest.mark.parametrize("as_json", [False, True])
def test_lines_of_the_programs_become_tables(tmp_path, monkeypatch, capsys, as_json):
    program = tmp_path / "program.py"
    program.write_text(f"print('noise')\nfor x in {LINES!r}: print(__import__('json').dumps(x))\n")
    monkeypatch.setattr(bench_command, "_require", lambda folder: None)
    monkeypatch.setattr(Bench, "commands", lambda self, folder: [[sys.executable, str(program)]])
    assert Bench(device="gpu", json=as_json).run() == 0
    said = capsys.readouterr().out
    if as_json:
        assert [json.loads(x) for x in said.splitlines()[1:]] == LINES
    else:
        assert said.startswith("a GPU: 4448 GB/s read, 4181 GB/s copy, 771 TFLOP/s bf16\n")
        assert "fast one" in said
        assert "impossible: does not fit" in said
        assert "kernels: MemoryError: all of it" in said
    program.write_text("raise SystemExit(3)\n")
    assert Bench(device="gpu").run() == 1
