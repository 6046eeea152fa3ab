"""One repair under way: Grams, then weights for a strength, then the report; until then the model is only read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from ness._precision import ordinarily
from ness.errors import NessError, warn
from ness.layers.names import matches
from ness.repairing import grams
from ness.repairing.algebra import Reshaper
from ness.repairing.folders import Given
from ness.repairing.grams import Source
from ness.repairing.measuring import Meter, Shadow
from ness.repairing.options import Options, number
from ness.repairing.plans import LayerPlan, Others
from ness.repairing.report import Front, FrontRow, Repair, RepairRow
from ness.repairing.weights import Target, Weights, find_targets
from ness.statistics.gram import Gram
from ness.statistics.padding import MaskOf
from ness.statistics.recorder import Forward
from ness.statistics.watch import Watch
from ness.verbs.changes import Switches, uninterrupted

Values = dict[str, Tensor]
Result = TypeVar("Result")

LEAST, MOST = 1e-4, 1e8  # strengths between which a budget is looked for
CLOSE = 1.01  # factor between the strength that is found and one that is too small


@dataclass
class Done:
    """What was worked out: values for the strength, and what they were made from where that was kept."""

    strength: float
    values: Values
    rows: list[RepairRow]
    plans: list[LayerPlan] | None = None  # None: worked through a few layers at a time, Grams not kept


class Work:
    """One repair under way. The tuned model is only read."""

    def __init__(
        self,
        tuned: nn.Module,
        weights: Weights,
        old: Given,
        new: Given | None,
        options: Options,
        forward: Forward | None,
        mask: MaskOf | None,
        watches: list[Watch],
    ) -> None:
        self.watches = watches  # every watch that was opened
        self.tuned, self.weights, self.old, self.new = tuned, weights, old, new
        self.options, self.forward, self.mask = options, forward, mask
        if new is not None:
            grams.refuse_same_data(old, new)
        self.shadow = Shadow(tuned, weights)
        self.targets: list[Target] = []
        self.rest = Others({}, {})
        self.notes: list[str] = []
        self.meters: dict[str, Meter] = {}

    def find(self, include: Sequence[str]) -> None:
        """Which layers are repaired, and what else was changed."""
        self.targets, reasons = find_targets(self.shadow, include)
        for pattern in include:
            if not any(matches(target.name, pattern) for target in self.targets):
                raise NessError(f"include={pattern!r} matches no layer that tuning changed and that can be repaired")
        kinds = {name: type(places[0][0]).__name__ for name, places in self.shadow.places.items()}
        self.rest = Others.of(self.weights, self.targets, reasons, kinds)
        if not self.targets:
            listed = "; ".join(f"{name}: {why}" for name, why in list(self.rest.reasons.items())[:4])
            raise NessError(
                "no layer that can be repaired (Linear, convolution, attention, Conv1D) was changed by tuning; "
                f"what was: {listed or 'excluded layers alone'}"
            )

    # -- one go -----------------------------------------------------------------------------------------------------

    def in_one_go(self, limit: float | None) -> Done:
        """Every layer from one pass over old and one over new inputs, or from one of each for each group."""
        groups = grams.groups_within(self.targets, limit)
        if len(groups) > 1:
            if self.options.at_most is not None:
                raise NessError(
                    f"repair: memory= leaves room for a few layers at a time ({len(groups)} groups), and a budget on a "
                    "probe needs all at once; allow more memory, or give strength="
                )
            for source in (self.old, self.new):
                if source is not None and source.once:
                    raise NessError(
                        f"repair({source.what}=...): found an iterator, which is used up after one pass, and memory= "
                        f"needs {len(groups)}; pass a list or a loader"
                    )
        plans: list[LayerPlan] = []
        values: Values = {}
        rows: list[RepairRow] = []
        for group in groups:
            found = self.observe(group)
            plans.extend(found)
            if len(groups) > 1:
                rows += self.solve(found, self.options.strength, values)
                plans = []
        self.warn_of_few_rows(rows, plans)
        if len(groups) == 1:
            rows = self.solve(plans, self.options.strength, values) if self.options.at_most is None else []
        return Done(self.options.strength, values, rows, plans if len(groups) == 1 else None)

    def observe(self, targets: Sequence[Target]) -> list[LayerPlan]:
        """Plans of these layers: old rows under the base, new rows on the way to the tuned weights."""
        self.shadow.put(self.weights.at(0.0))
        old = self.grams_of(targets, self.old)
        new = None
        if self.new is not None:
            self.shadow.put(self.weights.at(self.options.new_under))
            new = self.grams_of(targets, self.new)
            grams.refuse_same_data(self.old, self.new)
        self.shadow.put({})
        alike: dict[tuple[int, int, int], list[Target]] = {}  # q, k and v read one tensor: one decomposition
        for target in targets:
            key = id(old[target.name]), 0 if new is None else id(new[target.name]), target.width
            alike.setdefault(key, []).append(target)
        plans: dict[str, LayerPlan] = {}
        for members in alike.values():
            first = members[0].name
            shaped = self._shaped(members[0], old[first], None if new is None else new[first])
            for target in members:
                own_old, own_new = old.pop(target.name), None if new is None else new.pop(target.name)
                plans[target.name] = LayerPlan.of(target, self.weights, own_old, own_new, shaped)
            if self.old.progress is not None:
                self.old.progress("solve", len(plans), len(targets))
        return [plans[target.name] for target in targets]

    def _shaped(self, target: Target, old: Gram, new: Gram | None) -> tuple[Reshaper, Tensor]:
        reshaper, scale = grams.reshaper_of(target, old, new, self.options.ridge, self.options.dtype)
        folder = self.options.place[1]
        return reshaper if folder is None else grams.on_disk(reshaper, folder), scale

    def grams_of(self, targets: Sequence[Target], source: Given) -> dict[str, Gram]:
        """Grams of these layers' inputs by name, under the weights that the shadow has now."""
        if not isinstance(source, Source):
            return source.grams(targets, self.weights)
        try:
            options = self.options
            return grams.observe(self.rows_of(), targets, source, options.dtype, options.place)
        except NessError as error:
            if str(error).startswith("repair("):
                raise
            raise NessError(f"repair({source.what}=...): {error}") from error

    def rows_of(self) -> grams.Rows:
        """Passes through the shadow, under the weights that it has then."""
        return grams.Rows(self.shadow.model, self.forward, self.mask, self.watches)

    def solve(self, plans: Sequence[LayerPlan], strength: float, values: Values) -> list[RepairRow]:
        """Write these layers' repaired weights among the values; returns their rows."""
        for plan in plans:
            plan.write(self.weights, strength, self.options.share, values)
        return [plan.row(self.weights, values) for plan in plans]

    def all_values(self, plans: Sequence[LayerPlan], strength: float) -> Values:
        """Repaired weights and everything else for one strength."""
        values = self.rest.values(self.weights, self.options.way)
        for plan in plans:
            plan.write(self.weights, strength, self.options.share, values)
        return values

    def warn_of_few_rows(self, rows: Sequence[RepairRow], plans: Sequence[LayerPlan]) -> None:
        """Say what it means where a layer saw fewer rows than it has inputs."""
        seen = [(row.name, row.fan_in, {"old": row.old_rows, "new": row.new_rows}) for row in rows]
        seen += [
            (plan.target.name, plan.target.layer.fan_in, {"old": plan.old_rows, "new": plan.new_rows or 0})
            for plan in plans
        ]
        consequences = {"old": "what those rows do not show counts as never used, and the change stays there"}
        if self.new is not None:
            consequences["new"] = "what those rows do not show counts as not needed, and is lost where old rows are"
        for what, consequence in consequences.items():
            few = [(name, fan_in, count[what]) for name, fan_in, count in seen if count[what] < fan_in]
            if few:
                name, fan_in, count = few[0]
                warn(
                    f"repair: {len(few)} of {len(seen)} layers saw fewer {what} rows than they have inputs ({name!r}: "
                    f"{count} rows, {fan_in} inputs): {consequence}. Use more {what} data"
                )

    # -- strength, report -------------------------------------------------------------------------------------------

    def report(self, done: Done, probe: Source | None) -> Repair:
        """Choose the strength where a budget is given, measure, and put the report together (without the model)."""
        if probe is not None:
            assert done.plans is not None
            done.strength = self._smallest_strength(done.plans, probe)
            done.values = {}
            done.rows = self.solve(done.plans, done.strength, done.values)
        done.values = {**self.rest.values(self.weights, self.options.way), **done.values}
        moves = self._moves_of_others()
        movements = []
        for source in (self.old, self.new):
            meter = None if source is None or not source.sample else self._meter(source)
            movements.append(None if meter is None else meter.movement(done.values))
        self.shadow.put({})
        return Repair(
            model=self.tuned,
            strength=done.strength,
            ridge=self.options.ridge,
            passes=self.options.passes,
            rows=tuple(done.rows),
            others=self.rest.rows(self.weights, self.options.way, moves),
            on_old=movements[0],
            on_new=movements[1],
            share=self.options.share,
            notes=tuple(self.notes),
        )

    def _meter(self, source: Given) -> Meter:
        if source.what not in self.meters:
            self.meters[source.what] = Meter(self.shadow, source.sample, self.forward, source.what)
        return self.meters[source.what]

    def _moves_of_others(self) -> dict[str, float]:
        """How much each other group alone, tuned on top of the base, moves the outputs on the first old batch."""
        groups = self.rest.groups | {name: [name] for name in self.rest.excluded if name in self.weights.at(0.0)}
        if not groups or not self.old.sample:
            return {}
        meter = Meter(self.shadow, self.old.sample[:1], self.forward, "old")
        moves = {}
        for shown, names in groups.items():
            alone = {key: value for key, value in meter.base.items() if key not in names}
            moves[shown] = meter.change(alone)
        return moves

    def _smallest_strength(self, plans: Sequence[LayerPlan], probe: Source) -> float:
        batches = list(probe)
        meter = Meter(self.shadow, batches, self.forward, "probe")
        assert self.options.at_most is not None
        tried: dict[float, float] = {}

        def within(strength: float) -> bool:
            tried[strength] = meter.change(self.all_values(plans, strength))
            if self.old.progress is not None:
                self.old.progress("strength", len(tried), None)
            return tried[strength] <= self.options.at_most  # type: ignore[operator]  # NaN is not within anything

        if within(0.0):
            return 0.0
        low, high = 0.0, 1.0
        while not within(high):
            low, high = high, high * 10
            if high > MOST:
                weak = next((s for s in (0.1, 0.01, 0.001) if within(s)), None)  # where more of it is not less change
                if weak is not None:
                    low, high = weak / 10, weak
                    break
                best = min(tried, key=lambda s: tried[s] if not math.isnan(tried[s]) else math.inf)
                way_out = (
                    " What is no repaired layer moves it too: others='base' puts that back."
                    if self.rest.groups and self.options.way > 0
                    else " More old data like the probe, or a larger at_most, would help."
                )
                raise NessError(
                    f"no strength keeps the probe's outputs within {self.options.at_most:g} of the base's: the best "
                    f"that can be reached is {tried[best]:.4g}, with strength {best:g}.{way_out}"
                )
        while low == 0.0 and high > LEAST:
            if within(high / 10):
                high /= 10
            else:
                low = high / 10
        while low > 0.0 and high / low > CLOSE:
            middle = math.sqrt(low * high)
            if within(middle):
                high = middle
            else:
                low = middle
        return high

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self, report: Repair, done: Done, inplace: bool) -> Repair:
        """Write the values: into a copy, or into the tuned model in one short step that is undone if it breaks off."""
        if not inplace:
            model = self.shadow.own(done.values)
        else:
            model = self.tuned
            kept = commit(self.weights, done.values)
            for name, value in kept.items():
                self.weights.pairs[name] = replace(self.weights.pairs[name], tuned=value)
        plans = done.plans
        if plans is None:
            return replace(report, model=model)
        front = FrontOf(self, plans)
        return replace(report, model=model, _front=front)


