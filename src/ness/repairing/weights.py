"""Two sets of weights of one model, read and compared, and which layers of it are reshaped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.layers import AttentionOutput, Layer, layers_of
from ness.layers.names import listed, matches
from ness.repairing.lora import Lora, lora_values, loras_of
from ness.updates.install import is_constrained
from ness.verbs.observing import refuse_observed

if TYPE_CHECKING:
    from ness.repairing.measuring import Shadow


@dataclass(frozen=True)
class Pair:
    """One tensor of the model: as it was tuned, as it was before, and all its names."""

    names: tuple[str, ...]
    tuned: Tensor
    base: Tensor | None  # None: excluded, and the base does not have it
    excluded: bool = False

    @property
    def changed(self) -> bool:
        """Whether tuning moved it, bit for bit."""
        return self.base is not None and not torch.equal(self.base.to(self.tuned), self.tuned)

    def at(self, way: float) -> Tensor:
        """Its value at `way` of the way from the base (0) to the tuned weights (1)."""
        if self.base is None or way == 1:
            return self.tuned.detach()
        base = self.base.detach().to(self.tuned.device)
        if way == 0 or not self.tuned.is_floating_point():  # counters are not interpolated
            return (self.tuned.detach() if way else base).to(self.tuned.dtype)
        wide = torch.promote_types(self.tuned.dtype, torch.float32)
        return torch.lerp(base.to(wide), self.tuned.detach().to(wide), way).to(self.tuned.dtype)


@dataclass(frozen=True)
class Target:
    """One protected layer whose change is reshaped: a dense change of [W b], or the factors A of LoRA updates B A."""

    name: str
    layer: Layer  # of the shadow
    weight: str  # the first names of the tensors it is made of
    bias: str | None  # None: there is none, or tuning left it as it was
    loras: tuple[Lora, ...] = ()
    twins: tuple[str, ...] = ()  # names of layers that share all of its weights

    @property
    def width(self) -> int:
        """Columns of what is reshaped."""
        return self.layer.fan_in + (self.bias is not None)


@dataclass
class Weights:
    """Everything that the tuned and the base weights say, by the first name of each tensor."""

    pairs: dict[str, Pair]
    loras: list[Lora] = field(default_factory=list)

    def changed(self) -> list[str]:
        """First names of the tensors that tuning moved and that are not excluded."""
        return [name for name, pair in self.pairs.items() if not pair.excluded and pair.changed]

    def at(self, way: float) -> dict[str, Tensor]:
        """All values at `way` of the way from the base to the tuned weights; tensors that are equal are the tuned."""
        return {name: pair.at(way) for name, pair in self.pairs.items() if pair.base is not None and pair.changed}


# -- reading and checking ----------------------------------------------------------------------------------------------


def read_weights(tuned: nn.Module, base: Any, exclude: Sequence[str]) -> Weights:
    """Pair the tensors of a tuned model with those of its base; refused whole where they do not fit.

    Args:
        tuned: the model.
        base: the model before, its state dict, or a folder or file of safetensors; None for a model with adapters.
        exclude: names, prefixes or patterns of what is not compared, and kept as tuned.
    """
    _check_model(tuned, "tuned")
    refuse_observed(tuned, "repair")
    loras = loras_of(tuned)
    before = dict(_base_tensors(base, loras, tuned))
    now: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in tuned.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            now.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    known = [name for names in now.values() for name in names]
    _check_patterns(exclude, [*known, *dict(tuned.named_modules()), *before])
    if not loras and base is None:
        raise NessError(
            "repair(base=None): the model has no adapter that could be taken off; pass the model before it was tuned, "
            "its state dict, or its folder"
        )
    if loras and base is not None:
        before = lora_values(tuned, before, known)
    pairs, missing = {}, []
    for key, names in now.items():
        excluded = any(matches(name, pattern) for name in names for pattern in exclude)
        there = [before[name] for name in names if name in before]
        if not there and not excluded:
            missing.append(names[0])
        value = there[0] if there else None
        if value is not None and value.shape != tensors[key].shape:
            if not excluded:
                raise NessError(
                    f"{names[0]!r} is {tuple(tensors[key].shape)} in the tuned model and {tuple(value.shape)} in the "
                    "base; both must be of one architecture. Pass the base it was tuned from, or exclude=[...] "
                    "what was replaced"
                )
            value = None
        pairs[names[0]] = Pair(tuple(names), tensors[key], value, excluded)
    _refuse_strangers(missing, before, known, exclude)
    weights = Weights(pairs, loras)
    _check_values(weights)
    return weights


def _check_model(model: Any, what: str) -> None:
    if not isinstance(model, nn.Module):
        raise NessError(f"repair({what}): found {type(model).__name__}, expected a torch.nn.Module")
    kind = type(model).__name__
    if kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "OptimizedModule"):
        raise NessError(f"repair({what}): found a {kind}; pass the plain model inside it")
    if any(is_constrained(module) for module in model.modules()):
        raise NessError(f"repair({what}): the model is constrained by a guard; call merge() or discard() first")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise NessError(f"repair({what}): {name!r} has no shape yet; run one batch through the model first")
        if value.is_meta:
            raise NessError(f"repair({what}): {name!r} is on the meta device (offloaded?); load the model whole")
        integral = isinstance(value, nn.Parameter) and not value.is_floating_point() and not value.is_complex()
        if integral or "float8" in str(value.dtype) or value.is_quantized:
            raise NessError(
                f"repair({what}): {name!r} is quantised ({value.dtype}), and a repaired weight has no place there; "
                "load the model in bfloat16 or float32 (or dequantise it). An adapter trained over a quantised base "
                "can be repaired over the unquantised one, and used over either"
            )


def _base_tensors(base: Any, loras: Sequence[Lora], tuned: nn.Module) -> Mapping[str, Tensor]:
    """The base's tensors by name."""
    if base is None:
        return lora_values(tuned, None, ()) if loras else {}
    if base is tuned:
        raise NessError("repair: base is the tuned model itself; pass the model as it was before tuning")
    if isinstance(base, nn.Module):
        _check_model(base, "base")
        return {name: value for name, value in base.state_dict().items() if isinstance(value, Tensor)}
    if isinstance(base, (str, Path)):
        return read_folder(Path(base))
    if not isinstance(base, Mapping):
        raise NessError(
            f"repair(base): found {type(base).__name__}, expected the model before tuning, its state dict, or a folder "
            "or file of safetensors"
        )
    found = {name: value for name, value in base.items() if isinstance(name, str) and isinstance(value, Tensor)}
    for name, value in found.items():
        if not value.is_floating_point() and value.dtype in (torch.int8, torch.uint8):
            raise NessError(
                f"repair(base): {name!r} is quantised ({value.dtype}), so what tuning changed is not known; pass the "
                "base in bfloat16 or float32"
            )
    return found


