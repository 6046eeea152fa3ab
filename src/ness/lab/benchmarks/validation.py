"""The beginning of a benchmark with validation in the place of test data: what settings may be chosen on."""

import dataclasses

from ness.errors import NessError
from ness.lab.benchmarks.base import Benchmark, Request, Stream


def on_validation(benchmark: Benchmark, tasks: int) -> Benchmark:
    """The first tasks of a benchmark, each judged on its validation data; test data and later tasks are let go.

    The stream is cut right after it is loaded, so that nothing that is handed it can reach a test image.
    """

    def load(request: Request) -> Stream:
        return first_tasks(benchmark.load(request), tasks)

    return dataclasses.replace(
        benchmark,
        name=f"{benchmark.name}-first-{tasks}-valid",
        title=f"{benchmark.title}; the first {tasks} tasks, judged on validation data",
        tasks=tasks,
        load=load,
        whole=benchmark,
    )


def first_tasks(stream: Stream, tasks: int) -> Stream:
    """The first tasks of a stream, with their validation split in the place of the test split."""
    if not 2 <= tasks <= len(stream):
        raise NessError(
            f"first_tasks is {tasks}, expected 2 to {len(stream)}: {stream.name} has {len(stream)} tasks, and one "
            "task has no backward transfer"
        )
    kept = tuple(dataclasses.replace(task, test=task.valid) for task in stream.tasks[:tasks])
    notes = {**stream.notes, "judged on": "validation data"}
    general = stream.general and dataclasses.replace(stream.general, held_out=stream.general.valid)
    return dataclasses.replace(stream, tasks=kept, notes=notes, general=general)
