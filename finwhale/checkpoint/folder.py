"""A checkpoint folder on disk: the headers of its safetensors files, checked, and row-wise reads.

Reads `model.safetensors.index.json` with its shards, or one `model.safetensors`. All headers are
read and checked before any tensor data: a folder that opens is complete, and each offset lies
inside its file. The index decides which shard a tensor is read from: a copy that another shard
holds, as an overlay leaves it, is passed over. Whether the tensors are those of a given model is
decided in `plan.py`. The easy mistake: trusting the index; its shards must hold what it promises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from finwhale.config.files import FileError, kind_of_file, parse_object, read_object, shown
from finwhale.telemetry import get_logger

logger = get_logger("checkpoint")
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# What the safetensors library reads at most.
MAX_HEADER_BYTES = 100_000_000
# The release's index has 9 MB.
MAX_INDEX_BYTES = 1 << 27
_MAX_DIMS = 16
_MAX_BYTES = 1 << 62

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F16": torch.float16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written, with the place and the way out.

    file      path of the file or folder concerned
    tensor    tensor name as stored, or None if the file as a whole is concerned
    more      number of further problems of the same kind
    """

    def __init__(
        self,
        file: str | Path,
        *,
        expected: str,
        found: str,
        remedy: str,
        tensor: str | None = None,
        more: int = 0,
    ):
        self.file, self.tensor = Path(file), tensor
        self.expected, self.found, self.remedy = expected, found, remedy
        where = f"{file}: tensor {shown(tensor)}" if tensor else f"{file}"
        others = f" ({more} more like this)" if more else ""
        super().__init__(f"{where}: expected {expected}, found {found}{others}; {remedy}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEntry:
    """One tensor of a safetensors header; `begin` is an offset into the file, in bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int

    def rows(self, part: slice | None = None) -> Tensor:
        """Return the tensor, or its rows `part` (start and stop set), read from the file."""
        shape, begin, num_bytes = self.shape, self.begin, self.num_bytes
        if part is not None:
            row_bytes = self.num_bytes // self.shape[0]
            shape = (part.stop - part.start, *self.shape[1:])
            begin, num_bytes = begin + part.start * row_bytes, shape[0] * row_bytes
        if num_bytes == 0:
            return torch.empty(shape, dtype=DTYPES[self.dtype])
        buffer = bytearray(num_bytes)
        with self.file.open("rb") as stream:
            stream.seek(begin)
            got = stream.readinto(buffer)
        if got != num_bytes:
            raise CheckpointError(
                self.file,
                tensor=self.name,
                expected=f"{num_bytes} bytes at offset {begin}",
                found=f"{got}",
                remedy="the file changed while it was read; load it again",
            )
        return torch.frombuffer(buffer, dtype=torch.uint8).view(DTYPES[self.dtype]).view(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFolder:
    """The checked headers of a folder: every stored tensor by name."""

    path: Path
    entries: dict[str, StoredEntry]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({entry.file for entry in self.entries.values()}))

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())


def read_folder(path: str | Path) -> CheckpointFolder:
    """Return the headers of all tensors in `path`. Raises CheckpointError; reads no data."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            path,
            expected="a folder with config.json and safetensors files",
            found=kind_of_file(path),
            remedy="give the checkpoint's folder",
        )
    index = path / INDEX_FILE
    if kind_of_file(index) == "no such file":
        return _read_single(path)
    weight_map = _read_index(index)
    shards: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        shards.setdefault(file, []).append(name)
    absent = sorted(file for file in shards if not (path / file).is_file())
    if absent:
        raise CheckpointError(
            path / absent[0],
            expected=f"the file, because {INDEX_FILE} puts {len(shards[absent[0]])} tensors in it",
            found=kind_of_file(path / absent[0]),
            remedy="fetch the missing shards again",
            more=len(absent) - 1,
        )
    entries: dict[str, StoredEntry] = {}
    num_superseded = 0
    for file in sorted(shards):
        header = {entry.name: entry for entry in read_header(path / file)}
        _compare_with_index(path / file, header, weight_map)
        entries |= {name: header[name] for name in shards[file]}
        num_superseded += len(header) - len(shards[file])
    if num_superseded:
        logger.info(
            "%s: %d tensors passed over, copies of what %s puts in other shards",
            path,
            num_superseded,
            INDEX_FILE,
        )
    return CheckpointFolder(path=path, entries=entries)


def _read_single(path: Path) -> CheckpointFolder:
    single = path / SINGLE_FILE
    if not single.is_file():
        others = sorted(f.name for f in path.iterdir() if f.suffix in (".safetensors", ".bin"))
        kind = kind_of_file(single)
        named = f"{kind} named {SINGLE_FILE}" if kind != "no such file" else ", ".join(others[:3])
        raise CheckpointError(
            path,
            expected=f"{INDEX_FILE} or {SINGLE_FILE}",
            found=named or "neither",
            remedy="fetch the index beside the shards, or save the model again",
        )
    return CheckpointFolder(path=path, entries={e.name: e for e in read_header(single)})


