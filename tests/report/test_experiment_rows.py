from dataclasses import replace

from ness.lab.runs.experiment import experiment
from ness.report.experiment_rows import planned, runs_of
from report.making import record

PLAN = {"benchmark": "digits", "seeds": [1, 2], "row": [{"method": "ness"}, {"method": "finetune", "name": "plain"}]}
ASKED = experiment(PLAN, "a test")
NESS = ASKED.jobs[0]
BEFORE = {key: value for key, value in NESS.as_dict().items() if key != "drift"}  # as if it had been added since


def test_rows_in_the_plans_order_with_what_is_missing() -> None:
    plain, ness = (record(job.method.name, 2, digest=job.digest) for job in reversed(ASKED.jobs))
    other = record("finetune", 3, digest=plain.digest)
    one, two = planned(ASKED, [plain, other])
    assert (one.row.name, one.row.seeds, one.row.acc) == ("ness", (), None)
    assert (two.row.name, two.row.seeds, two.seeds) == ("plain", (2,), (1, 2))  # seed 3 was not asked for
    assert planned(ASKED, [ness])[0].row.acc == (74.0, None)


def test_the_digest_goes_before_what_was_the_same_before() -> None:
    old, new = record("ness", digest="old", settings=BEFORE), record("ness", digest=NESS.digest)
    assert runs_of(NESS, [old]) == [old]
    assert runs_of(NESS, [old, new]) == [new]


def test_of_two_generations_the_newest() -> None:
    older = {key: value for key, value in BEFORE.items() if key != "history"}
    found = [record("ness", digest=digest, settings=has) for digest, has in (("z", older), ("a", BEFORE))]
    assert [one.digest for one in runs_of(NESS, found)] == ["a"]


def test_a_record_under_other_settings_is_another_run() -> None:
    for changes in (
        {"settings": {**BEFORE, "lr": 7.0}},  # the preset has changed since
        {"settings": {**BEFORE, "gone": 1}},
        {"settings": BEFORE, "setting": "fixed lr=0.5"},
        {"settings": BEFORE, "preset": "reference"},
        {"settings": BEFORE, "benchmark": "cifar100"},
    ):
        assert runs_of(NESS, [record("ness", **{"digest": "old", **changes})]) == []


def test_a_record_of_a_rule_before_is_another_run() -> None:
    """Whatever its settings say: it must not be passed off as a run of the rule as it is now."""
    revised = replace(NESS, method=replace(NESS.method, revision=lambda own: 2))
    old = record("ness", digest="old", settings=BEFORE)
    assert (old.revision, runs_of(NESS, [old]), runs_of(revised, [old])) == (1, [old], [])
    new = record("ness", digest="old", settings=BEFORE, revision=2)
    assert (runs_of(revised, [old, new]), runs_of(NESS, [new])) == ([new], [])


def test_a_record_of_one_order_of_validation_is_no_run_of_orders_drawn_anew() -> None:
    plan = {"benchmark": "cifar100", "seeds": [1], "row": [{"method": "ness"}]}
    (job,) = experiment(plan, "a test").jobs
    kept = {key: value for key, value in job.as_dict().items() if key not in ("valid_order", "drift")}
    old = record("ness", digest="old", benchmark="cifar100", settings=kept)
    assert runs_of(job, [old]) == []
    new = record("ness", digest="old", benchmark="cifar100", settings={**kept, "valid_order": "drawn"})
    assert runs_of(job, [new]) == [new]
    plan["row"][0]["schedule"] = "cosine"  # nothing depends on it
    (job,) = experiment(plan, "a test").jobs
    kept |= {"schedule": "cosine"}
    old = record("ness", digest="old", benchmark="cifar100", settings=kept, setting=job.label)
    assert runs_of(job, [old]) == [old]
