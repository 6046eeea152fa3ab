from ness.report.groups import labels, settings, stems
from report.making import record


def test_runs_of_one_digest_on_other_tasks_are_apart() -> None:
    other = record(seed=2, tasks=["x", "y"])
    assert [one.seeds for one in settings([record(seed=3), record(seed=1), other])] == [(1, 3), (2,)]


def test_a_label_says_only_what_is_needed() -> None:
    alike = [
        record(),
        record("ness"),
        record(digest="e", setting="fixed lr=1"),
        record(digest="f", setting="fixed lr=1"),
    ]
    assert labels(settings(alike)) == ["finetune (fixed)", "ness", "finetune (fixed lr=1) e", "finetune (fixed lr=1) f"]


def test_file_names_differ_and_hold_nothing_odd() -> None:
    found = settings([record(tasks=["x", "y"]), record(), record("../Up", digest="d"), record("../up", digest="D")])
    assert stems(found) == [
        "digits-finetune-d-finetune",
        "digits-finetune-d-finetune-2",
        "digits-.._Up-d",
        "digits-.._up-D-2",
    ]
