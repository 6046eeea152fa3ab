"""What several runs of one command read from the disk, read once."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Shelf:
    """Things by key, made when they are first asked for and kept while the command lives; nobody changes them.

    >>> shelf = Shelf()
    >>> shelf.get("a", lambda: [1]) is shelf.get("a", lambda: [2])
    True
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, Any] = {}
        self._lent: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What stands under the key."""
        if key not in self._held:
            self._held[key] = make()
        found: T = self._held[key]
        return found

    def lend(self, key: Hashable, make: Callable[[], T]) -> T:
        """The same, kept only while somebody uses it: what differs from seed to seed would fill the memory."""
        found: T | None = self._lent.get(key)
        if found is None:
            found = self._lent[key] = make()
        return found
