"""Writes the report of a folder of runs: the table in three formats and an accuracy matrix for each of its rows."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ness.errors import NessError
from ness.report import formats, matrix
from ness.report.records import Record
from ness.report.table import rows

TABLES = {"table.md": "markdown", "table.csv": "csv", "table.tex": "latex"}


def write(records: Sequence[Record], folder: Path) -> list[Path]:
    """The paths written, tables first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [*_tables(records, folder), *_figures(records, folder)]
    except OSError as error:
        raise NessError(f"cannot write the report to {folder} ({error.strerror}); choose another --out") from error


def _tables(records: Sequence[Record], folder: Path) -> list[Path]:
    lines = rows(records)
    written = []
    for name, kind in TABLES.items():
        path, temporary = folder / name, folder / f".{name}.{os.getpid()}.tmp"
        temporary.write_text(formats.FORMATS[kind](lines), encoding="utf-8")
        temporary.replace(path)
        written.append(path)
    return written


def _figures(records: Sequence[Record], folder: Path) -> list[Path]:
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.benchmark, record.method, record.digest), []).append(record)
    written = []
    for (benchmark, method, digest), group in groups.items():
        seeds = "seed" if len(group) == 1 else f"mean of {len(group)} seeds"
        title = f"{method} on {benchmark} ({group[0].setting}), {seeds}{f' {group[0].seed}' if len(group) == 1 else ''}"
        stem = folder / re.sub(r"[^\w.-]", "_", f"accuracy-{benchmark}-{method}-{digest}")
        written += matrix.save(matrix.figure([record.accuracy for record in group], title), stem)
    return written
