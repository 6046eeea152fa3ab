"""What several runs of one command read from the disk, read once."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Shelf:
    """Things by key, made when they are first asked for and kept while the command lives; nobody changes them.

    >>> shelf = Shelf()
    >>> shelf.get("a", lambda: [1]) is shelf.get("a", lambda: [2])
    True
    """

    def __init__(self, held: Mapping[Hashable, Any] | None = None) -> None:
        self._held: dict[Hashable, Any] = dict(held or {})
        self._lent: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()

    @property
    def contents(self) -> dict[Hashable, Any]:
        """What was made so far, by key: what another process's shelf may begin with."""
        return dict(self._held)

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
