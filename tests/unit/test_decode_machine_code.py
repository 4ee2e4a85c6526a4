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


@pytest.mark.parametrize(
    "kernel", ["gate and up", "gate and up, one", "down", "product", "wide product"]
)
def test_no_product_is_under_way_when_its_step_ends(kernels, kernel):
    waits = kernels[kernel]["waits"]
    assert waits
    assert not any(waits)


def test_the_check_sees_products_on_top_of_a_sum(kernels):
    assert any(kernels["careless"]["waits"])


@pytest.mark.parametrize(
    "kernel", ["gate and up", "gate and up, one", "down", "product", "wide product"]
)
def test_the_decoder_gets_the_four_bytes_of_a_word(kernels, kernel):
    found = kernels[kernel]["bytes"]
    assert found
    assert set(found) == {4}


@pytest.mark.parametrize(
    ("kernel", "most"), [("product", 0), ("wide product", 0), ("gate and up", 1), ("down", 1)]
)
def test_decoded_weights_stay_in_their_threads(kernels, kernel, most):
    """Those of FP8; Triton 3.7 passes FP4 ones on, 3.6 none."""
    assert kernels[kernel]["passed on"] <= most


def test_the_checks_see_words_that_are_split_and_weights_that_are_passed_on(kernels):
    assert kernels["split words"]["bytes"] == [2, 2]
    assert kernels["split words"]["passed on"] == 1


def test_a_product_whose_threads_have_parts_of_words_does_without_the_decoder(kernels):
    assert kernels["narrow product"]["bytes"] == []


@pytest.mark.parametrize("kernel", ["product", "row", "site", "streams", "router", "latent"])
def test_weights_are_read_before_the_wait_for_earlier_launches(kernels, kernel):
    early = kernels[kernel]["early"]
    assert early["reads"] + early["wide"] > 0
    assert early["wide"] > 0 or kernel == "latent"


def test_a_product_reads_a_whole_tile_early(kernels):
    """64 rows by 128 columns of FP8, 8 KB, are four loads of each of 128 threads."""
    assert kernels["product"]["early"]["wide"] == 4


@pytest.mark.parametrize("kernel", ["gate and up", "gate and up, one"])
def test_the_shared_expert_is_multiplied_before_the_wait_and_no_other(kernels, kernel):
    early = kernels[kernel]["early"]
    assert early["products"] == 16  # of 64 rows of each and 128 columns, by a warp
    # Its input, by 16 bytes; and the scales of weights, which nobody writes, by words.
    assert early["copies"] == early["copies_past_l1"] + early["copies_by_word"] > 20
    assert early["copies_by_word"] < 5
    assert early["reads"] + early["wide"] == 0
    down = kernels["down"]["early"]  # its input is the launch before's
    assert not any(down[what] for what in ("reads", "wide", "copies", "products"))


def test_a_site_makes_coefficients_before_the_wait(kernels):
    """A round inverts eight sums; two more are of the softmax and the sigmoids."""
    assert kernels["site"]["early"]["inversions"] == 10
    assert kernels["streams"]["early"]["inversions"] == 0


def test_what_earlier_launches_wrote_is_read_past_the_first_level_cache(kernels):
    """Rows and indices of attention, the logits of a site; weights may come from anywhere."""
    early = kernels["attention"]["early"]
    assert early["past_l1"] == early["reads"] + early["wide"] > 20
    assert kernels["site"]["early"]["past_l1"] == kernels["site"]["early"]["reads"] == 1
    assert kernels["product"]["early"]["past_l1"] == 0
    combine = kernels["combine"]["early"]  # cos and sin; its sink is a weight
    assert (combine["reads"], combine["past_l1"], combine["wide"]) == (3, 2, 0)


def test_nothing_is_written_and_no_launch_let_in_before_the_wait(kernels):
    checked = {name: x["early"] for name, x in kernels.items() if x.get("early", {}).get("lets")}
    assert len(checked) == 13
    for name, early in checked.items():
        assert not early["writes"], name
        assert not early["lets_early"], name
        # The shared expert waits elsewhere than the routed ones, the query latent than the window.
        assert early["waits"] == (2 if name.startswith("gate and up") or name == "latent" else 1)
        assert bool(early["copies"]) == name.startswith("gate and up")  # to shared memory


def test_the_checks_see_a_write_on_one_of_two_paths_and_in_a_kernel_that_does_not_wait(kernels):
    assert kernels["branches"]["early"]["writes"] == 1
    assert kernels["branches"]["early"]["waits"] == 2
    assert kernels["careless"]["early"]["writes"] > 0
    assert not kernels["careless"]["early"]["waits"]
