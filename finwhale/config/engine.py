"""Settings of the engine, compared with each other before a byte is allocated.

Sizes come in tokens and bytes, never as a share of the machine. A newcomer's mistake: a step's
token budget below the number of sequences, which would let decoding starve every prefill; it is
refused here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from finwhale.config.model import ConfigError

STORAGES = ("fp4", "bf16", "fp32")
PREFILLS = ("exact", "bounded", "full")
KERNELS = ("auto", "numba", "torch")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an `Engine` serves.

    block_size         tokens of a cache block; every global KV stream has its part of it
    num_blocks         blocks of the pool: num_blocks * block_size tokens of context in all
    max_sequences      sequences with a window of their own, computed in one step at most
    max_batch_tokens   encoder rows of one step
    max_waiting        requests that may queue; one more is refused
    prefill            "exact": the decoder on the trailing rows that exactness needs. "bounded":
                       the approximation A01. "full": all layers on all tokens
    replay_windows     rows of a bounded replay and of the decoder in mode "bounded", in windows
    trim_rows          each layer runs on the rows that a later one still reads; off: on all rows of
                       a start, the slow definition. The bits are the same if batch_invariant
    prefix_cache       keep full blocks for later prompts
    snapshot_bytes     memory for windows at block ends: a hit that finds one replays nothing
    snapshot_lifetime_s  time since they were last of use, after which they are forgotten
    load_cost          rows computed in the time that a slower tier takes to load one token's
                       global KV: a hit there is loaded if it saves more rows than it costs
    storage            "fp4": the deployed records. "bf16", "fp32": for debugging
    batch_invariant    the same bits in any company; off: products of fewer than four rows take the
                       library's shorter path
    kernels            "numba": compiled. "torch": the slow definition. "auto": numba if installed
    poison             fill free blocks with bytes that read as NaN (tests)
    """

    block_size: int = 64
    num_blocks: int = 256
    max_sequences: int = 16
    max_batch_tokens: int = 256
    max_waiting: int = 1024
    prefill: str = "exact"
    replay_windows: int = 1
    trim_rows: bool = True
    prefix_cache: bool = True
    snapshot_bytes: int = 256 << 20
    snapshot_lifetime_s: float = 600.0
    load_cost: float = 0.01
    storage: str = "fp4"
    batch_invariant: bool = True
    kernels: str = "auto"
    poison: bool = False

    def __post_init__(self) -> None:
        for name, known in (("storage", STORAGES), ("prefill", PREFILLS), ("kernels", KERNELS)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"engine.{name}: got {value!r}, expected one of {known}")
        for name in (
            "block_size",
            "num_blocks",
            "max_sequences",
            "max_batch_tokens",
            "max_waiting",
            "replay_windows",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name}: got {getattr(self, name)}, expected at least 1")
        if self.replay_windows > 1 and self.prefill != "bounded":
            raise ConfigError(
                f"engine.replay_windows: got {self.replay_windows} in mode {self.prefill!r}, which "
                "replays what it needs; expected prefill 'bounded'"
            )
        if self.snapshot_bytes < 0:
            raise ConfigError(f"engine.snapshot_bytes: got {self.snapshot_bytes}, expected >= 0")
        if not self.snapshot_lifetime_s > 0:
            raise ConfigError(
                f"engine.snapshot_lifetime_s: got {self.snapshot_lifetime_s}, expected over 0"
            )
        if not 0 <= self.load_cost < math.inf:
            raise ConfigError(f"engine.load_cost: got {self.load_cost}, expected 0 or more rows")
        if self.max_batch_tokens <= self.max_sequences:
            raise ConfigError(
                f"engine.max_batch_tokens: got {self.max_batch_tokens}, expected more than "
                f"max_sequences = {self.max_sequences}, or decoding could starve every prefill"
            )
