"""Data sets: the catalogue, where they are looked for, how they are read, downloaded and checked."""

from ness.lab.datasets.arrays import Arrays, Labelled
from ness.lab.datasets.catalogue import CATALOGUE, DataSet
from ness.lab.datasets.find import find, roots
from ness.lab.datasets.load import Loaded, get, load, read
from ness.lab.datasets.verify import check, status

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
