"""`ness list`: what methods and benchmarks there are."""

import sys
from dataclasses import dataclass
from typing import Literal

import tyro

from ness.lab import registry
from ness.report.formats import aligned


@dataclass(frozen=True)
class ListArguments:
    """What to list."""

    what: tyro.conf.Positional[Literal["methods", "benchmarks"]]


ABOUT = "List the methods or the benchmarks there are. Examples: ness list methods · ness list benchmarks"


def main(argv: list[str]) -> int:
    """Prints the list on standard output."""
    what = tyro.cli(ListArguments, args=argv, prog="ness list", description=ABOUT).what
    sys.stdout.write(methods() if what == "methods" else benchmarks())
    return 0


def methods() -> str:
    """Name, what it is, what it keeps between tasks, whether it needs old data, where it is from."""
    lines = [("method", "what it is", "keeps between tasks", "old data", "from")]
    for name, spec in sorted(registry.all_methods().items()):
        needs = spec.needs_old_data
        old = "no" if needs is None else "yes" if needs(spec.settings()) else "by setting"
        source = f"{spec.paper} ({spec.year})" if spec.paper else ""
        lines.append((name, spec.title, spec.keeps, old, source))
    return aligned(lines)


def benchmarks() -> str:
    """Name, what it is, tasks, network."""
    lines = [("benchmark", "what it is", "tasks", "network")]
    for name, bench in sorted(registry.all_benchmarks().items()):
        lines.append((name, bench.title, str(bench.tasks or "by the data"), bench.network))
    return aligned(lines)
