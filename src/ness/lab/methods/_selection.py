"""What moves the plateau schedule and chooses the weights that are kept, for methods whose loss has a penalty."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ness.lab.runs.settings import setting

SelectOn = Literal["objective", "loss"]


@dataclass(frozen=True)
class Selection:
    """A setting of methods with a penalty; the published code of EWC and HAT validates on the objective."""

    select_on: SelectOn = setting(
        "objective",
        "the validation loss of the schedule and of the weights that are kept: cross-entropy plus the method's penalty "
        "(objective), or cross-entropy alone (loss)",
    )


# Under a cosine schedule validation decides nothing.
SELECTION_ONLY_WITH: Mapping[str, tuple[str, Collection[Any]]] = {"select_on": ("schedule", ("plateau",))}
