"""A table's rows from a file (`ness table --plan`): read, and checked as a whole before anything runs."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ness.errors import NessError
from ness.lab import registry
from ness.lab.runs.jobs import Job, resolve, settings_type
from ness.lab.runs.settings import nearest, read_toml
from ness.lab.training import seeds

TOP = ("title", "benchmark", "seeds", "row")
OWN = ("method", "name", "preset", "benchmark")  # of a row; its other keys are settings


@dataclass(frozen=True)
class Experiment:
    """What a plan asks for: a job a row, under the row's name, and seeds for all of them."""

    title: str
    seeds: tuple[int, ...]
    jobs: tuple[Job, ...]

    def only(self, names: Sequence[str]) -> "Experiment":
        """The rows of these names, in the plan's order."""
        known = [job.title for job in self.jobs]
        for name in names:
            if name not in known:
                every = ", ".join(map(repr, known))  # names may hold commas
                raise NessError(f"no row of the plan is called {name!r}.{nearest(name, known)} There are {every}")
        return dataclasses.replace(self, jobs=tuple(job for job in self.jobs if job.title in names))

    def work(self) -> list[tuple[Job, int]]:
        """Every run, seed by seed, so that a table that is interrupted is even."""
        return [(job, seed) for seed in self.seeds for job in self.jobs]


def plans() -> dict[str, Path]:
    """The plans that come with the package, by name.

    >>> "paper-cifar100" in plans()
    True
    """
    package = Path(__file__).parents[2]
    places = (package / "experiments", package.parents[1] / "experiments")  # of a wheel, or of a working copy
    return {path.stem: path for place in places[::-1] for path in sorted(place.glob("*.toml"))}


def located(plan: Path) -> Path:
    """The file of a plan: the path itself where there is one, or else the package's own plan of this name.

    >>> located(Path("paper-cifar100")).name, located(Path("experiments/paper-cifar100.toml")).name
    ('paper-cifar100.toml', 'paper-cifar100.toml')

    Raises:
        NessError: there is neither a file nor a plan of this name.
    """
    if plan.exists() or plan.is_symlink() or plan.parent not in (Path(), Path("experiments")):
        return plan
    known = plans()
    name = plan.name.removesuffix(".toml")
    if name in known:
        return known[name]
    if plan == Path(name):  # no path: a name
        raise NessError(f"no plan is called {name!r}, and no file.{nearest(name, known)} There are {', '.join(known)}")
    return plan


def read(path: Path, fast: bool = False) -> Experiment:
    """The experiment in a TOML file; every row is resolved, or the file is refused with the row that is wrong."""
    path = located(path)
    try:
        values = read_toml(path)
    except NessError as error:
        raise NessError(f"{error}; expected a TOML file of [[row]] tables, e.g. one of experiments/") from error
    return experiment(values, str(path), fast)


def experiment(values: Mapping[str, Any], where: str, fast: bool = False) -> Experiment:
    """The experiment that these values describe; `where` begins every complaint."""
    for key in values:
        if key not in TOP:
            raise NessError(
                f"{where}: no key is called {key!r}; there are {', '.join(TOP[:-1])} and [[row]] tables, and settings "
                f"stand in the rows.{nearest(key, TOP)}"
            )
    title, benchmark = (_text(values, key, where) for key in ("title", "benchmark"))
    rows = values.get("row", [])
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise NessError(f"{where}: has no [[row]] tables; expected one for each row of the table")
    asked = _seeds(values.get("seeds"), where)
    places = [f"{where}, row {number}{_called(row)}" for number, row in enumerate(rows, start=1)]
    jobs = [_job(row, benchmark, place, fast) for row, place in zip(rows, places, strict=True)]
    return Experiment(title, asked, _distinct(jobs, places))


def _called(row: Mapping[str, Any]) -> str:
    name = row.get("name") or row.get("method")
    return f" ({name})" if isinstance(name, str) else ""


def _text(values: Mapping[str, Any], key: str, where: str) -> str:
    value = values.get(key, "")
    if not isinstance(value, str):
        raise NessError(f"{where}: {key} is {value!r:.60}, a {type(value).__name__}; expected text in quotes")
    return value


def _seeds(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(seed) is int for seed in value):
        raise NessError(f"{where}: seeds is {value!r:.60}, expected a list of whole numbers, e.g. seeds = [1, 2, 3]")
    try:
        return seeds.checked(value)
    except NessError as error:
        raise NessError(f"{where}: {error}") from error


def _job(row: Mapping[str, Any], benchmark: str, where: str, fast: bool) -> Job:
    """The job of a row; unknown keys, wrong types and contradictions are refused."""
    method, name, preset, own = (_text(row, key, where) for key in OWN)
    if not method:
        raise NessError(f'{where}: has no method, e.g. method = "ness"; it has {", ".join(row) or "nothing"}')
    if not (own or benchmark):
        raise NessError(f'{where}: there is no benchmark here nor above all rows, e.g. benchmark = "cifar100"')
    try:
        spec = registry.find("method", method, registry.all_methods())
        bench = registry.find("benchmark", own or benchmark, registry.all_benchmarks())
        known = [*OWN, *(item.name for item in dataclasses.fields(settings_type(spec, bench)))]
        for key in row:
            if key not in known:
                raise NessError(f"{method} on {bench.name} has no setting {key!r}.{nearest(key, known)}")
        changes = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        job = resolve(spec, bench, preset or "fixed", {k: v for k, v in changes.items() if k not in OWN}, fast)
    except NessError as error:
        raise NessError(f"{where}: {error}") from error
    return dataclasses.replace(job, name=name)


def _distinct(jobs: Sequence[Job], places: Sequence[str]) -> tuple[Job, ...]:
    """The jobs, each with a name; two rows of the same runs or the same name are refused."""
    methods = [(job.method.name, job.benchmark.name) for job in jobs if not job.name]
    named: list[Job] = []
    runs: dict[str, str] = {}
    names: dict[tuple[str, str], str] = {}
    for job, place in zip(jobs, places, strict=True):
        alone = methods.count((job.method.name, job.benchmark.name)) == 1
        name = job.name or (job.method.name if alone else f"{job.method.name} ({job.label})")
        if job.digest in runs:
            raise NessError(f"{place}: asks for the same runs as {runs[job.digest]}; change a setting or remove one")
        if (name, job.benchmark.name) in names:
            raise NessError(f"{place}: {names[name, job.benchmark.name]} is called {name!r} too; rename one")
        runs[job.digest] = names[name, job.benchmark.name] = place
        named.append(dataclasses.replace(job, name=name))
    return tuple(named)
