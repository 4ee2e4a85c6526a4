"""What the GPU benchmarks do without a GPU: names of launches, classes of kernels, limits."""

import json
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.config import preset
from finwhale.decode_kernels import experts_w4, hyper_site, index_scores, linear_fp8, route

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import gpu_decode
import gpu_greedy
import gpu_lines
import gpu_mini
import gpu_trace


@pytest.mark.parametrize(
    "launches",
    [
        experts_w4.BENCHED, hyper_site.BENCHED, index_scores.BENCHED, linear_fp8.BENCHED,
        route.BENCHED,
    ],
    ids=["experts", "site", "scores", "linear", "route"],
)  # fmt: skip
def test_every_launch_has_a_name_of_its_own(launches):
    """Two of one name would be timed as one."""
    assert list(gpu_decode.named(launches).values()) == list(launches)


def test_launches_come_back_from_the_file_of_the_best(tmp_path):
    file = tmp_path / "tuned.jsonl"
    of = [
        ("experts", 8, experts_w4.BENCHED[0]), ("experts", 8, experts_w4.BENCHED[1]),
        ("site", 8, hyper_site.BENCHED[0]), ("route", 64, route.BENCHED[0]),
        ("linear", 1, linear_fp8.BENCHED[0]), ("scores", 1, index_scores.BENCHED[0]),
    ]  # fmt: skip
    lines = [json.dumps({"tuned": name, "T": t, "launch": asdict(x)}) for name, t, x in of]
    file.write_text("\n".join(lines))
    assert gpu_decode.read_launches(file) == {
        8: {"experts": experts_w4.BENCHED[1], "site": hyper_site.BENCHED[0]},
        64: {"route": route.BENCHED[0]},
        1: {"linear": linear_fp8.BENCHED[0]},
    }


def test_a_profile_is_summed_by_class_and_loses_nothing():
    by_kernel = {
        "_gate_up_kernel": [5.0, 2], "_down_kernel": [3.0, 2], "_streams_kernel": [1.5, 4],
        "void at::native::copy": [0.5, 1],
    }  # fmt: skip
    assert gpu_decode.classes_of(by_kernel) == {
        "experts": [8.0, 4], "sites": [1.5, 4], "other": [0.5, 1],
    }  # fmt: skip


class Called(gpu_lines.GpuLines):
    """Calls the first of each form instead of timing it; those of peers need a GPU."""

    def __init__(self):
        super().__init__(None, 1e9)
        self.called, self.said = set(), []

    def say(self, **line):
        self.said.append(line)

    def compare(self, name, shape, forms, *rest, **options):
        for form, make in forms.items():
            if not form.startswith("peer"):
                (make() if callable(make) else make)[0]()
                self.called.add(name)
        return next(iter(forms)), 1.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tokens", [1, 3])
