"""Models without their guard: what a guard that is dropped leaves behind, and how such a model becomes plain again.

While a model is constrained each of its modules keeps a record of what `constrain` changed there, so that it can be
undone without the guard.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ness._precision import ordinarily
from ness.errors import NessError, warn
from ness.layers import Layer
from ness.layers.names import listed
from ness.layers.norms import live_tensors
from ness.statistics.watch import remove_hooks
from ness.updates.install import BEFORE, UPDATES, is_constrained, strip
from ness.updates.layer_state import Swap, rounded_away, swaps_of
from ness.updates.loading import arrange_checks
from ness.updates.optimizers import OptimizerWatch
from ness.updates.saving import ROUNDED
from ness.updates.update import Update
from ness.verbs.changes import in_one_step
from ness.verbs.observing import CLAIM, refuse_observed

if TYPE_CHECKING:
    from ness.guard import NullSpace


class Owner:
    """Which guard constrained a model, if it still lives; a copy of the model has none until a copied guard says so."""

    def __init__(self, guard: NullSpace | None = None, watch: OptimizerWatch | None = None) -> None:
        self._guard, self.watch = None if guard is None else weakref.ref(guard), watch

    def guard(self) -> NullSpace | None:
        """The guard."""
        return None if self._guard is None else self._guard()

    def __reduce__(self) -> tuple[type[Owner], tuple[()]]:
        return Owner, ()


@dataclass
class Before:
    """What one module was before `constrain`."""

    owner: Owner
    flags: dict[str, bool]  # requires_grad of its own parameters
    values: dict[str, Tensor]  # of parameters and buffers that `constrain` or the task changes in place, copies


def records(guard: NullSpace, owner: Owner) -> dict[nn.Module, Before]:
    """What is to be kept in each module that has parameters, before `guard` constrains its model."""
    changes: set[int] = set()
    if guard.norm == "per_task":
        changes |= {id(tensor) for tensor in live_tensors(guard._found.norms).values()}
    for state in guard._protected.values():
        if state.part is not None:  # it is taken out of the weights
            changes |= {id(tensor) for tensor in (state.layer.weight, state.layer.bias) if tensor is not None}
    kept = {}
    for module in guard.model.modules():
        own = {**module._parameters, **module._buffers}
        flags = {name: p.requires_grad for name, p in module._parameters.items() if p is not None}
        values = {name: t.detach().clone() for name, t in own.items() if t is not None and id(t) in changes}
        if flags or values:
            kept[module] = Before(owner, flags, values)
    return kept


def adopt(guard: NullSpace, watch: OptimizerWatch) -> Hold:
    """Make a copied guard the owner of its model."""
    owner = Owner(guard, watch)
    for module in guard.model.modules():
        if BEFORE in module.__dict__:
            module.__dict__[BEFORE].owner = owner
    return Hold(guard.model, owner)


def release(model: nn.Module, *, merge: bool = False) -> list[str]:
    """Make a constrained model plain again though the guard that constrained it is gone.

    Modules have their own classes, parameters and `requires_grad` back, and no hook or attribute of ness stays. The
    weights, and norms that a task trained for itself, are those from before `constrain`: the update is dropped.
    Excluded modules keep what they have learnt. Where the guard still lives this is its `discard()`, or its `merge()`,
    for all of its model.

    Args:
        model: any module; a plain one is left as it is.
        merge: keep the update: the plain model computes what the constrained one did, the task's own norms and private
            part included.

    Returns:
        Names of the modules that held an update or were frozen; none for a plain model.

    Raises:
        NessError: another thread observes the model, or with `merge=True` an update holds NaN or Inf. Then, and after
            any other error or Ctrl-C, the model is as before.

    >>> from ness import NullSpace, Rank
    >>> model = nn.Linear(3, 2)
    >>> guard = NullSpace(model, rule=Rank(1))
    >>> guard.observe(torch.randn(9, 3)); guard.constrain()
    >>> release(model), guard.constrained, release(model)
    ([''], False, [])
    """
    if not isinstance(model, nn.Module):
        raise NessError(f"release: found {type(model).__name__}, expected a torch.nn.Module")
    refuse_observed(model, "release")
    held = [name for name, module in model.named_modules() if is_constrained(module) or BEFORE in module.__dict__]
    for guard in _living(model.modules()):
        if merge:
            guard.merge()
        else:
            guard.discard()
    warn_of_rounding("release(merge=True)", ordinarily(_release, model, merge))
    return held


def _living(modules: Iterable[nn.Module]) -> list[NullSpace]:
    """The guards that live and hold these modules; a copy of a model has none of its original's."""
    guards: dict[int, NullSpace] = {}
    for module in modules:
        record: Before | None = module.__dict__.get(BEFORE)
        guard = None if record is None else record.owner.guard()
        if guard is not None and guard.constrained and any(module is own for own in guard.model.modules()):
            guards[id(guard)] = guard
    return list(guards.values())


