"""The laboratory from Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ness
import tiny
from ness.lab import Results, run
from ness.lab.benchmarks import Stream, stream_from_tasks, task_from_tensors

SHORT = {"epochs": 2, "batch": 16, "lr": 0.05}


def stream(name: str = "mine", seed: int = 0) -> Stream:
    generator = torch.Generator().manual_seed(seed)
    tasks = []
    for number in range(2):
        train, test = (tiny.split(count, number, generator) for count in (60, 30))
        tasks.append(task_from_tensors(f"task {number}", (train.images, train.labels), (test.images, test.labels)))
    return stream_from_tasks(name, tasks)


@pytest.fixture(scope="module")
def found() -> Results:
    return run("finetune", stream(), network=tiny.NETWORK, seeds=(1, 2), **SHORT)


def test_figures_are_those_of_the_accuracy_matrices(found: Results) -> None:
    assert found.accuracy.shape == (2, 2)
    assert np.isnan(found.accuracy[0, 1])
    assert found.acc == pytest.approx(found.accuracy[-1].mean())
    assert found.bwt == pytest.approx(found.accuracy[1, 0] - found.accuracy[0, 0])
    each = found.of_seeds()[:, -1].mean(axis=1)
    assert found.acc_std == pytest.approx(each.std(ddof=1))
    assert (found.seeds, found.tasks, found.network) == ((1, 2), ("task 0", "task 1"), "tiny")
    assert str(found).startswith("finetune on mine: ACC ")


def test_one_seed_has_no_deviation_and_joint_no_bwt() -> None:
    joint = run("joint", stream(), network=tiny.NETWORK, **SHORT)
    assert (joint.accuracy.shape, joint.acc_std, joint.bwt, joint.bwt_std) == ((1, 2), None, None, None)
    assert "BWT none (1 seed)" in str(joint)


def test_a_plot_is_a_figure_and_a_file(found: Results, tmp_path: Path) -> None:
    figure = found.plot(tmp_path / "mine.svg")
    assert "mean of the tasks seen" in {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
    assert (tmp_path / "mine.svg").read_text().startswith("<?xml")
    with pytest.raises(ness.NessError, match=r"expected a \.png, \.svg or \.pdf in a folder that is there"):
        found.plot(tmp_path / "mine.nothing")


def test_it_is_what_the_command_line_runs(found: Results, tmp_path: Path) -> None:
    events: list[tuple[int, str]] = []
    kept = run(
        "finetune",
        stream(),
        tiny.NETWORK,
        2,
        out=tmp_path,
        progress=lambda seed, event: events.append((seed, event.kind)),
        **SHORT,
    )
    np.testing.assert_array_equal(kept.accuracy, found.of_seeds()[1])
    assert events.count((2, "learnt")) == 2
    events.clear()
    again = run("finetune", stream(), tiny.NETWORK, 2, out=tmp_path, **SHORT)
    assert again.runs == kept.runs
    assert events == []


def test_records_of_other_data_are_refused(tmp_path: Path) -> None:
    run("finetune", stream(), tiny.NETWORK, out=tmp_path, **SHORT)
    with pytest.raises(ness.NessError, match="was on other data"):
        run("finetune", stream(seed=1), tiny.NETWORK, out=tmp_path, **SHORT)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"method": "nix"}, "no method is called 'nix'"),
        ({"network": "nix"}, "no network is called 'nix'"),
        ({"network": "alexnet"}, r"network 'alexnet' does not take images of shape \(1, 6, 6\)"),
        ({"seeds": ()}, "seeds is empty"),
        ({"epoch": 2}, "Did you mean epochs"),
        ({"preset": "nix"}, "no preset is called"),
        ({"network": torch.nn.Linear(2, 2)}, r"run\(network=...\): found a Linear, expected a name or a NetworkSpec"),
        ({"stream": torch.zeros(3)}, "found a Tensor, expected a name, a Benchmark or a Stream"),
        ({"seeds": "12"}, "found '12', expected whole numbers"),
        ({"seeds": (1, 2.0)}, "found 2.0, expected whole numbers"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(ness.NessError, match=complaint):
        run(**{"method": "finetune", "stream": stream(), **arguments})  # type: ignore[arg-type]


def test_a_name_that_is_taken_is_no_name_for_another_network() -> None:
    import dataclasses

    mine = dataclasses.replace(tiny.NETWORK, name="alexnet")
    with pytest.raises(ness.NessError, match="a network is called 'alexnet' already"):
        run("finetune", stream(), mine)
