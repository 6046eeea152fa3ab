"""Streams of one's own from tensors."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import ness
from ness.lab.benchmarks import Request, benchmark_from_stream, stream_from_tasks, task_from_tensors
from ness.lab.benchmarks.own import pixel_statistics


def pair(count: int = 40, *, shape: tuple[int, ...] = (1, 8, 8), classes: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, *shape), generator=generator).to(torch.uint8)
    return images, torch.arange(count) % classes


def test_a_task_holds_out_its_validation_images() -> None:
    images, labels = pair()
    task = task_from_tensors("a", (images, labels), pair(10), valid_fraction=0.25)
    assert (len(task.train), len(task.valid), len(task.test)) == (30, 10, 10)
    both = torch.cat([task.train.images, task.valid.images])
    assert sorted(both.sum((1, 2, 3)).tolist()) == sorted(images.sum((1, 2, 3)).tolist())
    again = task_from_tensors("a", (images, labels), pair(10), valid_fraction=0.25)
    assert torch.equal(task.valid.images, again.valid.images)
    other = task_from_tensors("a", (images, labels), pair(10), valid_fraction=0.25, seed=1)
    assert not torch.equal(task.valid.images, other.valid.images)


def test_given_validation_images_are_kept() -> None:
    task = task_from_tensors("a", pair(), pair(10), pair(6))
    assert (len(task.train), len(task.valid)) == (40, 6)


def test_statistics_are_those_of_the_training_images() -> None:
    images, _ = pair(shape=(3, 5, 7))
    mean, std = pixel_statistics(images)
    scaled = images.double() / 255
    assert mean == pytest.approx(scaled.mean((0, 2, 3)).tolist())
    assert std == pytest.approx(scaled.std((0, 2, 3), correction=0).tolist())
    assert pixel_statistics(images.float()) == ((0.0,) * 3, (1.0,) * 3)


def test_a_stream_becomes_a_benchmark() -> None:
    stream = stream_from_tasks("mine", [task_from_tensors(name, pair(), pair(10)) for name in "ab"])
    benchmark = benchmark_from_stream(stream)
    assert (benchmark.name, benchmark.tasks, benchmark.network) == ("mine", 2, "resnet18-32")
    assert benchmark.load(Request(7)) is stream
    large = stream_from_tasks("mine", [task_from_tensors("a", pair(shape=(3, 64, 60)), pair(4, shape=(3, 64, 60)))])
    assert benchmark_from_stream(large).network == "resnet18-84"
    assert benchmark_from_stream(large, "alexnet").network == "alexnet"


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ((torch.zeros(4, 8, 8, dtype=torch.uint8), torch.zeros(4).long()), pair()),
        ((pair()[0], torch.zeros(40)), pair()),
        ((pair()[0], torch.zeros(39).long()), pair()),
        ((pair()[0], torch.full((40,), -1)), pair()),
        ((pair()[0].int(), pair()[1]), pair()),
        (pair(), pair(shape=(1, 9, 9))),
        (pair(), (pair()[0].float(), pair()[1])),
        (pair(0), pair()),
    ],
)
def test_malformed_tensors_are_refused(train: tuple[torch.Tensor, ...], test: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(ness.NessError, match="expected uint8 or float images"):
        task_from_tensors("a", train, test)  # type: ignore[arg-type]


def test_malformed_streams_are_refused() -> None:
    with pytest.raises(ness.NessError, match="at least one"):
        stream_from_tasks("mine", [])
    tasks = [task_from_tensors("a", pair(), pair()), task_from_tensors("b", *[pair(shape=(3, 8, 8))] * 2)]
    with pytest.raises(ness.NessError, match="bring all tasks to one shape"):
        stream_from_tasks("mine", tasks)
    for fraction in (0.0, 1.0, 0.999):
        with pytest.raises(ness.NessError, match="cannot hold out"):
            task_from_tensors("a", pair(1), pair(), valid_fraction=fraction)


def test_the_example_shows_what_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "own_stream.py"))
    printed = capsys.readouterr().out
    bwt = {name: float(value) for name, value in re.findall(r"^(\S+) on symbols: .* BWT (-?[\d.]+)", printed, re.M)}
    assert list(bwt) == ["finetune", "ness", "ness-plus"]
    assert bwt["finetune"] < -15
    assert min(bwt["ness"], bwt["ness-plus"]) > -5
    assert printed.count("after third: first ") == 3
