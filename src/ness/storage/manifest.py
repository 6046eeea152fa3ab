"""A guard folder's manifest: JSON whose first line is the SHA-256 of every byte after it.

The manifest names the size and the SHA-256 of the tensors, so that one checksum covers everything that is persisted.
Schema 1 knew no private parts; 1 and 2 had no checksum, and are checked as far as they can be.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ness.errors import NessError
from ness.storage import strict_json

FORMAT = "ness-guard"
SCHEMA = 3
SIGNED_SINCE = 3
LARGEST = 1 << 28  # bytes: far more than any model's layers need

_SIGNATURE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",(?=\n)')
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEAD = {"format", "schema", "ness", "torch", "tensors"}
_UNSIGNED = _HEAD | {
    *("rule", "include", "exclude", "bias", "norm", "private_basis", "statistics_dtype"),
    *("phase", "form", "idle", "layers", "tasks"),
}


def encode(manifest: Mapping[str, Any], path: Path) -> bytes:
    """The bytes of a manifest, its checksum among them.

    Args:
        manifest: plain JSON.
        path: what errors call it.
    """
    if "sha256" in manifest:
        raise NessError(f"{path}: 'sha256' is the checksum's own key; expected another one")
    rest = strict_json.encode(dict(manifest), str(path))[1:]
    return b'{"sha256": "%s",%s' % (hashlib.sha256(rest).hexdigest().encode(), rest)


def decode(content: bytes, path: Path) -> dict[str, Any]:
    """The manifest that `encode` gave, or a NessError: foreign, from the future, cut off or altered.

    Args:
        content: the file's bytes.
        path: what errors call it.

    Returns:
        The manifest without its checksum; what it says of its tensors has the right form.
    """
    manifest = strict_json.decode(content, str(path))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise NessError(f"{path}: foreign: not written by NullSpace.save")
    schema = manifest.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema > SCHEMA:
        raise NessError(
            f"{path}: from a future schema {schema!r:.40}; this version reads up to {SCHEMA}. "
            f"Upgrade ness-cl (the folder was written by {manifest.get('ness')!r:.40})"
        )
    if schema < 1:
        raise NessError(f"{path}: damaged: its schema is {schema}, expected 1 to {SCHEMA}; save the guard again")
    if schema >= SIGNED_SINCE or "sha256" in manifest:
        check_signature(content, path)
        del manifest["sha256"]
    elif manifest.keys() - _UNSIGNED:
        unknown = min(manifest.keys() - _UNSIGNED)
        raise NessError(f"{path}: damaged: schema {schema} knew no {unknown!r:.60}; save the guard again")
    _check_tensors(manifest, schema, path)
    return manifest


def tensors_name(digest: str, token: str) -> str:
    """The name of a tensors file: its content's, and one that no other writer has."""
    return f"tensors-{digest[:16]}-{token}.safetensors"


def check_signature(content: bytes, path: Path, again: str = "save the guard again") -> None:
    """Refuse a manifest whose first line is not the checksum of the others.

    Args:
        content: the file's bytes.
        path: what errors call it.
        again: what to do then.
    """
    found = _SIGNATURE.match(content)
    if found is None:
        raise NessError(f"{path}: damaged: it does not begin with its checksum; {again}")
    if hashlib.sha256(content[found.end() :]).hexdigest().encode() != found[1]:
        raise NessError(f"{path}: damaged: altered since it was written (its checksum differs); {again}")


def _check_tensors(manifest: Mapping[str, Any], schema: int, path: Path) -> None:
    described = manifest.get("tensors")
    if not isinstance(described, dict) or described.keys() != {"file", "bytes", "sha256"}:
        raise NessError(f"{path}: damaged: it does not name its tensors; save the guard again")
    name, size, digest = described["file"], described["bytes"], described["sha256"]
    named = isinstance(digest, str) and _DIGEST.fullmatch(digest) and isinstance(name, str)
    token = "-[0-9a-f]{8}" if schema >= SIGNED_SINCE else ""
    if not named or not re.fullmatch(rf"tensors-{digest[:16]}{token}\.safetensors", name):
        raise NessError(f"{path}: damaged: its tensors' name is not that of their checksum; save the guard again")
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise NessError(f"{path}: damaged: its tensors have {size!r:.40} bytes; save the guard again")


# -- what a manifest says of a guard ----------------------------------------------------------------------------------

_Check = tuple[Callable[[Any], bool], str]  # whether a value fits, and what was expected in words


