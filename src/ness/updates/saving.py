"""State dicts of a constrained model: what is saved computes in a plain model, what is loaded restores the updates.

Under a layer's own names stand the weights as they run, W + ΔW. Beside them stand the trained parameters
(`fc.ness_weight`) and `fc.ness_about`: a little JSON, as bytes in a tensor, that says which base W and which free
directions they belong to. Loaded into a plain model the first are all it needs. Loaded into the constrained model the
second are put back bit for bit, and W, which is frozen, is checked and left alone.

Every check comes before the first write: torch loads module by module, so the modules above the constrained ones have
a hook that looks at all of them first.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ness.distributed import as_sharded, gathered, sharded
from ness.errors import NessError
from ness.layers.names import listed
from ness.storage.folder import fingerprint

if TYPE_CHECKING:
    from ness.updates.update import Update

UPDATES = "_ness_updates"  # module.__dict__ key: the updates of this module
PREFIX = "ness_"  # name of a trained parameter inside its module: "ness_weight"
ABOUT = f"{PREFIX}about"  # what the trained parameters belong to
SCHEMA = 1
TAMPERED = 1e-3  # the share of an update by which saved weights may differ from base and update, besides rounding

Placed = list[tuple[str, nn.Module]]  # constrained modules, each with its prefix: "encoder.fc."


class Passing:
    """What an update knows of the state dict that is being written or loaded; no copy and no pickle keeps it."""

    def __init__(self) -> None:
        self.destination: weakref.ref[Any] | None = None  # the state dict that these weights were written to last
        self.prefix = ""  # and under which prefix
        self.checked: list[str] | None = None  # the load (by its list of missing keys) that they are checked for
        self.directions: str | None = None  # fingerprint of what never changes while training

    def __reduce__(self) -> tuple[type[Passing], tuple[()]]:
        return Passing, ()

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


def about(module: nn.Module) -> dict[str, Any]:
    """What the trained parameters of a module belong to, as plain JSON."""
    return {
        "schema": SCHEMA,
        "base": {name: f"{value.dtype} {fingerprint(gathered(value))}" for name, value in base_in(module).items()},
        "updates": {next(iter(names_of(update))): _about(update) for update in updates_in(module)},
    }


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
    with torch.set_grad_enabled(keep_vars and torch.is_grad_enabled()):
        for name, value in as_it_runs(module, updates_in(module)).items():  # laid out in memory as the base is
            if sharded(base[name]):
                destination[prefix + name] = as_sharded(value.detach(), base[name])
                continue
            like = torch.empty_like(base[name], requires_grad=False)
            destination[prefix + name] = value if keep_vars else like.copy_(value)
    for name, parameter in trained.items():
        destination[prefix + name] = destination.pop(prefix + name) if keep_vars else parameter.detach().clone()
    destination[prefix + ABOUT] = encode(about(module))
    passing.wrote(destination, prefix)


def as_it_runs(module: nn.Module, updates: Iterable[Update]) -> dict[str, Tensor]:
    """W + ΔW and b + Δb of the module, by name, with these updates."""
    values: dict[str, Tensor] = {name: gathered(value) for name, value in base_in(module).items()}
    for update in updates:
        delta = update.delta()
        for name in (update.layer.weight_name, update.layer.bias_name):
            if name in values:
                values[name] = update.add(name, values[name], delta)
    return values


def encode(description: Mapping[str, Any]) -> Tensor:
    """Plain JSON as a tensor of bytes, which every file format takes."""
    return torch.tensor(list(json.dumps(description, sort_keys=True).encode()), dtype=torch.uint8)


def decode(tensor: Any, key: str) -> dict[str, Any]:
    """What `encode` was given."""
    try:
        found = json.loads(bytes(tensor.detach().cpu().to(torch.uint8).tolist()))
        if found["schema"] != SCHEMA:
            raise NessError(f"load_state_dict: {key} is of schema {found['schema']}, expected {SCHEMA}; update ness")
        found["base"].keys(), found["updates"].keys()
    except (AttributeError, TypeError, ValueError, KeyError, RuntimeError, RecursionError) as error:
        raise NessError(f"load_state_dict: {key} is damaged ({type(error).__name__}); save the model again") from error
    return dict(found)


# -- loading ----------------------------------------------------------------------------------------------------------


def check(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    *_: Any,
) -> None:
    """A hook of torch's `load_state_dict`: refuse what does not restore every constrained layer below this module."""
    below = [
        (f"{prefix}{name}." if name else prefix, child)
        for name, child in module.named_modules(remove_duplicate=False)
        if UPDATES in child.__dict__
    ]
    passing = [update.passing for _, child in below for update in updates_in(child)]
    if all(one.checked is missing_keys for one in passing):
        return
    with torch.no_grad():
        for placed in _complete(module, below, state_dict, prefix):
            _check_layer(placed, state_dict)
    for one in passing:
        one.checked = missing_keys


