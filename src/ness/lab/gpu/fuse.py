"""What follows a convolution or linear layer, in few passes over memory where a GPU trains and Triton is there.

Elsewhere, and where more could be wanted of the modules than their arithmetic (a hook, a norm in eval mode, a module of
another type), they run one by one. Both ways draw the same dropout masks from the same generator.
"""

import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ness.errors import NessWarning
from ness.lab.gpu.ghost_batchnorm import batch_norm_in_parts
from ness.lab.networks.base import BatchNorm1d, BatchNorm2d
from ness.lab.networks.dropout import Dropout, masked


def after(
    x: Tensor,
    norm: nn.Module,
    relu: nn.Module | None = None,
    dropout: nn.Module | None = None,
    pool: nn.Module | None = None,
    *,
    add: Tensor | None = None,
    training: bool,
) -> Tensor:
    """pool(dropout(relu(norm(x) + add))) without what is None; `training`: whether the block that asks is."""
    if training and on_gpu(x) and readable(x, add, pool) and replaceable(x, norm, relu, dropout, pool, add):
        return _together(x, norm, relu, dropout, pool, add)
    out: Tensor = norm(x)
    if add is not None:
        out = out + add
    for module in (relu, dropout, pool):
        if module is not None:
            out = module(out)
    return out


@cache
def _launches() -> ModuleType | None:
    try:
        from ness.lab.gpu import launches
    except ImportError:  # no Triton
        return None
    return launches


def on_gpu(x: Tensor) -> bool:
    """Whether x is where the kernels run, and they are there."""
    return x.is_cuda and _built_on(x.device)


@cache
def _built_on(device: torch.device) -> bool:
    """Whether a kernel can be built and run there: Triton needs a C compiler, and a recent GPU."""
    launches: Any = _launches()
    if launches is None:
        return False
    try:
        launches.try_on(device)
    except Exception as error:  # whatever Triton, its compiler or the driver raise
        warnings.warn(
            f"Triton is installed but cannot build kernels for {device} ({type(error).__name__}: {error}); training "
            "goes on without them, more slowly",
            NessWarning,
            stacklevel=2,
        )
        return False
    return True


def readable(x: Tensor, add: Tensor | None, pool: nn.Module | None) -> bool:
    """Whether the kernels can read x, and what is added to it: (n, C), or (n, C, h, w) dense in channels-last order."""
    if x.dtype not in (torch.float32, torch.bfloat16) or x.ndim not in (2, 4) or not 0 < x.numel() < 2**31:
        return False
    if x.numel() == x.shape[1] or (pool is not None and (x.ndim != 4 or min(x.shape[2:]) < 2)):
        return False  # the modules say what is wrong
    layout = torch.contiguous_format if x.ndim == 2 else torch.channels_last
    same = add is None or (add.shape == x.shape and add.dtype == x.dtype and add.device == x.device)
    return same and all(each.is_contiguous(memory_format=layout) for each in (x, add) if each is not None)


def replaceable(
    x: Tensor,
    norm: nn.Module,
    relu: nn.Module | None,
    dropout: nn.Module | None,
    pool: nn.Module | None,
    add: Tensor | None,
) -> bool:
    """Whether the kernels do what these modules, as they are now, would do."""
    if type(norm) not in (BatchNorm1d, BatchNorm2d) or not norm.training:
        return False
    if norm.num_features != x.shape[1] or isinstance(norm, BatchNorm1d) != (x.ndim == 2):
        return False  # the norm says what is wrong
    own: Any = norm
    if own.parts > 1 and (own.running_mean is not None or len(x) % own.parts or x.numel() == own.parts * x.shape[1]):
        return False  # running statistics move once a part, or the norm says what is wrong
    affine = norm.weight, norm.bias
    if not all(isinstance(each, Tensor) and each.dtype == torch.float32 and each.is_contiguous() for each in affine):
        return False
    if relu is None and any(each is not None for each in (dropout, pool, add)):
        return False
    kinds = (relu, nn.ReLU), (dropout, Dropout), (pool, nn.MaxPool2d)
    if any(module is not None and type(module) is not kind for module, kind in kinds):
        return False
    if isinstance(pool, nn.MaxPool2d) and (add is not None or not _halves(pool)):
        return False
    return not any(_hooked(module) for module in (norm, relu, dropout, pool) if module is not None)


