"""Several runs side by side on one GPU, each a lane: streams, graphs and generators of its own.

One network of the paper's size cannot fill a GPU. A run pauses whenever it has put an epoch on the GPU, or a stretch
of what its method does between tasks; the host then turns to a lane whose work is done. Lanes share nothing but the
GPU, so a run ends as it would have ended alone. What is done between tasks (eigen-solvers, small products, numbers
that the host waits for) goes on a stream that the GPU serves before the steps of others: the host waits less, and has
the next epochs ready in time.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ness.errors import NessError
from ness.lab.gpu.coroutines import Coroutine, Pause
from ness.lab.gpu.devices import MOST_LANES, UNKNOWN_NEED

Result = TypeVar("Result")
Run = Callable[[], Result]
Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]  # of steps, and of what is between tasks
MOST_STREAMS = 32  # torch hands out so many of a priority, then the same ones again


@dataclass
class Lane:
    """A run under way: its place in the list, its pauses, and the streams and the event it waits for.

    Each stream waits for the other one's work when the run changes over. No two lanes at work share one, and a run that
    follows another in its place waits for its last event: so memory which one stream frees is handed to nobody who does
    not wait.
    """

    number: int
    work: "Coroutine[object]"
    streams: "Streams | None" = None
    event: torch.cuda.Event | None = None  # after what was put on the device last
    waited: float | None = None  # seconds the host has waited for it; None before it has begun
    pause: Pause = None  # what it is at

    def ready(self) -> bool:
        """Whether what it put on the device is done."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def go_on(self) -> None:
        """To the next pause; StopIteration carries the result."""
        waited, self.waited = self.waited, 0.0
        if self.streams is None:
            self.pause = self.work.send(waited)
            return
        steps, between = self.streams
        stream = steps if self.trains else between
        if self.event is not None:
            stream.wait_event(self.event)
        try:
            with torch.cuda.stream(stream):
                self.pause = self.work.send(waited)
        finally:
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record(stream)

    @property
    def trains(self) -> bool:
        """Whether it is in the middle of a task."""
        return self.pause is not None


def lanes_for(device: torch.device, asked: int | None, need: int = UNKNOWN_NEED) -> int:
    """How many lanes: one on a CPU, else as asked, else what the GPU's free memory takes, at most five.

    `need` is what one lane needs in bytes.
    """
    if device.type != "cuda":
        if asked is not None and asked != 1:
            raise NessError(
                f"--lanes {asked}: lanes share a GPU and --device is {device.type}; leave --lanes out, and use "
                "--jobs for several processes, one a core"
            )
        return 1
    if asked is not None:
        if not 1 <= asked <= MOST_STREAMS:
            raise NessError(f"--lanes {asked}: expected 1 to {MOST_STREAMS}, as many streams as there are on a GPU")
        return asked
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(MOST_LANES, free // need))


def allow_many_streams() -> None:
    """Gives CUDA as many hardware queues as it can have (32), unless the user has chosen; its default is 8.

    Streams beyond them share a queue and wait for one another: eleven AlexNet lanes take 0.36 ms per step, not 0.33.
    It must come before anything that wakes CUDA.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def streams_on(device: torch.device) -> Streams | None:
    """A lane's streams on a GPU: an ordinary one, and one that is served first."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def side_by_side(runs: Sequence[Run[Result]], device: torch.device, lanes: int) -> list[Result | NessError]:
    """Runs `lanes` of them at a time; with one lane, one after another.

    Returns:
        What each run returned, or the error it ended with, in the order given.
    """
    if lanes == 1 and device.type != "cuda":
        return [_ended(run) for run in runs]
    ends: dict[int, Result | NessError] = {}
    waiting = deque(enumerate(runs))
    active: deque[Lane] = deque()
    places: list[tuple[Streams | None, torch.cuda.Event | None]]  # streams, and the last event on them
    places = [(streams_on(device), None) for _ in range(min(lanes, len(runs)))]
    while waiting or active:
        while waiting and places:
            number, run = waiting.popleft()
            active.append(Lane(number, Coroutine(run), *places.pop()))
        lane = next_lane(active)
        try:
            lane.go_on()
        except (StopIteration, NessError) as end:
            # without a traceback, which would keep what the run has on the GPU
            ends[lane.number] = end.value if isinstance(end, StopIteration) else end.with_traceback(None)
            places.append((lane.streams, lane.event))
        else:
            active.append(lane) if lane.trains else active.appendleft(lane)
    return [ends[number] for number in range(len(runs))]


def _ended(run: Run[Result]) -> Result | NessError:
    try:
        return run()
    except NessError as error:
        return error.with_traceback(None)


def next_lane(active: deque[Lane]) -> Lane:
    """A lane that is ready, taken out of the queue; the oldest one is waited for where none is.

    Lanes that train come first, so that the device has steps to do; then the one whose work between tasks was begun
    last. Taken in turn, lanes of one schedule would stay in step for ever, and all leave the device idle at once.
    """
    ready = [lane for lane in active if lane.ready()]
    if ready:
        lane = next((lane for lane in ready if lane.trains), ready[0])
        active.remove(lane)
        return lane
    lane = active.popleft()
    assert lane.event is not None
    began = time.perf_counter()
    lane.event.synchronize()
    lane.waited = time.perf_counter() - began
    return lane
