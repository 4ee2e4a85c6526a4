"""Stored answers: a safetensors file with a JSON manifest that says where the numbers come from.

Reading checks the digest, so a golden that was edited or truncated is refused. Importing this
file needs NumPy only: one oracle environment has no torch.
"""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_golden(
    name: str,
    tensors: dict[str, Tensor] | dict[str, np.ndarray],
    *,
    out: Path = GOLDEN,
    package: str,
    **facts: object,
) -> Path:
    """Write <out>/<name>.safetensors and its manifest; `facts` go into the manifest as they are.

    Takes torch tensors or, in an environment without torch, NumPy arrays. The manifest records
    package and torch versions, the command, the digest and every tensor's dtype and shape.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.safetensors"
    ordered = {key: tensors[key] for key in sorted(tensors)}
    if all(isinstance(value, np.ndarray) for value in ordered.values()):
        from safetensors.numpy import save_file
    else:
        from safetensors.torch import save_file
    save_file(ordered, path)
    path.chmod(0o644)
    manifest = {
        "file": path.name,
        "sha256": _digest(path),
        "bytes": path.stat().st_size,
        "package": package,
        "version": facts.pop("version", None) or version(package),
        "torch": _version_or_none("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        **facts,
    }
    # One line per tensor: the manifest is reviewed as a diff.
    rows = [
        f"  {json.dumps(k)}: {json.dumps([str(v.dtype).removeprefix('torch.'), list(v.shape)])}"
        for k, v in ordered.items()
    ]
    head = json.dumps(manifest, indent=1).removesuffix("\n}")
    text = f'{head},\n "tensors": {{\n' + ",\n".join(rows) + "\n }\n}\n"
    path.with_suffix(".json").write_text(text, encoding="utf-8")
    return path


def _version_or_none(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_manifest(name: str, folder: Path = GOLDEN) -> dict:
    """Return the manifest of a golden."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def read_golden(name: str, folder: Path = GOLDEN) -> dict[str, Tensor]:
    """Return the tensors of a golden. Raises ValueError if the file is not the manifest's."""
    from safetensors.torch import load_file

    path = folder / f"{name}.safetensors"
    found, expected = _digest(path), read_manifest(name, folder)["sha256"]
    if found != expected:
        raise ValueError(
            f"{path}: sha256 is {found}, its manifest says {expected}; run `make golden` again"
        )
    return load_file(path)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Inverse of the oracles' packing: [..., ceil(M / 8)] uint8 to a mask [..., M]."""
    import torch

    mask = np.unpackbits(packed.numpy(), axis=-1, count=count, bitorder="little")
    return torch.from_numpy(mask).bool()
