"""The records of what a command has run; a result that is none is one more failure, and the others count."""

from ness.errors import NessError
from ness.lab.runs.sweep import Grid
from ness.report.records import Record, from_result


def records_of(grid: Grid) -> list[Record]:
    """A record an outcome; one whose result.json is damaged goes over to the failures."""
    records, fine = [], []
    for outcome in grid.outcomes:
        try:
            records.append(from_result(outcome.result, str(outcome.folder / "result.json")))
            fine.append(outcome)
        except NessError as error:
            grid.failures[outcome.folder.name] = str(error)
    grid.outcomes = fine
    return records
