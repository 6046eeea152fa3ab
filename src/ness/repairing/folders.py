"""Statistics instead of batches: folders that `export_statistics` wrote, and Grams that somebody kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ness.errors import NessError, warn
from ness.layers import Layer
from ness.layers.names import listed
from ness.repairing.grams import Progress, Source, is_folder
from ness.repairing.lora import base_name
from ness.repairing.weights import Target, Weights
from ness.statistics.gram import Gram
from ness.storage.folder import fingerprint
from ness.storage.statistics import DTYPES, read_layer, read_manifest


class Statistics:
    """A folder of statistics in the place of old or new batches: there is nothing to run the model on."""

    def __init__(self, what: str, folder: str | Path) -> None:
        self.what, self.folder = what, Path(folder)
        self.batches: Any = str(self.folder.resolve())
        self.manifest = read_manifest(self.folder)
        self.sample: list[Any] = []
        self.once, self.count, self.samples, self.digest = False, 0, 0, 0
        self.progress = None

    def grams(self, targets: Sequence[Target], weights: Weights) -> dict[str, Gram]:
        """The targets' Grams; another architecture is refused, and other weights are a warning."""
        names = self._names(targets)
        found, changed = {}, []
        for target in targets:
            entry = self.manifest["layers"][names[target.name]]
            layer = read_layer(self.folder, names[target.name], entry)
            device = weights.pairs[target.weight].tuned.device
            found[target.name] = Gram(layer.gram.to(device), layer.count)
            if self.what == "old" and not _taken_under_base(layer.weights, target, weights):
                changed.append(target.name)
        if changed:
            warn(
                f"repair: the old statistics of {listed(changed)} were taken under other weights than the base's; what "
                "they say of old inputs is used as it is"
            )
        return found

    def _names(self, targets: Sequence[Target]) -> dict[str, str]:
        """Target -> saved layer, under the prefix at which most names agree."""
        saved = self.manifest["layers"]
        own = {base_name(f"{target.layer.name}.").removesuffix("."): target for target in targets}
        best: dict[str, str] = {}
        for add, drop in _prefixes(saved, own):
            names = {own[plain].name: add + plain.removeprefix(drop) for plain in own if plain.startswith(drop)}
            names = {name: other for name, other in names.items() if other in saved}
            if len(names) > len(best):
                best = names
        missing = [target.name for target in targets if target.name not in best]
        if missing:
            raise NessError(
                f"repair({self.what}=...): {self.folder} has no statistics of {listed(missing)} (it is of a "
                f"{self.manifest.get('model')}); export them from the model's own base, or exclude these layers"
            )
        for target in targets:
            entry, layer = saved[best[target.name]], target.layer
            expected = {"groups": layer.groups, "fan_in": layer.fan_in, "bias": layer.bias is not None}
            there = {key: entry.get(key) for key in expected}
            if there != expected:
                raise NessError(
                    f"repair({self.what}=...): layer {target.name!r} is {expected}, and in {self.folder} {there}: "
                    "these are of another architecture"
                )
        return best


class Kept:
    """Grams that the caller kept (`guard.grams`), by layer name."""

    def __init__(self, what: str, grams: Mapping[str, Gram]) -> None:
        self.what, self.batches = what, grams
        self.sample: list[Any] = []
        self.once, self.count, self.samples, self.digest = False, 0, 0, 0
        self.progress = None

    def grams(self, targets: Sequence[Target], weights: Weights) -> dict[str, Gram]:
        """The targets' Grams, on the weights' own devices."""
        found = {}
        for target in targets:
            layer = target.layer
            name = base_name(f"{layer.name}.").removesuffix(".")
            gram = self.batches.get(layer.name, self.batches.get(name))
            if gram is None:
                raise NessError(
                    f"repair({self.what}=...): there is no Gram of {target.name!r}; give one of each changed layer, or "
                    "exclude this one"
                )
            if gram.matrix.shape != (layer.groups, layer.width, layer.width):
                raise NessError(
                    f"repair({self.what}=...): the Gram of {target.name!r} is {tuple(gram.matrix.shape)}, expected "
                    f"{(layer.groups, layer.width, layer.width)}"
                )
            found[target.name] = Gram(gram.matrix.to(weights.pairs[target.weight].tuned.device), gram.count)
        return found


def _prefixes(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is put before an own name, or taken from it, so that it is a saved one."""
    pairs = {("", "")}
    for name in own:
        pairs |= {(other[: -len(name)], "") for other in saved if other.endswith(f".{name}")}
    for other in saved:
        pairs |= {("", name[: -len(other)]) for name in own if name.endswith(f".{other}")}
    return sorted(pairs)


def _taken_under_base(saved: Mapping[str, str], target: Target, weights: Weights) -> bool:
    """Whether the weights that a guard saw were the base's, in the dtype they are in now."""
    matrix = _stored_base(target.layer, target, weights)
    dtype = str(matrix.dtype).removeprefix("torch.")
    return dtype in DTYPES and saved.get(dtype) == fingerprint(matrix)


def _stored_base(layer: Layer, target: Target, weights: Weights) -> Tensor:
    pair = weights.pairs[target.weight]
    assert pair.base is not None
    bias = None
    if layer.bias is not None:
        found = next(p for p in weights.pairs.values() if p.tuned is layer.bias or p.names[0] == target.bias)
        assert found.base is not None
        bias = found.base.to(pair.tuned)
    return layer.joint(pair.base.to(pair.tuned), bias).to(torch.device("cpu"))


Given = Source | Statistics | Kept


def source_of(what: str, given: Any, progress: Progress | None) -> Given:
    """Batches, a folder of statistics, or Grams by layer name."""
    if isinstance(given, Mapping) and given and all(isinstance(value, Gram) for value in given.values()):
        return Kept(what, given)
    return Statistics(what, given) if is_folder(given) else Source(what, given, progress)
