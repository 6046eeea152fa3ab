from ness.report.listing import listing
from ness.report.table import rows
from report.making import record


def test_columns_that_say_nothing_are_left_out() -> None:
    found = listing(rows([record(), record("joint", 1, [[80.0, 90.0]])]), ["finetune", "joint"])
    assert [column.name for column in found.columns] == [
        "Method", "Seeds", "ACC %", "BWT %", "learnt %", "forgetting", "time",
    ]  # fmt: skip
    assert [line[0].text for line in found.lines] == ["finetune", "joint"]  # ceilings last
    assert [line[3].text for line in found.lines] == ["−11.00", ""]


def test_the_papers_number_with_what_to_know_about_it() -> None:
    found = listing(rows([record("fsdgpm", benchmark="cifar100")]), ["fsdgpm"])
    cells = dict(zip([column.name for column in found.columns], found.lines[0], strict=True))
    assert cells["paper: ACC / BWT"].text == "74.10 ± 0.09 / −3.03 ± 0.31"
    assert cells["paper: ACC / BWT"].note == "1"
    assert "T - 1" in found.notes[0]
