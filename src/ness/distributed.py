"""Several processes, one guard: sums over ranks, a basis from rank 0, errors on all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ness.errors import NessError

Result = TypeVar("Result")


def active() -> bool:
    """Whether this process is one of several in torch.distributed."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def on_rank_zero() -> bool:
    """Whether this process decides: rank 0, or the only one."""
    return not active() or dist.get_rank() == 0


def together(work: Callable[[], Result]) -> Result:
    """Run `work` on every rank; an error of ours on one rank is raised on all, so that no rank waits for ever."""
    if not active():
        return work()
    result: Result | None = None
    problem: str | None = None
    error: NessError | None = None
    try:
        result = work()
    except NessError as found:
        error, problem = found, str(found)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if error is not None:
        raise error
    for rank, text in enumerate(problems):
        if text is not None:
            raise NessError(f"rank {rank}: {text}")
    return result  # type: ignore[return-value]


def _carrier(tensor: Tensor) -> Tensor:
    """The tensor where the backend can reach it: NCCL needs a GPU, gloo takes the CPU."""
    if dist.get_backend() == "nccl":
        return tensor.to(torch.device("cuda", torch.cuda.current_device())).contiguous()
    return tensor.detach().cpu().contiguous()


def sum_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all ranks."""
    for tensor in tensors:
        carrier = _carrier(tensor)
        dist.all_reduce(carrier)
        tensor.copy_(carrier)


def from_rank_zero_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by rank 0's: eigenvectors of equal matrices differ by sign and rotation."""
    for tensor in tensors:
        carrier = _carrier(tensor)
        dist.broadcast(carrier, src=0)
        tensor.copy_(carrier)


def total(number: int) -> int:
    """The sum of a whole number over all ranks."""
    if not active():
        return number
    held = torch.tensor(number, dtype=torch.int64)
    sum_([held])
    return int(held)


def sharded(tensor: Tensor) -> bool:
    """Whether each rank has a part of it alone, as `fully_shard` leaves parameters outside of a forward pass."""
    return hasattr(tensor, "full_tensor")


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor that is sharded over ranks, which all of them must ask for; any other as it is."""
    if not sharded(tensor):
        return tensor
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return whole


def as_sharded(value: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank has, cut as another one is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)  # type: ignore[attr-defined]
