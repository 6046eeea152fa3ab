"""Products as exact as their dtype, whatever the caller has switched on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
Result = TypeVar("Result")


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Products inside are as exact as the dtype: a half-precision or TF32 B would leak into what must not move."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(like.device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def ordinary_tensors() -> torch.inference_mode:
    """Tensors made inside can be written to later, also where the caller is in inference mode."""
    return torch.inference_mode(False)


def ordinarily(work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """`work(...)` outside inference mode, so that its tensors can be written to later.

    A call, not a `with`: an interrupt on the last line of a `with` can pass over its exit.
    """
    if not torch.is_inference_mode_enabled():
        return work(*args, **kwargs)
    result: Result = torch.inference_mode(False)(work)(*args, **kwargs)
    return result
