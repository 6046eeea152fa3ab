"""Puts updates into modules and takes them out again.

While a module is constrained its class is a subclass of its own class, in which `module.weight` reads W + ΔW and
`forward` runs the cheapest form. Its `_parameters` still hold W under the old name and in the old order; the trained
parameter stands beside them, so that `model.parameters()` and DDP see it. What state dicts hold is said in
`ness.updates.saving`. Taking the update out puts the class back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ness.distributed import sharded
from ness.updates import loading, saving
from ness.updates.recovering import correction
from ness.updates.saving import PREFIX, UPDATES
from ness.updates.update import Update

__all__ = ["BEFORE", "PREFIX", "UPDATES", "freeze_norm", "install", "is_constrained", "strip", "uninstall"]

BEFORE = "_ness_before"  # module.__dict__ key: what the module was before `constrain`


class _Constrained(nn.Module):
    """Mixed into a module's class while it is constrained."""

    _ness_base: ClassVar[type[nn.Module]]  # the module's own class
    _ness_made_of: ClassVar[tuple[type[nn.Module], frozenset[str], bool, str]]  # what `_constrained_class` was given

    def _ness_held(self) -> dict[str, nn.Parameter | None]:
        return {name: self._parameters.pop(name) for name in list(self._parameters) if name.startswith(PREFIX)}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        saving.write(self, destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        loading.load(self, super()._load_from_state_dict, *args, **kwargs)

    @property
    def ness_about(self) -> Tensor:
        """What a state dict has beside the updates, for code that looks up every key as an attribute."""
        return saving.encode(saving.about(self))

    @property
    def ness_base(self) -> Tensor:
        """The same of what recovers the base."""
        base, change = saving.whole_base(self), saving.changes(self, saving.updates_in(self))
        return correction(base, saving.as_it_runs(base, change), change)

    def _ness_ranks(self) -> str:
        updates = saving.updates_in(self)
        figures = {"rank": [u.rank for u in updates], "private": [u.private for u in updates if u.private]}
        return ", ".join(f"{key}={tuple(n) if len(n) > 1 else n[0]}" for key, n in figures.items() if n)

    def extra_repr(self) -> str:
        """What the module's own class says, and the rank: for attention those of q, k and v."""
        return ", ".join(part for part in (super().extra_repr(), self._ness_ranks()) if part)

    def __repr__(self) -> str:
        text, base = super().__repr__(), self._ness_base
        if base.__repr__ is nn.Module.__repr__ or not text.endswith(")"):
            return text
        return f"{type(self).__name__}{text.removeprefix(base.__name__)[:-1]}, {self._ness_ranks()})"

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

    _ness_base: ClassVar[type[nn.Module]]  # the norm's own class

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        mode = self.training
        self.training = False
        try:
            result: Tensor = super().forward(*args, **kwargs)
        finally:
            self.training = mode
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_frozen_norm, (type(self)._ness_base,), dict(self.__dict__)


def _reader(name: str) -> property:
    """The property `module.weight`: the stored parameter with all updates added."""

    def read(module: nn.Module) -> Tensor | None:
        value: Tensor | None = module._parameters[name]
        if value is None or sharded(value):  # outside of a forward pass only the one who shards it asks
            return value
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
    namespace |= {"_ness_base": base, "_ness_made_of": (base, names, runs, argument)}
    if runs:
        namespace["forward"] = _forward_of_conv1d if argument == "x" else _forward_of_linear
    return type(f"Constrained{base.__name__}", (_Constrained, base), {"__module__": base.__module__, **namespace})


@cache
def _frozen_norm_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Frozen{base.__name__}", (_FrozenNorm, base), {"__module__": base.__module__, "_ness_base": base})


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
        module._parameters.update(saving.trained_in(module))
        for update in own:
            if update.passing.base is None:
                update.passing.base = saving.fingerprints(saving.base_in(module))


def uninstall(updates: list[Update]) -> None:
    """Take updates out again: the module's own class, its own parameters. A module without any is left as it is."""
    for module in {module for update in updates for module in update.layer.modules}:
        strip(module)


def strip(module: nn.Module) -> None:
    """Take out of a module whatever makes it a constrained layer or a frozen norm, and nothing else."""
    if is_constrained(module):
        for name in [name for name in module._parameters if name.startswith(PREFIX)]:
            del module._parameters[name]
        module.__dict__.pop(UPDATES, None)
        module.__class__ = type(module)._ness_base  # type: ignore[attr-defined]
    module.__dict__.pop(BEFORE, None)


def freeze_norm(module: nn.Module) -> None:
    """Make a norm layer use its stored statistics in train mode too."""
    module.__class__ = _frozen_norm_class(type(module))  # type: ignore[arg-type]


def stored_statistics(module: nn.Module) -> bool:
    """Whether a norm layer keeps running statistics that train mode would change."""
    return isinstance(getattr(module, "running_mean", None), torch.Tensor)
