"""How an epoch's steps are carried out: one after another from Python, or replayed from a captured CUDA graph.

Both call the very same `Step`. Captured, its inputs are read from buffers at a counter that lives on the GPU, so that
a replay is all the host does for a step, and nothing is read back before the epoch is over.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ness.lab.gpu.coroutines import pause
from ness.lab.training.loader import Clock
from ness.lab.training.step import Inputs, Step
from ness.lab.training.task_training import TaskTrainer, Tensors, copies, copy_into


class Runner(Protocol):
    """Carries out what does not need the host: an epoch of steps, an evaluation."""

    def steps(self, learning: TaskTrainer, inputs: Sequence[Inputs]) -> Tensor:
        """The mean loss of an epoch's steps, on the device."""

    def evaluation(self, learning: TaskTrainer, work: Callable[[], Tensor]) -> Tensor:
        """What `work` computes at the end of every epoch of a task, on the device."""


class Graph(Protocol):
    """Work that was recorded, to be done again."""

    def replay(self) -> None:
        """Put the work on the device."""


class PlainRunner:
    """Step after step, as Python reads it: what the CPU does, and the measure of every other way."""

    def steps(self, learning: TaskTrainer, inputs: Sequence[Inputs]) -> Tensor:
        """Run every step."""
        loss = torch.zeros((), device=learning.context.device)
        for each in inputs:
            loss += learning.step(each)
        return loss / len(inputs)

    def evaluation(self, learning: TaskTrainer, work: Callable[[], Tensor]) -> Tensor:
        """Do the work."""
        with learning.context.watch.phase("evaluation"):
            return work()


@dataclass
class Buffers:
    """An epoch's inputs where a captured step finds them, one row per step."""

    index: Tensor  # (steps, batch)
    lr: Tensor  # (steps,)
    share: Tensor | None  # (steps,), with mix-up
    epoch: Tensor
    within: Tensor
    elapsed: Tensor
    counter: Tensor  # (1,) the step's number
    loss: Tensor  # () sum over the epoch

    @classmethod
    def like(cls, inputs: Sequence[Inputs]) -> "Buffers":
        """Room for epochs of this shape."""
        steps, batch, first = len(inputs), max(len(each.index) for each in inputs), inputs[0]
        device = first.index.device
        lr, epoch, within, elapsed = (torch.zeros(steps, dtype=kind.dtype, device=device) for kind in _numbers(first))
        share = None if first.share is None else torch.zeros(steps, device=device)
        index = torch.zeros(steps, batch, dtype=torch.int64, device=device)
        counter, loss = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros((), device=device)
        return cls(index, lr, share, epoch, within, elapsed, counter, loss)

    def fill(self, inputs: Sequence[Inputs]) -> None:
        """Take an epoch's inputs; the count and the loss start at 0."""
        sizes = [len(each.index) for each in inputs]
        padded = torch.nn.utils.rnn.pad_sequence([each.index for each in inputs], batch_first=True)
        self.index[: len(sizes), : padded.shape[1]].copy_(padded)
        columns = [torch.stack(column) for column in zip(*(_numbers(each) for each in inputs), strict=True)]
        for buffer, values in zip((self.lr, self.epoch, self.within, self.elapsed), columns, strict=True):
            buffer.copy_(values)
        if self.share is not None:
            self.share.copy_(torch.stack([each.share for each in inputs if each.share is not None]))
        self.counter.zero_()
        self.loss.zero_()

    def now(self, size: int) -> Inputs:
        """The inputs of the step the counter is at, a batch of `size`."""

        def at(column: Tensor) -> Tensor:
            return column.index_select(0, self.counter).squeeze(0)

        share = None if self.share is None else at(self.share)
        clock = Clock(at(self.epoch), at(self.within), at(self.elapsed))
        return Inputs(at(self.index)[:size], at(self.lr), share, clock)


def _numbers(inputs: Inputs) -> tuple[Tensor, ...]:
    clock = inputs.clock
    return inputs.lr, *(getattr(clock, item.name) for item in fields(clock))