def _read_index(index: Path) -> dict[str, str]:
    remedy = "fetch the index again"
    want = "an object 'weight_map' of names to files"
    try:
        raw = read_object(index, max_bytes=MAX_INDEX_BYTES, expected=want)
    except FileError as error:
        raise CheckpointError(index, expected=want, found=error.found, remedy=remedy) from None
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        found = type(weight_map).__name__ if weight_map is None else shown(weight_map)
        raise CheckpointError(index, expected=want, found=found, remedy=remedy)
    for name, file in weight_map.items():
        # A name with a path in it could read outside the folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                index,
                tensor=name,
                expected="a plain file name",
                found=shown(file),
                remedy=remedy,
            )
    return weight_map


def _compare_with_index(
    file: Path, header: dict[str, StoredEntry], weight_map: dict[str, str]
) -> None:
    promised = {name for name, shard in weight_map.items() if shard == file.name}
    absent = sorted(promised - set(header))
    if absent:
        raise CheckpointError(
            file,
            tensor=absent[0],
            expected=f"the tensor, because {INDEX_FILE} puts it in this file",
            found=f"no such name among its {len(header)} tensors",
            remedy="the index and the shard are of different versions; fetch both again",
            more=len(absent) - 1,
        )
    unlisted = sorted(set(header) - set(weight_map))
    if unlisted:
        raise CheckpointError(
            file,
            tensor=unlisted[0],
            expected=f"only tensors that {INDEX_FILE} lists",
            found="a tensor that it lacks",
            remedy="the index and the shard are of different versions; fetch both again",
            more=len(unlisted) - 1,
        )


def read_header(file: Path) -> tuple[StoredEntry, ...]:
    """Return the entries of one safetensors file, in file order.

    Refuses a header that is not JSON, names an unknown dtype, leaves holes, or claims another
    number of bytes than the file has.
    """
    refetch = "fetch or save the file again"
    kind = kind_of_file(file)
    if kind != "a file":
        raise CheckpointError(
            file, expected="a safetensors file", found=kind, remedy="fetch the file again"
        )
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                file,
                expected="8 bytes of header length, then the header",
                found=f"a length of {length} bytes in a file of {size} bytes",
                remedy=refetch,
            )
        text = stream.read(length)
    try:
        raw = parse_object(text, file, expected="a JSON header")
    except FileError as error:
        raise CheckpointError(
            file, expected=error.expected, found=error.found, remedy=refetch
        ) from None
    entries = [
        _entry(file, name, item, 8 + length) for name, item in raw.items() if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.begin, entry.num_bytes))
    _check_offsets(file, entries, 8 + length, size)
    return tuple(entries)


def _entry(file: Path, name: str, item: object, data_begin: int) -> StoredEntry:
    try:
        dtype, shape, (begin, end) = item["dtype"], item["shape"], item["data_offsets"]  # type: ignore[index]
        sound = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= _MAX_DIMS
        sound = sound and all(type(n) is int and 0 <= n <= _MAX_BYTES for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(
            file,
            tensor=name,
            expected="an entry with dtype, shape and data_offsets",
            found=shown(item),
            remedy="fetch or save the file again",
        )
    if dtype not in DTYPES:
        raise CheckpointError(
            file,
            tensor=name,
            expected=f"one of the dtypes {', '.join(DTYPES)}",
            found=dtype[:80],
            remedy="the file is of another format; this loader reads the released one",
        )
    num_bytes = prod(shape) * DTYPES[dtype].itemsize
    if end - begin != num_bytes:
        raise CheckpointError(
            file,
            tensor=name,
            expected=f"{num_bytes} bytes for {dtype} {list(shape)}",
            found=f"data_offsets {[begin, end]}",
            remedy="fetch or save the file again",
        )
    return StoredEntry(
        name=name,
        file=file,
        dtype=dtype,
        shape=tuple(shape),
        begin=data_begin + begin,
        num_bytes=num_bytes,
    )


def _check_offsets(file: Path, entries: Iterable[StoredEntry], begin: int, size: int) -> None:
    for entry in entries:
        if entry.begin != begin:
            raise CheckpointError(
                file,
                tensor=entry.name,
                expected=f"data at byte {begin}, directly after its neighbour",
                found=f"data at byte {entry.begin}",
                remedy="the header is damaged; fetch or save the file again",
            )
        begin += entry.num_bytes
        if begin > size:
            raise CheckpointError(
                file,
                tensor=entry.name,
                expected=f"at least {begin} bytes in the file",
                found=f"{size} (truncated)",
                remedy="fetch or save the file again",
            )
    if begin != size:
        raise CheckpointError(
            file,
            expected=f"{begin} bytes, as the header says",
            found=f"{size}",
            remedy="bytes were appended; fetch or save the file again",
        )
