"""Frozen features: the first task trains the network, later tasks train their head. What every method must beat."""

from torch import nn

from ness.lab.methods.base import Method, MethodSpec, TaskData, current_heads
from ness.lab.networks.norms import hold_statistics


class Frozen(Method):
    """From the second task on only the task's head trains; stored BatchNorm statistics stay as they are."""

    def parameters(self, lesson: TaskData) -> list[nn.Parameter]:
        """Everything in the first task, the head alone afterwards."""
        return super().parameters(lesson) if lesson.task == 0 else current_heads(self.model, lesson)

    def train_mode(self, lesson: TaskData) -> None:
        """Training mode, except that BatchNorm stands still from the second task on."""
        self.model.train()
        if lesson.task > 0:
            hold_statistics(self.model)


METHOD = MethodSpec(
    name="frozen",
    title="Features of the first task, one head per task",
    build=Frozen,
    keeps="nothing",
    kept_at_most=lambda sizes, own: 0,
)
