"""What the guard refuses before it touches anything, each with what was found, what was expected and what to do."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ness.distributed import sharded
from ness.errors import NessError
from ness.rules import Rule


def check_guard_options(
    model: nn.Module, rule: Rule, bias: str, norm: str, private_basis: str, dtype: torch.dtype
) -> None:
    """Refuse what `NullSpace(...)` cannot work with."""
    if not isinstance(model, nn.Module):
        raise NessError(f"NullSpace: found {type(model).__name__}, expected a torch.nn.Module")
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"):
        raise NessError(
            f"NullSpace: found a {type(model).__name__}; guard the plain model, and wrap it after constrain(), "
            "so that the wrapper sees the updates"
        )
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in model.parameters()):
        raise NessError("NullSpace: the model has lazy layers without a shape yet; run one batch through it first")
    if not isinstance(rule, Rule):
        raise NessError(f"NullSpace(rule={rule!r}): expected a rule such as ness.Nuclear(1e-3)")
    if bias not in ("constrain", "freeze"):
        raise NessError(f"NullSpace(bias={bias!r}): expected 'constrain' or 'freeze'")
    if norm not in ("freeze", "per_task"):
        raise NessError(f"NullSpace(norm={norm!r}): expected 'freeze' or 'per_task'")
    if private_basis not in ("shared", "per_task"):
        raise NessError(f"NullSpace(private_basis={private_basis!r}): expected 'shared' or 'per_task'")
    if dtype not in (torch.float64, torch.float32):
        raise NessError(f"NullSpace(statistics_dtype={dtype}): expected torch.float64 or torch.float32")


def place_of_statistics(device: torch.device | str | None) -> tuple[torch.device | None, Path | None]:
    """Device and folder that `NullSpace(statistics_device=...)` means; None: each layer's own device, in memory."""
    if device is None:
        return None, None
    if isinstance(device, str) and device.startswith("disk:"):
        folder = Path(device.removeprefix("disk:")).expanduser()
        if device == "disk:" or (folder.exists() and not folder.is_dir()):
            raise NessError(f"NullSpace(statistics_device={device!r}): expected 'disk:FOLDER' with a folder's name")
        return torch.device("cpu"), folder.absolute()
    try:
        return torch.device(device), None
    except (RuntimeError, TypeError) as error:
        raise NessError(
            f"NullSpace(statistics_device={device!r}): expected a device such as 'cpu', or 'disk:FOLDER'"
        ) from error


def refuse_sharded(model: nn.Module, verb: str, way_out: str) -> None:
    """Refuse a verb that needs whole weights on a model that `fully_shard` has cut up."""
    name = next((name for name, parameter in model.named_parameters() if sharded(parameter)), None)
    if name is not None:
        raise NessError(f"{verb}: the model is sharded (FSDP): {name!r} is a DTensor; {way_out}")


def check_constrain_options(
    form: str, max_drift: float | None, rank: int | None, generator: torch.Generator | None, new: object = None
) -> None:
    """Refuse what `constrain(...)` cannot work with, whatever the guard's state."""
    if form not in ("any", "sgd"):
        raise NessError(f"constrain(form={form!r}): expected 'any' or 'sgd'")
    if max_drift is not None and (not isinstance(max_drift, (int, float)) or not 0 < max_drift < float("inf")):
        raise NessError(f"constrain(max_drift={max_drift!r}): expected a number above 0")
    if max_drift is not None and form == "sgd":
        raise NessError("constrain(form='sgd', max_drift=...): the limit bends the update, so use form='any'")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise NessError(f"constrain(rank={rank!r}): expected a whole number above 0, or None for full width")
    if rank is not None and form == "sgd":
        raise NessError(
            "constrain(rank=..., form='sgd'): there the whole increment is the parameter, which has no rank; "
            "use form='any', which is as cheap at low rank and safe under SGD too"
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise NessError(f"constrain(generator={generator!r}): expected a torch.Generator, or None for torch's own")
    if generator is not None and rank is None:
        raise NessError("constrain(generator=...): only an update of low rank is drawn; give rank=r too")
    if new is not None and rank is None:
        raise NessError("constrain(new=...): only an update of low rank has a start to choose; give rank=r too")
