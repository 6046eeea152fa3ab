import torch

from ness.lab.benchmarks.base import Request
from ness.lab.benchmarks.digits import BENCHMARK, MEAN, STD, load


def test_five_turned_copies_of_the_real_digits() -> None:
    stream = load(Request(1))
    assert len(stream) == BENCHMARK.tasks == 5
    assert stream.shape == (1, 8, 8)
    upright, quarter = stream.tasks[0], stream.tasks[1]
    assert [len(part) for part in (upright.train, upright.valid, upright.test)] == [1197, 200, 400]
    assert torch.equal(quarter.test.images, 240 - upright.test.images.rot90(1, (2, 3)))
    assert torch.equal(quarter.test.labels, upright.test.labels)
    views = [task.test.images for task in stream.tasks]
    assert all(not torch.equal(one, other) for i, one in enumerate(views) for other in views[:i])


def test_the_seed_moves_validation_but_not_the_test() -> None:
    one, again, other = (load(Request(seed)).tasks[0] for seed in (1, 1, 2))
    assert torch.equal(one.valid.images, again.valid.images)
    assert not torch.equal(one.valid.images, other.valid.images)
    assert torch.equal(one.test.images, other.test.images)


def test_pixel_statistics_are_those_of_the_images() -> None:
    task = load(Request(1)).tasks[0]
    images = torch.cat([task.train.images, task.valid.images, task.test.images]) / 255
    assert abs(float(images.mean()) - MEAN[0]) < 1e-4
    assert abs(float(images.std(correction=0)) - STD[0]) < 1e-4
