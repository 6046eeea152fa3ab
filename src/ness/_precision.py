"""Products as exact as their dtype, whatever the caller has switched on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
Result = TypeVar("Result")


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Products inside are as exact as the dtype: a half-precision or TF32 B would leak into what must not move.

    What torch.compile traces cannot switch TF32 off; there `product` does so on a GPU.
    """
    if torch.compiler.is_compiling():
        with torch.autocast(like.device.type, enabled=False):
            yield
        return
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(like.device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@torch.library.custom_op("ness::product", mutates_args=())
def _product(left: Tensor, right: Tensor) -> Tensor:
    """left (…, n, d) times right (…, d, m), out of a compiler's sight."""
    with full_precision(left):
        return (left @ right).contiguous()


@_product.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return (left @ right).contiguous()


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    left, right = ctx.saved_tensors
    for_left = _product(gradient, right.mT).sum_to_size(left.shape) if ctx.needs_input_grad[0] else None
    for_right = None
    if ctx.needs_input_grad[1]:
        if right.ndim == 2:  # one matrix for all rows
            for_right = _product(left.reshape(-1, left.shape[-1]).mT, gradient.reshape(-1, gradient.shape[-1]))
        else:
            for_right = _product(left.mT, gradient).sum_to_size(right.shape)
    return for_left, for_right


_product.register_autograd(_product_backward, setup_context=_keep)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, as exact as the dtype also in code that is compiled for a GPU.

    >>> product(torch.ones(2, 3), torch.ones(3, 1)).tolist()
    [[3.0], [3.0]]
    """
    if torch.compiler.is_compiling() and left.is_cuda:
        result: Tensor = _product(left, right)
        return result
    return left @ right


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
