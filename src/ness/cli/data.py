"""`ness data list | get NAME | check NAME`: which data is there, where, verified or not; and how to get it."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from ness.cli.main import Parser, WrongUse
from ness.errors import NessError, printable
from ness.lab.datasets.catalogue import CATALOGUE, GROUPS, DataSet, look_up
from ness.lab.datasets.download import Progress, at_tenth
from ness.lab.datasets.load import get
from ness.lab.datasets.verify import Status, check, status

_EXAMPLE = """example:
  ness data list                             what is there and what is not
  ness data get cifar100                     download it into the cache folder
  ness data get five-datasets --data sets    download all five sets into the folder sets
  ness data check mnist --data sets          read it all, compare checksums, counts and shapes

Data is looked for in --data, then in the folder named by NESS_DATA, then in the user's cache folder; in the formats in
which it is published, or as NAME.npz with x_train, y_train, x_test, y_test.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code is 0 (done), 2 (wrong use) or 1 (failed)."""
    try:
        arguments = _parser().parse_args(argv)
    except WrongUse as error:
        sys.stderr.write(f"ness data: {printable(str(error))}\n")
        return 2
    except SystemExit:  # --help
        return 0
    try:
        sets = list(dict.fromkeys(data_set for name in arguments.names for data_set in look_up(name)))
    except NessError as error:
        sys.stderr.write(f"ness data: {printable(str(error))}\n")
        return 2
    run = {"list": _list, "get": _get, "check": _check}[arguments.command]
    try:
        return run(sets, arguments.data)
    except NessError as error:
        sys.stderr.write(f"ness data: {printable(str(error))}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="ness data",
        description="Find, download and check the data sets of the benchmarks.",
        epilog=_EXAMPLE,
        formatter_class=form,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list | get | check")
    known = f"one or more of: {', '.join([*CATALOGUE, *GROUPS])}"
    for name, text in (
        ("list", "name, size, where it was found, verified or not"),
        ("get", "download what is not there yet"),
        ("check", "read and compare everything"),
    ):
        command = commands.add_parser(name, help=text, description=text, epilog=_EXAMPLE, formatter_class=form)
        if name == "list":
            command.add_argument("names", nargs="*", metavar="NAME", help=known, default=["all"])
        else:
            command.add_argument("names", nargs="+", metavar="NAME", help=known)
        command.add_argument("--data", type=Path, metavar="FOLDER", help="look here first, and download to here")
    return parser


def _list(sets: list[DataSet], data: Path | None) -> int:
    _table([status(data_set, data) for data_set in sets])
    return 0


def _check(sets: list[DataSet], data: Path | None) -> int:
    results = [check(data_set, data) for data_set in sets]
    _table(results)
    return 0 if all(result.good for result in results) else 1


def _get(sets: list[DataSet], data: Path | None) -> int:
    failed = False
    for data_set in sets:
        try:
            with _shown() as progress:
                get(data_set, data, progress)
        except NessError as error:
            failed = True
            sys.stderr.write(f"ness data: {printable(str(error))}\n")
    try:
        _table([status(data_set, data) for data_set in sets])
    except NessError:
        if not failed:  # else it is the same again
            raise
    return 1 if failed else 0


def _table(rows: list[Status]) -> None:
    """The table alone goes to standard output; why something is broken, to standard error."""
    cells = [("name", "size", "where", "state")]
    for row in rows:
        size = f"{row.size / 1e6:.0f} MB" if row.size else "-"
        cells.append((row.data_set.name, size, printable(str(row.found.path)) if row.found else "-", row.state))
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    for name, size, where, state in cells:
        sys.stdout.write(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {where:<{widths[2]}}  {state}\n")
    for row in rows:
        if row.reason:
            sys.stderr.write(f"ness data: {printable(row.reason)}\n")


@contextmanager
def _shown() -> Iterator[Progress]:
    """Progress of downloads on standard error: live bars in a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console) as bars:
        tasks = {}

        def progress(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield progress


def _lines(name: str, done: int, total: int) -> None:
    if at_tenth(done, total):
        sys.stderr.write(f"{name}: {done} of {total} bytes\n")
