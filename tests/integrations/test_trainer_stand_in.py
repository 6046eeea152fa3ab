"""`GuardCallback` on a machine without transformers: a Trainer of forty lines calls it as the real one does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ness
from ness.integrations.trainer_callback import GuardCallback

pytestmark = pytest.mark.filterwarnings("ignore:fewer rows:ness.NessWarning")


class Listener:
    """A callback that shows logs, as TensorBoard's does."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.logs.append(logs)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class ProgressCallback(Listener):
    """Named as the one that prints."""


class Accelerator:
    def __init__(self) -> None:
        self._optimizers: list[Any] = []

    def prepare(self, optimizer: Any) -> Any:
        self._optimizers.append(optimizer)
        return optimizer


class Trainer:
    """Calls the events of its callbacks in the order of the real one, with what that hands over."""

    def __init__(self, model: nn.Module, folder: Path, callbacks: list[Any], optimizer: Any = None) -> None:
        self.model = self.model_wrapped = model
        self.optimizer, self.lr_scheduler, self.accelerator = optimizer, None, Accelerator()
        self.args = SimpleNamespace(output_dir=str(folder), save_strategy="steps", n_gpu=0, deepspeed=None)
        self.state = SimpleNamespace(global_step=0, max_steps=3, epoch=0.5, log_history=[])
        self.callback_handler = SimpleNamespace(callbacks=callbacks, optimizer=None, lr_scheduler=None)
        self.event("on_init_end")

    def event(self, name: str, **more: Any) -> None:
        for callback in self.callback_handler.callbacks:
            hands = {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
            getattr(callback, name)(self.args, self.state, None, **hands, **more)

    def create_optimizer(self) -> Any:
        if self.optimizer is None:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int) -> None:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def train(self) -> None:
        self.state.global_step = 0
        self.create_optimizer()
        self.create_scheduler(3)
        self.event("on_train_begin")
        for _ in range(3):
            self.model(torch.randn(16, 8)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.global_step += 1
        self.event("on_evaluate", metrics=(metrics := {"eval_loss": 1.0}))
        self.metrics = metrics
        self.event("on_train_end")


def constrained(**options: Any) -> tuple[nn.Module, ness.NullSpace]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 2))
    guard = ness.NullSpace(model, rule=ness.Rank(3), exclude="3")
    guard.observe(torch.randn(50, 8))
    guard.constrain(**options)
    return model, guard


def test_it_trains_logs_merges_and_writes_the_card(tmp_path: Path) -> None:
    model, guard = constrained()
    board, bar = Listener(), ProgressCallback()
    run = Trainer(model, tmp_path, [board, bar, GuardCallback(guard)])
    run.train()
    assert not guard.constrained
    assert type(model[0]) is nn.Linear
    drifts = {f"eval_drift/{row.name}": row.relative_drift for row in guard.certificate().rows}
    (entry,) = run.state.log_history
    assert {key: entry[key] for key in drifts} == pytest.approx(drifts, rel=1e-3)
    assert entry["step"] == 3
    assert board.logs == [{key: value for key, value in entry.items() if key != "step"}]
    assert bar.logs == [{key: value for key, value in entry.items() if key in ("eval_drift_largest", "epoch")}]
    assert run.metrics["eval_drift_largest"] == entry["eval_drift_largest"] == max(entry[key] for key in drifts)
    card = (tmp_path / "README.md").read_text()
    assert guard.certificate().verdict in card
    assert "`3.weight` (8), `3.bias` (2)" in card
    assert json.loads((tmp_path / "ness.json").read_text())["holds"]
    plain, other = constrained()
    other.discard()
    again = ness.NullSpace.load(tmp_path / "_ness" / "guard", plain)
    assert again.constrained
    again.discard()


def test_the_next_task_has_an_optimizer_made_anew(tmp_path: Path) -> None:
    model, guard = constrained()
    run = Trainer(model, tmp_path, [GuardCallback(guard)])
    run.train()
    first = run.optimizer
    guard.observe(torch.randn(50, 8))
    guard.constrain(rank=1)
    run.train()
    assert run.optimizer is not first
    assert guard.certificate().holds
    assert run.accelerator._optimizers == [run.optimizer]
    assert run.callback_handler.optimizer is run.optimizer


