"""The checks of `.ci/` find what they look for, and the tree passes them.

Each limit has a planted violation: a check that never fires is worthless.
"""

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_tree, report = load("check_tree"), load("report")


@pytest.fixture
def tree(tmp_path):
    def plant(files: dict[str, str]) -> list[Path]:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return [Path(name) for name in files]

    return tmp_path, plant


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"finwhale/ops/a.py": "x = 1\n" * 701}, "finwhale/ops/a.py: 701 lines, limit 700"),
        ({"tests/unit/test_a.py": "x = 1\n" * 701}, "701 lines"),
        (
            {f"finwhale/model/m{i}.py": "x = 1\n" * 500 for i in range(5)},
            "finwhale/model: 2500 lines, limit 2500",
        ),
        ({f"finwhale/ops/m{i}.py": "" for i in range(25)}, "finwhale/ops: 25 files, limit 24"),
        ({"finwhale/ops/utils.py": ""}, "name says nothing"),
        ({"finwhale/ops/cache_manager.py": ""}, "name says nothing"),
        ({"finwhale/ops/deep/a.py": ""}, "never deeper"),
        ({"a.bin": "x" * 56_000_001}, "limit 56000000"),
        ({"models/a.bin": "x" * 44_000_001}, "models: 44000001 bytes, limit 44000000"),
    ],
)
def test_planted_size_is_found(tree, files, message):
    root, plant = tree
    assert any(message in p for p in check_tree.size_problems(root, plant(files)))


def test_sizes_at_the_limit_pass(tree):
    root, plant = tree
    files = {
        "finwhale/ops/a.py": "x = 1\n" * 700,
        "data.bin": "x" * (56_000_000 - 6 * 700 - 6 * 2499),
    }
    files |= {f"finwhale/model/m{i}.py": "x = 1\n" * 625 for i in range(3)}
    files["finwhale/model/m3.py"] = "x = 1\n" * 624
    assert check_tree.size_problems(root, plant(files)) == []


@pytest.mark.parametrize("folder", ["work", "root", "home", "Users", "tmp", "mnt"])
def test_planted_machine_path_is_found(tree, folder):
    root, plant = tree
    files = plant({"docs/a.md": f"see\n`/{folder}/someone/file`\n"})
    assert check_tree.place_problems(root, files) == [f"docs/a.md:2: machine path '/{folder}/s'"]


def test_planted_registry_host_is_found(tree):
    root, plant = tree
    host = "https://py" + "pi.org/simple"
    assert "registry host" in check_tree.place_problems(root, plant({"requirements.txt": host}))[0]


@pytest.mark.parametrize(
    "text", ["a/work/b", "../tmp/x", "$HOME/work/x", "runs/home/a", "/proc/meminfo"]
)
def test_relative_and_system_paths_pass(tree, text):
    root, plant = tree
    assert check_tree.place_problems(root, plant({"a.py": f"# {text}\n"})) == []


