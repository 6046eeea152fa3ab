"""A guard inside the Hugging Face Trainer: checked before the first step, in its logs, merged at the end."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

from ness import distributed
from ness._files import read_bytes, write_bytes
from ness.certificate import Certificate
from ness.errors import NessError, warn
from ness.guard import NullSpace
from ness.integrations.card import card_files, write_card
from ness.integrations.folders import write_model
from ness.integrations.training import (
    check_constrained,
    check_is_guard,
    check_model,
    check_optimizers,
    drift_figures,
    identity,
    inner,
    missing_updates,
    of_an_earlier_task,
    renew_optimizer,
)
from ness.verbs.checks import refuse_sharded

if TYPE_CHECKING:

    class TrainerCallback:
        """The Trainer's own class: every event it knows, doing nothing."""
else:
    try:
        from transformers import TrainerCallback
    except ModuleNotFoundError:  # what follows needs nothing of it but that every event is there

        class TrainerCallback:
            """Stands in for transformers' own class where that is not installed."""

            def __getattr__(self, name: str) -> Any:
                if name.startswith("on_"):
                    return lambda *args, **kwargs: None
                raise AttributeError(name)


WHO = "GuardCallback"
RUN = "_ness"  # in the Trainer's output folder; a push to the hub leaves names with an underscore out
GUARD, IDENTITY = "guard", "run.json"
ANEW = "Make a new Trainer, or let this one make its optimizer anew: trainer.optimizer = None"
CONSOLE = {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}  # they show the largest drift alone


