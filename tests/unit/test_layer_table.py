"""The layer table equals spec/backbone.md section 2, and impossible schedules are refused.

The forty rows below are typed from that section's table, not computed.
"""

from dataclasses import replace

import pytest

from finwhale.config import AttentionMode, ConfigError, PoolUse, build_layer_specs, preset
from finwhale.config.layers import Half, RopeKind

ENC, DEC = Half.ENCODER, Half.DECODER
SWA, FULL, INDEX, REUSE = (
    AttentionMode.WINDOW,
    AttentionMode.FULL,
    AttentionMode.REINDEX,
    AttentionMode.REUSE,
)
PLAIN, YARN = RopeKind.WINDOW, RopeKind.COMPRESSED
NONE, BUILDS, SEARCHES = PoolUse.NONE, PoolUse.BUILDS, PoolUse.SEARCHES

# L, half, mode, ratio, KV and index-K from, top-k from, pool, RoPE, Engram
FLASH = [
    (0, ENC, SWA, 0, None, None, NONE, PLAIN, None),
    (1, ENC, SWA, 0, None, None, NONE, PLAIN, 0),
    (2, ENC, FULL, 2, 2, 2, NONE, YARN, None),
    (3, ENC, REUSE, 2, 2, 2, NONE, YARN, None),
    (4, ENC, REUSE, 2, 2, 2, NONE, YARN, None),
    (5, ENC, REUSE, 2, 2, 2, NONE, YARN, None),
    (6, ENC, REUSE, 2, 2, 2, NONE, YARN, None),
    (7, ENC, REUSE, 2, 2, 2, NONE, YARN, None),
    (8, ENC, FULL, 2, 8, 8, NONE, YARN, None),
    (9, ENC, REUSE, 2, 8, 8, NONE, YARN, None),
    (10, ENC, REUSE, 2, 8, 8, NONE, YARN, None),
    (11, ENC, REUSE, 2, 8, 8, NONE, YARN, None),
    (12, ENC, REUSE, 2, 8, 8, NONE, YARN, None),
    (13, ENC, REUSE, 2, 8, 8, NONE, YARN, None),
    (14, ENC, FULL, 2, 14, 14, NONE, YARN, 1),
    (15, ENC, REUSE, 2, 14, 14, NONE, YARN, None),
    (16, ENC, REUSE, 2, 14, 14, NONE, YARN, None),
    (17, ENC, REUSE, 2, 14, 14, NONE, YARN, None),
    (18, ENC, REUSE, 2, 14, 14, NONE, YARN, None),
    (19, ENC, REUSE, 2, 14, 14, NONE, YARN, None),
    (20, DEC, FULL, 1, 20, 20, BUILDS, YARN, None),
    (21, DEC, REUSE, 1, 20, 20, NONE, YARN, None),
    (22, DEC, REUSE, 1, 20, 20, NONE, YARN, None),
    (23, DEC, REUSE, 1, 20, 20, NONE, YARN, None),
    (24, DEC, INDEX, 1, 20, 24, SEARCHES, YARN, None),
    (25, DEC, REUSE, 1, 20, 24, NONE, YARN, None),
    (26, DEC, REUSE, 1, 20, 24, NONE, YARN, None),
    (27, DEC, REUSE, 1, 20, 24, NONE, YARN, None),
    (28, DEC, INDEX, 1, 20, 28, SEARCHES, YARN, None),
    (29, DEC, REUSE, 1, 20, 28, NONE, YARN, None),
    (30, DEC, REUSE, 1, 20, 28, NONE, YARN, None),
    (31, DEC, REUSE, 1, 20, 28, NONE, YARN, None),
    (32, DEC, INDEX, 1, 20, 32, SEARCHES, YARN, None),
    (33, DEC, REUSE, 1, 20, 32, NONE, YARN, None),
    (34, DEC, REUSE, 1, 20, 32, NONE, YARN, None),
    (35, DEC, REUSE, 1, 20, 32, NONE, YARN, None),
    (36, DEC, INDEX, 1, 20, 36, SEARCHES, YARN, None),
    (37, DEC, REUSE, 1, 20, 36, NONE, YARN, None),
    (38, DEC, REUSE, 1, 20, 36, NONE, YARN, None),
    (39, DEC, REUSE, 1, 20, 36, NONE, YARN, None),
]


