"""The tasks a guard knows: their names, which one is in use, and what each keeps for itself: norms, private parts."""

from __future__ import annotations

from ness.errors import NessError
from ness.layers.norms import NormValues
from ness.updates.private import PrivatePart

PrivateParts = dict[str, PrivatePart]  # layer -> what a task adds to it

FIRST = "first"


class Tasks:
    """Names in the order they were learnt. What the model knew before the first `constrain` is the task "first".

    >>> tasks = Tasks()
    >>> tasks.begin("cats", {}); tasks.finish({})
    >>> tasks.names, tasks.in_use
    (('first', 'cats'), 'cats')
    """

    def __init__(self) -> None:
        self.norms: dict[str, NormValues] = {FIRST: {}}
        self.private: dict[str, PrivateParts] = {}  # of the tasks that have any
        self.in_use = FIRST
        self.current: str | None = None  # the task being trained
        self.started = False  # whether any task has begun
        self.unnamed = False  # whether the last finished task has no name yet

    def copy(self) -> Tasks:
        """Another one that knows the same."""
        twin = Tasks()
        twin.__dict__.update(self.__dict__, norms=dict(self.norms), private=dict(self.private))
        return twin

    @property
    def names(self) -> tuple[str, ...]:
        """All finished tasks, oldest first."""
        return tuple(self.norms)

    def name_observed(self, task: str | None) -> None:
        """Give the task that is being observed its name, or check it."""
        if task is None or task == self.in_use:
            return
        if not self.started and self.names == (FIRST,):
            self.norms = {task: self.norms[FIRST]}
        elif self.unnamed and task not in self.norms:
            self.norms[task] = {}
            self.unnamed = False
        else:
            known = (
                f"call use({task!r}) before" if task in self.norms else f"{task!r} begins with constrain(task={task!r})"
            )
            raise NessError(f"observe(task={task!r}): the task in use is {self.in_use!r}; {known}")
        self.in_use = task

    def check_new(self, task: str | None) -> None:
        """Refuse a name that is taken or no name at all."""
        if task is None:
            return
        if not isinstance(task, str) or not task:
            raise NessError(f"constrain(task={task!r}): expected a name")
        if task in self.norms:
            raise NessError(f"constrain(task={task!r}): the name is taken; tasks: {', '.join(self.names)}")

    def begin(self, task: str | None, norms: NormValues) -> None:
        """A task starts from the norms in place; the task in use keeps them."""
        self.started, self.current = True, task
        if not self.norms[self.in_use]:
            self.norms[self.in_use] = norms

    def finish(self, norms: NormValues, private: PrivateParts | None = None) -> None:
        """The current task is learnt and in use."""
        self.unnamed = self.current is None
        if self.current is not None:
            self.norms[self.current] = norms
            if private:
                self.private[self.current] = private
            self.in_use = self.current
        elif self.in_use in self.private:  # it was learnt on the shared weights, which are in place now
            self.in_use = self.names[0]
        self.current = None

    def abandon(self) -> None:
        """The current task is dropped."""
        self.current = None

    def norms_in_use(self) -> NormValues:
        """The norms of the task in use."""
        return self.norms[self.in_use]

    def private_in_use(self) -> PrivateParts:
        """The private parts of the task in use, by layer."""
        return self.private.get(self.in_use, {})

    def check_known(self, task: str, what: str) -> None:
        """Refuse a name that no finished task has."""
        if task not in self.norms:
            raise NessError(f"{what}({task!r}): no such task; tasks: {', '.join(self.names)}")

    def use(self, task: str | None) -> None:
        """Choose a task; None: the first."""
        name = self.names[0] if task is None else task
        self.check_known(name, "use")
        self.in_use = name

    def kept(self) -> dict[str, int]:
        """Numbers that each later task keeps for itself, those that keep none left out."""
        counts = {
            name: sum(value.numel() for value in self.norms[name].values())
            + sum(part.numbers for part in self.private.get(name, {}).values())
            for name in self.names[1:]
        }
        return {name: count for name, count in counts.items() if count}
