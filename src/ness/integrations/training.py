"""What every training framework's bridge does: check before the first step, name the drift, renew an optimizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ness.certificate import Certificate
from ness.errors import NessError
from ness.guard import NullSpace
from ness.layers.names import listed
from ness.updates.saving import PREFIX, UPDATES, about


def check_is_guard(guard: Any, who: str) -> NullSpace:
    """The guard, or an error that says what was given instead."""
    if not isinstance(guard, NullSpace):
        raise NessError(f"{who}: found {type(guard).__name__}, expected the ness.NullSpace that constrains the model")
    return guard


def check_constrained(guard: NullSpace, who: str) -> None:
    """Refuse to begin a training that nothing constrains."""
    if not guard.constrained:
        found = "the last task is merged" if guard._phase == "merged" else "the guard only observes so far"
        raise NessError(
            f"{who}: the model is not constrained ({found}), so that training would protect nothing. Before training: "
            "guard.observe(what must not change), then guard.constrain()"
        )


def check_model(guard: NullSpace, model: nn.Module, who: str) -> None:
    """Refuse to train another model than the guard's, or one with adapters beside the updates."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & {"PeftModel", "BaseTunerLayer"}:
            raise NessError(
                f"{who}: found {name or 'the model'!r} ({type(module).__name__}), a PEFT adapter, which would train "
                "beside the updates with no bound. Train the plain model with guard.constrain(rank=...), whose "
                "updates are as small; guard.export_lora(folder) writes them as an adapter"
            )
    if all(module is not guard.model for module in model.modules()):
        raise NessError(
            f"{who}: trains a {type(model).__name__} that the guard knows nothing of (its own is a "
            f"{type(guard.model).__name__}, another object). Hand over the model that the guard was made with"
            "; one that is made anew by model_init cannot be guarded"
        )


def updates_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The updates in training, by the names they have in this model."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2].startswith(PREFIX) and parameter.requires_grad
    }


def inner(optimizer: Any) -> Any:
    """The torch optimizer inside the wrappers of accelerate and Lightning."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "accelerator_state"):
        within = getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None)
        if within is None:
            return optimizer
        optimizer = within
    return optimizer


def held_by(optimizers: Iterable[Any]) -> dict[int, nn.Parameter]:
    """All parameters in the groups of these optimizers, by id."""
    return {id(p): p for optimizer in optimizers for group in inner(optimizer).param_groups for p in group["params"]}


def missing_updates(model: nn.Module, optimizers: Iterable[Any]) -> list[str]:
    """Names of updates that none of these optimizers trains."""
    held = held_by(optimizers)
    return [name for name, parameter in updates_by_name(model).items() if id(parameter) not in held]


def check_optimizers(model: nn.Module, optimizers: Iterable[Any], who: str, advice: str) -> None:
    """Refuse optimizers that hold not all of the updates."""
    optimizers = list(optimizers)
    missing = missing_updates(model, optimizers)
    if missing:
        kinds = ", ".join(type(inner(one)).__name__ for one in optimizers) or "no optimizer"
        raise NessError(
            f"{who}: {kinds} does not train {listed(missing)}, {len(missing)} of the {len(updates_by_name(model))} "
            f"updates: it was made before constrain(), or of other parameters. {advice}"
        )


def of_an_earlier_task(model: nn.Module, optimizer: Any) -> bool:
    """Whether an optimizer holds parameters that the model no longer has: the updates of a task that was merged."""
    here = {id(parameter) for parameter in model.parameters()}
    return any(key not in here for key in held_by([optimizer]))


def renew_optimizer(optimizer: Any, parameters: Iterable[nn.Parameter], who: str) -> None:
    """Let an optimizer begin anew, in place, with these parameters: schedulers and frameworks keep their hold of it.

    Args:
        optimizer: of one group, whose options stay: the rate is the one that its schedule began with.
        parameters: what it trains from now on.
        who: begins the error.

    Raises:
        NessError: it has several groups, and which of them a new parameter belongs to only its maker knows.
    """
    own = inner(optimizer)
    if len(own.param_groups) != 1:
        raise NessError(
            f"{who}: {type(own).__name__} has {len(own.param_groups)} groups of the last task's updates, and into "
            "which of them those of this task belong only its maker knows. Make it anew of guard.parameters()"
        )
    group = own.param_groups[0]
    group["params"] = list(parameters)
    group["lr"] = group.get("initial_lr", group["lr"])
    own.state.clear()


def drift_figures(certificate: Certificate) -> Iterator[tuple[str, float]]:
    """The largest drift of any layer, and each layer's, relative to its own outputs."""
    yield "drift_largest", float(certificate.largest_drift)
    for row in certificate.rows:
        yield f"drift/{row.name or 'model'}", float(row.relative_drift)


def identity(guard: NullSpace) -> str:
    """A hash of what stays the same while a task is trained: base, free directions, form and rank of each layer."""
    modules = guard.model.named_modules(remove_duplicate=True)
    parts = {name: about(module) for name, module in modules if UPDATES in module.__dict__}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
