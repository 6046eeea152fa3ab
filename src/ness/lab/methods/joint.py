"""Joint training: all tasks at once. The ceiling; one final row of the accuracy matrix, no backward transfer."""

from torch import Tensor

from ness.lab.methods.base import Method, MethodSpec
from ness.lab.training.loader import Batch
from ness.lab.training.losses import cross_entropy_of_many


class Joint(Method):
    """Every sample counts under its own task's head.

    With batch statistics each batch is of one task, as test batches are; with stored ones the tasks are mixed.
    """

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy, each sample under its own head."""
        features = self.model.features(batch.images)
        return cross_entropy_of_many([head(features) for head in self.model.heads], batch)


METHOD = MethodSpec(
    name="joint",
    title="All tasks at once: the ceiling",
    build=Joint,
    keeps="all data",
    needs_old_data=lambda own: True,
    plan="all at once",
    refuses={"mixup": "a mixed image may be of two tasks with two heads"},
)
