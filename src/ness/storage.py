"""Files: safetensors and a JSON manifest, written under a temporary name and renamed. No pickle."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from ness._version import __version__
from ness.errors import NessError

FORMAT = "ness-guard"
SCHEMA = 2  # 1: without private parts
MANIFEST = "manifest.json"


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: temporary name, flush to disk, rename."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise NessError(f"{path}: could not be written ({error.strerror}); nothing that was there is lost") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors as safetensors; returns the SHA-256 of the file."""
    content = to_bytes({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, dict(metadata or {}))
    write_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def write_state_dict(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a state dict as safetensors in its own order, tied tensors once for each of their names.

    safetensors sorts what it writes; here the tensors are laid out anew, so that a reader meets the model's order.
    """
    content = to_bytes({key: value.detach().to("cpu", copy=True).contiguous() for key, value in state.items()})
    start = 8 + int.from_bytes(content[:8], "little")
    header, body, parts, end = json.loads(content[8:start]), content[start:], [], 0
    for key in state:
        first, last = header[key]["data_offsets"]
        parts.append(body[first:last])
        header[key]["data_offsets"] = [end, end + last - first]
        end += last - first
    text = json.dumps({key: header[key] for key in state}).encode()
    text += b" " * (-len(text) % 8)
    write_bytes(path, b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise NessError(f"{path}: missing, cut off or foreign: not a readable safetensors file ({error})") from error


def save_folder(folder: Path, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
    """Write a guard's folder so that at every moment it holds the old state or the new one, whole.

    The tensors go to a file named by their content; the manifest that names it is replaced last.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NessError(f"{folder}: is a file; expected a folder, or a name that is free")
    content = to_bytes({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    name = f"tensors-{digest[:16]}.safetensors"
    head = {"format": FORMAT, "schema": SCHEMA, "ness": __version__, "torch": str(torch.__version__)}
    head |= {"tensors": {"file": name, "bytes": len(content), "sha256": digest}}
    write_bytes(folder / name, content)
    write_bytes(folder / MANIFEST, json.dumps(head | dict(manifest), indent=1, sort_keys=True).encode())
    for old in folder.glob("tensors-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)


def load_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a guard's folder, refusing what is missing, foreign, from the future, cut off or altered."""
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NessError(f"{folder}: holds no {MANIFEST}; expected a folder written by NullSpace.save") from None
    except (OSError, ValueError) as error:
        raise NessError(f"{path}: cut off or damaged ({error}); save the guard again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise NessError(f"{path}: foreign: not written by NullSpace.save")
    if not isinstance(manifest.get("schema"), int) or manifest["schema"] > SCHEMA:
        raise NessError(
            f"{path}: from a future schema {manifest.get('schema')!r}; this version reads up to {SCHEMA}. "
            f"Upgrade ness-cl (the folder was written by {manifest.get('ness')!r})"
        )
    described = manifest.get("tensors")
    if not isinstance(described, dict) or not {"file", "bytes", "sha256"} <= described.keys():
        raise NessError(f"{path}: damaged: it does not name its tensors; save the guard again")
    file = folder / Path(str(described["file"])).name
    size = file.stat().st_size if file.exists() else 0
    if size != described["bytes"]:
        raise NessError(f"{file}: truncated: found {size} bytes, expected {described['bytes']}; save the guard again")
    if hashlib.sha256(file.read_bytes()).hexdigest() != described["sha256"]:
        raise NessError(f"{file}: altered since it was written (its checksum differs); save the guard again")
    tensors, _ = read_tensors(file)
    return tensors, manifest


def fingerprint(tensor: Tensor) -> str:
    """A short hash of a tensor's dtype, shape and exact values: equal models have equal fingerprints."""
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{data.dtype}{tuple(data.shape)}".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
