"""BatchNorm of a batch in parts is BatchNorm of its parts: values, gradients, running statistics, memory layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from ness import NessError
from ness.lab.gpu.ghost_batchnorm import batch_norm_in_parts, move_
from ness.lab.networks.base import BatchNorm1d, BatchNorm2d


def drawn(seed: int, *shape: int) -> Tensor:
    """Numbers whose mean and spread differ from channel to channel and grow along the batch."""
    generator = Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    by_channel = torch.arange(1.0, shape[1] + 1, dtype=torch.float64).view(-1, *[1] * (len(shape) - 2))
    return by_channel * values + torch.arange(shape[0], dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))


def norm_of(channels: int, flat: bool, **kinds: object) -> nn.Module:
    norm = (BatchNorm1d if flat else BatchNorm2d)(channels, **kinds).double()
    if norm.affine:
        nn.init.normal_(norm.weight, 1.0, 0.3, generator=Generator().manual_seed(5))
        nn.init.normal_(norm.bias, generator=Generator().manual_seed(6))
    return norm


def gradients(y: Tensor, x: Tensor, norm: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad((y * torch.sin(torch.arange(y.numel()).view_as(y))).sum(), [x, *norm.parameters()]))


@given(
    parts=st.integers(2, 6),
    size=st.integers(2, 5),
    channels=st.integers(1, 4),
    flat=st.booleans(),
    stored=st.booleans(),
    momentum=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    affine=st.booleans(),
    last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_batch_in_parts_is_its_parts_passed_alone(
    parts: int, size: int, channels: int, flat: bool, stored: bool, momentum: float, affine: bool, last: bool, seed: int
) -> None:
    kinds = {"track_running_stats": stored, "momentum": momentum, "affine": affine}
    alone, together = norm_of(channels, flat, **kinds), norm_of(channels, flat, **kinds)
    x = drawn(seed, parts * size, channels, *([] if flat else [3, 2]))
    if last and not flat:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    expected = torch.cat([alone(part) for part in x.split(size)])
    together.parts = parts
    found = together(x)
    assert torch.allclose(found, expected)
    assert found.stride() == together(x.detach().clone(memory_format=torch.preserve_format)).stride() == x.stride()
    for mine, theirs in zip(gradients(found, x, together), gradients(expected, x, alone), strict=True):
        assert torch.allclose(mine, theirs)
    if stored:
        for each in x.split(size):
            alone(each)  # `together` has seen the batch twice
        assert torch.allclose(together.running_mean, alone.running_mean)
        assert torch.allclose(together.running_var, alone.running_var)


def test_second_derivatives_too() -> None:
    norm = norm_of(2, True, track_running_stats=False)
    norm.parts = 2
    assert torch.autograd.gradgradcheck(norm, drawn(1, 6, 2).requires_grad_())


def test_stored_statistics_know_no_parts() -> None:
    norm = norm_of(3, True, track_running_stats=True).eval()
    x = drawn(2, 5, 3)
    expected = norm(x)
    norm.parts = 4
    assert torch.equal(norm(x), expected)


def test_few_bits_in_are_few_bits_out_and_statistics_have_all() -> None:
    x = (100 + drawn(3, 8, 2, 4, 4)).to(torch.bfloat16)
    found = batch_norm_in_parts(x, 2, None, None, torch.ones(2), torch.zeros(2), 0.0, 1e-5)
    expected = batch_norm_in_parts(x.double(), 2, None, None, None, None, 0.0, 1e-5)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(("count", "parts"), [(7, 3), (2, 3), (3, 3)])
def test_unequal_parts_and_parts_of_one_value_are_refused(count: int, parts: int) -> None:
    norm = norm_of(2, True)
    norm.parts = parts
    with pytest.raises(NessError, match=rf"a batch of {count} in {parts} parts; expected equal parts"):
        norm(torch.zeros(count, 2, dtype=torch.float64))


@given(parts=st.integers(1, 20), momentum=st.floats(0, 1), seed=st.integers(0, 99))
def test_moving_once_is_moving_part_by_part(parts: int, momentum: float, seed: int) -> None:
    running, found = drawn(seed, 2, 3)[0], drawn(seed + 1, parts, 3)
    expected = running.clone()
    for each in found:
        expected.lerp_(each, momentum)
    move_(running, found, momentum)
    assert torch.allclose(running, expected, rtol=1e-5, atol=1e-5)
