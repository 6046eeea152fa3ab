"""Streams of tasks: one file a benchmark, each with a module-level `BENCHMARK`, and streams of your own."""

from ness.lab.benchmarks.base import Benchmark, Request, Split, Stream, Task
from ness.lab.benchmarks.own import benchmark_from_stream, stream_from_tasks, task_from_tensors

__all__ = [
    "Benchmark",
    "Request",
    "Split",
    "Stream",
    "Task",
    "benchmark_from_stream",
    "stream_from_tasks",
    "task_from_tensors",
]
