"""Watching a model's forward passes: every layer's Gram in one pass, batch by batch, all or nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ness import distributed
from ness._precision import ordinarily
from ness.errors import NessError
from ness.layers import Layer, Record, Rows
from ness.statistics.gram import add_gram_
from ness.statistics.moments import Moments
from ness.statistics.padding import Masking, is_mapping

Forward = Callable[[nn.Module, Any], Any]


class NotFinite(NessError):
    """A batch held NaN or Inf: the batches before it count."""


READ_EVERY = 64  # passes between two looks at what the device found: a long pass over bad data does not go on for ever


@dataclass
class Staged:
    """What the pass under way has shown of one layer: its Gram so far and this pass's rows on top."""

    matrix: Tensor  # C + Xᵀ X, (groups, width, width)
    energy: Tensor  # Σ‖y‖² of this pass, ()
    count: int = 0
    calls: int = 0


@dataclass(frozen=True)
class Pass:
    """A pass that has ended: what was booked for each layer, and whether each layer's inputs were finite."""

    where: str
    rows: Mapping[str, int]
    calls: Mapping[str, int]
    finite: Tensor  # (layers,), bool, on the device


class Recorder:
    """Adds forward passes to layers' moments, each whole or not at all, without waiting for the device.

    A pass with NaN or Inf in any layer's input, and every pass after it, adds nothing: the device itself holds the flag
    that decides. The host learns of it in `check`.
    """

    def __init__(
        self, open_books: Callable[[str], Moments], dtype: torch.dtype = torch.float64, masking: Masking | None = None
    ) -> None:
        self.open_books, self.dtype, self.masking = open_books, dtype, masking
        self.unmasked: dict[str, str] = {}  # layers whose rows may count padding, and why
        self.rows = self.padding = 0  # rows that were recorded, and those that were left out
        self.staged: dict[str, Staged] = {}
        self.unread: list[Pass] = []
        self.fine: Tensor | None = None  # (), bool: no pass so far held NaN or Inf

    def record(self, layer: Layer, rows: Rows, outputs: Tensor) -> None:
        """Add one forward call of one layer to the pass under way."""
        ordinarily(self._record, layer, rows, outputs)  # what is booked here is written to outside inference mode

    @torch.no_grad()
    def _record(self, layer: Layer, rows: Rows, outputs: Tensor) -> None:
        rows, outputs = self._without_padding(layer, rows, outputs)
        books, added = self.open_books(layer.name), energy(outputs)
        staged = self.staged.get(layer.name)
        if staged is None:
            staged = self.staged[layer.name] = Staged(books.gram.matrix.clone(), added)
        else:
            staged.energy = staged.energy + added
        add_gram_(staged.matrix, rows.detach(), layer.fan_in, self.dtype)
        count = rows.numel() // (layer.groups * layer.fan_in)
        staged.count += count
        self.rows += count
        staged.calls += 1

    def _without_padding(self, layer: Layer, rows: Rows, outputs: Tensor) -> tuple[Rows, Tensor]:
        """The rows and outputs of one call that are no padding."""
        padding = None if self.masking is None else self.masking.now
        if padding is None or not padding.needed:
            return rows, outputs
        positions = layer.by_position(outputs)
        index, doubt = padding.real_rows(layer, rows, tuple(positions.shape[:-1]))
        if doubt is not None:
            self.unmasked.setdefault(layer.name, doubt)
        if index is None:
            return rows, outputs
        flat = rows.reshape(layer.groups, -1, layer.fan_in)
        self.padding += flat.shape[1] - len(index)
        return flat.index_select(1, index), positions.reshape(flat.shape[1], -1).index_select(0, index)

    def check_rows(self) -> None:
        """Refuse to have been shown nothing but padding."""
        if self.padding and not self.rows:
            nothing_seen("every token is padding")

    def drop(self) -> None:
        """Forget the pass under way: it broke off."""
        self.staged = {}

    def end(self, where: str) -> None:
        """The pass is complete: it counts if it and all before it were finite."""
        staged, self.staged = self.staged, {}
        if not staged:
            return
        home = next(iter(staged.values())).matrix.device
        # diagonals alone: an entry of x that is not finite makes its own square so, and no square takes it away
        sizes = [part.matrix.diagonal(dim1=-2, dim2=-1).sum().to(home) for part in staged.values()]
        finite = torch.stack(sizes) < torch.inf
        self.fine = finite.all() if self.fine is None else self.fine.to(home) & finite.all()
        energies = torch.where(self.fine, torch.stack([part.energy.to(home) for part in staged.values()]), 0.0)
        for (name, part), added in zip(staged.items(), energies.unbind(), strict=True):
            books = self.open_books(name)
            total = books.gram.matrix
            torch.where(self.fine.to(total.device), part.matrix, total, out=total)  # 0·NaN is NaN, so no product
            books.energy += added.to(total.device)
            books.gram.count += part.count
            books.calls += part.calls
        counts = {name: part.count for name, part in staged.items()}
        self.unread.append(Pass(where, counts, {name: part.calls for name, part in staged.items()}, finite))
        if len(self.unread) >= READ_EVERY:
            self.check()

    def check(self) -> None:
        """Wait for the device; where a pass held NaN or Inf, take back what was booked since, and say where it was."""
        unread, self.unread = self.unread, []
        if not unread:
            return
        home = unread[0].finite.device
        answers = torch.cat([one.finite.to(home) for one in unread]).tolist()
        problem = None
        for one in unread:
            found, answers = answers[: len(one.rows)], answers[len(one.rows) :]
            if problem is None and not all(found):
                name = list(one.rows)[found.index(False)]
                problem = (
                    f"layer {name!r}: NaN or Inf in its input ({one.where}); the statistics are those before it. "
                    "Clean the data, or leave the layer out with include=: it then stays frozen"
                )
            if problem is not None:
                for name, count in one.rows.items():
                    books = self.open_books(name)
                    books.gram.count -= count
                    books.calls -= one.calls[name]
        if problem is not None:
            raise NotFinite(problem)


