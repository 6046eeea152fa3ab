"""`ness.repair` on whole models: every layer kind, all or nothing, and one clear sentence for each mistake."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import ness
from helpers import ZOO, low_rank
from ness.repairing.algebra import Reshaper, repaired_change
from ness.repairing.grams import bytes_of, groups_within

pytestmark = pytest.mark.filterwarnings("ignore:repair. [0-9]+ of:ness.NessWarning")


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return list(now) == list(before) and all(torch.equal(now[name], value) for name, value in before.items())


def tuned_from(base: nn.Module, amount: float = 0.05, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return tuned


def pair(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A base, a tuned model, old and new inputs."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4)).to(dtype)
    return base, tuned_from(base), low_rank(80, 12, dtype=dtype), torch.randn(90, 12, dtype=dtype)


def brute_force(change: Tensor, new: Tensor, old: Tensor, strength: float) -> Tensor:
    left = torch.cat([new / len(new) ** 0.5, old * (strength / len(old)) ** 0.5])
    right = torch.cat([new @ change.mT / len(new) ** 0.5, torch.zeros(len(old), len(change), dtype=new.dtype)])
    return torch.linalg.lstsq(left, right, driver="gelsd").solution.mT


@pytest.mark.parametrize("bias", [False, True])
def test_one_layer_is_the_minimiser(bias: bool) -> None:
    torch.manual_seed(0)
    base = nn.Linear(8, 5).double()
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.weight.add_(torch.randn_like(tuned.weight))
        if bias:
            tuned.bias.add_(torch.randn_like(tuned.bias))
    old, new = low_rank(60, 8, dtype=torch.float64), torch.randn(70, 8, dtype=torch.float64)
    done = ness.repair(tuned, base, old=[old[:20], old[20:]], new=new, strength=3.0, ridge=1e-10).model
    ones = [torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) if bias else x for x in (new, old)]
    change = torch.cat([tuned.weight - base.weight, (tuned.bias - base.bias)[:, None]], 1).detach()
    expected = brute_force(change if bias else change[:, :-1], *ones, 3.0)
    assert torch.allclose(done.weight - base.weight, expected[:, :8], atol=1e-6)
    if bias:
        assert torch.allclose(done.bias - base.bias, expected[:, 8], atol=1e-6)
    else:
        assert torch.equal(done.bias, base.bias)


@pytest.mark.parametrize("name", ZOO)
def test_every_layer_kind(name: str) -> None:
    torch.manual_seed(0)
    base, old, new = ZOO[name]()
    tuned = tuned_from(base)
    before, flags = state(tuned), [p.requires_grad for p in tuned.parameters()]
    tuned.train()
    repaired = ness.repair(tuned, base, old=[old[:11], old[11:]], new=new, strength=10.0)
    assert same(tuned, before)
    assert all(module.training for module in (*tuned.modules(), *repaired.model.modules()))
    assert [p.requires_grad for p in repaired.model.parameters()] == flags
    assert list(repaired.model.state_dict()) == list(before)
    mine = {p.data_ptr() for p in tuned.parameters()}
    assert not mine & {p.data_ptr() for p in repaired.model.parameters()}
    back = ness.repair(tuned, base, old=old, new=new, strength=10.0, others="base").on_old
    assert back is not None
    assert back.after < back.before
    for row in repaired:
        assert row.old_after < 0.5 * row.old_before, row
        assert row.kept is not None
        assert row.kept <= 1 + 1e-9
    assert same(ness.repair(tuned, base, old=old, new=new, strength=0.0).model, before)
    twin = copy.deepcopy(tuned)
    other = ness.repair(twin, base.state_dict(), old=old, new=new, strength=10.0, inplace=True)
    assert other.model is twin
    for key, value in repaired.model.state_dict().items():
        assert torch.allclose(twin.state_dict()[key], value, atol=1e-4), key
    assert not any(m._forward_hooks for m in twin.modules())


def test_rows_of_a_layer_are_what_the_data_says() -> None:
    base, tuned, old, new = pair()
    repaired = ness.repair(tuned, base, old=old, new=new, strength=2.0)
    row, first = repaired["0"], [model[0] for model in (base, tuned, repaired.model)]
    with torch.no_grad():
        b, t, r = (layer(old) for layer in first)
        assert row.old_before == pytest.approx(float((t - b).norm() / b.norm()))
        assert row.old_after == pytest.approx(float((r - b).norm() / b.norm()), rel=1e-4)
        b, t, r = (layer(new) for layer in first)
        assert row.new_before == pytest.approx(float((t - b).norm() / b.norm()))
        assert row.kept == pytest.approx(1 - float(((r - t).norm() / (t - b).norm()) ** 2))
        b, t, r = (model(old) for model in (base, tuned, repaired.model))
        assert repaired.on_old is not None
        assert repaired.on_old.before == pytest.approx(float((t - b).norm() / b.norm()))
        assert repaired.on_old.after == pytest.approx(float((r - b).norm() / b.norm()))
        b, t, r = (model(new) for model in (base, tuned, repaired.model))
        assert repaired.on_new is not None
        assert repaired.on_new.kept == pytest.approx(1 - float(((r - t).norm() / (t - b).norm()) ** 2))
    assert (row.fan_in, row.old_rows, row.new_rows) == (12, 80, 90)


def test_the_order_of_batches_and_the_scale_of_inputs_do_not_matter() -> None:
    base, tuned, old, new = pair()
    first = ness.repair(tuned, base, old=old.split(16), new=new.split(30)).model
    again = ness.repair(tuned, base, old=old.flip(0).split(5), new=list(reversed(new.split(30)))).model
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-8)
    base, tuned = nn.Linear(12, 4, bias=False).double(), nn.Linear(12, 4, bias=False).double()
    first = ness.repair(tuned, base, old=old, new=new).model
    scaled = ness.repair(tuned, base, old=1e6 * old, new=1e6 * new).model
    assert torch.allclose(first.weight, scaled.weight, atol=1e-9)


def test_large_strength_gives_the_base_where_old_rows_are_and_keeps_the_rest() -> None:
    torch.manual_seed(0)
    base = nn.Linear(12, 4).double()
    tuned = tuned_from(base, 1.0)
    old, new = torch.zeros(40, 12, dtype=torch.float64), torch.zeros(40, 12, dtype=torch.float64)
    old[:, :5], new[:, 5:] = torch.randn(40, 5), torch.randn(40, 7)
    with torch.no_grad():
        tuned.bias.copy_(base.bias)
    done = ness.repair(tuned, base, old=old, new=new, strength=1e12).model
    assert torch.allclose(done(old), base(old), atol=1e-6)
    assert torch.allclose(done(new), tuned(new), atol=1e-6)


def test_a_low_rank_change_keeps_its_rank_and_gets_no_bias() -> None:
    base, _, old, new = pair()
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned[0].weight.add_(torch.randn(10, 2, dtype=torch.float64) @ torch.randn(2, 12, dtype=torch.float64))
    done = ness.repair(tuned, base, old=old, new=new, strength=5.0)
    assert [row.name for row in done.rows] == ["0"]
    assert torch.equal(done.model[0].bias, base[0].bias)
    change = (done.model[0].weight - base[0].weight).detach()
    assert int(torch.linalg.matrix_rank(change, rtol=1e-9)) == 2
    assert torch.equal(done.model[2].weight, base[2].weight)


def test_without_new_inputs_old_directions_are_damped() -> None:
    base, tuned, old, _ = pair()
    done = ness.repair(tuned, base, old=old, strength=100.0)
    assert done.on_new is None
    assert all(row.kept is None and row.new_before is None for row in done)
    assert done["0"].old_after < 0.05 * done["0"].old_before
    away = torch.linalg.svd(old).Vh[6:]  # directions that no old row has
    change, whole = done.model[0].weight - base[0].weight, tuned[0].weight - base[0].weight
    assert torch.allclose(change @ away.mT, whole @ away.mT, atol=0.05)
    assert "new" not in str(done).splitlines()[0]


def test_base_as_a_state_dict_a_file_or_a_folder(tmp_path: Path) -> None:
    base, tuned, old, new = pair()
    expected = state(ness.repair(tuned, base, old=old, new=new).model)
    safetensors.torch.save_file(base.state_dict(), tmp_path / "model.safetensors")
    for form in (base.state_dict(), tmp_path, str(tmp_path / "model.safetensors")):
        assert same(ness.repair(tuned, form, old=old, new=new).model, expected)


def test_what_is_no_layer_is_kept_put_back_or_interpolated_and_listed() -> None:
    torch.manual_seed(0)
    base, old, new = ZOO["gpt2"]()
    tuned = tuned_from(base)
    kept = ness.repair(tuned, base, old=old, new=new)
    back = ness.repair(tuned, base, old=old, new=new, others="base")
    half = ness.repair(tuned, base, old=old, new=new, others=0.5)
    for name in ("embed.weight", "norm.weight", "norm.bias"):
        t, b = tuned.state_dict()[name], base.state_dict()[name]
        assert torch.equal(kept.model.state_dict()[name], t)
        assert torch.equal(back.model.state_dict()[name], b)
        assert torch.allclose(half.model.state_dict()[name], (t + b) / 2)
    assert [row.name for row in kept.others] == ["embed.weight", "norm.weight", "norm.bias"]
    assert [row.now for row in kept.others] == ["kept"] * 3
    assert {row.now for row in back.others} == {"base"}
    alone = copy.deepcopy(base)
    with torch.no_grad():
        alone.embed.weight.copy_(tuned.embed.weight)
        moved = float((alone(old) - base(old)).norm() / base(old).norm())
    assert kept.others[0].moves == pytest.approx(moved, rel=1e-4)


def test_running_statistics_are_among_the_others() -> None:
    torch.manual_seed(0)
    base, old, new = ZOO["resnet"]()
    tuned = tuned_from(base)
    tuned.train()(new)
    tuned.eval()
    done = ness.repair(tuned, base, old=old, new=new, others="base")
    assert "bn1.running_mean" in {row.name for row in done.others}
    assert torch.equal(done.model.bn1.running_mean, base.bn1.running_mean)
    assert not torch.equal(tuned.bn1.running_mean, base.bn1.running_mean)


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.twin = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight
            self.twin.weight, self.twin.bias = self.body.weight, self.body.bias

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.twin(self.body(self.embed(tokens)).relu()))

    torch.manual_seed(0)
    base = Tied()
    tuned = tuned_from(base)
    old, new = torch.randint(0, 8, (50, 4)), torch.randint(8, 20, (50, 4))
    saved = {name: value for name, value in base.state_dict().items() if not name.startswith(("head", "twin"))}
    done = ness.repair(tuned, saved, old=old, new=new)
    assert [row.name for row in done.rows] == ["body"]
    assert done["body"].old_rows == 400
    assert done.model.head.weight is done.model.embed.weight
    assert done.model.twin.weight is done.model.body.weight
    assert not torch.equal(done.model.body.weight, tuned.body.weight)
    assert torch.equal(done.model.embed.weight, tuned.embed.weight)
    assert "tied" in done.others[0].why


def test_excluded_modules_are_kept_and_not_compared() -> None:
    base, tuned, old, new = pair()
    tuned[2] = nn.Linear(10, 7).double()
    with pytest.raises(ness.NessError, match=r"(?s)'2.weight' is \(7, 10\).*exclude"):
        ness.repair(tuned, base, old=old, new=new)
    done = ness.repair(tuned, base, old=old, new=new, exclude="2")
    assert [row.name for row in done.rows] == ["0"]
    assert torch.equal(done.model[2].weight, tuned[2].weight)
    assert [row.why for row in done.others] == ["excluded"] * 2
    only = ness.repair(tuned_from(base), base, old=old, new=new, include=["0"])
    assert [row.name for row in only.rows] == ["0"]
    assert {row.why for row in only.others} == {"not in include"}


def test_memory_takes_a_layer_at_a_time_and_gives_the_same() -> None:
    base, tuned, old, new = pair()
    seen: list[str] = []
    whole = ness.repair(tuned, base, old=old.split(20), new=new.split(30))
    cut = ness.repair(
        tuned, base, old=old.split(20), new=new.split(30), memory="16KB", progress=lambda what, *_: seen.append(what)
    )
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    assert [(row.name, round(row.old_after, 9)) for row in cut] == [(r.name, round(r.old_after, 9)) for r in whole]
    assert seen.count("old") == 8
    with pytest.raises(ness.NessError, match="front"):
        cut.front()
    with pytest.raises(ness.NessError, match="iterator"):
        ness.repair(tuned, base, old=iter(old.split(20)), new=new, memory="16KB")
    with pytest.raises(ness.NessError, match="alone needs"):
        ness.repair(tuned, base, old=old, new=new, memory=10)


def test_memory_is_what_a_group_really_takes_at_most() -> None:
    targets = [SimpleNamespace(layer=SimpleNamespace(groups=1, width=width)) for width in (10, 20, 10)]
    assert bytes_of(targets[:1]) == 88 * 100  # type: ignore[arg-type]
    assert bytes_of(targets) == 16 * 600 + 72 * 400  # type: ignore[arg-type]
    assert [len(group) for group in groups_within(targets, 37_000)] == [2, 1]  # type: ignore[arg-type]


def test_statistics_on_disk_give_the_same_and_leave_no_file(tmp_path: Path) -> None:
    base, tuned, old, new = pair()
    expected = state(ness.repair(tuned, base, old=old, new=new).model)
    for more in ({"memory": "16KB"}, {}, {"inplace": True}):
        twin = copy.deepcopy(tuned)
        done = ness.repair(twin, base, old=old, new=new, statistics_device=f"disk:{tmp_path / 'there'}", **more)
        for name, value in done.model.state_dict().items():
            assert torch.allclose(value, expected[name], atol=1e-12)
    assert [row.strength for row in done.front([2.0])] == [2.0]
    assert list((tmp_path / "there").iterdir()) == []
    (tmp_path / "file").write_text("")
    for place in (f"disk:{tmp_path / 'file'}", "disk:", "nowhere"):
        with pytest.raises(ness.NessError, match=r"repair\(statistics_device"):
            ness.repair(tuned, base, old=old, new=new, statistics_device=place)


def test_layers_that_read_one_tensor_share_a_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(6, 4, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x) * self.v(x)

    torch.manual_seed(0)
    base = Reads().double()
    tuned = tuned_from(base)
    old, new = low_rank(40, 6, dtype=torch.float64), torch.randn(50, 6, dtype=torch.float64)
    made: list[str] = []
    of = Reshaper.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Reshaper, "of", classmethod(lambda cls, *args: (made.append(args[3]), of(cls, *args))[1]))
    done = ness.repair(tuned, base, old=[old[:9], old[9:]], new=[new])
    assert made == ["q"]
    for name in "qkv":
        change = (getattr(tuned, name).weight - getattr(base, name).weight).detach()[None]
        expected = repaired_change(change, (new.T @ new / 50)[None], (old.T @ old / 40)[None], 1.0)
        assert torch.allclose(getattr(done.model, name).weight - getattr(base, name).weight, expected[0], atol=1e-9)


def test_a_head_is_not_run_where_no_layer_needs_its_outputs() -> None:
    class Head(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Head.calls += 1
            return super().forward(x)

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(9, 8), nn.Linear(8, 8)
            self.lm_head = Head(8, 9, bias=False)

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.lm_head(self.body(self.embed(input_ids)).relu())

    torch.manual_seed(0)
    base = Language()
    tuned = tuned_from(base)
    tuned.lm_head.weight.data.copy_(base.lm_head.weight)
    old, new = [{"input_ids": torch.randint(0, 9, (9, 4))} for _ in range(2)]
    done = ness.repair(tuned, base, old=[old] * 5, new=[new] * 6)
    kept = 5 + 6  # batches of the sample from end to end
    assert Head.calls <= 3 * kept + 2  # and no pass that observes
    assert done.on_old is not None
    with torch.no_grad():
        b, t = base(**old), tuned(**old)
    assert done.on_old.before == pytest.approx(float((t - b).norm() / b.norm()), rel=1e-4)
    assert "forward" not in vars(done.model.lm_head)


def test_float32_statistics() -> None:
    base, tuned, old, new = pair(torch.float32)
    exact = ness.repair(tuned, base, old=old, new=new, ridge=1e-5)
    quick = ness.repair(tuned, base, old=old, new=new, statistics_dtype=torch.float32)
    assert torch.allclose(exact.model(new), quick.model(new), atol=1e-3)


def test_a_budget_on_a_probe() -> None:
    base, tuned, old, new = pair()
    probe = low_rank(30, 12, dtype=torch.float64)

    def moved(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(probe) - base(probe)).norm() / base(probe).norm())

    unlimited = ness.repair(tuned, base, old=old, new=new, strength=1e8)
    limit = 0.5 * (moved(tuned) + moved(unlimited.model))
    done = ness.repair(tuned, base, old=old, new=new, probe=[probe], at_most=limit)
    assert moved(done.model) <= limit
    weaker = ness.repair(tuned, base, old=old, new=new, strength=done.strength / 1.02)
    assert moved(weaker.model) > limit
    assert ness.repair(tuned, base, old=old, new=new, probe=[probe], at_most=10.0).strength == 0.0
    with pytest.raises(ness.NessError, match=r"best that can be reached is 0\.\d+"):
        ness.repair(tuned, base, old=old, new=new, probe=[probe], at_most=1e-9)
    for wrong in ({"probe": [probe]}, {"at_most": 0.1}, {"probe": [probe], "at_most": 0.1, "strength": 2.0}):
        with pytest.raises(ness.NessError):
            ness.repair(tuned, base, old=old, new=new, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("inplace", [False, True])
def test_the_front_comes_from_grams_taken_once(inplace: bool) -> None:
    base, tuned, old, new = pair()
    twin, calls = copy.deepcopy(tuned), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    done = ness.repair(
        twin, base, old=iter(old.split(40)), new=iter(new.split(45)), strength=1.0, inplace=inplace, progress=count
    )
    calls = 0
    front = done.front([0.0, 1.0, 30.0], interpolated=[0.5])
    assert calls == 0
    assert [row.strength for row in front] == [0.0, 1.0, 30.0, 0.0]
    assert front.rows[0].old == pytest.approx(front.before)
    assert front.rows[0].kept == pytest.approx(1.0)
    assert front.rows[2].old < front.rows[1].old < front.rows[0].old
    assert done.on_old is not None
    assert front.rows[1].old == pytest.approx(done.on_old.after)
    again = ness.repair(tuned, base, old=old.split(40), new=new.split(45), strength=30.0)
    assert again.on_old is not None
    assert front.rows[2].old == pytest.approx(again.on_old.after)
    assert "strength 30" in str(front)
    assert len(front.to_dicts()) == 4
    for name, weight in done.at(30.0).state_dict().items():  # what repair at that strength makes, to the bit
        assert torch.equal(weight, again.model.state_dict()[name])
    with pytest.raises(ness.NessError, match="strength"):
        done.at(-1.0)
    if not inplace:
        with torch.no_grad():
            twin[0].weight.add_(1)
        with pytest.raises(ness.NessError, match="changed since"):
            done.front()
        with pytest.raises(ness.NessError, match="changed since"):
            done.at(1.0)


def test_what_is_left_can_be_interpolated_on_top() -> None:
    base, tuned, old, new = pair()
    whole = ness.repair(tuned, base, old=old, new=new).model
    half = ness.repair(tuned, base, old=old, new=new, share=0.5).model
    for b, w, h in zip(base.parameters(), whole.parameters(), half.parameters(), strict=True):
        assert torch.allclose(h, (b + w) / 2, atol=1e-9)


def test_the_report_fits_into_80_columns_and_is_plain_json() -> None:
    base, tuned, old, new = pair()
    holder = nn.Module()
    holder.a_rather_long_name_of_a_module_that_holds_another_one = nn.Sequential(base)
    tuned_holder = copy.deepcopy(holder)
    tuned_holder.load_state_dict(
        {f"a_rather_long_name_of_a_module_that_holds_another_one.0.{key}": v for key, v in tuned.state_dict().items()}
    )

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        return model.a_rather_long_name_of_a_module_that_holds_another_one(batch)

    done = ness.repair(tuned_holder, holder, old=old, new=new, forward=forward)
    assert max(map(len, str(done).splitlines())) <= 80
    assert "old inputs, end to end" in str(done)
    json.dumps([done.to_dict(), done.to_dicts()], allow_nan=False)
    assert [row["name"] for row in done.to_dicts()] == [row.name for row in done.rows]
    assert len(done) == 2
    with pytest.raises(KeyError):
        done["no such layer"]


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    base, tuned, old, new = pair()
    done = ness.repair(tuned, base, old=old, new=new)
    done.plot(tmp_path / "repair.png")
    done.plot(tmp_path / "repair.html")
    done.front(interpolated=[0.5]).plot(tmp_path / "front.svg")
    assert (tmp_path / "repair.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "repair.html").read_text()
    assert b"<svg" in (tmp_path / "front.svg").read_bytes()
    with pytest.raises(ness.NessError, match="ends in"):
        done.plot(tmp_path / "repair.txt")


def test_padding_is_no_output() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.head = nn.Embedding(9, 8), nn.Linear(8, 12), nn.Linear(12, 9)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.up(self.embed(input_ids)).relu())}

    torch.manual_seed(0)
    base = Masked()
    tuned = tuned_from(base)
    tokens = torch.randint(1, 9, (30, 6))
    mask = torch.ones_like(tokens)
    mask[:, 4:] = 0
    batch = {"input_ids": tokens * mask, "attention_mask": mask}
    whole = {"input_ids": tokens[:, :4], "attention_mask": mask[:, :4]}
    new = {"input_ids": torch.randint(1, 9, (40, 6)), "attention_mask": torch.ones(40, 6, dtype=torch.long)}
    one, other = (ness.repair(tuned, base, old=[b], new=[new]) for b in (batch, whole))
    assert one.on_old is not None
    assert other.on_old is not None
    assert one.on_old.before == pytest.approx(other.on_old.before, rel=1e-5)


# -- mistakes ----------------------------------------------------------------------------------------------------------

Change = Callable[[nn.Module, nn.Module, Tensor, Tensor], dict[str, Any]]


def _wider(base: nn.Module, tuned: nn.Module, old: Tensor, new: Tensor) -> dict[str, Any]:
    return {"base": nn.Sequential(nn.Linear(12, 11), nn.ReLU(), nn.Linear(11, 4)).double()}


MISTAKES: dict[str, tuple[Change, str]] = {
    "other shapes": (_wider, r"is \(10, 12\) in the tuned model and \(11, 12\)"),
    "a missing name": (
        lambda b, t, o, n: {"base": {k: v for k, v in b.state_dict().items() if k != "2.bias"}},
        "base has no '2.bias'",
    ),
    "a name too many": (
        lambda b, t, o, n: {"base": {**b.state_dict(), "3.weight": torch.ones(2)}},
        "tuned model has no '3.weight'",
    ),
    "no name in common": (lambda b, t, o, n: {"base": {"x": torch.ones(2)}}, "no tensor in common"),
    "equal": (lambda b, t, o, n: {"base": copy.deepcopy(t)}, "equal, bit for bit"),
    "itself": (lambda b, t, o, n: {"base": t}, "tuned model itself"),
    "no base": (lambda b, t, o, n: {"base": None}, "no adapter"),
    "no model": (lambda b, t, o, n: {"base": 3}, "found int"),
    "a path without weights": (lambda b, t, o, n: {"base": "/nowhere"}, "no safetensors"),
    "NaN in the base": (
        lambda b, t, o, n: {"base": {k: v * torch.nan for k, v in b.state_dict().items()}},
        "NaN or Inf in the base",
    ),
    "a quantised base": (
        lambda b, t, o, n: {"base": {k: v.to(torch.int8) for k, v in b.state_dict().items()}},
        "quantised",
    ),
    "NaN in old": (lambda b, t, o, n: {"old": [o, o * torch.nan]}, r"repair\(old=...\): .*NaN"),
    "NaN in new": (lambda b, t, o, n: {"new": n / 0}, r"repair\(new=...\): .*NaN"),
    "no old batch": (lambda b, t, o, n: {"old": []}, "no batch"),
    "no new batch": (lambda b, t, o, n: {"new": iter(())}, "no batch"),
    "old is no batches": (lambda b, t, o, n: {"old": 3}, "expected batches"),
    "the same data": (lambda b, t, o, n: {"new": o}, "same data"),
    "the same data in other batches": (
        lambda b, t, o, n: {"old": o.split(7), "new": o.flip(0).split(9)},
        "same data",
    ),
    "a negative strength": (lambda b, t, o, n: {"strength": -1}, "at least 0"),
    "an infinite strength": (lambda b, t, o, n: {"strength": float("inf")}, "expected a number"),
    "a strength in words": (lambda b, t, o, n: {"strength": "1"}, "expected a number"),
    "others": (lambda b, t, o, n: {"others": "drop"}, "'keep', 'base'"),
    "others beyond 1": (lambda b, t, o, n: {"others": 1.5}, "'keep', 'base'"),
    "passes": (lambda b, t, o, n: {"passes": 0}, "whole number"),
    "memory": (lambda b, t, o, n: {"memory": "much"}, "'4GB'"),
    "share": (lambda b, t, o, n: {"share": 2}, "at most 1"),
    "exclude": (lambda b, t, o, n: {"exclude": "nothing"}, "matches nothing"),
    "include": (lambda b, t, o, n: {"include": "nothing"}, "matches no layer"),
    "dtype": (lambda b, t, o, n: {"statistics_dtype": torch.float16}, "float64 or torch.float32"),
    "ridge": (lambda b, t, o, n: {"ridge": 0.0}, "ridge"),
    "a batch of another shape": (lambda b, t, o, n: {"forward": lambda model, batch: model(batch[:, :3])}, "shape"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("inplace", [False, True])
def test_mistakes_are_one_sentence_and_touch_nothing(name: str, inplace: bool) -> None:
    change, message = MISTAKES[name]
    base, tuned, old, new = pair()
    before, base_before = state(tuned), state(base)
    arguments: dict[str, Any] = {"base": base, "old": old, "new": new} | change(base, tuned, old, new)
    kind = RuntimeError if name == "a batch of another shape" else ness.NessError
    with pytest.raises(kind, match=message):
        ness.repair(tuned, arguments.pop("base"), inplace=inplace, **arguments)
    assert same(tuned, before)
    assert same(base, base_before)


def test_a_constrained_model_is_refused() -> None:
    base, tuned, old, new = pair()
    guard = ness.NullSpace(tuned, rule=ness.Rank(2))
    guard.observe(old)
    guard.constrain()
    with pytest.raises(ness.NessError, match="constrained"):
        ness.repair(tuned, base, old=old, new=new)


def test_only_norms_changed() -> None:
    base = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned[1].weight.add_(1)
    with pytest.raises(ness.NessError, match="no layer that can be repaired"):
        ness.repair(tuned, base, old=torch.randn(9, 4))


@pytest.mark.filterwarnings("default")
def test_fewer_rows_than_inputs_is_a_warning_with_the_consequence() -> None:
    base, tuned, old, new = pair()
    with pytest.warns(ness.NessWarning, match=r"fewer old rows.*the change stays there") as caught:
        ness.repair(tuned, base, old=old[:5], new=new)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.warns(ness.NessWarning, match="fewer new rows"):
        ness.repair(tuned, base, old=old, new=new[:5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ness.repair(tuned, base, old=old, new=new)


# -- all or nothing ----------------------------------------------------------------------------------------------------


class Broken(BaseException):
    """Not an Exception: as an interrupt is not."""


def test_a_break_at_any_line_leaves_the_model_as_before_or_as_after() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    tuned = tuned_from(base)
    old, new = torch.randn(9, 4), torch.randn(9, 4)
    before = state(tuned)
    after = state(ness.repair(tuned, base, old=old, new=new).model)
    lines = 0
    stop = -1

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if "ness/repairing" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == stop:
                raise Broken
        return trace

    def run(model: nn.Module, at: int) -> None:
        nonlocal lines, stop
        lines, stop = 0, at
        sys.settrace(trace)
        try:
            ness.repair(model, base, old=old, new=new, inplace=True)
        finally:
            sys.settrace(None)

    run(copy.deepcopy(tuned), -1)
    total = lines
    points = [*range(1, total - 150, max(1, total // 60)), *range(max(1, total - 150), total + 1)]
    for at in points:
        model = copy.deepcopy(tuned)
        flags = [module.training for module in model.modules()]
        with pytest.raises(Broken):
            run(model, at)
        assert same(model, before) or same(model, after), at
        assert [module.training for module in model.modules()] == flags
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_nothing_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    base, tuned, old, new = pair()
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    ness.repair(tuned, base, old=old, new=new).front([1.0])


# -- passes -----------------------------------------------------------------------------------------------------------


def test_the_first_of_several_passes_is_the_closed_form_and_later_ones_make_up_for_it() -> None:
    base, tuned, old, new = pair()
    once = ness.repair(tuned, base, old=old, new=new, strength=5.0, new_under=1.0, ridge=1e-10)
    twice = ness.repair(tuned, base, old=[old], new=new.split(30), strength=5.0, passes=2, ridge=1e-10)
    assert torch.allclose(twice.model[0].weight, once.model[0].weight, atol=1e-7)
    with torch.no_grad():
        x, behind = tuned[1](tuned[0](new)), once.model[1](once.model[0](new))
        o = base[1](base[0](old))
        ones = [torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1) for a in (x, behind, o)]
        wt, wb = (torch.cat([m[2].weight, m[2].bias[:, None]], 1) for m in (tuned, base))
        left = torch.cat([ones[1] / len(new) ** 0.5, ones[2] * (5.0 / len(old)) ** 0.5])
        right = torch.cat([ones[0] @ wt.mT / len(new) ** 0.5, ones[2] @ wb.mT * (5.0 / len(old)) ** 0.5])
        expected = torch.linalg.lstsq(left, right, driver="gelsd").solution.mT
        assert torch.allclose(twice.model[2].weight, expected[:, :-1], atol=1e-5)
        assert torch.allclose(twice.model[2].bias, expected[:, -1], atol=1e-5)
        objectives = [
            (ones[1] @ w.mT - ones[0] @ wt.mT).square().sum() / len(new)
            + 5.0 * (ones[2] @ (w - wb).mT).square().sum() / len(old)
            for w in (torch.cat([m[2].weight, m[2].bias[:, None]], 1) for m in (twice.model, once.model))
        ]
        assert objectives[0] < objectives[1]
        missed = (twice.model(new) - tuned(new)).square().sum()
        asked = (x @ (tuned[2].weight - base[2].weight).mT + tuned[2].bias - base[2].bias).square().sum()
        assert twice["2"].kept == pytest.approx(float(1 - missed / asked), rel=1e-4)
    assert twice.passes == 2
    assert "2 passes" in str(twice)
    with pytest.raises(ness.NessError, match="front"):
        twice.front()
    assert same(ness.repair(tuned, base, old=old, new=new, strength=0, passes=2).model, state(tuned))


@pytest.mark.parametrize("name", ZOO)
def test_passes_with_every_layer_kind(name: str) -> None:
    torch.manual_seed(0)
    base, old, new = ZOO[name]()
    tuned = tuned_from(base)
    before = state(tuned)
    done = ness.repair(tuned, base, old=old, new=[new, new.flip(-1)], strength=10.0, passes=3, others="base")
    assert same(tuned, before)
    assert done.on_old is not None
    assert done.on_old.after < done.on_old.before
    assert all(row.new_rows > 0 for row in done)


def test_passes_need_new_inputs_that_can_be_read_again() -> None:
    base, tuned, old, new = pair()
    with pytest.raises(ness.NessError, match="iterator"):
        ness.repair(tuned, base, old=old, new=iter([new]), passes=2)
    with pytest.raises(ness.NessError, match="new="):
        ness.repair(tuned, base, old=old, passes=2)
    with pytest.raises(ness.NessError, match="more passes"):
        ness.repair(tuned, base, old=old, new=new, passes=2, memory=100)
    with pytest.raises(ness.NessError, match="NaN"):
        ness.repair(tuned, base, old=old, new=new * torch.nan, passes=2)
    with pytest.raises(ness.NessError, match="same data"):
        ness.repair(tuned, base, old=old, new=old.clone(), passes=2)
