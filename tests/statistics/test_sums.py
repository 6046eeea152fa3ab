"""Observing costs what it must: one Gram a distinct input, half of each, and nothing that is not needed yet."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ness
from helpers import low_rank, named
from ness.statistics.gram import Gram, strip_edges, strip_entries
from ness.statistics.sums import REMEMBERED

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


class Block(nn.Module):
    """q, k and v of one tensor, gate and up of another, and a layer of its own."""

    def __init__(self, width: int = 20, key_bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, 8, bias=key_bias), nn.Linear(width, 8)
        self.out, self.gate, self.up = nn.Linear(width, width), nn.Linear(width, 30), nn.Linear(width, 30)
        self.down = nn.Linear(30, width)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        h = self.out(self.q(x) * self.k(other).sum(-1, keepdim=True) * self.v(other).sum(-1, keepdim=True)) + x
        return h + self.down(self.gate(h).relu() * self.up(h))


def apart(model: nn.Module, data: list[Any]) -> dict[str, Gram]:
    """Grams of the layers, each observed by a guard of its own."""
    found = {}
    for name in ness.NullSpace(model).layers:
        guard = ness.NullSpace(model, include=[name])
        guard.observe(data, forward=call)
        found |= guard.grams
    return found


def call(model: nn.Module, batch: Any) -> Any:
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def same(guard: ness.NullSpace, reference: dict[str, Gram]) -> None:
    assert guard.grams.keys() == reference.keys()
    for name, gram in guard.grams.items():
        assert gram.count == reference[name].count, name
        assert torch.equal(gram.matrix, reference[name].matrix), name


def sharing(guard: ness.NullSpace) -> set[frozenset[str]]:
    """Layers by the storage of their Gram."""
    by_storage: dict[int, set[str]] = {}
    for name, state in guard._protected.items():
        assert state.moments.gram.kept is not None
        by_storage.setdefault(state.moments.gram.kept.data_ptr(), set()).add(name)
    return {frozenset(names) for names in by_storage.values()}


ALL = {frozenset("qkv"), frozenset({"gate", "up"}), frozenset({"out"}), frozenset({"down"})}
APART = (ALL - {frozenset("qkv")}) | {frozenset("q"), frozenset("kv")}


@given(
    passes=st.lists(st.booleans(), min_size=1, max_size=5),
    rows=st.integers(1, 40),
    cut=st.integers(0, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_layers_share_a_gram_while_their_inputs_are_the_same(
    passes: list[bool], rows: int, cut: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = Block()
    data: list[Any] = [
        (torch.randn(rows, 20), torch.randn(rows, 20)) if two else torch.randn(rows, 20) for two in passes
    ]
    guard = ness.NullSpace(model)
    for part in (data[:cut], data[cut:]):
        if part:
            guard.observe(part, forward=call)
    same(guard, apart(model, data))
    assert sharing(guard) == (APART if any(passes) else ALL)


def test_a_layer_that_was_not_called_goes_its_own_way() -> None:
    model = Block()
    x, y = torch.randn(30, 20), torch.randn(30, 20)
    guard = ness.NullSpace(model)
    with guard.observing():
        model(x)
        model.v(y)
        model(y)
    assert frozenset("qk") in sharing(guard)
    assert {name: gram.count for name, gram in guard.grams.items() if name in "qkv"} == {"q": 60, "k": 60, "v": 90}
    assert torch.allclose(guard.grams["v"].matrix, Gram.of(torch.cat([rows(x), rows(y), rows(y)])).matrix)


def rows(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1)], dim=1)


def test_a_bias_more_is_another_gram() -> None:
    guard = ness.NullSpace(Block(key_bias=False))
    guard.observe(torch.randn(30, 20))
    assert frozenset("qv") in sharing(guard)
    assert guard.grams["k"].matrix.shape == (1, 20, 20)


@pytest.mark.parametrize("inference", [False, True])
def test_an_input_that_is_written_to_afterwards_counts_as_it_was(inference: bool) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x += self.first(x)
            y = self.second(x)
            return x.zero_() + y

    model, x = Writes(), torch.randn(4, 6)  # fewer rows than inputs: they are held until the pass ends
    guard = ness.NullSpace(model)
    with guard.observing(), torch.inference_mode(inference):
        model(x)
    with torch.no_grad():
        second = x + model.first(x)
    assert torch.allclose(guard.grams["first"].matrix, Gram.of(rows(x)).matrix)
    assert torch.allclose(guard.grams["second"].matrix, Gram.of(rows(second)).matrix)


def test_memory_that_is_used_again_is_another_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)  # frees what it was given
            return x

    monkeypatch.setattr("ness.statistics.sums.REMEMBERED", 1)
    assert REMEMBERED > 1
    model, x = Deep(), torch.randn(40, 16)
    guard = ness.NullSpace(model)
    guard.observe([x])
    same(guard, apart(model, [x]))
    assert len(sharing(guard)) == 12


@pytest.mark.parametrize("count", [3, 50])
def test_a_pass_that_breaks_off_adds_nothing(count: int) -> None:
    class Breaks(Block):
        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            if other is not None:
                raise ValueError("half-way")
            return y

    model, x = Breaks(), torch.randn(count, 20)
    guard = ness.NullSpace(model)
    with guard.observing():
        model(x)
        with pytest.raises(ValueError, match="half-way"):
            model(x, x)
        model(-x)
    reference = ness.NullSpace(model)
    reference.observe([x, -x])
    same(guard, reference.grams)
    assert sharing(guard) == ALL


def test_what_was_known_before_is_not_written_to_before_the_end() -> None:
    model = Block()
    guard = ness.NullSpace(model)
    guard.observe(torch.randn(30, 20))
    before = {name: gram.matrix for name, gram in guard.grams.items()}
    with guard.observing():
        model(torch.randn(30, 20))
        assert all(torch.equal(gram.matrix, before[name]) for name, gram in guard.grams.items())
        assert guard.grams["q"].count == 30
    assert guard.grams["q"].count == 60


class Sizes(TorchDispatchMode):
    """Remembers what is allocated, as long as it lives."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.made = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().nbytes() >= self.least:
            known = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
            self.made += out.untyped_storage().data_ptr() not in known
        return out


