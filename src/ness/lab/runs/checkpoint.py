"""A checkpoint: one safetensors file with a JSON manifest and a checksum, written under a temporary name and renamed.

The last two are kept: whatever is cut short or damaged, an older good one is still there.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ness.errors import NessError

KEPT = 2
PATTERN = "checkpoint-*.safetensors"


def write(folder: Path, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> Path:
    """Writes the next checkpoint of the folder, then drops all but the last two."""
    found = paths(folder)
    number = int(found[-1].stem.rpartition("-")[2]) + 1 if found else 1
    target = folder / f"checkpoint-{number:06d}.safetensors"
    held = {
        name: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    metadata = {
        "manifest": json.dumps(manifest),
        "checksum": str(checksum(held)),
        "strides": json.dumps({name: tensor.stride() for name, tensor in tensors.items() if _has_a_layout(tensor)}),
    }
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    try:
        save_file(held, temporary, metadata)
        replace_durably(temporary, target)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        kept = f"the last good checkpoint is {found[-1].name}" if found else "there is no checkpoint yet"
        raise NessError(
            f"cannot write {target} ({_reason(error)}); {kept}: make room or rights and start again"
        ) from error
    for old in paths(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return target


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and manifest of a checkpoint; a damaged one is an error."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        manifest = json.loads(metadata["manifest"])
        sound = int(metadata["checksum"]) == checksum(tensors)
        strides: dict[str, list[int]] = json.loads(metadata["strides"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise NessError(f"{path} cannot be read ({_reason(error)}): it is damaged") from error
    if not sound:
        raise NessError(f"{path} does not match its checksum: it is damaged")
    for name, stride in strides.items():
        laid_out = torch.empty_strided(tensors[name].shape, stride, dtype=tensors[name].dtype)
        tensors[name] = laid_out.copy_(tensors[name])
    return tensors, manifest


def paths(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(folder.glob(PATTERN))


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 over names, kinds, shapes and bytes, in the order of the names."""
    value = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        value = zlib.crc32(raw_bytes(tensor), value)
    return value


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _has_a_layout(tensor: Tensor) -> bool:
    """Whether the order of its numbers in memory is part of a tensor: a product can round otherwise in another one."""
    return not tensor.is_contiguous() and 0 not in tensor.stride()


def replace_durably(temporary: Path, target: Path) -> None:
    """Gives a finished file its name, after its bytes have reached the disk."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(target)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON under a temporary name and renames it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        replace_durably(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise NessError(f"cannot write {path} ({_reason(error)}); make room or rights and start again") from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