def _complete(module: nn.Module, below: Placed, state_dict: Mapping[str, Any], prefix: str) -> list[Placed]:
    """Constrained modules whose updates the state dict has, tied ones together; an error if some are not there.

    A state dict that has nothing of any constrained layer changes none, and passes.
    """
    saved = {key for key in state_dict if key.startswith(prefix) and key.rpartition(".")[2].startswith(PREFIX)}
    groups: dict[tuple[int, ...], Placed] = {}
    for where, child in below:
        groups.setdefault(tuple(id(update) for update in updates_in(child)), []).append((where, child))
    needed = {placed[0][0]: [*trained_in(placed[0][1]), ABOUT] for placed in groups.values()}
    if not saved:
        weights = [where + name for where, child in below for name in base_in(child) if where + name in state_dict]
        if weights:
            keys = [where + name for where, names in needed.items() for name in names]
            raise NessError(
                f"load_state_dict: the state dict has weights ({listed(weights)}) but knows nothing of the updates "
                f"that this model is trained with: missing {listed(keys)}. Nothing was changed. Load a state dict that "
                "was saved while the model was constrained like this; for other weights call merge() or discard() first"
            )
        return []
    own = {where + name for where, child in below for name in (*trained_in(child), ABOUT)}
    own |= {prefix + name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    absent, found = list[str](), list[Placed]()
    for placed in groups.values():
        each = [[where + name for name in (*trained_in(child), ABOUT)] for where, child in placed]
        whole = [one for one, names in zip(placed, each, strict=True) if saved.issuperset(names)]
        found.append([*whole, *(one for one in placed if one not in whole)])
        absent += [] if whole else [key for key in each[0] if key not in saved]
    strange = sorted(saved - own)
    if absent or strange:
        what = f"missing {listed(absent)}" if absent else ""
        what += "; " if absent and strange else ""
        what += f"not of this model: {listed(strange)}" if strange else ""
        raise NessError(
            f"load_state_dict: the updates in the state dict are not of the layers that are constrained here: {what}. "
            "Nothing was changed. Constrain as when it was saved (the same rule, form, rank, include and exclude), and "
            "load a checkpoint of several files as one state dict"
        )
    return found


def _check_layer(placed: Placed, state_dict: Mapping[str, Any]) -> None:
    """Refuse updates that were trained on another base, in other directions, or that the saved weights do not have.

    Args:
        placed: modules with tied weights; the first is the one under whose prefix the updates are.
        state_dict: what is loaded.
    """
    prefix, module = placed[0]
    layer = repr(prefix[:-1] or "(model)")
    _check_about(layer, about(module), decode(state_dict[prefix + ABOUT], prefix + ABOUT))
    trials = []
    for update in updates_in(module):
        trial = copy.copy(update)
        attributes = {id(value): name for name, value in vars(update).items()}
        for name, parameter in names_of(update).items():
            value = state_dict[prefix + name]
            found = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
            if found != (tuple(parameter.shape), parameter.dtype):
                raise NessError(
                    f"load_state_dict: layer {layer}: {prefix + name} is {found}, expected {tuple(parameter.shape)}, "
                    f"{parameter.dtype}. Nothing was changed. Constrain as when it was saved"
                )
            trial.__dict__[attributes[id(parameter)]] = value.detach().to(parameter.device)
        trials.append(trial)
    base = base_in(module)
    for name, expected in as_it_runs(module, trials).items():
        for where, _ in placed:
            if where + name in state_dict:
                _check_weight(layer, where + name, state_dict[where + name], base[name], expected)


def _check_about(layer: str, here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    def refuse(what: str, advice: str) -> None:
        raise NessError(f"load_state_dict: layer {layer}: {what}. Nothing was changed. {advice}")

    for name, known in here["updates"].items():
        found = saved["updates"].get(name, {})
        for key, said in (("form", "form"), ("rank", "rank"), ("private", "private directions"), ("max_drift", "")):
            if found.get(key) != known[key]:
                what = f"a max_drift that gives the limit {found.get(key)}" if not said else f"{said} {found.get(key)}"
                refuse(f"the update was saved with {what}, here it is {known[key]}", "Constrain as when it was saved")
        if found.get("directions") != known["directions"]:
            refuse(
                "the update was trained in other free directions than those found here",
                "Directions are equal only where the very same rows were observed in the same order: save the guard "
                "with guard.save(folder) and take it up with NullSpace.load(folder, model), then load",
            )
    for name, known in here["base"].items():
        found = saved["base"].get(name)
        if found != known:
            refuse(
                f"its {name} under the update is not what the update was trained on (found {known}, expected {found})",
                "Start from the weights and the dtype that the model had when it was constrained",
            )


def _check_weight(layer: str, key: str, found: Any, base: Tensor, expected: Tensor) -> None:
    """Whether the saved weight is base and update, up to rounding: one of them may have been changed since."""
    if isinstance(found, Tensor) and found.shape == expected.shape:
        value, expected = found.detach().to(expected.device, torch.float64), expected.to(torch.float64)
        off, change = float((value - expected).norm()), float((expected - base).norm())
        epsilon = max(torch.finfo(t.dtype).eps for t in (found, base) if t.is_floating_point())
        if off <= TAMPERED * change + 2 * epsilon * float(expected.norm()):
            return
        if torch.equal(value, expected) or torch.allclose(value, expected, equal_nan=True):
            return
    raise NessError(
        f"load_state_dict: layer {layer}: {key} is not the base with the saved update: weights and updates are not of "
        "one moment, or one was changed since. Nothing was changed. Load the state dict as it was saved"
    )


def load(
    module: nn.Module,
    rest: Callable[..., None],
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Put a module's updates back, leave its base alone, and load the rest by `rest`, its own class's way."""
    check(module, state_dict, prefix, local_metadata, strict, missing_keys)
    base, trained = base_in(module), trained_in(module)
    mine = {*base, *trained}
    held = dict(module._parameters)
    try:
        for name in mine:
            del module._parameters[name]
        rest(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
    finally:
        kept = {name: value if name in mine else module._parameters.get(name, value) for name, value in held.items()}
        module._parameters.clear()
        module._parameters.update(kept)
    ours = {prefix + name for name in (*mine, ABOUT)}
    unexpected_keys[:] = [key for key in unexpected_keys if key not in ours]
    missing_keys += [prefix + name for name in base if prefix + name not in state_dict]
    with torch.no_grad():
        for name, parameter in trained.items():
            if prefix + name in state_dict:
                parameter.copy_(state_dict[prefix + name])


def arrange_checks(model: nn.Module) -> None:
    """Hook `check` into every module above a constrained one, and nowhere else."""
    modules = dict(model.named_modules(remove_duplicate=False))
    constrained = [name for name, module in modules.items() if UPDATES in module.__dict__]
    above = {modules[parent] for name in constrained for parent in _parents(name)}
    for module in dict.fromkeys(modules.values()):
        hooks = module._load_state_dict_pre_hooks
        ours = [key for key, hook in hooks.items() if getattr(hook, "hook", None) is check]
        if module not in above:
            for key in ours:
                del hooks[key]
        elif not ours:
            module.register_load_state_dict_pre_hook(check)


def _parents(name: str) -> Iterable[str]:
    """Names of all modules above one.

    >>> list(_parents("encoder.0.fc"))
    ['', 'encoder', 'encoder.0']
    """
    parts = name.split(".") if name else []
    return (".".join(parts[:depth]) for depth in range(len(parts)))
