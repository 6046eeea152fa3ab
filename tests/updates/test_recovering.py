"""The base under an update is recovered bit for bit, whatever the floats are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ness.updates.recovering import correction, recovered

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
anything = st.floats(width=32)
usual = st.floats(-1, 1, width=32) | st.sampled_from([0.0, -0.0, 1e-38, 2.0**-20])


def same_bits(one: Tensor, other: Tensor) -> bool:
    kind = WHOLE[one.itemsize]
    return one.dtype == other.dtype and torch.equal(one.view(kind), other.view(kind))


def made(base: Tensor, change: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    running = (base.to(change.dtype) + change).to(base.dtype)
    return {"w": base, "b": base[:1]}, {"w": running, "b": running[:1]}, {"w": change, "b": change[:1]}


@pytest.mark.parametrize("dtype", DTYPES)
@given(pairs=st.lists(st.tuples(anything, anything) | st.tuples(usual, usual), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_floats(dtype: torch.dtype, pairs: list[tuple[float, float]]) -> None:
    values = torch.tensor(pairs, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    base, running, change = made(values[:, 0].to(dtype), values[:, 1].to(wide))
    found = recovered(correction(base, running, change), running, change, base)
    assert all(same_bits(found[name], base[name]) for name in base)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "share"), [(0.0, 0.001), (1e-3, 0.003), (1e-2, 0.012), (1.0, 0.15)])
def test_it_takes_little_room(dtype: torch.dtype, size: float, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, delta = torch.randn(2, 300, 300, generator=generator, dtype=torch.float64)
    change = (delta * size).to(torch.promote_types(dtype, torch.float32))
    base, running, change = made(weight.to(dtype), change)
    kept = correction(base, running, change)
    assert same_bits(recovered(kept, running, change, base)["w"], base["w"])
    assert kept.nbytes <= share * weight.to(dtype).nbytes + 40


@pytest.mark.parametrize("cut", [slice(0, 0), slice(0, -1), slice(3, None)])
def test_damage_is_an_error(cut: slice) -> None:
    base, running, change = made(torch.randn(50), torch.randn(50))
    with pytest.raises(ValueError, match=r"\w"):
        recovered(correction(base, running, change)[cut], running, change, base)
    with pytest.raises(ValueError, match="too short"):
        recovered(correction({"b": base["b"]}, running, change), running, change, base)
