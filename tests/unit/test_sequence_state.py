"""Refusals of the state, and its bytes."""

import json
from dataclasses import replace

import pytest
import torch

from finwhale.cache.rows import GrowingRows, RecentRows
from finwhale.cache.sequence_state import SequenceState, StateError, fresh_state
from finwhale.config import preset
from finwhale.engine.prefill import Prefill, encoder_only_unsupported, exact_decoder_rows
from finwhale.engine.step import forward_step
from tests.models import build, token_ids, unit_model

MODEL = unit_model()
C = MODEL.config.text_config
IDS = token_ids(1, 64)


def stepped(tokens, **options):
    state = fresh_state(MODEL, **options)
    forward_step(MODEL, state, IDS[:, :tokens])
    return state


def test_bytes_by_kind_equal_hand_arithmetic():
    # D 64, DI 32; 41 tokens: 20 + 20 + 41 entries of 36 B and keys of 17 + 1 = 17 B.
    held = stepped(41).num_bytes()
    assert held["main_kv"] == 81 * (32 + 4)
    assert held["index_k"] == 81 * (16 + 1)
    assert held["window_kv"] == 8 * (8 - 1 + 8) * (64 + 2)
    assert held["open_groups"] == 2 * (1 + 8) * 2 * 64 * 4
    assert held["recent_ids"] == (3 + 8) * 8


def test_released_tail_is_2541_rows_in_and_2414_out():
    c = preset("flash").text_config
    assert exact_decoder_rows(c) == 128 + 19 * 127 == 2541
    assert exact_decoder_rows(c) - 127 == 2414


def test_a_failed_step_changes_nothing():
    state = stepped(20)
    before = state.to_bytes()
    with pytest.raises(ValueError, match="ids: range"):
        forward_step(MODEL, state, torch.tensor([[5, 512]]))
    broken = build(preset("unit"))
    broken.layers[5].ffn_norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="layer 5: streams are not finite at position 20"):
        forward_step(broken, state, IDS[:, 20:25])
    assert state.to_bytes() == before
    a = forward_step(MODEL, state, IDS[:, 20:25])
    assert torch.equal(a, forward_step(MODEL, stepped(20), IDS[:, 20:25]))


@pytest.mark.parametrize("ids", [torch.zeros(2, 3, dtype=torch.int64), IDS[:, :0]])
def test_steps_take_one_row_of_tokens(ids):
    with pytest.raises(ValueError, match="expected one row of at least one token"):
        forward_step(MODEL, fresh_state(MODEL), ids)


def test_rollback_refuses_what_it_cannot_restore_and_changes_nothing():
    # Case 41: the bound is checked, not overrun.
    state = stepped(40, max_rollback=4)
    before = state.to_bytes()
    for tokens, message in (
        (5, "are gone; max_rollback is 4"),
        (41, "got 41 tokens of 40"),
        (-1, "-1"),
    ):
        with pytest.raises(StateError, match=message):
            state.rollback(tokens)
    assert state.to_bytes() == before
    state.rollback(4)
    with pytest.raises(StateError, match="are gone"):
        state.rollback(1)
    with pytest.raises(StateError, match="max_rollback"):
        SequenceState(config=C, numerics="", max_rollback=-1)


def test_rollback_to_nothing_is_a_fresh_state():
    state = stepped(6)
    state.rollback(6)
    a, b = (forward_step(MODEL, s, IDS[:, :9]) for s in (state, fresh_state(MODEL)))
    assert torch.equal(a, b)


def test_open_prefill_refuses_everything_else():
    state = fresh_state(MODEL)
    prefill = Prefill(MODEL, state)
    with pytest.raises(StateError, match="nothing to finish"):
        prefill.finish()
    prefill.feed(IDS[:, :10])
    for call in (
        lambda: forward_step(MODEL, state, IDS[:, :1]),
        lambda: state.rollback(1),
        state.to_bytes,
        lambda: Prefill(MODEL, state),
    ):
        with pytest.raises(StateError, match="prefill"):
            call()
    prefill.finish()
    with pytest.raises(StateError, match="already finished"):
        prefill.feed(IDS[:, 10:12])


