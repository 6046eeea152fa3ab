"""The rows behind a gradient: Σ gᵀ x is the gradient, and projecting them is projecting it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tiny
from ness.lab.methods._pairs import Pairs
from ness.lab.methods._projection.project import Projecting, gradient_of, project_gradients, removal
from ness.lab.methods.base import clear
from ness.lab.methods.gpm import Gpm
from ness.layers import LinearLayer


def layer(inputs: int, outputs: int, *, bias: bool, seed: int) -> LinearLayer:
    torch.manual_seed(seed)
    module = nn.Linear(inputs, outputs, bias=bias).double()
    return LinearLayer("fc", module)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bias=st.booleans(),
    passes=st.integers(1, 3),
    together=st.booleans(),
    inputs=st.integers(2, 9),
)
def test_projecting_rows_is_projecting_the_gradient(seed, bias, passes, together, inputs) -> None:
    """Whether the passes are of one backward call or of several that add up."""
    held = layer(inputs, 20, bias=bias, seed=seed)
    pairs = Pairs({"fc": held})
    with pairs.watching():
        losses = [held.module(normal(3, 2, inputs, seed=seed + n)[:, 0]).square().sum() for n in range(passes)]
        for loss in [torch.stack(losses).sum()] if together else losses:
            loss.backward()
    known = pairs.of("fc")
    assert known is not None
    torch.testing.assert_close(known[1].mT @ known[0], gradient_of(held))
    basis, _ = torch.linalg.qr(normal(held.width, 1 + seed % held.width, seed=seed))
    expected = removal(basis)(gradient_of(held))
    project_gradients({"fc": held}, {"fc": removal(basis)}, pairs)
    torch.testing.assert_close(gradient_of(held), expected)


def test_a_gradient_that_is_cleared_begins_anew() -> None:
    held = layer(4, 20, bias=False, seed=1)
    pairs = Pairs({"fc": held})
    with pairs.watching():
        held.module(normal(3, 4, seed=1)).sum().backward()
        held.weight.grad = None
        (held.module(normal(3, 4, seed=2)).sum() + held.module(normal(3, 4, seed=3)).square().sum()).backward()
    rows, outer = pairs.of("fc")
    assert len(rows) == 6
    torch.testing.assert_close(outer.mT @ rows, held.weight.grad)


def test_many_rows_and_passes_without_gradient_are_left_to_the_gradient() -> None:
    held = layer(4, 5, bias=False, seed=1)
    pairs = Pairs({"fc": held})
    with pairs.watching():
        with torch.no_grad():
            held.module(normal(3, 4, seed=1))
        assert pairs.of("fc") is None
        held.module(normal(5, 4, seed=1)).sum().backward()
    assert pairs.of("fc") is None
    pairs.clear()
    assert not pairs.held
    assert not held.module._forward_hooks


OWN_CHANGES = {
    "gpm": {"optimizer": "sam"},
    "dfgp": {"batch": 4},
    "trgp": {"network": tiny.WITHOUT_BIAS},
    "codecl": {"network": tiny.WITHOUT_BIAS, "overlap": 0.0, "shared": 5},
}


@pytest.mark.parametrize("method", ["gpm", "sgp", "dfgp", "sd", "owm", "ogd", "trgp", "codecl"])
def test_a_run_by_rows_ends_where_one_by_gradients_does(method: str, monkeypatch) -> None:
    changes = {"batch": 8} | OWN_CHANGES.get(method, {})
    one = tiny.to_the_end(tiny.trainer(method, epochs=1, **changes))
    asked = []
    kept = Pairs.of
    monkeypatch.setattr(Pairs, "of", lambda self, name: asked.append(kept(self, name)))  # None: by gradients
    other = tiny.to_the_end(tiny.trainer(method, epochs=1, **changes))
    assert any(found is not None for found in asked)  # or nothing was compared
    assert method not in ("trgp", "codecl") or "fc" in one.method.scales[2]  # whose inputs are scaled
    mine, theirs = one.context.model.state_dict(), other.context.model.state_dict()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "paired"),
    [
        pytest.param({}, [], id="bias"),
        pytest.param({"network": tiny.WITHOUT_BIAS}, ["fc"], id="inputs are scaled"),
        pytest.param({"network": tiny.WITHOUT_BIAS, "subtracted": "detached"}, [], id="detached"),
    ],
)
def test_layers_whose_weights_are_scaled_have_no_pairs(changes, paired) -> None:
    """They multiply by other weights than those that train."""
    held = tiny.trainer("codecl", **changes).method
    assert isinstance(held, Projecting)
    assert list(held.pairs.layers) == paired


def test_a_loss_of_a_subclasss_own_is_projected_as_it_is() -> None:
    """A penalty on weights is in .grad, and in no row of any batch."""
    for loss in (Gpm.loss, lambda self, batch: Gpm.loss(self, batch) + 0.1 * self.layers["fc"].weight.square().sum()):
        one = tiny.trainer("gpm", batch=8)
        one.method.__class__ = type("Penalised", (type(one.method),), {} if loss is Gpm.loss else {"loss": loss})
        while one.at < 1:
            one.advance()
        one.advance()
        method, trained = one.method, one.learning.trained
        batch = one.data["train"][1].take(torch.arange(8))
        clear(trained)
        with method.watching():
            method.gradients(batch, trained, sam=False)
        expected = method.removals["fc"](gradient_of(method.layers["fc"]))
        assert bool(method.pairs.held) == (loss is Gpm.loss)
        method.after_backward(batch)
        torch.testing.assert_close(gradient_of(method.layers["fc"]), expected, rtol=1e-4, atol=1e-6)
