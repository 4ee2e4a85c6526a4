"""Compile the engine's kernels once, before the tests: `make test` runs it.

Two workers under a coverage tracer would each spend a minute on it. Without numba it does nothing.
"""

import sys
import time

from finwhale.config import preset
from finwhale.engine import Engine, EngineConfig, SamplingParams
from finwhale.engine.invariance import numba_missing
from finwhale.model import Numerics
from tests.models import build


def main() -> int:
    if numba_missing() is not None:
        return 0
    began = time.time()
    engine = Engine(build(preset("unit"), Numerics()), EngineConfig(kernels="numba"))
    # Long enough to search the candidate pool and to decode shared rows once.
    engine.generate([list(range(1, 90)), [1, 2, 3]], SamplingParams(max_new_tokens=2))
    print(f"kernels compiled in {time.time() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
