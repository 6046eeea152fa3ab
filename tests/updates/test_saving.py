"""State dicts of a constrained model: a plain model computes the same, the constrained one takes its updates back."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

import ness
from helpers import OPTIMIZERS, ZOO, layers, low_rank, named, train
from ness.updates.loading import check

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")

FORMS: dict[str, dict[str, Any]] = {
    "any": {},
    "sgd": {"form": "sgd"},
    "limited": {"max_drift": 0.05},
    "private": {"task": "new", "private": 2},
    "low rank": {"rank": 2},
    "low rank, limited and private": {"rank": 2, "max_drift": 0.05, "task": "new", "private": 1},
}
BASES = ("weight", "bias", "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def made(name: str = "mlp", seed: int = 0, **options: Any) -> tuple[nn.Module, ness.NullSpace, Tensor]:
    """The same model and guard every time, constrained and trained a little."""
    torch.manual_seed(seed)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.02), exclude=["head"])
    guard.observe(old)
    guard.constrain(**options)
    return model.eval(), guard, new


def trained(name: str = "mlp", seed: int = 0, **options: Any) -> tuple[nn.Module, ness.NullSpace, Tensor]:
    model, guard, new = made(name, seed, **options)
    train(model, optimizer_of(guard, options), new, steps=3)
    return model, guard, new


def optimizer_of(guard: ness.NullSpace, options: dict[str, Any]) -> torch.optim.Optimizer:
    return OPTIMIZERS["momentum" if options.get("form") == "sgd" else "adamw"](guard.parameters())


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """All parameters as they are stored, and buffers."""
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(x)


def refused(model: nn.Module, state: dict[str, Any], match: str, strict: bool = False) -> None:
    """Loading is a NessError, and changes nothing."""
    before = snapshot(model)
    with pytest.raises(ness.NessError, match=match) as caught:
        model.load_state_dict(state, strict=strict)
    assert "Nothing was changed" in str(caught.value)
    assert equal(snapshot(model), before)


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("form", FORMS)
def test_a_plain_model_computes_what_was_saved(name: str, form: str) -> None:
    model, guard, new = trained(name, **FORMS[form])
    expected, state = logits(model, new), model.state_dict()
    torch.manual_seed(0)
    plain = ZOO[name]()[0]
    keys = list(plain.state_dict())
    missed = plain.load_state_dict(state, strict=False)
    assert missed.missing_keys == []
    assert all(key.rpartition(".")[2].startswith("ness_") for key in missed.unexpected_keys)
    assert torch.allclose(logits(plain, new), expected, rtol=1e-4, atol=1e-5)
    assert [key for key in state if ".ness_" not in key] == keys
    guard.merge()
    assert list(model.state_dict()) == keys
    for key, value in model.state_dict().items():
        assert torch.allclose(value, state[key], rtol=1e-5, atol=1e-6), key


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("form", FORMS)
def test_loading_restores_updates_and_training_bit_for_bit(name: str, form: str) -> None:
    options = FORMS[form]
    model, guard, new = trained(name, **options)
    optimizer = optimizer_of(guard, options)
    train(model, optimizer, new, steps=2)
    state, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    stored, expected = snapshot(model), logits(model, new)
    torch.manual_seed(5)
    train(model, optimizer, new, steps=3)
    unbroken = snapshot(model)
    assert not equal(stored, unbroken)

    assert model.load_state_dict(state) == ([], [])  # strict: no key is missing, none is too many
    assert equal(snapshot(model), stored)
    assert torch.equal(logits(model, new), expected)

    other, again, _ = made(name, **options)  # as a new process would make it
    later = optimizer_of(again, options)
    assert other.load_state_dict(state) == ([], [])
    later.load_state_dict(moments)
    assert equal(snapshot(other), stored)
    assert torch.equal(logits(other, new), expected)
    torch.manual_seed(5)
    train(other, later, new, steps=3)
    assert equal(snapshot(other), unbroken)
    guard.discard()


@settings(max_examples=25, deadline=None)
@given(made=layers(), form=st.sampled_from(sorted(FORMS)), bias=st.sampled_from(["constrain", "freeze"]))
def test_any_layer_survives_the_round_trip(made: tuple[nn.Module, tuple[int, ...]], form: str, bias: Any) -> None:
    torch.manual_seed(3)
    layer, shape = made
    model, options = named(layer=layer, end=nn.Flatten()), dict(FORMS[form])
    guard = ness.NullSpace(model, rule=ness.Energy(0.5), bias=bias)
    guard.observe(torch.randn(40, *shape))
    if options.get("private", 0) and guard._found.layers["layer"].fan_in < 6:
        options["private"], options["task"] = 0, None
    guard.constrain(**options)
    with torch.no_grad():
        for p in guard.parameters():
            p.copy_(torch.randn_like(p) * 0.1)
    state, stored = model.state_dict(), snapshot(model)
    if not guard.parameters():
        return
    for p in guard.parameters():
        p.data.add_(1.0)
    model.load_state_dict(state)
    assert equal(snapshot(model), stored)
    x = torch.randn(4, *shape)
    expected = logits(model, x)
    guard.discard()
    model.load_state_dict(state, strict=False)
    assert torch.allclose(logits(model, x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("form", FORMS)
def test_a_base_that_was_changed_is_restored_bit_for_bit(name: str, form: str) -> None:
    """Whatever happens to the parameters: the state dict has all of the model."""
    model, guard, new = trained(name, **FORMS[form])
    state, stored, expected = copy.deepcopy(model.state_dict()), snapshot(model), logits(model, new)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        with torch.no_grad():
            for value in (*one.parameters(), *one.buffers()):
                value.copy_(torch.randn_like(value) if value.is_floating_point() else value + 1)
        one.load_state_dict(state)
        assert equal(snapshot(one), stored)
        assert torch.equal(logits(one, new), expected)
    assert guard.certificate().holds


@pytest.mark.parametrize("size", [1e-4, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_base_is_recovered_under_updates_of_any_size(size: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = named(fc=nn.Linear(64, 48)).to(dtype)
    guard = ness.NullSpace(model, rule=ness.Rank(40))
    guard.observe(torch.randn(100, 64).to(dtype))
    guard.constrain()
    (parameter,) = guard.parameters()
    parameter.data.normal_(std=0.01 * size)  # entries of ΔW are about 0.06 · size, those of W up to 0.125
    stored, state = snapshot(model), model.state_dict()
    model.fc._parameters["weight"].data.zero_()
    model.load_state_dict(state)
    assert equal(snapshot(model), stored)
    share = {1e-4: 0.01, 1.0: 0.4, 30.0: 1.4}[size]
    assert state["fc.ness_base"].nbytes < share * state["fc.weight"].nbytes + 100


def test_the_state_dict_is_of_one_moment() -> None:
    """Training on after `state_dict()` changes nothing in what it returned."""
    model, guard, new = trained()
    state, expected = model.state_dict(), snapshot(model)
    heads = {name: value.clone() for name, value in state.items() if name.startswith("head")}
    train(model, optimizer_of(guard, {}), new)
    model.load_state_dict({**state, **heads})
    assert equal(snapshot(model), expected)


def test_a_checkpoint_grows_by_the_updates_alone() -> None:
    model, guard, _ = trained()
    grown = sum(v.nbytes for v in model.state_dict().values())
    updates = sum(p.nbytes for name, p in model.named_parameters() if "ness_" in name)
    guard.discard()
    plain = sum(v.nbytes for v in model.state_dict().values())
    assert (
        plain + updates < grown <= (plain + updates) * 1.03 + 2 * 600
    )  # a large update here; 600 bytes of JSON a layer


class Tied(nn.Module):
    """Two layers with one weight, and a module that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias
        self.also_c = self.c
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.also_c(self.b(self.a(x).relu()).relu()))
        return out


