"""A network of its own for each task, from the same start: what forward transfer is measured against."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ness.lab.methods.base import Context, Method, MethodSpec, TaskData


class Alone(Method):
    """Every task starts at the initial weights; its final ones are kept and put back when it is evaluated."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.start = self._copy()
        self.networks: list[dict[str, Tensor]] = []

    def before_task(self, lesson: TaskData) -> None:
        """Back to the initial weights."""
        self.model.load_state_dict(self.start)

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Keeps this task's network."""
        self.networks.append(self._copy())
        return {}

    def use(self, task: int) -> None:
        """The network of that task."""
        self.model.load_state_dict(self.networks[task])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The initial network and every finished one."""
        every = {"start": self.start} | {str(task): network for task, network in enumerate(self.networks)}
        tensors = {f"{which}/{name}": value for which, network in every.items() for name, value in network.items()}
        return tensors, {"finished": len(self.networks)}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts them back."""

        def network(which: str) -> dict[str, Tensor]:
            return {name: tensors[f"{which}/{name}"].to(value.device) for name, value in self.start.items()}

        self.networks = [network(str(task)) for task in range(manifest["finished"])]
        self.start = network("start")

    @torch.no_grad()
    def _copy(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


METHOD = MethodSpec(
    name="alone",
    title="One network per task, each from the same start: the reference of forward transfer",
    build=Alone,
    keeps="a whole network per task",
    kept_at_most=lambda sizes, own: 4 * (sizes.tasks + 1) * sizes.parameters,  # and the start
)
