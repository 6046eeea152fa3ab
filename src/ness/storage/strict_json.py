"""JSON that means one thing: no key twice, no NaN, no number or text that others cannot hold; errors are `NessError`.

>>> decode(b'{"a": [1, 2.5]}', "file")
{'a': [1, 2.5]}
>>> decode(b'{"a": 1, "a": 2}', "file")
Traceback (most recent call last):
ness.errors.NessError: file: damaged: the key 'a' is there twice
"""

from __future__ import annotations

import json
import math
from typing import Any

from ness.errors import NessError

LARGEST = 1 << 63  # whole numbers at or beyond are no count of anything


class _Refused(Exception):
    """What the JSON holds and must not."""


def decode(content: bytes, what: str) -> Any:
    """The value of JSON text.

    Args:
        content: UTF-8 text.
        what: what errors call it, a path for instance.

    Raises:
        NessError: it is cut off, or not JSON, or says things that have no one meaning.
    """
    try:
        value = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_pairs,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
        _check_texts(value)
    except _Refused as error:
        raise NessError(f"{what}: damaged: {error}") from None
    except RecursionError:
        raise NessError(f"{what}: damaged: nested deeper than anything that is written here") from None
    except (ValueError, MemoryError) as error:
        raise NessError(f"{what}: cut off or damaged ({' '.join(str(error).split())})") from error
    return value


def encode(value: Any, what: str) -> bytes:
    """JSON text that `decode` reads, keys sorted; what it would refuse is refused here.

    Args:
        value: dicts with text as keys, lists, text, numbers, True, False, None.
        what: what errors call it.
    """
    try:
        content = json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NessError(f"{what}: cannot be written as JSON ({' '.join(str(error).split())})") from error
    decode(content, what)
    return content


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Refused(f"the key {key[:60]!r} is there twice")
        found[key] = value
    return found


def _constant(text: str) -> Any:
    raise _Refused(f"found {text}, expected a number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"found {text[:40]}, expected a number that fits into 64 bits")
    return value


def _int(text: str) -> int:
    if len(text) > 20 or not -LARGEST <= int(text) < LARGEST:
        raise _Refused(f"found {text[:40]}, expected a number that fits into 64 bits")
    return int(text)


def _check_texts(value: Any) -> None:
    """Refuse text that is no Unicode: half of a surrogate pair can be neither printed nor written."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            if not found.isascii() and any("\ud800" <= letter <= "\udfff" for letter in found):
                raise _Refused(f"found {found[:60]!r}, expected Unicode text")
        elif isinstance(found, dict):
            waiting += found.keys()
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
