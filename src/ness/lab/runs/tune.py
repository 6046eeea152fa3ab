"""Choosing settings without looking at test data: a grid, its Pareto front of ACC against BWT, and the choice."""

import itertools
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ness.errors import NessError
from ness.lab.runs.metrics import mean_and_deviation
from ness.lab.runs.settings import nearest

Over = Mapping[str, Sequence[Any]]  # the values to try of each setting


@dataclass(frozen=True)
class Trial:
    """A setting that was tried: what was set, and its validation ACC and BWT in percent, mean over seeds."""

    values: Mapping[str, Any]
    acc: float
    bwt: float
    acc_std: float | None = None
    bwt_std: float | None = None


def trial(values: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Trial:
    """What the runs of a setting, one per seed, say about it."""
    accs, bwts = [result["acc"] for result in results], [result["bwt"] for result in results]
    if None in bwts:
        raise NessError("the method learns all tasks at once and has no BWT; tune one that learns task after task")
    (acc, acc_std), (bwt, bwt_std) = mean_and_deviation(accs), mean_and_deviation(bwts)
    return Trial(values, acc, bwt, acc_std, bwt_std)


def combinations(over: Over) -> list[dict[str, Any]]:
    """Every combination of the values, the last setting varying fastest.

    >>> combinations({"eps": (1, 2), "lr": (0.1,)})
    [{'eps': 1, 'lr': 0.1}, {'eps': 2, 'lr': 0.1}]
    """
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Those that no other beats: none has at least the same ACC and BWT and more of one of them; by falling ACC.

    >>> [t.acc for t in pareto([Trial({}, 90.0, -5.0), Trial({}, 80.0, -6.0), Trial({}, 85.0, -1.0)])]
    [90.0, 85.0]
    """

    def beaten(one: Trial) -> bool:
        return any(
            other.acc >= one.acc and other.bwt >= one.bwt and (other.acc, other.bwt) != (one.acc, one.bwt)
            for other in trials
        )

    return sorted((one for one in trials if not beaten(one)), key=lambda one: -one.acc)


def choose(trials: Sequence[Trial], least_bwt: float | None = None) -> Trial:
    """The highest validation ACC on the front; with `least_bwt`, among those that forget no more than that."""
    front = pareto(trials)
    allowed = [one for one in front if least_bwt is None or one.bwt >= least_bwt]
    if not allowed:
        best = max(one.bwt for one in front)
        raise NessError(f"no setting reaches a BWT of {least_bwt:g}; the best is {best:.2f}: widen --over")
    return allowed[0]


def parse_over(words: Iterable[str], kind: type) -> dict[str, tuple[Any, ...]]:
    """`name=value,value` words as the values to try, in the types of the settings' dataclass.

    >>> from ness.lab.runs.settings import Training
    >>> parse_over(["lr=0.1,1e-2", "optimizer=sgd"], Training)
    {'lr': (0.1, 0.01), 'optimizer': ('sgd',)}
    """
    hints = typing.get_type_hints(kind)
    over: dict[str, tuple[Any, ...]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.replace("-", "_")
        if not equals or not values:
            raise NessError(f"--over: found {word!r}, expected name=value,value, e.g. lr=0.01,0.02")
        if name not in hints:
            raise NessError(f"--over: no setting is called {name!r}.{nearest(name, hints)}")
        if name in over:
            raise NessError(f"--over: {name} is there twice; give all its values at once")
        over[name] = tuple(dict.fromkeys(read(name, value, hints[name]) for value in values.split(",")))
    if not over:
        raise NessError("--over is empty; name settings to try, e.g. --over eps=3e-4,1e-3 lr=0.005,0.01")
    return over


def read(name: str, text: str, hint: Any) -> Any:
    """One value of a setting from its text."""
    if isinstance(hint, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not types.NoneType]
        return read(name, text, options[0])
    if typing.get_origin(hint) is Literal:
        known = {str(option): option for option in typing.get_args(hint)}
    elif hint is bool:
        known = {"true": True, "false": False}
    elif hint in (int, float, str):
        try:
            return hint(text)
        except ValueError as error:
            raise NessError(f"--over: {name} is {text!r}, expected {hint.__name__}") from error
    else:
        raise NessError(f"--over: {name} cannot be tried by its values; set it with --{name.replace('_', '-')}")
    if text not in known:
        raise NessError(f"--over: {name} is {text!r}, expected one of {', '.join(known)}.{nearest(text, known)}")
    return known[text]


def as_toml(values: Mapping[str, Any], remarks: Sequence[str] = ()) -> str:
    """Flat TOML that `--config` reads, remarks first.

    >>> print(as_toml({"method": "ness", "lr": 0.01, "drop_last": True}, ["tried"]), end="")
    # tried
    method = "ness"
    lr = 0.01
    drop_last = true
    """
    lines = [f"# {remark}" for remark in remarks]
    lines += [f"{name} = {json.dumps(value, default=str)}" for name, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"