def test_global_kv_alone_must_be_replayed_first():
    held = stepped(30).global_only()
    with pytest.raises(StateError, match="replay"):
        forward_step(MODEL, held, IDS[:, 30:31])
    prefill = Prefill(MODEL, held)
    with pytest.raises(StateError, match="replay the prefix first"):
        prefill.feed(IDS[:, 30:31])
    with pytest.raises(StateError, match=r"expected \(1, 30\)"):
        prefill.replay(IDS[:, :29])
    with pytest.raises(ValueError, match="rows: got 0, expected at least 30 in mode 'exact'"):
        prefill.replay(IDS[:, :30], 0)
    with pytest.raises(ValueError, match="rows: got 29"):
        prefill.replay(IDS[:, :30], 29)
    # Case 46: a prefix is known by its token ids, not by its length.
    with pytest.raises(StateError, match="the ids are not those"):
        prefill.replay(IDS[:, 1:31])
    with pytest.raises(ValueError, match="needs no state"):
        Prefill(MODEL, stepped(30).global_only(), mode="full").replay(IDS[:, :30])


def test_prefill_modes_are_checked():
    with pytest.raises(ValueError, match="mode: got 'fast'"):
        Prefill(MODEL, fresh_state(MODEL), mode="fast")
    with pytest.raises(ValueError, match="bounded_rows"):
        Prefill(MODEL, fresh_state(MODEL), mode="exact", bounded_rows=5)
    with pytest.raises(ValueError, match="bounded_rows: got 0"):
        Prefill(MODEL, fresh_state(MODEL), mode="bounded", bounded_rows=0)


def test_encoder_only_prefill_is_refused_where_a_decoder_owner_reads_its_own_state():
    two = {"kv_source_layer_ids": (1, 3, 4, 6), "index_source_layer_ids": (1, 3, 4, 6)}
    own = unit_model(**two)
    with pytest.raises(ValueError, match=r"decoder owners \[6\] compress their own hidden state"):
        Prefill(own, fresh_state(own), mode="exact")
    Prefill(own, fresh_state(own), mode="full")
    engram = replace(C, engram_layer_ids=(1, 4))
    assert "Engram at layers [4]" in encoder_only_unsupported(engram)
    assert encoder_only_unsupported(preset("flash").text_config) is None


@torch.no_grad()
def test_general_ced_prefills_by_the_encoder_alone():
    two = {"kv_source_layer_ids": (1, 3, 4, 6), "index_source_layer_ids": (1, 3, 4, 6)}
    model = unit_model(**two, ced_kv_from="encoder_output")
    want = model(IDS)[0]
    for cuts in ((50, 60), (1, 49, 60)):
        state, start = fresh_state(model), 0
        prefill = Prefill(model, state)
        for stop in cuts:
            prefill.feed(IDS[:, start:stop])
            start = stop
        torch.testing.assert_close(model.logits(prefill.finish())[0], want[59], rtol=0, atol=5e-5)
        got = model.logits(forward_step(model, state, IDS[:, 60:]))[0]
        torch.testing.assert_close(got, want[60:], rtol=0, atol=5e-5)


def test_states_of_other_models_and_damaged_bytes_are_refused():
    blob = stepped(20).to_bytes()
    other = unit_model(sliding_window=16)
    with pytest.raises(StateError, match="another model configuration"):
        forward_step(other, stepped(20), IDS[:, :1])
    with pytest.raises(StateError, match="config is"):
        SequenceState.from_bytes(blob, other.config.text_config, str(MODEL.numerics))
    with pytest.raises(StateError, match="numerics is"):
        SequenceState.from_bytes(blob, C, "other")
    for damaged in (
        b"",
        blob[:100],
        blob[:-10],
        blob.replace(b"sequence-state-2", b"sequence-state-9"),
    ):
        with pytest.raises(StateError, match="state:"):
            SequenceState.from_bytes(damaged, C, str(MODEL.numerics))


