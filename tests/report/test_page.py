import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ness.report.collect import Found, Problem, collect
from ness.report.page import page
from ness.report.records import from_result
from ness.report.write import tables
from report.making import large, record, with_certificate

EVIL = "</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}<!--"


class Elements(HTMLParser):
    """Every element and its attributes; closing tags must match."""

    VOID = frozenset({"meta", "link", "path", "circle", "br", "img", "polyline", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def small() -> Found:
    runs = [record(seed=1), record(seed=2), record("joint", 1, [[80.0, 90.0]])]
    runs += [from_result(with_certificate(seed), "") for seed in (1, 2)]
    problem = Problem(Path("runs") / "broken", "damaged", "result.json cannot be read")
    return Found((*runs, record("gpm", benchmark="cifar100")), (problem,))


def test_everything_is_on_the_page_without_the_script() -> None:
    text = page(small())
    elements = Elements(text)
    svgs = [attributes.get("class") for tag, attributes in elements.found if tag == "svg"]
    assert svgs.count("heat") == 4
    assert svgs.count("chart scatter") == 2
    assert svgs.count("chart lines") == 3 + 2 + 2  # courses; free directions and drift; all methods of a benchmark
    assert sum(tag == "table" for tag, _ in elements.found) == 4  # two benchmarks, a certificate, what was left out
    plain = " ".join(elements.text)
    for expected in ("74.25 ± 0.35", "−11.50 ± 0.71", "71.63 ± 0.67", "broken", "damaged", "fc", "85.00"):
        assert expected in plain
    labelled = [attributes for tag, attributes in elements.found if tag == "svg" and "viewbox" in attributes]
    assert all(attributes["aria-label"] for attributes in labelled)


def test_nothing_is_asked_of_the_network() -> None:
    elements = Elements(page(small()))
    for tag, attributes in elements.found:
        assert not attributes.get("src"), tag
        assert re.match(r"#|data:,$", attributes.get("href", "#")), attributes
    style = re.sub(r"url\(#\w+\)", "", page(small()))
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", style)


def test_names_from_files_stay_text() -> None:
    notes = [{}, {"certificate": [{**row, "name": EVIL} for row in with_certificate()["notes"][1]["certificate"]]}]
    changes = {"benchmark": EVIL, "setting": EVIL, "tasks": [EVIL, "b"], "notes": notes}
    changes |= {"environment": {"torch": EVIL}, "seconds": [1.0, 2.0], "epochs": [1, 1], "version": EVIL}
    runs = (record(EVIL, 1, **changes), record(EVIL, 1, digest="e", **changes))
    text = page(Found(runs, (Problem(Path("runs") / EVIL.replace("/", ""), "damaged", EVIL),)))
    elements = Elements(text)
    assert not [tag for tag, attributes in elements.found if tag == "img" or "onerror" in attributes]
    assert sum(tag == "script" for tag, _ in elements.found) == text.count("</script") == 2
    assert "<!--" not in text.split("<body>")[1]
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert data["runs"][0][0] == EVIL
    assert data["tasks"] == [[EVIL, "b"]]


def test_the_same_runs_give_the_same_page() -> None:
    assert page(small()) == page(small())


@pytest.mark.parametrize(("settings", "seeds", "layers"), [(100, 5, 0), (500, 1, 3)])
def test_five_hundred_runs_of_twenty_tasks_stay_under_five_megabytes(settings: int, seeds: int, layers: int) -> None:
    text = page(Found(tuple(large(settings, seeds, 20, layers))))
    assert len(text.encode()) < 5_000_000
    assert text.count('class="heat"') == settings + 1  # and the one the script draws


@pytest.mark.parametrize(
    "runs",
    [
        [record("finetune", 1, [[90.0]], tasks=["only"])],
        [record("joint", 1, [[0.0, 100.0]]), record("alone", 1, [[88.0, None], [88.0, 76.0]])],
        [record("ness", 1, [[0.0, None], [0.0, 0.0]], total_seconds=0.0, seconds=[0.0, 0.0])],
        [record(), record(tasks=["a", "b", "c"], accuracy=[[1.0, None, None], [2.0, 3.0, None], [4.0, 5.0, 6.0]])],
        [record(seed=-5, tasks=["", ""], setting="", method="", benchmark="")],
        large(1, 1, 70, 2),
    ],
    ids=["one task", "ceilings", "zeros", "two shapes", "no names", "seventy tasks"],
)
def test_odd_runs_make_a_page(runs: list, tmp_path: Path) -> None:
    Elements(page(Found(tuple(runs))))
    assert list(tables(Found(tuple(runs)), tmp_path))


def test_our_own_records_make_a_page() -> None:
    results = Path(__file__).parents[2] / "results"
    if not results.is_dir():
        pytest.skip("this checkout has no results/")
    found = collect([results])
    assert found.problems == ()
    Elements(page(found))
