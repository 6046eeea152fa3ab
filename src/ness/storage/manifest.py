"""A guard folder's manifest: JSON whose first line is the SHA-256 of every byte after it.

The manifest names the size and the SHA-256 of the tensors, so that one checksum covers everything that is persisted.
Schema 1 knew no private parts; 1 and 2 had no checksum, and are checked as far as they can be.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
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
