"""The one family of errors and warnings that this package raises."""

import sys
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


def warn(message: str) -> None:
    """Warn with a `NessWarning` that points at the caller's own line, however deep in here it was noticed."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, NessWarning, stacklevel=level)
