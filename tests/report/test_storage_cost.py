"""What a task keeps, and which rows of a plan are held against it."""

from dataclasses import replace
from pathlib import Path

import pytest

from ness import NessError
from ness.lab.runs.experiment import experiment, read
from ness.report.collect import collect
from ness.report.storage_cost import keeping, most_kept, shared_layers
from report.making import keeping_run

ROOT = Path(__file__).parents[2]
PLAN = read(ROOT / "experiments/ness-plus-ablation.toml")
JOBS = {job.title: job for job in PLAN.jobs}
NORMS = 4 * 4544 + 5  # affine parameters, statistics and a counter in each of five


def test_the_rows_are_ness_plus_and_what_differs_in_one_setting_of_its_own() -> None:
    runs = [keeping_run(job, seed, 70.0 + seed / 10, 1000) for job in PLAN.jobs for seed in PLAN.seeds]
    found = keeping(PLAN, runs, "a test").points
    course = ["+ mix-up: NESS+", "k = 4", "k = 8", "k = 16", "k = 32", "k = 64"]
    assert [one.name for one in found if not one.apart] == course
    assert [one.directions for one in found if not one.apart] == [68, 4, 8, 16, 32, 64]
    assert [(one.name, one.directions) for one in found if one.apart] == [
        ("no shared update", 68),
        ("a basis per task", 68),
    ]
    assert [one.name for one in found if one.default] == ["+ mix-up: NESS+", "no shared update", "a basis per task"]


def test_no_private_directions_are_on_the_course() -> None:
    row = {"method": "ness-plus", "private": 0, "name": "none"}
    plan = experiment({"benchmark": "cifar100", "seeds": [1], "row": [{"method": "ness-plus"}, row]}, "a test")
    (found,) = keeping(plan, [keeping_run(plan.jobs[1], 1, 70.0, NORMS)], "a test").points
    assert (found.name, found.directions, found.apart, found.default) == ("none", 0, False, False)


def test_the_share_is_of_the_shared_weights_and_the_figures_are_the_table_s() -> None:
    job = JOBS["k = 8"]
    runs = [keeping_run(job, seed, acc, kept) for seed, acc, kept in ((1, 70.0, 64_993), (2, 72.0, 129_987))]
    (found,) = keeping(PLAN, runs, "a test").points
    assert found.kept == most_kept(runs) == 129_987
    assert found.percent == pytest.approx(100 * 129_987 / 6_499_328, abs=1e-4)
    assert (found.acc, found.deviation, found.seeds, found.asked) == (71.0, 1.4142, 2, 5)
    assert sum(outputs * fan_in for outputs, fan_in, _ in shared_layers(job, runs[0])) == 6_499_328


def test_k_is_what_the_records_kept() -> None:
    found = keeping(PLAN, collect([ROOT / "results"]).records, "a test").points
    assert "+ mix-up: NESS+" in [one.name for one in found]
    for one in found:
        if one.name != "a basis per task":
            layers = shared_layers(JOBS[one.name], keeping_run(JOBS[one.name], 1, 70.0, 1))
            assert one.kept == NORMS + sum(outputs * min(one.directions, fan_in // 3) for outputs, fan_in, _ in layers)


def test_fan_ins_are_the_record_s_outputs_and_biases_the_network_s() -> None:
    (job,) = experiment({"benchmark": "digits", "seeds": [1], "row": [{"method": "ness-plus"}]}, "a test").jobs
    rows = [{"name": name, "fan_in": fan_in} for name, fan_in in (("conv", 9), ("fc1", 512), ("fc2", 256))]
    run = replace(keeping_run(job, 1, 70.0, 1), notes=({}, {"certificate": rows}))
    assert shared_layers(job, run) == [(32, 9, False), (256, 512, True), (128, 256, True)]


def test_what_cannot_be_compared_is_refused() -> None:
    whole = JOBS["+ mix-up: NESS+"]
    good = keeping_run(whole, 1, 70.0, 1)
    for notes, message in (
        ([{}, {"kept": 1}], "certifies nothing, but alexnet has conv1.conv, .* run it again"),
        ([{}, {"certificate": good.notes[1]["certificate"]}], "do not say what a task keeps"),
    ):
        with pytest.raises(NessError, match=message):
            keeping(PLAN, [replace(good, notes=tuple(notes))], "a test")
    with pytest.raises(NessError, match="2 rows are ness-plus as it stands, expected one"):
        keeping(read(ROOT / "experiments/ness-plus.toml"), [], "a.md")
