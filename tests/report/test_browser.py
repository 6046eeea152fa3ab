"""The page in a real browser: Debian's chromium, headless, driven by playwright; no other browser is downloaded."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ness.report.collect import Found
from ness.report.page import page
from ness.report.records import from_result
from report.making import large, record, with_certificate

pytestmark = pytest.mark.browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LETTERS = """(svg) => [...svg.querySelectorAll('g[class^=t] text')].map((text) => [
    text.parentNode.getAttribute('class'), +text.getAttribute('x'), +text.getAttribute('y'), text.textContent
].join(' ')).sort()"""
EVIL = "</script><img src=x onerror=\"document.title='broken into'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # root has no sandbox
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


class Seen:
    """A page that is open, what its console said, and what it asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def quiet(self, path: Path) -> bool:
        return self.said == [] and set(self.asked) <= {path.as_uri(), "data:,"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [record("finetune", seed) for seed in (1, 2)] + [record("joint", 1, [[80.0, 90.0]])]
    runs += [from_result(with_certificate(seed, tasks=["first", EVIL]), "") for seed in (1, 2)]
    runs += [record(EVIL, 1, [[90.0, None], [95.0, 20.0]], benchmark=EVIL, setting=EVIL)]
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(Found(tuple(runs))), encoding="utf-8")
    return path


def test_sort_a_column_by_pointer_and_by_keyboard(browser: Any, report: Path) -> None:
    seen = Seen(browser, report)
    table = seen.page.locator("table.sortable").first
    methods = table.locator("tbody th")
    table.get_by_role("button", name="BWT").click()
    assert methods.all_inner_texts() == ["finetune", "ness", "joint"]  # equal ones keep their order, blanks are last
    assert table.locator("th[aria-sort=descending]").inner_text().startswith("BWT")
    table.get_by_role("button", name="Method").focus()
    seen.page.keyboard.press("Enter")
    up = methods.all_inner_texts()
    seen.page.keyboard.press("Enter")
    assert methods.all_inner_texts() == up[::-1]
    assert sorted(up) in (up, up[::-1])
    assert seen.quiet(report)


def test_switch_a_run(browser: Any, report: Path) -> None:
    seen = Seen(browser, report)
    drawn = seen.page.locator("#run-map svg")
    assert drawn.get_attribute("aria-label") == "Accuracy matrix of finetune on digits, seed 1"
    assert "79.0" in drawn.inner_html()
    seen.page.locator("#run").select_option(label="finetune, seed 2")
    assert drawn.get_attribute("aria-label") == "Accuracy matrix of finetune on digits, seed 2"
    assert "78.0" in drawn.inner_html()
    assert seen.page.locator("#run-scores").inner_text() == "ACC 74.00 %, BWT −12.00 %"
    assert seen.quiet(report)


def test_the_scripts_map_is_the_templates(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(Found(tuple(large(1, 1, 14)))), encoding="utf-8")
    seen = Seen(browser, path)
    ours = seen.page.locator(".many svg.heat").evaluate(LETTERS)
    assert len(ours) == 14 * 15 // 2
    assert seen.page.locator("#run-map svg").evaluate(LETTERS) == ours


def test_values_by_pointer_and_arrow_keys(browser: Any, report: Path) -> None:
    seen = Seen(browser, report)
    tip = seen.page.locator("#tip")
    heat = seen.page.locator("svg.heat[aria-label*='of finetune']").first
    seen.page.keyboard.press("Tab")
    heat.focus()
    assert tip.inner_text() == "after task 1: task 1, a: 90.00 %, just learnt"
    seen.page.keyboard.press("ArrowDown")
    assert tip.inner_text() == "after task 2: task 1, a: 78.50 %, −11.50 points since it was learnt"
    seen.page.keyboard.press("ArrowRight")
    seen.page.keyboard.press("ArrowRight")  # nothing is further right
    assert "task 2, b: 70.00 %" in tip.inner_text()
    seen.page.keyboard.press("Escape")
    assert tip.is_hidden()
    box = heat.bounding_box()
    seen.page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.4)
    assert "just learnt" in tip.inner_text()
    point = seen.page.locator(".point").first
    point.focus()
    assert "BWT" in tip.inner_text()
    assert seen.quiet(report)


def test_names_from_files_break_into_nothing(browser: Any, report: Path) -> None:
    seen = Seen(browser, report)
    seen.page.locator("#run").select_option(index=5)
    assert seen.page.locator("img").count() == 0
    assert seen.page.title() != "broken into"
    assert EVIL in seen.page.locator("#run option").last.inner_text()
    assert seen.quiet(report)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_never_scrolls_sideways(browser: Any, report: Path, scheme: str) -> None:
    seen = Seen(browser, report, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 360
    background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    assert seen.quiet(report)


def test_without_script_every_table_and_picture_is_there(browser: Any, report: Path) -> None:
    seen = Seen(browser, report, java_script_enabled=False)
    assert seen.page.locator("svg.heat").count() == 4
    assert seen.page.get_by_text("Choosing a run needs the page's script").is_visible()
    assert seen.page.locator("#chooser").is_hidden()
    assert seen.page.locator("table.sortable").first.locator("button").count() == 0


def test_prints_light_and_without_what_needs_a_hand(browser: Any, report: Path) -> None:
    seen = Seen(browser, report, color_scheme="dark")
    seen.page.emulate_media(media="print", color_scheme="dark")
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert seen.page.locator("#single").is_hidden()
    assert len(seen.page.pdf(format="A4")) > 10_000
