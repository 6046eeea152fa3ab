"""The command line: `ness COMMAND`, with a module per command, and how mistakes look."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from ness._files import reason
from ness._version import __version__
from ness.errors import NessError, printable

USAGE = """usage: ness COMMAND [OPTIONS]

Continual learning without forgetting: train task after task, and see what was kept.

  run      train a method on a benchmark             ness run --benchmark digits --method ness
  table    train several methods, print the table    ness table --benchmark digits --methods finetune ness
  tune     choose settings on validation data        ness tune --method ness --over eps=1e-3,2e-3
  report   page, tables, figures of finished runs    ness report runs/
  watch    what is done, what runs, what is left     ness watch runs/
  list     what there is                             ness list methods | benchmarks
  data     the data sets                             ness data list | get | check
  repair   mend a fine-tune that has forgotten       ness repair base/ tuned/ --new new.txt --old old.txt --out mended/
  study    adapt a language model in many ways       ness study PLAN --out results/language

`ness COMMAND --help` says more. Exit codes: 0 done, 1 failed, 2 wrong use, 130 Ctrl-C.
"""

# command -> the module whose `main(argv) -> int` carries it out, imported when it is needed
COMMANDS = {
    "run": "ness.cli.run",
    "table": "ness.cli.table",
    "tune": "ness.cli.tune",
    "report": "ness.cli.report",
    "watch": "ness.cli.watch",
    "list": "ness.cli.list",
    "data": "ness.cli.data",
    "repair": "ness.cli.repair",
    "study": "ness.cli.study",
}


class WrongUse(NessError):
    """A command that was not understood: exit code 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line."""

    def error(self, message: str) -> NoReturn:
        """What is wrong, and where more is said."""
        raise WrongUse(f"{message}; `{self.prog} --help` says more")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a user's mistake is one line, never a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no failure
    try:
        code = dispatch(arguments)
        sys.stdout.flush()
        return code
    except WrongUse as error:
        return _fail(str(error), 2)
    except NessError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt as stop:
        return _fail(f"interrupted{f'; {stop}' if str(stop) else ''}", 130)
    except SystemExit as exit:  # the argument parser's own: 0 after --help, 2 after a mistake
        return exit.code if isinstance(exit.code, int) else 1
    except BrokenPipeError:  # the reader of a pipe left, e.g. `| head`
        _forget_output()
        return 1
    except (OSError, MemoryError, RecursionError) as error:
        name = getattr(error, "filename", None)
        _forget_output()
        return _fail(f"{f'{name}: ' if name else ''}{reason(error)}", 1)


def _forget_output() -> None:
    """What is not written yet cannot be: without this the interpreter would try again, and complain, when it ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def dispatch(arguments: list[str]) -> int:
    """Finds the command and hands it the rest."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        (sys.stdout if arguments else sys.stderr).write(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        sys.stdout.write(f"ness {__version__}\n")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        from ness.lab.runs.settings import nearest

        raise WrongUse(f"no command is called {name!r}; there are {', '.join(COMMANDS)}.{nearest(name, COMMANDS)}")
    return command(name)(rest)


def command(name: str) -> Callable[[list[str]], int]:
    """The `main` of a command."""
    try:
        found: Callable[[list[str]], int] = import_module(COMMANDS[name]).main
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("ness."):
            raise WrongUse(f"`ness {name}` is not part of this installation ({error.name} is missing)") from error
        raise NessError(
            f"`ness {name}` needs the package {error.name}, which is not installed; "
            "install the laboratory: pip install 'ness-cl[lab]'"
        ) from error
    return found


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"ness: {printable(message)}\n")
    return code
