"""Relative moments and the arithmetic of a budget, by property."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ness.statistics.gram import Gram
from ness.statistics.moments import Moments
from ness.statistics.relative import (
    Relative,
    along,
    largest_share,
    relative_weight,
    shrink,
    solve_threshold,
    spending_limit,
    update_ratio,
)

energies = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


def spent_at(values: list[float], tau: float) -> float:
    return sum(min(value, tau**2) for value in values)


@given(values=energies, share=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_the_threshold_solves_its_equation(values: list[float], share: float) -> None:
    target = share * sum(values)
    tau = solve_threshold(torch.tensor(values, dtype=torch.float64), target)
    assert spent_at(values, tau) == pytest.approx(target, rel=1e-9, abs=1e-9 * max(values))
    assert tau**2 <= max(values) * (1 + 1e-12)


@given(values=energies, beyond=st.floats(1, 1e6))
@settings(max_examples=50, deadline=None)
def test_a_target_out_of_reach_frees_everything(values: list[float], beyond: float) -> None:
    for target in (sum(values) * beyond, math.inf):
        tau = solve_threshold(torch.tensor(values, dtype=torch.float64), target)
        assert tau == pytest.approx(math.sqrt(max(values)), rel=1e-6)


def test_groups_share_one_threshold() -> None:
    flat = torch.tensor([1.0, 4.0, 9.0, 16.0], dtype=torch.float64)
    assert solve_threshold(flat.reshape(2, 2), 11.0) == solve_threshold(flat, 11.0) == math.sqrt(3.0 + 1 / 3)


@given(drift=st.floats(1e-3, 1), tasks=st.integers(1, 10**9))
@settings(max_examples=100, deadline=None)
def test_the_schedule_never_reaches_the_budget_however_many_tasks_follow(drift: float, tasks: int) -> None:
    assert spending_limit(drift, tasks) <= drift**2 * (1 + 1e-12)
    before = spending_limit(drift, tasks - 1)
    assert spending_limit(drift, tasks) >= before
    if tasks < 10**4:
        assert spending_limit(drift, tasks) - before == pytest.approx(drift**2 / (tasks * (tasks + 1)), rel=1e-6)


@given(square=st.floats(0, 10), slope=st.floats(-5, 5), start=st.floats(0, 5), limit=st.floats(0, 5))
@settings(max_examples=300, deadline=None)
def test_the_largest_share_fits_and_no_larger_one_does(square: float, slope: float, start: float, limit: float) -> None:
    def total(c: float) -> float:
        return square * c * c + 2 * slope * c + start

    share = largest_share(square, slope, start, limit)
    assert 0 <= share <= 1
    grid = [step / 1000 for step in range(1001)]
    fitting = [c for c in grid if total(c) <= limit - 1e-9]
    if fitting:
        assert share >= max(fitting) - 1e-9
    if share > 0:
        assert total(share) <= limit + 1e-7


class Course:
    """A layer whose weights wander while tasks come and go, every row kept by the test."""

    def __init__(self, seed: int, groups: int = 1) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.weight = self.normal(groups, 3, 5)
        self.anchor = self.weight.clone()
        self.relative = Relative(Moments.zeros(groups, 3, 5))
        self.kept: list[list[tuple[Tensor, Tensor]]] = []  # per task: rows and the weights they were seen with

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64)

    def wander(self, size: float) -> None:
        self.weight = self.weight + size * self.normal(*self.weight.shape)

    def observe(self, rows: int, scale: float, new_task: bool) -> None:
        self.relative.move_anchor_(self.weight - self.anchor)
        self.anchor = self.weight.clone()
        if new_task:
            self.relative.close_task()
            self.kept.append([])
        x = scale * self.normal(self.weight.shape[0], rows, 5)
        rows = self.relative.newest().no_rows()
        rows.gram, rows.energy = Gram.of(x), (x @ self.weight.mT).square().sum()
        self.relative.newest().add_(rows)
        self.kept[-1].append((x, self.weight))

    def drifts(self) -> list[float]:
        """rel_j² of each task, from its rows."""
        found = []
        for task in self.kept:
            moved = sum(float((x @ (self.weight - then).mT).square().sum()) for x, then in task)
            found.append(moved / sum(float((x @ then.mT).square().sum()) for x, then in task))
        return found


@given(seed=st.integers(0, 10_000), tasks=st.integers(1, 5), passes=st.integers(1, 3), groups=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_the_exact_total_equals_the_one_from_kept_rows(seed: int, tasks: int, passes: int, groups: int) -> None:
    course = Course(seed, groups)
    for task in range(tasks):
        for part in range(passes):
            course.observe(rows=1 + (seed + 7 * task) % 50, scale=10.0 ** (task % 3 - 1), new_task=part == 0)
            course.wander(0.1)
    for _ in range(2):  # the newest task not folded yet, and folded
        drifts = course.drifts()
        total = course.relative.total(course.weight - course.anchor)
        assert total == pytest.approx(sum(drifts), rel=1e-9)
        assert max(drifts) <= total * (1 + 1e-9)
        course.relative.close_task()


@given(seed=st.integers(0, 10_000), size=st.floats(1e-4, 3), room=st.floats(0, 0.5))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_merged_weights_are_shrunk_to_the_limit_after_rounding(
    dtype: torch.dtype, seed: int, size: float, room: float
) -> None:
    course = Course(seed)
    course.weight = course.anchor = course.weight.to(dtype).double()
    for _ in range(2):
        course.observe(20, 1.0, new_task=True)
        course.wander(0.02)
        course.weight = course.weight.to(dtype).double()
    course.relative.close_task()
    stored, anchor, folded = course.weight.to(dtype), course.anchor.to(dtype), course.relative.folded
    wanted = course.weight + size * course.normal(*course.weight.shape)
    start = course.relative.total(course.weight - course.anchor)
    limit = start + room
    weights, share = shrink(folded, anchor, stored, wanted, limit)
    merged = weights.to(dtype).double()
    assert course.relative.total(merged - course.anchor) <= limit * (1 + 1e-12)
    if share == 1:
        assert torch.equal(weights, wanted)
    elif share == 0:
        assert torch.equal(merged, course.weight)
    elif dtype == torch.float64:  # nothing was given away
        assert course.relative.total(merged - course.anchor) >= limit * (1 - 1e-4)


def test_the_course_of_an_update_is_the_quadratic_it_is_taken_for() -> None:
    course = Course(3, groups=2)
    for _ in range(3):
        course.observe(9, 1.0, new_task=True)
        course.wander(0.3)
    course.relative.close_task()
    base, step = course.weight - course.anchor, course.normal(*course.weight.shape)
    square, slope, start = along(course.relative.folded, base, step)
    for c in (0.0, 0.3, 1.0):
        assert course.relative.total(base + c * step) == pytest.approx(square * c * c + 2 * slope * c + start)


def test_outputs_of_zero_have_no_fraction() -> None:
    """Rows that gave 0 must not move at all, so the layer is silenced; rows of zeros say nothing."""
    course = Course(4)
    course.weight = course.anchor = torch.zeros_like(course.weight)
    course.observe(6, 1.0, new_task=True)
    assert relative_weight(course.relative.newest()) is None
    assert course.relative.total(torch.zeros_like(course.weight)) == 0
    assert course.relative.total(torch.ones_like(course.weight)) == math.inf
    course.relative.close_task()
    assert course.relative.silent
    assert not bool(course.relative.gram.any())

    empty = Course(5)
    empty.observe(6, 0.0, new_task=True)
    empty.relative.close_task()
    assert not empty.relative.silent
    assert math.isfinite(empty.relative.total(torch.ones_like(empty.weight)))


@given(seed=st.integers(0, 10_000), strength=st.floats(0.01, 10))
@settings(max_examples=30, deadline=None)
def test_the_measured_strength_is_that_of_the_update(seed: int, strength: float) -> None:
    course = Course(seed)
    course.observe(30, 1.0, new_task=True)
    course.relative.close_task()
    basis = torch.linalg.qr(course.normal(1, 5, 5)).Q[..., :3]
    column = 0.7
    coefficients = course.normal(1, 3, 3)
    coefficients *= strength * column**0.5 / coefficients.norm(dim=1, keepdim=True)  # columns as long as asked
    diagonal = (basis.mT @ course.relative.gram @ basis).diagonal(dim1=1, dim2=2)
    found = update_ratio(course.relative.gram, basis, coefficients @ basis.mT, column)
    assert found is not None
    cross = 2 * sum(
        float(
            (coefficients[0, :, i] * coefficients[0, :, j]).sum() * (basis.mT @ course.relative.gram @ basis)[0, i, j]
        )
        for i in range(3)
        for j in range(i)
    )
    assert found == pytest.approx(strength**2 + cross / (column * float(diagonal.sum())), rel=1e-9, abs=1e-9)
    assert update_ratio(torch.zeros_like(course.relative.gram), basis, coefficients @ basis.mT, column) is None
