"""A guard inside Lightning's Trainer: checked before the first step, in its logs, merged at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ness.errors import NessError
from ness.guard import NullSpace
from ness.integrations.training import (
    check_constrained,
    check_is_guard,
    check_model,
    check_optimizers,
    drift_figures,
    identity,
)
from ness.verbs.checks import refuse_sharded

if TYPE_CHECKING:

    class Callback:
        """Lightning's own class: every event it knows, doing nothing."""
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        try:
            from pytorch_lightning import Callback
        except ModuleNotFoundError:  # what follows needs nothing of it but that every event is there

            class Callback:
                """Stands in for Lightning's own class where that is not installed."""

                def __getattr__(self, name: str) -> Any:
                    if name.startswith(("on_", "setup", "teardown")):
                        return lambda *args, **kwargs: None
                    raise AttributeError(name)


WHO = "GuardCallback"
KEY = "ness"  # in a checkpoint: which guard it is of
ADVICE = (
    "In configure_optimizers() hand over all parameters that require gradients, as guard.parameters() does; Lightning "
    "calls it anew for every fit()"
)


class GuardCallback(Callback):
    """Trains the updates of a constrained model in Lightning's Trainer, and merges them when `fit` ends.

        guard.observe(old); guard.constrain(rank=16)
        Trainer(callbacks=[GuardCallback(guard)], ...).fit(module, data)

    Checkpoints hold the updates (`fit(..., ckpt_path=...)` goes on exactly) and the name of the guard they are of; the
    guard itself is written once a run, to `default_root_dir/_ness/guard`. `drift_largest` and `drift/<layer>` are
    logged with every validation, so that loggers show them and `ModelCheckpoint` can monitor them.

    Args:
        guard: of the LightningModule, or of a part of it; constrained when `fit` is called.
        merge: merge when `fit` ends; False leaves the model constrained.
    """

    def __init__(self, guard: NullSpace, merge: bool = True) -> None:
        self.guard = check_is_guard(guard, WHO)
        if not isinstance(merge, bool):
            raise NessError(f"{WHO}(merge={merge!r}): expected True or False")
        self.merge = merge

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a model that nothing constrains: Lightning makes its optimizers next."""
        if stage == "fit":
            check_model(self.guard, pl_module, WHO)
            check_constrained(self.guard, WHO)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse optimizers that lack updates, and write the guard for all checkpoints of the run."""
        check_optimizers(pl_module, trainer.optimizers, WHO, ADVICE)
        if self.merge:
            refuse_sharded(self.guard.model, WHO, "pass merge=False, and merge where the model is whole")
        if trainer.checkpoint_callbacks and not trainer.ckpt_path and not trainer.fast_dev_run:
            self.guard.save(Path(trainer.default_root_dir) / "_ness" / "guard")

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Drift of every layer, and the largest, relative to each layer's outputs."""
        if any(gram.count for gram in self.guard.grams.values()):
            pl_module.log_dict(dict(drift_figures(self.guard.certificate())), rank_zero_only=True)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Say which guard the updates in the checkpoint are of."""
        if self.guard.constrained:
            checkpoint[KEY] = {"guard": identity(self.guard)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another guard before anything of it is loaded."""
        known = checkpoint.get(KEY, {}).get("guard")
        if self.guard.constrained and known != identity(self.guard):
            raise NessError(
                f"{WHO}: the checkpoint is {'of another guard' if known else 'of a model that was not constrained'}. "
                "Constrain as when it was saved: NullSpace.load(default_root_dir/_ness/guard, model) takes that up"
            )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Merge, after Lightning has written its last checkpoint."""
        if self.merge and self.guard.constrained:
            self.guard.merge()
