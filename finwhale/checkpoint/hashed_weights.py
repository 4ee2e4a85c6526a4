"""Large random weights that need no file: each value is a hash of tensor name, index and seed.

Only exact integer work, then products of small integers with powers of two, so every platform
and every version of NumPy and torch makes the same bits, and bf16 holds each value exactly.
Ranges are chosen so that every branch of the model matters: norms away from one, sinks, biases
and index weights of both signs, Sinkhorn far from the identity.
The easy mistake: a library generator, whose stream changes between versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod

import numpy as np
import torch

from finwhale.checkpoint.save import TensorSource
from finwhale.config.inventory import TensorSpec, checkpoint_tensors
from finwhale.config.model import ModelConfig
from finwhale.model import Backbone
from finwhale.ops.weight_formats import row_slices

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# Elements hashed at a time: 8 MB of uint64 per temporary.
_CHUNK = 1 << 20


def stream_key(name: str, seed: int) -> np.uint64:
    """Return the start of a tensor's stream: the first 8 bytes of SHA-256 of seed and name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


def hashes(key: np.uint64, start: int, stop: int) -> np.ndarray:
    """Return outputs start..stop-1 of the splitmix64 generator seeded with `key`, uint64."""
    with np.errstate(over="ignore"):
        z = key + (np.arange(start, stop, dtype=np.uint64) + np.uint64(1)) * _GAMMA
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        return z ^ (z >> np.uint64(31))


def _fan_in_exponent(fan_in: int) -> int:
    """Return k so that 2^-k is nearest to sqrt(3 / fan_in) in the logarithm.

    A uniform draw in +-sqrt(3 / fan_in) has the deviation 1 / sqrt(fan_in). Exact integers:
    k is the smallest with fan_in < 3 * 2^(2k + 1).
    """
    k = 0
    while fan_in >= 3 << (2 * k + 1):
        k += 1
    return k


def _values(name: str, shape: tuple[int, ...], raw: np.ndarray) -> np.ndarray:
    """Return the values of hash bytes `raw`; numerators stay below 2^8 in magnitude."""
    leaf = name.rsplit(".", 1)[-1]
    signed = 2 * raw - 255  # odd, -255..255: uniform, symmetric, never zero
    if leaf.endswith("_scale"):
        numerator, exponent = 88 + raw % 56, 7  # 0.69 to 1.12
    elif leaf in ("q_weight", "k_weight") or (leaf == "weight" and "norm" in name.split(".")[-2]):
        numerator, exponent = 48 + raw % 32, 6  # 0.75 to 1.23
    elif leaf in ("bias", "bias_vl"):
        numerator, exponent = signed, 11  # +-0.125
    elif leaf.endswith("_base"):
        numerator, exponent = signed, 9  # +-0.5
    elif leaf == "attn_sink":
        numerator, exponent = signed, 8  # +-1
    elif name == "embed.weight":
        numerator, exponent = signed, 10  # +-0.25
    elif name.endswith(".engram.embed.weight"):
        numerator, exponent = 2 * (raw >> 4) - 15, 4  # +-0.94, four bits: E4M3 holds it
    else:
        numerator, exponent = signed, 8 + _fan_in_exponent(shape[-1])
    return numerator.astype(np.float32) * np.float32(2.0**-exponent)


def hashed_rows(name: str, shape: tuple[int, ...], seed: int, part: slice) -> np.ndarray:
    """Return rows `part` of `hashed_tensor(name, shape, seed)`, float32."""
    width = prod(shape[1:])
    key = stream_key(name, seed)
    out = np.empty((part.stop - part.start) * width, dtype=np.float32)
    first = part.start * width
    for start in range(0, out.size, _CHUNK):
        stop = min(start + _CHUNK, out.size)
        top_bytes = hashes(key, first + start, first + stop) >> np.uint64(56)
        out[start:stop] = _values(name, shape, top_bytes.astype(np.int32))
    return out.reshape(-1, *shape[1:])


def hashed_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return the weights of one parameter, float32, each exactly a bf16 number.

    The checkpoint name picks the range (see the table in `_values`); matrices have the deviation
    1 / sqrt(columns), to the nearest power of two.
    """
    return hashed_rows(name, shape, seed, slice(0, shape[0]))


def hashed_tensors(config: ModelConfig, seed: int) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Yield every text parameter of `config` with its weights, in checkpoint order."""
    for spec in checkpoint_tensors(config):
        if spec.is_text:
            yield spec, hashed_tensor(spec.name, spec.shape, seed)


def hashed_source(seed: int) -> TensorSource:
    """Return a source for `save_tensors`: a checkpoint of any size without a model."""

    def rows(spec: TensorSpec, part: slice) -> torch.Tensor:
        return torch.from_numpy(hashed_rows(spec.name, spec.shape, seed, part))

    return rows


def fill_hashed(model: Backbone, seed: int) -> None:
    """Overwrite every tensor of `model` with its hashed weights, in place."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            shape = tuple(tensor.shape)
            for part in row_slices(shape[0], prod(shape[1:])):
                tensor[part] = torch.from_numpy(hashed_rows(name, shape, seed, part))
