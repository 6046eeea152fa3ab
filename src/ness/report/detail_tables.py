"""The lesser tables: accuracy matrix and certificate of a setting, times of a benchmark; as Markdown, CSV and LaTeX."""

from collections.abc import Sequence
from dataclasses import dataclass

from ness.report import certificates, formats, latex
from ness.report.groups import Setting, labels

Value = str | int | float | None


@dataclass(frozen=True)
class Sheet:
    """A table: the name of its files, what it says, a header, a format for each column, and its lines."""

    name: str
    caption: str
    header: tuple[str, ...]
    formats: tuple[str, ...]  # "" for text, else as in an f-string
    lines: tuple[tuple[Value, ...], ...]

    def shown(self, line: Sequence[Value]) -> list[str]:
        """A line as people read it."""
        return [
            "" if value is None else format(value, kind) if kind else str(value)
            for value, kind in zip(line, self.formats, strict=True)
        ]

    def markdown(self) -> str:
        """The caption and a pipe table."""
        rule = ["---:" if kind else "---" for kind in self.formats]
        caption = " ".join(self.caption.replace("<", "&lt;").split())
        return f"{caption}\n\n" + formats.pipes([self.header, rule, *map(self.shown, self.lines)])

    def csv(self) -> str:
        """Every number in full."""
        return formats.commas(
            [self.header, *[["" if value is None else value for value in line] for line in self.lines]]
        )

    def latex(self) -> str:
        """A booktabs tabular with the caption as a comment."""
        header = [latex.escape(cell) for cell in self.header]
        lines = [[latex.escape(cell) or "--" for cell in self.shown(line)] for line in self.lines]
        columns = "".join("r" if kind else "l" for kind in self.formats)
        return f"% {' '.join(self.caption.split())}\n" + latex.booktabs(header, lines, columns)


def matrix(setting: Setting, label: str, stem: str) -> Sheet:
    """A[t][i] of a setting, its mean over seeds."""
    tasks = setting.first.tasks
    caption = (
        f"Test accuracy in percent of {label} on {setting.first.benchmark}: after a task (down), on a task (right); "
        f"mean over seeds {' '.join(map(str, setting.seeds))}."
    )
    lines = tuple((name, *row) for name, row in zip(setting.lessons, setting.accuracy, strict=True))
    return Sheet(f"accuracy-{stem}", caption, ("after", *tasks), ("", *[".2f"] * len(tasks)), lines)


def certificate(setting: Setting, label: str, stem: str) -> Sheet | None:
    """What every layer promised and lost after each task; None for a method without certificates."""
    found = certificates.promises(setting)
    if not found:
        return None
    caption = (
        f"The certificate of {label} on {setting.first.benchmark}: free directions (mean over seeds), bounds, and the "
        "drift that was measured (the largest over seeds), summed up since each input was observed."
    )
    header = ("task", "layer", "fan-in", "rank", "bound", "rms bound", "rms drift", "relative drift")
    kinds = ("d", "", "d", ".1f", ".3g", ".3g", ".3g", ".3g")
    lines = tuple(
        (one.task, one.layer, one.fan_in, one.rank, one.bound, one.rms_bound, one.drift, one.relative) for one in found
    )
    return Sheet(f"certificate-{stem}", caption, header, kinds, lines)


def times(found: Sequence[Setting], stem: str) -> Sheet:
    """Seconds a task for each setting of a benchmark, mean over seeds."""
    longest = max(found, key=lambda one: len(one.first.tasks)).first.tasks
    lines = []
    for setting, label in zip(found, labels(found), strict=True):
        runs = setting.records
        epochs = sum(sum(run.epochs) for run in runs) / len(runs)
        each = task_seconds(setting)
        spread: list[Value] = [*each, *[None] * len(longest)]
        total = sum(run.seconds for run in runs) / len(runs)
        lines.append((label, total, epochs, total / epochs if epochs else None, *spread[: len(longest)]))
    header = ("method", "seconds", "epochs", "seconds per epoch", *(f"task {i + 1}" for i in range(len(longest))))
    caption = f"Where the time went on {found[0].first.benchmark}: seconds of a run, mean over seeds."
    return Sheet(f"times-{stem}", caption, header, ("", ".1f", ".1f", ".3f", *[".1f"] * len(longest)), tuple(lines))


def task_seconds(setting: Setting) -> list[float]:
    """Seconds of each lesson, mean over the seeds that recorded them all; nothing where none did."""
    whole = [run.task_seconds for run in setting.records if len(run.task_seconds) == len(run.accuracy)]
    return [sum(values) / len(whole) for values in zip(*whole, strict=True)] if whole else []
