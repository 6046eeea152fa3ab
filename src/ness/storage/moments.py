"""The moments of a guard's layers as tensors and JSON, and back; what layers share is written once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ness.errors import NessError
from ness.statistics.gram import Gram
from ness.statistics.moments import Moments
from ness.statistics.relative import Relative
from ness.updates.layer_state import LayerState

Tensors = dict[str, Tensor]
Triangles = dict[int, Tensor]  # of Grams, by their ids: what layers share is written once


class Saved(dict[str, Tensor]):
    """The tensors of a saved guard, and the Grams that were made of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.grams: dict[tuple[int, int], Gram] = {}


def without_repeats(tensors: Tensors) -> dict[str, str]:
    """Take out tensors that are there under another name already, as Grams are that layers share: name -> that name."""
    first: dict[int, str] = {}
    aliases = {key: first[id(value)] for key, value in tensors.items() if first.setdefault(id(value), key) != key}
    for key in aliases:
        del tensors[key]
    return aliases


def with_repeats(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> tuple[Saved, dict[str, Any]]:
    """The tensors under all their names, and the manifest without the note of which were left out."""
    found = Saved(tensors)
    found.update({name: tensors[first] for name, first in manifest.get("aliases", {}).items()})
    return found, {key: value for key, value in manifest.items() if key != "aliases"}


def pack_moments(moments: Moments, at: str, known: Triangles) -> Tensors:
    """The moments under names that begin with `at`; `known` has the triangles of Grams that were packed already."""
    tensors = {f"{at}/square": moments.square, f"{at}/energy": moments.energy}
    if moments.gram.kept is not None:
        if id(moments.gram) not in known:
            known[id(moments.gram)] = moments.gram.triangle()
        tensors[f"{at}/gram"] = known[id(moments.gram)]
    if moments.cross is not None:
        tensors[f"{at}/cross"] = moments.cross
    return tensors


def describe_relative(relative: Relative) -> dict[str, Any]:
    """What of relative moments is not in tensors, as plain JSON."""
    return {
        "folded": [relative.folded.gram.count, relative.folded.calls],
        "fresh": None if relative.fresh is None else [relative.fresh.gram.count, relative.fresh.calls],
        "travel": relative.travel,
        "silent": relative.silent,
    }


def tensor_of(tensors: Mapping[str, Tensor], key: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """One tensor of a saved guard, which must be there and of this shape."""
    if key not in tensors or tensors[key].shape != torch.Size(shape):
        found = tuple(tensors[key].shape) if key in tensors else "nothing"
        raise NessError(f"the saved guard is damaged: {key} is {found}, expected {tuple(shape)}; save it again")
    return tensors[key]


def moments_of(protected: LayerState, tensors: Mapping[str, Tensor], at: str, count: int, calls: int) -> Moments:
    """The moments that `pack_moments` packed under names that begin with `at`."""
    like = protected.moments.no_rows()
    device, cross = protected.anchor.device, None
    if f"{at}/cross" in tensors:
        cross = tensor_of(tensors, f"{at}/cross", protected.anchor.shape).to(device, torch.float64, copy=True)
    return Moments(
        _gram(like.gram, tensors, f"{at}/gram", int(count)),
        cross if cross is not None and bool(cross.any()) else None,
        tensor_of(tensors, f"{at}/square", like.square.shape).to(device, copy=True),
        tensor_of(tensors, f"{at}/energy", like.energy.shape).to(device, copy=True),
        int(calls),
    )


def _gram(like: Gram, tensors: Mapping[str, Tensor], key: str, count: int) -> Gram:
    """A Gram that was saved as a triangle, or, by older versions, as the whole matrix."""
    if count == 0 and key not in tensors:
        return like
    known = tensors.grams if isinstance(tensors, Saved) else {}
    found = known.get((id(tensors.get(key)), count))
    if found is not None:
        return found
    whole = key in tensors and tensors[key].ndim == 3
    shape = (like.groups, *((like.width, like.width) if whole else (like.width * (like.width + 1) // 2,)))
    tensor = tensor_of(tensors, key, shape)
    if whole:
        gram = like.plus(Gram(tensor.to(like.device, torch.float64), count))
    else:
        gram = Gram.from_triangle(tensor, like, count)
    known[id(tensor), count] = gram
    return gram


def relative_of(
    protected: LayerState, tensors: Mapping[str, Tensor], at: str, entry: Mapping[str, Any] | None
) -> Relative | None:
    """The relative moments that `describe_relative` described, checked against the guard's rule."""
    if (entry is None) != (protected.relative is None):
        found, wanted = ("no", "needs it") if entry is None else ("each", "has no use for it")
        raise NessError(
            f"the saved guard keeps {found} task's own drift in layer {protected.layer.name!r}, and this guard's rule "
            f"{wanted}; load it with the rule it was saved with"
        )
    if entry is None:
        return None
    fresh = None if entry["fresh"] is None else moments_of(protected, tensors, f"{at}/fresh", *entry["fresh"])
    folded = moments_of(protected, tensors, f"{at}/relative", *entry["folded"])
    return Relative(folded, fresh, entry["travel"], bool(entry["silent"]))