def cells(spec) -> tuple:
    return (
        spec.layer_id,
        spec.half,
        spec.mode,
        spec.ratio,
        spec.kv_owner,
        spec.topk_owner,
        spec.pool,
        spec.rope,
        spec.engram_index,
    )


def test_flash_equals_the_forty_rows_of_the_spec():
    assert [cells(s) for s in build_layer_specs(preset("flash").text_config)] == FLASH


def test_flash_totals():
    modes = [s.mode for s in build_layer_specs(preset("flash").text_config)]
    assert [modes.count(m) for m in (SWA, FULL, INDEX, REUSE)] == [2, 4, 4, 30]


def test_owners_own_and_others_do_not():
    specs = build_layer_specs(preset("flash").text_config)
    assert [s.layer_id for s in specs if s.owns_kv] == [2, 8, 14, 20]
    assert [s.layer_id for s in specs if s.owns_topk] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [s.layer_id for s in specs if s.has_engram] == [1, 14]


def test_moving_one_source_changes_the_table():
    # Negative control: the table is derived from the ids, so another id gives other rows.
    text = preset("flash").text_config
    moved = replace(text, index_source_layer_ids=(2, 8, 14, 20, 25, 28, 32, 36))
    rows = [cells(s) for s in build_layer_specs(moved)]
    assert rows != FLASH
    assert rows[24][2] is REUSE
    assert rows[25][2] is INDEX


def test_cut_is_the_pool_builder_and_not_half_the_layers():
    text = preset("small").text_config
    decoder = [s.layer_id for s in build_layer_specs(text) if s.half is DEC]
    assert decoder[0] == text.candidate_source_layer_id == 8
    lopsided = replace(
        preset("unit").text_config,
        num_hidden_layers=5,
        compress_ratios=(0, 1, 1, 1, 1),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1, 3),
        candidate_source_layer_id=1,
        engram_layer_ids=(1, 3),
    )
    assert [s.half for s in build_layer_specs(lopsided)] == [ENC, DEC, DEC, DEC, DEC]


def test_reindex_below_the_cut_never_searches_the_pool():
    text = replace(
        preset("unit").text_config,
        kv_source_layer_ids=(1, 4),
        index_source_layer_ids=(1, 3, 4, 6),
    )
    specs = build_layer_specs(text)
    assert (specs[3].mode, specs[3].pool, specs[3].kv_owner) == (INDEX, NONE, 1)
    assert (specs[6].mode, specs[6].pool, specs[6].kv_owner) == (INDEX, SEARCHES, 4)


def test_reindex_among_another_owners_entries_never_searches_the_pool():
    # The pool holds entries of its builder only.
    text = replace(
        preset("unit").text_config,
        kv_source_layer_ids=(1, 4, 6),
        index_source_layer_ids=(1, 4, 6, 7),
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
    )
    specs = build_layer_specs(text)
    assert (specs[7].mode, specs[7].kv_owner, specs[7].pool) == (INDEX, 6, NONE)


def test_released_file_may_leave_out_the_draft_ratios():
    text = preset("flash").text_config
    short = replace(text, compress_ratios=text.compress_ratios[:40])
    assert build_layer_specs(short) == build_layer_specs(text)


