"""What a disk store is for and how large it may be; sizes are compared before a file is touched.

A newcomer's mistake: to give segments the size of the bound; space comes back in whole segments, so
there are at least three. No torch here. Source: docs/cache-format.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finwhale.tiers.disk_segments import ALIGNMENT, MAX_GROUPS, record_bytes
from finwhale.tiers.tier import StoreError


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskStoreConfig:
    """What a store is for and how large it may be.

    directory           made if its parent exists
    namespace           `Namespace.digest()`, 32 bytes; other namespaces share the space unseen
    max_bytes           segment files together, at every moment; at least three segments
    segment_bytes       one file; a multiple of 4096
    group_bytes         expected length of every group; a record that differs is a miss. None: any
    tenant_quota_bytes  live records of one tenant, at least one; None: no quota
    max_pending_bytes   blocks that wait for the writer, at least one; above it `store` turns away
    read_only           serve what is there and change nothing
    """

    directory: Path
    namespace: bytes
    max_bytes: int
    segment_bytes: int = 256 << 20
    group_bytes: tuple[int, ...] | None = None
    tenant_quota_bytes: int | None = None
    max_pending_bytes: int = 256 << 20
    read_only: bool = False

    def __post_init__(self) -> None:
        if len(self.namespace) != 32:
            raise StoreError(f"namespace: got {len(self.namespace)} bytes, expected a digest of 32")
        if self.segment_bytes < 2 * ALIGNMENT or self.segment_bytes % ALIGNMENT:
            raise StoreError(
                f"segment_bytes: got {self.segment_bytes}, expected a multiple of {ALIGNMENT} "
                f"of at least {2 * ALIGNMENT}"
            )
        if self.group_bytes is not None:
            size, most = record_bytes(self.group_bytes), self.segment_bytes - ALIGNMENT
            if len(self.group_bytes) > MAX_GROUPS or size > most:
                raise StoreError(
                    f"segment_bytes: got {self.segment_bytes} for records of {size} bytes in "
                    f"{len(self.group_bytes)} groups, expected room for one and at most "
                    f"{MAX_GROUPS} groups"
                )
        if self.max_bytes < 3 * self.segment_bytes:
            raise StoreError(
                f"max_bytes: got {self.max_bytes}, expected at least three segments "
                f"({3 * self.segment_bytes}); raise it or lower segment_bytes"
            )
        # Without a layout the smallest record there is; less than one would turn every block away.
        record = ALIGNMENT if self.group_bytes is None else record_bytes(self.group_bytes)
        if self.tenant_quota_bytes is not None and self.tenant_quota_bytes < record:
            raise StoreError(
                f"tenant_quota_bytes: got {self.tenant_quota_bytes}, expected None or at least one "
                f"record ({record})"
            )
        if self.max_pending_bytes < record:
            raise StoreError(
                f"max_pending_bytes: got {self.max_pending_bytes}, expected at least one record "
                f"({record})"
            )
