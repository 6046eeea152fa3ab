"""A data set by name: found on disk or downloaded, read, checked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ness.errors import NessError
from ness.lab.datasets import cifar, idx, mini_imagenet, notmnist, npz, svhn
from ness.lab.datasets.arrays import Arrays, check
from ness.lab.datasets.catalogue import DataSet
from ness.lab.datasets.download import Progress, fetch, log_progress
from ness.lab.datasets.find import Form, Found, find, roots

_READERS: Mapping[Form, Callable[[Found, DataSet], Arrays]] = {
    "npz": lambda found, data_set: npz.read(found.path, data_set),
    "batches": lambda found, data_set: cifar.read(found.path, data_set),
    "idx": lambda found, data_set: idx.read(found.files, data_set),
    "mat": lambda found, data_set: svhn.read(found.files, data_set),
    "letters": lambda found, data_set: notmnist.read(found.path, data_set),
    "split pickles": lambda found, data_set: mini_imagenet.read_split_pickles(found.path, data_set),
    "cache pickles": lambda found, data_set: mini_imagenet.read_caches(found.path, data_set),
    "image tree": lambda found, data_set: mini_imagenet.read_tree(found.path, data_set),
}


@dataclass(frozen=True)
class Loaded:
    """A data set in memory, and one line for the record on the form it was read from."""

    arrays: Arrays
    note: str


def read(found: Found, data_set: DataSet) -> Arrays:
    """What was found, read and checked; contents whose checksum is published are compared with it on the way."""
    return check(_READERS[found.form](found, data_set), data_set)


def load(data_set: DataSet, data: Path | None = None, progress: Progress = log_progress) -> Loaded:
    """The set from `data`, $NESS_DATA or the cache folder; downloaded into the first of them if none has it.

    A folder `data` that is not there is an error: most likely its name is wrong, and nothing should be written there.
    """
    if data is not None and not data.is_dir():
        raise NessError(f"{data}: found no folder of that name, expected the one that holds {data_set.name}")
    found = find(data_set, data) or get(data_set, data, progress)
    return Loaded(read(found, data_set), f"{found.form}, {certainty(found, data_set)}")


def get(data_set: DataSet, data: Path | None = None, progress: Progress = log_progress) -> Found:
    """Download the set's published files, unless some form of it is there already."""
    if found := find(data_set, data):
        return found
    places = roots(data)
    home = places[0] / data_set.home
    if not data_set.files:
        raise NessError(f"{data_set.name} was not found in {_listed(places)}. {data_set.advice.format(home=home)}")
    for file in data_set.files:
        try:
            fetch(file, home, data_set.name, progress)
        except NessError as error:
            raise NessError(f"{data_set.name} was not found in {_listed(places)}, and {error}") from error
    if not (found := find(data_set, data)):
        raise NessError(f"{data_set.name}: downloaded to {home}, and not found there; please report this")
    return found


def certainty(found: Found, data_set: DataSet) -> str:
    """Whether reading this form compares it with published checksums."""
    if found.form in ("batches", "idx", "mat") and data_set.contents and all(data_set.contents.values()):
        return "verified"
    return f"not verified: no published checksum for {'NAME.npz' if found.form == 'npz' else 'this form'}"


def _listed(places: tuple[Path, ...]) -> str:
    return ", ".join(str(place) for place in places)
