"""Sums of Xᵀ X over passes: one Gram a distinct input, each pass whole or not at all.

q, k and v read the same tensor. Layers whose inputs were the same tensors in every pass so far have one Gram; where
they part, each goes its own way. A pass under way is held as its inputs, or, where those are larger than that, as one
partial sum; nothing that was there before is copied for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ness.layers import Layer, Rows
from ness.statistics.gram import Gram

REMEMBERED = 1 << 26  # bytes of the layers' own input tensors that are held so that they are known again


class Account(Protocol):
    """Where a layer's rows are booked; what is in it is replaced, never written to."""

    gram: Gram
    energy: Tensor
    calls: int


@dataclass(eq=False)
class Input:
    """One distinct input of a pass: its rows as they came, or their Xᵀ X where that is smaller."""

    layer: Layer  # the first that read it
    count: int = 0
    held: Tensor | None = None  # (groups, n, d), a copy: what comes after a layer may write into its input
    partial: Gram | None = None

    def largest(self) -> Tensor:
        """The largest entry in size (), NaN where one is: what says whether all are finite."""
        if self.held is not None:
            return self.held.abs().amax()
        assert self.partial is not None
        largest = self.partial.diagonal().amax()
        return largest if self.partial.dtype == torch.float64 else largest.sqrt()  # there too finite is small enough

    def equals(self, rows: Rows, index: Tensor | None) -> bool:
        """Whether these are the rows that are held: tensors of inference mode do not say when they are written to."""
        return self.held is not None and index is None and torch.equal(self.held, rows.reshape(self.held.shape))

    def add_to(self, gram: Gram, spoilt: Tensor) -> None:
        """C += Xᵀ X, unless the pass is `spoilt`."""
        if self.held is not None:
            gram.add_rows_(self.held, self.layer.fan_in, spoilt)
        elif self.partial is not None:
            gram.add_(self.partial, spoilt=spoilt)


@dataclass(eq=False)
class Shared:
    """One Gram of one or several layers."""

    gram: Gram  # in no other's hands
    members: set[str]


@dataclass
class Sums:
    """The Grams of a session, by layer."""

    shared: dict[str, Shared] = field(default_factory=dict)
    inputs: dict[tuple[object, ...], Input] = field(default_factory=dict)  # of the pass under way, by identity
    read: dict[str, list[Input]] = field(default_factory=dict)  # what each layer has read in it, in order
    recent: dict[tuple[object, ...], Tensor] = field(default_factory=dict)  # a tensor that is held keeps its address

    def record(self, layer: Layer, rows: Rows, index: Tensor | None, account: Account) -> int:
        """Add one call of a layer to the pass under way; returns how many rows it was.

        Args:
            layer: the layer.
            rows: as the layer read them.
            index: which of them count; None: all.
            account: the layer's.
        """
        key = identity(layer, rows, index)
        known = self.inputs.get(key) if key in self.recent else None
        if known is None or (rows.is_inference() and not known.equals(rows, index)):
            known = self.inputs[key] = self._taken(layer, rows, index, account.gram)
        self._remember(key, rows)
        self.read.setdefault(layer.name, []).append(known)
        return known.count

    def _taken(self, layer: Layer, rows: Rows, index: Tensor | None, gram: Gram) -> Input:
        count = rows.numel() // (layer.groups * layer.fan_in) if index is None else len(index)
        taken = Input(layer, count)
        if count == 0:
            return taken
        if index is not None:
            taken.held = rows.reshape(layer.groups, -1, layer.fan_in).index_select(1, index)
        elif count < layer.width:
            taken.held = rows.detach().clone().reshape(layer.groups, -1, layer.fan_in)
        if count >= layer.width:
            device = rows.device if gram.folder is None else gram.device
            taken.partial = Gram.zeros(layer.groups, layer.width, device, gram.dtype)
            taken.partial.add_rows_(rows.detach() if taken.held is None else taken.held, layer.fan_in)
            taken.held = None
        return taken

    def _remember(self, key: tuple[object, ...], rows: Tensor) -> None:
        self.recent.pop(key, None)
        self.recent[key] = rows
        size = sum(one.untyped_storage().nbytes() for one in self.recent.values()) if len(self.recent) > 1 else 0
        while size > REMEMBERED and len(self.recent) > 1:
            oldest = self.recent.pop(next(iter(self.recent)))
            size -= oldest.untyped_storage().nbytes()

    def drop(self) -> None:
        """Forget the pass under way: it broke off."""
        self.inputs, self.read, self.recent = {}, {}, {}

    def distinct(self) -> dict[Input, str]:
        """The inputs of the pass under way that have rows, each with the first layer that read it."""
        return {one: one.layer.name for one in self.inputs.values() if one.count}

    def end(self, accounts: Mapping[str, Account], spoilt: Tensor) -> None:
        """The pass under way is complete: add it, unless it is `spoilt`, a Gram at a time."""
        read = self.read
        self.drop()
        for shared, inputs in self._regrouped(read, accounts):
            for one in inputs:
                one.add_to(shared.gram, spoilt)
            shared.gram.count += sum(one.count for one in inputs)
            for name in shared.members:
                accounts[name].gram = shared.gram

    def _regrouped(
        self, read: Mapping[str, list[Input]], accounts: Mapping[str, Account]
    ) -> list[tuple[Shared, tuple[Input, ...]]]:
        """Who shares a Gram from this pass on: layers that did before and have read the same inputs now."""
        classes: dict[tuple[object, ...], list[str]] = {}
        for name, inputs in read.items():
            before = self.shared.get(name)
            start = origin(accounts[name].gram) if before is None else (id(before),)
            classes.setdefault((*start, *(id(one) for one in inputs)), []).append(name)
        found = []
        for names in classes.values():
            before = self.shared.get(names[0])
            if before is None:  # the guard's own stays as it is
                after = Shared(accounts[names[0]].gram.copy(), set(names))
            elif len(before.members) == len(names):
                after = before
            else:
                after = Shared(before.gram.copy(), set(names))
                before.members -= after.members
            self.shared.update(dict.fromkeys(names, after))
            found.append((after, tuple(read[names[0]])))
        return found


def identity(layer: Layer, rows: Tensor, index: Tensor | None) -> tuple[object, ...]:
    """What two calls have in common whose rows are the same tensor, in the same state and by the same mask."""
    version = -1 if rows.is_inference() else rows._version
    place = rows.data_ptr(), tuple(rows.shape), rows.stride(), rows.dtype, rows.device, version
    return *place, None if index is None else id(index), layer.groups, layer.fan_in, layer.width


def origin(gram: Gram) -> tuple[object, ...]:
    """What two Grams have in common that are the same one, or both of no rows."""
    if gram.count or gram.kept is not None:
        return ("old", id(gram))
    return "none", gram.groups, gram.width, gram.device, gram.dtype, gram.folder
