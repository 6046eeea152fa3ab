"""State dicts of a constrained model: what is saved computes in a plain model, what is loaded restores the updates.

Under a layer's own names stand the weights as they run, W + ΔW. Beside them stand the trained parameters
(`fc.ness_weight`), `fc.ness_about`: a little JSON, as bytes in a tensor, that says which base W and which free
directions they belong to, and `fc.ness_base`: what rounding took from W. Loaded into a plain model the first are all it
needs. Loaded into the constrained model the second are put back bit for bit. W is frozen: it is checked and left alone,
or put back bit for bit too where it was changed since the model was constrained.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ness.distributed import as_sharded, gathered, sharded
from ness.errors import warn
from ness.storage.folder import fingerprint
from ness.updates.recovering import correction

if TYPE_CHECKING:
    from ness.updates.update import Update

UPDATES = "_ness_updates"  # module.__dict__ key: the updates of this module
PREFIX = "ness_"  # name of a trained parameter inside its module: "ness_weight"
ABOUT = f"{PREFIX}about"  # what the trained parameters belong to
BASE = f"{PREFIX}base"  # what the base has that the weights as they run have lost
BESIDE = (ABOUT, BASE)
SCHEMA = 1
ROUNDED = 0.05  # the share of an update that rounding weights to half precision may take away unsaid


class Passing:
    """What an update knows of its base (copies know it too) and of the state dict that is being written or loaded."""

    def __init__(self, base: Mapping[str, str] | None = None) -> None:
        self.base = base  # fingerprints by name, of the time when the model was constrained
        self.destination: weakref.ref[Any] | None = None  # the state dict that these weights were written to last
        self.prefix = ""  # and under which prefix
        self.checked: list[str] | None = None  # the load (by its list of missing keys) that they are checked for
        self.restored: dict[str, Tensor] = {}  # the base that this load puts back, by name
        self.directions: str | None = None  # fingerprint of what never changes while training
        self.warned = False  # whether somebody was warned that rounding takes much of the update

    def __reduce__(self) -> tuple[type[Passing], tuple[Any]]:
        return Passing, (self.base,)

    def earlier(self, destination: Mapping[str, Any], prefix: str) -> str | None:
        """The other prefix under which this state dict has the same weights already: they are tied."""
        same = self.destination is not None and self.destination() is destination
        return self.prefix if same and self.prefix != prefix else None

    def wrote(self, destination: Mapping[str, Any], prefix: str) -> None:
        """Note where the weights were written to."""
        try:
            self.destination, self.prefix = weakref.ref(destination), prefix
        except TypeError:  # a plain dict, which torch no longer makes: ties are not seen
            self.destination = None


# -- what a module has ------------------------------------------------------------------------------------------------


def updates_in(module: nn.Module) -> list[Update]:
    """The updates of one constrained module."""
    found: list[Update] = module.__dict__[UPDATES]
    return found


def trained_in(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters of one module, by their names in it."""
    return {name: parameter for update in updates_in(module) for name, parameter in names_of(update).items()}


def names_of(update: Update) -> dict[str, nn.Parameter]:
    """An update's trained parameters, by their names in its module: "ness_weight", for q of attention "…_q"."""
    return {update.name_of(end): value for end, value in update.trained().items()}


def base_in(module: nn.Module) -> dict[str, nn.Parameter]:
    """The frozen weights and biases that the module's updates act on."""
    names = {name for u in updates_in(module) for name in (u.layer.weight_name, u.layer.bias_name) if name}
    return {name: value for name, value in module._parameters.items() if name in names and value is not None}


def whole_base(module: nn.Module) -> dict[str, Tensor]:
    """The same values, brought together where they are sharded over ranks."""
    return {name: gathered(value.detach()) for name, value in base_in(module).items()}


