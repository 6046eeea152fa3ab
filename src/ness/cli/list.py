"""`ness list`: what methods, benchmarks, networks and plans there are."""

import sys
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from ness.cli.arguments import understood
from ness.lab import registry
from ness.lab.methods.base import MethodSpec, Sizes, sizes_of
from ness.lab.runs.experiment import plans
from ness.lab.runs.jobs import resolve
from ness.lab.runs.settings import part_of, read_toml
from ness.report.formats import aligned, terminal_width

SHOWN, IMAGE, CLASSES = "cifar100", (3, 32, 32), 10  # where the amount that is kept is shown: AlexNet


@dataclass(frozen=True)
class ListArguments:
    """What to list."""

    what: tyro.conf.Positional[Literal["methods", "benchmarks", "networks", "plans"]]


ABOUT = """List the methods, benchmarks, networks or plans there are.

Examples: ness list methods · ness list benchmarks"""


def main(argv: list[str]) -> int:
    """Prints the list on standard output."""
    what = understood(ListArguments, args=argv, prog="ness list", description=ABOUT).what
    sys.stdout.write({"methods": methods, "benchmarks": benchmarks, "networks": networks, "plans": plans_known}[what]())
    return 0


def methods() -> str:
    """Name, what it is, what it keeps between tasks and how much, whether it needs old data, where it is from."""
    lines = [("method", "what it is", "keeps between tasks", f"on {SHOWN}", "old data", "from")]
    sizes = sizes_on(SHOWN)
    for name, spec in sorted(registry.all_methods().items()):
        needs = spec.needs_old_data
        without = "some, kept" if spec.keeps_samples else "no"
        old = without if needs is None else "yes" if needs(spec.settings()) else "by setting"
        source = f"{spec.paper} ({spec.year})" if spec.paper else ""
        lines.append((name, spec.title, spec.keeps, amount(spec, sizes), old, source))
    return aligned(lines, terminal_width(), ("from",))


def amount(spec: MethodSpec, sizes: Sizes) -> str:
    """The most a method keeps at the end of the benchmark's last task but one, under its default preset."""
    if spec.kept_at_most is None:
        return ""
    most = spec.kept_at_most(sizes, part_of(resolve(spec, SHOWN).settings, spec.settings))
    return f"≤ {most / 1e6:,.1f} MB" if most else "0"


def sizes_on(benchmark: str) -> Sizes:
    """The layers of the benchmark's network, without its data."""
    bench = registry.all_benchmarks()[benchmark]
    network = registry.all_networks()[bench.network]
    with torch.device("meta"):
        model = network.build(IMAGE, [CLASSES] * bench.tasks, "batch")
    return sizes_of(model, bench.tasks, IMAGE)


def benchmarks() -> str:
    """Name, what it is, tasks, network."""
    lines = [("benchmark", "what it is", "tasks", "network")]
    for name, bench in sorted(registry.all_benchmarks().items()):
        lines.append((name, bench.title, str(bench.tasks or "by the data"), bench.network))
    return aligned(lines, terminal_width())


def networks() -> str:
    """Name, what it is, the benchmarks it is for."""
    used = {name: bench.network for name, bench in sorted(registry.all_benchmarks().items())}
    lines = [("network", "what it is", "of the benchmarks")]
    for name, network in sorted(registry.all_networks().items()):
        lines.append((name, network.title, ", ".join(bench for bench, own in used.items() if own == name)))
    return aligned(lines, terminal_width())


def plans_known() -> str:
    """Name, title and the command of each plan that comes with the package."""
    lines = [("plan", "what it is", "command")]
    for name, path in plans().items():
        values = read_toml(path)
        studied = "model" in values
        title = str(values.get("title") or values.get("model", ""))
        lines.append((name, title, f"ness study {name}" if studied else f"ness table --plan {name}"))
    return aligned(lines, terminal_width())
