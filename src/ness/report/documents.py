"""Tables inside documents, made anew from records by `make tables`: what stands between two marks is never typed.

A block begins with the line `<!-- rows: experiments/NAME.toml -->`, which may name columns after the file, and ends
with the line `<!-- end rows -->`.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ness.errors import NessError
from ness.lab.experiment import Experiment, read
from ness.lab.jobs import Job
from ness.lab.settings import nearest
from ness.report.collect import collect
from ness.report.formats import NOT_RUN, pipes
from ness.report.planned import Planned, planned
from ness.report.records import Record
from ness.report.shown import number, printed

BEGIN = re.compile(r"<!-- rows: (?P<plan>\S+)(?P<columns>( \S+)*) -->")
END = "<!-- end rows -->"


@dataclass(frozen=True)
class Column:
    """A head, the cell of a row, and whether it is a number."""

    head: str
    cell: Callable[[Planned], str]
    numeric: bool = True


def command(job: Job, seeds: Sequence[int]) -> str:
    """The command that runs a job alone, e.g. `ness run --benchmark cifar100 --method ness --seeds 1 2`."""
    words = ["ness run", f"--benchmark {job.benchmark.name}", f"--method {job.method.name}"]
    words += [f"--preset {job.preset}"] if job.preset != "fixed" else []
    for name, value in job.changes.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}")
    return " ".join([*words, *(["--fast"] if job.fast else []), f"--seeds {' '.join(map(str, seeds))}"])


def _seeds(one: Planned) -> str:
    there, asked = len(one.runs), len(one.seeds)
    return str(there) if there == asked else f"{there} of {asked}" if there else ""


def _kept(one: Planned) -> str:
    """The most that a task of any seed kept for itself."""
    kept = [note["kept"] for run in one.runs for note in run.notes if "kept" in note]
    return f"{max(kept):,}" if kept else ""


def _note(one: Planned) -> str:
    return one.row.paper.note if one.row.paper else ""


def _minus(text: str) -> str:
    return text.replace("-", "−")


COLUMNS: Mapping[str, Column] = {
    "benchmark": Column("benchmark", lambda one: one.row.benchmark, False),
    "setting": Column("setting", lambda one: one.row.setting, False),
    "seeds": Column("seeds", _seeds),
    "acc": Column("ACC", lambda one: number(one.row.acc) if one.runs else NOT_RUN),
    "bwt": Column("BWT", lambda one: _minus(number(one.row.bwt, signed=True))),
    "learnt": Column("learnt", lambda one: number(one.row.learning)),
    "forgetting": Column("forgetting", lambda one: _minus(number(one.row.forgetting))),
    "paper-acc": Column("paper's ACC", lambda one: printed(one.row.paper.acc) if one.row.paper else ""),
    "paper-bwt": Column("paper's BWT", lambda one: _minus(printed(one.row.paper.bwt, True)) if one.row.paper else ""),
    "seconds": Column("seconds", lambda one: "" if one.row.seconds is None else f"{one.row.seconds[0]:.0f}"),
    "kept": Column("numbers a task keeps", _kept),
    "command": Column("command", lambda one: f"`{command(one.job, one.seeds)}`", False),
}
USUAL = ("benchmark", "seeds", "acc", "bwt", "paper-acc", "paper-bwt", "seconds", "command")


def block(experiment: Experiment, plan: str, columns: Sequence[str], records: Sequence[Record]) -> str:
    """What stands between the marks: a table, notes to the paper's numbers, and where all of it comes from."""
    lines = planned(experiment, records)
    chosen = columns or [name for name in USUAL if _says_something(name, lines)]
    shown = [COLUMNS[name] for name in chosen]
    notes = [note for note in dict.fromkeys(map(_note, lines)) if note and "paper-acc" in chosen]

    def title(one: Planned) -> str:
        return f"{one.job.title} ({notes.index(_note(one)) + 1})" if _note(one) in notes else one.job.title

    table = [["", *(column.head for column in shown)]]
    table += [["---", *("---:" if column.numeric else "---" for column in shown)]]
    table += [[title(one), *(column.cell(one) for column in shown)] for one in lines]
    seeds = ", ".join(map(str, experiment.seeds))
    said = [f"{experiment.title}: mean ± sample deviation over seeds {seeds}."]
    said += ["Seconds are of one run."] if "seconds" in chosen else []
    said += [f"All rows: `ness table --plan {plan} --device auto`."]
    said += [f"({number}) The paper's figures: {note}." for number, note in enumerate(notes, start=1)]
    return f"\n{pipes(table)}\n{' '.join(said)}\n\n"


def _says_something(name: str, lines: Sequence[Planned]) -> bool:
    """Whether a usual column is worth its place: several benchmarks, numbers of the paper."""
    cells = {COLUMNS[name].cell(one) for one in lines}
    return len(cells) > 1 if name == "benchmark" else cells != {""}


def renewed(text: str, root: Path, records: Sequence[Record], where: str) -> str:
    """The document with every block made anew; plans are found from `root`."""
    return "".join(_renewed(text, root, records, where))


def _renewed(text: str, root: Path, records: Sequence[Record], where: str) -> Iterator[str]:
    begun = 0  # the line of the mark we are behind
    for at, line in enumerate(text.splitlines(keepends=True), start=1):
        found, ends = BEGIN.fullmatch(line.strip()), line.strip() == END
        if (ends and not begun) or (found and begun):
            raise NessError(f"{where}, line {at}: {line.strip()} where no block may {'end' if ends else 'begin'}")
        if ends:
            begun = 0
        if not begun:
            yield line
        if found:
            begun = at
            columns = _columns(found["columns"].split(), f"{where}, line {at}")
            yield block(read(root / found["plan"]), found["plan"], columns, records)
    if begun:
        raise NessError(f"{where}, line {begun}: the block has no end; expected a line {END}")


def _columns(names: Sequence[str], where: str) -> Sequence[str]:
    for name in names:
        if name not in COLUMNS:
            known = f"there are {', '.join(COLUMNS)}.{nearest(name, COLUMNS)}"
            raise NessError(f"{where}: no column is called {name!r}; {known}")
    return names


def records_in(folder: Path) -> Sequence[Record]:
    """Every record below a folder; one that cannot be counted is an error, for a figure would be missing in silence."""
    found = collect([folder], none_is_fine=True)
    if found.problems:
        raise NessError(f"{found.problems[0]}; mend or remove it")
    return found.records


def main(argv: Sequence[str]) -> int:
    """Renews these documents, from results/ here, and says which of them changed."""
    root = Path.cwd()
    records = records_in(root / "results")
    for path in map(Path, argv):
        before = path.read_text(encoding="utf-8")
        after = renewed(before, root, records, str(path))
        if after != before:
            path.write_text(after, encoding="utf-8", newline="\n")
            sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
