"""Puts updates into modules and takes them out again.

While a module is constrained its class is a subclass of its own class, in which `module.weight` reads W + ΔW and
`forward` runs the cheapest form. Its `_parameters` still hold W under the old name and in the old order, so state dicts
do not change; the trained parameter stands beside them, so that `model.parameters()` and DDP see it. Taking the update
out puts the class back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ness.errors import NessWarning
from ness.updates.update import Update

UPDATES = "_ness_updates"  # module.__dict__ key: the updates of this module
PREFIX = "ness_"  # name of a trained parameter inside its module: "ness_weight"


class _Constrained(nn.Module):
    """Mixed into a module's class while it is constrained."""

    _ness_made_of: ClassVar[tuple[type[nn.Module], frozenset[str], bool, str]]  # what `_constrained_class` was given

    def _ness_held(self) -> dict[str, nn.Parameter | None]:
        return {name: self._parameters.pop(name) for name in list(self._parameters) if name.startswith(PREFIX)}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        held = self._ness_held()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._parameters.update(held)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn(
            "load_state_dict into a constrained model: a state dict holds the weights without the updates, so those "
            "that are trained now stay; put copies of guard.parameters() back instead, or use guard.load_state",
            NessWarning,
            stacklevel=2,
        )
        held = self._ness_held()
        super()._load_from_state_dict(*args, **kwargs)
        self._parameters.update(held)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        held = self._ness_held()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._parameters.update(held)
        for update in self.__dict__[UPDATES]:
            update.to(update.layer.weight.device)
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_constrained, type(self)._ness_made_of, dict(self.__dict__)


class _FrozenNorm(nn.Module):
    """Mixed into a norm's class while it is frozen: normalises with the stored statistics, updates nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        mode = self.training
        self.training = False
        try:
            result: Tensor = super().forward(*args, **kwargs)
        finally:
            self.training = mode
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_frozen_norm, (type(self).__mro__[2],), dict(self.__dict__)


def _reader(name: str) -> property:
    """The property `module.weight`: the stored parameter with all updates added."""

    def read(module: nn.Module) -> Tensor | None:
        value: Tensor | None = module._parameters[name]
        if value is None:
            return None
        for update in module.__dict__[UPDATES]:
            if name in (update.layer.weight_name, update.layer.bias_name):
                value = update.add(name, value)
        return value

    return property(read)


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    (update,) = module.__dict__[UPDATES]
    result: Tensor = update.forward(module, x)
    return result


def _forward_of_linear(self: nn.Module, input: Tensor) -> Tensor:
    """Forward of a constrained layer; the argument's name is torch's."""
    return _forward(self, input)


def _forward_of_conv1d(self: nn.Module, x: Tensor) -> Tensor:
    """Forward of a constrained transformers Conv1D; the argument's name is theirs."""
    return _forward(self, x)


@cache
def _constrained_class(base: type[nn.Module], names: frozenset[str], runs: bool, argument: str) -> type[nn.Module]:
    namespace: dict[str, Any] = {name: _reader(name) for name in names}
    namespace["_ness_made_of"] = base, names, runs, argument
    if runs:
        namespace["forward"] = _forward_of_conv1d if argument == "x" else _forward_of_linear
    return type(base.__name__, (_Constrained, base), {"__module__": base.__module__, **namespace})


@cache
def _frozen_norm_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(base.__name__, (_FrozenNorm, base), {"__module__": base.__module__})


def _new_constrained(base: type[nn.Module], names: frozenset[str], runs: bool, argument: str) -> nn.Module:
    """An empty module of that class, for copies and pickles to fill."""
    kind = _constrained_class(base, names, runs, argument)  # type: ignore[arg-type]
    return kind.__new__(kind)


def _new_frozen_norm(base: type[nn.Module]) -> nn.Module:
    """An empty module of that class, for copies and pickles to fill."""
    kind = _frozen_norm_class(base)  # type: ignore[arg-type]
    return kind.__new__(kind)


def is_constrained(module: nn.Module) -> bool:
    """Whether some guard holds this module constrained (or frozen, for a norm) right now."""
    return isinstance(module, _Constrained | _FrozenNorm)


def install(updates: list[Update]) -> None:
    """Put updates into all modules that hold their weights."""
    by_module: dict[nn.Module, list[Update]] = {}
    for update in updates:
        for module in update.layer.modules:
            by_module.setdefault(module, []).append(update)
    for module, own in by_module.items():
        names = {own_name for u in own for own_name in (u.layer.weight_name, u.layer.bias_name) if own_name}
        present = frozenset(name for name in names if name in module._parameters)
        runs = own[0].layer.apply is not None
        argument = "x" if own[0].layer.kind == "transformers.Conv1D" else "input"
        module.__dict__[UPDATES] = own
        module.__class__ = _constrained_class(type(module), present, runs, argument)  # type: ignore[arg-type]
        for update in own:
            part = "" if update.layer.weight_part is None else f"_{update.layer.name[-1]}"
            for ending, parameter in update.trained().items():
                module._parameters[f"{PREFIX}{update.layer.weight_name}{part}{ending}"] = parameter


def uninstall(updates: list[Update]) -> None:
    """Take updates out again: the module's own class, its own parameters. A module without any is left as it is."""
    for module in {module for update in updates for module in update.layer.modules if is_constrained(module)}:
        for name in [name for name in module._parameters if name.startswith(PREFIX)]:
            del module._parameters[name]
        del module.__dict__[UPDATES]
        module.__class__ = type(module).__mro__[2]  # (the subclass, _Constrained, the module's own class, …)


def freeze_norm(module: nn.Module) -> None:
    """Make a norm layer use its stored statistics in train mode too."""
    module.__class__ = _frozen_norm_class(type(module))  # type: ignore[arg-type]


def unfreeze_norm(module: nn.Module) -> None:
    """Undo `freeze_norm`."""
    module.__class__ = type(module).__mro__[2]


def stored_statistics(module: nn.Module) -> bool:
    """Whether a norm layer keeps running statistics that train mode would change."""
    return isinstance(getattr(module, "running_mean", None), torch.Tensor)