def _halves(pool: nn.MaxPool2d) -> bool:
    """Whether windows are 2×2 side by side."""
    size, stride, padding, dilation = (
        (each, each) if isinstance(each, int) else tuple(each)
        for each in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    plain = (size, stride, padding, dilation) == ((2, 2), (2, 2), (0, 0), (1, 1))
    return plain and not pool.ceil_mode and not pool.return_indices


def _hooked(module: nn.Module) -> bool:
    """Whether someone listens to the module's calls, or has put another forward into this one object."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def _together(
    x: Tensor,
    norm: Any,
    relu: nn.Module | None,
    dropout: Any,
    pool: nn.Module | None,
    add: Tensor | None,
) -> Tensor:
    launches: Any = _launches()
    kept = None if dropout is None else dropout.draw(x)
    scale = None if kept is None else dropout.scale
    steps = launches.Steps(add is not None, relu is not None, scale, pool is not None)
    running = None if norm.running_mean is None else (norm.running_mean, norm.running_var)
    held = norm.weight, norm.bias, add, kept, running, norm.momentum or 0.0, norm.eps, steps, norm.parts
    out: Tensor = _After.apply(x, *held)  # type: ignore[no-untyped-call]
    return out


class _After(torch.autograd.Function):
    """The kernels' result; differentiated twice (`create_graph`), the gradient is that of torch's own operations."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        add: Tensor | None,
        kept: Tensor | None,
        running: tuple[Tensor, Tensor] | None,
        momentum: float,
        eps: float,
        steps: Any,
        parts: int,
    ) -> Tensor:
        launches: Any = _launches()
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            found = launches.forward(x, gamma, beta, add, kept, running, float(momentum), eps, steps, parts)
        ctx.save_for_backward(x, gamma, beta, add, kept, *found[1:])
        ctx.steps, ctx.eps, ctx.parts = steps, eps, parts
        y: Tensor = found.y
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, add, kept, *found = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            held = kept, dy, ctx.eps, ctx.steps, ctx.parts
            return *_differentiable((x, gamma, beta, add), wanted, *held), *[None] * 6
        launches: Any = _launches()
        saved = launches.Forward(dy, *found)
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            each = launches.backward(
                dy, x, gamma, beta, saved, ctx.steps, want_x=wanted[0], want_add=wanted[3], want_affine=any(wanted[1:3])
            )
        return each.x, each.gamma, each.beta, each.add, *[None] * 6


def _differentiable(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    wanted: tuple[bool, ...],
    kept: Tensor | None,
    dy: Tensor,
    eps: float,
    steps: Any,
    parts: int,
) -> list[Tensor | None]:
    """The gradients of those inputs that are wanted, as a graph of torch's own operations."""
    x, gamma, beta, add = inputs
    with torch.backends.cudnn.flags(enabled=False):  # as the norm itself does
        if parts > 1:
            y = batch_norm_in_parts(x, parts, None, None, gamma, beta, 0.0, eps)
        else:
            y = F.batch_norm(x, None, None, gamma, beta, True, 0.0, eps)
        y = y if add is None else y + add
        y = F.relu(y) if steps.relu else y
        y = y if kept is None else masked(y, kept, steps.scale)
        y = F.max_pool2d(y, 2) if steps.pool else y
        asked = [value for value, want in zip(inputs, wanted, strict=True) if want and value is not None]
        found = iter(torch.autograd.grad(y, asked, dy, create_graph=True))
    return [next(found) if want else None for want in wanted]
