"""Statistics that are shared: additive, whole or not there, refused where they do not fit."""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ness
from helpers import ZOO, Conv1D, low_rank, named, train
from ness.storage.statistics import packed, unpacked


class Body(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 48), "down": nn.Linear(48, width, bias=False)}) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).relu())
        return x


class WithHead(nn.Module):
    def __init__(self, body: Body, **options: Any) -> None:
        super().__init__()
        self.model = body
        self.lm_head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.model(x))


def guarded(model: nn.Module, data: Tensor | None = None, **options: Any) -> ness.NullSpace:
    guard = ness.NullSpace(model, **options)
    if data is not None:
        guard.observe(data)
    return guard


def same(one: ness.NullSpace, other: ness.NullSpace, tolerance: float = 1e-6) -> None:
    for name, gram in one.grams.items():
        scale = float(gram.matrix.abs().max())
        assert torch.allclose(gram.matrix, other.grams[name].matrix, rtol=tolerance, atol=tolerance * scale), name
        assert gram.count == other.grams[name].count


@given(groups=st.integers(1, 3), width=st.integers(1, 12), exponent=st.integers(-60, 60), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_packing_is_right_to_float32_at_any_scale(groups: int, width: int, exponent: int, seed: int) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(groups, 20, width, dtype=torch.float64) * 10.0**exponent
    gram = rows.mT @ rows
    found = unpacked(packed(gram), width)
    assert torch.equal(found, found.mT)
    assert torch.allclose(found, gram, rtol=1e-7, atol=1e-7 * float(gram.abs().max()))
    assert packed(gram)["triangle"].numel() == groups * width * (width + 1) // 2
    assert packed(gram)["triangle"].dtype == torch.float32
    nothing = torch.zeros(1, width, width, dtype=torch.float64)
    assert torch.equal(unpacked(packed(nothing), width), nothing)


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.filterwarnings("ignore::ness.NessWarning")
def test_what_was_observed_is_protected_elsewhere(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, old, new = ZOO[name]()
    guard = guarded(model, old, exclude=["head"], rule=ness.Nuclear(0.02))
    guard.export_statistics(tmp_path, source="old inputs")
    twin = copy.deepcopy(model)
    other = guarded(twin, exclude=["head"], rule=ness.Nuclear(0.02))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.import_statistics(tmp_path)
    same(guard, other)
    guard.constrain(rank=3)
    other.constrain(rank=3)
    ranks = [[row.rank for row in one.certificate()] for one in (guard, other)]
    assert sum(abs(a - b) for a, b in zip(*ranks, strict=True)) <= 2
    train(twin, torch.optim.AdamW(other.parameters(), lr=0.02), new)
    other.merge()
    assert other.certificate().holds
    guard.discard()
    mine, theirs = guard.certificate(), other.certificate()
    for row in theirs:  # against what was really observed
        state = guard._protected[row.name]
        change = other._protected[row.name].change()
        drift = float((state.moments.drift(change).sum() / state.moments.gram.count).sqrt())
        assert drift == pytest.approx(row.rms_drift, rel=1e-3, abs=1e-5 * max(1e-9, float(state.moments.energy) ** 0.5))
        assert mine[row.name].rms_drift == 0


def test_statistics_add_up(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Body()
    first, second = torch.randn(200, 32), torch.randn(150, 32)
    guarded(model, first).export_statistics(tmp_path / "first")
    guarded(model, second).export_statistics(tmp_path / "second")
    both = guarded(model, torch.cat([first, second]))
    read = guarded(model)
    read.import_statistics(tmp_path / "first")
    read.import_statistics(tmp_path / "second")
    same(both, read)
    mixed = guarded(model, first)
    mixed.import_statistics(tmp_path / "second")
    same(both, mixed)
    assert float(mixed._protected["layers.0.up"].moments.energy) == pytest.approx(
        float(both._protected["layers.0.up"].moments.energy)
    )
    read.export_statistics(tmp_path / "both")
    again = guarded(model)
    again.import_statistics(tmp_path / "both")
    same(both, again)


@pytest.mark.filterwarnings("ignore:fewer rows:ness.NessWarning")
def test_within_keeps_imported_rows_as_a_task_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Body()
    data = low_rank(300, 32)
    seen = guarded(model, data, rule=ness.Within(0.1))
    guarded(model, data).export_statistics(tmp_path)
    read = guarded(copy.deepcopy(model), rule=ness.Within(0.1))
    read.import_statistics(tmp_path, task="pretraining")
    assert read.tasks == ["pretraining"]
    for guard in (seen, read):
        guard.constrain()
    for one, other in zip(seen.certificate(), read.certificate(), strict=True):
        assert one.tau == pytest.approx(other.tau, rel=1e-2)


@pytest.mark.parametrize("way", ["to head", "from head"])
def test_names_may_differ_by_a_prefix(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    body, data = Body(), torch.randn(200, 32)
    whole = WithHead(body)
    if way == "to head":
        guarded(body, data).export_statistics(tmp_path)
        other = guarded(whole)
        with pytest.warns(ness.NessWarning, match="no statistics of lm_head, which stay frozen"):
            other.import_statistics(tmp_path)
        assert list(other.grams) == [f"model.{name}" for name in guarded(body, data).grams]
    else:
        guarded(whole, data).export_statistics(tmp_path)
        other = guarded(body)
        other.import_statistics(tmp_path)
        assert list(other.grams) == list(guarded(body, data).grams)
    excluded = guarded(whole, exclude="lm_head")
    excluded.import_statistics(tmp_path)
    assert "lm_head" not in excluded.grams


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_another_dtype_is_the_same_model(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Body(), torch.randn(200, 32)
    guarded(model, data).export_statistics(tmp_path)
    other = guarded(copy.deepcopy(model).to(dtype))
    other.import_statistics(tmp_path)  # no warning: pytest makes ours an error
    same(guarded(model, data), other)


def test_other_weights_are_a_warning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Body(), torch.randn(200, 32)
    guarded(model, data).export_statistics(tmp_path)
    with torch.no_grad():
        model.layers[1]["down"].weight[0, 0] += 1
    other = guarded(model)
    with pytest.warns(ness.NessWarning, match=r"layers\.1\.down had other weights.*drift counts from"):
        other.import_statistics(tmp_path)
    assert other.certificate()["layers.1.down"].rms_drift == 0


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = torch.randn(200, 32)
    guarded(Body(), data).export_statistics(tmp_path)
    cases: list[tuple[nn.Module, str]] = [
        (Body(layers=3), r"Body: it lacks layers\.2\.up, layers\.2\.down"),
        (Body(layers=1), r"Body: it has layers\.1\.down, layers\.1\.up"),
        (Body(width=16), r"layer 'layers\.0\.down' is .*'outputs': 32.* is .*'outputs': 16"),
        (nn.Sequential(nn.Linear(32, 4)), r"no layer of this Sequential has a name of theirs"),
        (WithHead(Body(layers=3)), r"it lacks model\.layers\.2"),
    ]
    for model, match in cases:
        guard = guarded(model)
        with pytest.raises(ness.NessError, match=match):
            guard.import_statistics(tmp_path)
        assert guard.grams == {}
    transposed = named(up=Conv1D(8, 32))
    guarded(named(up=nn.Linear(32, 8)), data).export_statistics(tmp_path / "linear")
    with pytest.raises(ness.NessError, match=r"'linear'.*'transformers\.Conv1D'"):
        guarded(transposed).import_statistics(tmp_path / "linear")


def test_wrong_moments_and_arguments_are_refused(tmp_path: Path) -> None:
    model, data = Body(), low_rank(200, 32)
    guard = guarded(model, rule=ness.Rank(3))
    with pytest.raises(ness.NessError, match="nothing was observed yet"):
        guard.export_statistics(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    guard.observe(data)
    with pytest.raises(ness.NessError, match="expected words"):
        guard.export_statistics(tmp_path / "none", source=5)  # type: ignore[arg-type]
    guard.export_statistics(tmp_path / "one")
    guard.constrain()
    with pytest.raises(ness.NessError, match="the model is constrained"):
        guard.import_statistics(tmp_path / "one")
    with pytest.raises(ness.NessError, match=r"holds no statistics\.json"):
        guarded(Body()).import_statistics(tmp_path / "none")
    guard.export_statistics(tmp_path / "while")  # it does not change what was observed
    guard.discard()
    guard.save(tmp_path / "guard")
    with pytest.raises(ness.NessError, match=r"holds no statistics\.json"):
        guarded(model).import_statistics(tmp_path / "guard")


def test_the_folder_describes_itself(tmp_path: Path) -> None:
    guarded(Body(), torch.randn(200, 32)).export_statistics(tmp_path, source="noise")
    manifest = json.loads((tmp_path / "statistics.json").read_text())
    assert manifest["model"].endswith("Body")
    assert (manifest["source"], manifest["rows"], manifest["tasks_merged"]) == ("noise", 200, 0)
    entry = manifest["layers"]["layers.0.up"]
    assert (entry["kind"], entry["outputs"], entry["fan_in"], entry["bias"]) == ("linear", 48, 32, True)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size < 4 * (2 * 33 * 34 / 2 + 2 * 48 * 49 / 2) + 4 * 300


def test_one_altered_bit_anywhere_is_refused(tmp_path: Path) -> None:
    model = Body()
    guarded(model, torch.randn(200, 32)).export_statistics(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        for at in (5, 40, 90, len(content) // 2, len(content) - 3):
            path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            guard = guarded(model)
            with pytest.raises(ness.NessError):
                guard.import_statistics(tmp_path)
            assert guard.grams == {}
        path.write_bytes(content[:-7])
        with pytest.raises(ness.NessError):
            guarded(model).import_statistics(tmp_path)
        path.unlink()
        with pytest.raises(ness.NessError):
            guarded(model).import_statistics(tmp_path)
        path.write_bytes(content)
    guarded(model).import_statistics(tmp_path)


def test_a_full_disk_loses_no_statistics_that_were_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Body()
    first, second = guarded(model, torch.randn(200, 32)), guarded(model, torch.randn(150, 32))
    first.export_statistics(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    left = [0]

    def full(function: Any) -> Any:
        def broken(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(28, "No space left on device")
            return function(*args, **kwargs)

        return broken

    for name in ("write", "replace", "fsync"):
        monkeypatch.setattr(os, name, full(getattr(os, name)))
    fail_at = 0
    while True:
        left[0] = fail_at
        try:
            second.export_statistics(tmp_path)
        except ness.NessError:
            assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before, fail_at
            fail_at += 1
            continue
        break
    assert fail_at >= 15  # four layers and a manifest, each written, flushed and renamed
    left[0] = 10_000
    read = guarded(model)
    read.import_statistics(tmp_path)
    same(second, read)
    assert len(list(tmp_path.iterdir())) == 5  # nothing of the first is left
