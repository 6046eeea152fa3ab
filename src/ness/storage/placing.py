"""A saved guard on a model that is not quite the one it was saved with: a body inside another model, another dtype.

Names are found by the prefix that all layers have or lack. What a larger model has besides the guarded body is the
caller's: it was never observed, so no bound could cover it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.layers import Layer, layers_of
from ness.layers.names import listed, matches
from ness.layers.ties import memory
from ness.storage.folder import fingerprint
from ness.storage.moments import Saved

Rename = Callable[[str], str | None]  # of a module or a parameter; None: this model has no such part


def place(
    model: nn.Module, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """A saved guard under the names that its layers have in this model.

    Args:
        model: the model it was saved with, one that has that model as a part, or that model's own part.
        tensors: of the saved guard.
        manifest: of the saved guard.

    Returns:
        Both as they are where the names fit as they are, or nothing fits.

    Raises:
        NessError: several parts of the model fit, or one that lacks a few of the layers.
    """
    saved, here = manifest["layers"], _layers_of(model)
    if not saved or all(name in here for name in saved):
        return tensors, manifest
    ways = list(_renamings(saved, here))
    found = [*{one[0]: one for one in ways if not _misfits(saved, here, one[1])}.values()]
    if len(found) > 1:
        found = [one for one in found if _weights_fit(saved, here, one[1])] or found
    if not found:
        _say_what_is_missing(saved, here, ways)
        return tensors, manifest
    if len(found) > 1:
        parts = [repr(part) for part, _, _ in found]
        raise NessError(
            f"the saved guard fits {listed(parts)} alike: expected one part of the model that it is for. Load it for "
            f"that part: NullSpace.load(folder, model.get_submodule({parts[0]}))"
        )
    part, rename, inner = found[0]
    return _moved_tensors(tensors, saved, rename), _moved_manifest(model, manifest, part, rename, inner)


def _layers_of(model: nn.Module) -> dict[str, Layer]:
    found: dict[str, Layer] = {}
    for name, module in model.named_modules():
        for layer in layers_of(name, module):
            found.setdefault(layer.name, layer)  # the out-projection of an attention, and not the Linear that it is
    return found


def _renamings(saved: Mapping[str, Any], here: Mapping[str, Layer]) -> Iterator[tuple[str, Rename, bool]]:
    """(part, how names change, whether the part is the model's own) at which the first or the last layer is there."""
    for one in dict.fromkeys((next(iter(saved)), [*saved][-1])):
        ends = [name for name in here if not one or name.endswith(f".{one}")]
        for part in dict.fromkeys(name if not one else name.removesuffix(f".{one}") for name in ends):
            yield part, _adding(part), True
        pieces = one.split(".")
        for end in range(1, len(pieces) + 1):
            yield ".".join(pieces[:end]), _dropping(".".join(pieces[:end])), False


def _adding(part: str) -> Rename:
    return lambda name: f"{part}.{name}" if name else part


def _dropping(part: str) -> Rename:
    return lambda name: "" if name == part else name.removeprefix(f"{part}.") if name.startswith(f"{part}.") else None


def _misfits(saved: Mapping[str, Any], here: Mapping[str, Layer], rename: Rename) -> list[str]:
    """Saved layers that are not there under their new names, or of another shape."""
    misfits = []
    for name, entry in saved.items():
        layer = here.get(_known(rename(name)))
        shape = None if layer is None else (layer.kind, layer.groups, layer.outputs, layer.width)
        if shape != tuple(entry[key] for key in ("kind", "groups", "outputs", "width")):
            misfits.append(name)
    return misfits


def _say_what_is_missing(
    saved: Mapping[str, Any], here: Mapping[str, Layer], ways: Sequence[tuple[str, Rename, bool]]
) -> None:
    """Refuse a part of the model that has most of the layers: what of the rest was observed would be lost."""
    best = min(((_misfits(saved, here, rename), part) for part, rename, _ in ways), key=_many, default=([], ""))
    missing, part = best
    if missing and len(missing) <= len(saved) // 2:
        raise NessError(
            f"the saved guard is for another model: {part!r} has its layers, but not {listed(missing)}, or of another "
            "shape. Load it for a model that has them all, or observe a body without them and save that guard"
        )


def _many(found: tuple[list[str], str]) -> int:
    return len(found[0])


def _known(name: str | None) -> str:
    return "\0" if name is None else name  # no module is called so


def _weights_fit(saved: Mapping[str, Any], here: Mapping[str, Layer], rename: Rename) -> bool:
    return all(entry["weights"] == fingerprint(here[_known(rename(name))].stored()) for name, entry in saved.items())


def _moved_tensors(tensors: Mapping[str, Tensor], saved: Iterable[str], rename: Rename) -> Saved:
    names = set(saved)
    moved = Saved({})
    for key, value in tensors.items():
        room, _, rest = key.partition("/")
        if room in ("private", "norms"):
            number, _, rest = rest.partition("/")
            room = f"{room}/{number}"
        if room == "rest":
            moved[key] = value
            continue
        name, what = (rest, "") if room.startswith("norms/") else _layer_in(rest, names)
        now = rename(name)
        if now is not None:
            moved[f"{room}/{now}{what}"] = value
    return moved


def _layer_in(rest: str, names: set[str]) -> tuple[str, str]:
    """`LAYER/gram` or `LAYER/pending/gram` as the layer and what follows."""
    for parts in (1, 2):
        name = rest.rsplit("/", parts)[0]
        if name in names:
            return name, rest.removeprefix(name)
    raise NessError(f"the saved guard is damaged: {rest!r} is of no layer; save it again")


def _moved_manifest(
    model: nn.Module, manifest: Mapping[str, Any], part: str, rename: Rename, inner: bool
) -> dict[str, Any]:
    def keys(entries: Mapping[str, Any]) -> dict[str, Any]:
        moved = {rename(name): value for name, value in entries.items()}
        return {name: value for name, value in moved.items() if name is not None}

    moved = {**manifest, "layers": keys(manifest["layers"]), "idle": keys(manifest["idle"])}
    if "unmasked" in manifest:
        moved["unmasked"] = keys(manifest["unmasked"])
    private = manifest["tasks"].get("private", {})
    moved["tasks"] = {**manifest["tasks"], "private": {task: keys(own) for task, own in private.items()}}
    if manifest.get("rest") is not None:  # entries keep their places, for their tensors are numbered by them
        entries = [{**entry, "names": [*keys(dict.fromkeys(entry["names"]))]} for entry in manifest["rest"]["entries"]]
        moved["rest"] = {**manifest["rest"], "entries": entries}
    for key in ("include", "exclude"):
        moved[key] = _moved_patterns(manifest[key], part) if inner else _kept_patterns(model, manifest[key], part)
    if inner:
        moved["exclude"] += outside(model, part)
    return moved


def _moved_patterns(patterns: Sequence[str], part: str) -> list[str]:
    return [f"{part}.{pattern}" for pattern in patterns]


def _kept_patterns(model: nn.Module, patterns: Sequence[str], part: str) -> list[str]:
    """Patterns as they are inside the part; those that meant something else are dropped."""
    names = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    inside = [pattern.removeprefix(f"{part}.") for pattern in patterns if pattern not in (part, f"{part}.")]
    return [pattern for pattern in inside if any(matches(name, pattern) for name in names)]


def outside(model: nn.Module, part: str) -> list[str]:
    """Names of all modules and parameters beside a part of the model, those that share a parameter with it left out.

    >>> model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2), "act": nn.ReLU()})
    >>> outside(model, "body")
    ['head']
    """
    inside = {memory(parameter) for parameter in model.get_submodule(part).parameters()}

    def walk(name: str, module: nn.Module) -> Iterator[str]:
        own = [memory(parameter) for parameter in module.parameters()]
        if name == part or not own:
            return
        if name and not part.startswith(f"{name}.") and inside.isdisjoint(own):
            yield name
            return
        before = f"{name}." if name else ""
        for key, parameter in module._parameters.items():
            if parameter is not None and memory(parameter) not in inside:
                yield f"{before}{key}"
        for key, child in module._modules.items():
            if child is not None:
                yield from walk(f"{before}{key}", child)

    return list(walk("", model))


def check_weights(layer: Layer, entry: Mapping[str, Any], anchor: Tensor, held: bool) -> None:
    """Refuse weights that are not those the guard was saved with, or those rounded to another dtype.

    Drift goes on being counted from the weights that were observed, so that what rounding has moved is in it.

    Args:
        layer: the model's.
        entry: of the saved guard.
        anchor: [W b] when last observed, in the dtype it had.
        held: whether the saved layer has an update in training or a private part in its weights.
    """
    stored = layer.stored()
    if entry["weights"] == fingerprint(stored):
        return
    if anchor.dtype == stored.dtype:
        raise NessError(
            f"the model changed between save and load: the weights of layer {layer.name!r} are not those it was saved "
            "with. Load the model's state dict of that moment first"
        )
    if held or entry["weights"] != fingerprint(anchor):
        raise NessError(
            f"layer {layer.name!r} is {stored.dtype}, and the guard was saved with {anchor.dtype} weights that have "
            "moved since they were observed, so it cannot tell whether these are the same. Load it for the model in "
            f"{anchor.dtype}, merge() or discard() if a task is in training, and convert that model with "
            f".to({stored.dtype}): the guard goes along"
        )
    if not torch.equal(anchor.to(stored.device, stored.dtype), stored):
        raise NessError(
            f"the model changed between save and load: the weights of layer {layer.name!r} are not those it was saved "
            f"with, rounded to {stored.dtype}. Load the model's state dict of that moment first"
        )


def check_accounted(tensors: Iterable[str], manifest: Mapping[str, Any]) -> None:
    """Refuse tensors that the manifest does not speak of: an entry that is gone would be a layer unprotected."""
    layers, names = set(manifest["layers"]), [str(number) for number in range(len(manifest["tasks"]["names"]))]
    private = manifest["tasks"].get("private", {})
    of_tasks = dict(zip(names, (private.get(task, {}) for task in manifest["tasks"]["names"]), strict=True))
    entries = (manifest.get("rest") or {"entries": []})["entries"]
    stored = {str(number) for number, entry in enumerate(entries) if entry["stored"]}
    for key in tensors:
        room, _, rest = key.partition("/")
        number, _, inner = rest.partition("/")
        listed_there = (
            (room == "layers" and bool({rest.rsplit("/", 1)[0], rest.rsplit("/", 2)[0]} & layers))
            or (room == "private" and inner.rsplit("/", 1)[0] in of_tasks.get(number, {}))
            or (room == "norms" and number in ("live", *names))
            or (room == "rest" and rest in stored)
        )
        if not listed_there:
            raise NessError(
                f"the saved guard is damaged: it holds {key!r}, which its manifest does not list; save it again"
            )
