"""Observing: every pass whole or not at all, decided on the device, with few operations and no waiting."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ness
from helpers import named
from ness.statistics import recorder as observe_module
from ness.statistics.recorder import energy


def small() -> nn.Module:
    torch.manual_seed(0)
    return named(conv=nn.Conv2d(2, 3, 3, padding=1), flat=nn.Flatten(), head=nn.Linear(75, 4))


def batches(count: int, bad: dict[int, float] | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    found = [torch.randn(4, 2, 5, 5) for _ in range(count)]
    for index, value in (bad or {}).items():
        found[index][1, 0, 2, 2] = value
    return found


def passes(guard: ness.NullSpace, data: list[Tensor], error: Exception | None = None) -> None:
    with guard.observing():
        for batch in data:
            guard.model(batch)
        if error is not None:
            raise error


def same_books(one: ness.NullSpace, other: ness.NullSpace) -> None:
    assert list(one.grams) == list(other.grams)
    for name, gram in one.grams.items():
        assert gram.count == other.grams[name].count
        assert torch.equal(gram.matrix, other.grams[name].matrix)
    for name, held in one._protected.items():
        assert held.moments.calls == other._protected[name].moments.calls
        assert torch.equal(held.moments.energy, other._protected[name].moments.energy)


@given(first=st.integers(0, 9), more=st.integers(0, 9), value=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
@settings(max_examples=25, deadline=None)
def test_after_a_bad_batch_the_statistics_are_those_before_it(first: int, more: int, value: float) -> None:
    data = batches(10, {first: value, max(first, more): value})
    model = small()
    guard, reference = ness.NullSpace(model), ness.NullSpace(model)
    with pytest.raises(ness.NessError, match=rf"layer 'conv'.*\(batch {first}\)"):
        guard.observe(data)
    if first:
        reference.observe(data[:first])
    same_books(guard, reference)


def test_what_was_observed_before_the_call_stays() -> None:
    model = small()
    guard, reference = ness.NullSpace(model), ness.NullSpace(model)
    for each in (guard, reference):
        each.observe(batches(3))
    with pytest.raises(ness.NessError, match="batch 0"):
        guard.observe(batches(2, {0: torch.nan}))
    same_books(guard, reference)
    for each in (guard, reference):
        each.observe(batches(4))
    same_books(guard, reference)


def test_a_long_pass_over_bad_data_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe_module, "READ_EVERY", 4)
    pulled = []

    def endless() -> Any:
        for index in range(1000):
            pulled.append(index)
            yield batches(1, {0: torch.nan} if index == 5 else None)[0]

    guard = ness.NullSpace(small())
    with pytest.raises(ness.NessError, match=r"\(batch 5\)"):
        guard.observe(endless())
    assert len(pulled) == 8
    assert guard.grams["conv"].count == 5 * 4 * 25


def test_passes_of_the_caller_are_checked_at_the_end() -> None:
    model = small()
    guard, reference = ness.NullSpace(model), ness.NullSpace(model)
    good = batches(4)
    with pytest.raises(ness.NessError, match=r"\(pass 2\)"):
        passes(guard, [*good[:2], *batches(1, {0: torch.inf}), good[3]])
    reference.observe(good[:2])
    same_books(guard, reference)


def test_an_error_of_the_caller_comes_through_and_bad_passes_do_not_count() -> None:
    model = small()
    guard, reference = ness.NullSpace(model), ness.NullSpace(model)
    with pytest.raises(ValueError, match="own error") as caught:
        passes(guard, [*batches(1), *batches(1, {0: torch.nan})], ValueError("the caller's own error"))
    assert "pass 1" in caught.value.__notes__[0]
    reference.observe(batches(1))
    same_books(guard, reference)


def test_several_calls_give_the_bits_of_one() -> None:
    model, data = small(), batches(7)
    once, often = ness.NullSpace(model), ness.NullSpace(model)
    once.observe(data)
    for start in range(0, 7, 2):
        often.observe(data[start : start + 2])
    same_books(once, often)


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


NOT_A_KERNEL = {"view", "_unsafe_view", "detach", "split", "unfold", "slice", "select", "permute", "transpose", "t"} | {
    "diagonal", "unbind", "new_empty", "empty", "promote_types", "alias", "as_strided", "unsqueeze", "expand",
}  # fmt: skip


def counted(count: int) -> Counter[str]:
    guard = ness.NullSpace(small())
    with Counting() as counting:
        guard.observe(batches(count))
    return Counter({name: found for name, found in counting.seen.items() if name not in NOT_A_KERNEL})


def test_no_batch_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    plain = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append(1) or plain(self))
    few, many = counted(3), counted(43)
    assert few["_local_scalar_dense"] == many["_local_scalar_dense"]  # what bool(), float() and item() do
    assert len(reads) == 2  # once a call of observe


def test_a_layer_and_batch_take_few_operations() -> None:
    few, many = counted(3), counted(13)
    with Counting() as plain, torch.no_grad():
        small()(batches(1)[0])
    forward = sum(found for name, found in plain.seen.items() if name in ("convolution", "addmm"))
    each = (sum(many.values()) - sum(few.values())) / 10
    assert (each - forward) / 2 <= 15  # Gram, check, energy and sum of one layer, and its half of the pass's flag


def test_energy_is_the_square_sum_of_the_outputs() -> None:
    outputs = torch.randn(5, 3, 4, 4) * 100
    assert float(energy(outputs)) == pytest.approx(float(outputs.double().square().sum()), rel=1e-6)


@pytest.mark.filterwarnings("ignore::ness.NessWarning")
@pytest.mark.parametrize("rule", [ness.Nuclear(0.02), ness.Within(0.1)])
@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode_around_observing_changes_nothing(inside: bool, rule: ness.Rule) -> None:
    model = small()
    guard, reference = ness.NullSpace(model, rule=rule), ness.NullSpace(model, rule=rule)
    for _ in range(2):  # a second time on top of the first
        data = batches(3)
        if inside:
            with guard.observing(), torch.inference_mode():
                for batch in data:
                    model(batch)
        else:
            with torch.inference_mode():
                guard.observe(data)
        reference.observe(data)
    same_books(guard, reference)
    guard.constrain()
    optimizer = torch.optim.SGD(guard.parameters(), lr=0.01)
    model(batches(1)[0]).square().mean().backward()
    optimizer.step()
    trained = model(batches(1)[0]).detach()
    guard.merge()
    assert torch.allclose(model(batches(1)[0]), trained, atol=1e-5)
    guard.observe(batches(1))


@pytest.mark.filterwarnings("ignore::ness.NessWarning")
def test_constraining_in_inference_mode_gives_updates_that_train() -> None:
    guard = ness.NullSpace(small(), rule=ness.Nuclear(0.02))
    with torch.inference_mode():
        guard.observe(batches(3))
        guard.constrain()
    guard.model(batches(1)[0]).square().mean().backward()
    torch.optim.SGD(guard.parameters(), lr=0.01).step()
    assert guard.certificate().holds


def test_observing_nothing_is_refused() -> None:
    guard = ness.NullSpace(small())
    data = iter(batches(2))
    guard.observe(data)
    with pytest.raises(ness.NessError, match="there was no batch, so nothing new is protected"):
        guard.observe(data)  # used up
    with pytest.raises(ness.NessError, match="no forward pass was run"), guard.observing():
        pass
    assert guard.grams["head"].count == 8


class Again(nn.Module):
    """A model that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2, fails: bool = False) -> Tensor:
        y = self.fc(x)
        if depth:
            return self(y, depth - 1, fails)
        if fails:
            raise ValueError("at the bottom")
        return y


def test_a_model_that_calls_itself_is_seen_whole() -> None:
    model = Again()
    guard, reference = ness.NullSpace(model), ness.NullSpace(model)
    x = torch.randn(10, 4)
    with guard.observing():
        model(x)
        with pytest.raises(ValueError, match="bottom"):
            model(x, fails=True)
        try:
            raise KeyError("of the caller's own")
        except KeyError:
            model(x)
    reference.observe([x, x])
    assert guard.grams["fc"].count == 60
    same_books(guard, reference)


def test_float32_statistics_are_as_exact_under_autocast() -> None:
    x = torch.randn(300, 40)
    grams = []
    for mixed in (False, True):
        guard = ness.NullSpace(nn.Linear(40, 8), statistics_dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            guard.observe(x)
        (gram,) = guard.grams.values()
        grams.append(gram.matrix)
    assert torch.equal(*grams)
