"""Compile the engine's kernels once, before the tests: `make test` runs it.

Two workers under a coverage tracer would each spend a minute on it. Without numba it does nothing.
"""

import sys

from finwhale import telemetry
from finwhale.engine.warm_up import compile_kernels


def main() -> int:
    telemetry.configure()
    compile_kernels()
    return 0


if __name__ == "__main__":
    sys.exit(main())
