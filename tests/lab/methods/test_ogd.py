"""OGD against its definition."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tiny
from ness import NessError
from ness.lab.methods._pairs import Pairs
from ness.lab.methods._projection.project import gradient_of, put_gradient
from ness.lab.methods.base import clear, sizes_of
from ness.lab.methods.ogd import TINY, Ogd, extended
from ness.lab.networks.base import NetworkSpec, Norms, norm1d
from ness.lab.runs import checkpoint
from ness.lab.training.loop import Trainer

NONE = torch.zeros(0, 0, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram_schmidt(vectors: Tensor) -> Tensor:
    """Orthonormal rows S (r, p): what is new in each vector (m, p), in order, twice each."""
    basis = vectors[:0]
    for vector in vectors:
        left = vector
        for _ in range(2):
            left = left - (basis @ left) @ basis
        if float(left.norm()) > TINY * float(vector.norm()):
            basis = torch.cat([basis, (left / left.norm()).unsqueeze(0)])
    return basis


def basis_of(vectors: Tensor) -> Tensor:
    """S = R V."""
    return extended(NONE, vectors @ vectors.mT) @ vectors


def test_a_linear_models_stored_outputs_do_not_move() -> None:
    """OG1: f = w·x; the gradient of f is x."""
    weight, stored, new = normal(8), normal(3, 8, seed=1), normal(20, 8, seed=2)
    basis, before = basis_of(stored), stored @ weight
    for x in new:
        gradient = (weight @ x - 1) * x
        weight = weight - 0.05 * (gradient - (basis @ gradient) @ basis)
    assert (stored @ weight - before).abs().max() < 1e-12
    assert (new @ weight - new @ normal(8)).abs().max() > 1e-2


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 30),
    first=st.integers(1, 8),
    more=st.integers(1, 12),
    again=st.integers(0, 4),
)
def test_a_basis_from_inner_products_is_that_of_gram_schmidt(seed, width, first, more, again) -> None:
    """OG2; with vectors that are nothing new and zeros among them, all at once or task after task."""
    start = normal(first, width, seed=seed)
    copied = normal(again, first, seed=seed + 2) @ start
    vectors = torch.cat([start, copied, torch.zeros(1, width), normal(more, width, seed=seed + 1)])
    gram = vectors @ vectors.mT
    known = extended(NONE, gram[:first, :first])
    mixing = extended(known, gram)
    assert torch.equal(mixing[: len(known), :first], known)
    assert not mixing[: len(known), first:].any()
    assert not mixing[:, first : first + again + 1].any()  # what is dropped is not used either
    basis, expected = mixing @ vectors, gram_schmidt(vectors)
    assert (basis @ basis.mT - torch.eye(len(basis))).abs().max() < 1e-9
    torch.testing.assert_close(basis, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(extended(NONE, gram), mixing, rtol=1e-6, atol=1e-8)


def test_a_sample_twice_adds_no_direction() -> None:
    """OG3."""
    vectors = normal(3, 9)
    assert len(basis_of(vectors)) == 3
    assert len(basis_of(torch.cat([vectors, 5 * vectors[1:2], torch.zeros(1, 9)]))) == 3
    assert len(basis_of(torch.cat([vectors, vectors[1:2] + 2 * TINY * normal(1, 9, seed=5)]))) == 4


class Meeting(tiny.TinyNet):
    """The tiny network with a BatchNorm behind the linear layer, too: with batch statistics samples meet there."""

    bias = True

    def __init__(self, shape: tuple[int, ...], classes: Any, norms: Norms) -> None:
        super().__init__(shape, classes, norms)
        self.fc = nn.Linear(self.fc.in_features, 16, bias=self.bias)
        self.norm1 = norm1d(16, norms)

    def features(self, x: Tensor) -> Tensor:
        x = self.dropout(self.pool(torch.relu(self.norm(self.conv(x)))))
        return torch.relu(self.norm1(self.fc(x.flatten(1))))


class WithoutBias(Meeting):
    bias = False


def trainer(network: type, **changes: Any) -> Trainer:
    work = tiny.job("ogd", **{"epochs": 2, "samples": 20, "batch": 8, **changes})
    return Trainer(work.method, NetworkSpec("tiny", "for tests", network), work.load(1, None), work.settings, 1)


def in_last_task(network: type, **changes: Any) -> Trainer:
    one = trainer(network, **changes)
    while one.at < 2:
        one.advance()
    one.advance()
    return one


def stored(method: Ogd) -> Tensor:
    """V (m, p) itself, in float64."""
    assert method.kept is not None
    kept, at = method.kept, 0
    parts = []
    for name, layer in method.layers.items():
        if name in kept.factored:
            held = kept.factored[name]
            whole = torch.einsum("gkbo,gbd->gkod", held.outputs.double(), held.inputs.double())
            parts.append(whole.reshape(len(method.gram), -1))
        else:
            size = layer.outputs * layer.width
            parts.append(kept.dense[:, at : at + size].double())
            at += size
    return torch.cat(parts, 1)


def gradient(method: Ogd) -> Tensor:
    return torch.cat([gradient_of(layer).flatten() for layer in method.layers.values()]).double()


NETWORKS = pytest.mark.parametrize("network", [tiny.TinyNet, Meeting, WithoutBias])


@pytest.mark.parametrize("norm", ["batch", "stored"])
@NETWORKS
def test_the_factored_projection_is_that_of_a_dense_basis(network, norm, monkeypatch) -> None:
    """g - Sᵀ S g, S by Gram-Schmidt from the gradients of two tasks: of random gradients, and of a batch's by rows."""
    one = in_last_task(network, norm=norm)
    method, trained = one.method, one.learning.trained
    assert list(method.kept.factored) == ["fc"]
    meet = network is not tiny.TinyNet and norm == "batch"
    assert method.kept.factored["fc"].outputs.shape[:3] == ((2, 20, 20) if meet else (40, 1, 1))
    vectors = stored(method)
    basis = gram_schmidt(vectors)
    assert len(basis) == len(method.mixing) == one.notes[1]["directions"] > 30
    torch.testing.assert_close(method.gram, vectors @ vectors.mT, rtol=1e-10, atol=1e-10)
    rows, kept = [], Pairs.of
    monkeypatch.setattr(Pairs, "of", lambda self, name: rows.append(kept(self, name)) or rows[-1])
    batch = one.data["train"][2].take(torch.arange(8))
    for seed in (None, 1, 2, 3):
        if seed is None:
            clear(trained)
            with method.watching():
                method.gradients(batch, trained, sam=False)
        else:
            for layer in method.layers.values():
                put_gradient(layer, normal(layer.outputs, layer.width, seed=seed).float())
        before = gradient(method)
        method.after_backward(batch)
        expected = before - (basis @ before) @ basis
        assert expected.norm() < 0.999 * before.norm()
        assert (gradient(method) - expected).norm() < 1e-5 * before.norm()
    assert [found is not None for found in rows] == [True, False, False, False]


