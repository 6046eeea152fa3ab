"""Changes of model and guard that happen whole or not at all, wherever an error or Ctrl-C comes in between.

A verb plans first: it computes new weights and new layer states and touches nothing. Then a `Change` takes a snapshot
of what it is about to touch, writes, and replaces the guard's fields in one assignment: from there on it has happened.
Whatever breaks off before puts the snapshot back. Ctrl-C is held back over these few lines and delivered after them.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from ness._precision import ordinarily
from ness.updates.install import BEFORE, UPDATES
from ness.updates.loading import arrange_checks
from ness.updates.optimizers import OptimizerWatch
from ness.verbs.remainder import Swap, write_all

if TYPE_CHECKING:
    from ness.guard import NullSpace

P = ParamSpec("P")
Result = TypeVar("Result")

WATCHING = ("_watch_optimizers", "_hold")  # fields of a guard that look on while it constrains


class Snapshot:
    """A model as it is: its modules' classes and parameters, what is trainable, gradients, and some tensors' values."""

    def __init__(self, modules: Iterable[nn.Module], tensors: Iterable[Tensor]) -> None:
        self.modules = [
            (
                module,
                type(module),
                dict(module._parameters),
                {key: module.__dict__.get(key) for key in (UPDATES, BEFORE)},
            )
            for module in dict.fromkeys(modules)
        ]
        parameters = dict.fromkeys(p for _, _, held, _ in self.modules for p in held.values() if p is not None)
        self.parameters = [(p, p.requires_grad, p.grad) for p in parameters]
        self.values = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Put everything back; what has not changed is left alone, and a second time changes nothing."""
        for module, kind, parameters, notes in self.modules:
            module.__dict__.update({key: note for key, note in notes.items() if note is not None})
            if type(module) is not kind:
                module.__class__ = kind
            if not _same(module._parameters, parameters):
                module._parameters.clear()
                module._parameters.update(parameters)
            for key in [key for key, note in notes.items() if note is None]:
                module.__dict__.pop(key, None)
        for parameter, flag, gradient in self.parameters:
            parameter.requires_grad_(flag)
            parameter.grad = gradient
        write_all(self.values)


def _same(held: Mapping[str, nn.Parameter | None], known: Mapping[str, nn.Parameter | None]) -> bool:
    return list(held) == list(known) and all(held[name] is known[name] for name in known)


class Change:
    """One step from a state of model and guard to the next.

    Args:
        guard: the guard.
        writes: tensors of the model, each with its new value.
        arrange: rearranges the model's modules.
        after: the guard's new fields; `_protected` is always among them. None: the change is for a while only.
        modules: modules that are touched besides the model's own.
    """

    def __init__(
        self,
        guard: NullSpace,
        writes: Sequence[Swap],
        arrange: Callable[[], None],
        after: Mapping[str, Any] | None,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        self.guard, self.writes, self.arrange = guard, writes, arrange
        self.thread = threading.current_thread()
        self.after = None if after is None else {**dict.fromkeys(WATCHING), **after, "_unfinished": None}
        self.begins = [None if after is None else after.get(key) for key in WATCHING]
        self.ends = [None if after is None else guard.__dict__[key] for key in WATCHING]
        self.before = Snapshot((*guard.model.modules(), *modules), (tensor for tensor, _ in writes))

    @property
    def happened(self) -> bool:
        """Whether the guard has its new fields."""
        return self.after is not None and self.guard._protected is self.after["_protected"]

    def apply(self) -> None:
        """Do it, or leave everything as it was and pass the error on."""
        guard, after = self.guard, self.after
        try:
            guard._unfinished = self
            write_all(self.writes)
            self.arrange()
            for watch in self.begins:
                if isinstance(watch, OptimizerWatch):
                    watch.start()
            if after is not None:
                guard.__dict__.update(after)  # now it has happened
                self.settle()
        except BaseException:
            self.settle()
            raise

    def settle(self) -> None:
        """Whatever broke off: finish what has happened, undo what has not."""
        happened = self.happened
        if not happened:
            self.before.restore()
            arrange_checks(self.guard.model)
        for watch in self.ends if happened else self.begins:
            if watch is not None:
                watch.remove()
        self.guard._unfinished = None


def carry_out(
    guard: NullSpace,
    writes: Sequence[Swap],
    arrange: Callable[[], None],
    after: Mapping[str, Any],
    modules: Iterable[nn.Module] = (),
) -> None:
    """Make a `Change` of these and apply it; Ctrl-C waits until it is done."""
    uninterrupted(Change(guard, writes, arrange, after, modules).apply)


def in_one_step(
    model: nn.Module, modules: Iterable[nn.Module], writes: Sequence[Swap], arrange: Callable[[], None]
) -> None:
    """The same for a model without a guard: write and rearrange, or leave all as it was; Ctrl-C waits."""
    before = Snapshot(modules, (tensor for tensor, _ in writes))

    def apply() -> None:
        try:
            write_all(writes)
            arrange()
        except BaseException:
            before.restore()
            arrange_checks(model)
            raise

    uninterrupted(apply)


def uninterrupted(work: Callable[[], None]) -> None:
    """Run `work`; a Ctrl-C that comes meanwhile is delivered when it has ended.

    Signals are Python's main thread's affair: elsewhere, and where the handler is not Python's, nothing is held back.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        work()
        return
    handler, came = signal.getsignal(signal.SIGINT), list[int]()
    try:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        work()
        signal.signal(signal.SIGINT, handler)
    except BaseException:  # no `finally`: an error on its first line would pass over the rest
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
        raise
    if came:
        signal.raise_signal(signal.SIGINT)


class Switches:
    """What torch keeps for the thread or the process, as it is: an interrupt can pass over a `with` that turned it."""

    def __init__(self) -> None:
        self.grad, self.threads = torch.is_grad_enabled(), torch.get_num_threads()
        self.products, self.convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        self.autocast = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}

    def restore(self) -> None:
        """All as it was."""
        torch.set_grad_enabled(self.grad)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if torch.get_float32_matmul_precision() != self.products:
            torch.set_float32_matmul_precision(self.products)
        if torch.backends.cudnn.allow_tf32 != self.convolutions:
            torch.backends.cudnn.allow_tf32 = self.convolutions
        for kind, enabled in self.autocast.items():
            torch.set_autocast_enabled(kind, enabled)


class Around(Switches):
    """What a verb must leave as it was if it breaks off: switches of the thread or process, and what is under way."""

    def __init__(self, guard: NullSpace) -> None:
        super().__init__()
        self.guard, self.observation = guard, guard._observation

    def settle(self) -> None:
        """Finish or undo a change that was broken off, and end an observation that began inside.

        What another thread does is left alone.
        """
        change, watched, me = self.guard._unfinished, self.guard._observation, threading.current_thread()
        if change is not None and (change.thread is me or not change.thread.is_alive()):
            uninterrupted(change.settle)
        if watched is not None and watched is not self.observation and watched.claim.thread is me:
            watched.abort()

    def restore(self) -> None:
        """All as it was."""
        self.settle()
        super().restore()


def whole(
    verb: Callable[Concatenate[NullSpace, P], Result],
) -> Callable[Concatenate[NullSpace, P], Result]:
    """A verb of the guard that leaves nothing half-done and nothing switched, and makes ordinary tensors."""

    @functools.wraps(verb)
    def run(guard: NullSpace, *args: P.args, **kwargs: P.kwargs) -> Result:
        around = Around(guard)
        try:
            around.settle()
            return ordinarily(verb, guard, *args, **kwargs)
        except BaseException:
            around.restore()
            raise

    return run  # type: ignore[return-value]
