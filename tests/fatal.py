"""A method that ends its process, raises, or takes its time, for tests of whoever carries runs out.

Other processes find it, and the tiny benchmark, as they find any method from outside: by entry points on their path.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiny
from ness.lab import registry
from ness.lab.benchmarks.base import Request, Stream
from ness.lab.methods.base import Method, MethodSpec, TaskData
from ness.lab.runs.settings import setting

ENTRY_POINTS = """
[ness.methods]
fatal = fatal:METHOD
[ness.benchmarks]
tiny = tiny:BENCHMARK
counted = fatal:COUNTED
[ness.networks]
tiny = tiny:NETWORK
"""


@dataclass(frozen=True)
class Settings:
    """What goes wrong, at the beginning of the second task."""

    kills: int = setting(0, "how many times it kills its process")
    raises: bool = setting(False, "raises an error that is none of ours")
    naps: float = setting(0.0, "seconds that each epoch sleeps")
    marks: str = setting("", "folder of a file for each time it has killed")


class Fatal(Method):
    def before_task(self, lesson: TaskData) -> None:
        own: Settings = self.context.own
        if lesson.tasks[0] != 1:
            return
        if own.raises:
            raise RuntimeError("as it was asked to")
        done = len(list(Path(own.marks).iterdir())) if own.marks else 0
        if done < own.kills:
            (Path(own.marks) / str(done)).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def penalty(self, lesson: TaskData) -> None:
        time.sleep(self.context.own.naps)


METHOD = MethodSpec(name="fatal", title="for tests", build=Fatal, keeps="nothing", settings=Settings)


def read_and_count(folder: Path | None) -> str:
    """What stands for reading a data set: says in a file which process did it."""
    assert folder is not None
    with (folder / "reads").open("a") as reads:
        reads.write(f"{os.getpid()}\n")
    return "read"


def load_counted(request: Request) -> Stream:
    request.once("counted", lambda: read_and_count(request.data))
    return replace(tiny.load(request), name="counted")


COUNTED = replace(tiny.BENCHMARK, name="counted", load=load_counted)


def install(folder: Path) -> Path:
    """Writes the distribution whose entry points name it; the folder belongs on the path."""
    info = folder / "ness_fatal-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ness-fatal\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@contextmanager
def known(monkeypatch: Any, folder: Path) -> Iterator[Path]:
    """The method and the benchmark are found in here, by this process and by those that it starts."""
    monkeypatch.syspath_prepend(str(install(folder)))
    finders = (registry.all_methods, registry.all_benchmarks, registry.all_networks)
    for find in finders:
        find.cache_clear()
    try:
        yield folder
    finally:
        for find in finders:
            find.cache_clear()
