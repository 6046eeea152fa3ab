"""Statistics in files, for what memory has no room for."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ness.errors import NessError


def zeros_on_disk(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in a file of their own, which is gone with the tensor or the process, and takes its room at once.

    Raises:
        NessError: there is no such folder, or no room in it.
    """
    size = max(1, math.prod(shape)) * dtype.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".ness-statistics-", dir=folder)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, size)  # else a full disk is met later, and then it is a crash
            else:
                os.truncate(handle, size)
            tensor = torch.from_file(name, shared=True, size=math.prod(shape), dtype=dtype)
        finally:
            os.close(handle)
            with contextlib.suppress(OSError):
                Path(name).unlink()
    except (OSError, RuntimeError) as error:
        raise NessError(
            f"statistics_device='disk:{folder}': {size:,} bytes could not be had there ({error}); make room, or name "
            "another folder. What was observed before is as it was"
        ) from error
    return tensor.view(shape)
