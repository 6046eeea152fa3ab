"""Streams of tasks: one file a benchmark, each with a module-level `BENCHMARK`."""

from ness.lab.streams.base import Benchmark, Request, Split, Stream, Task

__all__ = ["Benchmark", "Request", "Split", "Stream", "Task"]