def test_every_part_still_fits_the_step_that_it_times(tokens, monkeypatch):
    """Each operation and each launch to tune is called once, on a small model."""
    text = {"index_head_dim": 64, "index_n_heads": 16, "index_topk": 32, "hc_sinkhorn_iters": 2}
    c = replace(preset("unit").text_config, **text)
    monkeypatch.setattr(gpu_decode, "DEVICE", "cpu")
    model, bench = gpu_decode.Model(c, "cpu", 4096, layers=4), Called()
    options = SimpleNamespace(
        best={}, chosen_only=True, tune=["experts", "site", "route", "linear"], tune_json=None
    )
    for part in (gpu_decode.linear_part, gpu_decode.expert_part, gpu_decode.small_part):
        part(bench, model, tokens, options)
    assert bench.called >= {
        "qkv", "wq_b", "wo_a", "wo_b", "head", "experts", "route", "site after attention",
        "site after experts", "latent_and_window", "draw_tokens",
    }  # fmt: skip
    assert set(gpu_decode.tuned(bench, model, tokens, options)) == set(options.tune)
    assert not [line for line in bench.said if "failed" in line]
    # A part that no longer fits would be printed as failed, and the run go on.
    monkeypatch.setattr(gpu_decode.Step, "site", lambda step, streams: None)
    with pytest.raises(TypeError):
        gpu_decode.small_part(bench, model, tokens, options)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_profiles_come_last_and_one_that_fails_costs_no_other(is_wanted, monkeypatch, capsys):
    order = []

    def steps(bench, options):
        order.append("step")
        if not options.no_profile:
            options.profiled += [({"batch": n}, None) for n in (1, 8, 64)]

    def profile(bench, model, line, launches):
        order.append(line["batch"])
        if line["batch"] == 8:
            raise RuntimeError("no profiler")

    monkeypatch.setattr(gpu_decode, "step_part", steps)
    monkeypatch.setattr(gpu_decode, "kernels_part", lambda *given: order.append("kernels"))
    monkeypatch.setattr(gpu_decode, "profile_step", profile)
    monkeypatch.setattr(gpu_decode, "Model", lambda *given, **more: order.append("model"))
    monkeypatch.setattr(gpu_lines.GpuLines, "measure_ceilings", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    arguments = ["gpu_decode.py"] if is_wanted else ["gpu_decode.py", "--no-profile"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu_decode.main() == 0
    # Without profiles no model is made for them.
    assert order == ["step", "kernels", *(["model", 1, 8, 64] if is_wanted else [])]
    assert ("no profiler" in capsys.readouterr().out) == is_wanted


def test_every_kernel_of_the_room_has_its_class():
    """One that was renamed or is new would silently count as torch's own."""
    folder = Path(experts_w4.__file__).parent
    source = "\n".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    names = [kernel for kernels in gpu_decode.CLASSES.values() for kernel in kernels]
    assert sorted(names) == sorted(re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE))


def test_a_form_that_fails_says_why_and_the_rest_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(gpu_lines, "graph_of", lambda calls: type("G", (), {"replay": calls[0]}))
    monkeypatch.setattr(gpu_lines, "times_of", lambda run, n: [float(run())] * n)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    lines = gpu_lines.GpuLines(None, 1e9)
    lines.read_gbs, lines.bf16_tflops = 1000.0, 100.0

    def absent():
        raise ImportError("no peer")

    forms = {"chosen": [lambda: 8], "tuned": [lambda: 6], "peer": [lambda: 1], "peer b": absent}
    best = lines.compare("name", {"T": 3}, forms, 3e6, 1e8, check=lambda x: x + 1)
    assert best == ("tuned", 6.0)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [x.get("us") for x in said] == [8.0, 6.0, 1.0, None, 6.0]
    assert said[0]["floor_us"] == 3.0
    assert said[0]["ratio"] == 2.67
    assert said[0]["check"] == 9
    assert said[3]["failed"] == "ImportError: no peer"
    lines.limit_s = -1.0
    assert lines.compare("name", {}, forms, 1.0) is None
    assert json.loads(capsys.readouterr().out.splitlines()[0])["skipped"] == "time limit"


def test_differences_that_the_noise_does_not_explain_come_first(capsys):
    def row(margin):
        return {"kind": "text", "ids": [1], "tokens": [5, 6, 7], "seconds": [8, 8, 8]} | {
            "logits": [9.0, 9.0, 9.0], "margins": [1.0, margin, 1.0],
        }  # fmt: skip

    rows = [row(0.01), row(3.0), row(1.0)]
    forced = [[(9.0, 1.0 + 0.1 * n, 5)] * 3 for n in range(3)]
    free = [[5, 8, 7], [5, 8, 9], [5, 6, 7]]
    bench = gpu_lines.GpuLines(None, 60)
    assert gpu_greedy.compare(bench, rows, free, forced) == [(1, 1), (0, 1)]
    assert '"explained": 1, "unexplained": 1' in capsys.readouterr().out


def test_a_random_order_of_terms_moves_the_last_bits_and_nothing_else():
    generator = torch.Generator().manual_seed(0)
    ops = gpu_trace.shuffled_ops(generator)
    x, weight = torch.randn(5, 256, generator=generator), torch.randn(33, 256, generator=generator)
    whole, found = gpu_trace.FAST.linear(x, weight), ops.linear(x, weight)
    assert not torch.equal(found, whole)
    assert not torch.equal(found, ops.linear(x, weight))  # another order each time
    assert torch.allclose(found.double(), x.double() @ weight.double().T, atol=1e-4)
    streams, fn = torch.randn(3, 4, 64, generator=generator), torch.randn(24, 256) / 16
    site = (streams, fn, torch.zeros(24), torch.ones(3))
    options = {"iterations": 3, "norm_eps": 1e-6, "eps": 1e-6}
    pairs = zip(
        ops.hyper_mix(*site, **options), gpu_trace.FAST.hyper_mix(*site, **options), strict=True
    )
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_peers_limit_ends_its_runs():
    """No step begins behind it; a cut run counts only where there is no whole one."""
    none = float("inf")
    steps = []
    assert len(gpu_mini.timed_runs(steps.append, object, 3, "cpu", none)) == gpu_mini.RUNS
    assert len(steps) == 3 * (gpu_mini.RUNS + 1)
    steps.clear()
    assert len(gpu_mini.timed_runs(steps.append, object, 3, "cpu", 0.0)) == 1
    assert len(steps) == 1
