"""Tables and pictures inside documents, made anew from records by `make tables`: never typed, never drawn by hand.

A table stands between the lines `<!-- rows: experiments/NAME.toml -->`, which may name columns after the file, or say
`finished` for the rows alone whose seeds are all run, or `fast` for the rows as they are run with --fast, and
`<!-- end rows -->`; a picture between `<!-- picture: WHICH experiments/NAME.toml -->` and `<!-- end picture -->`; the
table of a study of language models between `<!-- study: experiments/language-NAME.toml -->` and `<!-- end study -->`,
its picture is `study-NAME`.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ness._files import write_bytes
from ness.errors import NessError
from ness.lab.runs.experiment import Experiment, read
from ness.lab.runs.jobs import Job
from ness.lab.runs.metrics import mean_and_deviation
from ness.lab.runs.settings import nearest
from ness.report import studies
from ness.report.collect import collect
from ness.report.document_pictures import Picture, picture, renew, study_picture
from ness.report.experiment_rows import Planned, planned
from ness.report.formats import NOT_RUN, pipes
from ness.report.number_format import number, printed
from ness.report.records import Record
from ness.report.storage_cost import most_kept
from ness.report.table import Row

BEGIN = re.compile(r"<!-- (?P<kind>rows|study|picture): (?P<words>\S+( \S+)*) -->")
END = re.compile(r"<!-- end (?P<kind>rows|study|picture) -->")


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
    kept = most_kept(one.runs)
    return "" if kept is None else f"{kept:,}"


def _general(one: Planned, name: str) -> str:
    found = [run.general[name] for run in one.runs if name in run.general]
    return f"{sum(found) / len(found):.3f}{_deviation(found)}" if found else ""


def _deviation(values: Sequence[float]) -> str:
    deviation = mean_and_deviation(values)[1]
    return "" if deviation is None else f" ± {deviation:.3f}"


def _note(one: Planned) -> str:
    return one.row.paper.note if one.row.paper else ""


def _minus(text: str) -> str:
    return text.replace("-", "−")


def _seconds(row: Row) -> str:
    """Seconds of a run, and of which device."""
    if row.seconds is None:
        return ""
    return f"{row.seconds[0]:.0f}{f' ({row.device})' if row.device else ''}"


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
    "seconds": Column("seconds", lambda one: _seconds(one.row)),
    "kept": Column("numbers a task keeps", _kept),
    "spearman": Column("Spearman", lambda one: _general(one, "spearman")),
    "overlap": Column("top-10 overlap", lambda one: _general(one, "overlap")),
    "command": Column("command", lambda one: f"`{command(one.job, one.seeds)}`", False),
}
FINISHED, FAST = "finished", "fast"
STUDIES, BRIEF = Path("results/language"), "brief"
USUAL = ("benchmark", "seeds", "acc", "bwt", "paper-acc", "paper-bwt", "seconds", "command")


def block(
    experiment: Experiment, plan: str, columns: Sequence[str], records: Sequence[Record], finished: bool = False
) -> str:
    """What stands between the marks: a table, notes to the paper's numbers, and where all of it comes from."""
    every = planned(experiment, records)
    lines = [one for one in every if len(one.runs) == len(one.seeds)] if finished else every
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
    said += [f"Run so far: {len(lines)} of {len(every)} rows."] if len(lines) < len(every) else []
    said += ["Seconds are of one run."] if "seconds" in chosen else []
    quick = " --fast" if any(one.job.fast for one in every) else ""
    said += [f"All rows: `ness table --plan {plan}{quick} --device auto`."]
    said += [f"({number}) The paper's figures: {note}." for number, note in enumerate(notes, start=1)]
    return f"\n{pipes(table)}\n{' '.join(said)}\n\n"


def _says_something(name: str, lines: Sequence[Planned]) -> bool:
    """Whether a usual column is worth its place: several benchmarks, numbers of the paper."""
    cells = {COLUMNS[name].cell(one) for one in lines}
    return len(cells) > 1 if name == "benchmark" else cells != {""}