@pytest.mark.parametrize("form", FORMS)
def test_tied_weights_are_saved_as_tied(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, old, new = Tied(), low_rank(80, 24), torch.randn(16, 24)
    plain = copy.deepcopy(model)
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.02), exclude="head")
    guard.observe(old)
    guard.constrain(**FORMS[form])
    train(model, optimizer_of(guard, FORMS[form]), new, steps=3)
    state, stored, expected = model.state_dict(), snapshot(model), logits(model, new)
    for one, two in (("a.weight", "b.weight"), ("a.bias", "b.bias"), ("c.weight", "also_c.weight")):
        assert state[one].data_ptr() == state[two].data_ptr()
    assert {key.split(".")[0] for key in state if ".ness_" in key} == {"a", "c"}  # once, so that files can hold them
    plain.load_state_dict(state, strict=False)
    assert torch.allclose(logits(plain, new), expected, atol=1e-5)
    train(model, optimizer_of(guard, FORMS[form]), new, steps=1)
    assert model.load_state_dict(copy.deepcopy(state))[1] == []
    body = [{k: v for k, v in values.items() if "head" not in k} for values in (snapshot(model), stored)]
    assert equal(*body)
    single = {key: value for key, value in copy.deepcopy(state).items() if not key.startswith(("b.", "also_c."))}
    assert set(model.load_state_dict(single, strict=False).missing_keys) == {
        "b.weight", "b.bias", "also_c.weight", "also_c.bias",
    }  # fmt: skip
    save_model(model, str(tmp_path / "model.safetensors"))  # which drops names of tied weights as it likes
    before = snapshot(model)
    for p in model.parameters():
        p.data.mul_(0.5)
    assert load_model(model, tmp_path / "model.safetensors") == (set(), [])
    assert equal(snapshot(model), before)
    part = model.b.state_dict()  # alone it has the updates under its own name
    assert {"weight", "bias", "ness_weight", "ness_about", "ness_base"} <= part.keys()
    model.b.load_state_dict(part)


