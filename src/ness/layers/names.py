"""Module names and the patterns that choose among them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from ness.errors import NessError


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means this name: the name itself, a prefix that ends at a dot, or a glob.

    >>> matches("head.0", "head"), matches("header", "head"), matches("layer1.0.conv2", "*.conv?")
    (True, False, True)
    """
    prefix = pattern.removesuffix(".")
    return name == prefix or name.startswith(prefix + ".") or fnmatchcase(name, pattern)


def matched(names: Iterable[str], patterns: Sequence[str], argument: str) -> set[str]:
    """All names that some pattern means; a pattern that means none is refused with the nearest names."""
    names = list(names)
    found: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if matches(name, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:5]
            raise NessError(
                f"{argument}={pattern!r} matches no module or parameter of the model; "
                f"near names: {', '.join(repr(name) for name in near)}"
            )
        found.update(hits)
    return found


def as_patterns(patterns: str | Sequence[str] | None, argument: str) -> tuple[str, ...]:
    """One pattern or several, as a tuple."""
    if patterns is None:
        return ()
    listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in listed:
        if not isinstance(pattern, str) or not pattern:
            raise NessError(f"{argument}: found {pattern!r}, expected module names, prefixes or patterns as text")
    return listed


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names for a message, the first few and how many more.

    >>> listed(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d and 2 more'
    """
    more = len(names) - most
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:most])} and {more} more"
