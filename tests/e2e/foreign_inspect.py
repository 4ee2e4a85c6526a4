"""inspect-ai against the shipped model: it wants a newer `openai` than other client libraries.

Run by `make test-clients` in an environment of its own, with foreign_inspect.txt installed.
"""

from __future__ import annotations

import anyio
import pytest
from inspect_ai.model import GenerateConfig, get_model

from tests.foreign_server import MODEL


@pytest.mark.parametrize("provider", ["openai-api/finwhale", "openai", "anthropic"])
def test_inspect_ai_reads_an_answer(address, provider):
    base = f"{address}/anthropic" if provider == "anthropic" else f"{address}/v1"
    model = get_model(f"{provider}/{MODEL}", base_url=base, api_key="unused", memoize=False)
    config = GenerateConfig(max_tokens=64, temperature=0, max_retries=0)
    answer = anyio.run(lambda: model.generate("Say hello.", config=config))
    assert answer.completion
    assert answer.usage.output_tokens <= 64
