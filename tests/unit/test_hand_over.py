"""Global KV that goes to another engine: the same bits there, at any length, or a refusal.

The reference is `tests/uncached_engine.py`, one whole pass from nothing. Sizes are by hand from
spec/kv-cache.md section 1.1.
"""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from finwhale.cache.paged_pools import PagedLayout, PagedPools
from finwhale.config import preset
from finwhale.engine.hand_over import HandOver, decode, encode, read_sequence
from finwhale.engine.request import RequestError
from tests.checkpoint_files import write_smallest
from tests.uncached_engine import drain
from tests.unit.test_engine_tier import (
    BLOCK,
    GREEDY,
    IDS,
    LONG,
    MODEL,
    TEXT,
    Shelf,
    assert_uncached,
    engine_of,
    served,
)

WINDOW = TEXT.sliding_window
# Header of 88 bytes, SHA-256 of 32.
FIXED = 120


def handed(prompt: list[int], **settings) -> tuple[bytes, int]:
    """Return what an engine exports when it has read `prompt`, and the token it drew."""
    return _handed(tuple(prompt), tuple(settings.items()))


@cache
def _handed(prompt: tuple[int, ...], settings) -> tuple[bytes, int]:
    engine = engine_of(**dict(settings))
    engine.add(prompt, replace(GREEDY, max_new_tokens=9), request_id="a")
    found = []
    while not found:
        found = [r.token for output in engine.step() for r in output.new]
    return engine.export("a"), found[0]


def taken(engine, blob, prompt, params=GREEDY, salt=""):
    name = engine.add(prompt, params, hand_over=blob, salt=salt)
    return drain(engine)[name, 0]


def exported_at(prompt, blob=None, **settings) -> bytes:
    """Return the export of an engine that has read all of `prompt`."""
    engine = engine_of(**settings)
    engine.add(prompt, replace(GREEDY, max_new_tokens=9), request_id="a", hand_over=blob)
    while not any(output.new for output in engine.step()):
        pass
    return engine.export("a")


# Blocks are of 8 tokens and so are windows.
LENGTHS = [1, 2, 3, WINDOW - 1, WINDOW, WINDOW + 1, LONG, LONG + 5]


@pytest.mark.parametrize("length", LENGTHS)
def test_decoding_goes_on_elsewhere_with_the_bits_of_the_uncached_pass(length):
    blob, first = handed(IDS[:length])
    prompt = [*IDS[:length], first]
    engine = engine_of()
    assert_uncached(taken(engine, blob, prompt), prompt)
    assert engine.scheduler.stats.handed_tokens == length
    held = engine.index.num_cached
    assert engine.allocator.num_free + held == engine.config.num_blocks


@pytest.mark.parametrize(
    ("length", "more"), [(1, 0), (BLOCK, 1), (BLOCK, 0), (LONG + 1, 0), (LONG + 1, 21)]
)
def test_the_prompt_may_end_with_the_hand_over_or_go_on(length, more):
    blob, _ = handed(IDS[:length])
    prompt = IDS[: length + more]
    # Passes of few rows, so that a replay is cut at odd places.
    engine = engine_of(max_batch_tokens=13)
    assert_uncached(taken(engine, blob, prompt), prompt)
    assert engine.scheduler.stats.handed_tokens == length


@pytest.mark.parametrize("length", [7, LONG + 3])
def test_what_is_handed_on_again_equals_an_export_without_any_hand_over(length):
    blob, _ = handed(IDS[:length])
    prompt = IDS[: length + 10]
    assert exported_at(prompt, blob, max_batch_tokens=11) == exported_at(prompt)


def test_no_tokens_are_a_hand_over_too():
    engine = engine_of()
    engine.add(IDS[:9], GREEDY, request_id="a")
    blob = engine.export("a")
    assert len(blob) == FIXED
    other = engine_of()
    assert_uncached(taken(other, blob, IDS[:9]), IDS[:9])


def test_bytes_are_890_per_token_and_at_most_three_rows_in_the_release():
    config = preset("flash").text_config
    layout = PagedLayout(config=config, block_size=64, storage="fp4")
    pools = PagedPools(layout, num_blocks=3, num_slots=1)

    def size(tokens):
        found = read_sequence(pools, [0, 2, 1], 0, tokens)
        return len(encode(found, root=bytes(32), tokens=[5] * tokens))

    assert [size(0), size(2), size(130)] == [FIXED, FIXED + 2 * 890, FIXED + 130 * 890]
    # An odd token has its own entry of L20 and three rows of 2 x 512 fp32.
    assert [size(n + 1) - size(n) for n in (0, 2, 64, 130)] == [288 + 68 + 3 * 4096] * 4


