"""`NullSpacePlugin` from a configuration as axolotl hands it over, with a stand-in for its Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from ness.integrations import axolotl
from ness.integrations.axolotl import NullSpacePlugin

pytestmark = pytest.mark.filterwarnings("ignore:fewer rows:ness.NessWarning")


class Writer(nn.Module):
    """A language model without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)
        self.config = SimpleNamespace(bos_token_id=0, eos_token_id=1, max_position_embeddings=20)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.fc(self.table(input_ids)).tanh()))


class Tokens:
    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": torch.tensor([ord(c) % 12 for c in text[:6]]), "attention_mask": torch.ones(6).long()}


def test_texts_statistics_and_the_model_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="batches are made by its collators")
    monkeypatch.setattr(axolotl, "_tokenizer", lambda cfg: Tokens())
    (tmp_path / "old.jsonl").write_text("".join(json.dumps({"text": f"letter{n}"}) + "\n" for n in range(6)))
    plain = Writer()
    known = ness.NullSpace(plain)
    known.observe([{"input_ids": torch.randint(12, (4, 6))}])
    known.export_statistics(tmp_path / "statistics")
    for options, rows in (
        ({"old_data": str(tmp_path / "old.jsonl"), "rank": 2}, 36),
        ({"old_data": "self", "tokens": 50, "rank": 2}, None),
        ({"statistics": str(tmp_path / "statistics"), "exclude": ["head"], "rank": 2}, 24),
    ):
        plugin, model = NullSpacePlugin(), Writer()
        model.load_state_dict(plain.state_dict())
        plugin.post_model_load({"ness": {**options, "rule": {"name": "rank", "r": 4}}}, model)
        guard = plugin.guard
        assert guard is not None
        assert guard.constrained
        assert rows is None or guard.grams["fc"].count == rows
        (callback,) = plugin.add_callbacks_post_trainer({}, None)
        assert type(callback).__name__ == "GuardCallback"
        assert callback.guard is guard
        guard.discard()


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({}, "no `ness:` part"),
        ({"ness": {"rank": 4}}, "one of old_data"),
        ({"ness": {"old_data": "self", "statistics": "x"}}, "one of old_data"),
        ({"ness": {"old_data": "self", "ranks": 4}}, "ranks: expected old_data, statistics, rank"),
        ({"ness": {"old_data": "self"}, "adapter": "lora"}, "found adapter: lora"),
        ({"ness": {"old_data": "self", "rule": {"name": "rank", "x": 4}}}, r"rule: .*expected such as"),
        ({"ness": {"old_data": "self", "rule": "ranks"}}, "unknown rule 'ranks'"),
        ({"ness": {"old_data": "nowhere.jsonl"}}, r"nowhere\.jsonl: expected one"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(cfg: dict[str, Any], message: str) -> None:
    plugin, model = NullSpacePlugin(), Writer()
    with pytest.raises(ness.NessError, match=message):
        plugin.post_model_load(cfg, model)
    assert type(model.fc) is nn.Linear
    with pytest.raises(ness.NessError, match="before any model was loaded"):
        plugin.add_callbacks_post_trainer(cfg, None)


def test_axolotl_lets_the_part_pass() -> None:
    pydantic = pytest.importorskip("pydantic")
    module, _, name = NullSpacePlugin().get_input_args().rpartition(".")
    assert module == "ness.integrations.axolotl"
    arguments = getattr(axolotl, name)
    assert issubclass(arguments, pydantic.BaseModel)
    assert arguments(ness={"rank": 4}).ness == {"rank": 4}
