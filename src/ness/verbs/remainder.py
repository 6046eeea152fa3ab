"""The rest of a model: all that no protected layer holds, as it was when the model was last observed.

A protected layer has an anchor of its own (`ness.updates.layer_state`). Everything else that can move an output
(excluded modules, embeddings, norms, bare parameters, buffers such as running statistics) is copied to the CPU when an
observe ends, so that `NullSpace.compare` can put it back for a pass. What has not changed since the last copy is not
copied again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ness.distributed import gathered
from ness.errors import NessError
from ness.layers import Layer
from ness.storage.folder import fingerprint
from ness.updates.install import PREFIX, is_constrained

SMALL = 2**20  # bytes; on a GPU tensors up to this size are fetched in one go, larger ones where they were written to
ADDED = "added since the last observe"
GONE = "gone since the last observe"
RESHAPED = "of another shape since the last observe"
UNKNOWN = "changed between save and load"

Swap = tuple[Tensor, Tensor]  # a tensor of the model, and the value it had


class Kept:
    """One tensor as it was: its value on the CPU, or None where it is not known any more."""

    def __init__(self, value: Tensor | None) -> None:
        self.value = value
        self._fingerprint: str | None = None

    @property
    def fingerprint(self) -> str | None:
        """A hash of the value, computed once: values are never written to."""
        if self._fingerprint is None and self.value is not None:
            self._fingerprint = fingerprint(self.value)
        return self._fingerprint


class Remainder:
    """Everything outside the protected layers by name; a tensor with several names is kept once.

    It never changes: `renewed` returns the next one.
    """

    def __init__(self, kept: Mapping[str, Kept] | None = None, task: str | None = None) -> None:
        self.kept = dict(kept or {})
        self.task = task  # the task that was in use: norms are as it has them
        self._stamps: dict[str, tuple[weakref.ref[Tensor], int, int]] = {}  # of large tensors on other devices

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.kept, "task": self.task, "_stamps": {}}  # weak references cannot be pickled

    def __deepcopy__(self, memo: dict[int, Any]) -> Remainder:
        """Values are never written to, so copies of a guard share them."""
        return Remainder(self.kept, self.task)

    # -- taking it --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def renewed(self, model: nn.Module, layers: Iterable[Layer], task: str) -> Remainder:
        """The rest as it is now.

        Args:
            model: the observed model, not constrained.
            layers: its protected layers.
            task: the task in use.

        Returns:
            A new `Remainder`, which shares the copies of all tensors that are still equal with this one.
        """
        held = _held_by(layers)
        rest = {name: tensor for name, tensor in tensors_of(model) if id(tensor) not in held}
        by_id = {id(tensor): (name, tensor) for name, tensor in reversed(rest.items())}
        fresh = Remainder(task=task)
        far = {name: tensor for name, tensor in by_id.values() if tensor.device.type != "cpu"}
        fetched = fetch({name: tensor for name, tensor in far.items() if tensor.nbytes <= SMALL})
        copies: dict[int, Kept] = {}
        for name, tensor in by_id.values():
            old, stamp = self.kept.get(name), _stamp(tensor)
            if name in far and name not in fetched:
                known = self._stamps.get(name)
                unwritten = known is not None and known[0]() is tensor and known[1:] == stamp
                copies[id(tensor)] = old if old is not None and unwritten else Kept(tensor.detach().cpu())
                if stamp is not None:
                    fresh._stamps[name] = (weakref.ref(tensor), *stamp)
                continue
            value = fetched.get(name, tensor)
            equal = old is not None and old.value is not None and same_bits(value, old.value)
            copies[id(tensor)] = old if equal and old is not None else Kept(_copy(value))
        fresh.kept = {name: copies[id(tensor)] for name, tensor in rest.items()}
        return fresh

    # -- comparing with it ------------------------------------------------------------------------------------------

    def differences(
        self, model: nn.Module, layers: Iterable[Layer], instead: Mapping[str, Tensor]
    ) -> tuple[list[Swap], dict[str, str]]:
        """What is no longer as it was.

        Args:
            model: the model, constrained or not.
            layers: its protected layers.
            instead: values that count as "as it was" in place of those kept: the norms of another task.

        Returns:
            Tensors of the model that differ, each with its old value on its device; and the names of those whose old
            value is not known, each with the reason.
        """
        held = _held_by(layers)
        live = {name: tensor for name, tensor in tensors_of(model) if id(tensor) not in held}
        swaps: dict[int, Swap] = {}
        unknown = {name: GONE for name in self.kept if name not in live}
        for name, tensor in live.items():
            value = self._value(name) if name not in instead else instead[name]
            if value is None:
                unknown[name] = UNKNOWN if name in self.kept else ADDED
            elif value.shape != tensor.shape:
                unknown[name] = RESHAPED
            elif not same_bits(tensor, value):
                swaps[id(tensor)] = tensor, value.to(tensor.device)
        return list(swaps.values()), unknown

    def _value(self, name: str) -> Tensor | None:
        return self.kept[name].value if name in self.kept else None

    # -- saving it --------------------------------------------------------------------------------------------------

    def pack(self, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Add to `tensors` what the model no longer holds; returns the description of the whole as plain JSON."""
        live, by_value = dict(tensors_of(model)), dict[int, list[str]]()
        for name, kept in self.kept.items():
            by_value.setdefault(id(kept), []).append(name)
        entries = []
        for number, names in enumerate(by_value.values()):
            kept = self.kept[names[0]]
            entry = {"names": names, "fingerprint": kept.fingerprint, "stored": False}
            if kept.value is not None and not all(n in live and same_bits(live[n], kept.value) for n in names):
                entry["stored"] = True
                tensors[f"rest/{number}"] = kept.value
            entries.append(entry)
        return {"task": self.task, "entries": entries}

    @classmethod
    def unpack(cls, model: nn.Module, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any] | None) -> Remainder:
        """What `pack` described: from `tensors`, or from the model where it still has that very value."""
        if manifest is None:  # written before it was kept: everything counts as added
            return cls()
        live, kept = dict(tensors_of(model)), dict[str, Kept]()
        for number, entry in enumerate(manifest["entries"]):
            names = [str(name) for name in entry["names"]]
            value: Tensor | None
            if entry["stored"]:
                key = f"rest/{number}"
                if key not in tensors:
                    raise NessError(f"the saved guard is damaged: {key} is missing; save it again")
                value = tensors[key].detach().to("cpu", copy=True)
            else:
                found = next((live[name] for name in names if name in live), None)
                value = None if found is None or entry["fingerprint"] is None else _copy(found)
            one = Kept(value)
            if one.fingerprint != entry["fingerprint"]:
                one = Kept(None)
            kept |= dict.fromkeys(names, one)
        return cls(kept, manifest["task"])


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all parameters and buffers that have values; updates in training are left out."""
    for prefix, module in model.named_modules():
        updates = is_constrained(module)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or tensor.is_meta or (updates and key.startswith(PREFIX)):
                continue
            yield (f"{prefix}.{key}" if prefix else key), tensor


def unprotected(model: nn.Module, layers: Iterable[Layer]) -> dict[str, int]:
    """Names and sizes of all trainable parameters that none of these layers holds; updates in training are left out.

    A parameter with several names is listed once, under the first.

    >>> unprotected(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), [])
    {'0.weight': 6, '0.bias': 2, '1.weight': 2, '1.bias': 2}
    """
    known, found = _held_by(layers), dict[str, int]()
    for prefix, module in model.named_modules():
        updates = is_constrained(module)
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in known or (updates and key.startswith(PREFIX)):
                continue
            known.add(id(parameter))
            if parameter.requires_grad:
                found[f"{prefix}.{key}" if prefix else key] = parameter.numel()
    return found


def fetch(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, those of one device in one transfer.

    >>> fetch({"a": torch.ones(2), "b": torch.tensor(True)})
    {'a': tensor([1., 1.]), 'b': tensor(True)}
    """
    by_device: dict[torch.device, list[str]] = {}
    for name in sorted(tensors, key=lambda name: -tensors[name].itemsize):  # so that each part is aligned
        by_device.setdefault(tensors[name].device, []).append(name)
    found = {}
    for names in by_device.values():
        together = torch.cat([_bytes(tensors[name]) for name in names]).cpu()
        parts = torch.split(together, [tensors[name].nbytes for name in names])
        for name, part in zip(names, parts, strict=True):
            like = tensors[name]
            found[name] = part.view(like.dtype).reshape(like.shape).clone()
    return {name: found[name] for name in tensors}


