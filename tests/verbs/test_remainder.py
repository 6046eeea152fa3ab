"""The comparison is of the whole model: what no protected layer holds counts as well, and survives saving."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import named
from ness.verbs.remainder import Remainder, fetch, same_bits, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


class Whole(nn.Module):
    """An embedding, two layers, a norm with statistics, a bare parameter, a buffer, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(30, 12)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.scale = nn.Parameter(torch.ones(12))
        self.register_buffer("shift", torch.zeros(12))
        self.register_buffer("hidden", torch.ones(12), persistent=False)
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.wte(tokens).mean(1)))
        h = self.norm(self.second(h) * self.scale * self.hidden + self.shift)
        return self.head(h)


def observed(**options: object) -> tuple[Whole, ness.NullSpace, Tensor]:
    torch.manual_seed(0)
    model, tokens = Whole(), torch.randint(0, 8, (60, 4))
    guard = ness.NullSpace(model, rule=ness.Rank(4), **{"exclude": ["head"], **options})  # type: ignore[arg-type]
    guard.observe(tokens)
    return model, guard, tokens


def true_change(model: nn.Module, then: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        a, b = copy.deepcopy(model).eval()(x).double(), then.eval()(x).double()
    return float((a - b).norm() / b.norm())


def _write(name: str) -> Callable[[Whole], None]:
    def write(model: Whole) -> None:
        with torch.no_grad():
            tensor = dict(tensors_of(model))[name]
            tensor.add_(torch.randn(tensor.shape))

    return write


def _statistics(model: Whole) -> None:
    model.train()
    model(torch.randint(0, 30, (50, 4)))


def _behind(model: Whole) -> None:
    model.head.weight.data.add_(1)  # past the version counter


def _replaced(model: Whole) -> None:
    model.head = nn.Linear(12, 3)


CHANGES: dict[str, Callable[[Whole], None]] = {
    "the excluded head": _write("head.weight"),
    "the embedding": _write("wte.weight"),
    "a norm": _write("norm.bias"),
    "running statistics": _statistics,
    "a bare parameter": _write("scale"),
    "a buffer": _write("shift"),
    "a buffer that is not saved": _write("hidden"),
    "past the version counter": _behind,
    "a protected layer": _write("second.weight"),
    "a module in place of another": _replaced,
}


@pytest.mark.parametrize("when", ["open", "constrained", "merged"])
@pytest.mark.parametrize("what", CHANGES)
def test_compare_counts_the_whole_model(what: str, when: str) -> None:
    model, guard, tokens = observed()
    then = copy.deepcopy(model)
    if when != "open" and what != "a module in place of another":
        guard.constrain()
        torch.nn.init.normal_(guard.parameters()[0], std=0.1)
        if when == "merged":
            guard.merge()
    if what == "running statistics":
        model.norm.__class__ = nn.BatchNorm1d
    CHANGES[what](model)
    before = {name: tensor.clone() for name, tensor in tensors_of(model)}
    versions = {name: tensor._version for name, tensor in tensors_of(model)}
    real = true_change(model, then, tokens)
    assert real > 1e-3
    comparison = guard.compare(tokens)
    assert comparison.relative_change == pytest.approx(real, rel=1e-4)
    assert not comparison.not_counted
    assert all(same_bits(tensor, before[name]) for name, tensor in tensors_of(model))
    assert versions == {name: tensor._version for name, tensor in tensors_of(model)}


def test_an_optimizer_over_the_embedding_alone_is_counted() -> None:
    model, guard, tokens = observed()
    then = copy.deepcopy(model)
    guard.constrain()
    model.wte.weight.requires_grad_(True)
    optimizer = torch.optim.SGD([model.wte.weight], lr=50.0)
    model(tokens).square().mean().backward()
    optimizer.step()
    real = true_change(model, then, tokens)
    assert real > 0.1
    assert guard.compare(tokens).relative_change == pytest.approx(real, rel=1e-4)


def test_a_layer_that_was_unfrozen_after_observing_is_counted() -> None:
    model, guard, tokens = observed(include=["first"], exclude=[])
    then = copy.deepcopy(model)
    guard.constrain()
    model.second.weight.requires_grad_(True)
    optimizer = torch.optim.SGD(guard.parameters(), lr=1.0)
    model(tokens).square().mean().backward()
    optimizer.step()
    real = true_change(model, then, tokens)
    assert guard.compare(tokens).relative_change == pytest.approx(real, rel=1e-4)
    assert real > 1e-3


def test_observing_anew_is_where_it_begins_again() -> None:
    model, guard, tokens = observed()
    _write("head.weight")(model)
    _write("wte.weight")(model)
    assert guard.compare(tokens).max_change > 0
    guard.observe(tokens)
    assert guard.compare(tokens).max_change == 0


def test_a_model_whose_forward_fails_is_left_as_it_is() -> None:
    model, guard, tokens = observed()
    guard.constrain()
    torch.nn.init.normal_(guard.parameters()[0])
    model.train()
    for name in ("head.weight", "wte.weight", "shift"):
        _write(name)(model)
    before = {name: tensor.clone() for name, tensor in tensors_of(model)}
    update, kind = guard.parameters()[0].clone(), type(model.first)
    for fails_at in (1, 2, 3, 4):
        calls = 0

        def forward(m: nn.Module, batch: Tensor, fails_at: int = fails_at) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise ZeroDivisionError
            return m(batch)

        with pytest.raises(ZeroDivisionError):
            guard.compare([tokens[:30], tokens[30:]], forward)
        assert all(same_bits(tensor, before[name]) for name, tensor in tensors_of(model))
        assert torch.equal(guard.parameters()[0], update)
        assert type(model.first) is kind
        assert model.training
        assert guard.constrained
    guard.merge()


def test_buffers_that_a_pass_changes_are_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("cache", None)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.cache = x
            return self.fc(x) + self.calls

    model = Counting()
    guard = ness.NullSpace(model, rule=ness.Rank(1))
    guard.observe(torch.randn(20, 4))
    guard.compare([torch.randn(5, 4)] * 3)
    assert float(model.calls) == 1
    assert "cache" in model._buffers


def test_modules_that_were_added_are_named() -> None:
    model, guard, tokens = observed()
    model.head = nn.Sequential(model.head, nn.Linear(3, 3))
    with pytest.warns(ness.NessWarning, match=r"compare: not counted, .*'head.0.weight'.*added since the last observe"):
        comparison = guard.compare(tokens)
    assert comparison.not_counted == {
        "head.weight": "gone since the last observe",
        "head.bias": "gone since the last observe",
        **{f"head.{i}.{key}": "added since the last observe" for i in (0, 1) for key in ("weight", "bias")},
    }
    assert "not counted, the same in both passes: 'head.weight', 'head.bias' (gone" in str(comparison)


def test_a_head_of_another_shape_is_named() -> None:
    model, guard, tokens = observed()
    model.head = nn.Linear(12, 5)
    with pytest.warns(ness.NessWarning, match="of another shape since the last observe"):
        assert set(guard.compare(tokens).not_counted) == {"head.weight", "head.bias"}


def test_tied_tensors_are_kept_once_and_may_be_untied() -> None:
    model, _, tokens = observed()
    model.more = nn.Embedding(30, 12)
    model.more.weight = model.wte.weight
    guard = ness.NullSpace(model, rule=ness.Rank(4), exclude=["head"])
    guard.observe(tokens)
    kept = guard._remainder.kept
    assert kept["more.weight"] is kept["wte.weight"]
    model.wte.weight = nn.Parameter(torch.randn(30, 12))
    comparison = guard.compare(tokens)
    assert comparison.max_change > 0
    assert not comparison.not_counted


def test_only_what_changed_is_copied_again() -> None:
    model, guard, tokens = observed()
    first = dict(guard._remainder.kept)
    guard.observe(tokens)
    assert all(guard._remainder.kept[name] is kept for name, kept in first.items())
    _behind(model)
    guard.observe(tokens)
    assert {name for name, kept in first.items() if guard._remainder.kept[name] is not kept} == {"head.weight"}


def test_a_part_of_a_stacked_weight_that_is_not_protected_is_counted() -> None:
    torch.manual_seed(1)
    model = named(attention=nn.MultiheadAttention(8, 2, batch_first=True))
    guard = ness.NullSpace(model, rule=ness.Rank(2), include=["attention.in_proj.q"])
    x = torch.randn(20, 5, 8)

    def forward(m: nn.Module, batch: Tensor) -> Tensor:
        return m.attention(batch, batch, batch, need_weights=False)[0]  # type: ignore[operator, no-any-return]

    guard.observe([x], forward)
    before = forward(model, x).detach()
    with torch.no_grad():
        model.attention.in_proj_weight[:].add_(torch.randn(24, 8))
    real = float((forward(model, x).detach() - before).norm() / before.norm())
    assert guard.compare([x], forward).relative_change == pytest.approx(real, rel=1e-4)


@pytest.mark.parametrize("constrained", [False, True])
def test_compare_gives_the_same_numbers_after_save_and_load(constrained: bool, tmp_path: Path) -> None:
    model, guard, tokens = observed()
    if constrained:
        guard.constrain()
        torch.nn.init.normal_(guard.parameters()[0], std=0.1)
    _write("head.weight")(model)
    _write("scale")(model)
    _write("hidden")(model)
    expected = guard.compare(tokens)
    guard.save(tmp_path)
    tensors, manifest = guard.state()
    stored = [key for key in tensors if key.startswith("rest/")]
    assert len(stored) == 3  # what still is in the model is not written
    assert manifest == json.loads(json.dumps(manifest))
    plain = copy.deepcopy(guard)
    if constrained:
        plain.discard()
    other = Whole()
    other.load_state_dict(plain.model.state_dict())
    other.hidden.copy_(model.hidden)
    again = ness.NullSpace.load(tmp_path, other)
    assert again.compare(tokens) == expected
    assert guard.compare(tokens) == expected


def test_what_changed_between_save_and_load_is_named(tmp_path: Path) -> None:
    model, guard, tokens = observed()
    guard.save(tmp_path)
    _write("head.weight")(model)
    again = ness.NullSpace.load(tmp_path, model)
    with pytest.warns(ness.NessWarning, match="'head.weight' \\(changed between save and load\\)"):
        comparison = again.compare(tokens)
    assert comparison.not_counted == {"head.weight": "changed between save and load"}
    again.observe(tokens)
    assert not again.compare(tokens).not_counted


def test_a_folder_from_before_says_that_the_rest_is_not_counted(tmp_path: Path) -> None:
    model, guard, tokens = observed()
    tensors, manifest = guard.state()
    del manifest["rest"]
    other = ness.NullSpace(model, rule=ness.Rank(4), exclude=["head"])
    other.load_state(tensors, manifest)
    with pytest.warns(ness.NessWarning, match="not counted"):
        assert "head.weight" in other.compare(tokens).not_counted


def test_copies_of_a_guard_compare_with_the_same() -> None:
    model, guard, tokens = observed()
    _write("head.weight")(model)
    expected = guard.compare(tokens)
    assert copy.deepcopy(guard).compare(tokens) == expected
    assert pickle.loads(pickle.dumps(guard)).compare(tokens) == expected


def test_outputs_that_are_nan_or_complex_count() -> None:
    model = named(fc=nn.Linear(6, 6), head=nn.Linear(6, 6))
    guard, x = ness.NullSpace(model, rule=ness.Rank(1), exclude="head"), torch.randn(30, 6)
    guard.observe(x)
    with torch.no_grad():
        model.head.weight.mul_(2)
    real = guard.compare(x, lambda m, b: m(b)).relative_change
    paired = guard.compare(x, lambda m, b: torch.complex(m(b), m(b))).relative_change
    assert paired == pytest.approx(real, rel=1e-6)
    assert real > 0.1
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    comparison = guard.compare([x[:5], x[5:]])
    assert comparison.max_change != comparison.max_change
    assert comparison.relative_change != comparison.relative_change


def test_tensors_of_another_device_are_fetched_together() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.tensor([True, False, True]),
        "c": torch.randn(7, dtype=torch.float64)[::2],
        "d": torch.tensor(3),
        "e": torch.randn(3).bfloat16(),
        "f": torch.zeros(0, 4),
    }
    found = fetch(tensors)
    assert list(found) == list(tensors)
    assert all(same_bits(found[name], value) for name, value in tensors.items())


