from ness.lab.runs.experiment import experiment
from ness.report.accuracy_maps import maps
from report.making import record

ROWS = [{"method": "finetune"}, {"method": "ness", "name": "a"}, {"method": "ness", "name": "b", "eps": 0.1}]
PLAN = experiment({"title": "T", "benchmark": "digits", "seeds": [1, 2], "row": ROWS}, "a test")


def test_rows_that_ran_in_the_order_of_the_methods_named() -> None:
    runs = [record(job.method.name, seed, digest=job.digest) for job in PLAN.jobs for seed in (1, 2)]
    found = maps(PLAN, ["ness", "finetune"], runs, "a test")
    assert [one.name for one in found.maps] == ["a", "b", "finetune"]
    assert [one.name for one in maps(PLAN, [], runs, "a test").maps] == ["finetune", "a", "b"]
    assert [one.name for one in maps(PLAN, [], runs[:2], "a test").maps] == ["finetune"]


def test_a_map_is_the_mean_over_seeds_with_its_scores() -> None:
    runs = [record("finetune", seed, digest=PLAN.jobs[0].digest) for seed in (1, 2)]
    (found,) = maps(PLAN, ["finetune"], runs, "a test").maps
    assert found.accuracy == [[90.0, None], [78.5, 70.0]]
    assert (found.acc, found.bwt, found.seeds, found.asked) == ("74.25 ± 0.35", "−11.50 ± 0.71", 2, 2)
