"""Small checkpoint folders for tests, and surgery on safetensors files with plain bytes.

The reader and writer here are the format's definition (8 bytes of length, JSON, data), written
apart from the package, so that damage can be done and results can be judged without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from finwhale.checkpoint import CheckpointError, save_tensors
from finwhale.checkpoint.hashed_weights import hashed_source
from finwhale.checkpoint.toy_tokenizer import toy_tokenizer_json
from finwhale.config import ModelConfig, preset
from tests.exact_formats import E2M1, E4M3

ONE_SHARD = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"


def smallest_config() -> ModelConfig:
    """`unit` cut to three layers and two experts: every kind of tensor, few of each."""
    unit = preset("unit")
    text = replace(
        unit.text_config,
        num_hidden_layers=3,
        compress_ratios=(0, 2, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        engram_layer_ids=(1,),
        engram_num_embeddings=unit.text_config.engram_num_embeddings[:1],
    )
    return replace(unit, text_config=text)


def write_smallest(out: Path, **options) -> Path:
    """Write `smallest_config` with hashed weights and its tokenizer."""
    tokenizer = toy_tokenizer_json(512).encode()
    save_tensors(
        smallest_config(),
        hashed_source(0),
        out,
        extra_files={"tokenizer.json": tokenizer},
        **options,
    )
    return out


def read_raw(file: Path) -> tuple[dict, bytes]:
    """Return header and data bytes."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_raw(file: Path, header: object, data: bytes) -> None:
    """Write a file from a header object, or its bytes, and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_tensors(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return dtype, shape and bytes of every tensor of a file."""
    header, data = read_raw(file)
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def write_tensors(file: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Write a file of tensors given as dtype, shape and bytes."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    write_raw(file, header, data)


def edit_tensors(folder: Path, edit: Callable[[dict], None]) -> None:
    """Rewrite a one-shard folder with `edit` applied to its tensors; the index follows."""
    tensors = read_tensors(folder / ONE_SHARD)
    edit(tensors)
    write_tensors(folder / ONE_SHARD, tensors)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(tensors, ONE_SHARD)
    (folder / INDEX).write_text(json.dumps(index))


def edit_config(folder: Path, **text) -> None:
    """Change fields of text_config in a folder's config.json."""
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"].update(text)
    (folder / "config.json").write_text(json.dumps(raw))


def refusal(call: Callable, *arguments, **options) -> CheckpointError:
    """Return the CheckpointError that `call` raises; its message has all five parts."""
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **options)
    error = caught.value
    assert isinstance(error, ValueError)
    parts = [str(error.file), error.tensor or "", error.expected, error.found, error.remedy]
    assert all(part in str(error) for part in parts)
    assert all((error.expected, error.found, error.remedy))
    return error


def decoded(tensors: dict[str, tuple[str, list[int], bytes]], name: str) -> torch.Tensor:
    """Return the fp32 values of a stored parameter, by table look-up in the exact formats."""
    dtype, shape, raw = tensors[name]
    if dtype in ("BF16", "F32"):
        kind = torch.bfloat16 if dtype == "BF16" else torch.float32
        return torch.frombuffer(bytearray(raw), dtype=kind).view(shape).float()
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(shape).long()
    if dtype == "I8":
        codes = torch.stack((codes & 15, codes >> 4), -1).view(shape[0], -1)
        table = [float(v) for v in E2M1]
    else:
        table = [*(float(v) for v in E4M3), float("nan")]
    values = torch.tensor([*table, *(-v for v in table)])[codes]
    _, scale_shape, scale_raw = tensors[name.removesuffix(".weight") + ".scale"]
    scales = torch.frombuffer(bytearray(scale_raw), dtype=torch.uint8).view(scale_shape)
    rows, columns = values.shape
    of_row = torch.arange(rows) // (1 if scale_shape[0] == rows else 32)
    of_column = torch.arange(columns) // 32
    powers = torch.tensor([2.0 ** (byte - 127) for byte in range(255)])
    return values * powers[scales.long()][of_row][:, of_column]
