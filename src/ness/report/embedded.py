"""Data inside the page: JSON that cannot end the script element it stands in."""

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from ness.report.groups import Setting
from ness.report.pictures.palette import STEPS

_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def embedded(value: Any) -> Markup:
    r"""The JSON of a value, compact, with everything that HTML could take for markup written as escapes.

    >>> print(embedded({"name": "</script>"}))
    {"name":"\u003c/script\u003e"}
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.translate(_ESCAPES))


def runs(found: Sequence[Setting], labels: Sequence[str]) -> dict[str, Any]:
    """What the script draws from: every run's matrix up to its diagonal, tasks and labels once each."""
    tasks: dict[tuple[str, ...], int] = {}
    every = []
    for setting, label in zip(found, labels, strict=True):
        for record in setting.records:
            number = tasks.setdefault(record.tasks, len(tasks))
            rows = [[round(value, 2) for value in row if value is not None] for row in record.accuracy]
            every.append([record.benchmark, label, record.seed, number, rows])
    return {"steps": STEPS, "tasks": list(tasks), "runs": every}
