"""The paper's numbers, to stand beside ours."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

Printed = tuple[int | float, int | float]  # mean and deviation; whole where the paper prints whole numbers


@dataclass(frozen=True)
class PaperNumber:
    """ACC and BWT as the paper prints them: mean and deviation over five seeds, in percent."""

    method: str
    benchmark: str
    acc: Printed
    bwt: Printed
    when: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def belongs_to(self, method: str, benchmark: str, settings: Mapping[str, Any]) -> bool:
        """Whether this is the number of such a run."""
        return (method, benchmark) == (self.method, self.benchmark) and all(
            key in settings and (bool(settings[key]) == value if isinstance(value, bool) else settings[key] == value)
            for key, value in self.when.items()
        )


@cache
def numbers() -> tuple[PaperNumber, ...]:
    """All of them."""
    entries = tomllib.loads(files("ness.report").joinpath("paper.toml").read_text(encoding="utf-8"))["number"]
    return tuple(
        PaperNumber(
            entry["method"],
            entry["benchmark"],
            (entry["acc"][0], entry["acc"][1]),
            (entry["bwt"][0], entry["bwt"][1]),
            entry.get("when", {}),
            entry.get("note", ""),
        )
        for entry in entries
    )


def number_for(method: str, benchmark: str, settings: Mapping[str, Any]) -> PaperNumber | None:
    """The paper's number for a run, or None where it has none.

    >>> number_for("ness", "cifar100", {"optimizer": "sgdm", "weight_decay": 1e-4}).acc
    (72.46, 0.26)
    >>> number_for("ness", "digits", {})
    """
    return next((one for one in numbers() if one.belongs_to(method, benchmark, settings)), None)
