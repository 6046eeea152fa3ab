"""What a run ran on, and where its time went."""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

import ness
from ness.lab.gpu import devices

Phase = Literal[
    "start",  # data, network, and a checkpoint taken up
    "capture",  # of a step or an evaluation as a graph
    "steps",  # training steps, and waiting for the device to do them
    "evaluation",  # validation and test
    "observing",  # what must not change: forward passes and Grams
    "decomposition",  # eigen-solvers, choosing directions
    "statistics",  # whatever else a method does before and after a task
    "checkpoints",  # and the final weights
    "other",
]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Stopwatch:
    """Seconds by phase. Phases nest: inside another the inner one counts, and the outer one goes on after it.

    >>> now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 10.0])
    >>> watch = Stopwatch(lambda: next(now))
    >>> with watch.phase("statistics"):     # from 1 to 10
    ...     with watch.phase("observing"):  # from 3 to 6
    ...         pass
    >>> found = watch.times()
    >>> found["statistics"], found["observing"], found["other"]
    (6.0, 3.0, 1.0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._since = clock, clock()
        self._phases: list[Phase] = ["other"]
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """What happens inside belongs to this phase."""
        self._book()
        self._phases.append(name)
        try:
            yield
        finally:
            self._book()
            self._phases.pop()

    def stop(self) -> None:
        """The run pauses: what follows belongs to others (see `ness.lab.gpu.coroutines.own_time`)."""
        self._book()

    def go_on(self, waited: float) -> None:
        """The run goes on; seconds the host has waited for it count to the phase it paused in."""
        self._since = self._clock() - waited

    def times(self) -> dict[str, float]:
        """Seconds by phase, up to now."""
        self._book()
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}

    def _book(self) -> None:
        now = self._clock()
        self._seconds[self._phases[-1]] += now - self._since
        self._since = now


def together(*parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase of several stretches or runs.

    >>> together({"steps": 1.0}, {"steps": 2.0, "start": 0.5})["steps"]
    3.0
    """
    return {name: round(sum(part.get(name, 0.0) for part in parts), 3) for name in PHASES}


def table(runs: Sequence[Mapping[str, float]], wall: float) -> list[tuple[str, str, str]]:
    """Lines of a small table: seconds by phase over all runs, and the whole command's beside them.

    >>> table([{"start": 1.0, "steps": 6.0}, {"steps": 2.0}], 12.0)[-2:]
    [('outside the runs', '    3.0', ' 25 %'), ('whole command', '   12.0', '100 %')]
    """
    found = together(*runs)
    found["outside the runs"] = max(0.0, wall - sum(found.values()))  # imports, the table, waiting for any of several
    found["whole command"] = wall
    shares = {name: f"{100 * seconds / max(wall, 1e-9):3.0f} %" for name, seconds in found.items()}
    lines = [(name, f"{seconds:7.1f}", shares[name]) for name, seconds in found.items()]
    return [("time in", "seconds", "share"), *lines]


def describe(device: torch.device) -> dict[str, Any]:
    """Versions and machine, without names of people, hosts or folders."""
    found = {
        "ness": ness.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device.type,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return found


def conditions(device: torch.device) -> dict[str, Any]:
    """What the last bits of a run depend on besides its settings: taken up under others it does not end bit-equal."""
    found: dict[str, Any] = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        return {**found, "GPU": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda)}
    return {**found, "threads": torch.get_num_threads(), "CPU": cpu_name()}


@cache
def cpu_name() -> str:
    """The processor's model and the instructions torch uses on it."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, IndexError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        name = next(line for line in [*text.splitlines(), f":{name}"] if line.startswith(("model name", ":")))
        name = " ".join(name.partition(":")[2].split())
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def peak_memory(device: torch.device) -> int | None:
    """The most memory used so far, in bytes: of torch on a GPU, of the process elsewhere; None where unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not a Unix system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def process_age() -> float | None:
    """Seconds since this process began; None where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):  # not a Linux system
        return None


SMALL = 1_000_000  # parameters; below, a second thread only waits for the first


@contextmanager
def cpu_threads(wanted: int, parameters: int) -> Iterator[None]:
    """So many threads inside, as many as before afterwards; 0: one for a small network, torch's own choice else."""
    if wanted < 0:
        raise ness.NessError(f"--threads {wanted}: expected 0 or more")
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or (1 if parameters < SMALL else before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def repeatable(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """On a GPU, deterministic kernels chosen without trials, so that a seed gives the same bits every time.

    Not wanted: whichever kernels a trial finds fastest.
    """
    if device.type != "cuda":
        yield
        return
    flags = torch.backends.cudnn
    before = flags.deterministic, flags.benchmark
    flags.deterministic, flags.benchmark = wanted, not wanted
    try:
        yield
    finally:
        flags.deterministic, flags.benchmark = before


def choose_device(name: str) -> torch.device:
    """The device of a name, or the one that "auto" is for a single run; one that is not there is an error."""
    if name == "auto":
        name = devices.choose(devices.gpus(), devices.UNKNOWN_NEED, 1).device
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ness.NessError(f"no device is called {name!r}; expected cpu, cuda, cuda:0, … or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise ness.NessError(f"--device {name}: found {device.type}, expected cpu, cuda, cuda:0, … or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        built = "" if torch.version.cuda else ", and this torch was built without CUDA: install one that has it"
        raise ness.NessError(f"--device {name}: torch sees no GPU here{built}; or use --device cpu, or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ness.NessError(f"--device {name}: there are {torch.cuda.device_count()} GPUs, counted from cuda:0")
    return device
