"""Runs of one command read their data once, and none of them can tell."""

from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

import tiny
from ness.lab.benchmarks import assemble, cifar100, digits, five_datasets, mini_imagenet
from ness.lab.benchmarks.base import Request, Stream
from ness.lab.benchmarks.dataset_cache import Shelf
from ness.lab.datasets import CATALOGUE, Arrays, Labelled, Loaded
from ness.lab.runs.jobs import resolve
from ness.lab.runs.run import Options
from ness.lab.runs.sweep import run_all


def some(data_set: Any, per_class: int = 40) -> Loaded:
    generator = torch.Generator().manual_seed(0)

    def part() -> Labelled:
        labels = torch.arange(data_set.classes).repeat(per_class)
        shape = (len(labels), *data_set.shape)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return Labelled(images.numpy(), labels.numpy())

    return Loaded(Arrays(part(), part()), "made up")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def load(data_set: Any, data: Path | None) -> Loaded:
        found.append(data_set.name)
        return some(data_set, 12)

    for module in (assemble, five_datasets):
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(five_datasets, "letters", lambda arrays: arrays)
    prepare = dict.fromkeys(five_datasets._PREPARE, five_datasets._as_it_is)
    monkeypatch.setattr(five_datasets, "_PREPARE", prepare)
    return found


@pytest.mark.parametrize("benchmark", [cifar100, mini_imagenet, five_datasets, digits], ids=lambda m: m.BENCHMARK.name)
def test_a_stream_from_the_shelf_is_the_stream_read_alone(benchmark: Any, reads: list[str]) -> None:
    shelf = Shelf()
    alone = [benchmark.BENCHMARK.load(Request(seed)) for seed in (1, 2)]
    once = len(reads) // 2
    reads.clear()
    shared: list[Stream] = [benchmark.BENCHMARK.load(Request(seed, shelf=shelf)) for seed in (1, 2, 1)]
    assert len(reads) == once  # read for the first, there for the others
    assert [one.fingerprint for one in shared] == [alone[at].fingerprint for at in (0, 1, 0)]


def test_runs_of_one_seed_share_its_stream_while_one_of_them_lives() -> None:
    shelf = Shelf()
    one, other = tiny.job("finetune"), tiny.job("gpm")
    first, second = one.load(1, None, shelf), other.load(1, None, shelf)
    assert first is second
    assert one.load(2, None, shelf) is not first
    assert one.load(1, Path("elsewhere"), shelf) is not first
    kept = ref(first)
    del first, second
    assert kept() is None


def test_streams_of_other_options_are_not_shared(reads: list[str]) -> None:
    shelf = Shelf()
    streams = [resolve("finetune", "cifar100", changes={"split_seed": seed}).load(1, None, shelf) for seed in (0, 1, 0)]
    assert streams[0] is streams[2] is not streams[1]


def test_other_data_and_other_options_are_read_anew(reads: list[str], tmp_path: Path) -> None:
    shelf = Shelf()
    load = five_datasets.BENCHMARK.load
    load(Request(1, None, five_datasets.Options(), shelf))
    load(Request(2, tmp_path, five_datasets.Options(), shelf))
    assert len(reads) == 10
    load(Request(2, tmp_path, five_datasets.Options(fashion="mnist-copy"), shelf))
    assert len(reads) == 15
    assert set(reads) <= set(CATALOGUE)


def test_the_runs_of_a_command_share_one_shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make_known(monkeypatch)
    shelves: list[Shelf | None] = []
    job = tiny.job("finetune", epochs=1)
    plain = type(job).load

    def load(self: Any, seed: int, data: Path | None, shelf: Shelf | None = None) -> Stream:
        shelves.append(shelf)
        return plain(self, seed, data, shelf)

    monkeypatch.setattr(type(job), "load", load)
    run_all([(job, 1), (job, 2)], Options(tmp_path), lambda job, seed: lambda event: None)
    run_all([(job, 3)], Options(tmp_path), lambda job, seed: lambda event: None)
    assert shelves[0] is shelves[1] is not None
    assert shelves[2] is None  # one run needs no second copy of its data
