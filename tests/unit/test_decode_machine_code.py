"""What only the compiled tile products can get wrong, seen without a GPU.

A product that is under way when its step ends reads registers that the next step writes; the
decoders' assembler takes four bytes of one word, which the compiler's layout must hand it; and a
read that is moved behind the wait for the launch before hides nothing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.machine_code"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.returncode, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("kernel"): line for line in lines}


@pytest.mark.parametrize("kernel", ["gate and up", "down", "product"])
def test_no_product_is_under_way_when_its_step_ends(kernels, kernel):
    waits = kernels[kernel]["waits"]
    assert waits
    assert not any(waits)


def test_the_check_sees_products_on_top_of_a_sum(kernels):
    assert any(kernels["careless"]["waits"])


@pytest.mark.parametrize("kernel", ["gate and up", "down", "product"])
def test_the_decoder_gets_the_four_bytes_of_a_word(kernels, kernel):
    found = kernels[kernel]["bytes"]
    assert found
    assert set(found) == {4}


def test_a_product_whose_threads_have_parts_of_words_does_without_the_decoder(kernels):
    assert kernels["narrow product"]["bytes"] == []


def test_a_product_reads_weights_before_it_waits_for_the_launch_before(kernels):
    """64 rows by 128 columns of FP8, 8 KB, are four loads of each of 128 threads."""
    assert kernels["product"]["early"] == 4
    assert kernels["gate and up"]["early"] == 0  # the router says which weights
