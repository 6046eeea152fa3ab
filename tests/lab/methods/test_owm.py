"""OWM against its closed form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from ness import NessError
from ness.lab.methods._projection.rows import input_grams
from ness.lab.methods.owm import decays, mean_rows, shrunk, shrunk_by_gram
from ness.lab.networks import norms
from ness.lab.runs.jobs import resolve

EYE = torch.eye(2, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_one_input_by_hand() -> None:
    """O1."""
    assert torch.equal(
        shrunk(EYE, torch.tensor([[1.0, 0.0]], dtype=torch.float64), 1.0), torch.diag(EYE.new_tensor([0.5, 1]))
    )


def test_a_sequence_is_the_inverse_of_the_sum() -> None:
    """O2: P⁻¹ = I + Σ r rᵀ/α."""
    projector, inverse = EYE, EYE.clone()
    for row, alpha in (((1.0, 0.0), 1.0), ((1.0, 1.0), 0.5), ((2.0, -1.0), 0.1)):
        r = torch.tensor([row], dtype=torch.float64)
        projector = shrunk(projector, r, alpha)
        inverse = inverse + r.mT @ r / alpha
    assert torch.allclose(projector, torch.linalg.inv(inverse), atol=1e-15)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 12), count=st.integers(1, 15), alpha=st.floats(1e-4, 10))
def test_projectors_shrink_and_blocks_are_sequences(seed, width, count, alpha) -> None:
    """O3 and O4, and that the Gram gives the same."""
    rows = normal(count, width, seed=seed)
    one_by_one = torch.eye(width, dtype=torch.float64)
    for row in rows:
        r = row.unsqueeze(0)
        before = one_by_one @ row
        one_by_one = shrunk(one_by_one, r, alpha)
        expected = alpha / (alpha + float(row @ before)) * before.norm()
        assert float((one_by_one @ row).norm()) == pytest.approx(float(expected), rel=1e-6, abs=1e-9)
    at_once = shrunk(torch.eye(width, dtype=torch.float64), rows, alpha)
    by_gram = shrunk_by_gram(torch.eye(width, dtype=torch.float64), rows.mT @ rows, alpha)
    for found in (one_by_one, at_once, by_gram):
        assert torch.equal(found, found.mT)
        values = torch.linalg.eigvalsh(found)
        assert values.min() > 0
        assert values.max() <= 1 + 1e-8  # rounding, as large as ‖R‖²/α allows
        assert torch.allclose(found, at_once, atol=1e-7)


def test_what_a_batch_shows() -> None:
    """The mean input of a linear layer; every second patch of the mean image of a convolution."""
    one = tiny.trainer("owm")
    model, layers = one.context.model, one.method.layers
    x = torch.randn(5, 1, 6, 6)
    rows = mean_rows(layers["conv"], model.conv, x, model.conv(x))
    assert rows.shape == (9, 9)
    grid = layers["conv"].patches(model.conv, x.mean(0, keepdim=True))[0]
    assert torch.equal(rows.float(), grid[[0, 2, 4, 12, 14, 16, 24, 26, 28]])
    flat = torch.randn(5, 36)
    rows = mean_rows(layers["fc"], model.fc, flat, model.fc(flat))
    assert torch.allclose(rows[0, :-1].float(), flat.mean(0))
    assert rows[0, -1] == 1


def test_at_the_end_of_a_task_the_projector_is_the_closed_form_of_its_inputs() -> None:
    one = tiny.trainer("owm", alpha=0.05)
    while one.at < 1:
        one.advance()
    grams = input_grams(one.context.model, one.method.layers, one.data["train"][0], 16)
    for name, gram in grams.items():
        assert gram.count == {"conv": 56 * 36, "fc": 56}[name]
        inverse = torch.eye(gram.matrix.shape[1]) + gram.matrix[0] / gram.count / 0.05
        assert torch.allclose(one.method.projectors[name], torch.linalg.inv(inverse), atol=1e-9)
    gradient = torch.randn(3, 37)
    expected = gradient @ one.method.projectors["fc"].float()
    assert torch.allclose(one.method.removals["fc"](gradient), expected, atol=1e-5)


def test_batches_in_one_pass_give_the_grams_of_one_by_one(monkeypatch) -> None:
    one = tiny.trainer("owm", norm="batch")
    found = []
    for on_gpu in (False, True):
        monkeypatch.setattr(norms, "on_gpu", lambda network, on_gpu=on_gpu: on_gpu)
        found.append(input_grams(one.context.model, one.method.layers, one.data["train"][0], 16))
    for alone, together in zip(*(grams.values() for grams in found), strict=True):
        assert alone.count == together.count
        assert torch.allclose(alone.matrix, together.matrix, rtol=1e-6, atol=1e-6 * float(alone.matrix.max()))


def test_every_batch_it_learns_from_the_first_step_and_is_taken_up_bit_for_bit() -> None:
    changes = {"updates": "every-batch", "optimizer": "sgdm", "clip": 10.0, "lr": 0.02}
    whole = tiny.trainer("owm", **changes)
    traces = []
    for _ in range(8):
        whole.advance()
        traces.append(float(whole.method.projectors["fc"].trace()))
    assert traces[0] == 37
    assert traces[1:4] == sorted(traces[1:4], reverse=True)
    assert traces[1] < 37
    tensors, manifest = whole.state()
    held = {name: value.clone() for name, value in tensors.items()}
    tiny.to_the_end(whole)
    later = tiny.trainer("owm", **changes)
    later.load_state(held, manifest)
    assert tiny.same(tiny.to_the_end(later), whole)
    assert not tiny.same(tiny.to_the_end(tiny.trainer("owm", optimizer="sgdm", lr=0.02)), whole)


def test_decays_presets_and_bad_settings() -> None:
    one = tiny.trainer("owm")
    assert decays(one.method.layers.values(), one.method.own) == {"conv": 1e-5, "fc": 1e-4}
    reference = resolve("owm", "cifar100", "reference").settings
    assert (reference.updates, reference.optimizer, reference.lr, reference.epochs) == ("every-batch", "sgdm", 0.02, 25)
    for changes, message in (
        ({"alpha": 0.0}, "alpha is 0.0, expected above 0"),
        ({"updates": "every-batch", "conv_decay": 2.0}, "conv_decay is 2.0"),
        ({"updates": "every-batch", "fc_decay": ()}, "fc_decay is"),
        ({"conv_decay": 1e-3}, "conv_decay was set, but updates is 'task-end'"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"optimizer": "adamw"}, "owm does not go with adamw"),
    ):
        with pytest.raises(NessError, match=message):
            tiny.job("owm", **changes)
