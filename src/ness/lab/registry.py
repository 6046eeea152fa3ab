"""Finds methods, benchmarks and networks by name: scans the package, and what other distributions offer."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, TypeVar

from ness.errors import NessError
from ness.lab import benchmarks as stream_files
from ness.lab import methods as method_files
from ness.lab import networks as network_files
from ness.lab.benchmarks.base import Benchmark
from ness.lab.methods.base import MethodSpec
from ness.lab.networks.base import NetworkSpec
from ness.lab.runs.settings import nearest

T = TypeVar("T")
Spec = TypeVar("Spec", MethodSpec, Benchmark, NetworkSpec)


@cache
def all_methods() -> Mapping[str, MethodSpec]:
    """Every METHOD of a file in `ness.lab.methods`, and every entry point of the group `ness.methods`."""
    return collect(MethodSpec, [*scan(method_files, "METHOD"), *outside("ness.methods")])


@cache
def all_benchmarks() -> Mapping[str, Benchmark]:
    """Every BENCHMARK of a file in `ness.lab.benchmarks`, and every entry point of the group `ness.benchmarks`."""
    return collect(Benchmark, [*scan(stream_files, "BENCHMARK"), *outside("ness.benchmarks")])


@cache
def all_networks() -> Mapping[str, NetworkSpec]:
    """Networks: NETWORKS in the files of `ness.lab.networks`, and entry points of the group `ness.networks`."""
    inside = [(where, spec) for where, specs in scan(network_files, "NETWORKS") for spec in specs]
    return collect(NetworkSpec, [*inside, *outside("ness.networks")])


def loggers() -> Mapping[str, Callable[[], Any]]:
    """Every entry point of the group `ness.loggers`, by its name: what makes a logger (see `ness.lab.runs.log`)."""
    found: dict[str, Callable[[], Any]] = {}
    for where, make in outside("ness.loggers", named=True):
        if not callable(make):
            raise NessError(
                f"entry point {where!r} of group 'ness.loggers' is a {type(make).__name__}; expected a class"
            )
        found[where] = make
    return found


def find(kind: str, name: str, known: Mapping[str, T]) -> T:
    """The one of this name; otherwise an error that names the nearest.

    >>> find("method", "fine-tune", {"finetune": 1})
    Traceback (most recent call last):
    ness.errors.NessError: no method is called 'fine-tune'; there are: finetune. Did you mean finetune?
    """
    if name not in known:
        raise NessError(f"no {kind} is called {name!r}; there are: {', '.join(sorted(known))}.{nearest(name, known)}")
    return known[name]


def scan(package: ModuleType, attribute: str) -> Iterable[tuple[str, Any]]:
    """(where, object) for each module of the package that has the attribute."""
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        if hasattr(module, attribute):
            yield module.__name__, getattr(module, attribute)


def outside(group: str, named: bool = False) -> Iterable[tuple[str, object]]:
    """(where, object) for each entry point of the group, from any installed distribution; or (its name, object)."""
    for point in entry_points(group=group):
        try:
            yield point.name if named else f"entry point {point.value}", point.load()
        except Exception as error:
            raise NessError(
                f"entry point {point.value!r} of group {group!r} cannot be loaded ({error}); mend or remove it"
            ) from error


def collect(kind: type[Spec], found: Iterable[tuple[str, object]]) -> dict[str, Spec]:
    """By name; an object of another kind and a name that occurs twice are errors."""
    known: dict[str, Spec] = {}
    places: dict[str, str] = {}
    for where, item in found:
        if not isinstance(item, kind):
            raise NessError(f"{where}: found a {type(item).__name__}, expected a {kind.__name__}")
        if item.name in known:
            raise NessError(f"{item.name!r} is in {places[item.name]} and in {where}; rename one")
        known[item.name], places[item.name] = item, where
    return known