def test_nan_equals_itself_and_minus_zero_is_not_zero() -> None:
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.ones(2), torch.ones(2).double())


def test_nothing_is_known_of_an_empty_remainder() -> None:
    assert Remainder().differences(nn.Linear(2, 2), [], {}) == (
        [],
        dict.fromkeys(("weight", "bias"), "added since the last observe"),
    )


# -- what is trainable and unprotected ------------------------------------------------------------------------------

REST = {"wte.weight": 360, "norm.weight": 12, "norm.bias": 12, "scale": 12, "head.weight": 36, "head.bias": 3}
HEAD = {"head.weight": 36, "head.bias": 3}


def test_unprotected_lists_all_that_trains_beside_protected_layers() -> None:
    model, guard, _ = observed()
    assert guard.unprotected == {name: REST[name] for name in ("scale", *list(REST)[:3], *HEAD)}
    guard.constrain()
    assert guard.unprotected == HEAD
    model.wte.weight.requires_grad_(True)  # unfrozen after observing
    assert guard.unprotected == {"wte.weight": 360, **HEAD}
    dict(model.named_parameters())["first.weight"].requires_grad_(True)  # beside its own update
    assert guard.unprotected == {"wte.weight": 360, "first.weight": 144, **HEAD}
    printed = str(guard.certificate())
    assert "trainable and unprotected: 543 of the model's 747 numbers" in printed
    for name, numbers in guard.unprotected.items():
        assert any(line.split() == [name, str(numbers)] for line in printed.splitlines())
    assert {id(p) for p in guard.parameters()} >= {id(dict(model.named_parameters())[n]) for n in guard.unprotected}
    guard.merge()
    assert dict(sorted(guard.unprotected.items())) == dict(sorted(REST.items()))
    model.requires_grad_(False)
    assert guard.unprotected == {}
    assert "unprotected" not in str(guard.certificate())


