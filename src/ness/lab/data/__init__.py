"""Data sets: the catalogue, where they are looked for, how they are read, downloaded and checked."""

from ness.lab.data.arrays import Arrays, Labelled
from ness.lab.data.catalogue import CATALOGUE, DataSet
from ness.lab.data.find import find, roots
from ness.lab.data.load import Loaded, get, load, read
from ness.lab.data.verify import check, status

__all__ = [
    "CATALOGUE",
    "Arrays",
    "DataSet",
    "Labelled",
    "Loaded",
    "check",
    "find",
    "get",
    "load",
    "read",
    "roots",
    "status",
]