def test_the_callers_own_optimizer_takes_up_the_next_task_in_place(tmp_path: Path) -> None:
    model, guard = constrained()
    own = torch.optim.SGD(guard.parameters(), lr=0.1, momentum=0.9)
    run = Trainer(model, tmp_path, [GuardCallback(guard)], own)
    run.train()
    guard.observe(torch.randn(50, 8))
    guard.constrain()
    run.train()
    assert run.optimizer is own
    assert own.param_groups[0]["momentum"] == 0.9
    guard.observe(torch.randn(50, 8))
    guard.constrain()
    own.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ness.NessError, match="2 groups of the last task's updates"):
        run.train()


def test_the_guard_is_written_once_a_run(tmp_path: Path) -> None:
    model, guard = constrained()
    callback = GuardCallback(guard, merge=False)
    Trainer(model, tmp_path, [callback]).train()
    assert guard.constrained
    manifest = tmp_path / "_ness" / "guard" / "manifest.json"
    written = manifest.stat().st_mtime_ns
    run = Trainer(model, tmp_path, [callback], torch.optim.AdamW(guard.parameters()))
    run.state.global_step = 2  # as after a checkpoint was loaded
    run.event("on_train_begin")
    assert manifest.stat().st_mtime_ns == written
    (tmp_path / "_ness" / "run.json").write_text("{damaged")
    run.event("on_train_begin")
    assert manifest.stat().st_mtime_ns != written
    guard.discard()


def test_what_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model, guard = constrained()

    def refused(message: str, run: Trainer) -> None:
        with pytest.raises(ness.NessError, match=message):
            run.train()
        assert run.state.global_step == 0

    refused(
        "made before constrain", Trainer(model, tmp_path, [GuardCallback(guard)], torch.optim.SGD([model[3].weight]))
    )
    other = nn.Sequential(nn.Linear(8, 2))
    refused("knows nothing of", Trainer(other, tmp_path, [GuardCallback(guard)]))
    run = Trainer(model, tmp_path, [GuardCallback(guard)])
    run.args.deepspeed = "zero.json"
    refused("DeepSpeed", run)
    run.args.deepspeed, run.args.n_gpu = None, 2
    refused("2 GPUs in one process", run)
    run.args.n_gpu = 0
    guard.merge()
    refused("the last task is merged", run)
    for wrong in (model, None, "guard"):
        with pytest.raises(ness.NessError, match=r"expected the ness\.NullSpace"):
            GuardCallback(wrong)  # type: ignore[arg-type]
    with pytest.raises(ness.NessError, match="expected True or False"):
        GuardCallback(guard, merge="yes")  # type: ignore[arg-type]


def test_a_wrapper_of_the_last_task_is_refused(tmp_path: Path) -> None:
    model, guard = constrained()
    run = Trainer(model, tmp_path, [GuardCallback(guard)])
    run.train()
    guard.observe(torch.randn(50, 8))
    guard.constrain()
    run.model_wrapped = nn.Sequential(model)  # as DistributedDataParallel is
    with pytest.raises(ness.NessError, match="wrapped its model for the last task"):
        run.train()
    guard.discard()


def test_a_card_keeps_what_else_it_says(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Mine\n\nhand-written\n")
    model, guard = constrained()
    run = Trainer(model, tmp_path, [GuardCallback(guard)])
    run.train()
    first = (tmp_path / "README.md").read_text()
    assert first.startswith("# Mine\n\nhand-written\n\n<!-- ness: begin -->")
    guard.observe(torch.randn(50, 8))
    guard.constrain()
    run.train()
    second = (tmp_path / "README.md").read_text()
    assert second.count("ness: begin") == second.count("ness: end") == 1
    assert second != first


def test_training_that_diverged_is_not_merged_and_a_card_that_cannot_be_written_costs_no_model(tmp_path: Path) -> None:
    model, guard = constrained()
    run = Trainer(model, tmp_path / "run", [GuardCallback(guard)])
    (tmp_path / "run" / "README.md").mkdir(parents=True)
    with pytest.warns(ness.NessWarning, match=r"run: could not be written"):
        run.train()
    assert not guard.constrained
    guard.observe(torch.randn(50, 8))
    guard.constrain()
    run = Trainer(model, tmp_path / "again", [GuardCallback(guard)])
    run.create_optimizer()
    run.event("on_train_begin")
    with torch.no_grad():
        guard.parameters()[0].fill_(float("nan"))
    with pytest.raises(ness.NessError, match="NaN"):
        run.event("on_train_end")
    assert guard.constrained
    guard.discard()
