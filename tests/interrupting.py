"""Interrupts at every line of the package, and everything that must then be as it was before, or after."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import ness
from ness.updates.install import UPDATES
from ness.updates.optimizers import OptimizerWatch

SOURCES = str(Path(ness.__file__).parent)


def run_traced(act: Callable[[], object], at: int | None = None, how: str = "raise", sources: str = SOURCES) -> int:
    """Run `act` up to the line event with number `at` in the files below `sources`, then interrupt.

    Returns how many line events came.

    how: "raise" raises KeyboardInterrupt on that very line, "signal" sends SIGINT, as Ctrl-C does.
    """
    seen = 0

    def line(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == at:
                sys.settrace(None)
                if how == "raise":
                    raise KeyboardInterrupt
                signal.raise_signal(signal.SIGINT)
        return line

    def call(frame: Any, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(sources) else None

    gc.disable()  # what a collection runs is not on the verb's way, and errors in it are lost
    sys.settrace(call)
    try:
        act()
    finally:
        sys.settrace(None)
        gc.enable()
    return seen


def bits(tensor: Tensor | None) -> Hashable:
    """A tensor as something that can be compared bit for bit."""
    if tensor is None:
        return None
    with torch.no_grad():
        return tuple(tensor.shape), str(tensor.dtype), tensor.detach().contiguous().numpy().tobytes()


def switches() -> Hashable:
    """What torch and Python keep for the whole process."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.backends.mha.get_fastpath_enabled(),
        torch.get_float32_matmul_precision(),
        signal.getsignal(signal.SIGINT),
    )


def watches(model: nn.Module) -> int:
    """How many hooks of torch's optimizers watch over the model."""
    owners = [getattr(hook, "__self__", None) for hook in _global_optimizer_pre_hooks.values()]
    return sum(isinstance(owner, OptimizerWatch) and owner._model() is model for owner in owners)


def of_model(model: nn.Module, x: Tensor) -> dict[str, Hashable]:
    """What it computes, what is trainable, every module's class, mode, hooks, parameters and attributes."""
    found: dict[str, Hashable] = {}
    for name, module in model.named_modules():
        found[f"{name}: module"] = (
            type(module),
            module.training,
            tuple(len(hooks) for hooks in (module._forward_hooks, module._forward_pre_hooks)),
            tuple(len(hooks) for hooks in (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
            len(module._load_state_dict_pre_hooks),
            tuple(sorted(module.__dict__)),
            len(module.__dict__.get(UPDATES, ())),
            tuple(module._parameters),
        )
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                found[f"{name}: {key}"] = bits(value), value.requires_grad, bits(value.grad)
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad():
        found["computes"] = bits(model.eval()(x))
    for module, mode in modes.items():
        module.training = mode
    found["switches"] = switches()
    found["watches of optimizers"] = watches(model)
    return found


def identities(model: nn.Module) -> dict[str, int]:
    """Which objects the model's own modules, parameters and buffers are."""
    tensors = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    return {name: id(value) for name, value in (*tensors.items(), *model.named_modules()) if "ness_" not in name}


def of_guard(guard: ness.NullSpace) -> dict[str, Hashable]:
    """What it knows, by its own account of itself."""
    tensors, manifest = guard.state()
    found: dict[str, Hashable] = {key: bits(value) for key, value in tensors.items()}
    found["manifest"] = repr(manifest)
    found["phase"] = guard._phase
    names = {id(p): name for name, p in guard.model.named_parameters()}
    found["flags"] = tuple((names[id(p)], flag) for p, flag in guard._flags)
    found["optimizers"] = guard._watch_optimizers is None
    found["under way"] = guard._unfinished is None, guard._observation is None
    return found


def everything(guard: ness.NullSpace, x: Tensor) -> dict[str, Hashable]:
    """Model and guard."""
    return {**of_model(guard.model, x), **of_guard(guard)}


def differences(one: dict[str, Hashable], other: dict[str, Hashable]) -> list[str]:
    """Names of what differs."""
    return [key for key in one | other if key not in one or key not in other or one[key] != other[key]]


def sweep(
    make: Callable[[], ness.NullSpace],
    verb: Callable[[ness.NullSpace], object],
    x: Tensor,
    how: str = "raise",
    every: int = 1,
    then: Callable[[ness.NullSpace], object] | None = None,
    sources: str = SOURCES,
) -> tuple[int, int]:
    """Interrupt `verb` at every line event, and demand that all is as before it, or as after it.

    Where it is as before, the verb is tried again on the same guard, and interrupted at the next line: every run but
    the first follows broken ones. Where it is as after, `then` must work, and a new guard is made.

    Returns:
        How often it was as before, and how often as after.
    """
    guard = make()
    verb(guard)
    end = everything(guard, x)
    del guard
    guard = make()
    start, same = everything(guard, x), identities(guard.model)
    assert differences(start, end)
    counts, at = [0, 0], 1
    while True:
        try:
            seen = run_traced(lambda: verb(guard), at, how, sources)  # noqa: B023
            assert seen < at, f"line event {at}: the interrupt was lost"
            broken = False
        except KeyboardInterrupt:
            broken = True
        now = everything(guard, x)
        assert identities(guard.model) == same, (at, [k for k in same if identities(guard.model).get(k) != same[k]])
        before, after = differences(now, start), differences(now, end)
        assert not before or not after, f"line event {at}: not as before ({before[:9]}), not as after ({after[:9]})"
        if not broken:
            assert not after
            return counts[0], counts[1]
        counts[bool(before)] += 1
        if before:
            if then is not None:
                then(guard)
            guard = make()
            same = identities(guard.model)
        at += every
