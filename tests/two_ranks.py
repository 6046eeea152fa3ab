"""Runs a test's function in two gloo processes."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ness

Work = Callable[[int, Path], Any]


def _enter(rank: int, file: str, name: str, options: dict[str, Any], port: int, folder: str, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        results[rank] = ("ok", getattr(_module_of(file), name)(rank, Path(folder), **options))
    except ness.NessError as error:
        results[rank] = ("error", str(error))
    except Exception:
        results[rank] = ("bug", traceback.format_exc())
    finally:
        dist.destroy_process_group()


def _module_of(file: str) -> Any:
    """A test file as a module, by its path: the name that pytest gives it may mean another package's tests."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def on_two_ranks(work: Work) -> list[Any]:
    """Run `work(rank, folder)` in two processes; what each returned, or the text of its NessError.

    `work` is a function of the test's file, or a `partial` of one.
    """
    options: dict[str, Any] = {}
    if isinstance(work, partial):
        work, options = work.func, dict(work.keywords)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    about = work.__code__.co_filename, work.__name__, options  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder, mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(_enter, args=(*about, port, folder, results), nprocs=2)  # type: ignore[no-untyped-call]
        found = [results[rank] for rank in range(2)]
    for kind, value in found:
        assert kind != "bug", value
    return [value for _, value in found]
