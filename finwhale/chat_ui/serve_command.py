"""`finwhale serve`: a checkpoint folder behind an HTTP server.

Owns the arguments and their order of refusal: files that can be read in a moment come before the
model, which may take minutes. Rooms are imported when the command runs, so that `finwhale --help`
waits for none of them. The easy mistake: listening on every address without keys; that is refused.
Source: spec/multimodal-serving.md section D.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import math
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import tyro

from finwhale.chat_ui.sizes import size_in_bytes

if TYPE_CHECKING:
    from finwhale.config.server import ServerConfig
    from finwhale.engine.engine import OpenTier
    from finwhale.serve.exchange import ApiKeys
    from finwhale.text.tokenizer import Tokenizer
    from finwhale.tiers.disk_store import DiskStore
    from finwhale.tiers.memory_store import MemoryStore
    from finwhale.tiers.tier import Tier


_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a checkpoint to clients of the OpenAI and Anthropic protocols, and a chat page at /.

    Paths: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /anthropic/v1/messages,
    /health, /readyz, /livez, /metrics. The port opens when requests can be served; the first start
    compiles kernels before. Stop it with Ctrl-C or SIGTERM; running answers get the grace time.

    Example: finwhale serve --port 8000
    """

    model: tyro.conf.Positional[Path | None] = None
    """Checkpoint folder with config.json, weights and tokenizer.json; the shipped one if absent."""
    host: str = "127.0.0.1"
    """Address to listen on; other than loopback needs --api-key-file."""
    port: Annotated[int, tyro.conf.arg(metavar="N")] = 8000
    """Port to listen on; 0 takes a free one."""
    model_name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name that clients ask for; by default the folder's. `deepseek-flash` always works too."""
    api_key_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Lines `KEY` or `KEY TENANT`, keys in ASCII. Tenants share no cached prefixes."""
    num_blocks: Annotated[int, tyro.conf.arg(metavar="N")] = 1024
    """Blocks of 64 tokens of the cache."""
    max_sequences: Annotated[int, tyro.conf.arg(metavar="N")] = 16
    """Sequences computed side by side."""
    prefill: Literal["exact", "bounded"] = "exact"
    """exact: a hit has the bits of a cold run. bounded: it replays --replay-windows (A01)."""
    replay_windows: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Windows that --prefill bounded replays."""
    cache_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder that keeps cached prefixes over a restart; one server at a time."""
    cache_size: str = "10GB"
    """Bytes of --cache-dir's segments at most."""
    memory_cache: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """Host memory for cached prefixes that leave the blocks, as in 4GB; none by default."""
    window_memory: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """Host memory for prefixes' windows, 268MB by default."""
    window_lifetime_s: Annotated[float, tyro.conf.arg(metavar="S")] = 600.0
    """Time that a prefix's windows stay in memory unused; a hit that finds them replays nothing."""
    max_requests: Annotated[int, tyro.conf.arg(metavar="N")] = 256
    """Choices queued or running; one more is refused."""
    max_tenant_requests: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """The same of one tenant; with --api-key-file half of --max-requests, otherwise all of them."""
    max_connections: Annotated[int, tyro.conf.arg(metavar="N")] = 1024
    """Open connections; fewer where the process may open fewer files (`ulimit -n`)."""
    max_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 8192
    """New tokens where a request names no limit."""
    request_timeout_s: Annotated[float, tyro.conf.arg(metavar="S")] = 3600.0
    """Time for a whole answer."""
    shutdown_grace_s: Annotated[float, tyro.conf.arg(metavar="S")] = 10.0
    """Time that running answers get at the end."""
    deepseek_normalise: bool = False
    """Sample as the hosted service forces it, whatever clients ask for."""
    strict_tool_choice: bool = False
    """Refuse a forced tool while thinking is on, as the hosted service; else thinking goes off."""
    cors_origin: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ORIGIN ...")] = ()
    """Origins whose pages may call; none by default."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Load the model and serve until a stop signal."""
        self._check()
        from finwhale.checkpoint.shipped import checkpoint_folder
        from finwhale.serve.exchange import ApiKeys
        from finwhale.text.tokenizer import Tokenizer

        folder = checkpoint_folder(self.model)
        config = self._config(folder)
        keys = ApiKeys() if self.api_key_file is None else ApiKeys.from_file(self.api_key_file)
        tokenizer = Tokenizer.from_file(folder)

        from finwhale.serve.web_server import bind

        # Bound before the model is read, so that a taken port is one sentence within a second; and
        # not listening before requests can be served, so that an open port is an answer.
        with bind(self.host, self.port) as listener, ended_by_sigterm():
            return self._serve(listener, folder, tokenizer, config, keys)

    def _serve(
        self,
        listener: socket.socket,
        folder: Path,
        tokenizer: Tokenizer,
        config: ServerConfig,
        keys: ApiKeys,
    ) -> int:
        from finwhale.chat_ui.comparison import Comparison
        from finwhale.chat_ui.page import page_routes
        from finwhale.checkpoint.load import load_model
        from finwhale.config.accounting import kv_bytes_per_token
        from finwhale.config.engine import EngineConfig
        from finwhale.engine.engine import Engine
        from finwhale.engine.warm_up import compile_kernels
        from finwhale.model import Numerics
        from finwhale.ops import FAST
        from finwhale.serve.application import create_application
        from finwhale.serve.service import Service
        from finwhale.serve.web_server import listen, web_server
        from finwhale.telemetry import get_logger

        compile_kernels()
        engine_config = EngineConfig(
            num_blocks=self.num_blocks,
            max_sequences=self.max_sequences,
            max_batch_tokens=max(256, 2 * self.max_sequences),
            max_waiting=self.max_requests,
            prefill=self.prefill,
            replay_windows=self.replay_windows,
            snapshot_bytes=256 << 20
            if self.window_memory is None
            else size_in_bytes(self.window_memory, "--window-memory"),
            snapshot_lifetime_s=self.window_lifetime_s,
        )
        loaded = load_model(folder, numerics=Numerics(), ops=FAST)
        digest = hashlib.sha256(tokenizer.raw.to_str().encode()).hexdigest()
        engine = Engine(
            loaded.model, engine_config, tokenizer_digest=digest, open_tier=self._open_tier()
        )
        if self.memory_cache is not None:
            size = engine.pools.num_bytes()
            pool_bytes = size["main"] + size["index_k"]
            if size_in_bytes(self.memory_cache, "--memory-cache") < 2 * pool_bytes:
                get_logger("serve").warning(
                    "--memory-cache %s brings little: it holds copies of the blocks, %d bytes",
                    self.memory_cache,
                    pool_bytes,
                )
        service = Service.of_engine(engine, tokenizer, config)
        page = page_routes(
            service,
            keys,
            bytes_per_token=kv_bytes_per_token(loaded.config.text_config),
            comparison=Comparison(loaded.model, service.preparer),
        )
        application = create_application(service, keys, routes=page)
        service.reader.warm_up()
        server = web_server(application, service, log_level="info" if self.debug else "warning")
        if engine.tier is not None:
            sizes = {"memory": self.memory_cache, "disk": f"{self.cache_size} in {self.cache_dir}"}
            for name, held in engine.tier.figures().items():
                get_logger("serve").info(
                    "cache, %s: %d blocks, %d bytes of %s",
                    name,
                    held.num_blocks,
                    held.num_bytes,
                    sizes[name],
                )
        names = ", ".join(config.model_names)
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = listener.getsockname()[1]
        try:
            listen(listener)
            get_logger("serve").info(
                "serving %s on http://%s:%d from %s", names, host, port, folder
            )
            server.run(sockets=[listener])
        finally:
            # Blocks that still wait for the disk are written before the process goes.
            engine.close()
        return 0

    def _check(self) -> None:
        """Refuse what can be refused before anything is read."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port: got {self.port}, expected 0 to 65535")
        if self.memory_cache is not None:
            size_in_bytes(self.memory_cache, "--memory-cache")
        if self.window_memory is not None:
            size_in_bytes(self.window_memory, "--window-memory")
        if self.replay_windows < 1:
            raise ValueError(f"--replay-windows: got {self.replay_windows}, expected at least 1")
        if self.replay_windows > 1 and self.prefill != "bounded":
            raise ValueError(
                f"--replay-windows: got {self.replay_windows} with --prefill {self.prefill}, "
                "expected --prefill bounded"
            )
        if not 0 < self.window_lifetime_s < math.inf:
            raise ValueError(
                f"--window-lifetime-s: got {self.window_lifetime_s}, expected seconds over 0"
            )
        num_bytes = size_in_bytes(self.cache_size, "--cache-size")
        least = 3 * max(_segment_bytes(num_bytes), self._longest_segment())
        if num_bytes < least:
            raise ValueError(
                f"--cache-size: got {self.cache_size!r}, expected {least:,} bytes or more, three "
                f"segments; to have less, delete {self.cache_dir or 'nothing'} first"
            )
        if self.api_key_file is None and not _is_loopback(self.host):
            raise ValueError(
                f"--host: got {self.host!r} without --api-key-file, expected a loopback address; "
                "everyone in the network could ask"
            )

    def _max_tenant_requests(self) -> int:
        """Return what one tenant may have; without keys all are one."""
        if self.max_tenant_requests is not None:
            return self.max_tenant_requests
        return self.max_requests if self.api_key_file is None else max(1, self.max_requests // 2)

    def _longest_segment(self) -> int:
        """Return the bytes of the longest segment in --cache-dir.

        A bound below three of them would empty the directory, which nobody asked for.
        """
        if self.cache_dir is None or not self.cache_dir.is_dir():
            return 0
        sizes = [file.stat().st_size for file in self.cache_dir.glob("segment-*.kv")]
        return max(sizes, default=0)

    def _open_tier(self) -> OpenTier | None:
        """Return what opens the tiers behind the engine's blocks, or None if there are none."""
        if self.cache_dir is None and self.memory_cache is None:
            return None

        def open_tier(namespace: bytes, group_bytes: tuple[int, ...]) -> Tier:
            memory = self._memory(group_bytes)
            disk = self._disk(namespace, group_bytes)
            if memory is None or disk is None:
                return cast("Tier", memory or disk)
            from finwhale.tiers.chain import TierChain

            return TierChain(memory, disk)

        return open_tier

    def _memory(self, group_bytes: tuple[int, ...]) -> MemoryStore | None:
        if self.memory_cache is None:
            return None
        from finwhale.tiers.memory_store import OVERHEAD_BYTES, MemoryStore

        num_bytes = size_in_bytes(self.memory_cache, "--memory-cache")
        least = sum(group_bytes) + OVERHEAD_BYTES
        if num_bytes < least:
            raise ValueError(
                f"--memory-cache: got {self.memory_cache!r}, expected {least:,} bytes or more, one "
                "block"
            )
        return MemoryStore(num_bytes)

    def _disk(self, namespace: bytes, group_bytes: tuple[int, ...]) -> DiskStore | None:
        if self.cache_dir is None:
            return None
        from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig

        num_bytes = size_in_bytes(self.cache_size, "--cache-size")
        return DiskStore(
            DiskStoreConfig(
                directory=self.cache_dir,
                namespace=namespace,
                max_bytes=num_bytes,
                segment_bytes=_segment_bytes(num_bytes),
                group_bytes=group_bytes,
            )
        )

    def _config(self, folder: Path) -> ServerConfig:
        from finwhale.config.server import ServerConfig

        name = self.model_name or folder.resolve().name
        return ServerConfig(
            model_names=tuple(dict.fromkeys((name, "deepseek-flash"))),
            max_requests=self.max_requests,
            max_tenant_requests=self._max_tenant_requests(),
            max_connections=self.max_connections,
            request_timeout_s=self.request_timeout_s,
            shutdown_grace_s=self.shutdown_grace_s,
            default_max_tokens=self.max_tokens,
            deepseek_normalise=self.deepseek_normalise,
            strict_tool_choice=self.strict_tool_choice,
            # Without keys, a browser's page must not reach it under another name either.
            allowed_hosts=(*_LOOPBACK_NAMES, self.host) if self.api_key_file is None else (),
            cors_origins=self.cors_origin,
        )


def _segment_bytes(num_bytes: int) -> int:
    # Space comes back a segment at a time, so a small cache has small ones.
    return min(256 << 20, max(1 << 20, num_bytes // 16)) // 4096 * 4096


def _is_loopback(host: str) -> bool:
    """Whether every address of `host` is one of this machine alone."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    addresses = [str(info[4][0]).partition("%")[0] for info in found]
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process with 0 also while it starts; the server itself takes over."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
