"""Lets Avalanche be imported where torchvision is not: every name of it is an empty class."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MISSING = {"torchvision", "wandb", "gputil", "GPUtil", "pytorchcv", "gdown", "qpsolvers", "quadprog"}


class Empty(ModuleType):
    """A module in which any name is a class of its own."""

    __all__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None, "__module__": self.__name__})


class Finder:
    """Finds the missing packages, and whatever is asked for inside them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in MISSING else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def install() -> None:
    """Put the finder behind all others, so that a package that is there is used."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())  # type: ignore[arg-type]
