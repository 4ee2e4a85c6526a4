"""`finwhale cache`: what a cache directory holds, whether it is whole, and making it smaller.

A composition beside the command line. Reading needs no index and may run beside a server; pruning
takes the directory for itself and is refused while a server has it. What a running server counts is
asked of the server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from finwhale.chat_ui.sizes import size_in_bytes


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Look at, check or shrink the cache directory of `finwhale serve --cache-dir`.

    stat: segments, blocks, tokens, namespaces; with --server also hits, loads, stores and bytes of
    every tier. verify: the same, every checksum recomputed; exit code 1 if anything is damaged.
    prune: down to --size, the least valuable blocks first.

    Example: finwhale cache prune cache --size 10GB
    """

    action: tyro.conf.Positional[Literal["stat", "verify", "prune"]]
    """What to do."""
    directory: tyro.conf.Positional[Path | None] = None
    """The cache directory; not needed for the figures of a server."""
    size: str | None = None
    """Bytes that prune leaves, as in 10GB."""
    server: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """A running server for stat to ask, as in http://127.0.0.1:8000."""
    api_key_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The server's file of keys, if it has one; the first key is used."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Do it, print what is there, and return 1 if something is damaged."""
        from rich.console import Console

        if (self.action == "prune") != (self.size is not None):
            raise ValueError(
                f"--size: got {self.size!r} with {self.action}, expected it with prune"
            )
        if self.server is not None and self.action != "stat":
            raise ValueError(f"--server: got {self.server!r} with {self.action}, expected stat")
        if self.directory is None and self.server is None:
            raise ValueError(f"PATH: got none with {self.action}, expected the cache directory")
        say = Console(highlight=False, soft_wrap=True, markup=False).print
        if self.server is not None:
            for line in _server_lines(self.server, self.api_key_file):
                say(line)
        return 0 if self.directory is None else self._look(self.directory, say)

    def _look(self, directory: Path, say: Callable[[str], None]) -> int:
        from finwhale.tiers.disk_check import survey

        if self.size is not None:
            _prune(directory, size_in_bytes(self.size, "--size"))
        report = survey(directory)
        say(
            f"{directory}: {report.blocks:,} blocks, {report.tokens:,} tokens, "
            f"{report.record_bytes:,} bytes; {report.num_bytes:,} allocated, segments: "
            f"{len(report.segments)}"
        )
        for digest, blocks in report.namespaces.most_common():
            say(f"namespace {digest.hex()[:16]}: {blocks:,} blocks")
        say(f"tenants: {len(report.tenants):,}")
        for problem in report.problems:
            say(problem)
        if self.action == "verify":
            say("damaged" if report.problems else "every record is whole")
            return int(bool(report.problems))
        return 0


def _prune(directory: Path, num_bytes: int) -> None:
    from finwhale.tiers.disk_check import survey
    from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig

    # A store of the bound asked for gives the rest up as it opens; any namespace will do.
    longest = max((s.num_bytes for s in survey(directory).segments), default=0)
    if num_bytes < 3 * longest:
        raise ValueError(
            f"--size: got {num_bytes:,} bytes, expected at least three of its segments "
            f"({3 * longest:,}); to have less, delete the directory"
        )
    if not longest:
        return
    config = DiskStoreConfig(
        directory=directory,
        namespace=bytes(32),
        max_bytes=num_bytes,
        segment_bytes=longest,
    )
    DiskStore(config).close()


def _server_lines(server: str, key_file: Path | None) -> list[str]:
    """Return the figures of a server's cache as a table; ValueError if it does not tell them."""
    import http.client
    import urllib.request

    from finwhale.serve.cache_figures import figures_table, read_figures

    if not server.startswith(("http://", "https://")):
        raise ValueError(
            f"--server: got {server!r}, expected an address as in http://127.0.0.1:8000"
        )
    headers = {}
    if key_file is not None:
        lines = [line.split() for line in key_file.read_text(encoding="utf-8").splitlines()]
        keys = [words[0] for words in lines if words and not words[0].startswith("#")]
        if not keys:
            raise ValueError(f"--api-key-file: {key_file} has no key, expected one")
        headers["authorization"] = f"Bearer {keys[0]}"
    request = urllib.request.Request(f"{server.rstrip('/')}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            figures = read_figures(answer.read().decode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--server: {server} does not answer ({error})") from None
    except http.client.HTTPException as error:
        # Whatever came instead may hold line ends and be long.
        raise ValueError(f"--server: {server} does not answer in HTTP ({error!r:.100})") from None
    if not figures:
        raise ValueError(f"--server: {server} has no figures of a cache; is it a finwhale server?")
    rows = figures_table(figures)
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
