"""What `finwhale serve` makes of its arguments, and what it refuses before a model is read."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from starlette.requests import Request

from finwhale.chat_ui.serve_command import Serve
from finwhale.checkpoint.shipped import shipped_model
from finwhale.config import ConfigError
from finwhale.config.server import ServerConfig
from finwhale.serve.errors import ForbiddenError
from finwhale.serve.exchange import ApiKeys, _check_host
from finwhale.serve.web_server import bind, listen

FOLDER = Path("folder")


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    ["ключ-4 D", "schlüssel", "qqq\u00a0x", "k\u200bey", "\ufeffkey", "a\x7fb", "a\x00b", "😀"],
    ids=ascii,
)
def test_a_key_that_clients_cannot_send_alike_is_refused_with_file_and_line(tmp_path, line):
    file = tmp_path / "keys"
    file.write_text(f"# keys\ngood team\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"keys, line 3: .*ASCII.*replace it") as refused:
        ApiKeys.from_file(file)
    # A key is a secret: what is shown in a terminal has none of it.
    assert line.split()[0] not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_bytes_that_are_no_text_are_refused_by_line_and_ascii_keys_are_all_taken(tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 2"):
        ApiKeys.from_file(file)
    letters = "".join(map(chr, range(33, 127)))
    # A tenant's name never travels in a header.
    file.write_text(f"{letters[10:]} команда\nplain\n", encoding="utf-8")
    keys = ApiKeys.from_file(file)
    pairs = [(b"authorization", f"Bearer {letters[10:]}".encode())]
    assert keys.tenant(Request({"type": "http", "headers": pairs})) == "команда"
    with pytest.raises(ConfigError, match="api_keys"):
        ApiKeys({"ключ": "a"})


# --- tenants -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "given", "has_keys", "want"),
    [
        (256, None, False, 256),
        (256, None, True, 128),
        (7, None, True, 3),
        (1, None, True, 1),
        (256, 200, True, 200),
        (256, 16, False, 16),
    ],
)
def test_one_tenant_may_have_half_of_the_queue_unless_told_otherwise(most, given, has_keys, want):
    keys = Path("keys") if has_keys else None
    serve = Serve(max_requests=most, max_tenant_requests=given, api_key_file=keys)
    config = serve._config(FOLDER)
    assert (config.max_requests, config.max_tenant_requests) == (most, want)


# --- addresses -----------------------------------------------------------------------------------


def is_answered(config: ServerConfig, host: str) -> bool:
    request = Request({"type": "http", "headers": [(b"host", host.encode())]})
    try:
        _check_host(request, config)
    except ForbiddenError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "header"),
    [
        ("127.0.0.1", "127.0.0.1:8000"),
        ("127.0.0.2", "127.0.0.2:8000"),
        ("127.0.0.2", "127.0.0.2"),
        ("::1", "[::1]:8000"),
        # The same address in another spelling.
        ("0:0:0:0:0:0:0:1", "[::1]:8000"),
        ("::1", "[0:0::1]:8000"),
        ("localhost", "localhost:8000"),
        ("LOCALHOST", "localhost:8000"),
    ],
)
def test_any_address_that_is_bound_is_answered_and_no_other_name(host, header):
    serve = Serve(host=host)
    serve._check()
    config = serve._config(FOLDER)
    assert is_answered(config, header)
    assert is_answered(config, "localhost:1")
    for other in ("elsewhere", "127.0.0.3", "localhost.elsewhere", "127.0.0.1.elsewhere", "", "["):
        assert not is_answered(config, other)


def test_a_name_is_loopback_if_all_its_addresses_are(monkeypatch):
    addresses = {"inside": ["127.0.0.1", "::1"], "both": ["127.0.0.1", "192.0.2.7"]}

    def resolved(host, *_, **__):
        if host not in addresses:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (a, 0)) for a in addresses[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    Serve(host="inside")._check()
    assert is_answered(Serve(host="inside")._config(FOLDER), "inside:8000")
    for host in ("both", "nowhere", "0.0.0.0", "192.0.2.7"):
        with pytest.raises(ValueError, match=r"--host: got .* expected a loopback address"):
            Serve(host=host)._check()


# --- the socket ----------------------------------------------------------------------------------


def test_a_taken_port_is_one_sentence_and_a_bound_socket_does_not_listen_yet():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        # Not before it is ready: whoever connects would wait.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        listen(first)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        want = rf"127\.0\.0\.1 port {port}: .*; choose another --port"
        with pytest.raises(OSError, match=want):
            bind("127.0.0.1", port)
    # Two that start at the same moment: the later one hears it when it listens.
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(OSError, match="choose another --port"):
            listen(second)
    with pytest.raises(OSError, match=r"--host: 'no such name'"):
        bind("no such name", 0)


def test_accepted_connections_send_without_waiting_for_acknowledgements():
    """Head and body of an answer are two writes; with Nagle's algorithm the second one waits."""

    async def accepted_option() -> int:
        found = asyncio.get_running_loop().create_future()

        def taken(_, writer: asyncio.StreamWriter) -> None:
            own = writer.get_extra_info("socket")
            found.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind("127.0.0.1", 0) as listener:
            listen(listener)
            async with await asyncio.start_server(taken, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                option = await found
                writer.close()
        return option

    assert asyncio.run(accepted_option())


def test_a_taken_port_is_told_before_the_model_is_read(tmp_path):
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((shipped_model() / name).read_bytes())
    with bind("127.0.0.1", 0) as taken:
        listen(taken)
        with pytest.raises(OSError, match="choose another --port"):
            # The folder has no weights, which is found out later.
            Serve(model=tmp_path, port=taken.getsockname()[1]).run()