def test_before_the_first_observe_nothing_is_protected() -> None:
    model = Whole()
    guard = ness.NullSpace(model, exclude=["head"])
    assert guard.unprotected == {name: p.numel() for name, p in model.named_parameters()}


def test_a_layer_that_saw_no_row_is_unprotected_while_it_trains() -> None:
    model, guard, tokens = observed()
    model.spare = nn.Linear(3, 2)
    assert guard.unprotected.keys() - REST.keys() == {"spare.weight", "spare.bias"}
    guard.observe(tokens)
    assert guard.unprotected.keys() - REST.keys() == {"spare.weight", "spare.bias"}
    guard.constrain()
    assert guard.unprotected == HEAD


def test_norms_that_a_task_trains_are_listed_while_they_train() -> None:
    _, guard, _ = observed(norm="per_task")
    guard.constrain(task="b")
    assert guard.unprotected == {"norm.weight": 12, "norm.bias": 12, **HEAD}


def test_a_parameter_with_two_names_is_listed_once() -> None:
    model, _, tokens = observed()
    model.more = nn.Embedding(30, 12)
    model.more.weight = model.wte.weight
    guard = ness.NullSpace(model, exclude=["head", "wte", "more"])
    guard.observe(tokens)
    guard.constrain()
    assert guard.unprotected == {"wte.weight": 360, **HEAD}


def test_a_part_of_a_stacked_weight_that_is_not_protected_is_listed() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = named(attention=attention)
    guard = ness.NullSpace(model, rule=ness.Rank(2), include=["attention.in_proj.q"])

    def forward(m: nn.Module, batch: Tensor) -> Tensor:
        return m.attention(batch, batch, batch, need_weights=False)[0]  # type: ignore[operator, no-any-return]

    guard.observe([torch.randn(20, 5, 8)], forward)
    assert guard.unprotected["attention.in_proj_weight"] == attention.in_proj_weight.numel()
    guard.constrain()
    assert guard.unprotected == {}
