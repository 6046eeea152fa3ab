"""LoRA: a low-rank adapter per task on every linear layer, merged after it (PEFT's)."""

from dataclasses import dataclass
from typing import Any

from ness.lab.methods._adapters import Adapters
from ness.lab.methods.base import MethodSpec
from ness.lab.runs.settings import check_ranges, setting


@dataclass(frozen=True)
class LoraSettings:
    """What LoRA adds to the training settings."""

    rank: int = setting(16, "r of the update B A of every linear layer; its scale is 1")


class Lora(Adapters):
    """W ← W + B A after each task."""

    def tuned(self) -> Any:
        """PEFT's LoRA of this rank."""
        rank = self.context.own.rank
        config = self.peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=self.targets)
        return self.peft.LoraModel(self.model, config, "default")


METHOD = MethodSpec(
    name="lora",
    title="PEFT's LoRA, merged after each task",
    build=Lora,
    keeps="nothing",
    kept_at_most=lambda sizes, own: 0,
    paper="Hu et al., LoRA",
    year=2022,
    settings=LoraSettings,
    check=lambda settings: check_ranges(settings, ("rank", settings.rank >= 1, "at least 1")),
)
