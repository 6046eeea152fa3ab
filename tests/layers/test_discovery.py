"""What of a model is protected, what is the caller's, and what happens when the model changes under the guard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import GPT2Like, named, train

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
    with pytest.raises(ness.NessError, match=f"Leave '{exclude}' out of exclude, and both stay frozen") as error:
        ness.NullSpace(Tied(), exclude=exclude)
    assert "exclude both" not in str(error.value)


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
    with pytest.raises(ness.NessError, match=r"a part of layer '0', which is protected whole; leave it out of exclude"):
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


# -- tied weights ---------------------------------------------------------------------------------------------------


class TiedLanguageModel(GPT2Like):
    """A GPT-2 in small: the head that names the next token reads the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight


def test_a_guard_of_a_tied_model_needs_no_options_and_leaves_the_pair_frozen() -> None:
    torch.manual_seed(0)
    model, old, new = TiedLanguageModel(), torch.randint(0, 6, (60, 5)), torch.randint(6, 50, (16, 5))
    guard = ness.NullSpace(model)
    assert guard.layers == ("attend", "project", "up", "down")
    assert guard.skipped == {
        "head": "its weight is also that of 'embed' (Embedding), which is not constrained with it: tied, so both stay "
        "frozen",
        "embed": "Embedding is not a supported kind; it shares a parameter with 'head': tied, so both stay frozen",
    }
    guard.observe(old)
    start = model.embed.weight.detach().clone()
    guard.constrain()
    assert guard.unprotected == {}
    assert "embed.weight" not in trained(model)
    assert not {"embed.weight", "head.weight"} & set(guard.unprotected)
    train(model, torch.optim.AdamW(guard.parameters(), lr=1e-2), new)
    certificate = guard.certificate()
    assert certificate.holds
    assert "frozen: head: its weight is also that of 'embed' (Embedding)" in str(certificate)
    guard.merge()
    assert torch.equal(model.embed.weight, start)
    assert model.head.weight is model.embed.weight


def test_an_embedding_that_trains_unprotected_is_listed_and_counted() -> None:
    """Old logits moved by 370 %, and `compare` once said 0.00 %."""
    torch.manual_seed(0)
    model, old = TiedLanguageModel().eval(), torch.randint(0, 6, (60, 5))
    guard = ness.NullSpace(model, exclude=["embed", "head"])
    guard.observe(old)
    before = model(old).detach()
    guard.constrain()
    assert guard.unprotected == {"embed.weight": 1600}
    optimizer = torch.optim.AdamW([model.embed.weight], lr=1.0)
    for _ in range(20):
        optimizer.zero_grad()
        (model(old) - 30).square().mean().backward()
        optimizer.step()
    real = float((model(old).detach() - before).norm() / before.norm())
    assert real > 3.0
    assert guard.certificate().holds  # every layer is within its bounds, and says so no further
    assert guard.compare(old).relative_change == pytest.approx(real, rel=1e-4)
    assert "trainable and unprotected: 1,600 of the model's" in str(guard.certificate())
    guard.merge()
    assert guard.compare(old).relative_change == pytest.approx(real, rel=1e-4)


@pytest.mark.parametrize("include", [["head"], ["embed"], ["fc", "head"], ["fc", "embed"]])
def test_including_a_tied_module_by_name_is_refused_with_the_way_out(include: list[str]) -> None:
    with pytest.raises(ness.NessError, match=f"include names '{include[-1]}', which shares a parameter with") as error:
        ness.NullSpace(Tied(), include=include)
    assert f"Leave '{include[-1]}' out of include, and both stay frozen" in str(error.value)
    assert "exclude" not in str(error.value)


def test_a_pattern_that_means_a_tied_module_among_others_leaves_it_frozen() -> None:
    guard = ness.NullSpace(Tied(), include=["*"])
    assert guard.layers == ("fc",)
    assert set(guard.skipped) == {"embed", "head"}


def test_layers_that_share_a_weight_but_not_a_bias_stay_frozen() -> None:
    model = named(a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))
    model.b.weight = model.a.weight
    guard = ness.NullSpace(model, rule=ness.Rank(2))
    assert guard.layers == ("c",)
    assert set(guard.skipped) == {"a", "b"}
    guard.observe(torch.randn(30, 4))
    guard.constrain()
    assert trained(model) == {"c.ness_weight"}
    with pytest.raises(ness.NessError, match=r"nothing to protect: .*a: its weight is also that of 'b'"):
        ness.NullSpace(model, exclude="c")


def test_layers_that_share_all_are_one_and_including_one_of_them_says_so() -> None:
    model = named(a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))
    model.b.weight, model.b.bias = model.a.weight, model.a.bias
    assert ness.NullSpace(model).layers == ("a", "c")
    assert ness.NullSpace(model, include=["a", "b"]).layers == ("a",)
    for alone in ("a", "b"):
        with pytest.raises(ness.NessError, match="include both where they are layers of one kind"):
            ness.NullSpace(model, include=[alone])


