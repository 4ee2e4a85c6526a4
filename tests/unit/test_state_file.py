"""State files: atomic, described without torch."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from finwhale.cache.sequence_state import SequenceState, StateError, fresh_state
from finwhale.cache.state_file import describe, write_state
from finwhale.engine.step import forward_step
from tests.models import token_ids, unit_model

MODEL = unit_model()


def state_of(tokens):
    state = fresh_state(MODEL)
    forward_step(MODEL, state, token_ids(1, tokens))
    return state


def test_description_equals_the_state(tmp_path):
    file = tmp_path / "state"
    write_state(file, state_of(41).to_bytes())
    facts = describe(file)
    assert facts.num_tokens == 41
    assert facts.window_start == {"encoder": 0, "decoder": 0}
    found = {(p.kind, p.layer): (p.rows, p.first, p.stop, p.num_bytes) for p in facts.parts}
    assert found["entries", 1] == (20, 0, 20, 20 * 64 * 4)
    assert found["entries", 4] == (41, 0, 41, 41 * 64 * 4)
    assert found["index_keys", 4] == (41, 0, 41, 41 * 32 * 4)
    assert found["window", 7] == (15, 26, 41, 15 * 64 * 4)
    assert found["open_groups", 3] == (9, 32, 41, 9 * 2 * 64 * 4)
    assert found["recent_ids", None] == (11, 30, 41, 11 * 8)
    assert len(found) == 3 + 3 + 8 + 2 + 1


def test_writing_replaces_in_one_step_and_leaves_no_staging_file(tmp_path):
    file = tmp_path / "state"
    for tokens in (5, 9):
        write_state(file, state_of(tokens).to_bytes())
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    c = MODEL.config.text_config
    assert SequenceState.from_bytes(file.read_bytes(), c, str(MODEL.numerics)).num_tokens == 9


def test_bytes_are_flushed_before_they_take_the_name(tmp_path, monkeypatch):
    """A crash behind the renaming must not leave a name without its bytes."""
    order = []
    replace = Path.replace
    monkeypatch.setattr("os.fsync", lambda fd: order.append(os.fstat(fd).st_size))
    monkeypatch.setattr(Path, "replace", lambda *paths: order.append("name") or replace(*paths))
    write_state(tmp_path / "state", b"seven b")
    assert order == [7, "name"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"])
def test_other_files_are_refused_by_name(tmp_path, content):
    file = tmp_path / "state"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"/state: .*, expected "):
        describe(file)


def test_description_needs_no_torch():
    code = "import sys, finwhale.cache.state_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device"])
def test_what_is_no_file_is_named(tmp_path, kind):
    file = tmp_path / "state"
    makers = {"a pipe": os.mkfifo, "a folder": Path.mkdir}
    makers.get(kind, lambda path: path.symlink_to("/dev/zero"))(file)
    with pytest.raises(ValueError, match=rf"/state: {kind}, expected finwhale-sequence-state"):
        describe(file)


@pytest.mark.parametrize("facts", ["[" * 100_000, "{", '{"a": ' + "9" * 5000 + "}", "[]"])
def test_facts_of_another_form_are_refused_by_name(tmp_path, facts):
    header = json.dumps({"__metadata__": {"facts": facts}}).encode()
    (tmp_path / "state").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"/state: .*, expected "):
        describe(tmp_path / "state")


def test_a_flipped_bit_anywhere_is_refused():
    """The digest covers what is said of the tensors, not their bytes alone."""
    blob, draw = state_of(30).to_bytes(), random.Random(0)
    size = 8 + int.from_bytes(blob[:8], "little")
    c, numerics = MODEL.config.text_config, str(MODEL.numerics)
    for place in (*range(size), *(draw.randrange(size, len(blob)) for _ in range(100))):
        damaged = bytearray(blob)
        damaged[place] ^= 1 << draw.randrange(8)
        with pytest.raises(StateError, match=r"^state: "):
            SequenceState.from_bytes(bytes(damaged), c, numerics)
    assert SequenceState.from_bytes(blob, c, numerics).num_tokens == 30


@pytest.mark.parametrize(
    ("fact", "value"), [("num_tokens", 29), ("max_rollback", 3), ("needs_replay", True)]
)
def test_a_changed_fact_is_refused(fact, value):
    blob = state_of(30).to_bytes()
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    facts = json.loads(header["__metadata__"]["facts"])
    header["__metadata__"]["facts"] = json.dumps({**facts, fact: value})
    raw = json.dumps(header).encode()
    changed = len(raw).to_bytes(8, "little") + raw + blob[8 + size :]
    with pytest.raises(StateError, match="damaged"):
        SequenceState.from_bytes(changed, MODEL.config.text_config, str(MODEL.numerics))
