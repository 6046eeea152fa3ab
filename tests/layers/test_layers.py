"""Layer kinds: rows are exactly what the weight multiplies (N7), for every kind and geometry."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ness
from helpers import Conv1D, Transformer, layers
from ness.layers import AttentionInput, AttentionOutput, ConvLayer, LinearLayer, TransposedLinearLayer, layers_of


@given(layer=layers(), seed=st.integers(0, 999))
@settings(max_examples=80, deadline=None)
def test_rows_times_weight_is_the_output(layer: tuple[nn.Module, tuple[int, ...]], seed: int) -> None:
    torch.manual_seed(seed)
    module, shape = layer[0].double(), layer[1]
    (found,) = layers_of("x", module)
    x = torch.randn(3, *shape, dtype=torch.float64)
    seen: list[tuple[Tensor, Tensor]] = []
    handle = found.watch(module, lambda rows, outputs: seen.append((rows, outputs)))
    with torch.no_grad():
        y = module(x)
    handle.remove()
    matrix = found.stored()[..., : found.fan_in]
    for rows, outputs in seen:
        by_hand = rows.reshape(found.groups, -1, found.fan_in) @ matrix.mT  # (groups, n, o)
        if found.bias is not None:
            by_hand = by_hand + found.stored()[..., found.fan_in].unsqueeze(1)
        flat = outputs if isinstance(module, nn.Linear) else outputs.movedim(1, -1)
        expected = flat.reshape(-1, found.groups, found.outputs).transpose(0, 1)
        assert torch.allclose(by_hand, expected, atol=1e-9)
    assert sum(outputs.numel() for _, outputs in seen) == y.numel()


def test_patches_are_those_of_a_triple_loop() -> None:
    conv = nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0)).double()
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    padded = nn.functional.pad(x, (0, 0, 1, 1))
    rows = [
        padded[image, :, i : i + 2, j : j + 3].flatten()
        for image, i, j in itertools.product(range(2), range(0, 6, 2), range(3))
    ]
    assert torch.equal(ConvLayer("x", conv).patches(conv, x)[0], torch.stack(rows))


def test_an_unbatched_image_is_one_image() -> None:
    conv = nn.Conv2d(2, 3, 3)
    seen: list[Tensor] = []
    ConvLayer("x", conv).watch(conv, lambda rows, _: seen.append(rows))
    conv(torch.randn(2, 8, 8))
    assert seen[0].shape == (1, 1, 6, 6, 2, 3, 3)


def test_patches_are_a_view_until_they_are_needed() -> None:
    conv = nn.Conv2d(2, 3, 3)
    seen: list[Tensor] = []
    ConvLayer("x", conv).watch(conv, lambda rows, _: seen.append(rows))
    x = torch.randn(10, 2, 8, 8)
    conv(x)
    assert seen[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("module", [nn.Linear(4, 3), Conv1D(3, 4), nn.Conv2d(4, 6, 3, groups=2)])
def test_matrix_and_weight_are_inverse(module: nn.Module) -> None:
    (layer,) = layers_of("x", module)
    assert torch.equal(layer.to_weight(layer.to_matrix(layer.weight)), layer.weight)
    assert layer.stored().shape == (layer.groups, layer.outputs, layer.width)


def test_attention_has_four_layers_and_true_rows() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    found = {layer.name: layer for layer in layers_of("a", attention)}
    assert sorted(found) == ["a.in_proj.k", "a.in_proj.q", "a.in_proj.v", "a.out_proj"]
    q, k = torch.randn(2, 3, 8).double(), torch.randn(2, 5, 8).double()
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in found}
    for name, layer in found.items():
        (host,) = layer.hosts
        layer.watch(host, lambda rows, outputs, name=name: seen[name].append((rows, outputs)))
    with torch.no_grad():
        y, _ = attention(q, key=k, value=k)
    assert torch.equal(seen["a.in_proj.q"][0][0], q.reshape(1, -1, 8))
    assert torch.equal(seen["a.in_proj.v"][0][0], k.reshape(1, -1, 8))
    assert [len(calls) for calls in seen.values()] == [1, 1, 1, 1]  # the second pass is nobody's business
    ((context, _),) = seen["a.out_proj"]
    by_hand = nn.functional.linear(context[0], attention.out_proj.weight, attention.out_proj.bias)
    assert torch.allclose(by_hand, y.reshape(-1, 8), atol=1e-12)


def test_attention_with_separate_projections() -> None:
    model = Transformer()
    found = {layer.name: layer for layer in layers_of("cross", model.cross)}
    assert found["cross.in_proj.k"].weight is model.cross.k_proj_weight
    assert (found["cross.in_proj.k"].fan_in, found["cross.in_proj.v"].fan_in) == (16, 24)


def test_kinds_are_recognised_and_strangers_are_not() -> None:
    class OwnForward(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input * 2)

    class Sub(nn.Linear):
        pass

    assert isinstance(layers_of("x", Sub(2, 2))[0], LinearLayer)
    assert isinstance(layers_of("x", Conv1D(2, 2))[0], TransposedLinearLayer)
    kinds = [type(layer) for layer in layers_of("x", nn.MultiheadAttention(4, 2))]
    assert kinds == [AttentionInput] * 3 + [AttentionOutput]
    for stranger in (OwnForward(2, 2), nn.LSTM(2, 2), nn.ConvTranspose2d(2, 2, 2), nn.Embedding(3, 2), nn.ReLU()):
        assert layers_of("x", stranger) == []
    assert layers_of("x", torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))) == []


class TwoAttentions(nn.Module):
    """Two attention modules with one set of weights, called one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.MultiheadAttention(12, 2, batch_first=True) for _ in range(2))
        self.b.in_proj_weight, self.b.in_proj_bias = self.a.in_proj_weight, self.a.in_proj_bias
        self.b.out_proj.weight, self.b.out_proj.bias = self.a.out_proj.weight, self.a.out_proj.bias

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.a(x, x, x)[0] + self.b(z, z, z)[0]


def test_attentions_with_one_set_of_weights_are_both_protected() -> None:
    torch.manual_seed(0)
    model = TwoAttentions().eval()
    x, z = (torch.randn(60, 4, 3) @ torch.randn(3, 12) for _ in range(2))
    guard = ness.NullSpace(model, rule=ness.Nuclear(1e-7))
    guard.observe({"x": x, "z": z})
    assert {gram.count for gram in guard.grams.values()} == {480}
    before = model.a(x, x, x)[0].detach(), model.b(z, z, z)[0].detach()
    guard.constrain()
    optimizer = torch.optim.AdamW(guard.parameters(), lr=3e-2)
    for _ in range(20):
        optimizer.zero_grad()
        (model(torch.randn(16, 4, 12), torch.randn(16, 4, 12)) - 1).square().mean().backward()
        optimizer.step()
    assert guard.certificate().holds
    for attention, rows, output in ((model.a, x, before[0]), (model.b, z, before[1])):
        assert (attention(rows, rows, rows)[0] - output).norm() < 1e-4 * output.norm()


def test_a_pass_of_attention_is_seen_once_by_the_guard_and_by_others() -> None:
    attention, calls = nn.MultiheadAttention(8, 2, batch_first=True), []
    attention.register_forward_hook(lambda *_: calls.append(1))
    by_position = lambda model, x: model(x, x, x, None, False)[0]  # noqa: E731  # need_weights is the fifth
    guard = ness.NullSpace(attention)
    guard.observe([torch.randn(4, 5, 8)] * 3, forward=by_position)
    assert [gram.count for gram in guard.grams.values()] == [60, 60, 60, 60]
    assert len(calls) == 3
