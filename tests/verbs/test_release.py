"""Models whose guard is gone: what is said of them, and how they become plain again."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import ZOO, low_rank, named, train
from interrupting import differences, of_model, run_traced, watches

Options = dict[str, Any]
FORMS: dict[str, Options] = {"any": {}, "sgd": {"form": "sgd"}, "rank": {"rank": 2}}


def abandoned(name: str, **options: Any) -> tuple[nn.Module, Tensor, dict[str, Any], Tensor]:
    """A trained model without its guard; new inputs; what it was before; and what it computed in the end."""
    torch.manual_seed(0)
    model, old, new = ZOO[name]()
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard = ness.NullSpace(model, rule=ness.Nuclear(0.02), exclude=["head"])
        guard.observe(old)
        before = of_model(model, new)
        guard.constrain(**options)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "ness_" in key:
                    parameter.add_(torch.randn(parameter.shape) / 5)
        trained = of_model(model, new)["computes"]
        del guard
    return model, new, before, trained


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(ZOO))
def test_release_makes_an_abandoned_model_what_it_was_before(name: str, form: str) -> None:
    model, new, before, _ = abandoned(name, **FORMS[form])
    held = ness.release(model)
    assert held
    assert set(held) <= {name for name, _ in model.named_modules()}
    assert differences(before, of_model(model, new)) == []
    assert ness.release(model) == []
    guard = ness.NullSpace(model, exclude=["head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard.observe(new)
        guard.constrain()
        guard.merge()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(ZOO))
def test_release_with_merge_keeps_what_was_learnt(name: str, form: str) -> None:
    model, new, before, trained = abandoned(name, **FORMS[form])
    ness.release(model, merge=True)
    now = of_model(model, new)
    changed = differences(before, now)
    assert all(key.endswith(("weight", "bias", "computes", "switches")) for key in changed)
    assert "computes" in changed
    assert torch.allclose(outputs(now), outputs({"computes": trained}), atol=1e-5)
    assert not torch.allclose(outputs(before), outputs(now), atol=1e-3)


def outputs(found: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(found["computes"][2]), dtype=torch.float32)


def test_release_of_a_plain_model_does_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    before = of_model(model, x)
    assert ness.release(model) == []
    assert ness.release(model, merge=True) == []
    assert differences(before, of_model(model, x)) == []
    with pytest.raises(ness.NessError, match=r"release: found int, expected a torch\.nn\.Module"):
        ness.release(3)  # type: ignore[arg-type]


def small() -> nn.Module:
    torch.manual_seed(0)
    return named(trunk=nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)), head=nn.Linear(6, 2)).eval()


def constrained(model: nn.Module, **options: Any) -> ness.NullSpace:
    guard = ness.NullSpace(model, rule=ness.Rank(3), exclude=["head"], **options)
    guard.observe(low_rank(50, 8, rank=3))
    guard.constrain(**({"task": "b", "private": 1} if options else {}))
    return guard


@pytest.mark.parametrize("merge", [False, True])
def test_release_tells_a_guard_that_still_lives(merge: bool) -> None:
    model = small()
    guard = constrained(model)
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), torch.randn(9, 8), steps=2)
    assert ness.release(model, merge=merge) == ["trunk.0", "trunk.1", "head"]
    assert not guard.constrained
    assert guard._phase == ("merged" if merge else "open")
    assert guard.certificate().holds
    guard.constrain()
    guard.discard()


def test_release_puts_back_the_norms_and_the_private_part_of_the_task_in_use() -> None:
    model, x = small(), torch.randn(9, 8)
    guard = constrained(model, norm="per_task")
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), x, steps=2)
    guard.merge()
    guard.observe(x)
    model.zero_grad()
    before = of_model(model, x)
    guard.constrain(task="c", private=1)
    train(model, torch.optim.SGD(guard.parameters(), lr=0.1), x, steps=2)
    model.zero_grad()
    with pytest.warns(ness.NessWarning, match="dropped"):  # noqa: PT031
        del guard
        gc.collect()
    ness.release(model)
    assert set(differences(before, of_model(model, x))) <= {"head: weight", "head: bias", "computes"}


def test_release_refuses_to_merge_what_diverged_and_touches_nothing() -> None:
    model = small()
    guard = constrained(model)
    with torch.no_grad():
        guard.parameters()[0].fill_(torch.nan)
    with pytest.warns(ness.NessWarning, match="dropped"):  # noqa: PT031
        del guard
        gc.collect()
    with pytest.raises(ness.NessError, match=r"'trunk\.0' holds NaN or Inf.*untouched"):
        ness.release(model, merge=True)
    assert ness.release(model)


@pytest.mark.parametrize("small", [True, False])
def test_release_into_half_precision_says_what_rounding_took_away(small: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).bfloat16()
    guard = ness.NullSpace(model, rule=ness.Rank(2))
    guard.observe(torch.randn(40, 8).bfloat16())
    guard.constrain()
    with torch.no_grad():
        for parameter in guard.parameters():
            parameter.normal_().mul_(1e-4 if small else 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del guard
        gc.collect()
        ness.release(model, merge=True)
    said = [str(one.message) for one in caught if "took away" in str(one.message)]
    assert len(said) == small
    for text in said:
        assert text.startswith("release(merge=True): rounding to bfloat16 took away 9")
        assert "call model.float() before release(merge=True)" in text


def test_release_works_on_copies_pickles_and_wrapped_models() -> None:
    model, x = small().eval(), torch.randn(9, 8)
    before = of_model(model, x)
    guard = constrained(model)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        wrapped = nn.ModuleDict({"inner": other})
        assert ness.release(wrapped) == ["inner.trunk.0", "inner.trunk.1", "inner.head"]
        assert guard.constrained
        assert differences(before, of_model(other, x)) == []
    guard.discard()


def test_release_lets_optimizers_alone_afterwards() -> None:
    model = small()
    guard = constrained(model)
    assert watches(model) == 1
    with pytest.warns(ness.NessWarning, match="dropped"):  # noqa: PT031
        del guard
        gc.collect()
    ness.release(model)
    assert watches(model) == 0


@pytest.mark.filterwarnings("ignore::ness.NessWarning")
@pytest.mark.parametrize("merge", [False, True])
def test_release_is_all_or_nothing_at_every_line(merge: bool) -> None:
    def make() -> nn.Module:
        model = small()
        guard = constrained(model)
        with torch.no_grad():
            for parameter in guard.parameters():
                parameter.add_(0.1)
        return model

    x, at = torch.randn(9, 8), 0
    model = make()
    start = of_model(model, x)
    ness.release(model, merge=merge)
    end = of_model(model, x)
    model = make()
    while True:
        at += 1
        try:
            seen = run_traced(lambda: ness.release(model, merge=merge), at)  # noqa: B023
            assert seen < at
        except KeyboardInterrupt:
            now = of_model(model, x)
            if differences(now, start):
                assert set(differences(now, end)) <= {"watches of optimizers"}, (
                    at
                )  # the watch of optimizers may still be there
                model = make()
        else:
            break
    assert differences(of_model(model, x), end) == []


# -- dropped guards -------------------------------------------------------------------------------------------------


def test_a_dropped_guard_says_what_it_leaves_behind() -> None:
    class Mine(nn.Sequential):
        pass

    model = Mine(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    guard = ness.NullSpace(model, rule=ness.Rank(3))
    guard.observe(torch.randn(50, 8))
    guard.constrain()
    with pytest.warns(ness.NessWarning, match=r"a Mine: 2 layers.*1 norm is frozen.*ness\.release\(model\)") as caught:  # noqa: PT031
        del guard
        gc.collect()
    assert len(caught) == 1


def test_a_dropped_guard_in_a_cycle_says_it_too() -> None:
    model = small()
    guard = constrained(model)
    guard.itself = guard  # type: ignore[attr-defined]
    with pytest.warns(ness.NessWarning, match=r"ness\.release\(model\)"):  # noqa: PT031
        del guard
        gc.collect()


@pytest.mark.parametrize("count", [1, 2])
def test_a_dropped_guard_keeps_no_model_alive_where_warnings_are_errors(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)])
    guard = ness.NullSpace(model)
    guard.observe(low_rank(20, 8))
    guard.constrain()
    kept: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: kept.append(found.exc_value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del guard
        gc.collect()
    (error,) = kept
    assert isinstance(error, ness.NessWarning)
    assert f"{count} layer{'s still have' if count > 1 else ' still has'} its updates" in str(error)
    ends = weakref.ref(model)
    del model
    gc.collect()
    assert ends() is None  # though the error and its frames still live


@pytest.mark.parametrize("end", ["merge", "discard", "release", "never constrained"])
def test_a_guard_that_leaves_nothing_behind_is_silent(end: str, recwarn: pytest.WarningsRecorder) -> None:
    model = small()
    guard = constrained(model)
    ends: dict[str, Callable[[], object]] = {
        "merge": guard.merge,
        "discard": guard.discard,
        "release": lambda: ness.release(model),
        "never constrained": guard.discard,
    }
    ends[end]()
    if end == "never constrained":
        guard = ness.NullSpace(model)
    del guard, ends
    gc.collect()
    assert not [w for w in recwarn if "dropped" in str(w.message)]


def test_a_model_that_goes_with_its_guard_is_no_alarm(recwarn: pytest.WarningsRecorder) -> None:
    def together() -> None:
        model = small()
        guard = constrained(model)
        copy.deepcopy((model, guard))
        assert guard.constrained

    together()
    guard = constrained(small())
    del guard
    cycle = small()
    cycle.guard = constrained(cycle)  # type: ignore[assignment]
    del cycle
    gc.collect()
    assert not [w for w in recwarn if "dropped" in str(w.message)]


def test_another_guard_of_the_model_is_no_alarm(recwarn: pytest.WarningsRecorder) -> None:
    model = small()
    other = ness.NullSpace(model)
    guard = constrained(model)
    del other
    gc.collect()
    assert not [w for w in recwarn if "dropped" in str(w.message)]
    guard.merge()


def test_a_copied_guard_says_it_of_its_own_model() -> None:
    model = small()
    guard = constrained(model)
    twin, twin_guard = copy.deepcopy((model, guard))
    with pytest.warns(ness.NessWarning, match="dropped"):  # noqa: PT031
        del twin_guard
        gc.collect()
    assert ness.release(twin)
    assert guard.constrained
    guard.merge()


def test_the_end_of_the_interpreter_is_no_alarm() -> None:
    code = (
        "import torch, ness; model = torch.nn.Linear(4, 2); guard = ness.NullSpace(model, rule=ness.Rank(1))\n"
        "guard.observe(torch.randn(9, 4)); guard.constrain(); keep = [model]; print('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "end"
    assert "dropped" not in done.stderr
    assert "Error" not in done.stderr


def test_new_guards_on_an_abandoned_model_name_the_way_out() -> None:
    model = small()
    guard = constrained(model)
    with pytest.warns(ness.NessWarning, match="dropped"):  # noqa: PT031
        del guard
        gc.collect()
    with pytest.raises(ness.NessError, match=r"ness\.release\(model\)"):
        ness.NullSpace(model).observe(torch.randn(3, 8))
    ness.release(model)
    ness.NullSpace(model).observe(torch.randn(30, 8))
