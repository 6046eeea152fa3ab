"""Where data is looked for (`--data`, then $NESS_DATA, then the cache folder), and in which form it was found."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import platformdirs

from ness.errors import NessError
from ness.lab.datasets import mini_imagenet, notmnist
from ness.lab.datasets.catalogue import DataSet, Kind

Form = Literal["npz", "batches", "idx", "mat", "letters", "split pickles", "cache pickles", "image tree"]


@dataclass(frozen=True)
class Found:
    """A data set on disk: its form, the file or folder, and (for forms of several files) each file by its name."""

    form: Form
    path: Path
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes on disk; for a folder of images, of the files that lie in it."""
        paths = list(self.files.values()) or [self.path]
        return sum(_size(path) for path in paths)


def roots(data: Path | None) -> tuple[Path, ...]:
    """The folders to look in, first to last."""
    named = [data, Path(os.environ["NESS_DATA"]) if os.environ.get("NESS_DATA") else None]
    if data is not None and data.exists() and not data.is_dir():
        raise NessError(f"{data}: found a file, expected the folder that holds the data sets; name its folder")
    cache = platformdirs.user_cache_path("ness") / "data"
    return tuple(dict.fromkeys(path.expanduser() for path in [*named, cache] if path is not None))


def find(data_set: DataSet, data: Path | None = None) -> Found | None:
    """The first form of the set in the first folder that has one."""
    for root in roots(data):
        try:
            found = _found_in(root, data_set)
        except OSError as error:
            raise NessError(f"{root}: cannot be looked into ({error}); allow it, or name another folder") from error
        if found:
            return found
    return None


def _found_in(root: Path, data_set: DataSet) -> Found | None:
    archive = root / f"{data_set.name}.npz"
    if archive.is_file():
        return Found("npz", archive)
    for folder in (root / data_set.home, *(root / name for name in data_set.folders), root):
        if folder.is_dir() and (found := _LOOK[data_set.kind](folder, data_set)):
            return found
    return None


def _cifar(folder: Path, data_set: DataSet) -> Found | None:
    for place in (folder, *(folder / name for name in data_set.folders)):
        if all((place / name).is_file() for name in data_set.contents):
            return Found("batches", place, {name: place / name for name in data_set.contents})
    return _archive("batches", folder, data_set)


def _archive(form: Form, folder: Path, data_set: DataSet) -> Found | None:
    """The published archive, whole, in a folder."""
    path = folder / data_set.files[0].name if data_set.files else None
    return Found(form, path) if path is not None and path.is_file() else None


def _several(form: Form, folder: Path, names: Mapping[str, tuple[str, ...]]) -> Found | None:
    """Several files that are only useful together, each under one of its names."""
    files = {
        name: next((folder / other for other in others if (folder / other).is_file()), None)
        for name, others in names.items()
    }
    present = {name: path for name, path in files.items() if path is not None}
    return Found(form, folder, present) if len(present) == len(names) else None


def _idx(folder: Path, data_set: DataSet) -> Found | None:
    # MNIST and Fashion-MNIST share their file names: only a folder that says which it is will do.
    known = {data_set.name, *(name.rsplit("/", 1)[0] for name in data_set.folders)}
    if not known & {folder.name, folder.parent.name if folder.name == "raw" else ""}:
        return None
    return _several("idx", folder, {name: (name, f"{name}.gz") for name in data_set.contents})


def _svhn(folder: Path, data_set: DataSet) -> Found | None:
    return _several("mat", folder, {name: (name,) for name in data_set.contents})


def _notmnist(folder: Path, data_set: DataSet) -> Found | None:
    for place in (folder, *(folder / name for name in data_set.folders)):
        if all((place / letter).is_dir() for letter in notmnist.LETTERS):
            return Found("letters", place)
    return _archive("letters", folder, data_set)


def _mini(folder: Path, data_set: DataSet) -> Found | None:
    for form, names in (
        ("split pickles", mini_imagenet.SPLIT_PICKLES),
        ("cache pickles", mini_imagenet.CACHE_PICKLES),
    ):
        if found := _several(form, folder, {name: (name,) for name in names}):  # type: ignore[arg-type]
            return found
    if folder.name == data_set.name or folder.name in data_set.folders:
        for place in (folder, folder / "images"):
            below = {path.name for path in place.iterdir() if path.is_dir()} if place.is_dir() else set()
            if len(below) >= data_set.classes or {"train", "test"} <= below:
                return Found("image tree", place)
    return None


_LOOK: Mapping[Kind, Callable[[Path, DataSet], Found | None]] = {
    "cifar": _cifar,
    "idx": _idx,
    "svhn": _svhn,
    "notmnist": _notmnist,
    "mini-imagenet": _mini,
}


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size