class CapturedRunner:
    """Replays graphs: one of the step for each size of batch, one of the evaluation, captured anew for every task.

    What is captured is run once before, for libraries to make their plans; the host turns to other lanes until the GPU
    has done that, and with it whatever else the lane has put there.
    """

    def __init__(self) -> None:
        self.learning: TaskTrainer | None = None
        self.buffers: Buffers | None = None
        self.graphs: dict[int, Graph] = {}
        self.judged: tuple[Graph, Tensor] | None = None
        self.pool: Any = None  # of the graphs' memory
        self.side: torch.cuda.Stream | None = None  # to capture on where the default is current

    def _of(self, learning: TaskTrainer) -> None:
        if self.learning is not learning:
            self.learning, self.buffers, self.graphs, self.judged = learning, None, {}, None
            self.pool = None  # it went with the last graph that used it

    def steps(self, learning: TaskTrainer, inputs: Sequence[Inputs]) -> Tensor:
        """Replay every step."""
        self._of(learning)
        if self.buffers is None:
            self.buffers = Buffers.like(inputs)
        buffers = self.buffers
        buffers.fill(inputs)
        sizes = [len(each.index) for each in inputs]
        if wanted := sorted(set(sizes) - set(self.graphs)):
            works = {size: partial(_one, learning.step, buffers, size) for size in wanted}
            self._capture(learning, works)
            buffers.fill(inputs)
        for size in sizes:
            self.graphs[size].replay()
        return buffers.loss / len(inputs)

    def evaluation(self, learning: TaskTrainer, work: Callable[[], Tensor]) -> Tensor:
        """Replay the evaluation."""
        self._of(learning)
        watch = learning.context.watch
        if self.judged is None:
            with watch.phase("capture"), self._beside():
                result = work()
            pause("epoch")  # of which the GPU has all steps to do before
            with watch.phase("capture"):
                self.judged = self._record(lambda: result.copy_(work())), result
        with watch.phase("evaluation"):
            graph, result = self.judged
            graph.replay()
        return result

    def _capture(self, learning: TaskTrainer, works: Mapping[int, Callable[[], None]]) -> None:
        """A graph of each work, under its size. What the steps run before have changed is put back."""
        moving, random = _moving(learning), learning.step.random
        with learning.context.watch.phase("capture"):
            before, place = copies(moving), random.get_state()
            for work in works.values():
                with self._beside():
                    work()
                    copy_into(moving, before)
                random.set_state(place)
            pause("steps")
            for size, work in works.items():
                self.graphs[size] = self._record(work, random)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """The current stream, or one beside the default stream, where nothing can be captured.

        The step that is run before must be on it too: autograd remembers the stream of what it met there.
        """
        current = torch.cuda.current_stream()
        if current != torch.cuda.default_stream():
            yield
            return
        self.side = self.side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            yield
        current.wait_stream(self.side)

    def _record(self, work: Callable[[], object], random: torch.Generator | None = None) -> Graph:
        graph = torch.cuda.CUDAGraph()
        if random is not None:
            graph.register_generator_state(random)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with self._beside():
            torch.cuda.current_stream().synchronize()
            with uncollected():
                graph.capture_begin(self.pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        return graph


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected as garbage inside: a graph that another run has left must not go while one is captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _one(step: Step, buffers: Buffers, size: int) -> None:
    buffers.loss += step(buffers.now(size))
    buffers.counter += 1


def _moving(learning: TaskTrainer) -> Tensors:
    """Every tensor that a step can change: the model's, the optimizer's, the method's own."""
    memory = {
        f"optimizer/{number}/{name}": value
        for number, state in enumerate(learning.step.optimizer.state.values())
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    own = {f"method/{number}": value for number, value in enumerate(learning.step.method.moved_by_steps())}
    return {**{name: value.detach() for name, value in learning.live.items()}, **memory, **own}


def runner_for(device: torch.device, plain: bool = False) -> Runner:
    """Graphs on a GPU, plain steps elsewhere."""
    return CapturedRunner() if device.type == "cuda" and not plain else PlainRunner()