class GuardCallback(TrainerCallback):
    """Trains the updates of a constrained model in a `transformers.Trainer` (TRL's too), and merges them at the end.

        guard.observe(old); guard.constrain(rank=16)
        trainer = Trainer(model, args, train_dataset=new, callbacks=[GuardCallback(guard)])
        trainer.train()          # checkpoints, resume_from_checkpoint, load_best_model_at_end: exact
        trainer.save_model()     # plain weights, beside a README.md with the certificate

    Before the first step it refuses what would train without a bound: a guard that constrains nothing, another model,
    an optimizer that lacks updates. Checkpoints hold the updates; the guard itself is written once a run, to
    `output_dir/_ness/guard`, where `NullSpace.load(folder, model)` takes it up, so that a run goes on in a new process
    without observing again. The same Trainer trains the next task: observe, constrain, `train()`; its optimizer is then
    made anew. Every evaluation logs `eval_drift_largest` and `eval_drift/<layer>`: relative, of each layer's outputs.

    Args:
        guard: of the Trainer's model, or of a part of it; constrained when `train()` is called.
        merge: merge when training ends; False leaves the model constrained, and a further `train()` goes on with it.
    """

    def __init__(self, guard: NullSpace, merge: bool = True) -> None:
        self.guard = check_is_guard(guard, WHO)
        if not isinstance(merge, bool):
            raise NessError(f"{WHO}(merge={merge!r}): expected True or False")
        self.merge = merge
        self.certificate: Certificate | None = None  # of the last training that ended
        self._given: bool | None = None  # whether the Trainer was handed its optimizer; None: not known
        self._reported: tuple[Any, ...] | None = None

    # -- events -----------------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember whether the optimizer is the caller's own."""
        self._given = kwargs.get("optimizer") is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what cannot be trained within bounds; make an optimizer of an earlier task anew; keep the guard."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        trainer = _trainer_of(self)
        check_model(self.guard, model, WHO)
        check_constrained(self.guard, WHO)
        _refuse_places(args, self.guard, self.merge)
        if optimizer is None:
            raise NessError(f"{WHO}: the Trainer has no optimizer when training begins; expected one over the updates")
        optimizer = self._optimizer(trainer, model, optimizer, args, state)
        check_optimizers(model, [optimizer], WHO, ANEW)
        if trainer is not None:
            _keep_certificate_in_cards(trainer, self)
        self.certificate, self._reported = None, None
        if _value(args.save_strategy) != "no":
            self._keep_guard(Path(args.output_dir) / RUN, resumed=state.global_step > 0)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drift of every layer, and the largest, into metrics and logs."""
        if not any(gram.count for gram in self.guard.grams.values()):
            return  # nothing observed yet: an evaluation before the first task
        figures = {f"eval_{name}": value for name, value in drift_figures(self.guard.certificate())}
        metrics = kwargs.pop("metrics", None)
        if metrics is not None:
            metrics["eval_drift_largest"] = figures["eval_drift_largest"]
        if self._reported == (state.global_step, figures):
            return  # one evaluation over several data sets
        self._reported = state.global_step, figures
        logs = figures if state.epoch is None else {**figures, "epoch": state.epoch}
        state.log_history.append({**logs, "step": state.global_step})
        short = {key: value for key, value in logs.items() if "/" not in key}
        for callback in getattr(getattr(_trainer_of(self), "callback_handler", None), "callbacks", ()):
            kinds = {kind.__name__ for kind in type(callback).__mro__}
            if callback is not self:
                callback.on_log(args, state, control, logs=dict(short if kinds & CONSOLE else logs), **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Merge, and write the card."""
        free = self.guard.unprotected  # afterwards all that had requires_grad before has it again
        if self.merge:
            self.guard.merge()
        self.certificate = replace(self.guard.certificate(), unprotected=free)
        if _value(args.save_strategy) != "no":
            try:
                write_card(Path(args.output_dir), self.guard, self.certificate)
            except NessError as error:  # a model that is trained is worth more than its card
                warn(str(error))

    # -- afterwards -------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path, processing_class: Any = None) -> None:
        """Write a folder that can be pushed: the model, its tokenizer, and a card with the certificate.

        Args:
            folder: one that does not exist yet.
            processing_class: tokenizer or processor to save along.

        Raises:
            NessError: the model is still constrained, is none of transformers', or the folder is taken.
        """
        model = self.guard.model
        if self.guard.constrained:
            raise NessError(f"{WHO}.save_pretrained: the model is constrained; call guard.merge() first")
        if not hasattr(model, "save_pretrained"):
            raise NessError(f"{WHO}.save_pretrained: a {type(model).__name__} has no save_pretrained(); use torch.save")
        certificate = self.certificate or self.guard.certificate()
        files = card_files(self.guard, certificate, Path(folder).resolve().name)
        if distributed.on_rank_zero():
            with tempfile.TemporaryDirectory() as beside:
                if processing_class is not None:
                    processing_class.save_pretrained(beside)
                write_model(model, beside, Path(folder), files)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _optimizer(self, trainer: Any, model: nn.Module, optimizer: Any, args: Any, state: Any) -> Any:
        """The optimizer to train with: this one, or one made anew where it is of an earlier task."""
        if not missing_updates(model, [optimizer]):
            return optimizer
        own = self._given is False or (self._given is None and _is_what_args_ask_for(optimizer, args))
        earlier = of_an_earlier_task(model, optimizer)
        if not earlier and self._given is not False:
            return optimizer  # the caller's, made before constrain(): refused in what follows
        if trainer is not None and hasattr(trainer, "create_optimizer") and own:
            return _made_anew(trainer, optimizer, state)
        if earlier:
            renew_optimizer(optimizer, [p for p in model.parameters() if p.requires_grad], WHO)
        return optimizer

    def _keep_guard(self, folder: Path, resumed: bool) -> None:
        """Write the guard once for all checkpoints of the run; one that goes on has it already."""
        now = identity(self.guard)
        there = resumed and (folder / GUARD).is_dir() and _identity_in(folder / IDENTITY) == now
        if not distributed.total(int(not there)):  # ranks may see other disks, and save together or not at all
            return
        self.guard.save(folder / GUARD)
        if distributed.on_rank_zero():
            write_bytes(folder / IDENTITY, (json.dumps({"format": "ness-run", "guard": now}) + "\n").encode())


