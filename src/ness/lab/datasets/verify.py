"""What is known about a data set on disk, without loading it: where it is, how large, verified or not."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ness.errors import NessError
from ness.lab.datasets import idx, npz
from ness.lab.datasets.catalogue import DataSet
from ness.lab.datasets.find import Found, find
from ness.lab.datasets.load import certainty, read
from ness.lab.datasets.reading import file_md5


@dataclass(frozen=True)
class Status:
    """One line of `ness data list` or `check`."""

    data_set: DataSet
    found: Found | None
    state: str
    good: bool
    reason: str = ""  # why it is broken, in full

    @property
    def size(self) -> int:
        """Bytes on disk, or to download where nothing was found."""
        return self.found.size if self.found else self.data_set.size


def status(data_set: DataSet, data: Path | None = None) -> Status:
    """Found or not, and whether the published checksums are met."""
    found = find(data_set, data)
    if found is None:
        state = "missing" if data_set.files else "missing: cannot be downloaded, see `ness data get`"
        return Status(data_set, None, state, False)
    if found.form == "npz":
        return _guarded(data_set, found, lambda: _npz_state(found, data_set))
    if _published(found, data_set):
        return Status(data_set, found, "verified", True)
    if found.form == "idx":  # packed anew, e.g. by a Linux distribution; small enough to look inside
        return check(data_set, data)
    if certainty(found, data_set) == "verified":
        return Status(data_set, found, "not the published files: `ness data check` looks inside", True)
    return Status(data_set, found, certainty(found, data_set), True)


def check(data_set: DataSet, data: Path | None = None) -> Status:
    """The same after reading everything: shapes, counts, labels, mean pixel and every checksum there is."""
    found = find(data_set, data)
    if found is None:
        return status(data_set, data)

    def state() -> str:
        read(found, data_set)
        return _npz_state(found, data_set) if found.form == "npz" else certainty(found, data_set)

    return _guarded(data_set, found, state)


def _guarded(data_set: DataSet, found: Found, state: Callable[[], str]) -> Status:
    try:
        return Status(data_set, found, state(), True)
    except NessError as error:
        return Status(data_set, found, "broken", False, str(error))


def _published(found: Found, data_set: DataSet) -> bool:
    """Whether the files on disk are, byte for byte, published ones (a whole archive or its contents)."""
    known = {file.name: file.md5 for file in data_set.files} | dict(data_set.contents)
    paths = list(found.files.values()) or [found.path]
    return all(path.is_file() and known.get(path.name) == file_md5(path) for path in paths)


def _npz_state(found: Found, data_set: DataSet) -> str:
    """MNIST's IDX files are nothing but their arrays, so an .npz can be compared with their checksums."""
    if data_set.kind == "idx" and all(data_set.contents.values()):
        arrays = npz.read(found.path, data_set)
        parts = (arrays.train, arrays.test)
        digests = [idx.digest(a) for part in parts for a in (part.images[:, 0], part.labels.astype(np.uint8))]
        if digests == list(data_set.contents.values()):
            return "verified"
        return "not verified: other contents than the published files"
    return certainty(found, data_set)