# unit: L0 window, L1 Full(2), L2 Reuse, L3 Full(2) | L4 Full(1), L5 Reuse, L6 Reindex, L7 Reuse
REFUSED = {
    "kv_sources_unsorted": ({"kv_source_layer_ids": (3, 1, 4)}, "kv_source_layer_ids.*sorted"),
    "kv_sources_twice": ({"kv_source_layer_ids": (1, 3, 3, 4)}, "kv_source_layer_ids.*unique"),
    "kv_source_beyond": ({"kv_source_layer_ids": (1, 3, 4, 8)}, "kv_source_layer_ids.*below"),
    "kv_source_negative": ({"kv_source_layer_ids": (-1, 1, 3, 4)}, "kv_source_layer_ids"),
    "index_sources_unsorted": ({"index_source_layer_ids": (1, 4, 3, 6)}, "index_source.*sorted"),
    "index_sources_twice": ({"index_source_layer_ids": (1, 3, 4, 4, 6)}, "index_source.*unique"),
    "index_source_beyond": ({"index_source_layer_ids": (1, 3, 4, 6, 9)}, "index_source.*below"),
    "engram_layers_unsorted": ({"engram_layer_ids": (3, 1)}, "engram_layer_ids.*sorted"),
    "engram_layer_beyond": ({"engram_layer_ids": (1, 8)}, "engram_layer_ids.*below"),
    "kv_owner_without_topk": (
        {"index_source_layer_ids": (1, 4, 6)},
        r"index_source_layer_ids: lacks \[3\]",
    ),
    "pool_builder_without_kv": ({"candidate_source_layer_id": 6}, "candidate_source_layer_id.*6"),
    "pool_builder_reuses": ({"candidate_source_layer_id": 5}, "candidate_source_layer_id.*5"),
    "pool_builder_beyond": ({"candidate_source_layer_id": 8}, "candidate_source_layer_id.*8"),
    "ratio_4_of_v4": (
        {"compress_ratios": (0, 4, 4, 4, 1, 1, 1, 1)},
        r"compress_ratios\[1\]: got 4, expected 0, 1, 2",
    ),
    "ratio_128_of_v4": ({"compress_ratios": (0, 2, 2, 2, 1, 1, 1, 128)}, r"compress_ratios\[7\]"),
    "ratio_negative": ({"compress_ratios": (0, 2, 2, 2, 1, 1, 1, -1)}, r"compress_ratios\[7\]"),
    "ratio_other_than_owner": ({"compress_ratios": (0, 2, 1, 2, 1, 1, 1, 1)}, "layer 2.*owner 1"),
    "ratio_of_reindex_differs": ({"compress_ratios": (0, 2, 2, 2, 1, 1, 2, 1)}, "layer 6.*owner 4"),
    "source_is_window_only": ({"compress_ratios": (0, 2, 2, 0, 1, 1, 1, 1)}, "layer 3.*ratio 0"),
    "reader_before_any_source": (
        {"compress_ratios": (2, 2, 2, 2, 1, 1, 1, 1)},
        "layer 0.*no KV source",
    ),
    "too_few_ratios": ({"compress_ratios": (0, 2, 2, 2, 1, 1, 1)}, "compress_ratios.*7 entries"),
    "too_many_ratios": (
        {"compress_ratios": (0, 2, 2, 2, 1, 1, 1, 1, 0)},
        "compress_ratios.*9 entries",
    ),
    "no_ratios": ({"compress_ratios": ()}, "compress_ratios.*0 entries"),
    "draft_ratio_not_zero": (
        {"compress_ratios": (0, 2, 2, 2, 1, 1, 1, 1, 1), "num_nextn_predict_layers": 1},
        r"compress_ratios.*\[1\]",
    ),
    "no_kv_source": (
        {"kv_source_layer_ids": (), "index_source_layer_ids": ()},
        "candidate_source_layer_id",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_schedule_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(preset("unit").text_config, **change)


ACCEPTED = {
    "unchanged": {},
    "one_more_index_source": {"index_source_layer_ids": (1, 3, 4, 5, 6)},
    "pool_builder_earlier": {"candidate_source_layer_id": 3},
    "window_only_layer_among_readers": {"compress_ratios": (0, 2, 0, 2, 1, 1, 1, 1)},
    "draft_ratios_zero": {
        "compress_ratios": (0, 2, 2, 2, 1, 1, 1, 1, 0),
        "num_nextn_predict_layers": 1,
    },
}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
def test_possible_schedule_is_accepted(change):
    # The control of the refusals above: neighbours of the same changes pass.
    text = replace(preset("unit").text_config, **change)
    assert len(build_layer_specs(text)) == 8
