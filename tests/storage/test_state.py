"""Saving and loading: everything survives, and what does not fit is refused whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ness
from helpers import OPTIMIZERS, ZOO, low_rank, named, save_as_before, train
from ness.storage import manifest as manifests
from ness.storage.folder import MANIFEST, load_folder, save_folder, write_bytes

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


def mlp(width: int = 16) -> nn.Module:
    return named(trunk=nn.Linear(width, 24), act=nn.ReLU(), head=nn.Linear(24, 3))


def saved(folder: Path) -> tuple[nn.Module, ness.NullSpace]:
    torch.manual_seed(0)
    model = mlp()
    guard = ness.NullSpace(model, rule=ness.Soft(ness.Nuclear(1e-2)), exclude=["head"])
    guard.observe(low_rank(60, 16, rank=4))
    guard.save(folder)
    return model, guard


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize(("form", "optimizer"), [("any", "adamw"), ("sgd", "momentum")])
def test_resumed_training_is_bit_equal(name: str, form: str, optimizer: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, old, new = ZOO[name]()
    guard = ness.NullSpace(model, rule=ness.Nuclear(0.02), exclude=["head"])
    guard.observe(old)
    guard.constrain(form=form)  # type: ignore[arg-type]
    train(model, OPTIMIZERS[optimizer](guard.parameters()), new, steps=3)
    guard.save(tmp_path / "guard")
    state = {key: value.clone() for key, value in model.state_dict().items()}

    torch.manual_seed(2)
    train(model, OPTIMIZERS[optimizer](guard.parameters()), new, steps=3)
    unbroken = guard.certificate()
    guard.merge()

    other, _, _ = ZOO[name]()
    assert other.load_state_dict(state, strict=False).missing_keys == []  # the weights as they run
    again = ness.NullSpace.load(tmp_path / "guard", other)
    assert again.constrained
    torch.manual_seed(2)
    train(other, OPTIMIZERS[optimizer](again.parameters()), new, steps=3)
    assert again.certificate().to_dicts() == unbroken.to_dicts()
    again.merge()
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


@pytest.mark.parametrize("rank", [2, 8, 14])  # the projector as basis, as one matrix, as complement
def test_every_form_of_the_projector_survives(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = named(layer=nn.Linear(16, 4, bias=False))
    guard = ness.NullSpace(model, rule=ness.Rank(rank))
    guard.observe(torch.randn(50, 16))
    guard.constrain(form="sgd")
    train(model, OPTIMIZERS["momentum"](guard.parameters()), torch.randn(8, 16))
    x = torch.randn(5, 16)
    expected = torch.autograd.grad(model(x).square().sum(), guard.parameters())
    guard.save(tmp_path)
    guard.discard()
    again = ness.NullSpace.load(tmp_path, model)
    for a, b in zip(torch.autograd.grad(model(x).square().sum(), again.parameters()), expected, strict=True):
        assert torch.equal(a, b)


def test_max_drift_survives(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, old, new = ZOO["mlp"]()
    guard = ness.NullSpace(model, rule=ness.Rank(40), exclude=["head"])
    guard.observe(torch.randn(200, 64))
    guard.constrain(max_drift=0.01)
    train(model, OPTIMIZERS["adamw"](guard.parameters()), new)
    expected = model(old)
    guard.save(tmp_path)
    guard.discard()
    again = ness.NullSpace.load(tmp_path, model)
    assert all(row.relative_drift <= 0.01 for row in again.certificate().rows)
    model.eval()
    assert torch.equal(model(old), expected)


def test_everything_the_guard_was_told_survives(tmp_path: Path) -> None:
    _, guard = saved(tmp_path / "g")
    again = ness.NullSpace.load(tmp_path / "g", guard.model)
    assert again.rule == guard.rule
    assert (again.include, again.exclude, again.bias, again.norm) == (guard.include, ("head",), "constrain", "freeze")
    for name, gram in guard.grams.items():
        assert torch.equal(again.grams[name].matrix, gram.matrix)
        assert again.grams[name].count == gram.count


def test_state_in_memory_is_json_and_tensors(tmp_path: Path) -> None:
    model, guard = saved(tmp_path)
    guard.constrain()
    tensors, manifest = guard.state()
    again = json.loads(json.dumps(manifest))
    guard.discard()
    other = ness.NullSpace(model, rule=guard.rule, exclude=["head"])
    other.load_state(tensors, again)
    assert other.constrained
    with pytest.raises(ness.NessError, match="the guard is constrained"):
        other.load_state(tensors, again)
    other.discard()


def test_saving_twice_leaves_one_state(tmp_path: Path) -> None:
    model, guard = saved(tmp_path)
    guard.observe(low_rank(60, 16, rank=4))
    guard.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert ness.NullSpace.load(tmp_path, model).grams["trunk"].count == 120


def test_a_save_that_fails_keeps_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, guard = saved(tmp_path)
    guard.observe(low_rank(60, 16, rank=4))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ness.NessError, match=r"could not be written \(No space left on device\)"):
        guard.save(tmp_path)
    monkeypatch.undo()
    assert ness.NullSpace.load(tmp_path, model).grams["trunk"].count == 60
    assert len(list(tmp_path.iterdir())) == 2


def _truncate(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def _flip(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(bytes(content))


def _edit(**change: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / MANIFEST  # signed anew: what it says is judged, not that it was edited
        edited = json.loads(path.read_text()) | change
        del edited["sha256"]
        path.write_bytes(manifests.encode(edited, path))

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, "truncated: found .* bytes, expected"),
    "altered": (_flip, "altered since it was written"),
    "tensors gone": (lambda f: next(f.glob("*.safetensors")).unlink(), "truncated: found 0 bytes"),
    "manifest gone": (lambda f: (f / MANIFEST).unlink(), "holds no manifest.json"),
    "manifest cut": (lambda f: (f / MANIFEST).write_text('{"format": "ness'), "cut off or damaged"),
    "foreign": (lambda f: (f / MANIFEST).write_text('{"format": "other"}'), "foreign"),
    "foreign list": (lambda f: (f / MANIFEST).write_text("[1]"), "foreign"),
    "future": (_edit(schema=99, ness="9.9"), "future schema 99.*Upgrade"),
    "no tensors named": (_edit(tensors=None), "damaged"),
    "no layers": (_edit(layers={"trunk": {}}), "damaged"),
    "no rule": (_edit(rule={"name": "magic"}), "unknown rule 'magic'"),
    "no phase": (_edit(tasks=3), "damaged"),
}


@pytest.mark.parametrize("case", sorted(DAMAGE))
def test_a_damaged_folder_is_refused_and_nothing_changes(case: str, tmp_path: Path) -> None:
    model, _ = saved(tmp_path)
    damage, message = DAMAGE[case]
    damage(tmp_path)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ness.NessError, match=f"(?s){message}"):
        ness.NullSpace.load(tmp_path, model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_a_folder_from_before_private_parts_still_loads(tmp_path: Path) -> None:
    model, guard = saved(tmp_path)
    tensors, manifest = guard.state()
    del manifest["private_basis"], manifest["tasks"]["private"]
    save_as_before(tmp_path, tensors, manifest, schema=1)
    again = ness.NullSpace.load(tmp_path, model)
    assert again.private_basis == "shared"
    assert again.certificate().to_dicts() == guard.certificate().to_dicts()
    again.constrain(task="b", private=2)
    again.merge()


def test_another_model_is_refused(tmp_path: Path) -> None:
    model, _ = saved(tmp_path)
    for other, message in (
        (mlp(width=17), "another model: layer 'trunk' was .*'width': 17.*'width': 18"),
        (named(body=nn.Linear(16, 24), head=nn.Linear(24, 3)), "another model: it protects 'trunk'"),
        (nn.Sequential(nn.Linear(16, 24)), "another model: exclude='head' matches no"),
    ):
        with pytest.raises(ness.NessError, match=message):
            ness.NullSpace.load(tmp_path, other)
    with torch.no_grad():
        model.trunk.weight[0, 0] += 1e-6
    with pytest.raises(ness.NessError, match="changed between save and load: the weights of layer 'trunk'"):
        ness.NullSpace.load(tmp_path, model)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    _, guard = saved(tmp_path / "g")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ness.NessError, match="is a file; expected a folder"):
        guard.save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a" / "b", b"1")
    write_bytes(tmp_path / "a" / "b", b"2")
    assert (tmp_path / "a" / "b").read_bytes() == b"2"
    save_folder(tmp_path / "f", {"x": torch.ones(2)}, {"note": 1})
    tensors, manifest = load_folder(tmp_path / "f")
    assert torch.equal(tensors["x"], torch.ones(2))
    assert manifest["note"] == 1


def _entries(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every entry of plain JSON stands."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from _entries(inner, (*at, key))


LENIENT = {"rule", "include", "exclude", "rest", "last"}  # parts of which older guards have less, or the guard its own
OPTIONAL = {"private_basis", "relative", "private", "running", "own"}  # older guards had none
NULLABLE = {"pending", "relative", "current", "projector"}


@pytest.mark.parametrize("phase", ["constrained", "merged"])
def test_an_entry_that_is_gone_or_of_another_kind_is_an_error_of_ours(phase: str) -> None:
    """Missing entries were tracebacks, and numbers in the place of names were taken over."""
    torch.manual_seed(0)
    model = named(body=nn.Sequential(nn.Linear(9, 6), nn.BatchNorm1d(6)), head=nn.Linear(6, 2))

    def fresh() -> ness.NullSpace:
        return ness.NullSpace(model, rule=ness.Rank(3), norm="per_task", exclude=["head"])

    guard = fresh()
    guard.observe(torch.randn(40, 9))
    guard.constrain(task="b", private=2)
    if phase == "merged":
        guard.merge()
    tensors, manifest = guard.state()
    if phase == "constrained":
        guard.discard()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    guard, refused = fresh(), 0
    for where in _entries(manifest):
        for other in ("gone", None, -1, True, "x", [], {}, [None]):
            edited = copy.deepcopy(manifest)
            holder = edited
            for key in where[:-1]:
                holder = holder[key]
            kind = type(holder[where[-1]])
            if other == "gone":
                del holder[where[-1]]
            else:
                holder[where[-1]] = other
            try:
                guard.load_state(tensors, edited)
            except ness.NessError:
                refused += 1
                assert guard.grams == {}
                assert not guard.constrained
                continue
            optional = (other == "gone" and where[-1] in OPTIONAL) or (other is None and where[-1] in NULLABLE)
            assert optional or type(other) is kind or where[-1] == "current" or LENIENT & {*where}, (where, other)
            if guard.constrained:
                guard.discard()
            guard = fresh()
    assert refused > 300
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    guard.load_state(tensors, manifest)
