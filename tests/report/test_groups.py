from ness.report.groups import labels, recipes, settings, stems
from report.making import record


def test_runs_of_one_digest_on_other_tasks_are_apart() -> None:
    other = record(seed=2, tasks=["x", "y"])
    assert [one.seeds for one in settings([record(seed=3), record(seed=1), other])] == [(1, 3), (2,)]


def test_a_label_says_only_what_is_needed() -> None:
    alike = [
        record(),
        record("ness"),
        record(digest="e", setting="fixed lr=1"),
        record(digest="f", setting="fixed lr=1", settings={"lr": 1, "valid_order": "drawn"}),
    ]
    assert labels(settings(alike)) == [
        "finetune (fixed)", "ness", "finetune (lr 1), an earlier version",
        "finetune (lr 1), lr 1, validation order drawn",
    ]  # fmt: skip


def test_a_recipe_that_methods_share_has_a_letter_and_is_explained_once() -> None:
    cosine = "fixed epochs=50 schedule=cosine mixup=0.2"
    found = settings([
        record(), record("ness"), record(digest="e", setting=cosine),
        record("ness", digest="e", setting=f"{cosine} lr=1"),
    ])  # fmt: skip
    assert labels(found) == ["finetune (fixed)", "ness (fixed)", "finetune (recipe A)", "ness (lr 1, recipe A)"]
    assert recipes(found) == ["recipe A: 50 epochs, cosine, mix-up 0.2"]


def test_no_label_holds_a_digest() -> None:
    found = settings([record(digest="e"), record(digest="f")])
    assert labels(found) == ["finetune (fixed), no. 1", "finetune (fixed), no. 2"]


def test_the_device_is_named_as_people_call_it() -> None:
    gpu = {"device": "cuda", "gpu": "NVIDIA H200"}
    both = settings([record(environment=gpu), record(seed=2, environment={"device": "cpu", "threads": 1})])
    assert both[0].device == "H200 and 1 CPU thread"
    assert settings([record()])[0].device == ""


def test_file_names_differ_and_hold_nothing_odd() -> None:
    found = settings([record(tasks=["x", "y"]), record(), record("../Up", digest="d"), record("../up", digest="D")])
    assert stems(found) == [
        "digits-finetune-d-finetune",
        "digits-finetune-d-finetune-2",
        "digits-.._Up-d",
        "digits-.._up-D-2",
    ]
