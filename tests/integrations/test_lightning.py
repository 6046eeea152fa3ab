"""`GuardCallback` in Lightning's Trainer; its refusals also without Lightning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from ness.integrations.lightning import GuardCallback

pytestmark = pytest.mark.filterwarnings("ignore:fewer rows:ness.NessWarning")


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 2))


def constrained(model: nn.Module, **options: Any) -> ness.NullSpace:
    guard = ness.NullSpace(model, rule=ness.Rank(3), exclude="3")
    guard.observe(torch.randn(50, 8, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(2)
    guard.constrain(**options)
    return guard


def stored(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# -- without Lightning: a Trainer is what its callbacks read of it ---------------------------------------------------


def stand_in(folder: Path, optimizer: Any) -> Any:
    return SimpleNamespace(
        optimizers=[optimizer],
        checkpoint_callbacks=[1],
        ckpt_path=None,
        fast_dev_run=False,
        default_root_dir=str(folder),
    )


def test_it_checks_logs_keeps_and_merges(tmp_path: Path) -> None:
    model = layers()
    guard = constrained(model, rank=2)
    callback = GuardCallback(guard)
    logged: dict[str, float] = {}
    module = nn.ModuleDict({"model": model})
    module.log_dict = lambda figures, **_: logged.update(figures)  # type: ignore[method-assign, assignment]
    trainer = stand_in(tmp_path, torch.optim.AdamW(guard.parameters()))
    callback.setup(trainer, module, "fit")
    callback.on_train_start(trainer, module)
    assert (tmp_path / "_ness" / "guard" / "manifest.json").is_file()
    callback.on_validation_epoch_end(trainer, module)
    assert logged.keys() == {"drift_largest", "drift/0", "drift/2"}
    checkpoint: dict[str, Any] = {}
    callback.on_save_checkpoint(trainer, module, checkpoint)
    callback.on_load_checkpoint(trainer, module, checkpoint)
    other = GuardCallback(constrained(layers(), rank=1))
    with pytest.raises(ness.NessError, match="of another guard"):
        other.on_load_checkpoint(trainer, module, checkpoint)
    with pytest.raises(ness.NessError, match="not constrained"):
        other.on_load_checkpoint(trainer, module, {})
    callback.on_fit_end(trainer, module)
    assert not guard.constrained
    with pytest.raises(ness.NessError, match="the last task is merged"):
        callback.setup(trainer, module, "fit")
    callback.setup(trainer, module, "validate")


def test_what_would_train_without_a_bound_is_refused(tmp_path: Path) -> None:
    model = layers()
    early = torch.optim.AdamW(model.parameters())
    guard = constrained(model)
    callback = GuardCallback(guard)
    with pytest.raises(ness.NessError, match=r"AdamW does not train .*configure_optimizers"):
        callback.on_train_start(stand_in(tmp_path, early), model)
    with pytest.raises(ness.NessError, match="knows nothing of"):
        callback.setup(stand_in(tmp_path, early), layers(), "fit")
    with pytest.raises(ness.NessError, match=r"expected the ness\.NullSpace"):
        GuardCallback(model)  # type: ignore[arg-type]
    guard.discard()


# -- the real one ----------------------------------------------------------------------------------------------------


def fit(model: nn.Module, guard: ness.NullSpace, folder: Path, epochs: int = 4, ckpt: str | None = None) -> Any:
    lightning = pytest.importorskip("lightning.pytorch", reason="the lightning package is not installed")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    draws = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(24, 8, generator=draws), torch.randint(2, (24,), generator=draws))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    saved = lightning.callbacks.ModelCheckpoint(folder / "saved", save_top_k=-1, filename="{epoch}", save_last=True)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[GuardCallback(guard), saved],
        default_root_dir=folder,
        logger=lightning.loggers.CSVLogger(folder),
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(Module(), loader, loader, ckpt_path=ckpt)
    return trainer


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:torch", "ignore::FutureWarning")
def test_lightning_resumes_bit_equal_and_logs_drift(tmp_path: Path) -> None:
    model = layers()
    guard = constrained(model, rank=2)
    trainer = fit(model, guard, tmp_path / "whole")
    assert not guard.constrained
    assert guard.certificate().holds
    assert 0 < float(trainer.callback_metrics["drift_largest"]) < 1
    header = next((tmp_path / "whole").rglob("metrics.csv")).read_text().splitlines()[0]
    assert {"drift/0", "drift/2", "drift_largest"} <= set(header.split(","))

    other = layers()
    broken = constrained(other, rank=2)
    fit(other, broken, tmp_path / "broken", epochs=2)
    plain = layers()
    again = ness.NullSpace.load(tmp_path / "broken" / "_ness" / "guard", plain)
    checkpoint = str(tmp_path / "broken" / "saved" / "last.ckpt")
    fit(plain, again, tmp_path / "on", ckpt=checkpoint)
    assert same(stored(plain), stored(model))

    foreign_model = layers()
    foreign = constrained(foreign_model, rank=1)
    with pytest.raises(ness.NessError, match="saved with rank 2, here it is 1"):
        fit(foreign_model, foreign, tmp_path / "foreign", ckpt=checkpoint)
    foreign.discard()

    guard.observe(torch.randn(50, 8))
    guard.constrain(rank=1)
    before = stored(model)
    fit(model, guard, tmp_path / "next")  # the next task, in a new Trainer
    assert guard.certificate().holds
    assert not same(stored(model), before)
