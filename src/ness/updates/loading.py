"""Loading a state dict into a constrained model: all of it is checked before the first layer changes.

torch loads module by module, so the modules above the constrained ones have a hook that looks at all of them first. See
`ness.updates.saving` for what a state dict holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ness.distributed import as_sharded, gathered, sharded
from ness.errors import NessError
from ness.layers.names import listed
from ness.updates.recovering import recovered
from ness.updates.saving import (
    ABOUT,
    BASE,
    BESIDE,
    PREFIX,
    SCHEMA,
    UPDATES,
    about,
    as_it_runs,
    base_in,
    changes,
    fingerprints,
    trained_in,
    updates_in,
    whole_base,
)

TAMPERED = 1e-3  # the share of an update by which saved weights may differ from base and update, besides rounding

Placed = list[tuple[str, nn.Module]]  # constrained modules, each with its prefix: "encoder.fc."


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
    needed = {placed[0][0]: [*trained_in(placed[0][1]), *BESIDE] for placed in groups.values()}
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
    own = {where + name for where, child in below for name in (*trained_in(child), *BESIDE)}
    own |= {prefix + name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    absent, found = list[str](), list[Placed]()
    for placed in groups.values():
        each = [[where + name for name in (*trained_in(child), *BESIDE)] for where, child in placed]
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
    saved = decode(state_dict[prefix + ABOUT], prefix + ABOUT)
    _check_about(layer, about(module), saved)
    trials = []
    for update in updates_in(module):
        values: dict[str, Tensor] = {}
        for end, parameter in update.trained().items():
            name = update.name_of(end)
            value = state_dict[prefix + name]
            found = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
            if found != (tuple(parameter.shape), parameter.dtype):
                raise NessError(
                    f"load_state_dict: layer {layer}: {prefix + name} is {found}, expected {tuple(parameter.shape)}, "
                    f"{parameter.dtype}. Nothing was changed. Constrain as when it was saved"
                )
            values[end] = gathered(value.detach()).to(parameter.device, copy=True)
        trials.append(update.trying(values))
    change, own = changes(module, trials), updates_in(module)[0].passing
    base = whole_base(module)
    own.restored = {}
    if fingerprints(base) != saved["base"]:
        base = own.restored = _base(layer, placed, base, change, saved["base"], own.base, state_dict)
    for name, expected in as_it_runs(base, change).items():
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


def _base(
    layer: str,
    placed: Placed,
    here: Mapping[str, Tensor],
    change: Mapping[str, Tensor],
    saved: Mapping[str, str],
    known: Mapping[str, str] | None,
    state_dict: Mapping[str, Any],
) -> dict[str, Tensor]:
    """The base of the time when the model was constrained, recovered bit for bit where it was changed since.

    Args:
        layer: its name, for errors.
        placed: the modules that hold it, each with its prefix; the first has the updates.
        here: what is in the place of the base now.
        change: the update, as it is loaded.
        saved: fingerprints of the base under the saved update.
        known: fingerprints of the base that this model was constrained with.
        state_dict: what is loaded.
    """
    saved_as = {name: [state_dict.get(where + name) for where, _ in placed] for name in here}  # tied: once at least
    running = {
        name: next((gathered(v) for v in values if isinstance(v, Tensor)), None) for name, values in saved_as.items()
    }
    if saved == known and all(
        isinstance(value, Tensor) and (value.shape, value.dtype) == (here[name].shape, here[name].dtype)
        for name, value in running.items()
    ):
        try:
            found = recovered(state_dict[placed[0][0] + BASE], running, change, here)  # type: ignore[arg-type]
        except (AttributeError, TypeError, ValueError) as error:
            key = placed[0][0] + BASE
            raise NessError(f"load_state_dict: {key} is damaged ({error}); save the model again") from error
        if fingerprints(found) == saved:
            return found
    now = fingerprints(here)
    names = [name for name in here if now[name] != saved.get(name)]
    what = ", ".join(f"{name} (found {now[name]}, expected {saved.get(name)})" for name in names)
    raise NessError(
        f"load_state_dict: layer {layer}: under the update is not what it was trained on: {what}. Nothing was changed. "
        "Start from the weights and the dtype that the model had when it was constrained"
    )


def _check_weight(layer: str, key: str, found: Any, base: Tensor, expected: Tensor) -> None:
    """Whether the saved weight is base and update, up to rounding: one of them may have been changed since."""
    if isinstance(found, Tensor) and found.shape == expected.shape:
        value, expected = gathered(found.detach()).to(expected.device, torch.float64), expected.to(torch.float64)
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
    ours = {prefix + name for name in (*mine, *BESIDE)}
    unexpected_keys[:] = [key for key in unexpected_keys if key not in ours]
    missing_keys += [prefix + name for name in base if prefix + name not in state_dict]
    passing = updates_in(module)[0].passing
    with torch.no_grad():
        for name, value in passing.restored.items():
            base[name].copy_(as_sharded(value, base[name]) if sharded(base[name]) else value)
        passing.restored = {}
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
