"""CODE-CL against its definition."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from ness import NessError
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
from ness.lab.methods._projection.basis import directions
from ness.lab.methods._projection.project import removal
from ness.lab.methods._projection.scales import identity_scale, rescaled
from ness.lab.methods.base import TaskData
from ness.lab.runs.experiment import read
from ness.lab.runs.jobs import resolve
from ness.lab.training.loop import Trainer


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
        kept = (rows @ dense(of_rows(rows, 0.1, recall))).norm(dim=1).sum() / rows.norm(dim=1).sum()
        assert recall <= float(kept) < recall + 0.05
    blank = of_rows(torch.zeros(4, 8, dtype=torch.float64), 1.0, 0.9)  # a layer that sees nothing
    assert blank.vectors.shape == (8, 0)
    assert float(of_rows(torch.cat([rows, torch.zeros(30, 8)]), 6.0, 0.95).capacity) > 0


def test_what_is_kept_is_a_ratio_of_sums() -> None:
    """A hundred short rows along one axis, one long row along another: Σ‖Cx‖ / Σ‖x‖, not the mean of ‖Cx‖/‖x‖."""
    rows = torch.zeros(101, 2, dtype=torch.float64)
    rows[:100, 0], rows[100, 1] = 0.1, 100.0
    spectrum = torch.tensor([100 * 0.1**2, 100.0**2], dtype=torch.float64) / 101
    values = spectrum / (spectrum + 1)  # aperture 1
    sums = float((10 * values[0] + 100 * values[1]) / 110)
    means = float((100 * values[0] + values[1]) / 101)
    assert means < 0.1 < 0.8 < sums
    found = of_rows(rows, 1.0, 0.8)
    assert torch.allclose(found.values.sort().values, values, atol=1e-12)  # enough as it is: no aperture was raised


def before_the_second_task(**changes) -> tuple[Trainer, TaskData]:
    """A run that has learnt a task, and what is to be learnt next, as `before_task` finds it."""
    one = tiny.trainer("codecl", samples=56, **changes)
    while one.at < 1:
        one.advance()
    one.context.model.eval()
    return one, one._lesson()


def as_matrix(one: Conceptor) -> torch.Tensor:
    return one.vectors.double() * one.values.double() @ one.vectors.double().mT


def test_a_new_conceptor_is_cut_before_it_is_compared() -> None:
    """AND of what is held and of the new task's own conceptor, both without directions below the floor."""
    changes = {"shared": 5, "floor": 0.48, "aperture": 3.0, "recall": 0.01}
    one, lesson = before_the_second_task(overlap=0.0, **changes)
    method = one.method
    held = as_matrix(method.conceptors["conv"])
    images = lesson.train.take(torch.arange(56)).images
    patches = torch.nn.functional.unfold(images, 3, padding=1).mT.reshape(-1, 9).double()
    values, vectors = torch.linalg.eigh(patches.mT @ patches / len(patches))
    new = values / (values + method.own.aperture**-2)
    found = {}
    for name, kept in (("cut", torch.where(new < 0.48, 0.0, new)), ("whole", new)):
        both = conjunction(held, vectors * kept @ vectors.mT)
        found[name] = torch.linalg.eigvalsh(both).sum() / torch.linalg.eigvalsh(held).sum()
    assert 0.05 < found["cut"] < found["whole"] - 0.05  # or nothing is told apart
    for share, scaled in ((found["cut"] - 1e-3, True), (found["cut"] + 1e-3, False)):
        one, lesson = before_the_second_task(overlap=float(share), **changes)
        one.method.before_task(lesson)
        assert ("conv" in one.method.scales[1]) == scaled


@pytest.mark.parametrize("network", [tiny.NETWORK, tiny.WITHOUT_BIAS])
def test_after_a_task_rows_are_taken_under_its_scales(network) -> None:
    """fc sees what conv puts out with the task's own weights; its own inputs are taken as they come, unscaled."""
    one, lesson = before_the_second_task(overlap=0.0, shared=5, network=network, epochs=1)
    method, model = one.method, one.context.model
    method.before_task(lesson)
    assert {"conv", "fc"} >= set(method.scales[1]) >= {"conv"}
    with torch.no_grad():
        for scales in method.scales[1].values():
            scales[0].matrix.add_(0.3 * torch.randn(5, 5, generator=torch.Generator().manual_seed(1)))
    seen = method._rows(lesson)
    images = lesson.train.take(torch.arange(56)).images
    weight = model.conv.weight.detach()
    matrix = weight.reshape(len(weight), 9)
    (scale,) = method.scales[1]["conv"]
    effective = matrix + matrix @ scale.basis @ (scale.matrix.detach() - torch.eye(5)) @ scale.basis.mT
    assert not torch.allclose(effective, matrix, atol=1e-2)
    with torch.no_grad():
        maps = torch.nn.functional.conv2d(images, effective.reshape(weight.shape), padding=1)
        expected = model.pool(torch.relu(model.norm(maps))).flatten(1).double()
    if method.layers["fc"].bias is not None:
        expected = torch.cat([expected, torch.ones(56, 1, dtype=torch.float64)], 1)
    together = seen["fc"].mT @ seen["fc"]  # images were drawn in another order
    assert torch.allclose(together, expected.mT @ expected, rtol=1e-4, atol=1e-4)


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
    assert resolve("codecl", "cifar100", "reference").settings.split_seed == 0
    for benchmark, patience, factor, least in (("five-datasets", 6, 2, 0.004), ("mini-imagenet", 7, 2, 1e-5)):
        found = resolve("codecl", benchmark, "reference").settings
        assert (found.lr, found.patience, found.lr_factor, found.lr_min) == (0.1, patience, factor, least)
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


@pytest.mark.parametrize("plan", ["paper-cifar100", "paper-mini-imagenet"])
def test_the_papers_tables_run_it_at_the_rate_it_was_published_at(plan: str) -> None:
    path = Path(__file__).parents[3] / "experiments" / f"{plan}.toml"
    (job,) = (job for job in read(path).jobs if job.method.name == "codecl")
    assert (job.preset, job.settings.lr) == ("reference", 0.1)


def test_runs_of_the_rule_before_are_not_taken_for_runs_of_this_one() -> None:
    assert tiny.job("codecl").revision == 2
    assert tiny.job("gpm").revision == 1