def test_a_bias_that_others_read_is_tied_too() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.decoder = nn.Linear(6, 6), nn.Linear(6, 9)
            self.bias = self.decoder.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.fc(x)) + self.bias

    guard = ness.NullSpace(Decoder())
    assert guard.layers == ("fc",)
    assert guard.skipped["decoder"].startswith("its bias is also that of '(model)' (Decoder)")


def test_parameters_that_share_their_numbers_are_tied() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    assert model.head.weight is not model.embed.weight
    guard = ness.NullSpace(model)
    assert guard.layers == ("fc",)
    assert "tied" in guard.skipped["head"]
    with pytest.raises(ness.NessError, match="is the same parameter and is not"):
        ness.NullSpace(model, exclude="head")
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())  # untied, as the message says
    assert ness.NullSpace(model).layers == ("fc", "head")


def test_a_tied_model_on_the_meta_device_is_taken_apart_alike() -> None:
    with torch.device("meta"):
        model = Tied()
    assert ness.NullSpace(model).layers == ("fc",)


# -- what is refused, or not a layer --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("kind", [lambda t: nn.Linear(8, 4, dtype=t), lambda t: nn.Conv1d(8, 4, 3, dtype=t)])
def test_complex_layers_are_refused(kind: object, dtype: torch.dtype) -> None:
    model = named(real=nn.Linear(8, 8), a=kind(dtype))  # type: ignore[operator]
    with pytest.raises(ness.NessError, match=f"layer 'a' is {dtype}: expected real weights.*include="):
        ness.NullSpace(model)
    guard = ness.NullSpace(model, include=["real"])
    assert guard.skipped == {"a": "not in include"}
    assert ness.NullSpace(model, exclude=["a"]).layers == ("real",)


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_a_model_that_becomes_complex_later_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    guard = ness.NullSpace(model, rule=ness.Rank(2))
    guard.observe(torch.randn(30, 8))
    model.to(torch.complex64)
    for verb in (lambda: guard.observe(torch.randn(3, 8, dtype=torch.complex64)), guard.constrain):
        with pytest.raises(ness.NessError, match=r"layer '0' is torch.complex64: expected real weights"):
            verb()
    assert guard.grams["0"].count == 30


@pytest.mark.filterwarnings("ignore:Complex modules", "ignore:Casting complex")
@pytest.mark.parametrize("form", ["any", "sgd"])
def test_a_constrained_model_that_becomes_complex_is_neither_certified_nor_merged(form: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    guard = ness.NullSpace(model, rule=ness.Rank(2))
    guard.observe(torch.randn(30, 8))
    guard.constrain(form=form)
    model.to(torch.complex64)
    for verb in (guard.certificate, guard.merge):
        with pytest.raises(ness.NessError, match=r"layer '0' is torch.complex64: expected the real weights"):
            verb()
    assert guard.constrained
    guard.discard()
    with pytest.raises(ness.NessError, match=r"layer '0' is torch.complex64: expected"):
        guard.certificate()


def test_weights_of_a_dtype_that_cannot_be_trained_stay_frozen() -> None:
    model = named(a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.a.weight = nn.Parameter(model.a.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    guard = ness.NullSpace(model)
    assert guard.layers == ("b",)
    assert guard.skipped == {"a": "its weight is torch.float8_e4m3fn, which is no dtype that can be trained"}


class LoraLinear(nn.Module):
    """What PEFT puts in a Linear's place."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})


class PeftModel(nn.Module):
    """What PEFT puts around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model


class PeftModelForAnything(PeftModel):
    pass


@pytest.mark.parametrize("kind", [PeftModel, PeftModelForAnything])
def test_a_peft_model_is_refused_by_name(kind: type[PeftModel]) -> None:
    model = kind(named(a=nn.Linear(4, 4)))
    with pytest.raises(ness.NessError, match=rf"found a {kind.__name__}, .*merge_and_unload\(\).*constrain\(rank="):
        ness.NullSpace(model)


def test_adapters_inside_a_model_are_refused_unless_they_are_excluded() -> None:
    model = named(a=nn.Linear(4, 4), b=LoraLinear(nn.Linear(4, 4)))
    with pytest.raises(ness.NessError, match=r"found 'b' \(LoraLinear\), which trains a PEFT adapter"):
        ness.NullSpace(model)
    assert ness.NullSpace(model, exclude="b").layers == ("a",)


def test_adapters_that_come_later_are_refused() -> None:
    model = named(a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    guard = ness.NullSpace(model)
    model.b = LoraLinear(model.b)
    with pytest.raises(ness.NessError, match=r"found 'b' \(LoraLinear\)"):
        guard.observe(torch.randn(9, 4))
