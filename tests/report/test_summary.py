from ness.report.summary import summary
from ness.report.table import rows
from report.making import record


def matrix(later: float, second: float = 70.0) -> list:
    return [[90.0, None], [later, second]]


def test_who_ended_best_and_what_it_lost() -> None:
    runs = [record("finetune", 1, matrix(50.0)), record("ness", 1, matrix(89.0)), record("joint", 1, [[90.0, 80.0]])]
    found = summary(rows(runs), ["finetune", "ness", "joint"])
    assert found.sentence == (
        "ness ends best: 79.50 % over all tasks (one seed); it lost 1.00 points of what it had learnt. "
        "Plain fine-tuning ends at 60.00 %; it lost 40.00 points of what it had learnt."
    )
    assert [(fact.title, fact.figure) for fact in found.facts] == [
        ("Best at the end", "79.5 %"), ("Forgot least", "−1.0 points"),
        ("Against no protection", "+19.5 points"), ("To the ceiling", "−5.5 points"),
    ]  # fmt: skip


def test_a_difference_within_a_deviation_is_said_to_be_one() -> None:
    runs = [record(name, seed, matrix(80.0 + seed + (name == "a"))) for name in "ab" for seed in (1, 4)]
    assert "Within one deviation of it: b." in summary(rows(runs), ["a", "b"]).sentence


def test_ceilings_alone() -> None:
    found = summary(rows([record("joint", 1, [[90.0, 80.0]])]), ["joint"])
    assert ("nothing could be forgotten" in found.sentence, found.facts) == (True, ())
