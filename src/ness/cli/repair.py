"""`ness repair`: a fine-tune that has forgotten, mended from two text files, without training and without Python."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from ness._files import reason
from ness._sealed import seal_json
from ness._version import __version__
from ness.cli.main import Parser, WrongUse
from ness.cli.repair_data import ImageBatches, TextBatches, image_files, texts_of
from ness.errors import NessError, NessWarning, printable
from ness.integrations.folders import Loaded, check_out, load_image_processor, load_pair, load_tokenizer, write_model
from ness.repairing.options import parse_memory
from ness.repairing.repair import repair
from ness.repairing.report import Repair

ABOUT = """Mend a fine-tuned model that has forgotten, in one go, without training.

Each layer's change is reshaped so that it does what it did on the new texts and hardly touches the old ones.
TUNED is a model folder of Hugging Face, or an adapter folder of PEFT (LoRA): what comes out is of the same kind.
"""
EXAMPLES = """examples:
  ness repair base/ tuned/ --new mails.txt --old general.jsonl --out repaired/
  ness repair base/ adapter/ --new mails.txt --old self --strength 3 --out adapter-repaired/
  ness repair base/ tuned/ --new mails.txt --old self --dry-run        # the trade-off, nothing written
  ness repair base/ tuned/ --new new-pictures/ --old old-pictures/ --out repaired/

