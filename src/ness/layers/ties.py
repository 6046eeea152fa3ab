"""Weights that several modules share: one layer where all of them are alike, and frozen where they are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ness.errors import NessError
from ness.layers.base import Layer

Holders = Mapping[int, Sequence[tuple[str, nn.Module]]]  # memory of a parameter -> all modules that store it, by name


@dataclass(frozen=True)
class Tie:
    """Why a layer cannot be constrained: a parameter of it is read by a module that is not constrained with it."""

    what: str  # "weight" or "bias"
    other: str  # that module's name
    kind: str  # and its class

    @property
    def reason(self) -> str:
        """For `guard.skipped`."""
        return (
            f"its {self.what} is also that of {self.other or '(model)'!r} ({self.kind}), which is not constrained with "
            "it: tied, so both stay frozen"
        )


def memory(parameter: Tensor) -> int:
    """Equal for two parameters that are one, or that share their numbers (`a.weight.data = b.weight.data`).

    >>> import torch
    >>> one = nn.Parameter(torch.zeros(2))
    >>> memory(one) == memory(nn.Parameter(one.data)), memory(one) == memory(nn.Parameter(one.data.clone()))
    (True, False)
    """
    try:
        return parameter.data_ptr() or -id(parameter)  # 0: on the meta device, or empty
    except RuntimeError:  # a tensor that is made of others has no memory of its own
        return -id(parameter)


def holders_of(modules: Mapping[str, nn.Module]) -> Holders:
    """All modules that store each parameter."""
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in modules.items():
        for parameter in {memory(value) for value in module._parameters.values() if value is not None}:
            holders.setdefault(parameter, []).append((name, module))
    return holders


def join(layers: Mapping[str, Layer], holders: Holders) -> tuple[dict[str, Layer], dict[str, Tie]]:
    """One layer per weight: layers of one kind that share weight and bias become one with several modules.

    Returns:
        The layers, and those that are no longer among them because someone else reads their weight or bias: it would
        change there without any promise.
    """
    groups: dict[tuple[int, int | None], list[Layer]] = {}
    for layer in layers.values():
        start = None if layer.weight_part is None else layer.weight_part.start
        groups.setdefault((memory(layer.weight), start), []).append(layer)
    tied = {}
    for group in groups.values():
        for layer in group:
            tie = _tie(layer, group, holders)
            if tie is not None:
                tied[layer.name] = tie
    kept: dict[str, Layer] = {}
    for first, *others in groups.values():
        if first.name not in tied:
            for other in others:
                first.join(other)
            kept[first.name] = first
    return {name: kept[name] for name in layers if name in kept}, tied


def _tie(layer: Layer, group: Sequence[Layer], holders: Holders) -> Tie | None:
    """What keeps a layer of this group, all of whose members share a weight, from being constrained."""
    first = group[0]
    odd = next((other for other in group[1:] if not _alike(first, other)), None)
    if odd is not None:
        other = first if layer is odd else odd
        return Tie("weight", other.name, type(other.module).__name__)
    owners = {id(module) for member in group for module in member.modules}
    for what, parameter in (("weight", layer.weight), ("bias", layer.bias)):
        for name, module in () if parameter is None else holders.get(memory(parameter), ()):
            if id(module) not in owners:
                return Tie(what, name, type(module).__name__)
    return None


def _alike(first: Layer, other: Layer) -> bool:
    same = type(first) is type(other) and first.weight is other.weight and first.bias is other.bias
    return same and first.module is not other.module


def say_ties(
    skipped: dict[str, str], modules: Mapping[str, nn.Module], holders: Holders, tied: Mapping[str, Tie]
) -> None:
    """Add to the reasons of modules that cannot be constrained anyway what they are tied to."""
    for name in skipped.keys() - tied.keys():
        other = _shares(name, modules.get(name), holders)
        if other is not None:
            skipped[name] += f"; it shares a parameter with {other!r}: tied, so both stay frozen"


def refuse_named_ties(
    include: Iterable[str],
    modules: Mapping[str, nn.Module],
    holders: Holders,
    layers: Mapping[str, Layer],
    tied: Mapping[str, Tie],
) -> None:
    """Whoever includes a module by its full name wants it to train; say so where a tie forbids it."""
    for name in include:
        tie = tied.get(name)
        other = tie.other if tie is not None else None
        if tie is None and not any(
            module is modules.get(name) for found in layers.values() for module in found.modules
        ):
            other = _shares(name, modules.get(name), holders)
        if other is not None:
            raise NessError(
                f"include names {name!r}, which shares a parameter with {other!r}: what one learns would change the "
                f"other. Leave {name!r} out of include, and both stay frozen, with all that they know; to train it, "
                "include both where they are layers of one kind, or untie them first: give one a copy of the weight "
                "as a parameter of its own"
            )


def _shares(name: str, module: nn.Module | None, holders: Holders) -> str | None:
    """Another module that stores one of this module's own parameters."""
    own = [] if module is None else [value for value in module._parameters.values() if value is not None]
    others = (other for value in own for other, held_by in holders.get(memory(value), ()) if held_by is not module)
    return next(others, None)
