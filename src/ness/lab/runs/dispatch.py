"""Which run of a table is next, and what became of each, where several places carry them out side by side.

Longest runs first: the end of a table is then made of short ones, and no place is left with a long run while all
others are idle. What a run lasts is what those like it took, in records of the same folder and in this table so far.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ness.errors import NessError
from ness.lab.runs import queue
from ness.lab.runs.jobs import Job
from ness.lab.runs.queue import Lengths, RunRequest
from ness.lab.runs.run import Listener, Options, Outcome, folder_of, run
from ness.lab.runs.run_folder import RunFolder, RunLocked
from ness.lab.runs.status import StatusMonitor
from ness.lab.runs.sweep import LOOK_EVERY, End, name_of
from ness.lab.training.loop import Event

MOST_LOSSES = 3  # workers that one run may take with it
MOST_LOST_PLACES = 20  # times that a run may lose the machine it is on


class Dispatch:
    """The runs of a table: those that wait, longest first, those under way, and the ends of the others."""

    def __init__(
        self,
        work: Sequence[tuple[Job, int]],
        options: Options,
        listener: Callable[[Job, int], Listener],
        say: Callable[[str], None],
    ) -> None:
        self.work, self.options, self.say = list(work), options, say
        self.names = [name_of(job, seed) for job, seed in self.work]
        self.folders = [folder_of(job, seed, options.out) for job, seed in self.work]
        self.ends: dict[int, End] = {}
        self.waiting: list[int] = list(range(len(self.work)))
        self.held: list[int] = []  # by other processes
        self.losses: Counter[int] = Counter()  # of workers, by run
        self.lost_places: Counter[int] = Counter()
        self._hears = [listener(job, seed) for job, seed in self.work]
        self._began, self._looked, self._has_said = time.monotonic(), time.monotonic(), False
        self.cleared: set[int] = set()  # for --again: what is there now was made by this command
        self._requests = [queue.asked(job, seed) for job, seed in self.work]
        self._units = [float((job.benchmark.tasks or 1) * job.settings.epochs) for job, _ in self.work]
        self._lengths, self._rest = recorded(options.out, dict(zip(self._requests, self._units, strict=True)))
        queue.note(options.out, self.work)

    @property
    def over(self) -> bool:
        """Whether every run has its end."""
        return len(self.ends) == len(self.work)

    def settle(self) -> None:
        """Ends the runs whose results are there already, or whose time is over: no worker is started for them."""
        for number in list(self.waiting):
            there = (self.folders[number] / "result.json").exists() and not self._has_checkpoint(number)
            if there and not self.options.again:
                self.waiting.remove(number)
                job, seed = self.work[number]
                try:
                    self.ended(number, run(job, seed, self.options, self._hears[number]))
                except NessError as error:
                    self.ended(number, error)
            elif self._is_late(number):
                self.waiting.remove(number)
                self.ends[number] = None

    def _has_checkpoint(self, number: int) -> bool:
        return any(self.folders[number].glob("checkpoint-*"))

    def take(self) -> int | None:
        """The run that is to be begun next; None if none waits now."""
        if not self.waiting and self.held and time.monotonic() - self._looked >= LOOK_EVERY:
            self.waiting, self.held, self._looked = self.held, [], time.monotonic()
        while self.waiting:
            number = max(self.waiting, key=self.expected)
            self.waiting.remove(number)
            if not self._is_late(number):
                return number
            self.ends[number] = None
        return None

    def drop_late(self, numbers: Sequence[int], withdraw: Callable[[int], None]) -> None:
        """Withdraws those that were handed out and not begun, once their time is over."""
        for number in numbers:
            if self._is_late(number):
                withdraw(number)
                self.ends[number] = None

    def _is_late(self, number: int) -> bool:
        """Whether its time is over; what is begun goes on, and a result that is there still counts."""
        stop = self.options.stop_after
        if stop is None or time.monotonic() - self._began < stop or number in self.losses or number in self.lost_places:
            return False
        try:
            return self.options.again or RunFolder(self.folders[number]).result() is None
        except NessError:
            return False  # whoever runs it says what is wrong

    def expected(self, number: int) -> float:
        """Seconds that a run, or what is left of it, may last."""
        whole = self._lengths.expected(self._requests[number], self._units[number])
        return whole * self._rest.get(self._requests[number].folder, 1.0)

    def options_of(self, number: int) -> Options:
        """How a run is carried out: one that was lost goes on, even with --again, once its old result is cleared."""
        return replace(self.options, again=self.options.again and number not in self.cleared, stop_after=None)

    def heard(self, number: int, event: Event) -> None:
        """Passes an event of a run on."""
        if event.kind == "begun":
            self.cleared.add(number)
        self._hears[number](event)

    def ended(self, number: int, end: Outcome | NessError) -> None:
        """A run came to its end; one that another process has is tried again later."""
        if isinstance(end, RunLocked) and not self.options.again:
            self.held.append(number)
            if not self._has_said:
                self.say(f"waiting for {self.names[number]}, which {end.holder} runs; Ctrl-C leaves it to them")
                self._has_said = True
            return
        self.ends[number] = end
        if isinstance(end, Outcome) and isinstance(seconds := end.result.get("total_seconds"), int | float):
            self._lengths.add(self._requests[number], self._units[number], float(seconds))

    def lost(self, number: int, why: str, place: bool = False) -> None:
        """A run's worker is gone, or the machine it was on: it goes on elsewhere, but not for ever.

        Args:
            number: of the run.
            why: what happened, in a few words.
            place: the whole machine is gone, which is not the run's fault.
        """
        counted, most = (self.lost_places, MOST_LOST_PLACES) if place else (self.losses, MOST_LOSSES)
        counted[number] += 1
        self._rest.pop(self._requests[number].folder, None)
        if counted[number] < most:
            self.say(f"{self.names[number]}: {why}; it goes on from its last checkpoint")
            self.waiting.append(number)
            return
        text = f"{why}, for the {ordinal(most)} time: it is not tried again, but its checkpoint is kept"
        folder = RunFolder(self.folders[number])
        try:
            with folder.held():
                folder.log("failed", {"reason": text})
        except NessError:
            pass  # the line is for who watches; the failure itself is said below
        self.ends[number] = NessError(text)


def ordinal(count: int) -> str:
    """'third' or '20th'.

    >>> ordinal(3), ordinal(20)
    ('third', '20th')
    """
    return {1: "first", 2: "second", 3: "third"}.get(count, f"{count}th")


def recorded(out: Path, units: dict[RunRequest, float]) -> tuple[Lengths, dict[str, float]]:
    """How long the finished runs of a folder took, and what share is left of those that are begun, by folder."""
    lengths, rest = Lengths(), {}
    for one in StatusMonitor(out).look() if out.is_dir() else []:
        if one.state == "done":
            lengths.add(one.asked, units.get(one.asked, 0.0), one.spent)
        elif one.share > 0:
            rest[one.asked.folder] = 1.0 - one.share
    return lengths, rest
