"""CODE-CL against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from ness import NessError
from ness.lab.jobs import resolve
from ness.lab.methods._basis import directions
from ness.lab.methods._conceptors import (
    Conceptor,
    conceptor,
    conjunction,
    disjunction,
    negation,
    of_rows,
    with_aperture,
    within,
)  # fmt: skip
from ness.lab.methods._project import removal
from ness.lab.methods._scales import identity_scale, rescaled


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def diagonal(*values: float) -> torch.Tensor:
    return torch.diag(torch.tensor(values, dtype=torch.float64))


def dense(one: Conceptor) -> torch.Tensor:
    return one.vectors * one.values @ one.vectors.mT


def test_conceptors_by_hand() -> None:
    """C1 and C3."""
    one = torch.ones(1, 1, dtype=torch.float64)
    assert float(conceptor(one, 1.0)) == pytest.approx(0.5)
    assert float(conceptor(one, 2.0)) == pytest.approx(0.8)
    assert float(with_aperture(0.5 * one, 2.0)) == pytest.approx(0.8)


def test_and_or_by_hand() -> None:
    """C2: ab/(a + b - ab) and (a + b - 2ab)/(1 - ab), and zeros."""
    a, b = diagonal(0.5, 0.9, 0.0), diagonal(0.5, 0.0, 0.3)
    assert torch.allclose(conjunction(a, b), diagonal(1 / 3, 0, 0), atol=1e-7)
    assert torch.allclose(disjunction(a, b), diagonal(2 / 3, 0.9, 0.3), atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 10), one=st.floats(0.1, 20), other=st.floats(0.1, 20))
def test_the_algebra(seed, width, one, other) -> None:
    """C4: symmetric, spectrum in [0, 1], OR holds at least what either does, AND at most; φ is another aperture."""
    rows = [normal(3 * width, width, seed=seed + i) / 3 for i in range(2)]
    correlations = [x.mT @ x / len(x) for x in rows]
    c, b = (conceptor(r, aperture) for r, aperture in zip(correlations, (one, other), strict=True))
    both, either = conjunction(c, b), disjunction(c, b)
    for found in (c, b, both, either):
        assert torch.allclose(found, found.mT, atol=1e-8)
        values = torch.linalg.eigvalsh((found + found.mT) / 2)
        assert values.min() > -1e-6
        assert values.max() < 1 + 1e-6
    for each in (c, b):
        assert torch.linalg.eigvalsh(either - each).min() > -1e-6
        assert torch.linalg.eigvalsh(each - both).min() > -1e-6
    assert torch.allclose(disjunction(c, b), disjunction(b, c), atol=1e-6)
    assert torch.allclose(negation(negation(c)), c)
    assert torch.allclose(with_aperture(c, 3.0), conceptor(correlations[0], 3 * one), atol=1e-6)


def test_thin_conceptors_are_the_dense_ones() -> None:
    rows = normal(5, 12)
    thin = of_rows(rows, 4.0, 0.01)
    assert torch.allclose(dense(thin), conceptor(rows.mT @ rows / 5, 4.0), atol=1e-10)
    other = of_rows(normal(6, 12, seed=1), 4.0, 0.01)
    for operation in (conjunction, disjunction):
        found = within(operation, thin, other)
        assert torch.allclose(dense(found), operation(dense(thin), dense(other)), atol=1e-6)
    assert float(thin.capacity) == pytest.approx(float(torch.linalg.eigvalsh(dense(thin)).mean()))
    assert thin.cut(0.9).values.min() >= 0.9


def test_the_aperture_grows_until_inputs_are_kept() -> None:
    rows = normal(30, 8)
    for recall in (0.5, 0.95, 0.999):
        kept = (rows @ dense(of_rows(rows, 0.1, recall))).norm(dim=1) / rows.norm(dim=1)
        assert recall <= float(kept.mean()) < recall + 0.05
    blank = of_rows(torch.zeros(4, 8, dtype=torch.float64), 1.0, 0.9)  # a layer that sees nothing
    assert blank.vectors.shape == (8, 0)
    assert float(of_rows(torch.cat([rows, torch.zeros(30, 8)]), 6.0, 0.95).capacity) > 0


def test_scales_start_at_the_shared_weights() -> None:
    """C5."""
    basis, weight = torch.linalg.qr(normal(7, 3))[0], normal(4, 7, seed=1)
    assert torch.equal(rescaled(weight, [identity_scale(basis)]), weight)
    assert torch.allclose(rescaled(weight, [identity_scale(basis)], detached=True), weight, atol=1e-12)


def test_a_wide_aperture_is_gpm_on_all_directions() -> None:
    """C6."""
    rows, gradient = normal(4, 9), normal(3, 9, seed=1)
    wide = of_rows(rows, 1e6, 0.01)
    held, _ = directions(rows)
    assert torch.allclose(removal(wide.vectors, wide.values)(gradient), removal(held)(gradient), atol=1e-9)


def test_the_method_scales_what_overlaps_and_keeps_earlier_tasks_apart() -> None:
    one = tiny.to_the_end(tiny.trainer("codecl", overlap=0.0, shared=5))
    assert set(one.method.scales) == {1, 2}
    (scale,) = one.method.scales[2]["conv"]
    assert scale.basis.shape == (9, 5)
    assert not torch.equal(scale.matrix, torch.eye(5))
    batches = [samples.take(torch.arange(20)) for samples in one.data["test"]]
    one.context.model.eval()
    with torch.no_grad():
        before = [one.method.logits(batch) for batch in batches]
        scale.matrix.add_(1)
        after = [one.method.logits(batch) for batch in batches]
    assert [torch.equal(x, y) for x, y in zip(before, after, strict=True)] == [True, True, False]
    none = tiny.to_the_end(tiny.trainer("codecl", overlap=1.0))
    assert none.method.scales == {1: {}, 2: {}}
    assert set(none.notes[0]["capacity"]) == {"conv", "fc"}


def test_every_switch_of_the_reference_changes_the_run() -> None:
    base = {"epochs": 1, "overlap": 0.0, "shared": 5}
    fixed = tiny.to_the_end(tiny.trainer("codecl", **base))
    assert not tiny.same(tiny.to_the_end(tiny.trainer("codecl", **base, scale_start="random")), fixed)
    one = tiny.trainer("codecl", **base, subtracted="detached", shortcuts="plain")
    kinds = {name: one.method.detached(layer) for name, layer in one.method.layers.items()}
    assert kinds == {"conv": False, "fc": True}
    one.method.layers["layer2.0.shortcut.conv"] = one.method.layers["conv"]
    assert [one.method._wide_enough(name) for name in ("conv", "layer2.0.shortcut.conv")] == [True, False]


def test_presets_and_bad_settings() -> None:
    lr = {name: resolve("codecl", "cifar100", name).settings.lr for name in ("fixed", "reference")}
    assert lr == {"fixed": 0.01, "reference": 0.1}
    assert resolve("codecl", "mini-imagenet").settings.aperture == 8
    for changes, message in (
        ({"recall": 1.0}, "recall is 1, expected a share"),
        ({"aperture": 0.0}, "aperture is 0, expected above 0"),
        ({"weight_decay": 0.1}, "weight_decay is 0.1, expected 0"),
        ({"optimizer": "adamw"}, "codecl does not go with adamw"),
    ):
        with pytest.raises(NessError, match=message):
            tiny.job("codecl", **changes)
    with pytest.raises(NessError, match="samples is 57, but task 1 has 56"):
        tiny.trainer("codecl", samples=57).advance()
