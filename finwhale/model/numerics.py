"""The numerics of a model as one explicit value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MODES = ("dequant", "release")


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """How a forward pass rounds.

    mode            "dequant": dequantised weights, no activation rounding.
                    "release": as deployed, FP8 activation rounding before every FP8 and FP4
                    matrix; bf16 between modules (spec/backbone.md section 9.1).
    cache_rounding  FP8 window KV, FP4 entries, FP4 index queries and keys (9.2 to 9.4)
    dtype           of activations; "release" is bf16 by definition
    weight_dtype    of the stored parameters, None: as dtype. Training in bf16 keeps fp32 masters,
                    which each product reads in the dtype of its input
    """

    mode: str = "dequant"
    cache_rounding: bool = True
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"numerics.mode: got {self.mode!r}, expected one of {MODES}")
        if self.dtype not in (torch.float32, torch.bfloat16):
            # rms_norm_eps 1e-20 is zero in fp16, and streams can overflow it.
            raise ValueError(f"numerics.dtype: got {self.dtype}, expected float32 or bfloat16")
        if self.mode == "release" and self.dtype is not torch.bfloat16:
            raise ValueError(
                "numerics.dtype: release mode quantises bf16 values, so it needs torch.bfloat16"
            )

    @property
    def parameter_dtype(self) -> torch.dtype:
        return self.weight_dtype or self.dtype

    @classmethod
    def release(cls) -> Numerics:
        """Return the deployed numerics."""
        return cls(mode="release", dtype=torch.bfloat16)
