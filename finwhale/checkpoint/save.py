"""Writing a checkpoint folder in the released layout, quantised or BF16, atomically.

A model holds the text backbone only, so what is written says so: no draft stages and no vision
part in its config.json. The BF16 variant drops quantization_config and keeps FP8 Engram rows.
The easy mistake: expecting the saved values back; what comes back is the rounded weight, and
saving that again gives the same bytes. Source: spec/backbone.md section 10.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from finwhale.checkpoint.budget import check_disk, rows_and_columns
from finwhale.checkpoint.folder import CheckpointError
from finwhale.checkpoint.shards import (
    DEFAULT_SHARD_BYTES,
    ShardWriter,
    index_text,
    plan_shards,
    shard_header,
    shard_name,
    write_index,
)
from finwhale.checkpoint.staging import staged_folder
from finwhale.checkpoint.tokenizer_config import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    read_tokenizer,
    tokenizer_config_text,
)
from finwhale.config.files import kind_of_file, naming
from finwhale.config.inventory import Storage, TensorSpec, checkpoint_tensors
from finwhale.config.model import ModelConfig, QuantizationConfig
from finwhale.ops.weight_formats import QUANTIZED, all_finite, quantize_weight, row_slices

if TYPE_CHECKING:
    from finwhale.model import Backbone

# Returns rows `part` of a parameter, in logical (not quantised) form.
TensorSource = Callable[[TensorSpec, slice], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """What a save wrote: header entries, their payload bytes, and the file names."""

    num_tensors: int
    payload_bytes: int
    files: tuple[str, ...]


def saved_config(config: ModelConfig, *, quantized: bool | None = None) -> ModelConfig:
    """Return the config of the folder that a save of `config`'s text backbone writes."""
    if quantized is None:
        quantized = config.quantization_config is not None
    text = config.text_config
    return replace(
        config,
        dtype="bfloat16",
        quantization_config=(config.quantization_config or QuantizationConfig())
        if quantized
        else None,
        vision_config=None,
        text_config=replace(
            text,
            dtype="bfloat16",
            num_nextn_predict_layers=0,
            dspark_target_layer_ids=(),
            compress_ratios=text.compress_ratios[: text.num_hidden_layers],
        ),
    )


def state_source(state: Mapping[str, Tensor]) -> TensorSource:
    """Return a source over a dict of tensors under their checkpoint names."""

    def rows(spec: TensorSpec, part: slice) -> Tensor:
        return state[spec.name][part]

    return rows


def check_state(config: ModelConfig, state: Mapping[str, Tensor], where: str | Path) -> None:
    """Refuse tensors that are not exactly the text parameters of `config`. CheckpointError."""
    specs = {spec.name: spec for spec in checkpoint_tensors(config) if spec.is_text}
    remedy = "save the state dict of a Backbone of this config; nothing was written"
    for name in sorted(specs.keys() | state.keys()):
        spec, tensor = specs.get(name), state.get(name)
        expected = f"shape {list(spec.shape)}" if spec else "no such tensor in this config"
        if spec is None or tensor is None or tuple(tensor.shape) != spec.shape:
            found = "nothing" if tensor is None else f"shape {list(tensor.shape)}"
            raise CheckpointError(where, tensor=name, expected=expected, found=found, remedy=remedy)
        if tensor.is_meta:
            raise CheckpointError(
                where, tensor=name, expected="values", found="a meta tensor", remedy=remedy
            )


