"""On a GPU: the steps of the projection family can be captured, and a captured epoch is a plain one."""

from typing import Any

import pytest
import torch

import tiny
from ness.lab.gpu.capture import CapturedRunner, PlainRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore::ness.NessWarning"),
]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpm", {}),
    ("sgp", {}),
    ("cuber", {"trust": 0.3}),
    ("cuber", {"trust": 0.3, "agreement": -1.0, "network": tiny.WITHOUT_BIAS}),
    ("dfgp", {}),
    ("trgp", {}),
    ("trgp", {"network": tiny.WITHOUT_BIAS}),
    ("fsdgpm", {}),
    ("fsdgpm", {"importances": "rewrapped"}),
    ("owm", {}),
    ("owm", {"updates": "every-batch", "clip": 10.0}),
    ("ogd", {}),
    ("sd", {}),
    ("codecl", {"overlap": 0.0, "shared": 5}),
    ("codecl", {"overlap": 0.0, "shared": 5, "network": tiny.WITHOUT_BIAS}),
]


@pytest.mark.parametrize(("method", "changes"), CASES, ids=str)
def test_captured_epochs_are_plain_epochs(method: str, changes: dict[str, Any]) -> None:
    losses = []
    for runner in (PlainRunner(), CapturedRunner()):
        with torch.cuda.stream(torch.cuda.Stream()):
            one = tiny.trainer(method, epochs=2, runner=runner, device=torch.device("cuda"), **changes)
            found = []
            while not one.done:
                event = one.advance()
                if event.kind == "epoch":
                    found.append(event.facts["loss"])
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
