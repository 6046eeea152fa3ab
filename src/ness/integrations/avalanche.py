"""A guard inside Avalanche's strategies: every experience is learnt within what the earlier ones leave free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ness.errors import NessError
from ness.guard import NullSpace
from ness.integrations.training import check_is_guard, check_model, check_optimizers, renew_optimizer

if TYPE_CHECKING:

    class SupervisedPlugin:
        """Avalanche's own class: every event it knows, doing nothing."""
else:
    try:
        from avalanche.core import SupervisedPlugin
    except ModuleNotFoundError:  # what follows needs nothing of it but that every event is there

        class SupervisedPlugin:
            """Stands in for Avalanche's own class where that is not installed."""

            supports_distributed = False

            def __getattr__(self, name: str) -> Any:
                if name.startswith(("before_", "after_")):
                    return lambda *args, **kwargs: None
                raise AttributeError(name)


WHO = "GuardPlugin"


class GuardPlugin(SupervisedPlugin):
    """Learns the first experience freely, and each later one in the null space of all before it.

        guard = ness.NullSpace(model, exclude=["classifier"])
        strategy = Naive(model=model, optimizer=SGD(model.parameters(), lr=0.1), plugins=[GuardPlugin(guard)], ...)
        for experience in benchmark.train_stream:
            strategy.train(experience)

    After an experience its updates are merged and its data observed, no sample is kept; before the next one the model
    is constrained and the strategy's optimizer takes up the updates. A guard that has observed already (the data a
    pretrained model must keep) constrains the first experience too.

    Args:
        guard: of the strategy's model.
        batch_size: with which an experience is observed; None: as the strategy evaluates.
        **constrain: for `guard.constrain`: rank, max_drift, form, generator.
    """

    def __init__(self, guard: NullSpace, batch_size: int | None = None, **constrain: Any) -> None:
        super().__init__()
        self.guard, self.batch_size = check_is_guard(guard, WHO), batch_size
        strange = set(constrain) - {"rank", "max_drift", "form", "generator"}
        if strange:
            raise NessError(f"{WHO}: {', '.join(sorted(strange))}: expected options of guard.constrain()")
        self.constrain = constrain

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Constrain to what the experiences so far leave free, and let the optimizer begin anew with the updates."""
        check_model(self.guard, strategy.model, WHO)
        if self.guard.constrained:
            raise NessError(f"{WHO}: the model is constrained already; call guard.merge() or guard.discard() first")
        if not any(gram.count for gram in self.guard.grams.values()):
            return
        self.guard.constrain(**self.constrain)
        try:
            renew_optimizer(strategy.optimizer, self.guard.parameters(), WHO)
            check_optimizers(strategy.model, [strategy.optimizer], WHO, "Make it of guard.parameters()")
        except BaseException:
            self.guard.discard()
            raise
        if hasattr(strategy, "optimized_param_id"):  # Avalanche's record of which parameter has which name
            held = {id(parameter) for parameter in self.guard.parameters()}
            named = strategy.model.named_parameters()
            strategy.optimized_param_id = {name: value for name, value in named if id(value) in held}

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Merge what was learnt, and observe the experience: what must not change from now on."""
        if self.guard.constrained:
            self.guard.merge()
            renew_optimizer(strategy.optimizer, strategy.model.parameters(), WHO)
            if hasattr(strategy, "optimized_param_id"):
                strategy.optimized_param_id = dict(strategy.model.named_parameters())
        size = self.batch_size or strategy.eval_mb_size
        batches = torch.utils.data.DataLoader(
            strategy.experience.dataset, batch_size=size, collate_fn=_collated(strategy)
        )
        self.guard.observe(batches, forward=_forward)


def _collated(strategy: Any) -> Any:
    """How the experience's own data set makes batches, where it says so."""
    return getattr(strategy.experience.dataset, "collate_fn", None)


def _forward(model: nn.Module, batch: Any) -> Any:
    """Inputs first, task labels last, as Avalanche's data sets have them."""
    device = next(model.parameters()).device
    if any(kind.__name__ == "MultiTaskModule" for kind in type(model).__mro__):
        return model(batch[0].to(device), batch[-1].to(device))
    return model(batch[0].to(device))
