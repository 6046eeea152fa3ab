"""A guard inside axolotl, from its YAML file: no code.

plugins:
- ness.integrations.axolotl.NullSpacePlugin
ness:
old_data: general.jsonl       # texts that the model must not change on: one JSON object with "text" a line
statistics: statistics/       # or a folder of guard.export_statistics; or `old_data: self`
rank: 16
tokens: 20000
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ness.errors import NessError
from ness.guard import NullSpace
from ness.rules import Rule, rule_from_dict

if TYPE_CHECKING:

    class BasePlugin:
        """axolotl's own class: every hook it knows, doing nothing."""

    class BaseModel:
        """pydantic's own class."""
else:
    try:
        from pydantic import BaseModel
    except ModuleNotFoundError:  # axolotl brings it
        BaseModel = object
    try:
        from axolotl.integrations.base import BasePlugin
    except ModuleNotFoundError:  # what follows needs nothing of it but that every hook is there

        class BasePlugin:
            """Stands in for axolotl's own class where that is not installed."""


WHO = "NullSpacePlugin"
RULE = {"name": "nuclear", "eps": 1e-3}  # `NullSpace`'s own
OPTIONS = {"old_data": None, "statistics": None, "rank": 16, "tokens": 20_000, "exclude": (), "rule": RULE}


class NessArguments(BaseModel):
    """What axolotl lets pass in its configuration."""

    ness: dict[str, Any] | None = None


class NullSpacePlugin(BasePlugin):
    """Protects what the model knows: constrains it when it is loaded, and merges it when training ends."""

    def __init__(self) -> None:
        super().__init__()
        self.guard: NullSpace | None = None

    def get_input_args(self) -> str:
        """Where axolotl finds the names that its configuration may have."""
        return f"{__name__}.{NessArguments.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Observe, or read what was observed, and constrain."""
        from ness.integrations.transformers import protect, self_text

        options = _options(cfg)
        rank, tokens, tokenizer = options["rank"], options["tokens"], None
        which: dict[str, Any] = {"rule": _rule(options["rule"]), "exclude": options["exclude"]}
        if options["statistics"] is not None:
            self.guard = NullSpace(model, **which)
            self.guard.import_statistics(options["statistics"])
            self.guard.constrain(rank=rank)
            return
        old = options["old_data"]
        if old == "self":
            data: Any = self_text(model, tokens=tokens)
        else:
            data, tokenizer = _texts(Path(old)), _tokenizer(cfg)
        self.guard = protect(model, data, rank, processing_class=tokenizer, tokens=tokens, **which)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """The callback that checks, logs and merges."""
        from ness.integrations.transformers import GuardCallback

        if self.guard is None:
            raise NessError(f"{WHO}: axolotl made its Trainer before any model was loaded, so that nothing is guarded")
        return [GuardCallback(self.guard)]


def _options(cfg: Any) -> dict[str, Any]:
    """The `ness:` part of axolotl's configuration, checked."""
    found = cfg.get("ness") if isinstance(cfg, Mapping) else getattr(cfg, "ness", None)
    if not isinstance(found, Mapping):
        raise NessError(f"{WHO}: the configuration has no `ness:` part; expected old_data or statistics below it")
    strange = set(found) - set(OPTIONS)
    if strange:
        raise NessError(f"{WHO}: ness: {', '.join(sorted(strange))}: expected {', '.join(OPTIONS)}")
    options = {**OPTIONS, **{key: value for key, value in found.items() if value is not None}}
    if (options["old_data"] is None) == (options["statistics"] is None):
        raise NessError(f"{WHO}: ness: expected one of old_data (a file of texts, or self) and statistics (a folder)")
    adapter = cfg.get("adapter") if isinstance(cfg, Mapping) else getattr(cfg, "adapter", None)
    if adapter:
        raise NessError(
            f"{WHO}: found adapter: {adapter}, which would train beside the updates with no bound; leave it out: "
            "`rank:` below `ness:` trains as little, and guard.export_lora writes an adapter"
        )
    return options


def _rule(found: Any) -> Rule:
    try:
        return rule_from_dict(found)
    except (TypeError, ValueError, AttributeError) as error:
        raise NessError(f"{WHO}: ness: rule: {found!r}: expected such as {RULE} ({error})") from error


def _texts(path: Path) -> list[str]:
    """Texts of a JSON-lines file ("text" in each object), or the lines of any other."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        texts = [str(json.loads(line)["text"]) for line in lines] if path.suffix == ".jsonl" else lines
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise NessError(f'{WHO}: {path}: expected one {{"text": …}} a line ({error})') from error
    if not texts:
        raise NessError(f"{WHO}: {path}: holds no text")
    return texts


def _tokenizer(cfg: Any) -> Any:
    from ness.integrations.folders import load_tokenizer

    name = getattr(cfg, "tokenizer_config", None) or getattr(cfg, "base_model", None)
    if name is None and isinstance(cfg, Mapping):
        name = cfg.get("tokenizer_config") or cfg.get("base_model")
    if not name:
        raise NessError(f"{WHO}: the configuration names neither tokenizer_config nor base_model to read texts with")
    return load_tokenizer(str(name))
