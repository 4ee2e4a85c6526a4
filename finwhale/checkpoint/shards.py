"""Writing safetensors shards of known content, a slice of rows at a time, and their index.

Every size follows from the inventory, so headers and offsets are fixed before the first tensor
exists and a shard larger than memory can be written. A layer stays in one shard if it fits.
The easy mistake: data at offsets that its dtype does not divide, which some readers cannot map;
wide dtypes come first in a file. Source: spec/backbone.md section 10.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from finwhale.checkpoint.folder import DTYPES, INDEX_FILE
from finwhale.config.files import naming
from finwhale.config.inventory import StoredTensor, TensorSpec

DEFAULT_SHARD_BYTES = 8 << 30
_ALIGNMENT_BYTES = 8


def plan_shards(
    specs: Sequence[TensorSpec], max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> tuple[tuple[TensorSpec, ...], ...]:
    """Return the parameters of each shard, in inventory order.

    A layer (its Engram part apart) moves to a new shard as a whole if it fits into one; a weight
    and its scale are never parted, so a shard may exceed `max_shard_bytes` by one large tensor.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: got {max_shard_bytes}, expected a positive number")
    sizes: dict[str, int] = {}
    for spec in specs:
        sizes[_unit(spec)] = sizes.get(_unit(spec), 0) + _num_bytes(spec)
    shards: list[list[TensorSpec]] = [[]]
    filled, unit = 0, ""
    for spec in specs:
        is_new_unit = _unit(spec) != unit
        unit = _unit(spec)
        ahead = _num_bytes(spec)
        if is_new_unit and sizes[unit] <= max_shard_bytes:
            ahead = sizes[unit]
        if shards[-1] and filled + ahead > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += _num_bytes(spec)
    return tuple(tuple(shard) for shard in shards)


def _unit(spec: TensorSpec) -> str:
    parts = spec.name.split(".")
    if parts[0] != "layers":
        return spec.name
    return ".".join(parts[:3] if parts[2] == "engram" else parts[:2])


def _num_bytes(spec: TensorSpec) -> int:
    return sum(stored.num_bytes for stored in spec.stored())


def shard_name(number: int, count: int) -> str:
    """Return the released file name of shard `number`, counted from 1."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def index_text(shards: Sequence[Sequence[StoredTensor]]) -> str:
    """Return the text of the index: total_size in payload bytes, and the file of each tensor."""
    weight_map = {
        stored.name: shard_name(number, len(shards))
        for number, shard in enumerate(shards, 1)
        for stored in shard
    }
    total = sum(stored.num_bytes for shard in shards for stored in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def write_index(folder: Path, shards: Sequence[Sequence[StoredTensor]]) -> None:
    """Write the index of `shards` into `folder`."""
    with naming(folder / INDEX_FILE):
        (folder / INDEX_FILE).write_text(index_text(shards), encoding="utf-8")


def shard_header(tensors: Sequence[StoredTensor]) -> tuple[bytes, dict[str, int]]:
    """Return the length-prefixed header, padded to 8 bytes, and each tensor's file offset."""
    ordered = sorted(tensors, key=lambda stored: -DTYPES[stored.dtype].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    position = 0
    for stored in ordered:
        end = position + stored.num_bytes
        header[stored.name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [position, end],
        }
        offsets[stored.name] = position
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    prefix = len(text).to_bytes(8, "little")
    begin = len(prefix) + len(text)
    return prefix + text, {name: begin + offset for name, offset in offsets.items()}


class ShardWriter:
    """One safetensors file being filled; rows of each tensor arrive in order.

    Leaving the block without an exception checks that every tensor is complete.
    """

    def __init__(self, file: Path, tensors: Sequence[StoredTensor]):
        self.file = file
        header, self._offsets = shard_header(tensors)
        self._tensors = {stored.name: stored for stored in tensors}
        self._written = dict.fromkeys(self._tensors, 0)
        self._stream = file.open("wb")
        with naming(file):
            self._stream.write(header)

    def append(self, name: str, rows: Tensor) -> None:
        """Write the next rows of tensor `name`, already in its stored dtype."""
        stored = self._tensors[name]
        if rows.dtype is not DTYPES[stored.dtype] or rows.shape[1:] != stored.shape[1:]:
            raise ValueError(
                f"{self.file}: tensor {name!r}: got {rows.dtype} {list(rows.shape)}, expected "
                f"rows of {stored.dtype} {list(stored.shape)}"
            )
        raw = rows.detach().cpu().contiguous().view(torch.uint8).numpy()
        if self._written[name] + raw.nbytes > stored.num_bytes:
            raise ValueError(f"{self.file}: tensor {name!r}: more than {stored.num_bytes} bytes")
        with naming(self.file):
            self._stream.seek(self._offsets[name] + self._written[name])
            self._stream.write(raw)
        self._written[name] += raw.nbytes

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with naming(self.file):
            self._stream.close()
        if kind is not None:
            return
        for name, written in self._written.items():
            if written != self._tensors[name].num_bytes:
                raise ValueError(
                    f"{self.file}: tensor {name!r}: {written} bytes written, expected "
                    f"{self._tensors[name].num_bytes}"
                )