def test_this_tree_has_no_problem():
    files = check_tree.listed_files(ROOT)
    assert Path("Makefile") in files
    assert not any(part.startswith(".venv") for f in files for part in f.parts)
    problems = check_tree.size_problems(ROOT, files) + check_tree.place_problems(ROOT, files)
    assert problems == []


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="x"/>
<testcase classname="tests.unit.test_a" name="y"><failure>no</failure></testcase>
<testcase classname="tests.golden.test_b" name="z"><skipped/></testcase>
<testcase classname="tests.parity.test_c" name="w"><error/></testcase>
</testsuite></testsuites>"""


def test_report_counts_by_folder_and_outcome(tmp_path):
    junit = tmp_path / "junit.xml"
    junit.write_text(JUNIT, encoding="utf-8")
    assert report.count_tests(junit) == {
        "unit": Counter(passed=1, failed=1),
        "golden": Counter(skipped=1),
        "parity": Counter(failed=1),
    }


def test_folder_of_skipped_tests_ran_nothing(tmp_path):
    folders = {"unit": Counter(passed=3), "golden": Counter(skipped=5)}
    found = report.problems(folders, 95, 100, expected=("unit", "golden", "e2e"))
    assert found == [
        "tests/golden: expected, but no test ran",
        "tests/e2e: expected, but no test ran",
    ]


@pytest.mark.parametrize(("covered", "refused"), [(90, False), (89, True), (0, True)])
def test_coverage_floor(covered, refused):
    found = report.problems({"unit": Counter(passed=1)}, covered, 100, expected=("unit",))
    assert bool(found) is refused


def test_coverage_adds_up_by_room():
    def entry(covered, statements):
        return {"summary": {"covered_lines": covered, "num_statements": statements}}

    data = {
        "files": {
            "finwhale/ops/a.py": entry(1, 2),
            "finwhale/ops/b.py": entry(3, 4),
            "finwhale/cli.py": entry(5, 6),
        }
    }
    assert report.coverage_by_room(data) == {"finwhale/ops": (4, 6), "finwhale/cli.py": (5, 6)}


def test_constraints_pin_every_declared_package_inside_its_range():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[name.lower().replace("_", "-")] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    declared = [*project["dependencies"], *(r for extra in extras for r in extra)]
    for requirement in declared:
        name = re.match(r"[\w-]+", requirement).group()
        assert name in pins, f"{name} is not pinned"
        pinned = tuple(int(part) for part in pins[name].split("."))
        for operator, value in re.findall(r"(>=|<)([\d.]+)", requirement):
            limit = tuple(int(part) for part in value.split("."))
            assert pinned >= limit if operator == ">=" else pinned < limit, requirement


def test_torch_range_is_the_allowed_one():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"torch>=2.11,<2.16"' in text


def test_config_room_imports_without_torch():
    code = (
        "import sys, finwhale.config.accounting, finwhale.config.run\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n"


def test_every_test_folder_is_one_the_conftest_knows():
    known = {"unit", "property", "parity", "golden", "e2e", "gpu"}
    found = {p.parent.relative_to(ROOT / "tests").parts[0] for p in ROOT.glob("tests/*/test_*.py")}
    assert found <= known


def test_marker_follows_the_folder(request):
    assert request.node.get_closest_marker("unit") is not None
    assert request.node.get_closest_marker("e2e") is None


def test_seed_depends_on_the_test_and_the_option(seed):
    from tests.conftest import seed_of

    assert seed_of("a", 0) == seed_of("a", 0)
    assert seed_of("a", 0) != seed_of("b", 0)
    assert seed_of("a", 1) == seed_of("a", 0) + 1
    assert 0 <= seed < 2**63


@pytest.mark.parametrize("draw", [0, 1])
def test_global_generators_start_from_the_seed(draw, seed):
    import random

    import torch

    assert random.random() == random.Random(seed).random()
    expected = torch.rand(1, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(torch.rand(1), expected)


# Released fields that no room reads, each for a reason; a new name here needs one.
READ_BY_CONFIG_ALONE = {
    "one value exists, and it is checked": (
        "model_type n_shared_experts scoring_func topk_method norm_topk_prob "
        "hidden_act attention_bias attention_dropout tie_word_embeddings"
    ),
    "resolved into the layer table or the buckets": (
        "candidate_source_layer_id index_source_layer_ids engram_vocab_size"
    ),
    "DSpark: tensors are named and skipped": (
        "num_nextn_predict_layers dspark_block_size dspark_noise_token_id dspark_target_layer_ids "
        "dspark_markov_rank dspark_n_routed_experts dspark_num_experts_per_tok"
    ),
}


def names_outside_config() -> str:
    files = [p for p in ROOT.glob("finwhale/**/*.py") if "config" not in p.parts]
    return "\n".join(p.read_text(encoding="utf-8") for p in files)


def is_read(name: str, source: str) -> bool:
    return re.search(rf'\.{name}\b|"{name}"', source) is not None


def test_no_field_is_dead():
    from dataclasses import fields

    from finwhale.config import RopeScaling, TextConfig
    from finwhale.config.run import DataConfig, OptimConfig, RunConfig, ScheduleConfig

    source = names_outside_config()
    for cls in (RunConfig, DataConfig, OptimConfig, ScheduleConfig):
        assert [f.name for f in fields(cls) if not is_read(f.name, source)] == []
    excused = {name for names in READ_BY_CONFIG_ALONE.values() for name in names.split()}
    unread = {f.name for f in fields(TextConfig) if not is_read(f.name, source)}
    assert unread == excused
    assert [f.name for f in fields(RopeScaling) if not is_read(f.name, source)] == ["rope_type"]


def test_dead_field_would_be_found():
    assert not is_read("no_such_field", names_outside_config())