Text: a line each, or JSON lines with the field "text" (or "messages"). Pictures: a folder of them.
Exit codes: 0 done, 1 failed, 2 wrong use, 130 Ctrl-C."""


MOST = 1 << 40  # of tokens, pictures and the like


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = Parser(
        "ness repair", description=ABOUT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("base", metavar="BASE", help="the model before tuning: a folder, or a name on the hub")
    made.add_argument("tuned", metavar="TUNED", help="the tuned model's folder, or an adapter's")
    made.add_argument("--new", metavar="FILE", help="what it was tuned on; without it, every direction counts alike")
    made.add_argument("--old", metavar="FILE|self", default="self", help="what it must not forget; self (the default): "
                      "text that the base writes itself")  # fmt: skip
    made.add_argument("--strength", type=float, help="how much old counts against new (default 1)")
    made.add_argument("--probe", metavar="FILE", help="use the smallest strength that keeps the outputs on these ...")
    made.add_argument("--at-most", type=float, metavar="SHARE", help="... within this share of the base's, e.g. 0.1")
    made.add_argument("--out", metavar="FOLDER", help="where to; must not exist")
    made.add_argument("--dry-run", action="store_true", help="print the trade-off over strengths, write nothing")
    made.add_argument("--others", default="keep", help="embeddings, norms, heads: keep, base, or a share 0..1")
    made.add_argument("--passes", type=int, default=1, help="groups of layers, observed again after each (default 1)")
    made.add_argument("--memory", metavar="SIZE", help="as many layers at a time as fit into this, e.g. 4GB")
    made.add_argument("--tokens-old", type=int, default=16_000, metavar="N", help="old tokens to use (default 16000)")
    made.add_argument("--tokens-new", type=int, default=25_000, metavar="N", help="new tokens to use (default 25000)")
    made.add_argument("--pictures", type=int, default=1000, metavar="N", help="pictures of each kind (default 1000)")
    made.add_argument("--length", type=int, default=256, metavar="N", help="tokens of one text (default 256)")
    made.add_argument("--field", default="text", help="the field of JSON lines that holds the text (default text)")
    made.add_argument("--exclude", nargs="+", default=[], metavar="NAME", help="keep these modules as tuned")
    made.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    made.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
    made.add_argument("--exact", action="store_true", help="statistics in float64: slower, and exact")
    made.add_argument("--seed", type=int, default=0, help="which texts are used, and what self writes (default 0)")
    made.add_argument("--quiet", action="store_true", help="no progress")
    return made


def main(argv: list[str]) -> int:
    """Repairs, writes the folder, prints the report on standard output; progress goes to standard error."""
    own = parser().parse_args(argv)
    _check(own)
    try:
        with _progress(own.quiet) as shown, _warnings_said(shown):
            return _run(own, shown)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("nothing was written") from stop


def _check(own: argparse.Namespace) -> None:
    if own.out is None and not own.dry_run:
        raise WrongUse("name a folder with --out, or ask for --dry-run")
    if own.dry_run and (own.passes > 1 or own.memory is not None):
        raise WrongUse("--dry-run works everything out in one go; leave out --passes and --memory")
    if own.at_most is not None and own.passes > 1:
        raise WrongUse("--at-most is looked for in one go; leave out --passes")
    if own.strength is not None and own.at_most is not None:
        raise WrongUse("give --strength, or --probe and --at-most, not both")
    if (own.probe is None) != (own.at_most is None):
        raise WrongUse("--probe and --at-most belong together")
    if own.strength is not None and not 0 <= own.strength < float("inf"):
        raise WrongUse(f"--strength is {own.strength}, expected a number, at least 0")
    if own.at_most is not None and not 0 <= own.at_most < float("inf"):
        raise WrongUse(f"--at-most is {own.at_most}, expected a number, at least 0")
    for name, least, most in (
        ("tokens_old", 1, MOST), ("tokens_new", 1, MOST), ("pictures", 1, MOST), ("length", 1, MOST),
        ("passes", 1, MOST), ("seed", 0, 2**63 - 1),
    ):  # fmt: skip
        if not least <= getattr(own, name) <= most:
            raise WrongUse(
                f"--{name.replace('_', '-')} is {getattr(own, name)}, expected at least {least} and at most {most}"
            )
    try:
        parse_memory(own.memory)
        torch.empty(0, device=own.device)
    except NessError as error:
        raise WrongUse(str(error).replace("repair(memory=", "--memory (")) from error
    except (RuntimeError, AssertionError) as error:  # torch's own words on a device that is not there
        raise WrongUse(f"--device {own.device}: {reason(error):.200}") from error
    if own.others not in ("keep", "base"):
        try:
            own.others = float(own.others)
        except ValueError:
            own.others = -1.0
        if not 0 <= own.others <= 1:
            raise WrongUse("--others: expected keep, base, or a number from 0 to 1")
    for name in ("new", "old", "probe"):
        path = getattr(own, name)
        if path is not None and not (name == "old" and path == "self"):
            _check_place(f"--{name} {path}", path)
    for name in ("base", "tuned"):
        path = getattr(own, name)
        if path.startswith((".", "/", "~")) and not os.path.isdir(path):  # noqa: PTH112 - True or False, for any text
            raise WrongUse(f"{path}: there is no such folder")
    if own.out is not None:
        try:
            check_out(Path(own.out))
        except NessError as error:
            raise WrongUse(str(error)) from error
        except OSError as error:
            raise WrongUse(f"--out {own.out}: {reason(error)}") from error


def _check_place(what: str, path: str) -> None:
    """Refuses what is neither a file nor a folder: of a pipe or a device reading might never end."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except FileNotFoundError as error:
        raise WrongUse(f"{what}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise WrongUse(f"{what}: {reason(error)}") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise WrongUse(f"{what}: found a pipe, a device or the like, expected an ordinary file")


def _run(own: argparse.Namespace, shown: Shown) -> int:
    shown.say(f"loading {own.tuned}")
    dtype = None if own.dtype == "auto" else getattr(torch, own.dtype)
    try:
        loaded = load_pair(own.base, own.tuned, dtype, own.device)
    except (RuntimeError, AssertionError) as error:  # torch's own words on a device that is not there
        raise NessError(f"--device {own.device}: {reason(error):.400}") from error
    data = Data(own, loaded, shown)
    old, new, probe = data.old(), data.of("new", own.new), data.of("probe", own.probe)
    done = repair(
        loaded.tuned,
        loaded.base,
        old=old,
        new=new,
        strength=1.0 if own.strength is None else own.strength,
        probe=probe,
        at_most=own.at_most,
        others=own.others,
        passes=own.passes,
        memory=own.memory,
        exclude=[*own.exclude, *loaded.added],
        inplace=True,
        statistics_dtype=torch.float64 if own.exact else torch.float32,
        progress=shown.progress,
    )
    shown.end()
    if own.dry_run:
        sys.stdout.write(f"{done.front(interpolated=(0.3, 0.5, 0.7))}\n\n" + "\n".join(done.verdict()) + "\n")
        return 0
    out = Path(own.out)
    report = {"ness": __version__, "base": own.base, "tuned": own.tuned, **done.to_dict()}
    files = {"README.md": card(own, loaded, done), "ness-repair.json": seal_json(report, "ness-repair.json").decode()}
    write_model(loaded.tuned, own.tuned, out, files)
    sys.stdout.write(f"{done}\n\nwritten to {printable(str(out))}\n")
    return 0


class Data:
    """Batches from the files that were named."""

    def __init__(self, own: argparse.Namespace, loaded: Loaded, shown: Shown) -> None:
        self.own, self.loaded, self.shown = own, loaded, shown
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """Read once."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.own.tuned, self.own.base)
        return self._tokenizer

    def of(self, what: str, path: str | None) -> Any:
        """Batches of a file of texts or of a folder of pictures; None where none is named."""
        if path is None:
            return None
        own = self.own
        if Path(path).is_dir():
            if (Path(path) / "statistics.json").is_file():
                return path
            processor = load_image_processor(own.tuned, own.base)
            return ImageBatches(image_files(Path(path)), processor, own.pictures, own.seed)
        tokens = own.tokens_old if what == "old" else own.tokens_new
        encoder_decoder = bool(getattr(getattr(self.loaded.tuned, "config", None), "is_encoder_decoder", False))
        texts = texts_of(Path(path), own.field, self.tokenizer)
        return TextBatches(texts, self.tokenizer, tokens, own.length, own.seed, encoder_decoder, path)

    def old(self) -> Any:
        """Old data, or text that the base writes."""
        own = self.own
        if own.old != "self":
            return self.of("old", own.old)
        from ness.integrations.transformers import self_text

        self.shown.say(f"the base writes {own.tokens_old:,} tokens of old text")
        generator = torch.Generator().manual_seed(own.seed)
        if self.loaded.base is not None:
            return self_text(self.loaded.base, self.tokenizer, own.tokens_old, length=own.length, generator=generator)
        with self.loaded.tuned.disable_adapter():  # type: ignore[operator]
            return self_text(self.loaded.tuned, self.tokenizer, own.tokens_old, length=own.length, generator=generator)


def card(own: argparse.Namespace, loaded: Loaded, done: Repair) -> str:
    """The model card: where it comes from, what was done, and the report."""
    head = ["---", f"base_model: {own.base}", "tags:", "- ness", "- repair"]
    head += ["library_name: peft"] if loaded.adapter else ["library_name: transformers"]
    kind = "LoRA adapter" if loaded.adapter else "model"
    old = "text that the base wrote itself" if own.old == "self" else f"`{Path(own.old).name}`"
    new = "every direction alike" if own.new is None else f"`{Path(own.new).name}`"
    body = [
        "---",
        "",
        f"# {Path(own.tuned).name or own.tuned}, repaired",
        "",
        f"This {kind} is `{own.tuned}` with what tuning changed reshaped by NESS (`pip install ness-cl`) "
        f"{__version__}, so that it moves away from its base `{own.base}` on new inputs and little on old ones. "
        "No training was involved.",
        "",
        f"- old inputs: {old}",
        f"- new inputs: {new}",
        f"- strength: {done.strength:g}",
        "",
        "```text",
        str(done),
        "```",
        "",
    ]
    return "\n".join(head + body)


# -- progress ----------------------------------------------------------------------------------------------------------


STAGES = {"old": "observing old inputs", "new": "observing new inputs", "solve": "layers", "strength": "strengths"}


class Shown:
    """A line that says what goes on and how long it will take: rewritten on a terminal, a new one now and then else."""

    def __init__(self, out: TextIO, quiet: bool) -> None:
        self.out, self.quiet, self.live = out, quiet, out.isatty()
        self.stage, self.began, self.last, self.open = "", 0.0, 0.0, False

    def say(self, text: str) -> None:
        """A line of its own."""
        if not self.quiet:
            self.end()
            self.out.write(f"{printable(text)}\n")
            self.out.flush()

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """As `ness.repair` reports it."""
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self.began, self.last = stage, now, 0.0
        if self.quiet or (now - self.last < (0.2 if self.live else 10) and done != total):
            return
        self.last = now
        text = f"{STAGES.get(stage, stage)}: {done}" + (f" of {total}" if total else "")
        if total and 0 < done < total and now > self.began:
            left = round((now - self.began) / done * (total - done))
            text += f", {left // 60}:{left % 60:02d} left in this step"
        if self.live:
            self.out.write(f"\r\x1b[K{text}")
            self.open = True
        else:
            self.out.write(f"{text}\n")
        self.out.flush()

    def end(self) -> None:
        """End a line that is being rewritten."""
        if self.open:
            self.out.write("\r\x1b[K")
            self.open = False


@contextmanager
def _progress(quiet: bool) -> Iterator[Shown]:
    shown = Shown(sys.stderr, quiet)
    try:
        yield shown
    finally:
        shown.end()


@contextmanager
def _warnings_said(shown: Shown) -> Iterator[None]:
    """Our own warnings as lines; those of partners are left out of a command's output."""
    import logging
    import warnings

    quiet = logging.getLogger("transformers")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        quiet.setLevel(level)
        for warning in caught:
            if issubclass(warning.category, NessWarning):
                shown.end()
                sys.stderr.write(f"warning: {printable(str(warning.message))}\n")
