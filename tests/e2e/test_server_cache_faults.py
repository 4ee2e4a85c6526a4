"""A server whose cache directory is taken, damaged or full: a sentence, or the same replies."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from finwhale.cache_command import Cache
from tests.checkpoint_files import write_smallest
from tests.e2e.test_server_command import serving

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [0, *(5 + (7 * n + n // 13) % 90 for n in range(640))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_smallest(tmp_path_factory.mktemp("checkpoint") / "tiny")


def ask(client):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=0
    )
    told = answer.choices[0].logprobs
    cached = answer.usage.prompt_tokens_details.cached_tokens
    return (answer.choices[0].text, told.token_logprobs), cached


def refusal(folder, cache) -> str:
    """Return what a server says that does not start."""
    command = [sys.executable, "-m", "finwhale", "serve", str(folder), "--port", "0"]
    done = subprocess.run(
        [*command, "--cache-dir", str(cache), "--cache-size", "64MB"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=100,
    )
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_directory_that_another_server_has_is_refused_and_that_one_serves_on(folder, tmp_path):
    with serving(folder, tmp_path / "cache") as (_, client):
        before, _ = ask(client)
        assert "in use by another server; give each its own" in refusal(folder, tmp_path / "cache")
        again, cached = ask(client)
        assert again == before
        assert cached
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    assert "cannot be used" in refusal(folder, tmp_path / "file")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "no folder"


@pytest.mark.slow
def test_damage_between_two_servers_is_told_by_verify_and_changes_no_reply(folder, tmp_path):
    cache = tmp_path / "cache"
    with serving(folder, cache) as (process, client):
        right, _ = ask(client)
        process.terminate()
        process.wait(timeout=20)
    assert Cache(action="verify", directory=cache).run() == 0
    segment = next(iter(cache.glob("segment-*")))
    raw = bytearray(segment.read_bytes())
    pages = [at for at in range(4096, len(raw), 4096) if raw[at : at + 8] == b"FWKVREC\0"]
    # A flipped bit in the fourth block; the sixth and the seventh in each other's place.
    raw[pages[3] + 1000] ^= 16
    sixth, seventh, eighth = pages[5:8]
    raw[sixth:eighth] = raw[seventh:eighth] + raw[sixth:seventh]
    segment.write_bytes(raw)
    assert Cache(action="verify", directory=cache).run() == 1
    with serving(folder, cache) as (process, client):
        again, _ = ask(client)
        assert again == right
        process.terminate()
        process.wait(timeout=20)
    # What was damaged has been stored anew.
    with serving(folder, cache) as (_, client):
        again, cached = ask(client)
        assert again == right
        assert cached >= 256


@pytest.mark.slow
def test_a_device_without_room_costs_the_cache_and_nothing_else(folder, tmp_path):
    """The limit on a file's size stands for a full device: no segment can be made."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))

    with serving(folder, tmp_path / "other") as (_, client):
        right, _ = ask(client)
    for _ in range(2):
        with serving(folder, tmp_path / "cache", before=limit) as (process, client):
            found, cached = ask(client)
            assert found == right
            assert cached == 0
            process.terminate()
            process.wait(timeout=20)
    assert list((tmp_path / "cache").glob("segment-*")) == []
