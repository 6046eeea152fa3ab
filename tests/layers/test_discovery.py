"""What of a model is protected, what is the caller's, and what happens when the model changes under the guard."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import named

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


class Tied(nn.Module):
    """A head that reads the embedding's own table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(20, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(self.embed(index))))


class Heads(nn.Module):
    """A head a task."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(10, 16), nn.ModuleList([nn.Linear(16, 2)])

    def forward(self, x: Tensor, task: int = 0) -> Tensor:
        return self.heads[task](torch.relu(self.body(x)))


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_an_excluded_parameter_with_two_names_trains() -> None:
    model = Tied()
    guard = ness.NullSpace(model, rule=ness.Rank(2), exclude=["head", "embed"])
    guard.observe(torch.randint(0, 20, (50, 3)))
    guard.constrain()
    assert trained(model) == {"fc.ness_weight", "embed.weight"}


@pytest.mark.parametrize("exclude", ["head", "embed"])
def test_a_parameter_that_is_excluded_under_one_of_its_names_is_refused(exclude: str) -> None:
    with pytest.raises(ness.NessError, match="is the same parameter and is not; exclude both"):
        ness.NullSpace(Tied(), exclude=exclude)


@pytest.mark.parametrize("name", ["head", "classifier", "classif*"])
def test_a_module_with_two_names_is_excluded_by_either(name: str) -> None:
    model = Heads()
    model.head = model.classifier = model.heads[0]
    guard = ness.NullSpace(model, rule=ness.Rank(1), exclude=name)
    assert guard.layers == ("body",)
    guard.observe(torch.randn(20, 10))
    guard.constrain()
    assert trained(model) == {"body.ness_weight", "heads.0.weight", "heads.0.bias"}


@pytest.mark.parametrize("part", ["0.bias", "*.weight"])
def test_a_part_of_a_protected_layer_is_not_excluded(part: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(ness.NessError, match=r"a part of layer '0', which is protected whole; exclude the layer, or"):
        ness.NullSpace(model, exclude=part)


def test_a_head_that_is_added_later_trains() -> None:
    model = Heads()
    guard = ness.NullSpace(model, rule=ness.Rank(3), exclude=["heads"])
    guard.observe(torch.randn(99, 10))
    model.heads.append(nn.Linear(16, 3))
    guard.constrain()
    assert trained(model) == {
        "body.ness_weight", "heads.0.weight", "heads.0.bias", "heads.1.weight", "heads.1.bias",
    }  # fmt: skip


def test_a_layer_that_is_added_later_is_protected_once_it_is_observed() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    guard = ness.NullSpace(model, rule=ness.Rank(2))
    guard.observe(torch.randn(30, 6))
    guard.constrain()
    guard.merge()
    model.append(nn.Linear(6, 3))
    guard.observe(torch.randn(30, 6))
    guard.constrain()
    assert trained(model) == {"0.ness_weight", "1.ness_weight"}
    assert [row.name for row in guard.certificate()] == ["0", "1"]


@pytest.mark.parametrize("verb", ["observe", "constrain"])
def test_a_protected_layer_that_was_replaced_is_refused(verb: str) -> None:
    model = Heads()
    guard = ness.NullSpace(model, exclude=["heads"])
    guard.observe(torch.randn(99, 10))
    old, model.body = model.body, nn.Linear(10, 16)
    with pytest.raises(ness.NessError, match="layer 'body' is another one, or gone, since it was observed"):
        guard.constrain() if verb == "constrain" else guard.observe(torch.randn(9, 10))
    model.body = old
    guard.constrain()


def test_norms_that_come_after_the_first_task_are_refused_where_each_task_keeps_its_own() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    guard = ness.NullSpace(model, rule=ness.Rank(2), norm="per_task")
    guard.observe(torch.randn(30, 6))
    guard.constrain(task="b")
    guard.merge()
    model.append(nn.LayerNorm(6))
    with pytest.raises(ness.NessError, match="has other norms than when the first task began"):
        guard.observe(torch.randn(30, 6))


def test_a_layer_that_the_caller_has_frozen_stays_as_it_is() -> None:
    model = named(a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.a.requires_grad_(False)
    start = model.a.weight.detach().clone()
    guard = ness.NullSpace(model, rule=ness.Rank(3))
    guard.observe(torch.randn(50, 8))
    guard.constrain()
    assert trained(model) == {"b.ness_weight"}
    assert guard.skipped == {"a": "its weight has requires_grad=False: frozen, as it was"}
    guard.merge()
    assert torch.equal(model.a.weight, start)
    assert not model.a.weight.requires_grad


def test_a_gradient_from_before_does_not_move_a_weight_once_more() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.randn(5, 8)).square().mean().backward()
    guard = ness.NullSpace(model, rule=ness.Rank(3))
    guard.observe(torch.randn(50, 8))
    guard.constrain()
    optimizer.step()
    assert guard.certificate()["0"].rms_drift == 0


def test_lazy_layers_are_refused_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ness.NessError, match="lazy layers without a shape yet; run one batch"):
        ness.NullSpace(model)
    model(torch.randn(2, 3))
    assert ness.NullSpace(model).layers == ("0",)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_computed_weight_is_named_as_the_reason() -> None:
    model = named(a=torch.nn.utils.weight_norm(nn.Linear(4, 4)), b=nn.Linear(4, 4))
    assert "computed in every forward (weight_norm" in ness.NullSpace(model).skipped["a"]
