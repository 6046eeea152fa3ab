"""docs/scale.md says what `ness.cost` says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import ness

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_in_the_document_is_the_one_of_now(scale: ModuleType) -> None:
    text = (ROOT / "docs" / "scale.md").read_text()
    assert scale.table() in text
    assert scale.written(text) == text, "run: python benchmarks/scale.py --write docs/scale.md"


def test_the_shapes_are_those_of_the_models(scale: ModuleType) -> None:
    counted = [sum(p.numel() for p in scale.llama(*shape).parameters()) for shape in scale.MODELS.values()]
    assert [round(number / 1e9, 1) for number in counted] == [1.2, 6.6, 69.5]  # a head that is not tied comes on top


def test_layers_that_read_one_tensor_count_as_one_gram() -> None:
    with torch.device("meta"):
        block = {name: nn.Linear(64, 64, bias=False) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        model = nn.ModuleDict({"a": nn.ModuleDict(block), "b": nn.ModuleDict(block)})
        model["b"] = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in block})
    alone = ness.cost(model, 4)
    shared = ness.cost(model, 4, shared=[("q_proj", "k_proj", "v_proj")])
    half = ness.cost(model, 4, shared=[("q_proj", "k_proj", "v_proj")], statistics_dtype=torch.float32)
    gram, anchor = 64 * 64, 4 * 64 * 64
    assert alone.statistics - shared.statistics == 4 * 8 * gram
    assert shared.statistics - half.statistics == 4 * 4 * gram
    assert half.statistics == 4 * 4 * gram + 8 * (anchor + 16)
    assert shared.decompositions == alone.decompositions / 2
    assert ness.cost(model, 4, shared=[("q_proj", "k_proj")], relative=True).decompositions == alone.decompositions
    assert shared.bases == alone.bases
    assert shared.gram_flops == alone.gram_flops / 2
    assert (shared.updates, shared.forward_flops) == (alone.updates, alone.forward_flops)
