"""The one family of errors and warnings that this package raises, and how a name is shown in one."""

import sys
import unicodedata
import warnings

OURS = ("ness", "torch", "contextlib", "functools")  # packages whose lines a warning does not point at


class NessError(Exception):
    """What was found, what was expected, what to do: the message says all three.

    >>> import ness
    >>> try:
    ...     raise ness.NessError("layer 'fc': found rank 0, expected more than 0; raise eps")
    ... except ness.NessError as error:
    ...     print(error)
    layer 'fc': found rank 0, expected more than 0; raise eps
    """


class NessWarning(UserWarning):
    """Something that is allowed and probably not what you want; the message says what it means."""


# Characters that turn the direction of what follows; control characters, half surrogates and line ends have categories.
_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    r"""The text in one line, with everything that a terminal would obey instead of show written as an escape.

    >>> printable("a\x1b[31mred\nline")
    'a\\x1b[31mred\\nline'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(letter.encode("unicode_escape").decode() if _is_obeyed(letter) else letter for letter in text)


def _is_obeyed(letter: str) -> bool:
    return letter in _TURNING or unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")


def warn(message: str) -> None:
    """Warn with a `NessWarning` that points at the caller's own line, however deep in here it was noticed."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, NessWarning, stacklevel=level)
