import csv
import io

from ness.report import detail_tables
from ness.report.certificates import promises
from ness.report.groups import settings
from ness.report.records import from_result
from report.making import record, with_certificate

(NESS,) = settings([from_result(with_certificate(seed), "") for seed in (1, 2)])


def test_the_matrix_in_three_formats() -> None:
    sheet = detail_tables.matrix(NESS, "ness", "stem")
    assert sheet.markdown().splitlines()[2:5] == ["| after | a | b |", "| --- | ---: | ---: |", "| a | 90.00 |  |"]
    assert list(csv.reader(io.StringIO(sheet.csv())))[2] == ["b", "78.5", "70.0"]
    assert "a & 90.00 & -- \\\\" in sheet.latex()


def test_the_certificate_takes_the_worst_of_the_seeds() -> None:
    conv, fc = promises(NESS)
    assert (conv.rank, fc.rank, fc.drift, fc.limit, fc.task) == (0, 40, 1.0, 2.0, 2)
    sheet = detail_tables.certificate(NESS, "ness", "stem")
    assert sheet is not None
    assert sheet.shown(sheet.lines[1]) == ["2", "fc", "64", "40.0", "9", "2", "1", "0.01"]
    assert detail_tables.certificate(settings([record()])[0], "finetune", "stem") is None


def test_records_without_an_rms_bound_are_held_against_the_worst_row() -> None:
    found = with_certificate()
    del found["notes"][1]["certificate"][1]["rms_bound"]
    assert promises(settings([from_result(found, "")])[0])[1].limit == 9.0


def test_a_note_of_another_shape_is_no_certificate() -> None:
    for rows in ("text", [5], [{"name": "x"}], [{"name": "x", "rank": "y"}]):
        assert promises(settings([record(notes=[{"certificate": rows}])])[0]) == []


def test_times() -> None:
    sheet = detail_tables.times([NESS], "digits")
    assert sheet.header[4:] == ("task 1", "task 2")
    assert sheet.shown(sheet.lines[0]) == ["ness", "3.0", "7.0", "0.429", "1.0", "3.0"]
