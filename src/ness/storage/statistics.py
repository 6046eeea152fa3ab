"""What was observed, to be shared: one file of packed float32 a layer, and a signed manifest that is replaced last.

A Gram is symmetric, so its upper triangle says all. Each file's name is that of its content; a writer that is killed,
or finds the disk full, leaves the statistics that were there.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from torch import Tensor

from ness._files import locked, make_folder, read_bytes, reason, remove_abandoned, write_bytes
from ness._version import __version__
from ness.errors import NessError
from ness.storage import manifest as manifests
from ness.storage import strict_json
from ness.storage.folder import fingerprint, serialised

FORMAT, SCHEMA, MANIFEST = "ness-statistics", 1, "statistics.json"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.half)
}
_FILE = re.compile(r"gram-[0-9a-f]{32}\.safetensors")
_AGAIN = "export the statistics again"


@dataclass(frozen=True)
class LayerStatistics:
    """What one layer has seen."""

    shape: Mapping[str, Any]  # kind, groups, outputs, fan_in, bias
    count: int  # rows
    calls: int  # forward calls they came from
    energy: float  # Σ‖y‖² of the layer's outputs
    weights: Mapping[str, str]  # dtype -> fingerprint of [W b] as they were when it was observed
    gram: Tensor  # C (groups, width, width), float64


def fingerprints(matrix: Tensor) -> dict[str, str]:
    """Of weights in every dtype they may be loaded in: a copy in bfloat16 is the same model, rounded."""
    return {name: fingerprint(matrix.to(dtype)) for name, dtype in DTYPES.items()}


def packed(gram: Tensor) -> dict[str, Tensor]:
    """The upper triangle (groups, d (d + 1) / 2) in float32, divided by a power of two per group: nothing overflows.

    >>> packed(torch.tensor([[[4.0, 1.0], [1.0, 2.0]]], dtype=torch.float64))
    {'triangle': tensor([[0.5000, 0.1250, 0.2500]]), 'scale': tensor([8.], dtype=torch.float64)}
    """
    mask = torch.ones(gram.shape[-2:], dtype=torch.bool).triu()
    largest = gram.diagonal(dim1=-2, dim2=-1).amax(dim=-1).cpu()
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    rows = [(one.cpu() / divisor).to(torch.float32)[mask] for one, divisor in zip(gram, scale, strict=True)]
    return {"triangle": torch.stack(rows), "scale": scale}


def unpacked(tensors: Mapping[str, Tensor], width: int) -> Tensor:
    """The Grams (groups, d, d) in float64 that `packed` packed."""
    triangle, scale = tensors["triangle"], tensors["scale"]
    mask = torch.ones(width, width, dtype=torch.bool).triu()
    whole = torch.zeros(len(triangle), width, width, dtype=torch.float64)
    for one, row, factor in zip(whole, triangle, scale, strict=True):
        one[mask] = row.to(torch.float64) * factor
        one += one.triu(1).mT
    return whole


def write_statistics(folder: Path, layers: Iterable[tuple[str, LayerStatistics]], about: Mapping[str, Any]) -> None:
    """Write statistics layer by layer, and the manifest that names them last.

    Args:
        folder: made if it is missing; statistics that are there are replaced, all or none.
        layers: by name, one at a time, so that no second copy of all of them is in memory.
        about: plain JSON.

    Raises:
        NessError: what was there is there still.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise NessError(f"{folder}: is a file; expected a folder, or a name that is free")
        make_folder(folder)
        with locked(folder) as alone:
            remove_abandoned(folder)
            before = _named(folder)
            entries: dict[str, Any] = {}
            try:
                for name, layer in layers:
                    entries[name] = _write_layer(folder, layer)
                manifest = {**about, "format": FORMAT, "schema": SCHEMA, "ness": __version__, "layers": entries}
                write_bytes(folder / MANIFEST, manifests.encode(manifest, folder / MANIFEST))
            except BaseException:
                _remove(folder, {entry["file"] for entry in entries.values()} - _named(folder))
                raise
            now = {entry["file"] for entry in entries.values()}
            left = {name for name in os.listdir(folder) if _FILE.fullmatch(name)} if alone else before  # noqa: PTH208
            _remove(folder, left - now)
    except (OSError, ValueError) as error:
        raise NessError(f"{folder}: could not be written ({reason(error)}); nothing that was there is lost") from error


def _write_layer(folder: Path, layer: LayerStatistics) -> dict[str, Any]:
    content = serialised(packed(layer.gram), {}, str(folder))
    digest = hashlib.sha256(content).hexdigest()
    file = f"gram-{digest[:32]}.safetensors"
    write_bytes(folder / file, content)
    return {
        **layer.shape,
        "count": layer.count,
        "calls": layer.calls,
        "energy": layer.energy.hex(),
        "weights": dict(layer.weights),
        "file": file,
        "bytes": len(content),
        "sha256": digest,
    }


def _named(folder: Path) -> set[str]:
    """Files that the manifest in place needs."""
    try:
        return {entry["file"] for entry in read_manifest(folder)["layers"].values()}
    except NessError:
        return set()


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        try:
            (folder / name).unlink()
        except OSError:
            continue  # not there, or in the way of nobody: the next export tries again


def is_statistics(folder: Path) -> bool:
    """Whether a folder holds statistics."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of statistics, checked.

    Raises:
        NessError: missing, foreign, from the future, cut off or altered.
    """
    path = folder / MANIFEST
    try:
        content = read_bytes(path, manifests.LARGEST)
    except FileNotFoundError:
        raise NessError(f"{folder}: holds no {MANIFEST}; expected a folder written by export_statistics") from None
    manifest = strict_json.decode(content, str(path))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise NessError(f"{path}: foreign: not written by export_statistics")
    schema = manifest.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema > SCHEMA:
        raise NessError(
            f"{path}: from a future schema {schema!r:.40}; this version reads up to {SCHEMA}. Upgrade ness-cl"
        )
    manifests.check_signature(content, path, _AGAIN)
    return manifest


def read_layers(folder: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[str, LayerStatistics]]:
    """The layers of a checked manifest, one at a time.

    Raises:
        NessError: a layer's file is missing, cut off or altered.
    """
    for name, entry in manifest["layers"].items():
        yield name, read_layer(folder, name, entry)


def read_layer(folder: Path, name: str, entry: Mapping[str, Any]) -> LayerStatistics:
    """One layer, its file checked against the manifest."""
    path = folder / entry["file"]
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        content = b""
    if len(content) != entry["bytes"]:
        found, wanted = len(content), entry["bytes"]
        raise NessError(f"{path}: layer {name!r}: missing or cut off: {found} bytes, expected {wanted}; {_AGAIN}")
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise NessError(f"{path}: layer {name!r}: altered since it was written (its checksum differs); {_AGAIN}")
    try:
        shape = {key: entry[key] for key in ("kind", "groups", "outputs", "fan_in", "bias")}
        gram = unpacked(from_bytes(content), shape["fan_in"] + bool(shape["bias"]))
        energy = float.fromhex(entry["energy"])
        return LayerStatistics(shape, int(entry["count"]), int(entry["calls"]), energy, entry["weights"], gram)
    except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise NessError(f"{path}: layer {name!r}: damaged ({reason(error)}); {_AGAIN}") from error
