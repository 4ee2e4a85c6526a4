"""Logging: silent until configured, one line a record, spans that survive an exception."""

import logging

import pytest

from finwhale import telemetry


@pytest.fixture
def package_logger():
    logger = logging.getLogger("finwhale")
    before = logger.handlers[:], logger.level
    logger.handlers = []
    yield logger
    logger.handlers, logger.level = before[0], before[1]


def test_importing_the_package_configures_no_handler(package_logger):
    assert telemetry.get_logger("train").name == "finwhale.train"
    assert package_logger.handlers == []


def test_configuring_twice_writes_each_record_once(package_logger, capsys):
    telemetry.configure()
    telemetry.configure()
    telemetry.get_logger("train").info("step %d", 3)
    assert capsys.readouterr().err == "finwhale.train: step 3\n"


@pytest.mark.parametrize(("verbose", "lines"), [(False, 0), (True, 1)])
def test_debug_records_need_verbose(package_logger, capsys, verbose, lines):
    telemetry.configure(verbose=verbose)
    telemetry.get_logger("x").debug("hidden")
    assert capsys.readouterr().err.count("\n") == lines


def test_span_is_logged_when_the_block_raises(package_logger, capsys):
    telemetry.configure(verbose=True)
    with (
        pytest.raises(ValueError, match="inside"),
        telemetry.span("load", telemetry.get_logger("x")),
    ):
        raise ValueError("inside")
    assert capsys.readouterr().err.startswith("finwhale.x: load: 0.")
