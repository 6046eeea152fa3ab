"""`import ness` is light: torch, numpy and safetensors, and nothing else of weight."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_needs_torch_numpy_and_safetensors_only() -> None:
    heavy = "sklearn scipy PIL pooch tyro rich matplotlib pandas jinja2 ness.lab ness.report"
    loaded = run(
        "import sys, torch, numpy, safetensors; before = set(sys.modules)\n"
        "import ness\n"
        f"print(*[name for name in {heavy.split()!r} if name in sys.modules and name not in before])"
    )
    assert loaded.split() == []


def test_importing_changes_no_global_state() -> None:
    states = run(
        "import torch\n"
        "def state(): return (torch.get_rng_state().sum().item(), torch.is_grad_enabled(), torch.get_default_dtype(),\n"
        "                     torch.backends.mha.get_fastpath_enabled())\n"
        "before = state(); import ness; print(before == state())"
    )
    assert states.strip() == "True"
