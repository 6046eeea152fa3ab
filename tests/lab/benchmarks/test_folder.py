"""The user's own images in folders."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ness
from lab.datasets import making
from ness.lab.benchmarks import folder
from ness.lab.benchmarks.base import Request


def picture(path: Path, value: int, size: tuple[int, int] = (16, 16), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = size if mode == "L" else (*size, 3)
    Image.fromarray(np.full(shape, value, np.uint8)).save(path)


def tasks_in(root: Path, *, mode: str = "L", size: tuple[int, int] = (16, 16), count: int = 10) -> Path:
    for t, task in enumerate(("birds", "cats")):
        for c, label in enumerate(("big", "small")):
            for number in range(count):
                picture(root / task / label / f"{number}.png", 100 * t + 40 * c + number, size, mode)
    return root


def test_tasks_classes_and_splits(tmp_path: Path) -> None:
    stream = folder.BENCHMARK.load(Request(1, tasks_in(tmp_path)))
    assert [task.name for task in stream.tasks] == ["birds", "cats"]
    for t, task in enumerate(stream.tasks):
        assert (len(task.train), len(task.valid), len(task.test), task.classes) == (15, 1, 4, 2)
        for split in (task.train, task.valid, task.test):
            values = split.images[:, 0, 0, 0].int() - 100 * t
            assert torch.equal(values // 40, split.labels.int())
        assert task.test.labels.tolist() == [0, 0, 1, 1]
    assert stream.notes["classes of birds"] == "big, small"
    assert stream.notes["network"] == "resnet18-32"


def test_the_seed_draws_the_test_images(tmp_path: Path) -> None:
    tasks_in(tmp_path)
    one, again, other = (folder.BENCHMARK.load(Request(seed, tmp_path)).tasks[0].test.images for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_grey_and_colour(mode: str, channels: int, tmp_path: Path) -> None:
    assert folder.BENCHMARK.load(Request(1, tasks_in(tmp_path, mode=mode))).shape == (channels, 16, 16)


def test_one_coloured_image_makes_all_of_them_coloured(tmp_path: Path) -> None:
    picture(tasks_in(tmp_path) / "cats" / "small" / "last.jpg", 9, mode="RGB")
    assert folder.BENCHMARK.load(Request(1, tmp_path)).shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("size", "image_size", "expected"),
    [
        ((20, 30), 0, (20, 30)),
        ((8, 8), 0, (32, 32)),
        ((200, 100), 0, (84, 84)),
        ((20, 30), 16, (16, 16)),
        ((20, 30), 100, (100, 100)),
    ],
)
def test_sizes(size: tuple[int, int], image_size: int, expected: tuple[int, int], tmp_path: Path) -> None:
    request = Request(1, tasks_in(tmp_path, size=size, count=3), folder.Options(image_size=image_size))
    assert folder.BENCHMARK.load(request).shape == (1, *expected)


def test_images_of_different_sizes_are_brought_to_one(tmp_path: Path) -> None:
    picture(tasks_in(tmp_path) / "cats" / "small" / "last.png", 9, (60, 10))
    assert folder.BENCHMARK.load(Request(1, tmp_path)).shape == (1, 84, 84)


def test_a_division_of_the_users_is_kept(tmp_path: Path) -> None:
    for part, values in (("train", range(5)), ("test", range(10, 12))):
        for label in ("a", "b"):
            for value in values:
                picture(tmp_path / "task" / part / label / f"{value}.png", value)
    (task,) = folder.BENCHMARK.load(Request(1, tmp_path)).tasks
    assert sorted(task.test.images[:, 0, 0, 0].tolist()) == [10, 10, 11, 11]
    assert (len(task.train), len(task.valid), task.classes) == (9, 1, 2)


def test_16_bit_grey_keeps_its_upper_byte(tmp_path: Path) -> None:
    for label in ("a", "b"):
        for number in range(3):
            path = tmp_path / "task" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), 0x8001, np.uint16)).save(path)
    (task,) = folder.BENCHMARK.load(Request(1, tmp_path)).tasks
    assert (task.train.images == 0x80).all()


def test_what_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    load = folder.BENCHMARK.load
    with pytest.raises(ness.NessError, match="expected a folder"):
        load(Request(1))
    with pytest.raises(ness.NessError, match="expected a folder"):
        load(Request(1, tmp_path / "nowhere"))
    with pytest.raises(ness.NessError, match="holds no sub-folder"):
        load(Request(1, tmp_path))
    (tmp_path / "task" / "class").mkdir(parents=True)
    with pytest.raises(ness.NessError, match="holds no image"):
        load(Request(1, tmp_path))
    picture(tmp_path / "task" / "class" / "1.png", 1)
    with pytest.raises(ness.NessError, match="at least 3"):
        load(Request(1, tmp_path))
    for options in (folder.Options(test_share=1.0), folder.Options(valid_share=0.0), folder.Options(image_size=-1)):
        with pytest.raises(ness.NessError, match="expected fractions"):
            load(Request(1, tmp_path, options))


@pytest.mark.parametrize("raw", [b"", b"no image", making.png(np.zeros((1, 8, 8), np.uint8))[:-20]])
def test_a_broken_image_is_named(raw: bytes, tmp_path: Path) -> None:
    (tasks_in(tmp_path) / "cats" / "small" / "3.png").write_bytes(raw)
    with pytest.raises(ness.NessError, match=r"small/3\.png"):
        folder.BENCHMARK.load(Request(1, tmp_path))


def test_different_classes_below_train_and_test_are_refused(tmp_path: Path) -> None:
    picture(tmp_path / "task" / "train" / "a" / "1.png", 1)
    picture(tmp_path / "task" / "test" / "b" / "1.png", 1)
    with pytest.raises(ness.NessError, match="differ"):
        folder.BENCHMARK.load(Request(1, tmp_path))
