"""A server of the shipped model for client libraries that live in an environment of their own.

A plugin of pytest, `-p tests.foreign_server`, since its settings have to be there before the
libraries are imported. It imports nothing of the project, which that environment does not have.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading

import pytest

MODEL = "finwhale-mini"
KEY = {"api_key": "unused", "max_retries": 0}

# Nothing but the server is called.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "OPENAI_API_KEY": "unused",
    "ANTHROPIC_API_KEY": "unused",
}


@pytest.fixture(scope="session")
def address():
    python = os.environ.get("FINWHALE_PYTHON", ".venv/bin/python")
    command = [python, "-m", "finwhale", "serve", "--port", "0", "--max-tokens", "200"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        told = (re.search(r"serving .* on (http://\S+)", line) for line in process.stderr)
        found = next((match for match in told if match), None)
        assert found is not None, "the server did not start"
        # What it logs from here on must not fill the pipe.
        threading.Thread(target=lambda: list(process.stderr), daemon=True).start()
        yield found.group(1)
    finally:
        process.terminate()
        process.wait(timeout=30)
