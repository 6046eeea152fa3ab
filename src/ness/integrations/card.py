"""A model card that holds the certificate, as Markdown for people and JSON for programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ness import distributed
from ness._files import write_together
from ness._version import __version__
from ness.certificate import Certificate
from ness.errors import NessError
from ness.guard import NullSpace
from ness.rules import rule_to_dict

CARD, FIGURES = "README.md", "ness.json"
BEGIN, END = "<!-- ness: begin -->", "<!-- ness: end -->"
_COLUMNS = ("rank", "fan_in", "bound", "rms_bound", "rms_drift")


def write_card(folder: Path, guard: NullSpace, certificate: Certificate | None = None) -> None:
    """Write, or bring up to date, the certificate in a folder's README.md and ness.json.

    What else a README.md says stays; where there is none, one is begun with the front matter that hubs read.

    Args:
        folder: made if it is missing.
        guard: whose model it is.
        certificate: of this guard; None: as it is now.

    Raises:
        NessError: nothing was observed, or the folder could not be written; what was there is there still.
    """
    certificate = certificate or guard.certificate()
    if not distributed.on_rank_zero():
        return
    path = folder / CARD
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise NessError(f"{path}: could not be read ({error}); the certificate was not added to it") from error
    files = card_files(guard, certificate, folder.resolve().name, text)
    write_together(folder, {name: content.encode() for name, content in files.items()})


def card_files(guard: NullSpace, certificate: Certificate, name: str, text: str | None = None) -> dict[str, str]:
    """README.md and ness.json of a model, by name.

    Args:
        guard: whose model it is.
        certificate: what they tell.
        name: the model's, on a card that is begun.
        text: of a card that is there already; None: there is none.
    """
    before, begun, rest = (_front(guard, name) if text is None else text).partition(BEGIN)
    after = rest.partition(END)[2] if begun else ""
    return {
        FIGURES: json.dumps(_figures(certificate, guard), indent=2, allow_nan=False) + "\n",
        CARD: f"{before.rstrip()}\n\n{section(certificate, guard)}\n{after.lstrip()}",
    }


def section(certificate: Certificate, guard: NullSpace) -> str:
    """The part of a card that says what the model kept, as Markdown between two marks."""
    rows = [
        f"| `{row.name or '(model)'}` | {' | '.join(_cell(getattr(row, key)) for key in _COLUMNS)} "
        f"| {_cell(100 * row.relative_drift)} % |"
        for row in certificate.rows
    ]
    seen = max((gram.count for gram in guard.grams.values()), default=0)
    lines = [
        BEGIN,
        "## What this model kept",
        "",
        f"Trained with NESS {__version__}, rule `{guard.rule!r}`: each layer's "
        f"update is confined to input directions that the observed data (up to {seen:,} rows per layer) hardly uses.",
        "",
        f"**Certificate: {certificate.verdict}.**",
        "",
        "The figures are per layer, on the inputs as they were observed: `bound` holds for every single observed row, "
        "`rms bound` for their root mean square, and the drift was measured exactly. Drift of earlier layers comes on "
        "top; `guard.compare(batches)` measures the change from end to end.",
        "",
    ]
    if certificate.unprotected:
        names = ", ".join(f"`{name}` ({count:,})" for name, count in list(certificate.unprotected.items())[:8])
        more = "" if len(certificate.unprotected) <= 8 else f" and {len(certificate.unprotected) - 8} more"
        lines += [f"Trained freely, with no bound: {names}{more}.", ""]
    lines += [
        "<details><summary>All layers</summary>",
        "",
        "| layer | " + " | ".join(key.replace("_", " ") for key in _COLUMNS) + " | drift |",
        "|---|" + "--:|" * (len(_COLUMNS) + 1),
        *rows,
        "",
        "</details>",
        END,
    ]
    return "\n".join(lines)


def _front(guard: NullSpace, name: str) -> str:
    config = getattr(guard.model, "config", None)
    base = getattr(config, "_name_or_path", None) or getattr(guard.model, "name_or_path", None)
    lines = ["---", "library_name: transformers"]
    if isinstance(base, str) and base and not Path(base).exists() and base.count("/") <= 1:
        lines.append(f"base_model: {base}")  # a hub takes names for this, and no folders of one machine
    return "\n".join([*lines, "tags:", "- ness", "- continual-learning", "---", "", f"# {name}", ""])


def _figures(certificate: Certificate, guard: NullSpace) -> dict[str, Any]:
    rows = [{key: _json(value) for key, value in row.items()} for row in certificate.to_dicts()]
    return {
        "format": "ness-certificate",
        "ness": __version__,
        "model": type(guard.model).__name__,
        "rule": rule_to_dict(guard.rule),
        "verdict": certificate.verdict,
        "holds": certificate.holds,
        "largest_drift": _json(float(certificate.largest_drift)),
        "rows": rows,
        "unprotected": dict(certificate.unprotected),
        "skipped": dict(certificate.skipped),
    }


def _json(value: Any) -> Any:
    """JSON knows no infinity."""
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
