"""`run`: the laboratory from Python. A method, a stream of tasks, a network and seeds; accuracies come back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ness.errors import NessError
from ness.lab.benchmarks.base import Benchmark, Stream
from ness.lab.benchmarks.own import benchmark_from_stream
from ness.lab.methods.base import MethodSpec
from ness.lab.networks.base import NetworkSpec
from ness.lab.runs.jobs import Job, resolve
from ness.lab.runs.metrics import mean_and_deviation
from ness.lab.runs.run import Listener, Options
from ness.lab.runs.sweep import run_all
from ness.lab.training.loop import Event
from ness.lab.training.seeds import checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[int, Event], None]


@dataclass(frozen=True)
class Results:
    """What came of a method on a stream, over all seeds; figures are in percent. Prints as one line.

    `runs` holds the whole record of each seed: settings, times, versions, and what the method said of each task.
    """

    method: str
    stream: str
    network: str
    tasks: tuple[str, ...]
    runs: Mapping[int, Mapping[str, Any]]  # by seed

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that were run."""
        return tuple(self.runs)

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """A (tasks learnt, tasks): test accuracy of task i after task t, mean over seeds; NaN before it was learnt.

        A method that learns all tasks at once (`joint`) has one row.
        """
        return cast(NDArray[np.float64], self.of_seeds().mean(axis=0))

    def of_seeds(self) -> NDArray[np.float64]:
        """The matrices of all seeds, (seeds, tasks learnt, tasks)."""
        return np.array([run["accuracy"] for run in self.runs.values()], dtype=np.float64)

    @property
    def acc(self) -> float:
        """ACC: the mean accuracy over all tasks at the end."""
        return self._mean("acc")

    @property
    def acc_std(self) -> float | None:
        """Sample deviation of ACC over seeds; None for one seed."""
        return self._deviation("acc")

    @property
    def bwt(self) -> float | None:
        """BWT: how far old tasks have moved since they were learnt, on average; None where there is no such thing."""
        return None if self._values("bwt") is None else self._mean("bwt")

    @property
    def bwt_std(self) -> float | None:
        """Sample deviation of BWT over seeds; None for one seed."""
        return None if self._values("bwt") is None else self._deviation("bwt")

    def _values(self, name: str) -> list[float] | None:
        found = [run[name] for run in self.runs.values()]
        return None if any(value is None for value in found) else found

    def _mean(self, name: str) -> float:
        return mean_and_deviation(self._values(name) or [float("nan")])[0]

    def _deviation(self, name: str) -> float | None:
        return mean_and_deviation(self._values(name) or [float("nan")])[1]

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the accuracy of every task after every task; needs matplotlib.

        Args:
            path: where to write it as well (.png, .svg or .pdf).

        Returns:
            The figure; a notebook shows it.
        """
        from matplotlib.figure import Figure

        matrix = self.accuracy
        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        steps = np.arange(1, len(matrix) + 1)
        for number, name in enumerate(self.tasks):
            axes.plot(steps, matrix[:, number], marker="o", markersize=3, label=name)
        axes.plot(steps, np.nanmean(matrix, axis=1), color="black", linewidth=2, label="mean of the tasks seen")
        axes.set(title=str(self), xlabel="tasks learnt", ylabel="accuracy (%)", xticks=steps)
        axes.title.set_fontsize(9)
        axes.legend(fontsize=7, ncols=2)
        if path is not None:
            try:
                figure.savefig(path)
            except (OSError, ValueError) as error:
                raise NessError(
                    f"plot({str(path)!r}): cannot be written ({error}); expected a .png, .svg or .pdf in a folder "
                    "that is there"
                ) from error
        return figure

    def __str__(self) -> str:
        def figure(value: float | None, deviation: float | None) -> str:
            if value is None:
                return "none"
            return f"{value:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")

        said = f"ACC {figure(self.acc, self.acc_std)}, BWT {figure(self.bwt, self.bwt_std)}"
        return f"{self.method} on {self.stream}: {said} ({len(self.runs)} seed{'s' if len(self.runs) > 1 else ''})"


def run(
    method: str | MethodSpec,
    stream: str | Benchmark | Stream,
    network: str | NetworkSpec | None = None,
    seeds: int | Iterable[int] = 1,
    *,
    preset: str = "fixed",
    out: str | Path | None = None,
    data: str | Path | None = None,
    device: str = "cpu",
    fast: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Results:
    """Train a method on a stream of tasks, task after task, once per seed.

    >>> import torch
    >>> from ness.lab.benchmarks import stream_from_tasks, task_from_tensors
    >>> images, labels = torch.rand(40, 1, 8, 8), torch.arange(40) % 2
    >>> pair = images + labels[:, None, None, None], labels     # bright or dark
    >>> tasks = [task_from_tensors(name, train=pair, test=pair) for name in ("one", "two")]
    >>> results = run("finetune", stream_from_tasks("brightness", tasks), network="digits", epochs=1, lr=0.01)
    >>> results.accuracy.shape, results.seeds
    ((2, 2), (1,))

    Args:
        method: a name of `ness list methods`, or a `MethodSpec`.
        stream: a name of `ness list benchmarks`, a `Benchmark`, or a `Stream` of your own tensors.
        network: a name of `ness list networks`, or a `NetworkSpec`; by default the benchmark's own.
        seeds: one run each.
        preset: "fixed", "reference" or "paper".
        out: folder of the records: a run that is finished there is not run again, one that was cut short goes on, and
            `ness report` shows them. None: nothing is kept on disk.
        data: folder of data sets.
        device: "cpu", "cuda", "cuda:0", …
        fast: bfloat16 steps.
        progress: called as `progress(seed, event)` with what happens: `event.kind` and `event.facts`.
        **settings: of the training or of the method, as on the command line: `epochs=5`, `lr=0.01`, …

    Returns:
        Accuracies and what follows from them.

    Raises:
        NessError: something is unknown or does not fit, or a run in `out` was on other data.
    """
    asked = _checked(method, stream, network, seeds)
    bench = benchmark_from_stream(stream) if isinstance(stream, Stream) else stream
    own = network if isinstance(network, NetworkSpec) else None
    changes = {**settings, **({"network": network} if isinstance(network, str) else {})}
    job = resolve(method, bench, preset, changes, fast, own)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        options = Options(folder, None if data is None else Path(data), device)
        grid = run_all([(job, seed) for seed in asked], options, lambda _, seed: _listener(seed, progress))
    if grid.failures:
        said = grid.complaints()  # which name a traceback in the run's folder, if it is still there
        raise NessError("; ".join(said if out is not None else [line.split(" (where it came")[0] for line in said]))
    found = {seed: outcome.result for seed, outcome in zip(asked, grid.outcomes, strict=True)}
    if isinstance(stream, Stream):
        _check_data(job, stream, found)
    first = next(iter(found.values()))
    return Results(job.method.name, job.benchmark.name, job.network, tuple(first["tasks"]), found)


def _checked(method: object, stream: object, network: object, seeds: object) -> tuple[int, ...]:
    """The seeds, after the kinds of what was given were looked at."""
    for name, value, kinds, expected in (
        ("method", method, (str, MethodSpec), "a name or a MethodSpec"),
        ("stream", stream, (str, Benchmark, Stream), "a name, a Benchmark or a Stream"),
        ("network", network, (str, NetworkSpec, type(None)), "a name or a NetworkSpec"),
    ):
        if not isinstance(value, kinds):
            raise NessError(f"run({name}=...): found a {type(value).__name__}, expected {expected}")
    found = tuple(seeds) if isinstance(seeds, Iterable) and not isinstance(seeds, str) else (seeds,)
    for seed in found:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise NessError(f"run(seeds=...): found {seed!r:.40}, expected whole numbers, e.g. seeds=(1, 2, 3)")
    return checked([int(seed) for seed in found])


def _listener(seed: int, progress: Progress | None) -> Listener:
    return (lambda event: None) if progress is None else (lambda event: progress(seed, event))


def _check_data(job: Job, stream: Stream, found: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse a record of other tensors under the same name."""
    for seed, result in found.items():
        if result["data"]["fingerprint"] != stream.fingerprint:
            raise NessError(
                f"{job.method.name} on {stream.name}, seed {seed}: the run in `out` was on other data "
                f"({result['data']['fingerprint']}, now {stream.fingerprint}); choose another name or another `out`"
            )
