"""Hugging Face model folders and PEFT adapter folders: read, and written whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ness._files import make_folder, reason, sync_folder
from ness.errors import NessError

if sys.platform != "win32":
    import fcntl

TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
#: What is not taken over from a tuned folder: weights are written anew, and pickles and training state are no model.
LEFT = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True)
class Loaded:
    """A tuned model and its base, as folders or names of the hub."""

    tuned: nn.Module
    base: nn.Module | None  # None: the tuned model is its base with adapters
    adapter: bool
    added: tuple[str, ...]  # what the base does not have: a new head


def partner(name: str) -> Any:
    """A package that is imported when it is needed."""
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise NessError(f"this needs the package {name}, which is not installed: pip install {name}") from error


def load_pair(base: str, tuned: str, dtype: torch.dtype | None = None, device: str = "cpu") -> Loaded:
    """Load a tuned model and its base; where `tuned` is an adapter's folder, the base with the adapter on it.

    Args:
        base: folder of the model before tuning, or its name on the hub.
        tuned: folder of the tuned model, or of a PEFT adapter.
        dtype: of the weights; None: as they are stored.
        device: where to.
    """
    for place in (base, tuned):
        _check_ordinary(Path(place))
    if (Path(tuned) / "adapter_config.json").is_file():
        peft = partner("peft")
        config = _said(tuned, lambda: json.loads((Path(tuned) / "adapter_config.json").read_text(encoding="utf-8")))
        if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
            raise NessError(f"{tuned}: its adapter_config.json names no peft_type; expected an adapter's of PEFT")
        if config["peft_type"] != "LORA":
            raise NessError(
                f"{tuned}: a {config['peft_type']:.60} adapter; expected LORA, or merge it and repair the model"
            )
        model, _ = _load(base, TASKS.get(str(config.get("task_type"))), dtype)
        adapted = _said(tuned, lambda: peft.PeftModel.from_pretrained(model, tuned))
        return Loaded(adapted.to(device).eval(), None, True, ())
    _check_model_folder(tuned)
    after, found = _load(tuned, None, dtype)
    lost = sorted({*found.get("missing_keys", ()), *(entry[0] for entry in found.get("mismatched_keys", ()))})
    if lost:
        raise NessError(
            f"{tuned}: its weights lack {lost[0]!r}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}, or have "
            "them in other shapes; expected the folder that save_pretrained wrote"
        )
    before, info = _load(base, type(after).__name__, dtype)
    if type(before) is not type(after):
        raise NessError(f"{tuned} is a {type(after).__name__} and {base} a {type(before).__name__}; expected one kind")
    added = sorted({*info.get("missing_keys", ()), *(entry[0] for entry in info.get("mismatched_keys", ()))})
    return Loaded(after.to(device).eval(), before.to(device).eval(), False, tuple(added))


def _check_ordinary(folder: Path) -> None:
    """Refuses a folder with a pipe, a device or a link to nothing in the place of a file."""
    try:
        odd = [path for path in sorted(folder.iterdir()) if not (path.is_file() or path.is_dir())]
    except (FileNotFoundError, NotADirectoryError):  # a name on the hub
        return
    except OSError as error:
        raise NessError(f"{folder}: could not be read ({reason(error)})") from error
    if odd:
        raise NessError(f"{odd[0]}: found a pipe, a device or a link to nothing, expected an ordinary file")


def _check_model_folder(path: str) -> None:
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise NessError(f"{folder}: holds neither config.json nor adapter_config.json; expected a model's folder")


def _load(path: str, kind: str | None, dtype: torch.dtype | None) -> tuple[nn.Module, dict[str, Any]]:
    transformers = partner("transformers")
    _check_model_folder(path)
    config = _said(path, lambda: transformers.AutoConfig.from_pretrained(path))
    if getattr(config, "quantization_config", None):
        raise NessError(
            f"{path}: its weights are quantised, and a repaired weight has no place there; give the model in bfloat16 "
            "or float32. An adapter trained over it can be repaired over the unquantised one, and used over either"
        )
    kinds = [kind, *(getattr(config, "architectures", None) or ()), "AutoModel"]
    found = next(getattr(transformers, name) for name in kinds if name and hasattr(transformers, name))
    options = {"dtype": dtype or "auto", "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = _said(path, lambda: found.from_pretrained(path, use_safetensors=None, **options))
    return model, info


def _said(path: str, load: Callable[[], Any]) -> Any:
    """A loader's own errors in one line."""
    try:
        return load()
    except NessError:
        raise
    except Exception as error:  # whatever the partner raises: missing files, bad JSON, unknown architectures
        text = reason(error)
        raise NessError(f"{path}: could not be loaded ({text if len(text) < 400 else text[:400] + '…'})") from error