def _identity_in(path: Path) -> str | None:
    try:
        return str(json.loads(read_bytes(path, limit=10_000))["guard"])
    except (FileNotFoundError, NessError, ValueError, KeyError, TypeError, RecursionError):
        return None  # then it is written anew


def _value(option: Any) -> str:
    """An option of the Trainer's arguments as plain text."""
    return str(getattr(option, "value", option))


def _refuse_places(args: Any, guard: NullSpace, merge: bool) -> None:
    """Ways of distributing a model that the updates do not survive."""
    if getattr(args, "deepspeed", None):
        raise NessError(f"{WHO}: DeepSpeed keeps parameters in partitions of its own, which updates are not made for")
    if getattr(args, "n_gpu", 0) > 1:
        raise NessError(
            f"{WHO}: {args.n_gpu} GPUs in one process make the Trainer use DataParallel, whose copies of a model do "
            "not train its updates. Start one process a GPU (torchrun), or show it one: CUDA_VISIBLE_DEVICES=0"
        )
    if merge:
        refuse_sharded(guard.model, WHO, "pass merge=False, save the guard, and merge where the model is whole")


def _trainer_of(callback: GuardCallback) -> Any:
    """The Trainer that is calling: its callbacks get no reference to it, but one of its methods is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None)
        if any(callback is one for one in getattr(handler, "callbacks", ())):
            return owner
        frame = frame.f_back
    return None


def _is_what_args_ask_for(optimizer: Any, args: Any) -> bool:
    """Whether the Trainer would make such an optimizer itself."""
    try:
        from transformers import Trainer

        return type(inner(optimizer)) is Trainer.get_optimizer_cls_and_kwargs(args)[0]
    except (ImportError, ValueError, AttributeError):
        return False


def _made_anew(trainer: Any, old: Any, state: Any) -> Any:
    """Let a Trainer make optimizer and schedule again; where it has just loaded a checkpoint's into the old, move it.

    The optimizer of an earlier task holds updates that are merged by now.
    """
    if getattr(trainer, "model_wrapped", trainer.model) is not trainer.model:
        raise NessError(
            f"{WHO}: this Trainer wrapped its model for the last task ({type(trainer.model_wrapped).__name__}), and "
            "the wrapper knows the last task's updates alone. Make a new Trainer for this task"
        )
    schedule, accelerator = trainer.lr_scheduler, trainer.accelerator
    kept = [one for one in accelerator._optimizers if one is not old]
    trainer.optimizer, trainer.lr_scheduler = None, None
    accelerator._optimizers = kept
    trainer.optimizer = accelerator.prepare(trainer.create_optimizer())
    trainer.create_scheduler(num_training_steps=state.max_steps)
    if state.global_step:
        try:
            trainer.optimizer.load_state_dict(old.state_dict())
            trainer.lr_scheduler.load_state_dict(schedule.state_dict())
        except ValueError as error:
            raise NessError(f"{WHO}: the checkpoint's optimizer does not fit this task ({error}). {ANEW}") from error
    handler = trainer.callback_handler
    handler.optimizer, handler.lr_scheduler = trainer.optimizer, trainer.lr_scheduler
    return trainer.optimizer


def _keep_certificate_in_cards(trainer: Any, callback: GuardCallback) -> None:
    """Cards that the Trainer writes from now on, as it does before a push, hold the certificate too."""
    create = getattr(trainer, "create_model_card", None)
    if create is None or getattr(create, "callback", None) is callback:
        return
    if hasattr(create, "callback"):
        create = create.__wrapped__

    @functools.wraps(create)
    def create_model_card(*args: Any, **kwargs: Any) -> Any:
        result = create(*args, **kwargs)
        folder, certificate = Path(trainer.args.output_dir), callback.certificate
        known = certificate is not None or not distributed.active()  # ranks make one together, and this is rank 0 alone
        if known and trainer.is_world_process_zero() and (folder / "README.md").is_file():
            write_card(folder, callback.guard, certificate)
        return result

    create_model_card.callback = callback  # type: ignore[attr-defined]
    trainer.create_model_card = create_model_card
