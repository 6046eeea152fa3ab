"""What is persisted carries a checksum over every byte of it: JSON, lines of JSON, and tensors.

Files from before there were checksums are still read; whether one may lack it is the caller's to say. A sealed file
cannot be taken for such a one after a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from ness._files import read_bytes, reason, write_bytes
from ness.errors import NessError
from ness.storage import strict_json

KEY = "sha256"
LARGEST = 1 << 28  # bytes of a JSON file: far more than any run's record
LARGEST_LINE = 1 << 24

_SEAL = re.compile(rb'\{"sha256": "([0-9a-f]{64})",(?=\n)')
_LIKE_A_SEAL = re.compile(rb'\{"[^"\n]{1,12}": "[^"\n]{60,68}",\n')
_LINE_SEAL = re.compile(rb',? ?"sha256": "([0-9a-f]{16})"\}\Z')
_LIKE_A_LINE_SEAL = re.compile(rb', "(.ha256|s.a256|sh.256|sha.56|sha2.6|sha25.)": "[^"]{16}"\}\Z', re.DOTALL)
_OPEN = b"0" * 64  # in the place of a checksum while it is computed
_TENSOR_SEAL = re.compile(rb'"sha256":"([0-9a-f]{64})"')


def write_json(path: Path, value: Mapping[str, Any], advice: str = "") -> dict[str, Any]:
    """Write a JSON object with its checksum, whole or not at all.

    Args:
        path: where to.
        value: plain JSON, in the order in which it is written.
        advice: what to do if it cannot be written.

    Returns:
        What `read_json` will give.

    Raises:
        NessError: it is no JSON, or could not be written; what was there is there still.
    """
    content = seal_json(value, str(path))
    write_bytes(path, content, advice)
    return unseal_json(content, str(path))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file, its checksum compared if it has one.

    Raises:
        FileNotFoundError: nothing has this name.
        NessError: it is no ordinary file, unreadable, damaged, or holds something else.
    """
    return unseal_json(read_bytes(path, LARGEST), str(path))


def seal_json(value: Mapping[str, Any], what: str) -> bytes:
    """A JSON object whose first line is the SHA-256 of every byte after it."""
    if KEY in value:
        raise NessError(f"{what}: {KEY!r} is the checksum's own key; expected another one")
    rest = _encoded(value, what, indent=1).encode()[1:] + b"\n"
    if not value:
        raise NessError(f"{what}: found nothing to write, expected at least one key")
    return b'{"sha256": "%s",%s' % (hashlib.sha256(rest).hexdigest().encode(), rest)


def unseal_json(content: bytes, what: str) -> dict[str, Any]:
    """The object, after its checksum was compared; one without is taken as it is."""
    value = strict_json.decode(content, what)
    if not isinstance(value, dict):
        raise NessError(f"{what}: holds a {type(value).__name__}, expected an object")
    if KEY in value or _LIKE_A_SEAL.match(content):
        found = _SEAL.match(content)
        if found is None:
            raise NessError(f"{what}: it does not begin with its checksum: damaged")
        if hashlib.sha256(content[found.end() :]).hexdigest().encode() != found[1]:
            raise NessError(f"{what}: altered since it was written (its checksum differs): damaged")
    return value


def seal_line(value: Mapping[str, Any], what: str) -> bytes:
    """A JSON object in one line, without the newline; its last entry is the beginning of its SHA-256."""
    body = _encoded(value, what).encode()
    comma = b", " if value else b""
    return body[:-1] + comma + b'"sha256": "%s"}' % _short(body)


def unseal_lines(content: bytes, what: str) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file of lines in their order, and how many lines are damaged or cut off.

    Lines without a checksum count only before the first that has one: an earlier version wrote them.
    """
    found: list[dict[str, Any]] = []
    damaged, sealed = 0, False
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        seal = _LINE_SEAL.search(line)
        try:
            if len(line) > LARGEST_LINE:
                raise NessError(f"{what}: a line of {len(line)} bytes")
            value = strict_json.decode(line, what)
        except NessError:
            value = None
        whole = seal is not None and seal[1] == _short(line[: seal.start()] + b"}")
        sealed = sealed or seal is not None or _LIKE_A_LINE_SEAL.search(line) is not None
        if isinstance(value, dict) and (whole or (not sealed and KEY not in value)):
            value.pop(KEY, None)
            found.append(value)
        else:
            damaged += 1
    return found, damaged


def _short(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


def _encoded(value: Mapping[str, Any], what: str, indent: int | None = None) -> str:
    try:
        text = json.dumps(value, indent=indent, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise NessError(f"{what}: cannot be written as JSON ({reason(error)})") from error
    strict_json.decode(text.encode(), what)
    return text


def seal_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], what: str) -> bytes:
    """A safetensors file that holds the SHA-256 of its bytes, header included, among its metadata.

    Args:
        tensors: on any device; no two of them may share memory.
        metadata: text by name.
        what: what errors call it.
    """
    held = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    try:
        content = to_bytes(held, {**metadata, KEY: _OPEN.decode()})
    except (SafetensorError, UnicodeError, TypeError, ValueError, RuntimeError) as error:
        raise NessError(f"{what}: cannot be written as safetensors ({reason(error)})") from error
    at = _seal_of(content)
    assert at is not None
    digest = hashlib.sha256(content).hexdigest().encode()
    return b"".join([content[: at[0]], digest, content[at[1] :]])


def unseal_tensors(content: bytes, what: str) -> tuple[dict[str, Tensor], dict[str, str], bool]:
    """Tensors, metadata without the checksum, and whether there was one; a checksum that differs is an error."""
    at = _seal_of(content)
    if at is not None:
        digest = hashlib.sha256(content[: at[0]])
        digest.update(_OPEN)
        digest.update(memoryview(content)[at[1] :])
        if digest.hexdigest().encode() != content[at[0] : at[1]]:
            raise NessError(f"{what}: altered since it was written (its checksum differs): damaged")
    try:
        tensors = {name: tensor.clone() for name, tensor in from_bytes(content).items()}
        end = 8 + int.from_bytes(content[:8], "little")
        metadata = dict(json.loads(content[8:end]).get("__metadata__") or {})
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise NessError(f"{what}: no safetensors file ({reason(error)}), cut off or foreign: damaged") from error
    metadata.pop(KEY, None)
    return tensors, metadata, at is not None


def _seal_of(content: bytes) -> tuple[int, int] | None:
    """Where the checksum stands in the header."""
    end = 8 + int.from_bytes(content[:8], "little")
    found = _TENSOR_SEAL.search(content, 8, min(end, len(content)))
    return None if found is None else found.span(1)
