"""Fuzzing of every reader of files: whatever the bytes, a value or an error of ours, soon, in little memory.

    python tests/fuzz.py 10000             guided by coverage (atheris) where it is installed, else by mutation
    python tests/fuzz.py 10000 --plain     by mutation alone

Seeds are the small files of tests/corpus/KIND/. A case that does anything else ends the campaign with its bytes.
"""

import argparse
import contextlib
import io
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

GUIDED = atheris is not None and "--guided" in sys.argv
MODULES = ["ness.lab.datasets", "ness.lab.runs", "ness.storage", "ness._sealed", "ness.report.records"]
with atheris.instrument_imports(include=MODULES) if GUIDED else contextlib.nullcontext():
    from lab.datasets.making import MNIST
    from ness import NessError, _sealed
    from ness.lab.datasets import idx, mat, npz, pickles
    from ness.lab.datasets.reading import Hashing, guarded
    from ness.lab.runs import checkpoint, experiment
    from ness.lab.runs.run_folder import history
    from ness.lab.runs.settings import read_toml
    from ness.report.records import from_result
    from ness.storage import manifest

CORPUS = Path(__file__).parent / "corpus"
SECONDS, MEMORY = 10, 1 << 30
SMALL = replace(MNIST, train=4, test=2, classes=2)
PLACE = Path(tempfile.gettempdir()) / f"ness-fuzz-{os.getpid()}"


def _pickle(data: bytes) -> None:
    with guarded(Path("file"), "x"):
        pickles.load(Hashing(io.BytesIO(data), len(data)))


def _written(data: bytes) -> Path:
    PLACE.write_bytes(data)
    return PLACE


def _idx(data: bytes) -> None:
    idx.read(dict.fromkeys(SMALL.contents, _written(data)), SMALL)


def _mat(data: bytes) -> None:
    with guarded(Path("file"), "x"):
        mat.read(io.BytesIO(data), {"X": (4, 5, 3, 2), "y": (2, 1)})


def _npz(data: bytes) -> None:
    npz.read(_written(data), SMALL)


def _manifest(data: bytes) -> None:
    manifest.decode(data, Path("manifest.json"))


def _toml(data: bytes) -> None:
    experiment.experiment(read_toml(_written(data)), "plan")


def _record(data: bytes) -> None:
    from_result(_sealed.unseal_json(data, "result.json"), "result.json")


def _log(data: bytes) -> None:
    history(_sealed.unseal_lines(data, "events.jsonl")[0])


def _checkpoint(data: bytes) -> None:
    checkpoint.read(_written(data))


KINDS: dict[str, Callable[[bytes], None]] = {
    "pickle": _pickle,
    "idx": _idx,
    "mat": _mat,
    "npz": _npz,
    "manifest": _manifest,
    "toml": _toml,
    "record": _record,
    "log": _log,
    "checkpoint": _checkpoint,
}


class Late(BaseException):
    """A case that takes too long."""


def one(kind: str, data: bytes) -> bool:
    """Whether the bytes were read; an AssertionError for anything but a value or an error of ours."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            KINDS[kind](data)
    except NessError as error:
        if "\n" in str(error):
            raise AssertionError(f"{kind}: more than a line: {error}") from error
        return False
    except (Exception, Late) as error:
        raise AssertionError(f"{kind}: {type(error).__name__}: {error!s:.200}: {data[:400]!r}") from error
    return True


def seeds(kind: str) -> list[bytes]:
    """The corpus of a kind."""
    return [path.read_bytes() for path in sorted((CORPUS / kind).iterdir())]


TOKENS = [
    b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x00\x00\x00\x80", b"\x7f", b"[" * 200, b"(" * 200, b"]", b"}",
    b"1e999", b"-1", b"9" * 400, b"NaN", b"Infinity", b"\\ud800", b"\x1b[2J", b"null", b'"sha256": "', b"\x80\x04",
    b"\x85" * 50, b"2\x86" * 20, b"q\x00", b"r\xff\xff\xff\xff", b"h\x00", b"cos\nsystem\n", b"R.", b"true", b"'",
    b"[[row]]\n",
]  # fmt: skip


def mutated(raw: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """The bytes with a few changes."""
    data = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 4, 8])):
        at = draw.randint(0, len(data))
        how = draw.randrange(7)
        if how == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif how == 1 and data:
            data[at % len(data)] = draw.randrange(256)
        elif how == 2:
            del data[at : at + draw.choice([1, 2, 8, 1000])]
        elif how == 3:
            data[at:at] = draw.choice(TOKENS)
        elif how == 4:
            token = draw.choice(TOKENS)
            data[at : at + len(token)] = token
        elif how == 5:
            other = draw.choice(others)
            data[at:] = other[draw.randint(0, len(other)) :]
        else:
            data[at:at] = data[at : at + draw.choice([1, 4, 64])] * draw.choice([1, 2, 50])
    return bytes(data[: 1 << 16])


def plain(kind: str, count: int, seed: int = 0) -> Iterator[bool]:
    """So many mutated cases: whether each was read."""
    draw, held = random.Random(f"{kind} {seed}"), seeds(kind)

    def late(*_: object) -> None:
        raise Late(f"longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    try:
        for number in range(count):
            data = held[number] if number < len(held) else mutated(draw.choice(held), held, draw)
            signal.alarm(SECONDS)
            yield one(kind, data)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        PLACE.unlink(missing_ok=True)


def campaign(count: int, guided: bool) -> None:
    """All kinds, each in a process of its own; prints figures."""
    share = -(-count // len(KINDS))
    for kind in KINDS:
        began = time.monotonic()
        argv = [
            sys.executable,
            str(Path(__file__).resolve()),
            str(share),
            "--kind",
            kind,
            "--guided" if guided else "--plain",
        ]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=tempfile.gettempdir())
        assert done.returncode == 0, done.stderr[-3000:]
        said = done.stdout.strip() or f"{share} cases guided by coverage"
        print(f"fuzz, {kind}: {said}, no crash, hang or traceback, in {time.monotonic() - began:.0f} s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"fuzz: {share * len(KINDS)} cases, {'atheris' if guided else 'mutation'}, at most {peak >> 20} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--plain", action="store_true", help="by mutation alone")
    parser.add_argument("--guided", action="store_true", help="by coverage: needs atheris")
    own = parser.parse_args()
    if own.kind is None:
        return campaign(own.count, atheris is not None and not own.plain)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if own.guided:
        found = tempfile.mkdtemp(prefix="ness-corpus-")
        flags = [f"-runs={own.count}", f"-timeout={SECONDS}", "-max_len=65536", "-seed=1", "-verbosity=0"]
        flags += [f"-rss_limit_mb={(before + MEMORY) >> 20}"]
        atheris.Setup([sys.argv[0], *flags, found, str(CORPUS / own.kind)], lambda data: one(own.kind, data) and None)
        return atheris.Fuzz()
    ends = Counter(plain(own.kind, own.count))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MEMORY, f"{own.kind}: over 1 GB"
    return print(f"{own.count} cases, {ends[True]} read, {ends[False]} refused")


if __name__ == "__main__":
    main()
