"""Where a run took place: versions, machine, threads, memory; what a record needs so that a number can be judged."""

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ness
from ness.lab.gpu import devices


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
    """On a card, deterministic kernels chosen without trials, so that a seed gives the same bits every time.

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
        name = devices.choose(devices.cards(), devices.UNKNOWN_NEED, 1).device
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
