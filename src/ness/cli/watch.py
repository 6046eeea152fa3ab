"""`ness watch`: what is done, what runs, what is left, and how long it may take, while a table runs elsewhere."""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ness.cli.arguments import understood
from ness.cli.main import WrongUse
from ness.errors import NessError, printable
from ness.lab.runs.status import Node, Standing, State, StatusMonitor, nodes, time_left
from ness.report.formats import HEADER as HEAD_OF_TABLE
from ness.report.formats import LEAST_WANTED, aligned, cells, terminal_width
from ness.report.number_format import duration
from ness.report.records import Record, from_result
from ness.report.table import rows

ABOUT = """Show what is done, what runs and what is left in a folder of runs, live, until all is done or Ctrl-C.

Away from a terminal the state is printed once.

Examples: ness watch runs/ · ness watch runs/ --every 10 · ness watch runs/ --once"""

OPEN: tuple[State, ...] = ("running", "stopped", "failed", "damaged", "waiting")  # in this order, what is not done


@dataclass(frozen=True)
class WatchArguments:
    """What to watch, and how often to look."""

    runs: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="folder of the run folders")] = Path("runs")
    every: Annotated[float, tyro.conf.arg(help="seconds between two looks")] = 2.0
    once: Annotated[bool, tyro.conf.arg(help="look once and leave")] = False


def main(argv: list[str]) -> int:
    """Looks once, or until everything is done."""
    own = understood(WatchArguments, args=argv, prog="ness watch", description=ABOUT)
    if not 0 < own.every <= 86400:
        raise WrongUse(f"--every is {own.every:g}, expected seconds above 0, and no more than a day's")
    if not own.runs.is_dir():
        raise NessError(f"{own.runs} is no folder; expected the one that ness run or ness table writes to (--out)")
    watched = StatusMonitor(own.runs, is_result)
    console = Console(file=sys.stdout)
    if own.once or not console.is_terminal:
        sys.stdout.write(screen(watched.look(), nodes=nodes(own.runs)))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            found = watched.look()
            live.update(
                Text(screen(found, console.height - 2, nodes(own.runs)), no_wrap=True, overflow="ellipsis"),
                refresh=True,
            )
            if found and all(one.state in ("done", "damaged", "failed") for one in found):
                break
            time.sleep(own.every)
    return 0


def is_result(result: Mapping[str, Any]) -> bool:
    """Whether a table could be made of it."""
    try:
        from_result(result, "")
    except NessError:
        return False
    return True


def screen(found: Sequence[Standing], height: int | None = None, nodes: Sequence[Node] = ()) -> str:
    """The state as text: a sentence, a cluster's nodes, the runs that are not done, and the table of the others."""
    if not found:
        return "no run yet\n"
    table = results(found)
    pending = [one for state in OPEN for one in found if one.state == state]
    taken = table.count("\n") + (len(nodes) + 2 if nodes else 0) + 6
    room = len(pending) if height is None else max(3, height - taken)
    parts = [headline(found), *([aligned([NODES_HEADER, *map(node_line, nodes)])] if nodes else [])]
    if pending:
        parts.append(aligned([HEADER, *(line(one) for one in pending[:room])], terminal_width()))
        if len(pending) > room:
            parts.append(f"… and {len(pending) - room} more\n")
    notes = "".join(f"{printable(one.note)}\n" for one in found if one.note)
    return "\n".join([*parts, *([table] if table else []), *([notes] if notes else [])])


def headline(found: Sequence[Standing]) -> str:
    """'7 of 12 runs done ▓▓▓▓▓▓░░░░ 1 running, 4 waiting, about 35 s to go'."""
    count = Counter(one.state for one in found)
    share = sum(one.share for one in found) / len(found)
    rest = [f"{count[state]} {state}" for state in OPEN if count[state]]
    left = time_left(found)
    if count["running"] and left is not None:
        rest.append(f"about {duration(left) if left > 59 else f'{left:.0f} s'} to go")
    elif not count["running"] and count["stopped"] + count["waiting"]:
        rest.append("no process runs them: the same command goes on")
    return f"{count['done']} of {len(found)} runs done {bar(share)} {', '.join(rest)}".rstrip() + "\n"


NODES_HEADER = ("node", "CPUs", "GPUs", "runs now")


def node_line(one: Node) -> tuple[str, ...]:
    """One machine of a cluster.

    >>> node_line(Node("left (1f2e3d)", False, 8.0, 2.0, 0))
    ('left (1f2e3d)', '8', '2', 'gone')
    """
    return one.name, f"{one.cpus:g}", f"{one.gpus:g}", str(one.runs) if one.alive else "gone"


HEADER = ("run", "state", "", "now", "so far")


def line(one: Standing) -> tuple[str, ...]:
    """One run that is not done."""
    asked, past = one.asked, one.history
    name = f"{asked.method} on {asked.benchmark}, seed {asked.seed}"
    if asked.setting != "fixed":
        name += f" ({asked.setting})"
    if one.state in ("waiting", "damaged"):
        return (
            name,
            one.state,
            "",
            "result.json is no result: --again" if one.state == "damaged" and not one.note else "",
            "",
        )
    if one.state == "failed":
        return name, one.state, "", printable(str(past.failed))[:100] if past.failed else "", ""
    lessons = f"/{asked.lessons}" if asked.lessons else ""
    now = f"task {past.learnt + 1}{lessons} epoch {past.epoch}/{asked.epochs}"
    if past.valid_accuracy is not None:
        now += f" valid {past.valid_accuracy:.1f} %"
    mean = f"{sum(past.accuracy[-1]) / len(past.accuracy[-1]):.1f} %" if past.accuracy else ""
    state = f"{one.state} on {one.node}" if one.node else one.state
    return name, state, bar(one.share, 10), now, mean


def results(found: Sequence[Standing]) -> str:
    """The table of what is done, narrow enough for a terminal; nothing where nothing is."""
    records: list[Record] = []
    for one in found:
        if one.result is not None:
            with contextlib.suppress(NessError):
                records.append(from_result(one.result, one.asked.folder))
    narrow = [(*line[:6], line[9]) for line in (HEAD_OF_TABLE, *(cells(row) for row in rows(records)))]
    return aligned(narrow, terminal_width(), LEAST_WANTED) if records else ""


def bar(share: float, width: int = 20) -> str:
    """A bar of blocks.

    >>> bar(0.5, 4)
    '██░░'
    """
    full = round(share * width)
    return "█" * full + "░" * (width - full)