@NETWORKS
def test_what_is_kept_is_at_most_what_is_listed_however_many_samples(network) -> None:
    for samples in (4, 20, 56):
        one = in_last_task(network, samples=samples, epochs=1)
        most = one.spec.kept_at_most(sizes_of(one.context.model, 3, (1, 6, 6)), one.context.own)
        held = sum(value.numel() * value.element_size() for value in one.method.state()[0].values())
        assert 0 < held <= most


def test_taken_up_bit_for_bit_where_samples_meet(tmp_path) -> None:
    """What test_train does for samples that do not."""
    whole = in_last_task(Meeting)
    cut = checkpoint.write(tmp_path, *whole.state())
    tiny.to_the_end(whole)
    later = trainer(Meeting)
    later.load_state(*checkpoint.read(cut))
    assert tiny.same(tiny.to_the_end(later), whole)


def test_a_later_task_moves_stored_logits_far_less_than_without() -> None:
    """The method as a whole: every stored gradient is orthogonal to the way the shared weights went."""
    one = tiny.trainer("ogd")

    def weights() -> Tensor:
        return torch.cat([layer.stored().flatten() for layer in one.method.layers.values()]).double()

    while one.at < 1:
        one.advance()
    basis, before = gram_schmidt(stored(one.method)), weights()
    assert one.notes[0]["directions"] == len(basis) > 10
    while one.at < 2:
        one.advance()
    way = weights() - before
    assert way.norm() > 1e-2
    assert (basis @ way).norm() < 1e-4 * way.norm()
    assert one.notes[1]["directions"] > len(basis)


def test_bad_settings_are_refused() -> None:
    for changes, message in (
        ({"samples": 1}, "samples is 1, expected at least 2"),
        ({"weight_decay": 0.1}, "weight_decay is 0.1, expected 0"),
        ({"optimizer": "adamw"}, "ogd does not go with adamw"),
    ):
        with pytest.raises(NessError, match=message):
            tiny.job("ogd", **changes)
    with pytest.raises(NessError, match="samples is 57, but task 1 has 56"):
        tiny.trainer("ogd", samples=57).advance()
