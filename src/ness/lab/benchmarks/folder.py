"""Your own images: below the data folder one sub-folder per task, below it one per class, any size, grey or colour."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ness._files import read_bytes, reason
from ness.errors import NessError
from ness.lab.benchmarks.base import Benchmark, Request, Stream, Task
from ness.lab.benchmarks.own import SETTINGS, network_for, stream_from_tasks, task_from_tensors
from ness.lab.datasets import image

SIDES = (16, 512)  # pixels a side that images may be brought to
KEPT = (16, 84)  # pixels a side that images are left at, if all of them agree
Files = list[tuple[Path, int]]  # image files with their labels


@dataclass(frozen=True)
class Options:
    """How folders become tasks; one that holds `train` and `test`, with the classes below, keeps that division."""

    image_size: int = field(
        default=0,
        metadata={"help": "pixels a side; 0: the images' own if all share one from 16 to 84, else 32 or 84"},
    )
    test_share: float = field(default=0.2, metadata={"help": "of each class's images, held out for the test"})
    valid_share: float = field(default=0.05, metadata={"help": "of the remaining images, held out for validation"})


def load_stream(request: Request) -> Stream:
    """The tasks below `--data`, by name; classes are numbered by name inside each task."""
    options = request.options or Options()
    if request.data is None or not request.data.is_dir():
        given = "no --data" if request.data is None else f"--data {request.data}"
        raise NessError(f"folder: found {given}, expected a folder with one per task, each with one per class")
    check_options(options)
    found = [_task_files(path, options, request.seed) for path in subfolders(request.data, "a task")]
    files = [path for train, test, _ in found for path, _ in train + test]
    to, channels = _geometry(files, options.image_size)
    tasks = [
        _task(path.name, train, test, (to, channels), options, request.seed)
        for path, (train, test, _) in zip(subfolders(request.data, "a task"), found, strict=True)
    ]
    classes = {f"classes of {task.name}": ", ".join(names) for task, (_, _, names) in zip(tasks, found, strict=True)}
    notes = {"shape": f"{channels}x{to[0]}x{to[1]}", "network": network_for((channels, *to)), **classes}
    return Stream("folder", stream_from_tasks("folder", tasks).tasks, notes)


def check_options(options: Options) -> None:
    """Refuses a size that no network takes, and shares that leave nothing."""
    shares = {"test_share": options.test_share, "valid_share": options.valid_share}
    found = [f"{name} {share:g}" for name, share in shares.items() if not 0 < share < 1]
    if options.image_size and not SIDES[0] <= options.image_size <= SIDES[1]:
        found.append(f"image_size {options.image_size}")
    if found:
        raise NessError(
            f"folder: found {', '.join(found)}; expected fractions between 0 and 1, and {SIDES[0]} to {SIDES[1]} "
            "pixels, or 0 for the images' own"
        )


def subfolders(path: Path, what: str) -> list[Path]:
    """The folders below `path` in the order of their names; hidden ones are left out."""
    try:
        found = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError as error:
        raise NessError(f"{path}: cannot be looked into ({reason(error)})") from error
    if not found:
        raise NessError(f"{path}: holds no sub-folder, expected one for each {what.removeprefix('a ')}")
    return found


def _task_files(path: Path, options: Options, seed: int) -> tuple[Files, Files, list[str]]:
    """Training and test files of one task with their labels, and its classes."""
    below = subfolders(path, "a class")
    if {child.name for child in below} == {"train", "test"}:
        classes = [child.name for child in subfolders(path / "train", "a class")]
        if [child.name for child in subfolders(path / "test", "a class")] != classes:
            raise NessError(f"{path}: the classes below train and test differ; expected the same folders in both")
        train, test = (
            [(f, label) for label, name in enumerate(classes) for f in _pictures(path / part / name)]
            for part in ("train", "test")
        )
        return train, test, classes
    train, test = [], []
    for label, child in enumerate(below):
        pictures = _pictures(child)
        count = max(1, int(options.test_share * len(pictures)))
        if len(pictures) < 3:
            raise NessError(f"{child}: found {len(pictures)} images, expected at least 3: to train, validate and test")
        order = np.random.default_rng((seed, label)).permutation(len(pictures)).tolist()
        test += [(pictures[at], label) for at in order[:count]]
        train += [(pictures[at], label) for at in order[count:]]
    return train, test, [child.name for child in below]


def _pictures(path: Path) -> list[Path]:
    found = sorted(f for f in path.iterdir() if f.suffix.lower() in image.SUFFIXES and not f.name.startswith("."))
    if not found:
        raise NessError(f"{path}: holds no image, expected files ending in {', '.join(image.SUFFIXES)}")
    return found


def _geometry(files: list[Path], size: int) -> tuple[tuple[int, int], int]:
    """Height and width all images are brought to, and the channels: one if all of them are grey."""
    sizes: set[tuple[int, int]] = set()
    grey = True
    for path in files:
        data = _bytes(path)
        sizes.add(image.size(data, str(path)))
        grey = grey and image.is_grey(data, str(path))
    return (size, size) if size else common_size(sizes), 1 if grey else 3


def _bytes(path: Path) -> bytes:
    try:
        return read_bytes(path, image.LARGEST)
    except FileNotFoundError as error:
        raise NessError(f"{path}: is a link to nothing; remove it, or put the image there") from error


def common_size(sizes: set[tuple[int, int]]) -> tuple[int, int]:
    """The one size all images have, if a network can take it; else 32×32 for small images and 84×84 for larger ones.

    >>> common_size({(28, 28)}), common_size({(8, 8)}), common_size({(20, 30), (30, 20)}), common_size({(300, 200)})
    ((28, 28), (32, 32), (32, 32), (84, 84))
    """
    sides = [side for size in sizes for side in size]
    if len(sizes) == 1 and KEPT[0] <= min(sides) and max(sides) <= KEPT[1]:
        return next(iter(sizes))
    return (32, 32) if max(sides) <= 48 else (84, 84)


def _task(
    name: str, train: Files, test: Files, geometry: tuple[tuple[int, int], int], options: Options, seed: int
) -> Task:
    pairs = [_decoded(files, geometry) for files in (train, test)]
    return task_from_tensors(name, pairs[0], pairs[1], valid_fraction=options.valid_share, seed=seed)


def _decoded(files: Files, geometry: tuple[tuple[int, int], int]) -> tuple[Tensor, Tensor]:
    to, channels = geometry
    images = torch.empty(len(files), channels, *to, dtype=torch.uint8)
    for at, (path, _) in enumerate(files):
        pixels = image.decode(_bytes(path), str(path), channels=channels, to=to)
        images[at] = torch.from_numpy(np.array(pixels))
    return images, torch.tensor([label for _, label in files])


BENCHMARK = Benchmark(
    name="folder",
    title="Your own images: --data FOLDER with a sub-folder per task, below it one per class",
    network="resnet18-32",
    tasks=0,  # as many as the folder has
    load=load_stream,
    options=Options,
    check=check_options,
    settings=dict.fromkeys(("fixed", "reference", "paper"), SETTINGS),
)
