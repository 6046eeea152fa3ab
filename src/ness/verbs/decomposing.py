"""All layers' decompositions: side by side where they are wide, and how long the others will take."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ness.statistics.dominant import NARROWEST

Progress = Callable[..., object]  # (done, total, name), and seconds_left= where it has a parameter of that name
Work = TypeVar("Work")


def side_by_side(
    work: Mapping[str, Callable[[], Work]], widths: Mapping[str, int], progress: Progress | None
) -> Iterator[tuple[str, Work]]:
    """Every layer's result, in order; wide layers are worked on by as many threads as torch has.

    Args:
        work: what is to be done, by layer.
        widths: d of each layer on a CPU; 0: its work is better done alone.
        progress: called after each layer.

    Yields:
        Names and results. What breaks off leaves no thread behind.
    """
    tell, begun = teller(progress), time.monotonic()
    costs = {name: max(1, widths[name]) ** 3 for name in work}
    left, everything = sum(costs.values()), sum(costs.values())
    threads = torch.get_num_threads()
    wide = [name for name in work if widths[name] >= NARROWEST]
    workers = min(threads, len(wide))
    pool = ThreadPoolExecutor(workers) if workers > 1 else None
    try:
        ahead = {} if pool is None else {name: pool.submit(_alone, work[name], threads // workers) for name in wide}
        for done, name in enumerate(work, start=1):
            yield name, ahead[name].result() if name in ahead else work[name]()
            left -= costs[name]
            tell(done, len(work), name, (time.monotonic() - begun) * left / (everything - left))
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # what later threads begin with


def _alone(work: Callable[[], Work], threads: int) -> Work:
    """The work on this thread's own share of the cores."""
    torch.set_num_threads(max(1, threads))
    with torch.no_grad():
        return work()


def teller(progress: Progress | None) -> Callable[[int, int, str, float], object]:
    """What calls `progress` with what it takes."""
    if progress is None:
        return lambda done, total, name, left: None
    try:
        parameters = inspect.signature(progress).parameters
    except (TypeError, ValueError):  # built in
        parameters = {}  # type: ignore[assignment]
    if "seconds_left" in parameters:
        return lambda done, total, name, left: progress(done, total, name, seconds_left=left)
    return lambda done, total, name, left: progress(done, total, name)
