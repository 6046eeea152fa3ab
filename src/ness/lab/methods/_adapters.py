"""PEFT's adapters as methods of the laboratory: put in before a task, trained in its place, merged after it."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.lab.methods._projection.rows import backbone_layers
from ness.lab.methods.base import Context, Method, TaskData, current_heads
from ness.lab.networks.norms import hold_statistics
from ness.layers import LinearLayer


def peft() -> Any:
    """The package, or what to install."""
    try:
        import peft as found
    except ImportError as error:
        raise NessError("this method needs PEFT: pip install 'ness-cl[text]'") from error
    return found


class Adapters(Method):
    """From the first task of a pretrained network, else from the second, an adapter per task on every linear layer."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.peft = peft()
        layers = backbone_layers(self.model)
        self.targets = [name for name, layer in layers.items() if isinstance(layer, LinearLayer)]
        if not self.targets:
            raise NessError("the network has no linear layer to adapt; use another method, or another network")
        self.tuner: Any = None
        self.began: Tensor | None = None  # where the generator stood when the adapter was drawn

    @abstractmethod
    def tuned(self) -> Any:
        """PEFT's tuner around the model, which changes it in place."""

    def before_task(self, lesson: TaskData) -> None:
        """Puts the task's adapter in; the whole network trains in the first task if nothing is to be kept yet."""
        if lesson.task == 0 and self.context.general is None:
            return
        self.began = self.context.random.method.get_state()
        self._put_in()

    def _put_in(self) -> None:
        seed = int(torch.randint(2**62, (), generator=self.context.random.method, device=self.context.device))
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            self.tuner = self.tuned()

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """The adapter and the head."""
        if self.tuner is None:
            return super().parameters(lesson)
        heads = {id(parameter) for parameter in self.model.heads.parameters()}
        held = [p for p in self.model.parameters() if p.requires_grad and id(p) not in heads]
        return held + current_heads(self.model, lesson)

    def train_mode(self, lesson: TaskData) -> None:
        """Training mode, except that BatchNorm stands still while an adapter trains."""
        self.model.train()
        if self.tuner is not None:
            hold_statistics(self.model)

    def after_task(self, lesson: TaskData) -> Mapping[str, Any]:
        """Merges it: what is left is a plain network."""
        if self.tuner is not None:
            with torch.no_grad():
                self.tuner.merge_and_unload()
            self.tuner, self.began = None, None
        return {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Whether an adapter is in, and how it was drawn."""
        return ({} if self.began is None else {"began": self.began}), {"adapted": self.tuner is not None}

    def load_state(self, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        """Puts the same adapter in; its values are filled in by the loop."""
        if manifest.get("adapted"):
            self.began = tensors["began"].cpu()
            self.context.random.method.set_state(self.began)
            self._put_in()
