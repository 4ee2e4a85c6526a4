"""Rows that leave layer by layer: the same bits as with all rows in all layers, and no row more.

Starts and counts are hand arithmetic for the unit preset: window 8, so 7 rows of reach per layer,
four layers on each side of the cut. Answers are compared with one whole uncached pass, and what is
left behind (snapshots of all windows) with an engine that trims nothing. Free memory is poisoned,
so a row that is read and was not made gives NaN.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from finwhale.config import ConfigError
from finwhale.engine import live_rows
from finwhale.engine.live_rows import Work
from finwhale.engine.paged_pass import RowSpan, last_rows
from tests.uncached_engine import drain
from tests.unit.test_engine import (
    GREEDY,
    IDS,
    MODEL,
    OTHER,
    assert_all_uncached,
    assert_uncached,
    engine_of,
)

W = MODEL.config.text_config.sliding_window
ONE = replace(GREEDY, max_new_tokens=1)


def work_of(start=238, stop=299, **fields) -> Work:
    """The start of 299 tokens of which 296 are stored: the decoder reads from 268, 296 - 28."""
    span = RowSpan(ids=[0] * 299, slot=0, blocks=(), start=start, stop=stop, stored=296)
    plain = {"decoder_start": 267, "decoder_floor": 267, "encoder_whole": 268}
    return Work(span=span, **{**plain, "decoder_whole": 296, "first_logits": 298, **fields})


@pytest.mark.parametrize(
    ("start", "stop", "encoder", "decoder"),
    [
        (238, 299, [240, 247, 254, 261, 268], [268, 275, 282, 289, 298]),
        # A chunk in the middle: what is below has run, what is above comes later.
        (250, 280, [250, 250, 254, 261, 268], [268, 275, 280, 280, 280]),
        (238, 244, [240, 244, 244, 244, 244], [244] * 5),
        # A token behind all of it.
        (298, 299, [298] * 5, [298] * 5),
    ],
    ids=["whole", "middle", "first", "decode"],
)
def test_rows_of_each_layer_count_back_from_where_windows_are_whole(start, stop, encoder, decoder):
    work = work_of(start, stop)
    assert work.encoder_starts(4, W) == encoder
    assert work.decoder_starts(4, W) == decoder


def test_untrimmed_work_runs_all_its_rows():
    work = work_of(encoder_whole=None, decoder_whole=None)
    assert work.encoder_starts(4, W) == [238] * 5
    assert work.decoder_starts(4, W) == [267] * 5


def test_last_rows_of_spans():
    counts, kept = np.array([3, 0, 4, 2]), np.array([1, 0, 4, 0])
    assert last_rows(counts, kept).tolist() == [2, 3, 4, 5, 6]


def test_rows_computed_are_those_of_the_plan():
    """Rows whose output each layer makes: 299 less the start of the layer above."""
    made = {}
    for trim in (True, False):
        engine = engine_of(snapshot_bytes=0, max_batch_tokens=120, trim_rows=trim)
        assert_all_uncached(engine, [IDS[:300]], ONE)
        engine.runner.layer_tokens.clear()
        assert_all_uncached(engine, [IDS[:296] + OTHER[:3]], ONE)
        made[trim] = [engine.runner.layer_tokens[layer] for layer in range(8)]
    assert made[True] == [52, 45, 38, 31, 24, 17, 10, 1]
    assert made[False] == [61] * 4 + [32] * 4


# Multiples of 7 and of 8 on both sides of the fields of one and both halves (28 and 57 rows).
HITS = (8, 16, 24, 32, 56, 64, 72, 120)


@pytest.mark.parametrize("budget", [13, 200])
@pytest.mark.parametrize("suffix", [1, 2, W - 1, W, W + 1])
def test_trimmed_hits_equal_the_uncached_pass(suffix, budget):
    engine = engine_of(snapshot_bytes=0, max_batch_tokens=budget)
    assert_all_uncached(engine, [IDS[:128]], ONE)
    prompts = [IDS[:n] + OTHER[n : n + suffix] for n in HITS]
    params = replace(GREEDY, max_new_tokens=2)
    assert_all_uncached(engine, prompts, params)
    assert engine.scheduler.stats.replayed_tokens


@pytest.mark.parametrize("kernels", ["numba", "torch"])
def test_windows_left_behind_are_those_of_an_untrimmed_start(kernels):
    """Long suffixes too: rows without entries run whole, however far the decoder begins."""
    kept = {}
    prompts = [IDS[:120] + OTHER[:3], IDS[:64] + OTHER[:41], IDS[:16], OTHER[:27], IDS[:128]]
    for trim in (True, False):
        engine = engine_of(trim_rows=trim, kernels=kernels, max_batch_tokens=31)
        assert_all_uncached(engine, [IDS[:128]], ONE, kernels=kernels)
        engine.scheduler.windows.clear()
        for prompt in prompts:
            assert_all_uncached(engine, [prompt], ONE, kernels=kernels)
        pool = engine.scheduler.windows
        kept[trim] = {key: value.value for key, value in pool._kept.items()}
    # An untrimmed start has whole windows earlier; those that both have are the same.
    assert len(kept[True]) >= 4
    assert kept[True].keys() <= kept[False].keys()
    assert all(torch.equal(value, kept[False][key]) for key, value in kept[True].items())


def test_snapshot_of_a_trimmed_start_serves_the_next_turn():
    engine = engine_of(max_batch_tokens=60)
    assert_all_uncached(engine, [IDS[:200]], ONE)
    engine.scheduler.windows.clear()
    turn = IDS[:200] + OTHER[:20]
    assert_all_uncached(engine, [turn], ONE)
    before = engine.scheduler.stats.restored_windows
    assert_all_uncached(engine, [turn + IDS[7:40]], GREEDY)
    assert engine.scheduler.stats.restored_windows == before + 1


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_preempted_in_the_middle_of_a_trimmed_replay(after):
    """Windows of that moment are not whole, so they must not be kept for a later start."""
    engine = engine_of(max_batch_tokens=13)
    assert_all_uncached(engine, [IDS[:128]], ONE)
    engine.scheduler.windows.clear()

    def stop(step: int) -> None:
        if step == after:
            assert engine.preempt("a")

    prompt = IDS[:128] + OTHER[:9]
    engine.add(prompt, GREEDY, request_id="a")
    served = drain(engine, stop)["a", 0]
    assert engine.scheduler.stats.preemptions == 1
    assert_uncached(served, prompt, GREEDY)


def test_replays_cold_starts_and_decoding_share_a_step():
    engine = engine_of(snapshot_bytes=0, max_batch_tokens=90)
    assert_all_uncached(engine, [IDS[:200], OTHER[:100]], ONE)
    prompts = [IDS[:150], OTHER[:97], IDS[50:80], IDS[:200] + OTHER[:2], OTHER[9:10]]
    assert_all_uncached(engine, prompts, replace(GREEDY, max_new_tokens=4))


def test_prompt_logprobs_read_every_row():
    engine = engine_of(max_batch_tokens=40)
    params = replace(ONE, prompt_logprobs=1)
    assert_all_uncached(engine, [IDS[:90]], params)
    assert set(engine.runner.layer_tokens.values()) == {90}


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_bounded_starts_are_trimmed_without_a_change(windows):
    found = {}
    for trim in (True, False):
        engine = engine_of(prefill="bounded", trim_rows=trim, replay_windows=windows)
        for prompt in (IDS[:128], IDS[:128] + OTHER[:3], IDS[:120] + OTHER[:30]):
            engine.add(prompt, GREEDY, request_id="a")
            found.setdefault(trim, []).append(drain(engine)["a", 0].results)
        assert engine.scheduler.stats.replayed_tokens == 2 * windows * W
    assert found[True] == found[False]


def test_a_bounded_replay_of_all_that_exactness_needs_is_exact():
    """Eight windows are 64 rows, and the fields of both halves 57; one window gives other bits."""
    engine = engine_of(prefill="bounded", replay_windows=8, max_batch_tokens=200)
    prompts = [IDS[:128], IDS[:128] + OTHER[:1], IDS[:120] + OTHER[:2]]
    for prompt in prompts:
        assert_all_uncached(engine, [prompt], ONE)
    assert engine.scheduler.stats.replayed_tokens == 2 * 64
    engine = engine_of(prefill="bounded", max_batch_tokens=200)
    engine.add(prompts[0], ONE)
    drain(engine)
    with pytest.raises(AssertionError):
        assert_all_uncached(engine, [prompts[1]], ONE)


def test_blocks_behind_replays_of_other_lengths_never_mix():
    modes = [("exact", 1), ("full", 1), ("bounded", 1), ("bounded", 2), ("bounded", 3)]
    engines = [engine_of(prefill=mode, replay_windows=n) for mode, n in modes]
    assert len({engine.namespace.digest() for engine in engines}) == len(modes)
    for mode in ("exact", "full"):
        with pytest.raises(ConfigError, match="replay_windows: got 2 in mode"):
            engine_of(prefill=mode, replay_windows=2)
    with pytest.raises(ConfigError, match="replay_windows: got 0"):
        engine_of(prefill="bounded", replay_windows=0)


@pytest.mark.parametrize("half", ["encoder", "decoder"])
@pytest.mark.parametrize("wrong", ["position", "reach"])
def test_one_row_trimmed_too_many_is_noticed(half, wrong, monkeypatch):
    """Negative control: whole windows one position later, or one row less of reach per layer."""
    engine = engine_of(snapshot_bytes=0, max_batch_tokens=200)
    assert_all_uncached(engine, [IDS[:128]], ONE)
    # One token behind the last block end: its windows begin where they have to be whole.
    prompt = IDS[:128] + OTHER[:1]
    assert_all_uncached(engine, [prompt], ONE)
    starts = live_rows._starts

    def trimmed(span, whole, layers, window):
        # Encoder spans of this prompt begin before its decoder's, at 128 - 29.
        if (span.start < 99) == (half == "encoder"):
            window -= wrong == "reach"
            whole += wrong == "position"
        return starts(span, whole, layers, window)

    monkeypatch.setattr(live_rows, "_starts", trimmed)
    if (half, wrong) == ("encoder", "position"):
        with pytest.raises(ValueError, match="alive"):  # the decoder asks for the row
            assert_all_uncached(engine, [prompt], ONE)
        return
    engine.add(prompt, ONE, request_id="a")
    assert "not finite" in drain(engine)["a", 0].error
