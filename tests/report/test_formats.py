import csv
import io

from ness.report.formats import FORMATS
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


def test_the_papers_numbers_stand_beside_ours_where_it_has_any() -> None:
    row = rows([record("gpm", benchmark="cifar100")])
    assert FORMATS["text"](row).splitlines()[2].endswith("71.63 ± 0.67  -0.28 ± 0.54")
    whole = rows([record("hat", benchmark="cifar100")])
    assert FORMATS["text"](whole).splitlines()[2].endswith("72.06 ± 0.50  0 ± 0")
    assert "paper" not in FORMATS["markdown"](ROWS)
    (line,) = csv.DictReader(io.StringIO(FORMATS["csv"](row)))
    assert (line["paper_acc"], line["paper_bwt_std"]) == ("71.63", "0.54")


def test_text_is_aligned() -> None:
    lines = FORMATS["text"](ROWS).splitlines()
    assert lines[0].index("ACC") == lines[2].index("74.25") == lines[3].index("85.00")
