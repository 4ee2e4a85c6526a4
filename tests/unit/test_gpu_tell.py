"""The plugin that keeps the results of a run that is cut."""

import json
import subprocess
import sys

import pytest

TESTS = """
import os
def test_good(): pass
def test_bad(): assert 1 == 2, "why it failed"
def test_cut(): os._exit(3)
"""


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_run_that_is_cut_has_told_each_result_and_what_was_running(tmp_path, workers):
    file, told = tmp_path / "test_some.py", tmp_path / "told.jsonl"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "tests.gpu.tell"]
    command += ["-p", "no:cacheprovider", "--tell", told, "--maxfail", "2", file]
    subprocess.run([str(part) for part in command], capture_output=True, check=False)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    results = {x["test"].split("::")[1]: x for x in lines if "test" in x}
    assert results["test_good"]["outcome"] == "passed"
    assert "why it failed" in results["test_bad"]["message"]
    assert any(x.get("starts", "").endswith("test_cut") for x in lines)
    assert results.get("test_cut", {}).get("outcome") != "passed"