@pytest.mark.parametrize("length", [6, 9])
def test_bytes_are_as_documented(length):
    """Offsets by hand from docs/cache-format.md."""
    blob, _ = handed(IDS[:length])
    assert blob[:8] == b"FWKVHAND"
    assert [int.from_bytes(blob[a:b], "little") for a, b in ((8, 12), (12, 16), (16, 24))] == [
        1,
        0,
        length,
    ]
    assert blob[-32:] == hashlib.sha256(blob[:-32]).digest()
    ids = b"".join(token.to_bytes(8, "little") for token in IDS[:length])
    parts = (b"finwhale.hand-over", ids)
    behind_lengths = b"".join(len(p).to_bytes(8, "little") + p for p in parts)
    assert blob[56:88] == hashlib.sha256(behind_lengths).digest()


def test_an_odd_row_comes_from_the_hand_over_and_not_from_the_replay():
    """Negative control: a spoiled row, sealed again, must show in the entry that it begins."""
    length = BLOCK + 1
    blob, _ = handed(IDS[:length])
    engine = engine_of()
    root = engine.index.root_key()[-32:]
    own = decode(blob, engine.pools.layout, root=root, tokens=IDS)
    assert own.open_rows
    spoiled = replace(own, open_rows={k: -rows for k, rows in own.open_rows.items()})
    other = encode(spoiled, root=root, tokens=IDS[:length])
    prompt = IDS[: length + 10]
    assert exported_at(prompt, other) != exported_at(prompt, blob) == exported_at(prompt)


def test_rows_of_the_hand_over_are_read():
    """Negative control: other entries, sealed again, give other tokens' log-probabilities."""
    blob, _ = handed(IDS[:LONG])
    engine = engine_of()
    root = engine.index.root_key()[-32:]
    own = decode(blob, engine.pools.layout, root=root, tokens=IDS)
    spoiled = replace(own, streams=tuple(255 - rows for rows in own.streams))
    found = taken(engine, encode(spoiled, root=root, tokens=IDS[:LONG]), IDS[: LONG + 3])
    right = served(engine_of(), IDS[: LONG + 3])
    assert found.results != right.results