def energy(outputs: Tensor) -> Tensor:
    """Σ‖y‖² in float64: norms of short stretches in the outputs' own precision, summed in float64.

    Widening all outputs first would cost more than the layer itself.
    """
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(outputs.detach(), dim=-1, dtype=dtype)
    wide = norms.flatten().to(torch.float64)
    return wide.dot(wide)


class FastPath:
    """Attention's fast paths, a switch of the whole process: off as long as any watch of any thread is on."""

    def __init__(self) -> None:
        self.watches, self.before = set[int](), True

    def avoid(self, watch: Watch) -> None:
        """Switch them off for this watch."""
        now = torch.backends.mha.get_fastpath_enabled()
        if not self.watches:
            self.before = now
        watch.avoids = True
        self.watches.add(id(watch))
        torch.backends.mha.set_fastpath_enabled(False)

    def allow(self, watch: Watch) -> None:
        """A watch is over: they are as they were before the first, if it was the last."""
        self.watches.discard(id(watch))
        if watch.avoids and not self.watches:
            torch.backends.mha.set_fastpath_enabled(self.before)


FAST_PATH = FastPath()


class Watch:
    """Eval mode, no autograd, every layer's rows and outputs to `record`; everything as before afterwards.

    Passes of other threads are not recorded. Attention's fast paths read weights without calling the layers; they are
    switched off meanwhile. `close` can be called at any time, and again: it puts back what there was when the watch was
    made, whatever `open` came to.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        record: Callable[[Layer, Rows, Tensor], None],
        masking: Masking | None = None,
    ) -> None:
        self.model, self.layers, self.record, self.masking = model, list(layers), record, masking
        self.thread = threading.get_ident()
        self.modes = [(module, module.training) for module in model.modules()]
        self.grad = torch.is_grad_enabled()
        hosts = dict.fromkeys([*model.modules(), *(host for layer in self.layers for host in layer.hosts)])
        self.hooks = [(host, {key for kinds in _hooks_of(host) for kind in kinds for key in kind}) for host in hosts]
        inside = dict.fromkeys(module for host in hosts for module in host.modules())
        self.parameters = [(module, dict(module._parameters)) for module in inside]
        self.handles: list[RemovableHandle] = []
        self.on, self.avoids = True, False

    def open(self) -> None:
        """Begin."""
        FAST_PATH.avoid(self)
        for layer in self.layers:
            for host in layer.hosts:
                self.handles.append(layer.watch(host, self._bound(layer)))
        if self.masking is not None:
            self.masking.follow(self.handles)
        self.model.eval()
        torch.set_grad_enabled(False)

    def close(self) -> None:
        """End."""
        if not self.on:
            return
        for handle in self.handles:
            handle.remove()
        for host, known in self.hooks:  # one whose handle was lost on the way
            remove_hooks(host, known)
        for module, held in self.parameters:  # a call with others in their place that broke off
            if any(module._parameters.get(name) is not held[name] for name in held):
                module._parameters.update(held)
        for module, mode in self.modes:
            module.training = mode
        torch.set_grad_enabled(self.grad)
        FAST_PATH.allow(self)
        self.on = False

    def _bound(self, layer: Layer) -> Record:
        def record(rows: Rows, outputs: Tensor) -> None:
            if self.on and threading.get_ident() == self.thread:
                self.record(layer, rows, outputs)

        return record


def _hooks_of(module: nn.Module) -> list[list[dict[int, Any]]]:
    """A module's forward hooks, and its hooks before the forward, by their number; then what torch notes of each."""
    after: list[dict[int, Any]] = [
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]
    before: list[dict[int, Any]] = [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs]
    return [after, before]


def remove_hooks(module: nn.Module, known: Collection[int]) -> None:
    """Take a watch's hooks out of a module, but for those with these numbers."""
    for kinds in _hooks_of(module):
        for key in {key for kind in kinds for key in kind}.difference(known):
            if key not in kinds[0] or _is_ours(kinds[0][key]):
                for kind in kinds:
                    kind.pop(key, None)


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(("ness.layers", "ness.statistics"))


@contextmanager
def watching(
    model: nn.Module, layers: Iterable[Layer], record: Callable[[Layer, Rows, Tensor], None]
) -> Iterator[None]:
    """A `Watch` for the time of a `with`."""
    watch = Watch(model, layers, record)
    try:
        watch.open()
        yield
    finally:
        watch.close()


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