@torch.no_grad()
def _release(model: nn.Module, merge: bool) -> dict[Layer, float]:
    """Make it plain; returns the share of each layer's update that rounding to half precision took away."""
    modules = list(model.modules())
    kept: list[tuple[nn.Module, Before]] = [(m, m.__dict__[BEFORE]) for m in modules if BEFORE in m.__dict__]
    writes = _merged(modules) if merge else _values_before(kept)
    updates = dict.fromkeys(update for module in modules for update in _updates(module)) if merge else {}
    lost = {update.layer: rounded_away(update.layer, update.delta().to(torch.float64)) for update in updates}
    in_one_step(model, modules, writes, partial(_plain, model, modules))
    for owner in {id(record.owner): record.owner for _, record in kept}.values():
        if owner.watch is not None:
            owner.watch.remove()
    return lost


def warn_of_rounding(verb: str, lost: Mapping[Layer, float], further: str = "") -> None:
    """Say where a merge into half precision has rounded away more than may go unsaid.

    Args:
        verb: that merged.
        lost: the share of each layer's update that is gone.
        further: what else would keep it.
    """
    much = {layer: share for layer, share in lost.items() if share > ROUNDED}
    if much:
        layers = listed([f"{share:.0%} of the update of {layer.name!r}" for layer, share in much.items()])
        called = verb if verb.endswith(")") else f"{verb}()"
        kind = str(next(iter(much)).weight.dtype).removeprefix("torch.")
        warn(
            f"{verb}: rounding to {kind} took away {layers}: what was trained is finer than what these weights can "
            f"hold. They are merged like that. To keep all of an update call model.float() before {called}{further}; "
            "or keep these layers in float32 and train under autocast"
        )


def _merged(modules: Iterable[nn.Module]) -> list[Swap]:
    """The weights as they run."""
    writes = list[Swap]()
    for update in dict.fromkeys(update for module in modules for update in _updates(module)):
        weights = update.running()
        if not bool(torch.isfinite(weights).all()):
            raise NessError(
                f"release(merge=True): the update of layer {update.layer.name!r} holds NaN or Inf; training diverged. "
                "The model is untouched: ness.release(model) drops the update"
            )
        writes += swaps_of(update.layer, weights)
    return writes


def _values_before(kept: Iterable[tuple[nn.Module, Before]]) -> list[Swap]:
    writes = list[Swap]()
    for module, record in kept:
        own = {**module._parameters, **module._buffers}
        writes += [(t, record.values[name]) for name, t in own.items() if t is not None and name in record.values]
    return writes


def _plain(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    for module in modules:
        record: Before | None = module.__dict__.get(BEFORE)
        for name, flag in ({} if record is None else record.flags).items():
            parameter = module._parameters.get(name)
            if parameter is not None:
                parameter.requires_grad_(flag)
        strip(module)
        module.__dict__.pop(CLAIM, None)
        remove_hooks(module, set())
    arrange_checks(model)


def _updates(module: nn.Module) -> list[Update]:
    return list(module.__dict__.get(UPDATES, ()))


class Hold:
    """Kept by a guard while it constrains: when the guard goes and the model stays, it says what is left behind.

    It says so at the next garbage collection, since a model that goes with its guard may go a moment after it.
    """

    def __init__(self, model: nn.Module, owner: Owner) -> None:
        self._end = weakref.finalize(self, _gone, weakref.ref(model), owner)
        self._end.atexit = False

    def remove(self) -> None:
        """Say nothing any more."""
        self._end.detach()


class _Later:
    """Garbage in a cycle: gone at the next collection."""

    def __init__(self) -> None:
        self.itself = self


def _gone(model: weakref.ref[Any], owner: Owner) -> None:
    if not _left_by(model(), owner):
        return
    if _collecting() or not gc.isenabled():  # inside a collection, which has taken the model too if it was to go
        _left_behind(model, owner)
    else:
        weakref.finalize(_Later(), _left_behind, model, owner).atexit = False


def _collecting() -> bool:
    """Whether a garbage collection is under way: another does nothing then."""
    probe = weakref.ref(_Later())
    gc.collect(0)
    return probe() is not None


def _left_by(model: nn.Module | None, owner: Owner) -> list[nn.Module]:
    modules = () if model is None else model.modules()
    return [module for module in modules if getattr(module.__dict__.get(BEFORE), "owner", None) is owner]


def _left_behind(model: weakref.ref[Any], owner: Owner) -> None:
    said = _leftovers(model(), owner)
    if said is not None:  # where warnings are errors the traceback outlives this call: no frame of it holds the model
        warn(said)


def _leftovers(model: nn.Module | None, owner: Owner) -> str | None:
    own = _left_by(model, owner)
    if not own:
        return None
    layers = dict.fromkeys(update.layer.name for module in own for update in _updates(module))
    frozen = sum(is_constrained(module) and UPDATES not in module.__dict__ for module in own)
    kind = type(model).__name__.removeprefix("Constrained")
    has, norms = "has" if len(layers) == 1 else "have", "is" if frozen == 1 else "are"
    return (
        f"a guard was dropped while it constrained a {kind}: {_count(len(layers), 'layer')} still {has} its updates, "
        f"{_count(frozen, 'norm')} {norms} frozen, and other weights do not train. ness.release(model) makes the model "
        "plain again, as it was before constrain(); ness.release(model, merge=True) keeps what it has learnt"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