def save_checkpoint(
    model: Backbone,
    out: str | Path,
    *,
    quantized: bool | None = None,
    tokenizer_file: str | Path | None = None,
    extra_files: Mapping[str, bytes | Path] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> SaveReport:
    """Write `model` as a checkpoint folder `out` and return what was written.

    quantized        the released FP8/FP4 storages, or BF16; default: as the model's config says
    tokenizer_file   copied as tokenizer.json; a folder with Engram needs it to be loaded. Other
                     libraries find its markers in the tokenizer_config.json written beside it
    extra_files      further files by name: their bytes, or a path to copy
    overwrite        replace a checkpoint folder; everything else is refused

    Raises CheckpointError. After any failure `out` is what it was before.
    """
    state = model.state_dict()
    check_state(model.config, state, out)
    return save_tensors(
        model.config,
        state_source(state),
        out,
        quantized=quantized,
        tokenizer_file=tokenizer_file,
        extra_files=extra_files,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )


def save_tensors(
    config: ModelConfig,
    source: TensorSource,
    out: str | Path,
    *,
    quantized: bool | None = None,
    tokenizer_file: str | Path | None = None,
    extra_files: Mapping[str, bytes | Path] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> SaveReport:
    """Write the text parameters that `source` gives, row slice by row slice; no model needed.

    Arguments as in `save_checkpoint`.
    """
    files: dict[str, bytes | Path] = dict(extra_files or {})
    if tokenizer_file is not None:
        files[TOKENIZER_FILE] = Path(tokenizer_file)
    for name, content in files.items():
        if isinstance(content, Path) and not content.is_file():
            raise CheckpointError(
                content,
                expected=f"a file to copy as {name}",
                found=kind_of_file(content),
                remedy="check the path",
            )
    tokenizer = files.get(TOKENIZER_FILE)
    if tokenizer is not None and TOKENIZER_CONFIG_FILE not in files:
        where = tokenizer if isinstance(tokenizer, Path) else TOKENIZER_FILE
        held = read_tokenizer(tokenizer) if isinstance(tokenizer, Path) else tokenizer
        text = tokenizer_config_text(config, held, where)
        files[TOKENIZER_CONFIG_FILE] = text.encode("utf-8")
    with staged_folder(out, overwrite=overwrite, also_replaceable=frozenset(files)) as folder:
        report = write_folder(
            config, source, folder, out, quantized=quantized, max_shard_bytes=max_shard_bytes
        )
        for name, content in files.items():
            with naming(folder / name):
                if isinstance(content, Path):
                    shutil.copyfile(content, folder / name)
                else:
                    (folder / name).write_bytes(content)
    return replace(report, files=tuple(sorted((*report.files, *files))))


def write_folder(
    config: ModelConfig,
    source: TensorSource,
    folder: Path,
    out: str | Path,
    *,
    quantized: bool | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> SaveReport:
    """Write config.json, shards and index into the existing, empty `folder`.

    For use inside `staged_folder`; `out` is the place that errors name. Checks the disk first.
    """
    written = saved_config(config, quantized=quantized)
    shards = plan_shards(checkpoint_tensors(written), max_shard_bytes)
    stored = [[entry for spec in shard for entry in spec.stored()] for shard in shards]
    payload = sum(entry.num_bytes for shard in stored for entry in shard)
    headers = sum(len(shard_header(shard)[0]) for shard in stored)
    config_text = json.dumps(written.to_json(), indent=2) + "\n"
    check_disk(Path(out), payload + headers + len(index_text(stored)) + len(config_text))
    names = [shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    for name, shard, entries in zip(names, shards, stored, strict=True):
        with ShardWriter(folder / name, entries) as writer:
            for spec in shard:
                _write_parameter(writer, spec, source, Path(out) / name)
    write_index(folder, stored)
    with naming(folder / "config.json"):
        (folder / "config.json").write_text(config_text, encoding="utf-8")
    return SaveReport(
        num_tensors=sum(len(shard) for shard in stored),
        payload_bytes=payload,
        files=tuple(sorted(path.name for path in folder.iterdir())),
    )


def _write_parameter(
    writer: ShardWriter, spec: TensorSpec, source: TensorSource, target: Path
) -> None:
    for part in row_slices(*rows_and_columns(spec.shape)):
        rows = source(spec, part)
        if spec.storage not in QUANTIZED:
            rows = rows.to(torch.float32 if spec.storage is Storage.F32 else torch.bfloat16)
        if not all_finite(rows):
            raise CheckpointError(
                target,
                tensor=spec.name,
                expected="finite values",
                found=f"NaN or infinity in rows {part.start} to {part.stop - 1}",
                remedy="the model is broken; nothing was written",
            )
        if spec.storage not in QUANTIZED:
            writer.append(spec.name, rows)
            continue
        for entry, values in zip(spec.stored(), quantize_weight(rows, spec.storage), strict=True):
            writer.append(entry.name, values)