def test_foreign_weights_are_refused_naming_what_is_missing() -> None:
    model, guard, _ = trained()
    foreign = ZOO["mlp"]()[0].state_dict()
    refused(
        model,
        foreign,
        r"missing trunk\.0\.ness_weight, trunk\.0\.ness_about, trunk\.0\.ness_base, trunk\.2\.ness_weight",
    )
    refused(model, foreign, r"call merge\(\) or discard\(\) first", strict=True)
    head = {key: value + 1 for key, value in foreign.items() if key.startswith("head")}
    model.load_state_dict(head, strict=False)  # nothing of a constrained layer
    assert torch.equal(model.head.weight, head["head.weight"])
    guard.merge()
    model.load_state_dict(foreign)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"form": "sgd"}, "saved with form sgd, here it is any"),
        ({"rank": 2}, "saved with rank 2|not of the layers"),
        ({"max_drift": 0.5}, "saved with a max_drift"),
        ({"task": "new", "private": 2}, "rank|private directions 2, here it is 0"),
    ],
)
def test_updates_of_another_kind_are_refused(options: dict[str, Any], match: str) -> None:
    model, _, _ = trained()
    refused(model, trained(**options)[0].state_dict(), match)


def other_guard(rule: ness.Rule, exclude: list[str], seed: int = 0, rows: int = 300) -> nn.Module:
    torch.manual_seed(seed)
    model = ZOO["mlp"]()[0]
    torch.manual_seed(seed + 1)
    guard = ness.NullSpace(model, rule=rule, exclude=["head", *exclude])
    guard.observe(low_rank(rows, 64))
    guard.constrain()
    return model


def test_another_rank_layer_set_base_or_direction_is_refused() -> None:
    model = other_guard(ness.Rank(20), [])
    refused(model, other_guard(ness.Rank(19), []).state_dict(), "saved with rank 19, here it is 20")
    missing = r"missing trunk\.2\.ness_weight, trunk\.2\.ness_about, trunk\.2\.ness_base"
    refused(model, other_guard(ness.Rank(20), ["trunk.2"]).state_dict(), missing)
    fewer = other_guard(ness.Rank(20), ["trunk.2"])
    refused(
        fewer,
        model.state_dict(),
        r"not of this model: trunk\.2\.ness_about, trunk\.2\.ness_base, trunk\.2\.ness_weight",
    )
    refused(model, other_guard(ness.Rank(20), [], rows=200).state_dict(), "other free directions")
    base = other_guard(ness.Rank(20), [])
    base.trunk[2]._parameters["bias"].data += 1e-3  # type: ignore[union-attr]
    refused(model, base.state_dict(), r"layer 'trunk\.2': under the update is not what it was trained on: bias \(found")


