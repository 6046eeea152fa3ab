"""LoRA updates B A inside a model, found by their shape, without importing peft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.layers.names import listed


@dataclass(frozen=True)
class Lora:
    """One active LoRA update ΔW = s B A of one layer."""

    module: str  # the module that holds both factors
    layer: str  # the layer inside it that is adapted
    factor: str  # name of A, (r, d) or (r, c, kernel…)
    other: str  # name of B
    scaling: float  # s


def loras_of(model: nn.Module) -> list[Lora]:
    """Every active LoRA update of the model; other kinds of adapter are refused by name."""
    found: list[Lora] = []
    for name, module in model.named_modules():
        if not hasattr(module, "base_layer") or not isinstance(module.base_layer, nn.Module):
            continue
        factors = getattr(module, "lora_A", None)
        if not isinstance(factors, nn.ModuleDict):
            raise NessError(
                f"{name!r} is a {type(module).__name__}: of adapters LoRA alone can be repaired as it is; merge this "
                "one (merge_and_unload()) and repair the plain model"
            )
        if getattr(module, "merged", False):
            raise NessError(f"{name!r}: the adapter is merged into its base; call unmerge_adapter() first")
        for adapter in getattr(module, "active_adapters", list(factors)):
            if adapter not in factors:
                continue
            for what in ("use_dora", "lora_bias"):
                if getattr(module, what, {}).get(adapter, False):
                    raise NessError(
                        f"{name!r}: adapter {adapter!r} has {what}, which is no plain B A; merge it "
                        "(merge_and_unload()) and repair the plain model"
                    )
            scaling = float(module.scaling[adapter])
            first, second = f"{name}.lora_A.{adapter}.weight", f"{name}.lora_B.{adapter}.weight"
            found.append(Lora(name, f"{name}.base_layer", first, second, scaling))
    return found


def base_name(name: str) -> str:
    """The name that a tensor of a model with adapters has in its plain base.

    >>> base_name("base_model.model.layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    """
    plain = name.removeprefix("base_model.model.")
    return plain.replace(".base_layer.", ".").replace(".original_module.", ".")


def lora_values(model: nn.Module, base: Mapping[str, Tensor] | None, known: Sequence[str]) -> dict[str, Tensor]:
    """What a model with adapters is without them, under its own names: every B is 0.

    Args:
        model: the model with its adapters.
        base: the plain base's tensors, compared with those under the adapters; None: these are the base.
        known: names of the model's tensors.
    """
    values: dict[str, Tensor] = {}
    saved: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict) and hasattr(module, "original_module"):
            saved |= {f"{name}.modules_to_save.{key}.": f"{name}.original_module." for key in module.modules_to_save}
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, value in state.items():
        values[name] = torch.zeros_like(value) if ".lora_B." in name or ".lora_embedding_B." in name else value
        for copied, original in saved.items():
            if name.startswith(copied):
                values[name] = state[original + name.removeprefix(copied)]
    if base is not None:
        _compare(base, state)
    return values


def _compare(base: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Refuse a base that is not the one under the adapters."""
    plain = {base_name(name): value for name, value in state.items() if ".lora_" not in name}
    plain = {name: value for name, value in plain.items() if ".modules_to_save." not in name}
    own = {base_name(name): value for name, value in base.items() if ".lora_" not in name}
    missing = [name for name in own if name not in plain]
    if missing or not own:
        raise NessError(
            f"the base has {listed([repr(name) for name in missing]) or 'no tensors'}, which the model under the "
            "adapters does not; pass the base that they were trained on, or base=None for the one that is there"
        )
    for name, value in own.items():
        if value.shape != plain[name].shape or not torch.equal(value.to(plain[name]), plain[name]):
            raise NessError(
                f"{name!r} of the base is not what lies under the adapters; pass the base that they were trained on, "
                "or base=None for the one that is there"
            )
