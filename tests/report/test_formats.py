import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ness.report.formats import FORMATS, aligned
from ness.report.table import rows
from report.making import record

ROWS = rows([record(seed=1), record(seed=2), record("joint", 1, [[80.0, 90.0]], setting="fixed a_b=1|2 & 5%")])


def test_markdown() -> None:
    lines = FORMATS["markdown"](ROWS).splitlines()
    assert lines[0].startswith("| benchmark | method | setting | seeds | ACC | BWT |")
    assert "| digits | finetune | fixed | 1 2 | 74.25 ± 0.35 | -11.50 ± 0.71 |" in lines[2]
    assert "1\\|2" in lines[3]
    assert len(lines) == 4


def test_csv_has_every_number_in_full() -> None:
    first, joint = csv.DictReader(io.StringIO(FORMATS["csv"](ROWS)))
    assert list(first)[:8] == ["benchmark", "method", "setting", "seeds", "acc", "acc_std", "bwt", "bwt_std"]
    assert (float(first["acc"]), float(first["bwt"])) == (74.25, -11.5)
    assert abs(float(first["acc_std"]) - 0.3535533905932738) < 1e-12
    assert (joint["bwt"], joint["acc_std"]) == ("", "")


def test_the_papers_numbers_stand_beside_ours_where_it_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    row = rows([record("gpm", benchmark="cifar100")])
    assert FORMATS["text"](row).splitlines()[2].endswith("71.63 ± 0.67  -0.28 ± 0.54")
    whole = rows([record("hat", benchmark="cifar100")])
    assert FORMATS["text"](whole).splitlines()[2].endswith("72.06 ± 0.50  0 ± 0")
    assert "paper" not in FORMATS["markdown"](ROWS)
    (line,) = csv.DictReader(io.StringIO(FORMATS["csv"](row)))
    assert (line["paper_acc"], line["paper_bwt_std"]) == ("71.63", "0.54")


def test_text_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = FORMATS["text"](ROWS).splitlines()
    assert lines[0].index("ACC") == lines[2].index("74.25") == lines[3].index("85.00")


def test_a_narrow_terminal_loses_what_is_wanted_least_and_is_told() -> None:
    lines = [("name", "note", "ACC"), ("a", "words that go on for quite a while and then for more", "74.25 ± 0.35")]
    narrow = aligned(lines, 30, ("note",)).splitlines()
    assert narrow[0].split() == ["name", "ACC"]
    assert " ".join(narrow[3:]) == "left out, for the terminal is narrow: note"
    folded = aligned(lines, 40, ("note",)).splitlines()
    assert folded[2].endswith("74.25 ± 0.35")
    assert " ".join(" ".join(line.split()) for line in folded[2:]).replace("74.25 ± 0.35 ", "") == f"a {lines[1][1]}"


words = st.lists(st.text("abcdefgh", min_size=1, max_size=9), max_size=12).map(" ".join)


@given(st.lists(st.tuples(words, words, words), min_size=1, max_size=5))
def test_every_table_of_words_fits_eighty_columns_and_no_word_is_split(body: list) -> None:
    text = aligned([("one", "two", "three"), *body], 80)
    assert max(map(len, text.splitlines())) <= 80
    assert sorted(" ".join(" ".join(line) for line in body).split()) == sorted(
        word for line in text.splitlines()[2:] for word in line.split()
    )


def test_the_main_table_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    setting = "fixed epochs=50 drop_last=True optimizer=sgdm schedule=cosine mixup=0.2 norm=task"
    long = rows([record("ness-plus", seed, setting=setting, benchmark="cifar100") for seed in (1, 2, 3)])
    assert max(map(len, FORMATS["text"]([*long, *ROWS]).splitlines())) <= 80
