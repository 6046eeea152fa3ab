"""What `--fast` changes: bfloat16 where a step multiplies, and kernels chosen by trial.

Weights, gradients and optimizers stay float32, statistics float64 from float32 rows, evaluation float32. A seed no
longer gives the same bits twice.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from ness.errors import NessError


def check(device: torch.device) -> None:
    """Refuses a device on which nothing would be faster."""
    if device.type != "cuda":
        raise NessError(f"--fast is for a GPU, and the device is {device.type}; use --device cuda, or leave --fast out")


def narrow(device: torch.device, fast: bool) -> AbstractContextManager[object]:
    """Products inside run in bfloat16, if fast.

    Casts of weights are not kept for a second use: SAM moves the weights between two passes, and a graph must hold
    every cast it needs.
    """
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if fast else nullcontext()
