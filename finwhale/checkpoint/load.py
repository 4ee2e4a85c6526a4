"""From a checkpoint folder to a Backbone: headers first, then memory, then one tensor at a time.

The order is the contract: the config, all headers, the token map and the memory are checked
before the model exists, so a refused folder costs seconds and leaves nothing half loaded.
The easy mistake: reading a whole table at once; the largest has 98 GB, so it goes by row slices.
Source: spec/backbone.md section 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from finwhale.checkpoint.budget import (
    MemoryBudget,
    check_memory,
    load_budget,
    rows_and_columns,
)
from finwhale.checkpoint.folder import CheckpointError, read_folder
from finwhale.checkpoint.plan import PlannedTensor, SkippedPart, plan_load, storage_counts
from finwhale.checkpoint.token_map import token_map_for
from finwhale.config.inventory import GROUP, Storage
from finwhale.config.model import ModelConfig
from finwhale.model import Backbone, Numerics
from finwhale.ops import Ops
from finwhale.ops.weight_formats import all_finite, dequantize_weight, row_slices


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What was read: files, header entries, bytes, parameters by format, and the memory plan."""

    num_files: int
    num_tensors: int
    payload_bytes: int
    storages: Mapping[str, int]
    budget: MemoryBudget
    limit_bytes: int | None
    token_map_from: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A filled Backbone, its config, and the parts of the folder that were not loaded."""

    model: Backbone
    config: ModelConfig
    skipped: tuple[SkippedPart, ...]
    report: LoadReport


def load_model(
    path: str | Path,
    *,
    numerics: Numerics | None = None,
    token_map: Tensor | np.ndarray | None = None,
    ops: Ops | None = None,
    max_bytes: int | None = None,
    reserve_bytes: int = 0,
) -> LoadedModel:
    """Return the text model of a checkpoint folder, weights dequantised.

    token_map      [V] int64 compressed Engram id per token id; default: made from the folder's
                   tokenizer.json, or the identity if the config says that nothing is compressed
    max_bytes      memory limit; default: what the system reports as available
    reserve_bytes  memory that must stay free after the load, such as 890 bytes per token of
                   context for the released model's global KV

    Raises ConfigError for config.json and CheckpointError for everything else; both are
    ValueErrors. Peak memory is the model plus one slice in work, `report.budget`.
    """
    path = Path(path)
    if not path.is_dir():
        read_folder(path)
    config = ModelConfig.from_json(path)
    folder = read_folder(path)
    plan = plan_load(config, folder)
    mapped, token_map_from = token_map_for(path, config, token_map)
    numerics = numerics or Numerics()
    budget = load_budget(
        (planned.spec for planned in plan.tensors), numerics.dtype, reserve_bytes=reserve_bytes
    )
    limit = check_memory(path, budget, max_bytes)
    model = Backbone(config, mapped, numerics=numerics, **({} if ops is None else {"ops": ops}))
    state = model.state_dict()
    planned_names = {planned.spec.name for planned in plan.tensors}
    if planned_names != state.keys():
        # A fault of this package, not of the folder: model and inventory must name the same.
        raise AssertionError(f"model and inventory differ: {sorted(planned_names ^ state.keys())}")
    for planned in plan.tensors:
        fill(state[planned.spec.name], planned)
    return LoadedModel(
        model=model,
        config=config,
        skipped=plan.skipped,
        report=LoadReport(
            num_files=len(folder.files),
            num_tensors=len(folder.entries),
            payload_bytes=folder.num_bytes,
            storages=storage_counts(plan.tensors),
            budget=budget,
            limit_bytes=limit,
            token_map_from=token_map_from,
        ),
    )


def fill(target: Tensor, planned: PlannedTensor) -> None:
    """Read, dequantise and write one parameter into `target`, slice by slice, and check it.

    target   the parameter, logical shape; fp32 or bf16

    Raises CheckpointError on a NaN or an infinity, which no released tensor holds.
    """
    rows, columns = rows_and_columns(planned.spec.shape)
    block_rows = GROUP if planned.storage is Storage.FP8_BLOCK else 1
    target = target.detach()
    for part in row_slices(rows, columns):
        values = planned.weight.rows(part)
        if planned.scale is not None:
            groups = slice(part.start // block_rows, -(-part.stop // block_rows))
            scales = planned.scale.rows(groups)
            values = dequantize_weight(values, scales, dtype=target.dtype)
        # A NaN scale byte or an overflow of code and scale shows here, too.
        values = values.to(target.dtype)
        if not all_finite(values):
            raise CheckpointError(
                planned.weight.file,
                tensor=planned.spec.name,
                expected="finite values",
                found=f"NaN or infinity in rows {part.start} to {part.stop - 1}",
                remedy="the tensor or its scale is damaged; fetch or save the file again",
            )
        target[part] = values