@pytest.mark.parametrize("blocks", [1, LONG // BLOCK])
def test_a_bounded_start_behind_a_hand_over_is_a_bounded_hit(blocks):
    length = blocks * BLOCK
    prompt = IDS[: length + 13]
    hit = engine_of(prefill="bounded")
    served(hit, IDS[: length + 1], replace(GREEDY, max_new_tokens=1))
    through_hit = served(hit, prompt)
    assert hit.scheduler.stats.cached_tokens == length
    blob, _ = handed(IDS[:length], prefill="bounded")
    engine = engine_of(prefill="bounded")
    assert taken(engine, blob, prompt).results == through_hit.results


@pytest.mark.parametrize("length", [5, 2 * WINDOW + 1])
def test_a_bounded_start_changes_no_row_that_it_was_given(length):
    settings = {"prefill": "bounded", "max_batch_tokens": 7}
    blob, _ = handed(IDS[:length], **settings)
    after = exported_at(IDS[: length + 9], blob, **settings)
    layout, root = engine_of(**settings).pools.layout, after[24:56]
    before = decode(blob, layout, root=root, tokens=IDS)
    behind = decode(after, layout, root=root, tokens=IDS)
    for old, new in zip(before.streams, behind.streams, strict=True):
        assert torch.equal(old, new[: old.shape[0]])
    assert behind.streams[0].shape[0] > before.streams[0].shape[0]


def test_what_was_handed_over_is_cached_and_goes_to_the_tier():
    blob, _ = handed(IDS[:LONG])
    shelf = Shelf()
    engine = engine_of(shelf.open)
    taken(engine, blob, IDS[: LONG + 1])
    assert len(shelf.held) == LONG // BLOCK
    again = served(engine, IDS[: LONG + 1])
    assert again.num_cached_tokens
    assert_uncached(again, IDS[: LONG + 1])


def test_preemption_and_several_choices_go_the_usual_way():
    blob, _ = handed(IDS[: LONG + 1])
    prompt = IDS[: LONG + 4]
    engine = engine_of(snapshot_bytes=0, max_batch_tokens=16)
    params = replace(GREEDY, n=2)
    name = engine.add(prompt, params, hand_over=blob)
    assert engine.step() == []
    assert engine.preempt(name)
    found = drain(engine)
    for index in range(2):
        assert_uncached(found[name, index], prompt)


def damage(blob):
    yield "hand-over", blob[:50]
    yield "hand-over", b"x" + blob[1:]
    yield "format version 2", blob[:8] + b"\2" + blob[9:]
    for at in (20, 24, 60, 88, len(blob) // 2, len(blob) - 1):
        yield "damaged", blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]
    yield "damaged", blob[:-1]
    yield "damaged", blob + b"\0"
    # Sealed again, as nobody would by accident: rows are missing.
    body = blob[:-40]
    yield "another layout", body + hashlib.sha256(body).digest()


def test_damage_is_refused_and_changes_nothing():
    blob, _ = handed(IDS[:21])
    engine = engine_of()
    for message, bad in damage(blob):
        with pytest.raises(RequestError, match=f"hand_over: got .*{message}"):
            engine.add(IDS[:22], GREEDY, hand_over=bad)
    assert not engine.has_work
    assert engine.allocator.num_free == engine.config.num_blocks
    assert_uncached(taken(engine, blob, IDS[:22]), IDS[:22])


def test_other_tokens_tenants_models_and_settings_are_refused():
    blob, _ = handed(IDS[:21])

    def refused(engine, message, prompt=IDS[:22], params=GREEDY, **options):
        with pytest.raises(RequestError, match=message):
            engine.add(prompt, params, hand_over=blob, **options)
        assert not engine.has_work

    engine = engine_of()
    refused(engine, "not the first ones", IDS[:20])
    refused(engine, "not the first ones", [*IDS[:20], 1 + IDS[20], 7])
    refused(engine, "another model, setting, tokenizer or tenant", salt="other")
    refused(engine, "no prompt_logprobs", params=replace(GREEDY, prompt_logprobs=0))
    refused(engine_of(prefill="full"), "prefill 'exact' or 'bounded'")
    refused(engine_of(prefill="bounded"), "another model, setting")
    refused(engine_of(block_size=2 * BLOCK), "another model, setting")
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        model.head.weight[0, 0] += 1
    refused(engine_of(model=model), "another model, setting")
    with pytest.raises(RequestError, match="one that is served"):
        engine.export("nobody")


def test_a_sequence_that_replays_is_not_exported_half():
    blob, _ = handed(IDS[:LONG])
    engine = engine_of(max_batch_tokens=8)
    engine.add(IDS[: LONG + 1], GREEDY, request_id="a", hand_over=blob)
    engine.step()
    with pytest.raises(RequestError, match="caught up"):
        engine.export("a")
    drain(engine)


def test_a_hand_over_of_nothing_has_empty_streams():
    layout = PagedLayout(config=TEXT, block_size=BLOCK, storage="fp4")
    empty = read_sequence(PagedPools(layout, num_blocks=1, num_slots=1), [], 0, 0)
    assert isinstance(empty, HandOver)
    back = decode(encode(empty, root=bytes(32), tokens=[]), layout, root=bytes(32), tokens=[3])
    assert [rows.shape[0] for rows in back.streams] == [0] * 2 * len(layout.owners)


PROGRAM = """
import sys
from pathlib import Path
from finwhale.cache.state_file import write_state
from finwhale.checkpoint.load import load_model
from finwhale.engine import Engine, EngineConfig, SamplingParams
from finwhale.model import Numerics
from finwhale.ops import FAST
folder, file, what = sys.argv[1:4]
prompt = [3 + n * 7 % 90 for n in range(333)]
engine = Engine(load_model(Path(folder), numerics=Numerics(), ops=FAST).model, EngineConfig())
params = SamplingParams(max_new_tokens=6, temperature=0)
blob, new = None, []
if what == "second":
    prompt.append(int(sys.argv[4]))
    blob = Path(file).read_bytes()
engine.add(prompt, params, request_id="a", hand_over=blob)
while engine.has_work:
    new += [result.token for output in engine.step() for result in output.new]
    if what == "first" and new:
        write_state(file, engine.export("a"))
        break
print(*new, engine.scheduler.stats.handed_tokens)
"""


@pytest.mark.slow
def test_one_process_reads_and_another_goes_on(tmp_path):
    folder = write_smallest(tmp_path / "tiny")

    def run(what, *more):
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "kv"), what, *more],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ).stdout.split()

    alone = run("alone")
    first = run("first")
    assert first[0] == alone[0]
    second = run("second", first[0])
    assert second[:5] == alone[1:6]
    assert second[-1] == "333"
