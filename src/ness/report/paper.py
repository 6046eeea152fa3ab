"""The paper's numbers, to stand beside ours."""

import dataclasses
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from ness.lab.runs.settings import Training

RECIPE = {field.name for field in dataclasses.fields(Training)} - {"valid_order"} | {"rule", "eps", "capacity"}
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

    def belongs_to(self, method: str, benchmark: str, settings: Mapping[str, Any], changed: Collection[str]) -> bool:
        """Whether this is the number of such a run: no recipe of our own may have been set by hand."""
        if (method, benchmark) != (self.method, self.benchmark) or (set(changed) & RECIPE) - self.when.keys():
            return False
        return all(
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


def number_for(method: str, benchmark: str, settings: Mapping[str, Any], setting: str = "") -> PaperNumber | None:
    """The paper's number for a run, or None where the run is not of the paper's setting.

    >>> number_for("ness", "cifar100", {"optimizer": "sgdm", "weight_decay": 1e-4}).acc
    (72.46, 0.26)
    >>> number_for("ness", "cifar100", {"optimizer": "sgdm", "weight_decay": 1e-4}, "fixed schedule=cosine")
    >>> number_for("ness", "digits", {})

    Args:
        method: its name.
        benchmark: its name.
        settings: all of the run's settings.
        setting: the preset and what was set by hand, as a record has it.
    """
    changed = set(re.findall(r"(\w+)=", setting))
    return next((one for one in numbers() if one.belongs_to(method, benchmark, settings, changed)), None)
