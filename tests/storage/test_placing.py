"""A guard of a body loads for the model around it and back, and for a copy in another dtype."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import low_rank, named, train
from ness.storage import manifest as manifests
from ness.storage.folder import MANIFEST
from ness.storage.placing import outside

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


class Body(nn.Module):
    """An encoder in small: an embedding, two layers, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 12), nn.LayerNorm(12)
        self.blocks = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)])

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.embed(tokens))
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return h


class Classifier(nn.Module):
    """A body and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.bert, self.classifier = body, nn.Linear(12, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.bert(tokens).mean(1)) * self.scale


class LanguageModel(nn.Module):
    """A body, a transform of its own, and a head that is tied to the body's embedding."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.model, self.cls = body, nn.ModuleDict({"dense": nn.Linear(12, 12), "decoder": nn.Linear(12, 20)})
        self.cls.decoder.weight = body.embed.weight  # type: ignore[union-attr]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.cls["decoder"](self.cls["dense"](self.model(tokens)))


OLD = torch.randint(0, 6, (60, 5), generator=torch.Generator().manual_seed(0))


def guarded(**options: object) -> tuple[Body, ness.NullSpace]:
    torch.manual_seed(0)
    body = Body()
    guard = ness.NullSpace(body, **{"rule": ness.Rank(5), **options})  # type: ignore[arg-type]
    guard.observe(OLD)
    return body, guard


def test_a_guard_of_the_body_loads_for_the_classifier_around_it(tmp_path: Path) -> None:
    body, guard = guarded()
    guard.save(tmp_path)
    model = Classifier(copy.deepcopy(body))
    again = ness.NullSpace.load(tmp_path, model)
    assert again.layers == ("bert.blocks.0", "bert.blocks.1")
    for name, gram in guard.grams.items():
        assert torch.equal(again.grams[f"bert.{name}"].matrix, gram.matrix)
    for mine, theirs in zip(again.certificate(), guard.certificate(), strict=True):
        assert mine.name == f"bert.{theirs.name}"
        assert (mine.rank, mine.bound, mine.rms_drift) == (theirs.rank, theirs.bound, theirs.rms_drift)
    assert set(again.exclude) == {"classifier", "scale"}
    again.constrain()
    assert again.unprotected == {"scale": 3, "classifier.weight": 36, "classifier.bias": 3}
    before = model.bert(OLD).detach()
    train(model, torch.optim.AdamW(again.parameters(), lr=1e-2), torch.randint(6, 20, (16, 5)))
    assert again.certificate().holds
    again.merge()
    moved = float((model.bert(OLD) - before).norm().detach() / before.norm())
    assert 0 < moved < 0.5
    again.observe(OLD)  # and goes on like any other
    again.save(tmp_path / "more")
    ness.NullSpace.load(tmp_path / "more", model)


def test_what_compare_knows_of_the_body_goes_along(tmp_path: Path) -> None:
    body, guard = guarded()
    guard.save(tmp_path)
    model = Classifier(copy.deepcopy(body))
    again = ness.NullSpace.load(tmp_path, model)
    with torch.no_grad():
        model.bert.embed.weight[0] += 1  # type: ignore[union-attr, operator, index]
    forward = lambda m, batch: m.bert(batch)  # noqa: E731
    real = float((model.bert(OLD) - body(OLD)).norm().detach() / body(OLD).norm().detach())
    comparison = again.compare([OLD], forward)
    assert comparison.relative_change == pytest.approx(real, rel=1e-4)
    assert set(comparison.not_counted) == {"classifier.weight", "classifier.bias", "scale"}


def test_a_body_whose_embedding_is_tied_outside_stays_frozen_there(tmp_path: Path) -> None:
    body, guard = guarded()
    guard.save(tmp_path)
    model = LanguageModel(copy.deepcopy(body))
    again = ness.NullSpace.load(tmp_path, model)
    assert again.layers == ("model.blocks.0", "model.blocks.1")
    again.constrain()
    assert again.unprotected == {"cls.dense.weight": 144, "cls.dense.bias": 12, "cls.decoder.bias": 20}
    again.merge()