def same_bits(tensor: Tensor, value: Tensor) -> bool:
    """Whether two tensors, on whatever devices, have equal shapes, dtypes and bits (NaN equals itself)."""
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        return False
    first, second = _bytes(tensor), _bytes(value.to(tensor.device))
    if all(x.numel() % 8 == 0 and x.storage_offset() % 8 == 0 for x in (first, second)):
        first, second = first.view(torch.int64), second.view(torch.int64)  # the fewer elements the faster
    return torch.equal(first, second)


def write_all(swaps: Sequence[Swap]) -> None:
    """Write each value into its tensor, past autograd and its version counters."""
    for tensor, value in swaps:
        torch.inference_mode(tensor.is_inference())(_write)(tensor, value)


def _write(tensor: Tensor, value: Tensor) -> None:
    tensor.data.copy_(value)


def _bytes(tensor: Tensor) -> Tensor:
    return gathered(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _stamp(tensor: Tensor) -> tuple[int, int] | None:
    """What changes when a tensor is written to in place; None for tensors of inference mode, which do not say."""
    return None if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def _held_by(layers: Iterable[Layer]) -> set[int]:
    """Ids of the parameters that protected layers hold whole; of a stacked one all parts must be protected."""
    parts: dict[int, int] = {}
    whole: dict[int, int] = {}
    for layer in layers:
        for parameter, part in ((layer.weight, layer.weight_part), (layer.bias, layer.bias_part)):
            if parameter is not None:
                rows = len(parameter) if part is None else part.stop - part.start
                parts[id(parameter)] = parts.get(id(parameter), 0) + rows
                whole[id(parameter)] = len(parameter)
    return {key for key, rows in parts.items() if rows >= whole[key]}