def changed(key: str, value: Callable[[Tensor], Any]) -> dict[str, Any]:
    state = trained()[0].state_dict()
    state[key] = value(state[key])
    return state


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("trunk.2.ness_weight", lambda t: t[..., :-1], "is .* expected"),
        ("trunk.2.ness_weight", lambda t: t.half(), "torch.float16.*expected.*torch.float32"),
        ("trunk.2.ness_weight", lambda t: t.tolist(), "is list, expected"),
        ("trunk.2.ness_weight", lambda t: t * 1.1, "not the base with the saved update"),
        ("trunk.2.weight", lambda t: t * 1.01, r"trunk\.2\.weight is not the base with the saved update"),
        ("trunk.2.bias", lambda t: t * float("nan"), "not the base with the saved update"),
        ("trunk.2.weight", lambda t: t[:-1], "not the base with the saved update"),
        ("trunk.2.ness_about", lambda t: t[:-2], r"trunk\.2\.ness_about is damaged"),
        ("trunk.2.ness_about", lambda t: t * 0, r"trunk\.2\.ness_about is damaged"),
        ("trunk.2.ness_about", lambda t: None, r"trunk\.2\.ness_about is damaged"),
    ],
)
def test_loading_is_all_or_nothing(key: str, value: Callable[[Tensor], Any], match: str) -> None:
    """What is wrong is in the last layer; the first is untouched."""
    model, _, _ = trained(seed=0)
    for p in model.parameters():
        p.data.mul_(1.0 if p.ndim < 3 else 0.5)  # so that loading anything would show
    before = snapshot(model)
    with pytest.raises(ness.NessError, match=match):
        model.load_state_dict(changed(key, value), strict=False)
    assert equal(snapshot(model), before)


def test_a_part_of_the_model_is_loaded_whole_or_not_at_all() -> None:
    model, _, _ = trained()
    state, before = model.trunk.state_dict(), snapshot(model)
    with torch.no_grad():
        for p in model.trunk.parameters():
            if p.requires_grad:
                p.mul_(2)
    doubled = snapshot(model)
    broken = {key: value for key, value in state.items() if key != "2.ness_weight"}
    with pytest.raises(ness.NessError, match=r"missing 2\.ness_weight"):
        model.trunk.load_state_dict(broken, strict=False)
    assert equal(snapshot(model), doubled)
    wrapper = named(inner=model.trunk)
    with pytest.raises(ness.NessError, match=r"missing inner\.2\.ness_weight"):
        wrapper.load_state_dict({f"inner.{key}": value for key, value in broken.items()}, strict=False)
    assert equal(snapshot(model), doubled)
    model.trunk[0].load_state_dict({key[2:]: value for key, value in state.items() if key.startswith("0.")})
    wrapper.load_state_dict({f"inner.{key}": value for key, value in state.items()})
    assert equal(snapshot(model), before)


def test_assign_keeps_the_parameters_that_are_trained() -> None:
    model, guard, new = trained()
    state, parameters = copy.deepcopy(model.state_dict()), {id(p) for p in guard.parameters() if p.ndim == 3}
    before = logits(model, new)
    train(model, optimizer_of(guard, {}), new, steps=1)
    model.load_state_dict(state, assign=True)
    assert torch.equal(logits(model, new), before)
    assert {id(p) for p in guard.parameters() if p.ndim == 3} == parameters


@pytest.mark.parametrize("name", ["mlp", "gpt2", "transformer"])
def test_files_hold_it(name: str, tmp_path: Path) -> None:
    """torch.save (read with weights_only) and safetensors, which takes contiguous tensors without shared memory."""
    model, guard, new = trained(name)
    stored, expected = snapshot(model), logits(model, new)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for read in (lambda: torch.load(tmp_path / "model.pt"), lambda: load_file(tmp_path / "model.safetensors")):
        train(model, optimizer_of(guard, {}), new, steps=1)
        model.load_state_dict(read())
        assert equal(snapshot(model), stored)
        assert torch.equal(logits(model, new), expected)


def test_copies_load_into_each_other_and_leave_nothing_behind() -> None:
    model, guard, new = trained("resnet")
    twin, guard_of_twin = copy.deepcopy((model, guard))
    alone = copy.deepcopy(model)
    expected = logits(model, new)
    train(twin, optimizer_of(guard_of_twin, {}), new)
    assert not torch.equal(logits(twin, new), expected)
    for one in (twin, alone):
        one.load_state_dict(copy.deepcopy(model.state_dict()))
        assert torch.equal(logits(one, new), expected)
        broken = {key: value for key, value in model.state_dict().items() if key != "conv2.ness_weight"}
        refused(one, broken, r"missing conv2\.ness_weight")
    assert any(module._load_state_dict_pre_hooks for module in twin.modules())
    guard_of_twin.merge()
    guard.discard()
    for one in (model, twin):
        assert not any(module._load_state_dict_pre_hooks for module in one.modules())
    one, again = made("resnet")[:2]
    assert all(hook.hook is check for m in one.modules() for hook in m._load_state_dict_pre_hooks.values())
    again.merge()


