"""`ness study PLAN`: adapt a pretrained language model in many ways, and measure what each learns and forgets."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_EXAMPLE = """example:
  ness study experiments/language-stories15m-reviews.toml --out results/language
  ness study experiments/language-smollm2-email.toml --rows full "LoRA, rank 16" --seeds 1

Weights and text come from published packages; a missing one is named with the command that downloads it. They are
looked for in --data, then in the folder named by NESS_DATA, then in the user's cache folder. A row that has its record
is not measured again.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code is 0 (done), 2 (wrong use) or 1 (failed)."""
    parser = argparse.ArgumentParser(
        prog="ness study",
        description="Adapt a pretrained language model to a new domain in many ways; measure each.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", type=Path, help="the study's plan, a TOML file")
    parser.add_argument("--out", type=Path, default=Path("runs/language"), help="folder of the records")
    parser.add_argument("--data", type=Path, default=None, help="folder that holds the packages")
    parser.add_argument("--rows", nargs="+", default=(), metavar="NAME", help="these rows of the plan alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=(), metavar="N", help="instead of the plan's")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:0, …")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--quiet", action="store_true", help="say nothing while it runs")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    import torch

    from ness.errors import NessError
    from ness.lab.language import study

    try:
        plan = study.read(arguments.plan)
        device = device_of(arguments.device)
    except NessError as error:
        sys.stderr.write(f"ness study: {error}\n")
        return 2
    if not 1 <= arguments.threads <= 1024:
        sys.stderr.write(f"ness study: --threads {arguments.threads}: expected at least 1\n")
        return 2
    torch.set_num_threads(arguments.threads)

    def say(line: str) -> None:
        if not arguments.quiet:
            sys.stderr.write(f"{line}\n")

    def material() -> study.Material:
        return study.prepare(plan, arguments.data, device)

    study.run(plan, arguments.plan.stem, material, arguments.out, say, arguments.rows, arguments.seeds)
    return 0


def device_of(text: str) -> "torch.device":
    """The device of this name, if it is there."""
    import torch

    from ness.errors import NessError

    try:
        device = torch.device(text)
    except RuntimeError:
        raise NessError(f"--device {text}: expected cpu, cuda, or cuda:0 and so on") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise NessError(f"--device {text}: is not here; expected cpu, or cuda where there is a GPU")
    return device
