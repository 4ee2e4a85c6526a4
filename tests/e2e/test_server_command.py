"""`finwhale serve` as a process: a folder, a port, a signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading

import openai
import pytest

from tests.checkpoint_files import write_smallest

PROGRAM = """
import sys
from pathlib import Path
from finwhale import telemetry
from finwhale.chat_ui.serve_command import Serve
telemetry.configure()
sys.exit(Serve(model=Path(sys.argv[1]), port=0, num_blocks=16, model_name="tiny").run())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_smallest(tmp_path_factory.mktemp("checkpoint") / "tiny")


def test_a_folder_is_served_until_a_signal_and_a_running_answer_is_not_cut(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    guard = threading.Timer(50, process.kill)
    guard.start()
    try:
        address = None
        for line in process.stderr:
            if found := re.search(
                r"serving tiny, deepseek-flash on (http://127\.0\.0\.1:\d+)", line
            ):
                address = found.group(1)
                break
        assert address is not None
        client = openai.OpenAI(base_url=address, api_key="unused", max_retries=0, timeout=20)
        assert [model.id for model in client.models.list()] == ["tiny", "deepseek-flash"]
        first = client.completions.create(model="tiny", prompt=[0, 5, 6], max_tokens=4, seed=1)
        assert first.usage.completion_tokens <= 4
        # The toy tokenizer has no markers of a chat.
        with pytest.raises(openai.BadRequestError, match="marker") as refused:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}]
            )
        assert str(folder) not in str(refused.value)
        bias = {"1": -100}
        stream = client.completions.create(
            model="tiny", prompt=[0, 5], max_tokens=40, stream=True, logit_bias=bias
        )
        chunks = iter(stream)
        next(chunks)
        process.send_signal(signal.SIGTERM)
        last = list(chunks)[-1]
        assert last.choices[0].finish_reason == "length"
        assert last.usage.completion_tokens == 40
        rest = process.stderr.read()
        assert process.wait(timeout=10) in (0, -signal.SIGTERM)
    finally:
        guard.cancel()
        process.kill()
        process.wait()
    assert "Traceback" not in rest
    assert '"completion_tokens": 40' in rest
