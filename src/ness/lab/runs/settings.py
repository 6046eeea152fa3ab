"""The settings of a run: shared training fields, the method's, the benchmark's, flat in one frozen dataclass."""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ness._files import read_bytes, reason
from ness.errors import NessError

Preset = Literal["fixed", "reference", "paper"]
LARGEST = 1 << 24  # bytes of a TOML file
DEPTH = 16  # tables and lists inside one another
PRESETS: tuple[Preset, ...] = ("fixed", "reference", "paper")


def setting(default: Any, help: str) -> Any:
    """A field with a default and the line `--help` shows for it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Training:
    """What every method shares: the loop, the optimizer, the schedule."""

    epochs: int = setting(200, "epochs per task at most (plateau), or exactly (cosine)")
    batch: int = setting(64, "samples per step")
    drop_last: bool = setting(False, "leave out an epoch's last, shorter batch")
    optimizer: Literal["sgd", "sgdm", "sam", "adamw"] = setting(
        "sgdm", "plain SGD, SGD with momentum, SGD at SAM's gradient, AdamW"
    )
    lr: float = setting(0.01, "learning rate at the start of each task")
    momentum: float = setting(0.9, "of sgdm")
    weight_decay: float = setting(0.0, "on everything that trains; with ness on the task's increment")
    rho: float = setting(0.05, "radius of SAM's ascent")
    sam_tasks: Literal["all", "first"] = setting("all", "tasks in which SAM perturbs; plain SGD in the others")
    schedule: Literal["plateau", "cosine"] = setting(
        "plateau", "decay on a plateau with best-validation restore, or cosine to 0, last weights kept"
    )
    patience: int = setting(6, "epochs without a lower validation loss before a decay")
    lr_factor: float = setting(2.0, "what a decay divides the learning rate by")
    lr_min: float = setting(1e-5, "a task ends when its learning rate falls below this")
    mixup: float = setting(0.0, "a of Beta(a, a) in mix-up, one share a batch; 0 is off")
    norm: Literal["batch", "stored", "task"] = setting(
        "batch",
        "BatchNorm at test: the test batch's statistics; running ones of training, which dropout distorts; or each "
        "task's own, measured once on its training images after it was learnt",
    )
    valid_order: Literal["drawn", "fixed"] = setting(
        "drawn", "the batches of each validation, unless norm is stored: drawn anew every epoch, or always the same"
    )


@dataclass(frozen=True)
class NetworkChoice:
    """Which network learns."""

    network: str = setting("", "see `ness list networks`; by default the benchmark's own")


# A field that only means something under another's value: field -> (that other field, the values it needs).
ONLY_WITH: Mapping[str, tuple[str, Collection[Any]]] = {
    "momentum": ("optimizer", ("sgdm",)),
    "rho": ("optimizer", ("sam",)),
    "sam_tasks": ("optimizer", ("sam",)),
    "patience": ("schedule", ("plateau",)),
    "lr_factor": ("schedule", ("plateau",)),
    "lr_min": ("schedule", ("plateau",)),
    "valid_order": ("schedule", ("plateau",)),
}
AND_WITH: Mapping[str, tuple[str, Collection[Any]]] = {"valid_order": ("norm", ("batch", "task"))}  # a second condition


def draws_validation(settings: Mapping[str, Any]) -> bool:
    """Whether a run depends on the order of its validation images, drawn every epoch.

    That is so where their loss chooses the weights that are kept and BatchNorm looks at whole batches of them.

    >>> draws_validation({"valid_order": "drawn", "schedule": "plateau", "norm": "batch"})
    True
    >>> draws_validation({"valid_order": "drawn", "schedule": "cosine", "norm": "batch"})
    False
    """
    found = (settings.get("valid_order"), settings.get("schedule"), settings.get("norm"))
    return found in (("drawn", "plateau", "batch"), ("drawn", "plateau", "task"))


def identifying_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that tell runs apart: without an order of validation that nothing depends on, or that never changes.

    Runs were recorded before there was a choice of it, or of a network: they keep their names.
    """
    idle = [] if draws_validation(settings) else ["valid_order"]
    idle += [] if settings.get("network") else ["network"]
    return {name: value for name, value in settings.items() if name not in idle}


def compose(name: str, *parts: type, shared: bool = False) -> type:
    """One flat frozen dataclass with the fields of all parts.

    A name that occurs twice is an error, or with `shared` the first one's field; every field needs a default.
    """
    seen: dict[str, str] = {}
    fields = []
    for part in parts:
        hints = typing.get_type_hints(part)
        for item in dataclasses.fields(part):
            if item.name in seen:
                if shared:
                    continue
                raise NessError(f"setting {item.name!r} is in both {seen[item.name]} and {part.__name__}; rename one")
            seen[item.name] = part.__name__
            fields.append((item.name, hints[item.name], same_field(item)))
    return dataclasses.make_dataclass(name, fields, frozen=True)


def same_field(item: dataclasses.Field[Any]) -> Any:
    """A new field with the default and the help line of this one."""
    if item.default_factory is not dataclasses.MISSING:
        return field(default_factory=item.default_factory, metadata=item.metadata)
    if item.default is dataclasses.MISSING:
        raise NessError(f"setting {item.name!r} has no default; give it one")
    return field(default=item.default, metadata=item.metadata)


def part_of(settings: Any, kind: type) -> Any:
    """The `kind` dataclass inside composed settings, e.g. `part_of(settings, Training)`."""
    return kind(**{item.name: getattr(settings, item.name) for item in dataclasses.fields(kind)})


