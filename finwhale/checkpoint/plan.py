"""What a folder's tensors mean for a model: the format of each, what is skipped, what is wrong.

The headers are compared with the inventory of the config before any data is read. The dtype in
the header decides how a weight is read (FP8 or FP4 with its scale, BF16, F32), so mixed folders
load; names decide nothing. DSpark and vision tensors are accepted, counted and skipped.
The easy mistake: reading packed FP4 as FP8, which has half the columns and no error of its own.
Source: spec/backbone.md section 10.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from finwhale.checkpoint.folder import DTYPES, CheckpointError, CheckpointFolder, StoredEntry
from finwhale.config.inventory import GROUP, Storage, TensorSpec, checkpoint_tensors, scale_name
from finwhale.config.model import ModelConfig
from finwhale.ops.weight_formats import storage_from_header

# Prefix of a stored name to the part that this text-only loader skips.
SKIPPED_PREFIXES = {
    "mtp.": "dspark",
    "vision.": "vision",
    "aligner.": "vision",
    "image_start": "vision",
    "image_newline": "vision",
    "image_end": "vision",
}
_PLAIN = {"BF16": Storage.BF16, "F32": Storage.F32}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """One model parameter and where its stored form lies; `scale` only for FP8 and FP4."""

    spec: TensorSpec
    storage: Storage
    weight: StoredEntry
    scale: StoredEntry | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedPart:
    """Tensors of a part that is not loaded."""

    part: str
    names: tuple[str, ...]
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.part}: {len(self.names)} tensors, {self.num_bytes} bytes not loaded"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """Every text parameter with its stored form, and the skipped parts."""

    tensors: tuple[PlannedTensor, ...]
    skipped: tuple[SkippedPart, ...]


def plan_load(config: ModelConfig, folder: CheckpointFolder) -> LoadPlan:
    """Return the load plan. Raises CheckpointError on a missing, extra or unfit tensor."""
    specs = [spec for spec in checkpoint_tensors(config) if spec.is_text]
    skipped = _skipped(folder)
    skipped_names = {name for part in skipped for name in part.names}
    missing = [spec for spec in specs if spec.name not in folder.entries]
    if missing:
        raise CheckpointError(
            folder.path,
            tensor=missing[0].name,
            expected=f"{_accepted(missing[0])}",
            found="no such tensor in any file",
            remedy=_missing_remedy(missing[0].name, folder),
            more=len(missing) - 1,
        )
    tensors = tuple(_plan_tensor(spec, folder) for spec in specs)
    used = {p.weight.name for p in tensors} | {p.scale.name for p in tensors if p.scale}
    extra = sorted(set(folder.entries) - used - skipped_names)
    if extra:
        entry = folder.entries[extra[0]]
        near = difflib.get_close_matches(entry.name, used, n=1)
        hint = f" (near: {near[0]})" if near else ""
        raise CheckpointError(
            entry.file,
            tensor=entry.name,
            expected=f"only tensors that config.json implies{hint}",
            found=f"an unknown tensor, {entry.dtype} {list(entry.shape)}",
            remedy="check that config.json belongs to this folder, or remove the tensor",
            more=len(extra) - 1,
        )
    return LoadPlan(tensors=tensors, skipped=skipped)


def _skipped(folder: CheckpointFolder) -> tuple[SkippedPart, ...]:
    names: dict[str, list[str]] = {}
    for name in folder.entries:
        for prefix, part in SKIPPED_PREFIXES.items():
            if name.startswith(prefix):
                names.setdefault(part, []).append(name)
                break
    return tuple(
        SkippedPart(
            part=part,
            names=tuple(sorted(of_part)),
            num_bytes=sum(folder.entries[name].num_bytes for name in of_part),
        )
        for part, of_part in sorted(names.items())
    )


def _missing_remedy(name: str, folder: CheckpointFolder) -> str:
    if f"model.{name}" in folder.entries:
        return f"the folder has 'model.{name}'; released names carry no 'model.' prefix"
    return "check that config.json belongs to this folder, or fetch the shard again"


def _accepted(spec: TensorSpec) -> str:
    """Return the stored forms that the loader takes for `spec`, in words."""
    plain = f"BF16 or F32 {list(spec.shape)}"
    if len(spec.shape) != 2:
        return plain
    rows, columns = spec.shape
    return f"{plain}, F8_E4M3 {list(spec.shape)} or I8 {[rows, columns // 2]} with its scale"


def _plan_tensor(spec: TensorSpec, folder: CheckpointFolder) -> PlannedTensor:
    weight = folder.entries[spec.name]
    is_packed = weight.dtype == "I8"
    shape = spec.shape
    if is_packed and len(shape) == 2:
        shape = (shape[0], shape[1] // 2)
    fits = weight.dtype in _PLAIN or (
        weight.dtype in ("I8", "F8_E4M3") and len(shape) == 2 and spec.name.endswith(".weight")
    )
    if not fits or weight.shape != shape:
        raise CheckpointError(
            weight.file,
            tensor=spec.name,
            expected=_accepted(spec),
            found=f"{weight.dtype} {list(weight.shape)}",
            remedy="check that config.json belongs to this folder, or convert the tensor",
        )
    if weight.dtype in _PLAIN:
        return PlannedTensor(spec=spec, storage=_PLAIN[weight.dtype], weight=weight, scale=None)
    scale = folder.entries.get(scale_name(spec.name))
    rows, columns = spec.shape
    per_row = [rows, -(-columns // GROUP)]
    per_block = [-(-rows // GROUP), -(-columns // GROUP)]
    wanted = f"F8_E8M0 {per_row}" if is_packed else f"F8_E8M0 {per_block} or {per_row}"
    if scale is None:
        raise CheckpointError(
            weight.file,
            tensor=scale_name(spec.name),
            expected=f"{wanted}, the scale of the {weight.dtype} weight beside it",
            found="no such tensor in any file",
            remedy="fetch the shard that holds the scale, or save the model again",
        )
    try:
        if scale.dtype != "F8_E8M0":
            raise ValueError
        storage = storage_from_header(DTYPES[weight.dtype], weight.shape, scale.shape)
    except ValueError:
        raise CheckpointError(
            scale.file,
            tensor=scale.name,
            expected=wanted,
            found=f"{scale.dtype} {list(scale.shape)}",
            remedy="the scale does not belong to this weight; fetch or save the folder again",
        ) from None
    return PlannedTensor(spec=spec, storage=storage, weight=weight, scale=scale)


def storage_counts(tensors: Iterable[PlannedTensor]) -> dict[str, int]:
    """Return how many parameters lie in each format, by the format's name."""
    counts: dict[str, int] = {}
    for planned in tensors:
        counts[planned.storage.name] = counts.get(planned.storage.name, 0) + 1
    return counts
