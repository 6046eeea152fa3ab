"""What mkdocs does beyond its own: linked files from outside docs/ are on the site, and doctests are code."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}  # documents at the root that are pages
COPIED = ("examples", "experiments", "LICENSE")  # files that pages link to as they are
LINK = re.compile(r"(\]\()([^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add pages and files from outside docs/ that are there."""
    for source, page in SHOWN.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for name in COPIED:
        found = [ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*"))
        for path in found:
            if path.is_file() and not path.name.startswith(".") and path.suffix not in (".pyc", ".md"):
                where = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, where, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ to where the site has those files."""
    here = posixpath.dirname(page.file.src_uri)

    def inside(match: re.Match[str]) -> str:
        before, link = match.groups()
        if "://" in link:
            return before + link
        if page.file.src_uri in SHOWN.values():  # written at the root
            return before + posixpath.relpath(SHOWN.get(link, link), "docs" if link.startswith("docs/") else ".")
        target = posixpath.normpath(posixpath.join("docs", here, link))
        if target.startswith("docs/"):
            return before + link
        return before + posixpath.relpath(SHOWN.get(target, target), here or ".")

    return LINK.sub(inside, markdown)


class Doctests(griffe.Extension):  # type: ignore[misc]
    """Examples in docstrings (>>>) are shown as code; plain Markdown takes them for quotations."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Fence every block of lines from >>> to the next blank line."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    r"""The text with fences around its doctests.

    >>> print(fenced("Adds.\n\n>>> 1 + 1\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    lines: list[str] = []
    inside = False
    for line in [*text.split("\n"), ""]:
        if not inside and line.startswith(">>>"):
            lines.append("```pycon")
            inside = True
        if inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join(lines[:-1])