def test_it_goes_back_from_the_classifier_to_the_body(tmp_path: Path) -> None:
    body, _ = guarded()
    model = Classifier(body)
    guard = ness.NullSpace(model, rule=ness.Rank(5), exclude=["classifier", "scale", "*.embed"])
    guard.observe(OLD)
    guard.save(tmp_path)
    again = ness.NullSpace.load(tmp_path, copy.deepcopy(body))
    assert again.layers == ("blocks.0", "blocks.1")
    assert again.exclude == ()
    assert again.certificate().to_dicts() == [
        {**row, "name": row["name"].removeprefix("bert.")} for row in guard.certificate().to_dicts()
    ]


def test_tasks_with_norms_and_private_parts_of_their_own_go_along(tmp_path: Path) -> None:
    body, guard = guarded(norm="per_task", rule=ness.Within(0.3))
    guard.constrain(task="b", private=2)
    train(body, torch.optim.AdamW(guard.parameters(), lr=1e-2), torch.randint(6, 20, (16, 5)))
    guard.merge()
    guard.observe(torch.randint(6, 20, (40, 5)))
    guard.save(tmp_path)
    model = Classifier(copy.deepcopy(body))
    again = ness.NullSpace.load(tmp_path, model)
    assert again.tasks == guard.tasks
    for task in ("first", "b", "first"):
        guard.use(task)
        again.use(task)
        assert torch.equal(model.bert(OLD), body(OLD))
    again.constrain(task="c", private=2)
    again.merge()


def test_layers_that_share_a_gram_share_it_in_the_larger_model_too(tmp_path: Path) -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) * self.k(x)

    torch.manual_seed(0)
    body = Projections()
    guard = ness.NullSpace(body, rule=ness.Rank(3))
    guard.observe(torch.randn(30, 8))
    assert guard._protected["q"].moments.gram is guard._protected["k"].moments.gram
    guard.save(tmp_path)
    again = ness.NullSpace.load(tmp_path, named(body=body, head=nn.Linear(8, 2)))
    states = again._protected
    assert states["body.q"].moments.gram is states["body.k"].moments.gram
    assert torch.equal(again.grams["body.q"].matrix, guard.grams["q"].matrix)


def test_a_task_in_training_goes_along(tmp_path: Path) -> None:
    body, guard = guarded()
    guard.constrain()
    start = copy.deepcopy(body)
    train(body, torch.optim.AdamW(guard.parameters(), lr=1e-2), torch.randint(6, 20, (16, 5)))
    guard.save(tmp_path)
    expected = body(OLD).detach()
    guard.discard()
    assert start is not body
    model = Classifier(copy.deepcopy(body))
    again = ness.NullSpace.load(tmp_path, model)
    assert again.constrained
    assert torch.equal(model.bert(OLD), expected)
    again.merge()


def test_a_guard_of_a_single_layer_loads_for_a_model_of_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    guard = ness.NullSpace(layer, rule=ness.Rank(3))
    guard.observe(torch.randn(30, 8))
    guard.save(tmp_path)
    again = ness.NullSpace.load(tmp_path, named(act=nn.ReLU(), fc=layer, head=nn.Linear(8, 2)))
    assert again.layers == ("fc",)
    again.constrain()
    assert set(again.unprotected) == {"head.weight", "head.bias"}


class Two(nn.Module):
    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b


def test_of_two_parts_that_fit_the_one_with_its_weights_is_taken(tmp_path: Path) -> None:
    body, guard = guarded()
    guard.save(tmp_path)
    again = ness.NullSpace.load(tmp_path, Two(Body(), copy.deepcopy(body)))
    assert again.layers == ("b.blocks.0", "b.blocks.1")
    assert again.exclude == ("a",)
    both = Two(copy.deepcopy(body), copy.deepcopy(body))
    with pytest.raises(
        ness.NessError, match=r"fits 'a', 'b' alike.*NullSpace.load\(folder, model.get_submodule\('a'\)\)"
    ):
        ness.NullSpace.load(tmp_path, both)
    assert ness.NullSpace.load(tmp_path, both.get_submodule("a")).layers == guard.layers


