"""`--device auto`: which device, and how many runs side by side on it, by what is free; and why, in one line."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GIB = 1 << 30
MOST_LANES = 5  # more lanes of the paper's networks bring nothing on one GPU
#: Bytes that one lane may need on a GPU, data and graphs included; five of AlexNet were measured at 4.4 GiB together.
NEED = {
    "digits": 1 * GIB,
    "alexnet-eighth": 1 * GIB,
    "alexnet": 2 * GIB,
    "minilm": 4 * GIB,
    "resnet18-32": 4 * GIB,
    "resnet18-84": 8 * GIB,
}
UNKNOWN_NEED = 8 * GIB  # of a network that is not ours


@dataclass(frozen=True)
class GPU:
    """A GPU as it is now; memory in bytes."""

    name: str
    free: int
    total: int


@dataclass(frozen=True)
class Choice:
    """A device by name, the runs side by side on it, and the line that says why."""

    device: str
    lanes: int | None  # None: on a CPU there are none
    why: str


def choose(gpus: Sequence[GPU], need: int, runs: int, asked: int | None = None) -> Choice:
    """The GPU with the most free memory and as many lanes as it takes; the CPU where not even one run fits.

    `need` is what one lane needs in bytes, `asked` the number of lanes asked for, if any.

    >>> choose([GPU("NVIDIA H200", 138 << 30, 139 << 30)], need=2 << 30, runs=5).why
    'auto: cuda:0, NVIDIA H200, 138 of 139 GiB free, 5 lanes'
    >>> choose([], need=2 << 30, runs=5).why
    'auto: cpu (no GPU found)'
    """
    if not gpus:
        return Choice("cpu", None, "auto: cpu (no GPU found)")
    index, gpu = max(enumerate(gpus), key=lambda pair: pair[1].free)
    found = f"cuda:{index}, {gpu.name}, {_gib(gpu.free)} of {_gib(gpu.total)} GiB free"
    fits = gpu.free // need
    if fits < 1:
        return Choice("cpu", None, f"auto: cpu ({found}; one run may need {_gib(need)})")
    wanted = min(MOST_LANES, runs) if asked is None else asked
    lanes = max(1, min(wanted, fits))
    fewer = f" ({wanted} would need {_gib(wanted * need)} GiB)" if lanes < wanted else ""
    return Choice(f"cuda:{index}", lanes, f"auto: {found}, {lanes} lane{'s' if lanes > 1 else ''}{fewer}")


def need_of(networks: Sequence[str]) -> int:
    """Bytes that one lane may need, of the largest of these networks."""
    return max((NEED.get(name, UNKNOWN_NEED) for name in networks), default=UNKNOWN_NEED)


def gpus() -> list[GPU]:
    """The GPUs torch sees; one that does not answer has nothing free."""
    return [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def _gpu(index: int) -> GPU:
    name = torch.cuda.get_device_name(index)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError:  # another process holds it alone, or its memory is full
        free, total = 0, int(torch.cuda.get_device_properties(index).total_memory)
    return GPU(name, free, total)


def _gib(size: int) -> str:
    """Whole GiB, or one digit more below ten.

    >>> _gib(138 << 30), _gib(3 << 29)
    ('138', '1.5')
    """
    return f"{size / GIB:.0f}" if size >= 10 * GIB else f"{size / GIB:.1f}".removesuffix(".0")
