"""Settings of the HTTP server: its names, its limits and what a request gets that says nothing.

Limits come in bytes, seconds and counts, and none of them is off, since a server without a limit
is one slow client away from none. A newcomer's mistake: reading `max_requests` as the engine's
batch; it counts all choices that are queued or running, and the engine decides how many run.
Source: spec/multimodal-serving.md sections B.7 and D.
"""

from __future__ import annotations

from dataclasses import dataclass

from finwhale.config.model import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """How a server serves.

    model_names          names that a request may ask for; the first one is told
    max_connections      open connections; fewer where the process may open fewer files
    header_timeout_s     time from a connection, or from its last answer, to a whole request header
    write_timeout_s      time in which a reader takes nothing of what waits for it
    max_body_bytes       longest body of a request, after its content coding is undone
    body_timeout_s       time for a body to arrive, and for a large one to be read
    max_pending_body_bytes  bytes of all bodies that arrive or wait to be read
    max_requests         choices that may be queued or running, of all tenants together
    max_tenant_requests  the same of one tenant
    max_choices          largest `n`, and largest number of prompts times `n`
    request_timeout_s    time for a whole answer; then it is cut off with an error
    keep_alive_s         silence after which a stream sends a comment
    shutdown_grace_s     time that running answers get after a stop signal
    default_max_tokens   new tokens where a request names no limit, if the context has the room
    temperature, top_p   for requests that name none
    deepseek_normalise   sampling as the hosted service forces it: thinking at temperature 1 with
                         top_p in [0.95, 1], otherwise top_p 1
    allowed_hosts        names in the Host header that are answered; () answers all
    cors_origins         origins whose pages may call; none by default
    """

    model_names: tuple[str, ...] = ("finwhale",)
    max_connections: int = 1024
    header_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0
    max_pending_body_bytes: int = 256 << 20
    max_requests: int = 256
    max_tenant_requests: int = 128
    max_choices: int = 16
    request_timeout_s: float = 3600.0
    keep_alive_s: float = 10.0
    shutdown_grace_s: float = 10.0
    default_max_tokens: int = 8192
    temperature: float = 1.0
    top_p: float = 0.95
    deepseek_normalise: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError for the first field out of its range."""
        if not self.model_names or not all(self.model_names):
            raise ConfigError(f"server.model_names: got {self.model_names!r}, expected a name")
        for name in (
            "max_connections",
            "max_body_bytes",
            "max_pending_body_bytes",
            "max_requests",
            "max_tenant_requests",
            "max_choices",
            "default_max_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"server.{name}: got {getattr(self, name)}, expected at least 1")
        for name in (
            "header_timeout_s",
            "write_timeout_s",
            "body_timeout_s",
            "request_timeout_s",
            "keep_alive_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"server.{name}: got {getattr(self, name)}, expected over 0")
        if not self.shutdown_grace_s >= 0:
            raise ConfigError(
                f"server.shutdown_grace_s: got {self.shutdown_grace_s}, expected 0 or more"
            )
        if not 0 <= self.temperature <= 2:
            raise ConfigError(f"server.temperature: got {self.temperature}, expected 0 to 2")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"server.top_p: got {self.top_p}, expected a share in (0, 1]")