def test_a_pass_of_few_rows_takes_no_copies_of_grams() -> None:
    width = 512
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
    guard, x = ness.NullSpace(model), torch.randn(4, width)
    guard.observe(x)
    with guard.observing():
        model(x)  # opens this session's Grams
        with Sizes(8 * width * width // 2) as sizes:
            model(x)
            model(x)
        assert sizes.made == 0


# -- what is kept -----------------------------------------------------------------------------------------------------


@given(width=st.integers(1, 700), groups=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_strips_hold_the_symmetric_product(width: int, groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(groups, 7, width, dtype=torch.float64)
    gram = Gram.zeros(groups, width)
    gram.add_rows_(x[:, :3], width)
    gram.add_rows_(x[:, 3:], width)
    expected = x.mT @ x
    assert torch.allclose(gram.matrix, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(gram.matrix, gram.matrix.mT)
    assert torch.allclose(gram.diagonal(), expected.diagonal(dim1=-2, dim2=-1))
    again = Gram.from_triangle(gram.triangle(), gram, 7)
    assert torch.equal(again.matrix, gram.matrix)
    assert torch.equal(Gram(gram.matrix, 7).matrix, gram.matrix)
    edges = strip_edges(width)
    assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])]
    assert edges[-1][1] == width
    assert gram.kept is not None
    assert gram.kept.numel() == groups * strip_entries(width)
    assert strip_entries(width) <= width**2 * (0.76 if width >= 128 else 1)


def test_wide_grams_take_little_more_than_half() -> None:
    assert strip_entries(4096) / 4096**2 == 17 / 32
    assert strip_entries(768) / 768**2 < 0.55


@pytest.mark.parametrize("rule", [ness.Rank(4), ness.Within(0.1)], ids=["plain", "within"])
def test_nothing_is_kept_before_it_is_needed(rule: ness.Rule) -> None:
    model = Block()
    guard = ness.NullSpace(model, rule=rule)
    for _ in range(2):
        guard.observe(low_rank(60, 20, rank=4))
    guard.constrain()
    guard.model(torch.randn(8, 20)).square().mean().backward()
    torch.optim.SGD(guard.parameters(), lr=0.1).step()
    guard.certificate()
    for state in guard._protected.values():
        assert state.moments.cross is None
        if state.relative is not None:
            assert state.relative.folded.cross is None
            assert state.relative.fresh is None
    guard.merge()
    guard.observe(low_rank(60, 20, rank=4))
    assert guard._protected["q"].moments.cross is not None  # from now on the anchor has moved
    assert guard.certificate().holds
    assert sharing(guard) == ALL


def test_the_newest_task_and_all_tasks_are_one_gram_while_there_is_one() -> None:
    guard = ness.NullSpace(Block(), rule=ness.Within(0.1))
    for _ in range(3):
        guard.observe(torch.randn(60, 20))
    for state in guard._protected.values():
        assert state.relative is not None
        assert state.relative.fresh is not None
        assert state.relative.fresh.gram is state.moments.gram
    assert guard.grams["q"].count == 180


def test_float32_statistics_are_kept_in_float32(tmp_path: Path) -> None:
    model, x = Block(), torch.randn(500, 20)
    guard = ness.NullSpace(model, statistics_dtype=torch.float32)
    exact = ness.NullSpace(model)
    for part in x.split(50):
        guard.observe(part)
        exact.observe(part)
    for name, state in guard._protected.items():
        assert state.moments.gram.kept is not None
        assert state.moments.gram.kept.dtype == torch.float32
        gram, reference = guard.grams[name].matrix, exact.grams[name].matrix
        assert gram.dtype == torch.float64
        assert float((gram - reference).norm() / reference.norm()) < 1e-6
    guard.save(tmp_path)
    again = ness.NullSpace.load(tmp_path, model)
    same(again, guard.grams)
    assert again._protected["q"].moments.gram.dtype == torch.float32


def test_what_is_shared_is_saved_once_as_a_triangle(tmp_path: Path) -> None:
    model = Block()
    guard = ness.NullSpace(model)
    guard.observe(torch.randn(60, 20))
    guard.save(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    grams = {key: value for key, value in load_file(file).items() if key.endswith("/gram")}
    assert len(grams) == 4
    assert {tuple(value.shape) for value in grams.values()} == {(1, 21 * 22 // 2), (1, 31 * 32 // 2)}
    again = ness.NullSpace.load(tmp_path, model)
    same(again, guard.grams)
    assert sharing(again) == ALL
    x = torch.randn(60, 20)
    guard.observe(x)
    again.observe(x)
    same(again, guard.grams)
    assert sharing(again) == sharing(guard) == ALL


def test_a_guard_that_was_saved_with_whole_grams_still_loads() -> None:
    model = Block()
    guard = ness.NullSpace(model)
    guard.observe(torch.randn(60, 20))
    tensors, manifest = guard.state()
    manifest.pop("aliases")
    for name, state in guard._protected.items():  # as it was written before
        tensors[f"layers/{name}/gram"] = state.moments.gram.matrix
        tensors[f"layers/{name}/cross"] = torch.zeros(state.anchor.shape, dtype=torch.float64)
    again = ness.NullSpace(model)
    again.load_state(tensors, manifest)
    same(again, guard.grams)
    again.constrain()
    assert again.certificate().holds


def test_a_changed_weight_moves_the_anchor_of_its_layer_alone() -> None:
    model = Block()
    guard = ness.NullSpace(model)
    guard.observe(torch.randn(60, 20))
    anchors = {name: state.anchor for name, state in guard._protected.items()}
    guard.observe(torch.randn(60, 20))
    assert all(state.anchor is anchors[name] for name, state in guard._protected.items())
    model.out.bias.data[3] += 1e-3  # past autograd's version counters
    guard.observe(torch.randn(60, 20))
    moved = {name for name, state in guard._protected.items() if state.anchor is not anchors[name]}
    assert moved == {"out"}
    assert guard.certificate()["out"].rms_drift == pytest.approx(1e-3 * (120 / 180) ** 0.5, rel=1e-4)


# -- on a disk --------------------------------------------------------------------------------------------------------


def test_statistics_on_a_disk_are_the_same(tmp_path: Path) -> None:
    model, data, rule = Block(), [torch.randn(60, 20) for _ in range(3)], ness.Rank(4)
    there = ness.NullSpace(model, rule=rule, statistics_device=f"disk:{tmp_path / 'new'}")
    here = ness.NullSpace(model, rule=rule)
    for part in data:
        there.observe(part)
        here.observe(part)
    same(there, here.grams)
    assert sharing(there) == ALL
    assert list((tmp_path / "new").iterdir()) == []  # nothing is left where the process is killed
    mapped = open_files(tmp_path)
    assert len(mapped) >= 4 + 7  # Grams and anchors
    for guard in (there, here):
        torch.manual_seed(3)
        guard.constrain()
        model(torch.randn(8, 20)).square().mean().backward()
        torch.optim.SGD(guard.parameters(), lr=0.1).step()
        rows_ = guard.certificate().to_dicts()
        guard.discard()
        if guard is there:
            expected = rows_
    assert rows_ == expected
    there.save(tmp_path / "saved")
    same(ness.NullSpace.load(tmp_path / "saved", model), here.grams)
    del there, guard
    gc.collect()
    assert len(open_files(tmp_path)) < len(mapped)


def open_files(folder: Path) -> list[str]:
    """Files of this folder that are mapped into memory, deleted ones too."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{os.path.realpath(folder)}/" in line]


def test_a_full_disk_leaves_what_was_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = ness.NullSpace(named(fc=nn.Linear(20, 4)), statistics_device=f"disk:{tmp_path}")
    guard.observe(torch.randn(60, 20))
    before = guard.grams["fc"].matrix

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ness.NessError, match=r"disk:.*could not be had there.*No space left.*is as it was"):
        guard.observe(torch.randn(60, 20))
    assert torch.equal(guard.grams["fc"].matrix, before)
    assert guard.grams["fc"].count == 60
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["disk:", "disc:/tmp", 3.5])
def test_a_place_that_is_none_is_refused(where: Any, tmp_path: Path) -> None:
    with pytest.raises(ness.NessError, match=r"statistics_device=.*expected"):
        ness.NullSpace(nn.Linear(4, 4), statistics_device=where)
    (tmp_path / "file").touch()
    with pytest.raises(ness.NessError, match="expected 'disk:FOLDER'"):
        ness.NullSpace(nn.Linear(4, 4), statistics_device=f"disk:{tmp_path / 'file'}")
