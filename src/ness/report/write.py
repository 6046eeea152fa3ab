"""Writes the report of a set of runs: the page, every table in three formats, every figure in three."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from ness._files import make_folder, reason, write_bytes
from ness.errors import NessError
from ness.report import detail_tables, draw, formats, groups
from ness.report.collect import Found
from ness.report.detail_tables import Sheet
from ness.report.draw import Drawing
from ness.report.groups import Setting
from ness.report.page import page
from ness.report.pictures.export import save
from ness.report.table import rows

TABLES = {"table.md": "markdown", "table.csv": "csv", "table.tex": "latex"}


def write(found: Found, folder: Path, each_run: bool = False) -> Iterator[Path]:
    """The paths, each when it is written: the page first, then the tables, then the figures."""
    try:
        make_folder(folder)
        yield _file(folder / "report.html", page(found))
        yield from tables(found, folder)
        settings = groups.settings(found.records)
        yield from _figures(draw.of_benchmarks(settings), folder / "figures")
        yield from _figures(draw.of_settings(settings), folder / "figures")
        if each_run:
            yield from _figures(draw.of_runs(settings), folder / "figures" / "runs")
    except OSError as error:
        raise NessError(f"cannot write the report to {folder} ({reason(error)}); choose another --out") from error


def tables(found: Found, folder: Path) -> Iterator[Path]:
    """The main table and the lesser ones, each in three formats."""
    lines = rows(found.records)
    for name, kind in TABLES.items():
        yield _file(folder / name, formats.FORMATS[kind](lines))
    for sheet in _sheets(groups.settings(found.records)):
        for ending, text in (("md", sheet.markdown()), ("csv", sheet.csv()), ("tex", sheet.latex())):
            yield _file(folder / "tables" / f"{sheet.name}.{ending}", text)


def _sheets(settings: list[Setting]) -> Iterator[Sheet]:
    for name in dict.fromkeys(setting.first.benchmark for setting in settings):
        mine = [setting for setting in settings if setting.first.benchmark == name]
        yield detail_tables.times(mine, groups.file_name(name))
    for setting, label, stem in zip(settings, groups.labels(settings), groups.stems(settings), strict=True):
        yield detail_tables.matrix(setting, label, stem)
        if (sheet := detail_tables.certificate(setting, label, stem)) is not None:
            yield sheet


def _figures(drawings: Iterable[tuple[str, Drawing]], folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings:
        if (drawn := drawing()) is not None:
            yield from save(drawn, folder / name)


def _file(path: Path, text: str) -> Path:
    """Writes a file whole or not at all."""
    write_bytes(path, text.encode(), "choose another --out")
    return path
