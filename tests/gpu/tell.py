"""A pytest plugin for runs that may be cut: every result in a file as soon as it is there.

    python -m pytest -p tests.gpu.tell --tell FILE ...
JSON lines: {"starts": id}, then {"test": id, "outcome", "seconds"}, with the message of a failure.
pytest prints messages at the end of a run, so a cut run has none. A test that starts and has no
result was running when the run was cut. With xdist the controller alone writes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

MOST = 4000  # characters of a message, its end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tell", type=Path, default=None, help="file of results, a line each")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--tell") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Told(config.getoption("--tell")), "told")


class _Told:
    def __init__(self, path: Path):
        self.path = path
        path.write_text("", encoding="utf-8")

    def say(self, **line) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.say(starts=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            line = {"test": report.nodeid, "outcome": report.outcome, "when": report.when}
            more = {"message": report.longreprtext[-MOST:]} if report.failed else {}
            self.say(**line, seconds=round(report.duration, 2), **more)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(
                test=report.nodeid, outcome="not collected", message=report.longreprtext[-MOST:]
            )