def about(module: nn.Module) -> dict[str, Any]:
    """What the trained parameters of a module belong to, as plain JSON."""
    return {
        "schema": SCHEMA,
        "base": fingerprints(base_in(module)),
        "updates": {next(iter(names_of(update))): _about(update) for update in updates_in(module)},
    }


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Dtype and hash of each."""
    return {name: f"{value.dtype} {fingerprint(value)}" for name, value in tensors.items()}


def _about(update: Update) -> dict[str, Any]:
    return {
        "form": "any" if update.projector is None else "sgd",
        "rank": update.rank,
        "private": update.private,
        "max_drift": None if update.limit is None else float(update.limit),
        "directions": _directions(update),
    }


def _directions(update: Update) -> str:
    if update.passing.directions is None:
        together = " ".join(f"{name} {fingerprint(value)}" for name, value in _fixed(update))
        update.passing.directions = fingerprint(torch.tensor(list(together.encode()), dtype=torch.uint8))
    return update.passing.directions


def _fixed(update: Update) -> Iterator[tuple[str, Tensor]]:
    """All tensors of an update that training does not change, but for the limit, which has a name of its own."""
    for name, value in sorted(vars(update).items()):
        parts = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {"": value}
        for part, tensor in parts.items():
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter) and name != "limit":
                yield f"{name}.{part}", tensor


# -- writing ----------------------------------------------------------------------------------------------------------


def write(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Complete what the module itself wrote: weights as they run, copies of the updates, what these belong to.

    Tied weights share one tensor, as they do in the state dict of a plain model, and have their updates once.
    """
    passing = updates_in(module)[0].passing
    earlier = passing.earlier(destination, prefix)
    base, trained = base_in(module), trained_in(module)
    if earlier is not None and all(earlier + name in destination for name in base):
        destination.update({prefix + name: destination[earlier + name] for name in base})
        for name in trained:
            del destination[prefix + name]
        return
    whole = whole_base(module)
    with torch.set_grad_enabled(keep_vars and torch.is_grad_enabled()):
        change = changes(module, updates_in(module))
        running = as_it_runs(whole, change)
    _warn_of_rounding(passing, whole, running, change)
    for name, value in running.items():
        if sharded(base[name]):
            destination[prefix + name] = as_sharded(value.detach(), base[name])
        else:  # laid out in memory as the base is
            destination[prefix + name] = value if keep_vars else torch.empty_like(whole[name]).copy_(value)
    for name, parameter in trained.items():
        destination[prefix + name] = destination.pop(prefix + name) if keep_vars else parameter.detach().clone()
    destination[prefix + ABOUT] = encode(about(module))
    destination[prefix + BASE] = correction(whole, running, change)
    passing.wrote(destination, prefix)


@torch.no_grad()
def _warn_of_rounding(
    passing: Passing, whole: Mapping[str, Tensor], running: Mapping[str, Tensor], change: Mapping[str, Tensor]
) -> None:
    """Say, once a layer, that weights of half precision cannot hold the update: a plain model would not have it."""
    if passing.warned or all(value.dtype.itemsize >= 4 for value in running.values()):
        return
    lost = sum(float((value.double() - whole[name] - change[name]).norm()) ** 2 for name, value in running.items())
    length = sum(float(value.double().norm()) ** 2 for value in change.values())
    if lost > ROUNDED**2 * length:
        passing.warned = True
        warn(
            f"state_dict: rounding to {next(iter(running.values())).dtype} takes more than {ROUNDED:.0%} of an update "
            "out of the weights that a plain model loads; the constrained model takes its updates back whole. Train "
            "float32 weights under autocast, or call model.float() before saving what is to be used without the guard"
        )


def changes(module: nn.Module, updates: Iterable[Update]) -> dict[str, Tensor]:
    """ΔW and Δb of the module by name, with these updates, in their own dtype."""
    values: dict[str, Tensor] = {}
    for update in updates:
        delta = update.delta()
        for name in (update.layer.weight_name, update.layer.bias_name):
            base = None if name is None else module._parameters[name]
            if name is not None and base is not None:
                start = values[name] if name in values else delta.new_zeros(base.shape)
                values[name] = update.add(name, start, delta)
    return values


def as_it_runs(base: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """W + ΔW and b + Δb by name, rounded as the model rounds them."""
    return {name: (value.to(change[name].dtype) + change[name]).to(value.dtype) for name, value in base.items()}


def encode(description: Mapping[str, Any]) -> Tensor:
    """Plain JSON as a tensor of bytes, which every file format takes."""
    return torch.tensor(list(json.dumps(description, sort_keys=True).encode()), dtype=torch.uint8)
