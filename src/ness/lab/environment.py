"""Where a run took place: versions, machine, threads, memory; what a record needs so that a number can be judged."""

import platform
import sys
from typing import Any

import torch

import ness


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


def choose_device(name: str) -> torch.device:
    """The GPU for "auto" where there is one, the CPU otherwise; a device that is not there is an error."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ness.NessError(f"no device is called {name!r}; expected cpu, cuda, cuda:0, … or auto") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ness.NessError("--device cuda: torch sees no GPU here; use --device cpu")
    return device
