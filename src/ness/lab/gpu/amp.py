"""What `--fast` changes: bfloat16 where a step multiplies; on a GPU kernels chosen by trial, on a CPU channels last.

Weights, gradients and optimizers stay float32, statistics float64 from float32 rows, evaluation float32. On a GPU a
seed no longer gives the same bits twice; on a CPU it does, under the same number of threads.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from ness.errors import NessError


def check(device: torch.device) -> None:
    """Refuses a device on which nothing would be faster."""
    if device.type == "cpu" and not multiplies_in_bfloat16():
        raise NessError(
            "--fast multiplies in bfloat16, and this CPU has no instructions for it (expected avx512_bf16 or AMX), so "
            "nothing would be faster; leave --fast out, or use --device cuda"
        )
    if device.type not in ("cpu", "cuda"):
        raise NessError(f"--fast is for a CPU or a GPU, and the device is {device.type}; leave --fast out")


def multiplies_in_bfloat16() -> bool:
    """Whether this CPU has products of bfloat16: elsewhere torch widens the factors first, which is slower."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def channels_last(device: torch.device, fast: bool) -> bool:
    """Whether images and kernels lie channels last, as a GPU's convolutions and a CPU's in bfloat16 want them."""
    return device.type == "cuda" or fast


def narrow(device: torch.device, fast: bool) -> AbstractContextManager[object]:
    """Products inside run in bfloat16, if fast.

    Casts of weights are not kept for a second use: SAM moves the weights between two passes, and a graph must hold
    every cast it needs.
    """
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if fast else nullcontext()
