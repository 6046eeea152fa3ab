"""Every Python snippet of the documents runs; one that cannot says why: <!-- not run: reason -->."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import ness
from stand_ins import PAGES, TRANSFORMERS, common

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", flags=re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: \S.* -->\s*\Z")


def pages() -> list[str]:
    """Documents with Python in them."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found if "```python" in path.read_text(encoding="utf-8")]


def snippets(text: str) -> list[tuple[int, str]]:
    """(line before the first, code) of each snippet that is to run."""
    found = []
    for match in FENCE.finditer(text):
        if not NOT_RUN.search(text[: match.start()]):
            code = re.sub(f"^{match[1]}", "", match[2], flags=re.MULTILINE)
            found.append((text.count("\n", 0, match.start(2)), code))
    return found


def run(page: str, text: str, known: dict[str, Any]) -> None:
    """Run a page's snippets from top to bottom; a traceback names the page and its line."""
    space = {"__name__": "snippet", **known}
    for line, code in snippets(text):
        exec(compile("\n" * line + code, str(ROOT / page), "exec", dont_inherit=True), space)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.transformers if page in TRANSFORMERS else ()) for page in pages()]
)
def test_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in TRANSFORMERS:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ness.Rule, "registry", dict(ness.Rule.registry))
    run(page, (ROOT / page).read_text(encoding="utf-8"), PAGES.get(page, common)())


def test_a_snippet_that_fails_is_found() -> None:
    with pytest.raises(ZeroDivisionError):
        run("docs/page.md", "Text.\n\n```python\n1 / 0\n```\n", {})


def test_a_snippet_is_passed_over_only_with_a_reason() -> None:
    text = "<!-- not run: needs a GPU -->\n```python\n1 / 0\n```\n"
    assert snippets(text) == []
    assert len(snippets(text.replace(": needs a GPU", ""))) == 1


def test_every_page_that_is_prepared_is_there() -> None:
    assert set(PAGES) <= set(pages())


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference").glob("*.md"))
    shown = set(re.findall(r"^::: ness\.(\w+)$", text, flags=re.MULTILINE))
    assert shown == set(ness.__all__) - {"__version__"}


def test_links_between_documents_lead_somewhere() -> None:
    lost = []
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s#]+)", text):
            if "://" not in link and not (path.parent / link).exists():
                lost.append(f"{path.relative_to(ROOT)}: {link}")
    assert lost == []