def read_folder(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of every such file of a folder."""
    from ness.storage.folder import read_tensors

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not path.exists():
        raise NessError(f"repair(base): no safetensors in {path}; expected a model's folder or a .safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(read_tensors(file)[0])
    return tensors


def _check_patterns(patterns: Sequence[str], names: Iterable[str]) -> None:
    names = [name for name in names if name]
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:5]
            raise NessError(f"exclude={pattern!r} matches nothing in either model; near names: {listed(near)}")


def _refuse_strangers(
    missing: Sequence[str], before: Mapping[str, Tensor], known: Sequence[str], exclude: Sequence[str]
) -> None:
    there = set(known)
    extra = [name for name in before if name not in there and not any(matches(name, p) for p in exclude)]
    if not missing and not extra:
        return
    if not there & set(before):
        raise NessError(
            f"the tuned model and the base have no tensor in common ({listed(missing)} against {listed(extra)}); pass "
            "the base that it was tuned from, under the same names"
        )
    parts = []
    if missing:
        parts.append(f"the base has no {listed([repr(name) for name in missing])}")
    if extra:
        parts.append(f"the tuned model has no {listed([repr(name) for name in extra])}")
    raise NessError(
        f"{' and '.join(parts)}; both must be of one architecture. Exclude what was added or removed, e.g. "
        f"exclude=[{(missing or extra)[0].rsplit('.', 1)[0]!r}]: it is then kept as tuned"
    )


def _check_values(weights: Weights) -> None:
    for name, pair in weights.pairs.items():
        for what, value in (("tuned", pair.tuned), ("base", pair.base)):
            if value is None or pair.excluded or not value.is_floating_point():
                continue
            if not bool(torch.isfinite(value).all()):
                raise NessError(f"{name!r} holds NaN or Inf in the {what} weights; repair needs finite weights")
    if not weights.changed():
        raise NessError("the tuned model and the base are equal, bit for bit; there is nothing to repair")


# -- what is reshaped --------------------------------------------------------------------------------------------------


def find_targets(shadow: Shadow, include: Sequence[str]) -> tuple[list[Target], dict[str, str]]:
    """The protected layers whose weights changed, and those that changed and are none, each with the reason."""
    weights, model = shadow.weights, shadow.model
    shadow.put({})
    changed = set(weights.changed())
    first = {id(pair.tuned): name for name, pair in weights.pairs.items()}
    modules = dict(model.named_modules())
    layers = _layers(modules)
    owners: dict[int, set[int]] = {}
    for module in modules.values():
        for value in module._parameters.values():
            if value is not None:
                owners.setdefault(id(value), set()).add(id(module))
    adapted: dict[str, list[Lora]] = {}
    for lora in weights.loras:
        adapted.setdefault(lora.layer, []).append(lora)
    inside = tuple(f"{lora.module}." for lora in weights.loras)
    targets: list[Target] = []
    reasons: dict[str, str] = {}
    by_weight: dict[tuple[int, int | None], Layer] = {}
    twins: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if name in adapted:
            targets.append(Target(adapted[name][0].module, layer, first[id(layer.weight)], None, tuple(adapted[name])))
            continue
        if inside and f"{name}.".startswith(inside):
            continue
        weight = first.get(id(layer.weight))
        bias = None if layer.bias is None else first.get(id(layer.bias))
        if weight is None or not ({weight, bias} & changed):
            continue
        start = None if layer.weight_part is None else layer.weight_part.start
        twin = by_weight.get((id(layer.weight), start))
        if twin is not None and type(twin) is type(layer) and twin.bias is layer.bias:
            twin.join(layer)
            twins.setdefault(twin.name, []).append(name)
            continue
        by_weight[id(layer.weight), start] = layer
        bias = bias if bias in changed and _part_changed(layer, weights.pairs[bias]) else None
        if bias is None and not _part_changed(layer, weights.pairs[weight], of_bias=False):
            continue  # q of attention whose k alone was tuned
        if include and not any(matches(name, pattern) for pattern in include):
            reasons |= {part: "not in include" for part in (weight, bias) if part is not None}
            continue
        targets.append(Target(name, layer, weight, bias))
    targets = [replace(target, twins=tuple(twins.get(target.layer.name, ()))) for target in targets]
    targets, shared = _without_foreign_ties(targets, owners)
    return targets, reasons | shared


def _layers(modules: Mapping[str, nn.Module]) -> dict[str, Layer]:
    layers: dict[str, Layer] = {}
    claimed: set[int] = set()  # out-projections, which their attention speaks for
    for name, module in modules.items():
        if id(module) in claimed:
            continue
        found = layers_of(name, module)
        claimed.update(id(layer.module) for layer in found if isinstance(layer, AttentionOutput))
        layers.update({layer.name: layer for layer in found})
    return layers


def _part_changed(layer: Layer, pair: Pair, of_bias: bool = True) -> bool:
    assert pair.base is not None
    part = layer.bias_part if of_bias else layer.weight_part
    base = pair.base.to(pair.tuned)
    return not torch.equal(base, pair.tuned) if part is None else not torch.equal(base[part], pair.tuned[part])


def _without_foreign_ties(targets: list[Target], owners: Mapping[int, set[int]]) -> tuple[list[Target], dict[str, str]]:
    """Layers whose weight another kind of module reads too are no targets: a head that is tied to its embedding."""
    kept, shared = [], {}
    for target in targets:
        own = {id(module) for module in target.layer.modules}
        if target.loras or owners[id(target.layer.weight)] <= own:
            kept.append(target)
        else:
            shared[target.weight] = "tied to a module of another kind"
            if target.bias is not None:
                shared[target.bias] = "its layer's weight is tied to a module of another kind"
    return kept, shared


def matrices(target: Target, weights: Weights, values: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """[W_b b_b] and D of a dense target, (groups, o, width) in float64; D for `values` instead of the tuned ones.

    Without a changed bias both are of the weight alone.
    """
    values = values or {}
    layer, pair = target.layer, weights.pairs[target.weight]
    assert pair.base is not None
    bias = None if target.bias is None else weights.pairs[target.bias]
    if bias is not None:
        assert bias.base is not None
    now = layer.joint(
        values.get(target.weight, pair.tuned).detach().to(torch.float64),
        None if bias is None else values.get(str(target.bias), bias.tuned).detach().to(torch.float64),
    )
    before = layer.joint(
        pair.base.to(now.device, torch.float64),
        None if bias is None or bias.base is None else bias.base.to(now.device, torch.float64),
    )
    return before, now - before
