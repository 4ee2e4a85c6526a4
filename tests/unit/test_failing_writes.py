"""A write that fails half way names the file and the cause and leaves all as it was (case 132)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.failing_writes import WRITERS

ROOT = Path(__file__).parents[2]
# What an error names: the file itself, or the folder that appears whole or not at all.
NAMED = {
    "state": "state.pt",
    "checkpoint": "out",
    "tiny": "out",
    "sequence_state": "state",
    "tokenizer": "tokenizer.json",
    "run_record": "run.json",
    "metrics": "metrics.jsonl",
    "shards": "out1",
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_that_ends_at_any_byte_leaves_what_was_there(tmp_path, writer):
    done = subprocess.run(
        [sys.executable, "-m", "tests.failing_writes", writer, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *failed, last = json.loads(done.stdout)
    assert len(failed) >= 4
    for attempt in failed:
        module, message = attempt["error"]
        assert module.startswith("finwhale."), attempt
        assert f"/folder/{NAMED[writer]}: " in message, attempt
        assert "File too large" in message, attempt
        assert "\n" not in message
        if writer == "checkpoint":
            assert "(model-00001-of-00001.safetensors)" in message
        # Metrics are appended: a line that is cut is cut off again by the resumed run.
        assert attempt["same"] or writer == "metrics", attempt
        assert not [name for name in attempt["names"] if "partial" in name], attempt
    assert not last["same"]
