"""`finwhale serve` as a process: a folder, a port, a signal, a limit of open files."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import openai
import pytest

from finwhale.checkpoint.shipped import shipped_model
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
        # An end in order, and not by the signal.
        assert process.wait(timeout=10) == 0
    finally:
        guard.cancel()
        process.kill()
        process.wait()
    assert "Traceback" not in rest
    assert '"completion_tokens": 40' in rest


@contextlib.contextmanager
def serving(folder, *cache, program=PROGRAM, seconds=50, environment=(), before=None):
    """Yield (process, client) of a server; kill -9 at the end. `process.started` has its first log.

    cache   a cache directory, or nothing
    before  called in the new process before it runs
    """
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder), *map(str, cache)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **dict(environment)},
        **({} if before is None else {"preexec_fn": before}),
    )
    guard = threading.Timer(seconds, process.kill)
    guard.start()
    try:
        process.started, match = [], None
        while match is None:
            process.started.append(process.stderr.readline())
            assert process.started[-1], process.started
            match = re.search(r"on (http://127\.0\.0\.1:\d+)", process.started[-1])
        address = match.group(1)
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


def test_ctrl_c_ends_in_order_and_a_connection_that_idles_does_not_hold_it_up(folder):
    with serving(folder) as (process, client):
        host, port = client.base_url.host, client.base_url.port
        with socket.create_connection((host, port), timeout=10) as idle:
            assert client.models.list().data
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=10) == 0
            assert idle.recv(10) == b""
        assert "Traceback" not in process.stderr.read()


def test_a_signal_while_it_starts_is_an_end_in_order_too(folder):
    program = PROGRAM.replace("sys.exit(serve.run())", STOPPED_WHILE_LOADING)
    process = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (process.returncode, process.stderr) == (0, "loading\n")


STOPPED_WHILE_LOADING = """
import os, signal, finwhale.checkpoint.load as load
def stopped(*args, **options):
    print("loading", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal was not taken")
load.load_model = stopped
sys.exit(serve.run())
"""


def few_files():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))


def test_more_idle_connections_than_files_leave_the_server_answering(folder):
    with serving(folder, before=few_files) as (process, client), contextlib.ExitStack() as idle:
        address = client.base_url.host, client.base_url.port
        for _ in range(200):
            idle.enter_context(socket.create_connection(address, timeout=10))
        # Every one is answered while they stay: 200, or 503 at once in the first second.
        found = []
        for _ in range(12):
            probe = http.client.HTTPConnection(*address, timeout=10)
            probe.request("GET", "/health")
            found.append(probe.getresponse().status)
            probe.close()
            time.sleep(0.25)
        assert set(found) <= {200, 503}
        assert found[-4:] == [200] * 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        lines = process.stderr.read().splitlines()
    assert any("connections ended: " in line for line in lines)
    assert len(lines) <= 6
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_the_port_opens_when_no_request_has_to_wait_for_a_compiler(tmp_path):
    pytest.importorskip("numba")
    options = {
        "program": PROGRAM.replace("num_blocks=16", "num_blocks=64"),
        "seconds": 280,
        "environment": {"NUMBA_CACHE_DIR": str(tmp_path)},
    }

    def kept():
        """What the compiler has left on disk."""
        return sorted(file.name for file in tmp_path.rglob("*.nbc"))

    with serving(shipped_model(), **options) as (process, client):
        told = "".join(process.started)
        assert "compiling kernels (first start only, about half a minute)" in told
        assert re.search(r"kernels compiled in \d+ s", told)
        ready = kept()
        assert ready
        # Longer than the candidate pool of 1,024 entries, which a kernel of its own searches.
        long = [5 + n % 500 for n in range(1500)]
        for prompt in ([7], list(range(5, 95)), long, long):
            client.completions.create(
                model="tiny", prompt=prompt, max_tokens=3, n=2, logprobs=2, echo=len(prompt) < 100
            )
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )
        # A kernel that was still missing would lie there now.
        assert kept() == ready
    with serving(shipped_model(), **options) as (process, _):
        assert "compil" not in "".join(process.started)
