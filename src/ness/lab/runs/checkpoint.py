"""A checkpoint: one safetensors file with a JSON manifest, and a checksum over every byte of it.

The last two are kept: whatever is cut short or damaged, an older good one is still there.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ness._files import read_bytes, write_bytes
from ness._sealed import seal_tensors, unseal_tensors
from ness.errors import NessError

KEPT = 2
NAME = re.compile(r"checkpoint-([0-9]{6,9})\.safetensors")
_UNSEALED = {"manifest", "checksum", "strides"}  # metadata of checkpoints from before the header had a checksum


def write(folder: Path, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], number: int | None = None) -> Path:
    """Write the next checkpoint of the folder, then drop all but the last two.

    Args:
        folder: of the run.
        tensors: by name.
        manifest: plain JSON.
        number: of the checkpoint; one of this number is replaced. By default one more than the last.

    Raises:
        NessError: it could not be written; those before it are there still.
    """
    found = paths(folder)
    if number is None:
        number = number_of(found[-1]) + 1 if found else 1
    target = folder / f"checkpoint-{number:06d}.safetensors"
    held = {
        name: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    metadata = {
        "manifest": json.dumps(manifest),
        "strides": json.dumps({name: tensor.stride() for name, tensor in tensors.items() if _has_a_layout(tensor)}),
    }
    kept = f"the last good checkpoint is {found[-1].name}" if found else "there is no checkpoint yet"
    content = seal_tensors(held, metadata, str(target))
    write_bytes(target, content, f"{kept}: make room or rights and start again")
    for old in paths(folder)[:-KEPT]:
        with contextlib.suppress(OSError):  # the next one tries again
            old.unlink()
    return target


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and manifest of a checkpoint.

    Raises:
        NessError: it is missing, unreadable or damaged.
    """
    try:
        content = read_bytes(path)
    except FileNotFoundError as error:
        raise NessError(f"{path}: missing, expected a checkpoint") from error
    tensors, metadata, sealed = unseal_tensors(content, str(path))
    try:
        if not sealed and (metadata.keys() != _UNSEALED or int(metadata["checksum"]) != checksum(tensors)):
            raise NessError(f"{path}: damaged: it does not match its checksum")
        manifest = json.loads(metadata["manifest"])
        strides: dict[str, list[int]] = json.loads(metadata["strides"])
        for name, stride in strides.items():
            laid_out = torch.empty_strided(tensors[name].shape, stride, dtype=tensors[name].dtype)
            tensors[name] = laid_out.copy_(tensors[name])
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise NessError(f"{path}: damaged: {type(error).__name__} in its manifest") from error
    if not isinstance(manifest, dict):
        raise NessError(f"{path}: damaged: its manifest is no object")
    return tensors, manifest


def paths(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    try:
        found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NessError(f"{folder}: cannot be looked into ({error.strerror})") from error
    return sorted(found, key=number_of)


def number_of(path: Path) -> int:
    """Which checkpoint of its run it is, counted from 1.

    >>> number_of(Path("run/checkpoint-000012.safetensors"))
    12
    """
    found = NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 over names, kinds, shapes and bytes, in the order of the names, as earlier versions wrote it."""
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
