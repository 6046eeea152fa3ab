"""The certificates in a setting's records: per layer and task, what was free, what was promised, what was measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ness.report.groups import Setting
from ness.report.records import Record


@dataclass(frozen=True)
class Promise:
    """One layer after one task: the rank's mean over the seeds, and the largest of all else."""

    layer: str
    task: int  # counted from 1
    fan_in: int
    rank: float  # free directions, mean over seeds
    bound: float  # for the worst single old input row
    rms_bound: float | None  # root-mean-square over all old rows; None in records that do not have it
    drift: float  # root-mean-square, measured
    relative: float  # drift as a share of the layer's own output

    @property
    def limit(self) -> float:
        """What the measured drift is held against: the RMS bound, or the worst row's, which is never smaller."""
        return self.bound if self.rms_bound is None else self.rms_bound


def promises(setting: Setting) -> list[Promise]:
    """By task, then layer; nothing where the method leaves no certificate."""
    found: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for record in setting.records:
        for task, row in _rows(record):
            found.setdefault((task, row["name"]), []).append(row)
    return [_promise(layer, task, rows) for (task, layer), rows in sorted(found.items(), key=lambda item: item[0][0])]


def layers(found: Iterable[Promise]) -> list[str]:
    """The layers' names in the network's order."""
    return list(dict.fromkeys(one.layer for one in found))


def limit_name(found: Iterable[Promise]) -> str:
    """Which bound `limit` is."""
    return "worst-row bound" if any(one.rms_bound is None for one in found) else "RMS bound"


def _rows(record: Record) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """(task counted from 1, layer's row), those that are whole."""
    for lesson, note in enumerate(record.notes):
        rows = note.get("certificate")
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and isinstance(row.get("name"), str) and _whole(row):
                yield lesson + 1, row


def _whole(row: Mapping[str, Any]) -> bool:
    return all(_finite(row.get(key)) for key in ("fan_in", "rank", "bound", "rms_drift", "relative_drift"))


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _promise(layer: str, task: int, rows: Sequence[Mapping[str, Any]]) -> Promise:
    rms = [row.get("rms_bound") for row in rows]
    return Promise(
        layer=layer,
        task=task,
        fan_in=int(rows[0]["fan_in"]),
        rank=sum(row["rank"] for row in rows) / len(rows),
        bound=max(row["bound"] for row in rows),
        rms_bound=max(value for value in rms if value is not None) if all(map(_finite, rms)) else None,
        drift=max(row["rms_drift"] for row in rows),
        relative=max(row["relative_drift"] for row in rows),
    )