def test_one_flipped_bit_and_a_missing_fact_are_refused():
    blob = bytearray(stepped(20).to_bytes())
    blob[-5] ^= 1
    with pytest.raises(StateError, match="damaged"):
        SequenceState.from_bytes(bytes(blob), C, str(MODEL.numerics))
    blob = stepped(20).to_bytes().replace(b"max_rollback", b"max_rollbacc")
    with pytest.raises(StateError, match="state: max_rollback: got None"):
        SequenceState.from_bytes(blob, C, str(MODEL.numerics))


def test_damage_in_a_chunk_leaves_the_prefill_usable():
    state = fresh_state(MODEL)
    prefill = Prefill(MODEL, state)
    prefill.feed(IDS[:, :10])
    weight = MODEL.layers[2].attn_norm.weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        with pytest.raises(ValueError, match="layer 2: streams are not finite at position 10"):
            prefill.feed(IDS[:, 10:20])
    finally:
        weight.copy_(kept)
    prefill.feed(IDS[:, 10:20])
    hidden = prefill.finish()
    other = Prefill(MODEL, fresh_state(MODEL))
    other.feed(IDS[:, :10])
    other.feed(IDS[:, 10:20])
    assert torch.equal(hidden, other.finish())


def test_a_state_whose_parts_disagree_is_refused():
    state = stepped(20)
    state.entries[4].truncate(19)
    with pytest.raises(StateError, match=r"entries.4 has 19 rows, expected 20"):
        SequenceState.from_bytes(state.to_bytes(), C, str(MODEL.numerics))
    state = stepped(20)
    state.window[2].stop = 19
    with pytest.raises(StateError, match=r"window.2 ends at 19, expected 20"):
        SequenceState.from_bytes(state.to_bytes(), C, str(MODEL.numerics))
    size = int.from_bytes(state.to_bytes()[:8], "little")
    facts = json.loads(state.to_bytes()[8 : 8 + size])["__metadata__"]["facts"]
    assert json.loads(facts)["num_tokens"] == 20


def test_growing_rows_do_not_count_before_commit():
    rows = GrowingRows()
    assert rows.is_empty
    with pytest.raises(ValueError, match="nothing"):
        rows.view()
    assert rows.stage(torch.ones(3, 2)).shape == (3, 2)
    assert rows.is_empty
    rows.commit()
    rows.stage(torch.zeros(100, 2))
    assert rows.view().tolist() == [[1, 1]] * 3
    rows.truncate(1)
    rows.commit()
    assert rows.length == 1
    copy = rows.clone()
    copy.view().zero_()
    assert rows.view().tolist() == [[1, 1]]


def test_recent_rows_of_capacity_zero_keep_nothing():
    assert RecentRows(0).replaced(torch.ones(5, 1), 5).rows.shape == (0, 1)


def test_a_window_of_one_row_holds_no_earlier_rows():
    model = unit_model(sliding_window=1)
    with torch.no_grad():
        want = model(IDS[:, :40])[0]
    state = fresh_state(model, max_rollback=0)
    prefill = Prefill(model, state)
    prefill.feed(IDS[:, :20])
    torch.testing.assert_close(model.logits(prefill.finish())[0], want[19], rtol=0, atol=5e-5)
    got = model.logits(forward_step(model, state, IDS[:, 20:40]))[0]
    torch.testing.assert_close(got, want[20:], rtol=0, atol=5e-5)
    assert state.num_bytes()["window_kv"] == 0


def test_recent_rows_keep_the_last():
    rows = RecentRows(3)
    assert rows.last(0) is None
    rows = rows.replaced(torch.arange(5).unsqueeze(1), 10)
    assert (rows.start, rows.stop, rows.rows.flatten().tolist()) == (7, 10, [2, 3, 4])
    assert rows.last(9).flatten().tolist() == [4]
    rows.truncate(8)
    assert (rows.start, rows.stop, rows.rows.flatten().tolist()) == (7, 8, [2])
