"""Traces in the engine's cache: what is read, found, replayed and written, counted by hand."""

from __future__ import annotations

import json
import statistics

import pytest

from finwhale.evals.cache_replay import CachePlan, CostModel, Served, replay, snapshot_ratio
from finwhale.evals.cache_traces import (
    AgentStatistics,
    Trace,
    TraceError,
    TraceRequest,
    generate_agents,
    read_agents,
    read_mooncake,
)

BLOCK = 64
# The release: 20 encoder layers of 127 rows; 128 rows and 127 for every further decoder layer.
ENCODER_TAIL, DECODER_TAIL = 20 * 127, 128 + 19 * 127


def turn(tokens, at_s=0.0, conversation="a", first=0) -> TraceRequest:
    return TraceRequest(
        at_s=at_s,
        conversation=conversation,
        input_tokens=tokens,
        output_tokens=10,
        blocks=tuple(range(first, first + tokens // BLOCK)),
    )


def trace_of(*requests) -> Trace:
    return Trace(name="hand", block_tokens=BLOCK, requests=requests)


def served(trace, plan, tmp_path) -> Served:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    return replay(trace, plan, folder)["served"]


def test_mooncakes_lines_are_read(tmp_path):
    path = tmp_path / "conversations.jsonl"
    rows = [(0, 1025, 3, [0, 1, 2]), (1500, 1024, 4, [0, 1]), (1000, 511, 5, [9])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    path.write_text("\n".join(lines))
    trace = read_mooncake(path)
    assert trace.name == "conversations"
    assert trace.block_tokens == 512
    # In order of time; the id of a part of a block is left out.
    assert [(r.at_s, r.input_tokens, r.blocks) for r in trace.requests] == [
        (0.0, 1025, (0, 1)),
        (1.0, 511, ()),
        (1.5, 1024, (0, 1)),
    ]
    assert len(read_mooncake(path, limit=2).requests) == 2
    path.write_text(lines[0].replace("[0, 1, 2]", "[0]"))
    with pytest.raises(TraceError, match="1 ids for 1025 tokens"):
        read_mooncake(path)
    path.write_text("")
    with pytest.raises(TraceError, match="no requests"):
        read_mooncake(path)


def test_agents_files_are_merged_and_ids_are_each_files_own(tmp_path):
    for name, at_s in (("trace_1", (0.0, 9.0)), ("trace_2", (0.0, 3.0))):
        rows = [{"t": t, "in": 130, "out": 7, "hash_ids": [1, 2]} for t in at_s]
        (tmp_path / f"{name}.json").write_text(json.dumps({"block_size": 64, "requests": rows}))
    trace = read_agents(tmp_path)
    assert [r.conversation for r in trace.requests] == ["trace_1", "trace_2", "trace_2", "trace_1"]
    assert trace.new_tokens() == [130, 130, 1, 1]
    (tmp_path / "trace_3.json").write_text(json.dumps({"block_size": 32, "requests": []}))
    with pytest.raises(TraceError, match="block sizes"):
        read_agents(tmp_path)


def test_new_tokens_are_those_behind_the_longest_prefix_sent_before():
    trace = trace_of(
        turn(130),
        turn(200),  # goes on from 130, whose last two tokens have no id
        turn(200),
        turn(100),  # a part of the first: nothing is new, and one token is computed anyway
        turn(200, conversation="b"),
        # Goes on from the first block and, by the rule, from the tail of the 100 behind it.
        TraceRequest(at_s=0, conversation="a", input_tokens=200, output_tokens=1, blocks=(0, 7, 2)),
        TraceRequest(at_s=0, conversation="a", input_tokens=200, output_tokens=1, blocks=(8, 1, 2)),
    )
    assert trace.new_tokens() == [130, 70, 1, 36, 200, 100, 200]


def test_without_a_cache_every_token_runs_through_the_encoder(tmp_path):
    found = served(trace_of(turn(6_000), turn(6_000)), CachePlan(keeps=False), tmp_path)
    assert (found.cached_tokens, found.replayed_tokens) == (0, 0)
    assert found.encoder_rows == 12_000
    # Whole blocks but the last, less the decoder's receptive field: 5,952 - 2,541 = 3,411.
    assert found.decoder_rows == 2 * (6_000 - 3_411)


@pytest.mark.parametrize(
    ("gap_s", "restored"), [(600.0, False), (599.0, True)], ids=["expired", "alive"]
)
def test_windows_that_live_spare_the_replay(tmp_path, gap_s, restored):
    trace = trace_of(turn(12_800), turn(16_000, at_s=gap_s))
    found = served(trace, CachePlan(windows=4), tmp_path)
    assert found.cached_tokens == 12_800
    assert found.restored_windows == restored
    # The decoder's first row: 16,000 less a block, less its receptive field, is behind the hit;
    # so the replay begins at 12,800 - 2,540.
    assert 16_000 - BLOCK - DECODER_TAIL > 12_800
    assert found.replayed_tokens == (0 if restored else ENCODER_TAIL)
    assert found.encoder_rows == 12_800 + 3_200 + found.replayed_tokens


def test_a_bounded_start_replays_one_window(tmp_path):
    trace = trace_of(turn(12_800), turn(16_000))
    found = served(trace, CachePlan(prefill="bounded", windows=4), tmp_path)
    assert found.replayed_tokens == 128
    assert found.encoder_rows == 12_800 + 3_200 + 128
    assert found.decoder_rows == 2 * 128


def test_hits_are_counted_where_the_blocks_were(tmp_path):
    """Two conversations of 200 blocks, a pool for one of them, a memory for half of one."""
    plan = CachePlan(
        prefill="bounded", device_blocks=210, memory_blocks=100, disk_blocks=10_000, windows=4
    )
    a, b = turn(12_801), turn(12_801, conversation="b")
    first = served(trace_of(a, b), plan, tmp_path)
    assert first.cached_tokens == 0
    # Nothing of a is on the device but what 210 - 201 blocks leave; the memory, full of the
    # beginning of a, had to make room for b, which is all that a could give up.
    found = served(trace_of(a, b, a), plan, tmp_path)
    hits = found.device_blocks, found.memory_blocks, found.disk_blocks
    assert sum(hits) == 200
    assert hits[0] == 9
    assert hits[2] == 191 - hits[1]
    assert served(trace_of(a, a), plan, tmp_path).device_blocks == 200
    no_disk = CachePlan(prefill="bounded", device_blocks=210)
    assert served(trace_of(a, b, a), no_disk, tmp_path).cached_tokens == 9 * BLOCK


def test_a_prompt_that_the_device_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="device_blocks: 3 are too few"):
        served(trace_of(turn(200)), CachePlan(device_blocks=3), tmp_path)


def test_generated_conversations_have_the_statistics_of_the_public_ones():
    trace = generate_agents(10, seed=3)
    every = trace.new_tokens()
    new = [n for n, r in zip(every, trace.requests, strict=True) if r.at_s]
    assert statistics.median(new) == pytest.approx(742, rel=0.1)
    assert statistics.quantiles(new, n=10)[-1] == pytest.approx(4_686, rel=0.15)
    own = [r.at_s for r in trace.requests if r.conversation == "generated-0"]
    assert own == sorted(own)
    lengths = [r.input_tokens for r in trace.requests]
    assert statistics.median(lengths) == pytest.approx(110_000, rel=0.35)
    assert max(lengths) <= 400_000
    # The hit rate of an endless cache: 95.3 % in 60 of the public traces.
    assert 1 - sum(every) / sum(lengths) == pytest.approx(0.953, abs=0.03)
    assert generate_agents(2, seed=3).requests == generate_agents(2, seed=3).requests
    assert generate_agents(2, seed=4).requests != generate_agents(2, seed=3).requests


SMALL = AgentStatistics(turns=12, first_tokens=2_000, new_tokens=(742, 4_686))


def test_a_snapshot_a_turn_costs_what_the_formula_says(tmp_path):
    """1,351,680 bytes of windows a turn over 890 a new token, in records of 4 KiB pages."""
    trace = generate_agents(3, seed=1, statistics=SMALL)
    plan = CachePlan(
        prefill="bounded", device_blocks=2_048, disk_blocks=1 << 20, turn_snapshots=True
    )
    written = replay(trace, plan, tmp_path / "cache")["disk_bytes"]
    mean = sum(trace.new_tokens()) / len(trace.requests)
    formula = 1 + 1_351_680 / 890 / mean
    assert snapshot_ratio(trace) == pytest.approx(formula, rel=1e-12)
    ratio = 1 + written["snapshots"] / written["blocks"]
    assert ratio == pytest.approx(formula, rel=0.05)
    # Negative control: all 40 layers' windows would cost twice as much, which 5 % would show.
    assert 1 + 2 * written["snapshots"] / written["blocks"] != pytest.approx(formula, rel=0.05)
    # 896 bytes a token with header and padding, of whole blocks.
    longest = {r.conversation: r.input_tokens // BLOCK * BLOCK for r in trace.requests}
    assert written["blocks"] == 896 * sum(longest.values())


def test_bytes_of_records_are_what_the_disk_holds(tmp_path):
    """The release's rows on a real disk tier: what is counted is what is written."""
    plan = CachePlan(
        prefill="bounded",
        device_blocks=64,
        disk_blocks=256,
        turn_snapshots=True,
        whole_payload=True,
    )
    found = replay(trace_of(turn(640), turn(1_300)), plan, tmp_path / "cache")
    assert found["disk_bytes"] == {"blocks": 20 * 57_344, "snapshots": 2 * 1_355_776}
    assert found["tiers"]["disk"].stored_bytes == 20 * 57_344 + 2 * 1_355_776


def test_modelled_seconds_are_the_sum_of_their_parts():
    took = Served(
        encoder_rows=100, decoder_rows=50, memory_blocks=4, disk_blocks=3, output_tokens=20
    )
    cost = CostModel(
        encoder_tps=10, decoder_tps=5, memory_bps=8, disk_bps=3, disk_load_s=1, decode_tps=2
    )
    # 10 s + 10 s + 4 blocks of 2 bytes at 8 a second + 3 of (1 s + 2/3 s) + 10 s.
    assert cost.seconds(took, block_bytes=2) == pytest.approx(10 + 10 + 1 + 5 + 10)
