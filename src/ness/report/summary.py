"""What a reader should know after ten seconds: who ended best, who forgot least, and how that compares."""

from collections.abc import Sequence
from dataclasses import dataclass

from ness.report.groups import CEILINGS
from ness.report.number_format import number
from ness.report.table import Row


@dataclass(frozen=True)
class Fact:
    """A card: a title, a figure to remember, and a line that says what it means."""

    title: str
    figure: str
    text: str


@dataclass(frozen=True)
class Summary:
    """A sentence and a few facts."""

    sentence: str
    facts: tuple[Fact, ...]


def summary(rows: Sequence[Row], labels: Sequence[str]) -> Summary:
    """Of the settings of one benchmark."""
    both = list(zip(rows, labels, strict=True))
    learners = [(row, label) for row, label in both if row.method not in CEILINGS and row.acc is not None]
    if not learners:
        return Summary("There are only runs that learn all tasks at once or apart: nothing could be forgotten.", ())
    best, name = max(learners, key=lambda one: _mean(one[0]))
    facts = [
        Fact("Best at the end", f"{_mean(best):.1f} %", f"{name}: mean accuracy over all tasks after the last one")
    ]
    with_bwt = [(row.bwt[0], label) for row, label in learners if row.bwt is not None]
    if with_bwt:
        least, keeper = max(with_bwt)
        facts.append(Fact("Forgot least", _points(least), f"{keeper}: change of earlier tasks since they were learnt"))
    for row, label in both:
        if row.method == "finetune" and row is not best and row.acc is not None:
            facts.append(_against(_mean(best) - row.acc[0], name, label))
        if row.method == "joint" and row.acc is not None:
            below = row.acc[0] - _mean(best)
            facts.append(
                Fact("To the ceiling", _points(-below), f"{name} against {label}, which sees all tasks at once")
            )
    return Summary(_sentence(best, name, learners), tuple(facts[:4]))


def _against(gain: float, name: str, label: str) -> Fact:
    return Fact("Against no protection", _points(gain), f"{name} over {label}, plain training on task after task")


def _sentence(best: Row, name: str, learners: Sequence[tuple[Row, str]]) -> str:
    seeds = f"{len(best.seeds)} seeds" if len(best.seeds) > 1 else "one seed"
    text = f"{name} ends best: {number(best.acc)} % over all tasks ({seeds})"
    text += f"; {_lost(best.bwt[0])}." if best.bwt is not None else "."
    level = [label for row, label in learners if row is not best and _is_level(row, best)]
    if level:
        named = ", ".join(level[:4]) + (f" and {len(level) - 4} more" if len(level) > 4 else "")
        text += f" Within one deviation of it: {named}."
    plain = next((row for row, _ in learners if row.method == "finetune" and row is not best), None)
    if plain is not None and plain.bwt is not None:
        text += f" Plain fine-tuning ends at {number(plain.acc)} %; {_lost(plain.bwt[0])}."
    return text


def _lost(bwt: float) -> str:
    """What a BWT means.

    >>> _lost(-38.8), _lost(0.4)
    ('it lost 38.80 points of what it had learnt', 'earlier tasks gained 0.40 points')
    """
    if abs(bwt) < 0.005:
        return "earlier tasks stayed as they were"
    return f"it lost {-bwt:.2f} points of what it had learnt" if bwt < 0 else f"earlier tasks gained {bwt:.2f} points"


def _is_level(row: Row, best: Row) -> bool:
    """Whether the difference is within the larger deviation, which one seed alone does not have."""
    deviations = [one.acc[1] for one in (row, best) if one.acc is not None and one.acc[1] is not None]
    return bool(deviations) and _mean(best) - _mean(row) <= max(deviations)


def _mean(row: Row) -> float:
    assert row.acc is not None
    return row.acc[0]


def _points(change: float) -> str:
    """A change with its sign: '−0.2 points'."""
    return f"{change:+.1f} points".replace("-", "−")
