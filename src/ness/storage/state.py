"""A guard as tensors and plain JSON, and back: what `save`, `load` and checkpoints of others are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.layers import Layer
from ness.layers.norms import NormValues, norm_swaps, read_norms
from ness.rules import rule_from_dict, rule_to_dict
from ness.storage.folder import fingerprint
from ness.storage.manifest import check_state
from ness.storage.moments import (
    Triangles,
    describe_relative,
    moments_of,
    pack_moments,
    relative_of,
    tensor_of,
    with_repeats,
    without_repeats,
)
from ness.storage.placing import check_accounted, check_weights, place
from ness.tasks import Tasks
from ness.updates.constraint import Constraint, Factors, Figures
from ness.updates.layer_state import LayerState
from ness.updates.low_rank import LowRankUpdate
from ness.updates.private import PrivateColumns, PrivatePart
from ness.updates.saving import as_it_runs, changes, updates_in, whole_base
from ness.updates.update import Projector, Update
from ness.verbs.observing import new_state
from ness.verbs.remainder import Remainder, same_bits
from ness.verbs.transitions import enter

if TYPE_CHECKING:
    from ness.guard import NullSpace

Tensors = dict[str, Tensor]


def pack(guard: NullSpace) -> tuple[Tensors, dict[str, Any]]:
    """Everything a guard knows."""
    tensors: Tensors = {}
    known: Triangles = {}
    layers = {name: _pack_layer(protected, tensors, known) for name, protected in guard._protected.items()}
    tasks = guard._tasks
    for number, (task, norms) in enumerate(tasks.norms.items()):
        tensors |= {f"norms/{number}/{key}": value for key, value in norms.items()}
        for layer, part in tasks.private.get(task, {}).items():
            tensors[f"private/{number}/{layer}/coefficients"] = part.coefficients
            if part.directions is not None:
                tensors[f"private/{number}/{layer}/directions"] = part.directions
    if guard.constrained and guard.norm == "per_task":
        tensors |= {f"norms/live/{key}": value for key, value in read_norms(guard._found.norms).items()}
    manifest = {
        "rule": rule_to_dict(guard.rule),
        "include": list(guard.include),
        "exclude": list(guard.exclude),
        "bias": guard.bias,
        "norm": guard.norm,
        "private_basis": guard.private_basis,
        "statistics_dtype": str(guard.statistics_dtype),
        "phase": guard._phase,
        "form": guard._form,
        "idle": dict(guard._idle),
        **({"unmasked": dict(guard._unmasked)} if guard._unmasked else {}),
        "layers": layers,
        "rest": guard._remainder.pack(guard.model, tensors),
        "tasks": {
            "names": list(tasks.names),
            "in_use": tasks.in_use,
            "current": tasks.current,
            "started": tasks.started,
            "unnamed": tasks.unnamed,
            "private": {
                task: {layer: part.width for layer, part in own.items()} for task, own in tasks.private.items()
            },
        },
    }
    aliases = without_repeats(tensors)
    return tensors, manifest | ({"aliases": aliases} if aliases else {})


def _pack_layer(protected: LayerState, tensors: Tensors, known: Triangles) -> dict[str, Any]:
    layer, at = protected.layer, f"layers/{protected.layer.name}"
    tensors |= pack_moments(protected.moments, at, known)
    if protected.pending is not None:
        tensors |= pack_moments(protected.pending, f"{at}/pending", known)
    tensors |= {f"{at}/anchor": protected.anchor, f"{at}/spent": protected.spent}
    relative = protected.relative
    if relative is not None:
        tensors |= pack_moments(relative.folded, f"{at}/relative", known)
        if relative.fresh is not None:
            tensors |= pack_moments(relative.fresh, f"{at}/fresh", known)
    entry: dict[str, Any] = {
        **_shape(protected),
        "weights": fingerprint(layer.stored()),
        "count": protected.moments.gram.count,
        "calls": protected.moments.calls,
        "pending": None if protected.pending is None else [protected.pending.gram.count, protected.pending.calls],
        "relative": None if relative is None else describe_relative(relative),
        "merges": protected.merges,
        "last": asdict(protected.last),
    }
    if protected.directions is not None:
        entry["directions"] = protected.directions.shape[-1]
        tensors[f"{at}/directions"] = protected.directions
    if protected.shared is not None:
        tensors[f"{at}/shared"] = protected.shared
    factors, constraint = protected.factors, protected.constraint
    if factors is not None and factors.left.numel() + factors.right.numel() < protected.anchor.numel():
        entry["factors"] = factors.rank  # of an update at low rank; at full width they are larger than the layer
        tensors |= {f"{at}/left": factors.left, f"{at}/right": factors.right}
    if constraint is not None:
        entry["constraint"] = {"rank": constraint.rank}
        tensors |= {f"{at}/tau": constraint.tau, f"{at}/sigma": constraint.sigma, f"{at}/unscaled": constraint.unscaled}
        if constraint.update is not None:
            entry["constraint"] |= _pack_update(constraint.update, at, tensors)
            entry["running"] = fingerprint(_as_state_dicts_have_it(layer))  # the weights that a state dict has now
            if not same_bits(protected.anchor, layer.stored().to(protected.anchor.device)):
                tensors[f"{at}/base"] = layer.stored()
        if constraint.columns is not None:
            entry["constraint"]["own"] = constraint.columns.own
            tensors |= {f"{at}/columns": constraint.columns.directions, f"{at}/mixing": constraint.columns.mixing}
    return entry


def _as_state_dicts_have_it(layer: Layer) -> Tensor:
    """[W b] with the updates in training (groups, o, width), rounded to the dtype of the weights."""
    with torch.no_grad():
        values = as_it_runs(whole_base(layer.module), changes(layer.module, updates_in(layer.module)))
        return layer.joint(values[layer.weight_name], None if layer.bias is None else values[str(layer.bias_name)])


def _shape(protected: LayerState) -> dict[str, Any]:
    layer = protected.layer
    return {"kind": layer.kind, "groups": layer.groups, "outputs": layer.outputs, "width": layer.width}


def _pack_update(update: Update, at: str, tensors: Tensors) -> dict[str, Any]:
    if isinstance(update, LowRankUpdate):
        return _pack_low_rank(update, at, tensors)
    tensors |= {f"{at}/basis": update.basis, f"{at}/parameter": update.parameter}
    if update.projector is not None:
        tensors[f"{at}/scale"] = update.projector.squared_scale
        if update.projector.how != "basis":  # there it is the basis itself
            tensors[f"{at}/projector"] = update.projector.matrix
    if update.sizes is not None and update.limit is not None:
        tensors |= {f"{at}/sizes": update.sizes, f"{at}/limit": update.limit}
    projector = None if update.projector is None else update.projector.how
    return {"way": update.way, "projector": projector, "private": update.private}


def _pack_low_rank(update: LowRankUpdate, at: str, tensors: Tensors) -> dict[str, Any]:
    tensors |= {f"{at}/parameter": update.parameter, f"{at}/down": update.down}
    tensors |= {f"{at}/free": update.free.matrix, f"{at}/kept": update.basis}
    if update.sized is not None and update.limit is not None:
        tensors |= {f"{at}/sizes": update.sized, f"{at}/limit": update.limit}
    return {"way": update.way, "free": update.free.how, "cuts": update.free.cuts, "private": update.private}


def rebuild(model: nn.Module, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> NullSpace:
    """A new guard on `model` from what `pack` gave."""
    from ness.guard import NullSpace

    check_state(manifest)
    try:
        tensors, manifest = place(model, *with_repeats(tensors, manifest))
        guard = NullSpace(
            model,
            rule=rule_from_dict(manifest["rule"]),
            include=manifest["include"] or None,
            exclude=manifest["exclude"],
            bias=manifest["bias"],
            norm=manifest["norm"],
            private_basis=manifest.get("private_basis", "shared"),  # schema 1 knew no private parts
            statistics_dtype={"torch.float64": torch.float64, "torch.float32": torch.float32}[
                manifest["statistics_dtype"]
            ],
        )
    except NessError as error:
        raise NessError(f"the saved guard is for another model: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NessError(f"the saved guard's manifest is damaged: {error!r}; save the guard again") from error
    unpack(guard, tensors, manifest)
    return guard


def unpack(guard: NullSpace, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
    """Put saved knowledge into a guard that is not constrained; nothing changes unless everything fits."""
    if guard.constrained:
        raise NessError("load_state: the guard is constrained; call merge() or discard() first")
    check_state(manifest)
    try:
        tensors, manifest = with_repeats(tensors, manifest)
        check_accounted(tensors, manifest)
        protected = {name: _unpack_layer(guard, name, entry, tensors) for name, entry in manifest["layers"].items()}
        task_names, tasks = list(manifest["tasks"]["names"]), dict(manifest["tasks"])
        norms = {name: _norms(tensors, f"norms/{number}/") for number, name in enumerate(task_names)}
        private = {
            name: {
                layer: _private_part(protected[layer], tensors, f"private/{task_names.index(name)}/{layer}", int(k))
                for layer, k in widths.items()
            }
            for name, widths in tasks.get("private", {}).items()
        }
        remainder = Remainder.unpack(guard.model, tensors, manifest.get("rest"))
        phase, form, idle = manifest["phase"], manifest["form"], dict(manifest["idle"])
        unmasked = dict(manifest.get("unmasked", {}))  # older guards knew no masks
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NessError(f"the saved guard's manifest is damaged: {error!r}; save the guard again") from error
    in_place = private.get(tasks["in_use"], {}) if phase != "constrained" else {}
    for name in in_place:
        if protected[name].shared is None:
            raise NessError(f"the saved guard is damaged: no shared weights of layer {name!r}; save it again")
    expected = set(read_norms(guard._found.norms))
    for name, values in norms.items():
        if values and set(values) != expected:
            raise NessError(f"the saved guard is for another model: its norms of task {name!r} differ from the model's")
    states = {name: protected[name] for name in guard._found.layers if name in protected}
    for name, part in in_place.items():
        protected[name].part = part  # the model was saved with it in its weights
    known = Tasks()
    known.norms, known.private, known.in_use, known.current = norms, private, tasks["in_use"], tasks["current"]
    known.started, known.unnamed = tasks["started"], tasks["unnamed"]
    if phase == "constrained":
        live = _norms(tensors, "norms/live/")
        writes = norm_swaps(guard._found.norms, live) if live else []
        for name, entry in manifest["layers"].items():
            base = _base(protected[name], entry, tensors)
            writes += [] if base is None else protected[name].swaps(base)
        enter(guard, states, known, form, writes, {"_idle": idle, "_remainder": remainder, "_unmasked": unmasked})
        return
    fields = {"_protected": states, "_tasks": known, "_form": form, "_idle": idle, "_remainder": remainder}
    fields["_unmasked"] = unmasked
    guard.__dict__.update(fields, _phase=phase)


def _norms(tensors: Mapping[str, Tensor], prefix: str) -> NormValues:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _unpack_layer(guard: NullSpace, name: str, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LayerState:
    layer = guard._found.layers.get(name)
    if layer is None:
        raise NessError(
            f"the saved guard is for another model: it protects {name!r}, which this model has neither "
            "under this name nor under one with a prefix"
        )
    protected = new_state(guard, name, guard.statistics_device or layer.weight.device)
    found, expected = {key: entry[key] for key in _shape(protected)}, _shape(protected)
    if found != expected:
        raise NessError(f"the saved guard is for another model: layer {name!r} was {found}, here it is {expected}")
    at, device = f"layers/{name}", protected.anchor.device
    anchor = tensor_of(tensors, f"{at}/anchor", protected.anchor.shape)
    if entry["weights"] != fingerprint(layer.stored()) and _base(protected, entry, tensors) is None:
        check_weights(layer, entry, anchor, held="constraint" in entry or f"{at}/shared" in tensors)
    protected.moments = moments_of(protected, tensors, at, entry["count"], entry["calls"])
    if entry["pending"] is not None:
        protected.pending = moments_of(protected, tensors, f"{at}/pending", *entry["pending"])
    protected.relative = relative_of(protected, tensors, at, entry.get("relative"))
    protected.anchor = protected._kept(anchor.to(device, copy=True))  # in the dtype it had: drift counts from there
    protected.spent = tensor_of(tensors, f"{at}/spent", protected.spent.shape).clone()
    protected.merges, protected.last = int(entry["merges"]), Figures(**entry["last"])
    if "directions" in entry:
        shape = (layer.groups, layer.width, int(entry["directions"]))
        protected.directions = tensor_of(tensors, f"{at}/directions", shape).to(device, copy=True)
    if f"{at}/shared" in tensors:
        protected.shared = tensor_of(tensors, f"{at}/shared", protected.anchor.shape).to(layer.weight.device, copy=True)
    if "factors" in entry:
        left, right = (layer.groups, layer.outputs, entry["factors"]), (layer.groups, entry["factors"], layer.width)
        here = layer.weight.device
        protected.factors = Factors(
            tensor_of(tensors, f"{at}/left", left).to(here), tensor_of(tensors, f"{at}/right", right).to(here)
        )
    if "constraint" in entry:
        protected.constraint = _constraint(protected, tensors, at, entry["constraint"])
    elif f"{at}/tau" in tensors:
        raise NessError(f"the saved guard is damaged: the manifest does not list the update of {name!r}; save it again")
    return protected


def _base(protected: LayerState, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor | None:
    """[W b] under the update, where the model holds the state dict of a constrained one: W + ΔW."""
    layer = protected.layer
    if entry.get("running") != fingerprint(layer.stored()):
        return None
    key = "base" if f"layers/{layer.name}/base" in tensors else "anchor"  # where the two are equal it is kept once
    base = tensor_of(tensors, f"layers/{layer.name}/{key}", layer.stored().shape)
    if fingerprint(base) != entry["weights"]:
        raise NessError(f"the saved guard is damaged: the base of layer {layer.name!r} is another one; save it again")
    return base


def _private_part(protected: LayerState, tensors: Mapping[str, Tensor], at: str, width: int) -> PrivatePart:
    layer, device = protected.layer, protected.anchor.device
    coefficients = tensor_of(tensors, f"{at}/coefficients", (layer.groups, layer.outputs, width))
    coefficients = coefficients.to(layer.weight.device, copy=True)
    if f"{at}/directions" in tensors:
        own = tensor_of(tensors, f"{at}/directions", (layer.groups, layer.width, width))
        return PrivatePart(coefficients, own.to(device, copy=True))
    held = 0 if protected.directions is None else protected.directions.shape[-1]
    if width > held:
        raise NessError(f"the saved guard is damaged: {at} needs {width} directions, found {held}; save it again")
    return PrivatePart(coefficients)


def _constraint(protected: LayerState, tensors: Mapping[str, Tensor], at: str, entry: Mapping[str, Any]) -> Constraint:
    layer, device = protected.layer, protected.anchor.device
    groups = (layer.groups,)
    tau, sigma = (tensor_of(tensors, f"{at}/{key}", groups).to(device) for key in ("tau", "sigma"))
    unscaled = tensors[f"{at}/unscaled"].to(device)
    if "way" not in entry:
        return Constraint(int(entry["rank"]), tau, sigma, unscaled, None)
    here = layer.weight.device
    if "free" in entry:
        update: Update = _low_rank(layer, tensors, at, entry)
        return Constraint(int(entry["rank"]), tau, sigma, unscaled, update, _columns(protected, tensors, at, entry))
    basis, projector = tensors[f"{at}/basis"].to(here), None
    if entry["projector"] is not None:
        matrix = basis if entry["projector"] == "basis" else tensors[f"{at}/projector"].to(here)
        projector = Projector(entry["projector"], matrix, tensors[f"{at}/scale"].to(here))
    private = int(entry.get("private", 0))
    update = Update(layer, entry["way"], basis, projector, private)
    saved = tensor_of(tensors, f"{at}/parameter", update.parameter.shape)
    update.parameter.data.copy_(saved)
    if f"{at}/limit" in tensors:
        update.sizes, update.limit = tensors[f"{at}/sizes"].to(here), tensors[f"{at}/limit"].to(here)
    return Constraint(int(entry["rank"]), tau, sigma, unscaled, update, _columns(protected, tensors, at, entry))


def _columns(
    protected: LayerState, tensors: Mapping[str, Tensor], at: str, entry: Mapping[str, Any]
) -> PrivateColumns | None:
    layer, device, private = protected.layer, protected.anchor.device, int(entry.get("private", 0))
    if not private:
        return None
    directions = tensor_of(tensors, f"{at}/columns", (layer.groups, layer.width, private)).to(device)
    mixing = tensor_of(tensors, f"{at}/mixing", (layer.groups, private, private)).to(device)
    return PrivateColumns(directions, mixing, bool(entry.get("own", False)))


def _low_rank(layer: Layer, tensors: Mapping[str, Tensor], at: str, entry: Mapping[str, Any]) -> LowRankUpdate:
    groups, here, private = layer.groups, layer.weight.device, int(entry["private"])
    down, matrix = tensors[f"{at}/down"], tensors[f"{at}/free"].to(here)
    tensor_of(tensors, f"{at}/down", (groups, down.shape[-2], layer.fan_in))
    tensor_of(tensors, f"{at}/free", (groups, layer.fan_in, matrix.shape[-1]))
    free = Projector(entry["free"], matrix, matrix.new_ones(layer.fan_in), bool(entry["cuts"]))
    kept = tensor_of(tensors, f"{at}/kept", (groups, layer.fan_in, private)).to(here)
    update = LowRankUpdate(layer, entry["way"], free, down.to(here, copy=True), kept)
    update.parameter.data.copy_(tensor_of(tensors, f"{at}/parameter", update.parameter.shape))
    if f"{at}/limit" in tensors:
        update.sized, update.limit = tensors[f"{at}/sizes"].to(here), tensors[f"{at}/limit"].to(here)
    return update
