"""Finding the layers of a model: what is constrained, what is excluded, what is frozen and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ness.errors import NessError
from ness.layers import AttentionOutput, Layer, layers_of
from ness.layers.names import matched
from ness.layers.norms import norm_modules
from ness.layers.ties import holders_of, join, memory, refuse_named_ties, say_ties

REAL = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
#: Layers whose weights are packed, by the names of their classes: of bitsandbytes, GPTQ, AWQ, HQQ, EETQ, quanto, torch.
QUANTISED = {
    "Linear4bit", "LinearFP4", "LinearNF4", "Linear8bitLt", "QuantLinear", "WQLinear_GEMM", "WQLinear_GEMV",
    "HQQLinear", "EetqLinear", "QLinear", "FbgemmFp8Linear", "FP8Linear",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """The model taken apart."""

    layers: dict[str, Layer]  # constrained once observed
    norms: dict[str, nn.Module]
    skipped: dict[str, str]  # frozen, and why
    excluded: set[str]  # names of modules and parameters left to the caller


def discover(model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> Found:
    """Take a model apart by name; ties between weights are followed, or left frozen."""
    modules = dict(model.named_modules())
    every = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [*every, *parameters]
    excluded = _with_children(names, matched(names, exclude, "exclude"))
    excluded = _with_children(names, _also_called(every, excluded))
    _refuse_adapters(modules, excluded)
    _refuse_half_excluded(parameters, excluded)
    norms = norm_modules(model, excluded)
    layers, skipped = _layers(modules, excluded, norms)
    if include:
        wanted = _with_children([*names, *layers], matched([*names, *layers], include, "include"))
        for name in [name for name in layers if name not in wanted]:
            del layers[name]
            skipped[name] = "not in include"
    refuse_complex(layers)
    holders = holders_of(modules)
    layers, tied = join(layers, holders)
    _refuse_parts(layers, parameters, excluded)
    refuse_named_ties(include, every, holders, layers, tied)
    skipped |= {name: tie.reason for name, tie in tied.items()}
    say_ties(skipped, modules, holders, tied)
    if not layers:
        raise NessError(
            "the model has nothing to protect: no Linear, convolution or attention is left "
            f"after include={list(include)} and exclude={list(exclude)}; "
            + ("; ".join(f"{name or '(model)'}: {why}" for name, why in skipped.items()) or "it has no such layer")
        )
    return Found(layers, norms, skipped, excluded)


def shape_of(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """What changes when a module or a parameter of the model is added, replaced or taken away."""
    modules, parameters = model.named_modules(remove_duplicate=False), model.named_parameters(remove_duplicate=False)
    return (*((name, id(module)) for name, module in modules), *((name, id(value)) for name, value in parameters))


def refuse_complex(layers: Mapping[str, Layer]) -> None:
    """Grams and bounds are of real numbers; of a complex layer they would see the half."""
    for name, layer in layers.items():
        if any(parameter is not None and parameter.is_complex() for parameter in (layer.weight, layer.bias)):
            raise NessError(
                f"layer {name or '(model)'!r} is {layer.weight.dtype}: expected real weights, since Grams and bounds "
                "are of real numbers. Give it real weights for the real and the imaginary part, or choose other "
                "layers with include=: what is not included stays frozen"
            )


def _also_called(modules: dict[str, nn.Module], excluded: set[str]) -> set[str]:
    """The names, and all others of the modules that some of them mean."""
    meant = {id(module) for name, module in modules.items() if name in excluded}
    return excluded | {name for name, module in modules.items() if id(module) in meant}


def _refuse_adapters(modules: dict[str, nn.Module], excluded: set[str]) -> None:
    """PEFT's adapters are updates beside the weights: a guard would take their factors for layers."""
    for name, module in modules.items():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        wraps = "base_layer" in module._modules and any(child.startswith("lora_") for child in module._modules)
        if name not in excluded and (kinds & {"PeftModel", "BaseTunerLayer"} or wraps):
            what = f"{name!r} ({type(module).__name__})" if name else f"a {type(module).__name__}"
            raise NessError(
                f"NullSpace: found {what}, which trains a PEFT adapter beside weights that stay as they are; expected "
                "the plain model. Fold the adapter in, model = model.merge_and_unload(), and guard that: what the "
                "adapter has learnt is then protected too, and constrain(rank=...) trains updates as small as an "
                "adapter's"
            )


def _refuse_half_excluded(parameters: dict[str, nn.Parameter], excluded: set[str]) -> None:
    """A parameter of two modules can be the caller's or stand still, not both."""
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        known = first.setdefault(memory(parameter), name)
        if (known in excluded) != (name in excluded):
            mine, other = (known, name) if known in excluded else (name, known)
            raise NessError(
                f"{mine!r} is excluded, and {other!r} is the same parameter and is not: it cannot train freely and "
                f"stand still. Leave {_module_of(mine)!r} out of exclude, and both stay frozen, with all that they "
                "know; to train it alone, untie it first: give it a copy of the weight as a parameter of its own"
            )


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def _refuse_parts(layers: dict[str, Layer], parameters: dict[str, nn.Parameter], excluded: set[str]) -> None:
    """A layer is protected whole: an update beside a weight or a bias that trains freely protects nothing."""
    free = {memory(parameter): name for name, parameter in parameters.items() if name in excluded}
    for layer in layers.values():
        for parameter in (layer.weight, layer.bias):
            name = None if parameter is None else free.get(memory(parameter))
            if name is not None:
                raise NessError(
                    f"exclude means {name!r}, a part of layer {layer.name!r}, which is protected whole; leave it "
                    "out of exclude (bias='freeze' keeps biases as they are), or exclude the layer, which is then "
                    "unprotected"
                )


def _with_children(names: Sequence[str], roots: set[str]) -> set[str]:
    """The names and everything below them."""
    below = {name for name in names if any(name.startswith(root + ".") for root in roots if root)}
    return roots | below | (set(names) if "" in roots else set())


def _layers(
    modules: dict[str, nn.Module], excluded: set[str], norms: Mapping[str, nn.Module]
) -> tuple[dict[str, Layer], dict[str, str]]:
    layers: dict[str, Layer] = {}
    skipped: dict[str, str] = {}
    claimed: set[nn.Module] = set()  # out-projections, which their attention speaks for
    for name, module in modules.items():
        if name in excluded or module in claimed:
            continue
        if _quantised(module):
            skipped[name] = (
                f"{type(module).__name__} has quantised weights, to which no update can be added; load the model in "
                "bfloat16 or float32 to train it"
            )
            continue
        found = layers_of(name, module)
        claimed.update(layer.module for layer in found if isinstance(layer, AttentionOutput))
        for layer in (layer for layer in found if layer.name not in excluded):
            if layer.weight.dtype in REAL or layer.weight.is_complex():
                layers[layer.name] = layer
            else:
                skipped[layer.name] = f"its weight is {layer.weight.dtype}, which is no dtype that can be trained"
        own = [key for key, value in module._parameters.items() if value is not None]
        own = [key for key in own if (f"{name}.{key}" if name else key) not in excluded]
        if not found and name not in norms and (own or hasattr(module, "parametrizations")):
            skipped[name] = _why_not(module, own)
    return layers, skipped


def _quantised(module: nn.Module) -> bool:
    """Whether a layer keeps its weights packed: by the name of its class, or of its weight's."""
    weight = module._parameters.get("weight")
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return bool(kinds & QUANTISED) or type(weight).__module__.partition(".")[0] in ("bitsandbytes", "torchao")


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