@dataclass(frozen=True)
class Renewed:
    """A document as it should be, and the pictures it shows."""

    text: str
    pictures: tuple[Picture, ...]


def renewed(text: str, root: Path, records: Sequence[Record], where: str) -> Renewed:
    """The document with every block made anew; `where` is its path from `root`, as plans are found from there."""
    pieces = list(_pieces(text, root, records, where))
    pictures = tuple(piece for piece in pieces if isinstance(piece, Picture))
    return Renewed("".join(_link(one, where) if isinstance(one, Picture) else one for one in pieces), pictures)


def _pieces(text: str, root: Path, records: Sequence[Record], where: str) -> Iterator[str | Picture]:
    """What is kept, line by line, and what is made anew between the marks."""
    begun, kind = 0, ""  # the line of the mark we are behind, and what it begins
    for at, line in enumerate(text.splitlines(keepends=True), start=1):
        found, ends = BEGIN.fullmatch(line.strip()), END.fullmatch(line.strip())
        if (ends and ends["kind"] != kind) or (found and begun):
            raise NessError(f"{where}, line {at}: {line.strip()} where no block may {'end' if ends else 'begin'}")
        if ends:
            begun, kind = 0, ""
        if not begun:
            yield line
        if found:
            begun, kind = at, found["kind"]
            yield _MADE[kind](found["words"].split(), root, records, f"{where}, line {at}")
    if begun:
        raise NessError(f"{where}, line {begun}: the block has no end; expected a line <!-- end {kind} -->")


def _table(words: Sequence[str], root: Path, records: Sequence[Record], where: str) -> str:
    plan, *rest = words
    columns = [word for word in rest if word not in (FINISHED, FAST)]
    return block(read(root / plan, FAST in rest), plan, _columns(columns, where), records, FINISHED in rest)


def _study(words: Sequence[str], root: Path, records: Sequence[Record], where: str) -> str:
    plan, *rest = words
    if rest not in ([], [BRIEF]):
        raise NessError(f"{where}: behind a study's plan may stand {BRIEF} alone, found {' '.join(rest)}")
    found = studies.read(root / plan, root / STUDIES)
    return studies.brief(found, plan) if rest else studies.table(found, plan)


def _picture(words: Sequence[str], root: Path, records: Sequence[Record], where: str) -> Picture:
    if len(words) < 2:
        raise NessError(f"{where}: a picture needs its name and a plan, found {words[0]} alone")
    name, plan, *rest = words
    if name.startswith("study-"):
        return study_picture(name, studies.read(root / plan, root / STUDIES))
    return picture(name, read(root / plan), rest, records, where)


_MADE: Mapping[str, Callable[[Sequence[str], Path, Sequence[Record], str], str | Picture]] = {
    "rows": _table,
    "study": _study,
    "picture": _picture,
}


def _link(one: Picture, where: str) -> str:
    """The line that shows a picture in the document at `where`."""
    if one.draw is None:
        return f"\n*{NOT_RUN}*\n\n"
    path = Path(os.path.relpath(one.file, Path(where).parent)).as_posix()
    words = re.sub(r"([\\\[\]*_`<])", r"\\\1", one.words)
    return f"\n![{words}]({path})\n\n"


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
    """Renews these documents and their pictures, from results/ here, and says which files changed."""
    root = Path.cwd()
    records = records_in(root / "results")
    pictures: dict[Path, Picture] = {}
    texts: dict[Path, str] = {}
    for path in map(Path, argv):
        before = path.read_text(encoding="utf-8")
        after = renewed(before, root, records, str(path))
        if after.text != before:
            texts[path] = after.text
        for one in after.pictures:
            if pictures.setdefault(one.file, one).data != one.data:
                raise NessError(f"{path}: {one.file} shows something else in another document; one plan a picture")
    for (
        one
    ) in pictures.values():  # before the words about them: a picture that cannot be drawn leaves both as they were
        if renew(one, root):
            sys.stdout.write(f"{one.file}\n")
    for path, text in texts.items():
        write_bytes(path, text.encode())
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
