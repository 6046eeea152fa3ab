"""Finding the layers of a model: what is constrained, what is excluded, what is frozen and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ness.errors import NessError
from ness.layers import AttentionOutput, Layer, layers_of
from ness.layers.names import matched
from ness.layers.norms import KINDS as NORM_KINDS
from ness.layers.norms import norm_modules


@dataclass(frozen=True)
class Found:
    """The model taken apart."""

    layers: dict[str, Layer]  # constrained once observed
    norms: dict[str, nn.Module]
    skipped: dict[str, str]  # frozen, and why
    excluded: set[str]  # names of modules and parameters left to the caller


def discover(model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> Found:
    """Take a model apart by name; ties between weights are followed, or refused by name."""
    modules = dict(model.named_modules())
    every = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [*every, *parameters]
    excluded = _with_children(names, matched(names, exclude, "exclude"))
    excluded = _with_children(names, _also_called(every, excluded))
    _refuse_half_excluded(parameters, excluded)
    layers, skipped = _layers(modules, excluded)
    if include:
        wanted = _with_children([*names, *layers], matched([*names, *layers], include, "include"))
        for name in [name for name in layers if name not in wanted]:
            del layers[name]
            skipped[name] = "not in include"
    if not layers:
        raise NessError(
            "the model has nothing to protect: no Linear, convolution or attention is left "
            f"after include={list(include)} and exclude={list(exclude)}; "
            + ("; ".join(f"{name or '(model)'}: {why}" for name, why in skipped.items()) or "it has no such layer")
        )
    _refuse_parts(layers, parameters, excluded)
    layers = _tied(layers)
    _refuse_foreign_ties(layers, modules)
    return Found(layers, norm_modules(model, excluded), skipped, excluded)


def shape_of(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """What changes when a module or a parameter of the model is added, replaced or taken away."""
    modules, parameters = model.named_modules(remove_duplicate=False), model.named_parameters(remove_duplicate=False)
    return (*((name, id(module)) for name, module in modules), *((name, id(value)) for name, value in parameters))


def _also_called(modules: dict[str, nn.Module], excluded: set[str]) -> set[str]:
    """The names, and all others of the modules that some of them mean."""
    meant = {id(module) for name, module in modules.items() if name in excluded}
    return excluded | {name for name, module in modules.items() if id(module) in meant}


def _refuse_half_excluded(parameters: dict[str, nn.Parameter], excluded: set[str]) -> None:
    """A parameter of two modules can be the caller's or stand still, not both."""
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        known = first.setdefault(id(parameter), name)
        if (known in excluded) != (name in excluded):
            mine, other = (known, name) if known in excluded else (name, known)
            raise NessError(
                f"{mine!r} is excluded, and {other!r} is the same parameter and is not; exclude both, and it trains "
                "for both, or untie the two"
            )


def _refuse_parts(layers: dict[str, Layer], parameters: dict[str, nn.Parameter], excluded: set[str]) -> None:
    """A layer is protected whole: an update beside a weight or a bias that trains freely protects nothing."""
    free = {id(parameter): name for name, parameter in parameters.items() if name in excluded}
    for layer in layers.values():
        for parameter in (layer.weight, layer.bias):
            if id(parameter) in free:
                raise NessError(
                    f"exclude means {free[id(parameter)]!r}, a part of layer {layer.name!r}, which is protected whole; "
                    "exclude the layer, or keep its bias as it is with bias='freeze'"
                )


def _with_children(names: Sequence[str], roots: set[str]) -> set[str]:
    """The names and everything below them."""
    below = {name for name in names if any(name.startswith(root + ".") for root in roots if root)}
    return roots | below | (set(names) if "" in roots else set())


def _layers(modules: dict[str, nn.Module], excluded: set[str]) -> tuple[dict[str, Layer], dict[str, str]]:
    layers: dict[str, Layer] = {}
    skipped: dict[str, str] = {}
    claimed: set[nn.Module] = set()  # out-projections, which their attention speaks for
    for name, module in modules.items():
        if name in excluded or module in claimed:
            continue
        found = layers_of(name, module)
        claimed.update(layer.module for layer in found if isinstance(layer, AttentionOutput))
        layers.update({layer.name: layer for layer in found if layer.name not in excluded})
        own = [key for key, value in module._parameters.items() if value is not None]
        own = [key for key in own if (f"{name}.{key}" if name else key) not in excluded]
        if not found and not isinstance(module, NORM_KINDS) and (own or hasattr(module, "parametrizations")):
            skipped[name] = _why_not(module, own)
    return layers, skipped


def _why_not(module: nn.Module, own: list[str]) -> str:
    kind = type(module).__name__
    if hasattr(module, "parametrizations"):
        return f"{kind} with a parametrised weight: remove the parametrisation first"
    if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and "weight" not in module._parameters:
        return f"{kind} whose weight is computed in every forward (weight_norm, spectral_norm): remove that first"
    if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)):
        return f"{kind} with a forward of its own: its input rows are not known"
    if any(module.children()):
        return f"bare parameters ({', '.join(own)}) of {kind}"
    return f"{kind} is not a supported kind"


def _tied(layers: dict[str, Layer]) -> dict[str, Layer]:
    """One layer a weight: layers of one kind that share weight and bias become one with several modules."""
    by_weight: dict[tuple[int, int | None], Layer] = {}
    kept: dict[str, Layer] = {}
    for name, layer in layers.items():
        start = None if layer.weight_part is None else layer.weight_part.start
        first = by_weight.setdefault((id(layer.weight), start), layer)
        if first is layer:
            kept[name] = layer
        elif type(first) is type(layer) and first.bias is layer.bias and first.module is not layer.module:
            first.join(layer)
        else:
            raise NessError(
                f"layers {first.name!r} and {name!r} share a weight but differ in kind or bias; "
                "exclude both, or give them weights of their own"
            )
    return kept


def _refuse_foreign_ties(layers: dict[str, Layer], modules: dict[str, nn.Module]) -> None:
    """A weight that someone else reads too would change for them without any promise."""
    owners = {layer.name: {id(module) for module in layer.modules} for layer in layers.values()}
    for layer in layers.values():
        for kind, parameter in (("weight", layer.weight), ("bias", layer.bias)):
            for name, module in modules.items():
                holds = any(value is parameter for value in module._parameters.values() if value is not None)
                if holds and id(module) not in owners[layer.name]:
                    raise NessError(
                        f"layer {layer.name!r} shares its {kind} with {name!r} ({type(module).__name__}), which is not "
                        f"constrained with it; exclude both, or untie the two"
                    )