def check_state(manifest: Mapping[str, Any]) -> None:
    """Refuse a description of a guard that no guard gives: an entry that is missing, of another type or out of range.

    A checksum tells that bytes are as they were written; this holds for `load_state` too, which has none.

    Raises:
        NessError: the entry, what was found and what was expected.
    """
    _check_entries(manifest, _STATE, "")
    _check_entries(manifest["tasks"], _TASKS, "tasks/")
    names, private = manifest["tasks"]["names"], manifest["tasks"].get("private", {})
    if manifest["tasks"]["in_use"] not in names or not {*private} <= {*names}:
        raise NessError(f"{_DAMAGED} tasks: one is used, or keeps something, that is not among {names!r:.80}; {_AGAIN}")
    for name, entry in manifest["layers"].items():
        where = f"layers/{name}/"
        _check_entries(entry, _LAYER, where)
        if "constraint" in entry:
            _check_entries(entry["constraint"], _CONSTRAINT, f"{where}constraint/")
            if manifest["phase"] != "constrained":
                raise NessError(f"{_DAMAGED} {where}constraint is there, and the guard does not constrain; {_AGAIN}")
    if not {layer for own in private.values() for layer in own} <= {*manifest["layers"]}:
        raise NessError(f"{_DAMAGED} tasks/private names a layer that is not among the layers; {_AGAIN}")
    for number, entry in enumerate((manifest.get("rest") or {"entries": []})["entries"]):
        _check_entries(entry, _REST, f"rest/entries/{number}/")


_DAMAGED, _AGAIN = "the saved guard's manifest is damaged:", "save the guard again"


def _check_entries(found: Any, expected: Mapping[str, _Check], where: str) -> None:
    for name, (fits, what) in expected.items():
        optional, key = name.startswith("?"), name.removeprefix("?")
        if key in found:
            if not fits(found[key]):
                raise NessError(f"{_DAMAGED} {where}{key} is {found[key]!r:.40}, expected {what}; {_AGAIN}")
        elif not optional:
            raise NessError(f"{_DAMAGED} {where}{key} is missing, expected {what}; {_AGAIN}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _table(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) and fits(one) for key, one in value.items())


def _is_rest(value: Any) -> bool:
    if not isinstance(value, dict) or not {"task", "entries"} <= value.keys() or not isinstance(value["entries"], list):
        return False
    named = value["task"] is None or isinstance(value["task"], str)
    return named and all(isinstance(entry, dict) for entry in value["entries"])


def _is(kind: type, what: str) -> _Check:
    return (lambda value: isinstance(value, kind)), what


def _one_of(*values: str) -> _Check:
    return (lambda value: isinstance(value, str) and value in values), f"one of {', '.join(values)}"


def _or_none(check: _Check) -> _Check:
    return (lambda value: value is None or check[0](value)), f"{check[1]}, or null"


_COUNT: _Check = (_whole, "a whole number, 0 or more")
_SIZE: _Check = ((lambda value: _whole(value) and value > 0), "a whole number above 0")
_TEXT, _FLAG, _OBJECT = _is(str, "text"), _is(bool, "true or false"), _is(dict, "an object")
_NAMES: _Check = (_texts, "a list of names")
_REASONS: _Check = ((lambda value: _table(value, lambda one: isinstance(one, str))), "a text for each name")

_STATE: dict[str, _Check] = {
    "rule": _OBJECT,
    "include": _NAMES,
    "exclude": _NAMES,
    "bias": _one_of("constrain", "freeze"),
    "norm": _one_of("freeze", "per_task"),
    "?private_basis": _one_of("shared", "per_task"),
    "statistics_dtype": _one_of("torch.float64", "torch.float32"),
    "phase": _one_of("open", "constrained", "merged"),
    "form": _one_of("any", "sgd"),
    "idle": _REASONS,
    "?unmasked": _REASONS,
    "layers": ((lambda value: _table(value, lambda one: isinstance(one, dict))), "an object for each layer"),
    "?rest": ((lambda value: _is_rest(value)), "an object with a task and a list of entries"),
    "tasks": _OBJECT,
}
_TASKS: dict[str, _Check] = {
    "names": ((lambda v: _texts(v) and len({*v}) == len(v) > 0), "a list of names, none of them twice"),
    "in_use": _TEXT,
    "current": _or_none(_TEXT),
    "started": _FLAG,
    "unnamed": _FLAG,
    "?private": ((lambda value: _table(value, lambda own: _table(own, _whole))), "numbers by task and layer"),
}
_LAYER: dict[str, _Check] = {
    "kind": _TEXT,
    "groups": _SIZE,
    "outputs": _SIZE,
    "width": _SIZE,
    "weights": _TEXT,
    "?running": _TEXT,
    "count": _COUNT,
    "calls": _COUNT,
    "pending": _or_none(((lambda v: isinstance(v, list) and len(v) == 2 and all(map(_whole, v))), "two numbers")),
    "?relative": _or_none(_OBJECT),
    "merges": _COUNT,
    "last": ((lambda value: _table(value, _number)), "a number for each figure, 0 or more"),
    "?directions": _COUNT,
    "?factors": _COUNT,
    "?constraint": _OBJECT,
}
_PROJECTORS = _one_of("complement", "basis", "dense")
_CONSTRAINT: dict[str, _Check] = {
    "rank": _COUNT,
    "?way": _one_of("factored", "weight", "rows", "gradient"),
    "?projector": _or_none(_PROJECTORS),
    "?private": _COUNT,
    "?own": _FLAG,
    "?free": _PROJECTORS,
    "?cuts": _FLAG,
}
_REST: dict[str, _Check] = {"names": _NAMES, "fingerprint": _or_none(_TEXT), "stored": _FLAG}