def nearest(name: str, valid: Iterable[str]) -> str:
    """' Did you mean x?' for the valid name closest to this one, or nothing.

    >>> nearest("esp", ["eps", "lr"])
    ' Did you mean eps?'
    """
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def overridden(kind: type, base: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> Any:
    """An instance of `kind` from base values and changes; names and types of the changes are checked."""
    hints = typing.get_type_hints(kind)
    for name, value in changes.items():
        if name not in hints:
            raise NessError(f"{where}: no setting is called {name!r}.{nearest(name, hints)}")
        check_type(name, value, hints[name], where)
    return kind(**{**base, **{name: _as_declared(value, hints[name]) for name, value in changes.items()}})


def _as_declared(value: Any, hint: Any) -> Any:
    """An int where a float is declared as that float: 1 and 1.0 are one setting, with one digest."""
    return float(value) if isinstance(value, int) and hint in (float, float | None) else value


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file of ours or of a user's.

    Raises:
        NessError: there is no such file, it is no ordinary one, no TOML, or nested deeper than any settings.
    """
    try:
        text = read_bytes(path, LARGEST).decode("utf-8")
        values = tomllib.loads(text)
    except FileNotFoundError as error:
        raise NessError(f"{path}: cannot be read ({reason(error)})") from error
    except UnicodeDecodeError as error:
        raise NessError(f"{path}: cannot be read ({reason(error)})") from error
    except RecursionError as error:
        raise NessError(f"{path}: is not TOML of settings (nested too deep)") from error
    except ValueError as error:  # TOMLDecodeError, and numbers of thousands of digits
        raise NessError(f"{path}: is not TOML ({reason(error)})") from error
    waiting = [(value, 1) for value in values.values()]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEPTH:
            raise NessError(f"{path}: is not TOML of settings (nested too deep)")
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(one, depth + 1) for one in inside]
        if isinstance(value, str) and "\0" in value:
            raise NessError(f"{path}: found text with a zero in it, {value!r:.60}; no name and no path has one")
    return values


def check_type(name: str, value: Any, hint: Any, where: str) -> None:
    """Refuses a value that is not of the field's type; an int is a float."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise NessError(f"{where}: {name} is a whole number of {len(f'{value:x}')} hexadecimal digits; too large")
    if isinstance(hint, types.UnionType):
        if not any(_fits(name, value, option) for option in typing.get_args(hint)):
            raise NessError(f"{where}: {name} is {value!r:.60}, a {type(value).__name__}; expected {hint}")
        return
    if typing.get_origin(hint) is Literal:
        if not isinstance(value, str | int) or value not in typing.get_args(hint):
            known = typing.get_args(hint)
            guess = nearest(str(value)[:60], map(str, known))
            raise NessError(f"{where}: {name} is {value!r:.60}, expected one of {', '.join(map(str, known))}.{guess}")
        return
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            raise NessError(f"{where}: {name} is {value!r:.60}, expected a list")
        for each in value:
            check_type(name, each, typing.get_args(hint)[0], where)
    elif isinstance(hint, type):
        fits = isinstance(value, int | float) if hint is float else isinstance(value, hint)
        if not fits or (isinstance(value, bool) and hint is not bool):
            raise NessError(f"{where}: {name} is {value!r:.60}, a {type(value).__name__}; expected {hint.__name__}")


def _fits(name: str, value: Any, hint: Any) -> bool:
    try:
        check_type(name, value, hint, "")
    except NessError:
        return False
    return True


def check_ranges(settings: Any, *rules: tuple[str, bool, str]) -> None:
    """Refuses the first setting whose value does not hold: (name, whether it holds, what is expected)."""
    for name, holds, expected in rules:
        if not holds:
            found = getattr(settings, name)
            shown = f"{found:g}" if isinstance(found, float) else repr(found)
            raise NessError(f"{name} is {shown}, expected {expected}")


def check_training(training: Training) -> None:
    """Refuses values outside their range."""
    check_ranges(
        training,
        ("epochs", training.epochs >= 1, "at least 1"),
        ("epochs", training.epochs <= 10**6, "at most 1000000"),
        ("batch", training.batch >= 2, "at least 2: BatchNorm cannot normalise one sample"),
        ("batch", training.batch <= 10**6, "at most 1000000"),
        ("lr", training.lr > 0, "above 0"),
        ("momentum", 0 <= training.momentum < 1, "from 0 to below 1"),
        ("weight_decay", training.weight_decay >= 0, "0 or more"),
        ("rho", training.rho > 0, "above 0"),
        ("patience", training.patience >= 1, "at least 1"),
        ("lr_factor", training.lr_factor > 1, "above 1"),
        ("lr_min", 0 <= training.lr_min <= training.lr or training.schedule != "plateau", "from 0 to lr"),
        ("mixup", training.mixup >= 0, "0 or more"),
    )


def check_contradictions(
    settings: Any, explicit: Collection[str], only_with: Mapping[str, tuple[str, Collection[Any]]]
) -> None:
    """Refuses a field that was set by hand but means nothing under the value of another."""
    for name in explicit:
        if name in only_with:
            other, needed = only_with[name]
            found = getattr(settings, other)
            if found not in needed:
                raise NessError(
                    f"{name} was set, but {other} is {found!r}; {name} only means something with "
                    f"{other} {' or '.join(map(str, needed))}: leave {name} out, or change {other}"
                )
