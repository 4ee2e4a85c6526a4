"""`finwhale serve` as a process: a folder, a port, a signal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import openai
import pytest

from tests.checkpoint_files import write_smallest

PROGRAM = """
import sys
from pathlib import Path
from finwhale import telemetry
from finwhale.chat_ui.serve_command import Serve
telemetry.configure()
cache = Path(sys.argv[2]) if len(sys.argv) > 2 else None
serve = Serve(
    model=Path(sys.argv[1]), port=0, num_blocks=16, model_name="tiny", cache_dir=cache,
    cache_size="64MB",
)
sys.exit(serve.run())
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


@contextlib.contextmanager
def serving(folder, cache):
    """Yield (process, client) of a server with a cache directory; kill -9 at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(cache)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    guard = threading.Timer(50, process.kill)
    guard.start()
    try:
        lines = iter(process.stderr.readline, "")
        found = (re.search(r"on (http://127\.0\.0\.1:\d+)", line) for line in lines)
        address = next(match.group(1) for match in found if match)
        yield process, openai.OpenAI(base_url=address, api_key="unused", max_retries=0, timeout=20)
    finally:
        guard.cancel()
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_a_prefix_survives_a_signal_and_a_kill_and_answers_stay_the_same(folder, tmp_path):
    prompt = [0, *(5 + (7 * n + n // 13) % 90 for n in range(640))]

    def ask(client):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens

    with serving(folder, tmp_path / "cache") as (process, client):
        text, cached = ask(client)
        assert cached == 0
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
    for kill in (True, False):
        with serving(folder, tmp_path / "cache") as (process, client):
            again, cached = ask(client)
            assert again == text
            # The last token is computed, and the start is replayed.
            assert cached >= 256
            if kill:
                time.sleep(0.2)
                process.send_signal(signal.SIGKILL)
                process.wait(timeout=20)
    # Control: another directory knows nothing.
    with serving(folder, tmp_path / "other") as (_, client):
        assert ask(client) == (text, 0)
