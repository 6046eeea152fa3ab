"""The logger for TensorBoard: event files in a run's folder, for `tensorboard --logdir runs/`."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ness.errors import NessError


class TensorBoard:
    """Writes into `tensorboard/` of the run's folder; what a run that was cut short does again replaces what it did."""

    def __init__(self) -> None:
        try:
            self.module = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise NessError(
                f"--log tensorboard needs the package tensorboard, which cannot be imported ({error}); "
                "install it: pip install 'ness-cl[tensorboard]'"
            ) from error
        self.writer: Any = None

    def begin(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        """Opens the event file; steps after `step` that an earlier process wrote are dropped."""
        try:
            self.writer = self.module.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        except OSError as error:
            raise NessError(f"cannot write {folder / 'tensorboard'} ({error.strerror}); leave --log out") from error
        if step == 0:
            self.writer.add_text("settings", "\n".join(f"    {name} = {value!r}" for name, value in settings.items()))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar a name."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self) -> None:
        """Closes the file."""
        self.writer.close()