def test_norms_of_a_task_are_restored_too() -> None:
    torch.manual_seed(0)
    model, old, new = ZOO["resnet"]()
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.02), exclude=["head"], norm="per_task")
    guard.observe(old)
    guard.constrain(task="new")
    train(model, optimizer_of(guard, {}), new, steps=2)
    state, stored = copy.deepcopy(model.state_dict()), snapshot(model)
    train(model, optimizer_of(guard, {}), new, steps=2)
    model.load_state_dict(state)
    assert equal(snapshot(model), stored)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = named(fc=nn.Linear(32, 16), head=nn.Linear(16, 2)).to(dtype)
    plain, new = copy.deepcopy(model), torch.randn(8, 32).to(dtype)
    guard = ness.NullSpace(model, exclude="head")
    guard.observe(low_rank(100, 32).to(dtype))
    guard.constrain()
    train(model, optimizer_of(guard, {}), new, steps=3)
    state, stored, expected = copy.deepcopy(model.state_dict()), snapshot(model), logits(model, new)
    assert state["fc.weight"].dtype == dtype
    plain.load_state_dict(state, strict=False)
    assert torch.allclose(logits(plain, new), expected, atol=20 * torch.finfo(dtype).eps)
    train(model, optimizer_of(guard, {}), new, steps=1)
    model.load_state_dict(state)
    assert equal(snapshot(model), stored)
    if dtype == torch.bfloat16:
        cast = {key: value.float() if value.is_floating_point() else value for key, value in state.items()}
        model.load_state_dict(cast)  # the plain keys are only looked at; the updates are float32 anyway
        assert equal(snapshot(model), stored)
        model.float()
        refused(model, state, r"under the update is not what it was trained on: weight \(found torch\.float32")


@pytest.mark.parametrize(("size", "warns"), [(1e-4, True), (1.0, False)])
def test_updates_that_half_precision_cannot_hold_are_said_when_saving(size: float, warns: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).bfloat16()
    guard = ness.NullSpace(model, rule=ness.Rank(2))
    guard.observe(torch.randn(40, 8).bfloat16())
    guard.constrain()
    with torch.no_grad():
        for parameter in guard.parameters():
            parameter.normal_().mul_(size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            saved = model.state_dict()
    said = [str(one.message) for one in caught if "state_dict: rounding" in str(one.message)]
    assert len(said) == warns
    assert all("torch.bfloat16 takes more than 5% of an update" in text for text in said)
    trained = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "ness_" in name}
    with torch.no_grad():
        for parameter in guard.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in trained.items())


def test_keep_vars_gives_the_parameters_and_weights_with_a_gradient() -> None:
    model, guard, _ = trained()
    state = model.state_dict(keep_vars=True)
    assert state["trunk.0.ness_weight"] is dict(model.named_parameters())["trunk.0.ness_weight"]
    state["trunk.0.weight"].sum().backward()
    assert guard.parameters()[0].grad is not None
    assert list(state) == list(model.state_dict())


def test_every_key_is_an_attribute() -> None:
    """torch.distributed.checkpoint looks each key up."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, _, new = trained()
    state, expected = copy.deepcopy(get_model_state_dict(model)), logits(model, new)
    assert state.keys() == model.state_dict().keys()
    for p in model.parameters():
        p.data.mul_(0.5 if p.requires_grad else 1)
    assert not torch.equal(logits(model, new), expected)
    set_model_state_dict(model, state)
    assert torch.equal(logits(model, new), expected)


def test_a_guard_is_taken_up_from_its_folder_and_a_state_dict(tmp_path: Path) -> None:
    """What a new process needs: the saved guard, and the state dict of that moment in a plain model."""
    model, guard, new = trained("transformer")
    guard.save(tmp_path / "guard")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state, stored = torch.load(buffer), snapshot(model)
    torch.manual_seed(9)
    other = ZOO["transformer"]()[0]
    other.load_state_dict(state, strict=False)
    again = ness.NullSpace.load(tmp_path / "guard", other)
    assert again.constrained
    assert equal(snapshot(other), stored)  # the base too
    assert other.load_state_dict(state) == ([], [])
    assert torch.equal(logits(other, new), logits(model, new))
    wrong = ZOO["transformer"]()[0]
    with pytest.raises(ness.NessError, match="the model changed between save and load"):
        ness.NullSpace.load(tmp_path / "guard", wrong)
