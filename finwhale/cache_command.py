"""`finwhale cache`: what a cache directory holds, whether it is whole, and making it smaller.

A composition beside the command line. Reading needs no index and may run beside a server; pruning
takes the directory for itself and is refused while a server has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from finwhale.chat_ui.sizes import size_in_bytes


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Look at, check or shrink the cache directory of `finwhale serve --cache-dir`.

    stat: segments, blocks, tokens, namespaces. verify: the same, every checksum recomputed; exit
    code 1 if anything is damaged. prune: down to --size, the least valuable blocks first.

    Example: finwhale cache prune cache --size 10GB
    """

    action: tyro.conf.Positional[Literal["stat", "verify", "prune"]]
    """What to do."""
    directory: tyro.conf.Positional[Path]
    """The cache directory."""
    size: str | None = None
    """Bytes that prune leaves, as in 10GB."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Do it, print what is there, and return 1 if something is damaged."""
        from rich.console import Console

        from finwhale.tiers.disk_check import survey

        if (self.action == "prune") != (self.size is not None):
            raise ValueError(
                f"--size: got {self.size!r} with {self.action}, expected it with prune"
            )
        say = Console(highlight=False, soft_wrap=True, markup=False).print
        if self.size is not None:
            self._prune(size_in_bytes(self.size, "--size"))
        report = survey(self.directory)
        say(
            f"{self.directory}: {report.blocks:,} blocks, {report.tokens:,} tokens, "
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

    def _prune(self, num_bytes: int) -> None:
        from finwhale.tiers.disk_check import survey
        from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig

        # A store of the bound asked for gives the rest up as it opens; any namespace will do.
        longest = max((s.num_bytes for s in survey(self.directory).segments), default=0)
        if num_bytes < 3 * longest:
            raise ValueError(
                f"--size: got {num_bytes:,} bytes, expected at least three of its segments "
                f"({3 * longest:,}); to have less, delete the directory"
            )
        if not longest:
            return
        config = DiskStoreConfig(
            directory=self.directory,
            namespace=bytes(32),
            max_bytes=num_bytes,
            segment_bytes=longest,
        )
        DiskStore(config).close()