def test_another_model_is_said_to_be_another(tmp_path: Path) -> None:
    _, guard = guarded()
    guard.save(tmp_path)
    with pytest.raises(ness.NessError, match=r"protects 'blocks.0', which this model has neither under this name nor"):
        ness.NullSpace.load(tmp_path, named(fc=nn.Linear(12, 12)))
    changed = Classifier(Body())
    with pytest.raises(ness.NessError, match=r"the weights of layer 'bert.blocks.0' are not those it was saved with"):
        ness.NullSpace.load(tmp_path, changed)
    assert all(parameter.requires_grad for parameter in changed.parameters())


@pytest.mark.parametrize("gone", [0, 2])
def test_a_body_that_lacks_a_layer_is_named(gone: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = named(a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8))
    guard = ness.NullSpace(body, rule=ness.Rank(3))
    guard.observe(torch.randn(30, 8))
    guard.save(tmp_path)
    name = "abc"[gone]
    delattr(body, name)
    with pytest.raises(ness.NessError, match=f"'body' has its layers, but not {name}, or of another shape. Load it"):
        ness.NullSpace.load(tmp_path, named(body=body, head=nn.Linear(8, 2)))


@pytest.mark.parametrize("part", ["body", "a.body"])
def test_what_is_outside_is_named_by_its_topmost_modules(part: str) -> None:
    body = nn.Linear(2, 2)
    inner = nn.ModuleDict({"body": body, "beside": nn.Linear(2, 2)})
    model = inner if part == "body" else nn.ModuleDict({"a": inner, "b": nn.Sequential(nn.Linear(2, 2))})
    expected = {"body": ["beside"], "a.body": ["a.beside", "b"]}
    assert outside(model, part) == expected[part]


# -- another dtype --------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return named(a=nn.Linear(16, 24), act=nn.Tanh(), b=nn.Linear(24, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_guard_loads_for_a_copy_in_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = mlp(), low_rank(80, 16, rank=4)
    guard = ness.NullSpace(model, rule=ness.Nuclear(1e-2))
    guard.observe(x)
    guard.save(tmp_path)
    rounded = copy.deepcopy(model).to(dtype)
    again = ness.NullSpace.load(tmp_path, rounded)
    row = again.certificate()["a"]
    change = rounded.a.weight.double() - model.a.weight.double()  # type: ignore[union-attr, operator]
    shift = rounded.a.bias.double() - model.a.bias.double()  # type: ignore[union-attr, operator]
    real = float((x.double() @ change.mT + shift).square().sum(-1).mean().sqrt().detach())
    assert row.rms_drift == pytest.approx(real, rel=1e-6, abs=1e-12)  # what rounding has moved is counted
    assert (real > 0) == (dtype != torch.float64)
    assert again.certificate().holds
    again.constrain()
    train(rounded, torch.optim.AdamW(again.parameters(), lr=1e-2), torch.randn(30, 16, dtype=dtype))
    again.merge()
    assert again.certificate().holds, str(again.certificate())
    change = rounded.a.weight.double() - model.a.weight.double()  # type: ignore[union-attr, operator]
    shift = rounded.a.bias.double() - model.a.bias.double()  # type: ignore[union-attr, operator]
    real = float((x.double() @ change.mT + shift).square().sum(-1).mean().sqrt().detach())
    assert again.certificate()["a"].rms_drift == pytest.approx(real, rel=1e-6, abs=1e-7)
    again.save(tmp_path / "rounded")
    last = ness.NullSpace.load(tmp_path / "rounded", rounded)
    assert last.certificate().to_dicts() == again.certificate().to_dicts()


