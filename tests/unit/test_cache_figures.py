"""What a person is told of the cache: names, numbers by tier, and the way to a terminal."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading

import pytest

from finwhale.cache_command import Cache
from finwhale.chat_ui.serve_command import Serve
from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine
from finwhale.engine.prefill import exact_decoder_rows, exact_encoder_rows
from finwhale.engine.request import SamplingParams
from finwhale.model import Numerics
from finwhale.serve.cache_figures import cache_figures, figures_table, read_figures
from finwhale.serve.metrics import Metrics
from finwhale.serve.service import Service
from finwhale.tiers.chain import TierChain
from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig
from finwhale.tiers.memory_store import OVERHEAD_BYTES, MemoryStore
from tests.fault_disk import FaultDisk
from tests.metrics_page import check_page
from tests.models import token_ids, unit_model
from tests.scripted_engine import byte_tokenizer

MODEL = unit_model(Numerics())
TEXT = MODEL.config.text_config
BLOCK = 8
LONG = -(-(exact_encoder_rows(TEXT) + exact_decoder_rows(TEXT) + 40) // BLOCK) * BLOCK
IDS = token_ids(1, LONG + 40, seed=5)[0].tolist()
ONE = SamplingParams(max_new_tokens=1, temperature=0)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of an engine that found a prompt on the device, then in memory, then on disk."""

    def open_tier(namespace, sizes):
        folder = tmp_path_factory.mktemp("tiers") / "cache"
        config = DiskStoreConfig(
            directory=folder, namespace=namespace, max_bytes=3 << 20, segment_bytes=1 << 20
        )
        # Room for one of the two prompts.
        most = (LONG // BLOCK + 2) * (sum(sizes) + OVERHEAD_BYTES)
        return TierChain(MemoryStore(most), DiskStore(config, FaultDisk()))

    settings = EngineConfig(
        block_size=BLOCK, num_blocks=LONG // BLOCK + 4, max_sequences=2, snapshot_bytes=0
    )
    engine = Engine(MODEL, settings, open_tier=open_tier)
    other = list(reversed(IDS[:LONG]))
    engine.generate([IDS[:LONG]], ONE)
    engine.generate([IDS[:LONG]], ONE)  # device
    engine.tier.flush()
    engine.generate([other], ONE)
    engine.generate([IDS[: LONG + 1]], ONE)  # disk: the other has pushed it out of both
    engine.tier.flush()
    text = Metrics(lambda: cache_figures(engine)).text()
    blocks = engine.index.num_cached, engine.tier.figures()
    engine.close()
    return text, blocks


def test_every_figure_of_a_server_follows_the_conventions(tmp_path):
    engine = Engine(MODEL, EngineConfig(block_size=BLOCK, num_blocks=16, max_sequences=2))
    service = Service.of_engine(engine, byte_tokenizer(tmp_path))
    kinds = check_page(service.metrics.text())
    assert kinds["finwhale_preemptions_total"] == "counter"
    assert kinds["finwhale_running_sequences"] == kinds["finwhale_cache_held_bytes"] == "gauge"
    assert kinds["finwhale_cache_hit_tokens_total"] == "counter"


def test_figures_name_the_tier_where_tokens_were_found(page):
    text, (cached, tiers) = page
    figures = read_figures(text)
    hits = figures["cache_hit_tokens_total"]
    # The second time all but the last block of the prompt is on the device; then nothing of it.
    kept_on_device = LONG - BLOCK
    assert hits["device"] >= kept_on_device
    assert hits["memory"] + hits["disk"] + hits["device"] - kept_on_device == LONG
    assert hits["disk"] > 0
    assert figures["cache_loads_total"]["disk"] == tiers["disk"].hits == hits["disk"] / BLOCK
    assert figures["cache_stores_total"]["disk"] == tiers["disk"].stored
    assert figures["cache_held"]["device"] == cached
    assert figures["cache_held"]["memory"] == tiers["memory"].num_blocks
    assert figures["cache_held_bytes"]["memory"] == tiers["memory"].num_bytes
    assert figures["cache_evictions_total"]["memory"] > 0
    assert figures["cache_load_seconds_total"]["disk"] > 0
    assert figures["cache_store_bytes_total"]["disk"] == 4096 * tiers["disk"].stored
    assert figures["cache_replayed_tokens_total"][""] > 0


def test_what_another_engine_gave_is_no_hit_of_the_device():
    giver, taker = (Engine(MODEL, EngineConfig(block_size=BLOCK, num_blocks=40)) for _ in range(2))
    name = giver.add(IDS[:40], SamplingParams(max_new_tokens=4, temperature=0))
    giver.step()
    given = giver.export(name)
    taker.add(IDS[:41], ONE, hand_over=given)
    while taker.has_work:
        taker.step()
    hits = cache_figures(taker)["cache_hit_tokens_total"][1]
    assert hits == {"device": 0, "handed": 40}


def test_counters_are_counters_and_levels_are_gauges(page):
    text, _ = page
    assert "# TYPE finwhale_cache_loads_total counter" in text
    assert "# TYPE finwhale_cache_held_bytes gauge" in text
    assert 'finwhale_cache_held{tier="disk"} ' in text
    assert "finwhale_cache_replayed_tokens_total " in text


def test_a_table_has_a_figure_a_row_and_a_tier_a_column():
    figures = {"cache_held": {"disk": 1234.0, "device": 0.5}, "cache_replayed_total": {"": 7.0}}
    assert figures_table(figures) == [
        ["", "device", "disk"],
        ["held", "0.500", "1,234"],
        ["replayed", "7", ""],
    ]
    assert read_figures("# HELP finwhale_cache_x y\nfinwhale_steps_total 3\nnonsense\n") == {}


@pytest.fixture
def server(page):
    """An address that answers /metrics with the page, to those with the key."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # the library's name
            is_known = self.headers.get("authorization") == "Bearer secret"
            body = page[0].encode() if self.path == "/metrics" else b"something else"
            self.send_response(200 if is_known else 401)
            self.end_headers()
            self.wfile.write(body if is_known else b"")

        def log_message(self, *_):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def test_stat_asks_a_server_and_prints_its_tiers(server, tmp_path, capsys):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret team\nother\n")
    assert Cache(action="stat", server=server, api_key_file=keys).run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["device", "windows", "memory", "disk", "handed"]
    (hits,) = [line for line in lines if line.startswith("hit tokens")]
    assert len(hits.split()) == 7
    # Without the key, at another path, and where nobody listens: one sentence.
    keys.write_text("# nothing\n")
    for options, told in (
        ({"server": server}, "does not answer"),
        ({"server": f"{server}/x", "api_key_file": keys}, "has no key"),
        ({"server": "http://127.0.0.1:9"}, "does not answer"),
        ({"server": "127.0.0.1"}, "--server: got"),
        ({}, "PATH: got none"),
    ):
        with pytest.raises(ValueError, match=told):
            Cache(action="stat", **options).run()
    keys.write_text("secret\n")
    with pytest.raises(ValueError, match="no figures of a cache"):
        Cache(action="stat", server=f"{server}/x", api_key_file=keys).run()
    with pytest.raises(ValueError, match=r"--server: got .* with verify"):
        Cache(action="verify", server=server, directory=tmp_path).run()


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (b"220 mail ready\r\n", r"BadStatusLine\('220 mail ready\\r\\n'\)"),
        (b"x" * 5000 + b"\r\n", r"BadStatusLine\('x+"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf", "IncompleteRead"),
    ],
    ids=["other protocol", "long line", "cut short"],
)
def test_stat_tells_in_one_sentence_that_a_port_does_not_speak_http(reply, told):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(20)
                peer.recv(1 << 16)
                peer.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ValueError, match=told) as caught:
            Cache(action="stat", server=address).run()
        thread.join()
    assert str(caught.value).startswith(f"--server: {address} does not answer in HTTP (")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_stat_refuses_a_port_that_is_no_number():
    with pytest.raises(ValueError, match=r"--server: .* does not answer in HTTP \(InvalidURL"):
        Cache(action="stat", server="http://127.0.0.1:x").run()


def test_reading_figures_needs_no_torch():
    code = "import sys, finwhale.serve.cache_figures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"memory_cache": "lots"}, "--memory-cache: got 'lots', expected a size"),
        ({"memory_cache": "0"}, "--memory-cache: got '0', expected a size"),
        ({"window_lifetime_s": 0.0}, "--window-lifetime-s: got 0.0"),
        ({"replay_windows": 0, "prefill": "bounded"}, "--replay-windows: got 0"),
        ({"replay_windows": 2}, "--replay-windows: got 2 with --prefill exact"),
        ({"window_lifetime_s": float("nan")}, "--window-lifetime-s: got nan"),
        ({"window_lifetime_s": float("inf")}, "--window-lifetime-s: got inf"),
    ],
    ids=str,
)
def test_serve_refuses_wrong_sizes_and_times_before_it_reads_anything(options, told):
    with pytest.raises(ValueError, match=told):
        Serve(**options)._check()


def test_serve_opens_memory_in_front_of_the_disk(tmp_path):
    assert Serve()._open_tier() is None
    with pytest.raises(ValueError, match=r"--memory-cache: got '1KB', expected .* one block"):
        Serve(memory_cache="1KB")._open_tier()(bytes(32), (3000, 700))
    memory = Serve(memory_cache="1MB")._open_tier()(bytes(32), (3000, 700))
    assert isinstance(memory, MemoryStore)
    assert memory.max_bytes == 10**6
    both = Serve(memory_cache="1MB", cache_dir=tmp_path / "c", cache_size="64MB")
    tier = both._open_tier()(bytes(32), (3000, 700))
    assert set(tier.figures()) == {"memory", "disk"}
    tier.close()
    disk = Serve(cache_dir=tmp_path / "c", cache_size="64MB")._open_tier()(bytes(32), (3000, 700))
    assert set(disk.figures()) == {"disk"}
    disk.close()
