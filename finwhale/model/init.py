"""Initial values of every parameter, from one seed and each parameter's own name.

Matrices are normal with a fixed small deviation (`initializer_range`), norms are one, the router
biases zero. The hyper-connections start near a plain residual network: each sublayer reads and
writes the streams evenly and the combine matrix is close to the identity. A tensor's draw
depends on its name alone, so adding a layer does not move the others.
"""

from __future__ import annotations

import zlib

import torch
from torch import nn


def initialize(model: nn.Module, seed: int) -> None:
    """Fill all parameters and persistent buffers of a Backbone in place."""
    config = model.config.text_config
    streams = config.hc_mult
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            leaf = name.rsplit(".", 1)[-1]
            if leaf in ("bias", "bias_vl", "attn_sink"):
                tensor.zero_()
            elif leaf.endswith("_base"):
                tensor.zero_()
                # Off-diagonal logits of -4: each stream mostly keeps itself.
                comb = torch.full((streams, streams), -4.0).fill_diagonal_(0.0)
                tensor[2 * streams :].copy_(comb.flatten())
            elif leaf.endswith("_scale"):
                tensor.fill_(0.1)
            elif leaf in ("q_weight", "k_weight") or ("norm" in name and leaf == "weight"):
                tensor.fill_(1.0)
            else:
                generator = torch.Generator().manual_seed(seed + (zlib.crc32(name.encode()) << 16))
                draw = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(draw * config.initializer_range)