def test_a_body_in_bfloat16_inside_a_classifier(tmp_path: Path) -> None:
    body, guard = guarded()
    guard.save(tmp_path)
    again = ness.NullSpace.load(tmp_path, Classifier(copy.deepcopy(body)).bfloat16())
    assert again.layers == ("bert.blocks.0", "bert.blocks.1")
    assert again.certificate().holds
    again.constrain()
    again.merge()


def test_another_model_in_another_dtype_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    guard = ness.NullSpace(model, rule=ness.Rank(5))
    guard.observe(torch.randn(60, 16))
    guard.save(tmp_path)
    other = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        other.b.weight[0, 0] += 1  # type: ignore[union-attr, operator, index]
    with pytest.raises(ness.NessError, match=r"layer 'b' are not those it was saved with, rounded to torch.bfloat16"):
        ness.NullSpace.load(tmp_path, other)


@pytest.mark.parametrize("moment", ["constrained", "merged"])
def test_weights_that_have_moved_load_in_their_own_dtype_and_are_converted_then(moment: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = mlp(), low_rank(80, 16, rank=4)
    guard = ness.NullSpace(model, rule=ness.Rank(5))
    guard.observe(x)
    guard.constrain()
    train(model, torch.optim.AdamW(guard.parameters(), lr=1e-2), torch.randn(30, 16))
    if moment == "merged":
        guard.merge()
    guard.save(tmp_path)
    if moment == "constrained":
        guard.discard()
    rounded = copy.deepcopy(model).bfloat16()
    with pytest.raises(ness.NessError, match=r"layer 'a' is torch.bfloat16.*Load it for the model in torch.float32"):
        ness.NullSpace.load(tmp_path, rounded)
    again = ness.NullSpace.load(tmp_path, model)  # as the message says
    if moment == "constrained":
        again.merge()
    model.to(torch.bfloat16)
    assert again.certificate().holds
    again.observe(x.bfloat16())
    again.constrain()
    again.merge()
    again.save(tmp_path)
    assert ness.NullSpace.load(tmp_path, model).certificate().to_dicts() == again.certificate().to_dicts()


# -- entries that are gone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True], ids=["as edited", "signed anew"])
def test_a_manifest_from_which_a_layer_was_deleted_is_refused(signed: bool, tmp_path: Path) -> None:
    """Its certificate once listed the other layers, all within their bounds, and nothing as skipped."""
    model = mlp()
    guard = ness.NullSpace(model, rule=ness.Rank(5))
    guard.observe(torch.randn(60, 16))
    guard.save(tmp_path)
    path = tmp_path / MANIFEST
    edited = json.loads(path.read_text())
    del edited["layers"]["b"]
    if signed:
        del edited["sha256"]
        path.write_bytes(manifests.encode(edited, path))
    else:
        path.write_text(json.dumps(edited))
    with pytest.raises(ness.NessError, match="damaged"):
        ness.NullSpace.load(tmp_path, model)


@pytest.mark.parametrize("what", ["layer", "rest", "private", "norms"])
def test_state_that_does_not_list_what_it_holds_is_refused(what: str) -> None:
    body, guard = guarded(norm="per_task", exclude=["embed"])
    guard.constrain(task="b", private=2)
    guard.merge()
    with torch.no_grad():
        body.embed.weight += 1
    tensors, manifest = guard.state()
    fresh = ness.NullSpace(body, rule=ness.Rank(5), norm="per_task", exclude=["embed"])
    if what == "layer":
        del manifest["layers"]["blocks.1"]
        manifest["tasks"]["private"] = {"b": {"blocks.0": 2}}
    elif what == "rest":
        manifest["rest"]["entries"] = []
    elif what == "private":
        manifest["tasks"]["private"] = {}
    else:
        manifest["tasks"]["names"] = ["first"]
    unlisted = r"damaged: (it holds '.*', which its manifest does not list|tasks: one .* not among \['first'\])"
    with pytest.raises(ness.NessError, match=unlisted):
        fresh.load_state(tensors, manifest)
    assert fresh.grams == {}
