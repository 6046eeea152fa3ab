"""OSF: each task trains the weak singular directions of every linear layer's weight, merged after it (PEFT's)."""

from typing import Any

from ness.errors import NessError
from ness.lab.methods._adapters import Adapters
from ness.lab.methods.base import Context, MethodSpec


class Osf(Adapters):
    """The strong half of each weight's singular directions stays; PEFT's own defaults."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if context.fast:
            raise NessError("osf: PEFT projects gradients in float32 and fails on bfloat16 ones; leave out --fast")

    def tuned(self) -> Any:
        """PEFT's OSF."""
        return self.peft.tuners.osf.OSFModel(self.model, self.peft.OSFConfig(target_modules=self.targets), "default")


METHOD = MethodSpec(
    name="osf",
    title="PEFT's OSF: weak singular directions train, merged after each task",
    build=Osf,
    keeps="nothing",
    kept_at_most=lambda sizes, own: 0,
    paper="Nayak et al., Sculpting Subspaces",
    year=2025,
)
