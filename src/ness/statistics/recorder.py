"""Recording a model's forward passes: every layer's Gram in one pass, batch by batch, all or nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ness import distributed
from ness._precision import ordinarily
from ness.errors import NessError
from ness.layers import Layer, Rows
from ness.statistics.padding import Masking, is_mapping
from ness.statistics.sums import Account, Input, Sums

Forward = Callable[[nn.Module, Any], Any]


class NotFinite(NessError):
    """A batch held NaN or Inf: the batches before it count."""


# Entries from here on have squares whose sums no Gram can hold.
LARGEST = {dtype: torch.finfo(dtype).max ** 0.5 / 2**20 for dtype in (torch.float64, torch.float32)}
READ_EVERY = 64  # passes between two looks at what the device found: a long pass over bad data does not go on for ever


@dataclass
class Staged:
    """What the pass under way has shown of one layer."""

    energy: Tensor  # Σ‖y‖², ()
    count: int = 0
    calls: int = 0


@dataclass(frozen=True)
class Pass:
    """A pass that has ended: what was booked for each layer, and whether each distinct input was finite."""

    where: str
    staged: Mapping[str, Staged]
    names: Sequence[str]  # of each input the first layer that read it
    finite: Tensor  # (inputs,), bool, on the device


class Recorder:
    """Adds forward passes to layers' accounts, each whole or not at all, without waiting for the device.

    A pass with NaN or Inf in any layer's input, and every pass after it, adds nothing: the device itself holds the flag
    that decides. The host learns of it in `check`.

    Args:
        account_of: where a layer's rows are booked.
        masking: says which rows are padding.
    """

    def __init__(self, account_of: Callable[[str], Account], masking: Masking | None = None) -> None:
        self.account_of, self.masking = account_of, masking
        self._sums = Sums()
        self.staged: dict[str, Staged] = {}
        self.unread: list[Pass] = []
        self.fine: Tensor | None = None  # (), bool: no pass so far held NaN or Inf
        self.unmasked: dict[str, str] = {}  # layers whose rows may count padding, and why
        self.ending = False  # whether a pass is being booked: one that broke off there is in some accounts alone
        self.rows = self.padding = 0  # rows that were recorded, and those that were left out

    def record(self, layer: Layer, rows: Rows, outputs: Tensor) -> None:
        """Add one forward call of one layer to the pass under way."""
        ordinarily(self._record, layer, rows, outputs)  # what is booked here is written to outside inference mode

    @torch.no_grad()
    def _record(self, layer: Layer, rows: Rows, outputs: Tensor) -> None:
        index = self._real_rows(layer, rows, outputs)
        if index is not None:
            outputs = _chosen(layer, outputs, index)
        added = energy(outputs)
        staged = self.staged.get(layer.name)
        if staged is None:
            staged = self.staged[layer.name] = Staged(added)
        else:
            staged.energy = staged.energy + added
        count = self._sums.record(layer, rows, index, self.account_of(layer.name))
        staged.count += count
        staged.calls += 1
        self.rows += count

    def _without_padding(self, layer: Layer, rows: Rows, outputs: Tensor) -> tuple[Rows, Tensor]:
        """The rows and outputs of one call that are no padding."""
        index = self._real_rows(layer, rows, outputs)
        if index is None:
            return rows, outputs
        chosen = rows.reshape(layer.groups, -1, layer.fan_in).index_select(1, index)
        return chosen, _chosen(layer, outputs, index)

    def _real_rows(self, layer: Layer, rows: Rows, outputs: Tensor) -> Tensor | None:
        """The index of the rows of one call that are no padding; None: all."""
        padding = None if self.masking is None else self.masking.now
        if padding is None or not padding.needed:
            return None
        lead = tuple(layer.by_position(outputs).shape[:-1])
        index, doubt = padding.real_rows(layer, rows, lead)
        if doubt is not None:
            self.unmasked.setdefault(layer.name, doubt)
        if index is not None:
            self.padding += torch.Size(lead).numel() - len(index)
        return index

    def check_rows(self) -> None:
        """Refuse to have been shown nothing but padding."""
        if self.padding and not self.rows:
            nothing_seen("every token is padding")

    def drop(self) -> None:
        """Forget the pass under way: it broke off."""
        self.staged = {}
        self._sums.drop()

    @torch.no_grad()
    def end(self, where: str) -> None:
        """The pass is complete: it counts if it and all before it were finite."""
        self.ending = True
        ordinarily(self._end, where)
        self.ending = False

    def _end(self, where: str) -> None:
        staged, self.staged = self.staged, {}
        if not staged:
            return
        accounts = {name: self.account_of(name) for name in staged}
        home = next(iter(staged.values())).energy.device
        distinct = self._sums.distinct()
        sizes = [one.largest().to(home, account.gram.dtype) for one, account in self._accounts(distinct, accounts)]
        finite = torch.stack(sizes) < LARGEST[sizes[0].dtype] if sizes else torch.ones(0, dtype=torch.bool, device=home)
        self.fine = finite.all() if self.fine is None else self.fine.to(home) & finite.all()
        spoilt = ~self.fine
        energies = torch.stack([part.energy.to(home) for part in staged.values()]).masked_fill(spoilt, 0)
        self._sums.end(accounts, spoilt)
        before = [account.energy for account in accounts.values()]
        added = [part.to(old.device) for part, old in zip(energies.unbind(), before, strict=True)]
        for account, part, total in zip(
            accounts.values(), staged.values(), torch._foreach_add(before, added), strict=True
        ):
            account.energy = total
            account.calls += part.calls
        self.unread.append(Pass(where, staged, list(distinct.values()), finite))
        if len(self.unread) >= READ_EVERY:
            self.check()

    @staticmethod
    def _accounts(distinct: Mapping[Input, str], accounts: Mapping[str, Account]) -> list[tuple[Input, Account]]:
        return [(one, accounts[name]) for one, name in distinct.items()]

    def check(self) -> None:
        """Wait for the device; where a pass held NaN or Inf, take back what was booked since, and say where it was."""
        unread, self.unread = self.unread, []
        if not unread:
            return
        home = unread[0].finite.device
        answers = torch.cat([one.finite.to(home) for one in unread]).tolist()
        problem = None
        for one in unread:
            found, answers = answers[: len(one.names)], answers[len(one.names) :]
            if problem is None and not all(found):
                problem = (
                    f"layer {one.names[found.index(False)]!r}: NaN or Inf in its input ({one.where}); the statistics "
                    "are those before it. Clean the data, or leave the layer out with include=: it then stays frozen"
                )
            if problem is not None:
                self._take_back(one)
        if problem is not None:
            raise NotFinite(problem)

    def _take_back(self, one: Pass) -> None:
        """Layers that share a Gram have seen the same rows in every pass, so any of them says how many."""
        grams = {id(account.gram): (account.gram, name) for name in one.staged for account in [self.account_of(name)]}
        for gram, name in grams.values():
            gram.count -= one.staged[name].count
        for name, staged in one.staged.items():
            self.account_of(name).calls -= staged.calls


def _chosen(layer: Layer, outputs: Tensor, index: Tensor) -> Tensor:
    """The outputs that belong to some rows."""
    positions = layer.by_position(outputs)
    return positions.reshape(-1, positions.shape[-1]).index_select(0, index)


def energy(outputs: Tensor) -> Tensor:
    """Σ‖y‖² in float64: norms of short stretches in the outputs' own precision, summed in float64.

    Widening all outputs first would cost more than the layer itself.
    """
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(outputs.detach(), dim=-1, dtype=dtype)
    wide = norms.flatten().to(torch.float64)
    return wide.dot(wide)


@contextmanager
def passes_of(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Every pass the caller runs inside is one to the recorder; a pass that breaks off is none.

    A model may call itself: what counts as a pass is its outermost call.
    """
    passes, errors = 0, []  # what was being handled when each call that is under way began
    thread = threading.get_ident()

    def begins(*_: Any) -> None:
        if threading.get_ident() == thread:
            errors.append(sys.exception())

    def ends(*_: Any) -> None:
        nonlocal passes
        if threading.get_ident() != thread or not errors:
            return
        if (
            sys.exception() is not errors.pop()
        ):  # the call breaks off, and every call around it unless somebody mends it
            recorder.drop()
        elif not errors:
            recorder.end(f"pass {passes}")
            passes += 1

    # before any hook that may raise, since `ends` is called whatever happens
    handles = [
        model.register_forward_pre_hook(begins, prepend=True),
        model.register_forward_hook(ends, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not passes and not recorder.staged:
        nothing_seen("no forward pass was run inside observing()")
    recorder.end("last pass")


def nothing_seen(what: str) -> None:
    """Refuse to have observed nothing: whoever asked believes that it is protected. One rank of several may."""
    if not distributed.active():
        raise NessError(f"observe: {what}, so nothing new is protected; is a generator used up, or a loader empty?")


def batches_of(batches: Any) -> Iterable[Any]:
    """Any iterable of batches; a bare tensor or a dict is one batch."""
    if isinstance(batches, Tensor) or is_mapping(batches):
        return [batches]
    if not isinstance(batches, Iterable):
        raise NessError(f"observe: found {type(batches).__name__}, expected batches: an iterable, or one tensor")
    return batches


def call_model(model: nn.Module, batch: Any, forward: Forward | None) -> Any:
    """Run the model on one batch: a tensor, (input, target), a dict of arguments, or as `forward` says."""
    batch = to_device(batch, device_of(model))
    if forward is not None:
        return forward(model, batch)
    if isinstance(batch, Tensor):
        return model(batch)
    if is_mapping(batch):
        return model(**batch)
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[0], Tensor):
        return model(batch[0])
    shape = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise NessError(
        f"a batch is a {shape}; expected a tensor, (input, target) or a dict of arguments. "
        "Pass forward=lambda model, batch: ... to say how the model is called"
    )


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors moved to a device, inside tuples, lists and dicts too."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_mapping(value):
        return {key: to_device(value[key], device) for key in value.keys()}  # noqa: SIM118
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(item, device) for item in value)
    return value
