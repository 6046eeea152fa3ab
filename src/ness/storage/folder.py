"""A guard's folder: safetensors and a signed JSON manifest, at every moment one whole state. No pickle."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from ness._files import locked, make_folder, read_bytes, reason, remove_abandoned, write_bytes
from ness._version import __version__
from ness.distributed import gathered
from ness.errors import NessError
from ness.storage import manifest as manifests
from ness.storage.manifest import FORMAT, SCHEMA

__all__ = ["FORMAT", "MANIFEST", "SCHEMA", "fingerprint", "load_folder", "save_folder", "write_bytes"]

MANIFEST = "manifest.json"
READS = 1000  # how often a reader begins again because a writer came in between
# What this version and older ones leave where they are killed; another's tensors are not ours to remove.
_OLD_TENSORS = re.compile(r"tensors-[0-9a-f]{16}(-[0-9a-f]{8})?\.safetensors")
_OLD_TEMPORARY = re.compile(r"\.(manifest\.json|tensors-[0-9a-f]{16}\.safetensors)\.[a-z0-9_]{8}")


def serialised(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], what: str) -> bytes:
    """Tensors as the bytes of a safetensors file; `what` is what errors call it."""
    try:
        return to_bytes({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, dict(metadata))
    except (SafetensorError, UnicodeError, TypeError, ValueError) as error:
        raise NessError(f"{what}: cannot be written as safetensors ({reason(error)})") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors as safetensors; returns the SHA-256 of the file."""
    content = serialised(tensors, metadata or {}, str(path))
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
        content = read_bytes(path)
    except FileNotFoundError as error:
        raise NessError(f"{path}: missing; expected a safetensors file") from error
    return _tensors_of(content, path), metadata_of(content)


def _tensors_of(content: bytes, path: Path) -> dict[str, Tensor]:
    try:
        return from_bytes(content)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise NessError(
            f"{path}: missing, cut off or foreign: not a readable safetensors file ({reason(error)})"
        ) from error


def metadata_of(content: bytes) -> dict[str, str]:
    """The text beside the tensors of a safetensors file that could be read."""
    found = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
    return dict(found)


def save_folder(folder: Path, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
    """Write a guard's folder so that at every moment it holds the old state or the new one, whole.

    The tensors go to a file whose name nobody else has; the manifest that names it is replaced last. Writers take
    turns where the file system has locks, and where it has none no writer removes what another one needs.

    Args:
        folder: where to; made if it is missing.
        tensors: by name.
        manifest: plain JSON.

    Raises:
        NessError: nothing was written, and what was there is there still.
    """
    folder = Path(folder)
    content = serialised(tensors, {}, str(folder))
    digest = hashlib.sha256(content).hexdigest()
    name = manifests.tensors_name(digest, secrets.token_hex(4))
    head = {"format": FORMAT, "schema": SCHEMA, "ness": __version__, "torch": str(torch.__version__)}
    head |= {"tensors": {"file": name, "bytes": len(content), "sha256": digest}}
    signed = manifests.encode(dict(manifest) | head, folder / MANIFEST)
    try:
        if folder.exists() and not folder.is_dir():
            raise NessError(f"{folder}: is a file; expected a folder, or a name that is free")
        make_folder(folder)
        with locked(folder) as alone:
            before = _named(folder)
            _replace(folder, name, content, signed)
            _clean(folder, name, before, alone)
    except (OSError, ValueError) as error:
        raise NessError(f"{folder}: could not be written ({reason(error)}); nothing that was there is lost") from error


def _replace(folder: Path, name: str, content: bytes, signed: bytes) -> None:
    try:
        write_bytes(folder / name, content)
        write_bytes(folder / MANIFEST, signed)
    except BaseException:
        if _named(folder) != name:  # else it was interrupted after all was done
            _remove(folder / name)
        raise


def _named(folder: Path) -> str | None:
    """The tensors file that the folder's manifest names, if it is readable."""
    try:
        name = manifests.decode(read_bytes(folder / MANIFEST, manifests.LARGEST), folder / MANIFEST)["tensors"]["file"]
    except (OSError, NessError):
        return None
    return str(name)


def _clean(folder: Path, name: str, before: str | None, alone: bool) -> None:
    """Remove the state before, and where no other writer can be at work what killed ones left."""
    remove_abandoned(folder)
    try:
        found = os.listdir(folder) if alone else []  # noqa: PTH208
    except OSError:
        found = []  # the next save tries again
    ours = {old for old in found if _OLD_TENSORS.fullmatch(old) or _OLD_TEMPORARY.fullmatch(old)}
    for old in (ours | ({before} if before else set())) - {name}:
        _remove(folder / old)


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        return  # not there, or in the way of nobody: the next save tries again


def load_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a guard's folder, refusing what is missing, foreign, from the future, cut off or altered.

    No lock is needed, so a folder that may only be read is as good. A writer may replace the state between the two
    files; then the new one is read.

    Returns:
        The tensors by name, and the manifest.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    text = _manifest_bytes(folder)
    for _ in range(READS):
        manifest = manifests.decode(text, path)
        try:
            return _described_tensors(folder, manifest["tensors"]), manifest
        except NessError:
            now = _manifest_bytes(folder)
            if now == text:
                raise
            text = now
    raise NessError(f"{folder}: written again and again while it was read; load it once its writers are done")


def _manifest_bytes(folder: Path) -> bytes:
    try:
        return read_bytes(folder / MANIFEST, manifests.LARGEST)
    except FileNotFoundError:
        raise NessError(f"{folder}: holds no {MANIFEST}; expected a folder written by NullSpace.save") from None


def _described_tensors(folder: Path, described: Mapping[str, Any]) -> dict[str, Tensor]:
    file, size = folder / described["file"], described["bytes"]
    try:
        content = read_bytes(file)
    except FileNotFoundError:
        content = b""
    if len(content) != size:
        raise NessError(
            f"{file}: missing or truncated: found {len(content)} bytes, expected {size}; save the guard again"
        )
    if hashlib.sha256(content).hexdigest() != described["sha256"]:
        raise NessError(f"{file}: altered since it was written (its checksum differs); save the guard again")
    return _tensors_of(content, file)


def fingerprint(tensor: Tensor) -> str:
    """A short hash of a tensor's dtype, shape and exact values: equal models have equal fingerprints."""
    data = gathered(tensor.detach()).cpu().contiguous()
    digest = hashlib.sha256(f"{data.dtype}{tuple(data.shape)}".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