def commit(weights: Weights, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write values into the model's own tensors, all or none; returns what they were. Ctrl-C waits meanwhile."""
    kept: dict[str, Tensor] = {}
    for name in values:
        tuned = weights.pairs[name].tuned
        copied = tuned.detach().clone()
        kept[name] = nn.Parameter(copied, requires_grad=False) if isinstance(tuned, nn.Parameter) else copied
    plan = [(weights.pairs[name].tuned, value.to(weights.pairs[name].tuned)) for name, value in values.items()]
    back = [(weights.pairs[name].tuned, value) for name, value in kept.items()]

    def write() -> None:
        try:
            _write(plan)
        except BaseException:
            _write(back)
            raise

    uninterrupted(write)
    return kept


def _write(swaps: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in swaps:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(value)


def without_trace(work_out: Callable[[list[Watch]], Result]) -> Result:
    """Runs it; wherever it breaks off nothing stays switched, and no watch that it opened and noted stays on."""
    switches, watches = Switches(), list[Watch]()
    try:
        return ordinarily(work_out, watches)
    except BaseException:
        for watch in watches:
            watch.close()
        switches.restore()
        raise


class FrontOf:
    """Other strengths of a finished repair, from its Grams."""

    def __init__(self, work: Work, plans: Sequence[LayerPlan]) -> None:
        self.work, self.plans = work, plans
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        pairs = self.work.weights.pairs.values()
        tensors = (tensor for pair in pairs for tensor in (pair.tuned, pair.base) if tensor is not None)
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    def _check(self) -> None:
        if self._versions() != self.versions:
            raise NessError("the tuned model or its base was changed since the repair; repair again")

    def model(self, strength: float) -> nn.Module:
        """A copy of the tuned model, repaired at this strength."""
        number("strength", strength, 0, math.inf)
        self._check()
        work = self.work
        return without_trace(lambda _: Shadow(work.tuned, work.weights).own(work.all_values(self.plans, strength)))

    def __call__(self, strengths: Sequence[float], interpolated: Sequence[float]) -> Front:
        """A row for each strength, and for each share of plain interpolation."""
        for strength in strengths:
            number("strength", strength, 0, math.inf)
        for part in interpolated:
            number("interpolated", part, 0, 1)
        self._check()
        return without_trace(lambda _: self._measured(strengths, interpolated))

    def _measured(self, strengths: Sequence[float], interpolated: Sequence[float]) -> Front:
        work = self.work
        shadow = Shadow(work.tuned, work.weights)
        meters = [
            Meter(shadow, source.sample, work.forward, source.what) if source is not None and source.sample else None
            for source in (work.old, work.new)
        ]
        rows: list[FrontRow] = []
        before: float | None = None
        settings: list[tuple[float, float | None]] = [(s, None) for s in strengths]
        settings += [(0.0, part) for part in interpolated]
        for strength, amount in settings:
            values = work.all_values(self.plans, strength) if amount is None else work.weights.at(amount)
            moved = [None if meter is None else meter.movement(values) for meter in meters]
            before = None if moved[0] is None else moved[0].before
            here = None if moved[0] is None else moved[0].after
            left = None if moved[1] is None else moved[1].kept
            rows.append(FrontRow(float(strength), here, left, amount))
        return Front(tuple(rows), before)
