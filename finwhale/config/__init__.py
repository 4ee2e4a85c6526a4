"""Configuration as values: the released config.json, the layer table, presets, accounting.

Standard library only: `finwhale --help` and `finwhale inspect` never import torch.
"""

from finwhale.config.engram import EngramBuckets, engram_buckets
from finwhale.config.layers import AttentionMode, LayerSpec, PoolUse, build_layer_specs
from finwhale.config.model import (
    ConfigError,
    ModelConfig,
    QuantizationConfig,
    RopeScaling,
    TextConfig,
    VisionConfig,
)
from finwhale.config.presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "AttentionMode",
    "ConfigError",
    "EngramBuckets",
    "LayerSpec",
    "ModelConfig",
    "PoolUse",
    "QuantizationConfig",
    "RopeScaling",
    "TextConfig",
    "VisionConfig",
    "build_layer_specs",
    "engram_buckets",
    "preset",
]