def load_tokenizer(*paths: str) -> Any:
    """The tokenizer of the first of these folders that has one."""
    transformers = partner("transformers")
    errors = []
    for path in paths:
        try:
            return _said(path, lambda path=path: transformers.AutoTokenizer.from_pretrained(path))  # type: ignore[misc]
        except NessError as error:
            errors.append(str(error))
    raise NessError(f"no tokenizer found: {errors[0]}")


def load_image_processor(*paths: str) -> Any:
    """The image processor of the first of these folders that has one."""
    transformers = partner("transformers")
    errors = []
    for path in paths:
        try:
            return _said(path, lambda path=path: transformers.AutoImageProcessor.from_pretrained(path))  # type: ignore[misc]
        except NessError as error:
            errors.append(str(error))
    raise NessError(f"no image processor found: {errors[0]}")


def check_out(out: Path) -> None:
    """Refuse a place that is taken."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise NessError(f"{out}: there is something already; name a folder that does not exist")


def write_model(model: nn.Module, tuned: str, out: Path, files: dict[str, str]) -> None:
    """Write a model or adapter folder under a temporary name, then give it its own.

    Args:
        model: a model of transformers or PEFT.
        tuned: the folder it came from: tokenizer, processor and the like are taken over.
        out: a folder that does not exist.
        files: more files: name -> text.

    Raises:
        NessError: it could not be written; nothing is left behind.
    """
    check_out(out)
    out = out.absolute()
    temporary = out.parent / f".{out.name}.ness-{secrets.token_hex(8)}.tmp"
    lock = -1
    try:
        make_folder(out.parent)
        _remove_abandoned(out)
        temporary.mkdir()
        lock = _locked(temporary)
        _take_over(Path(tuned), temporary)
        model.save_pretrained(temporary)  # type: ignore[operator]
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
        for path in temporary.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            else:
                sync_folder(path)
        sync_folder(temporary)
        if out.is_dir():
            out.rmdir()
        temporary.rename(out)
        sync_folder(out.parent)
    except NessError:
        raise
    except Exception as error:  # the partner's too: safetensors has a family of its own for a full disk
        raise NessError(f"{out}: could not be written ({reason(error):.400}); nothing is left there") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _locked(folder: Path) -> int:
    """The folder, open and locked as long as its writer lives; -1 where the system cannot."""
    if sys.platform == "win32":
        return -1
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:  # a file system without locks
        os.close(handle)
        return -1
    return handle


def _remove_abandoned(out: Path) -> None:
    """Removes the temporary folders of writers to the same place that were killed."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.ness-{'[0-9a-f]' * 16}.tmp"):
        with contextlib.suppress(OSError):  # its writer lives, or another one removes it
            if not path.is_symlink() and (handle := _locked(path)) >= 0:
                shutil.rmtree(path, ignore_errors=True)
                os.close(handle)


def _take_over(source: Path, target: Path) -> None:
    if not source.is_dir():
        return
    for path in source.iterdir():
        kept = path.is_file() and not path.name.startswith(".") and not path.name.endswith(LEFT)
        if kept and path.name not in ("README.md", "training_args.bin", "trainer_state.json", "ness-repair.json"):
            shutil.copyfile(path, target / path.name)
