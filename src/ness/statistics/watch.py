"""Watching a model's forward passes: every layer's rows to whoever asks, and a model left as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ness.layers import Layer, Record, Rows
from ness.statistics.padding import Masking


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
