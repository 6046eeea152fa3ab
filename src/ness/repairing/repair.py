"""`repair`: a fine-tune that has forgotten, mended in one call, without training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ness._precision import ordinary_tensors
from ness.errors import NessError, warn
from ness.layers.names import as_patterns, matches
from ness.repairing import grams
from ness.repairing.folders import Kept, Statistics
from ness.repairing.grams import Progress, Source
from ness.repairing.measuring import Meter
from ness.repairing.plans import LayerPlan, Others, way_of
from ness.repairing.report import Front, FrontRow, Repair, RepairRow
from ness.repairing.weights import Shadow, Target, Weights, find_targets, read_weights
from ness.statistics.gram import Gram
from ness.statistics.padding import MaskOf
from ness.statistics.recorder import Forward

Values = dict[str, Tensor]

RIDGE = {torch.float64: 1e-6, torch.float32: 1e-5}  # λ over the mean diagonal, by what Grams are computed in
LEAST, MOST = 1e-4, 1e8  # strengths between which a budget is looked for
CLOSE = 1.01  # factor between the strength that is found and one that is too small


def repair(
    tuned: nn.Module,
    base: nn.Module | Mapping[str, Tensor] | str | None = None,
    *,
    old: Any,
    new: Any = None,
    strength: float = 1.0,
    others: str | float = "keep",
    inplace: bool = False,
    passes: int = 1,
    memory: str | float | None = None,
    probe: Any = None,
    at_most: float | None = None,
    share: float = 1.0,
    new_under: float = 1 / 3,
    ridge: float | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    forward: Forward | None = None,
    mask: MaskOf | None = None,
    statistics_dtype: torch.dtype = torch.float64,
    statistics_device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Repair:
    """Reshape what fine-tuning changed, so that it does the same on new inputs and little on old ones.

    Each protected layer's change D = W_tuned − W_base becomes D' = D (C_n + λI)(C_n + s C_o + λI)⁻¹ with the mean Grams
    of its new and old input rows: the minimiser of ‖(D' − D) X_nᵀ‖² + s ‖D' X_oᵀ‖². No training, no gradients: one pass
    over old and one over new inputs. The tuned model is not touched before everything is worked out, and with
    `inplace=False` not at all.

    >>> _ = torch.manual_seed(0)
    >>> base = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> old, new = torch.randn(200, 4) @ torch.randn(4, 8), torch.randn(200, 8)
    >>> tuned = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> moved = {key: value + 0.1 * torch.randn_like(value) for key, value in base.state_dict().items()}
    >>> _ = tuned.load_state_dict(moved)
    >>> repaired = repair(tuned, base, old=old, new=new, strength=10.0)
    >>> error = lambda model: float((model(old) - base(old)).square().mean())
    >>> error(repaired.model) < 0.5 * error(tuned)
    True

    Args:
        tuned: the fine-tuned model. With LoRA adapters (PEFT) their factors A are repaired: the rank stays, and no bias
            comes in.
        base: the model before, its state dict, or a folder or file of safetensors. None for a model with adapters: the
            model without them.
        old: batches of what must not be forgotten, as for `NullSpace.observe`: any iterable of tensors, (input, target)
            or dicts, or one tensor; or a folder that `NullSpace.export_statistics` wrote, or Grams by layer name
            (`guard.grams`). Padding (`attention_mask`) is no row.
        new: batches of what it was tuned on. None: new rows in every direction alike, so the change is damped in the
            directions that old rows use.
        strength: s, how much old rows count against new ones. 0 changes nothing; a large one gives the base in all
            directions that old rows use.
        others: what is no protected layer and was tuned as well (embeddings, norms, tied heads): "keep" it, put the
            "base" back, or a share of its change between 0 and 1. `Repair.others` lists it.
        inplace: write into `tuned` instead of into a copy.
        passes: 1, all layers in one go; k, the layers in k groups in the order in which they are called, each observed
            behind what is already repaired, with the tuned model's outputs as the target.
        memory: repair as many layers at a time as have their statistics in this much memory ("4GB"), with as many
            passes over the data as that takes; the result is the same.
        probe: batches on which the repaired model's change from the base must be at most `at_most`: the smallest
            strength that does it is used, instead of `strength`.
        at_most: RMS change of the outputs on `probe`, as a fraction of their RMS under the base.
        share: what is left of the reshaped change, from 0 to 1: interpolation on top of the repair.
        new_under: where on the way from the base (0) to the tuned weights (1) the Grams of new inputs are taken; those
            of old inputs are taken under the base.
        ridge: λ as a fraction of the mean diagonal of (C_n + C_o) / 2; by default 1e-6, with float32 statistics 1e-5.
        include: repair these layers only: names, prefixes that end at a dot, or patterns.
        exclude: keep these as tuned, without comparing them (a new head, say).
        forward: `forward(model, batch)`, how the model is run on one batch.
        mask: `mask(batch)` says which tokens are real, instead of `attention_mask`, as for `NullSpace.observe`.
        statistics_dtype: `torch.float32` multiplies blocks in float32: faster, and less exact.
        statistics_device: where Grams live; by default on each layer's own device.
        progress: called as `progress(stage, done, total)` while it works.

    Returns:
        A `Repair`: `.model`, `.rows`, `.others`, `.front(strengths)`, `.plot(path)`; prints as a table.

    Raises:
        NessError: something does not fit; the model is as it was.
    """
    options = Options.of(strength, others, passes, probe, at_most, share, new_under, ridge, statistics_dtype)
    limit = grams.parse_memory(memory)
    with ordinary_tensors():
        weights = read_weights(tuned, base, as_patterns(exclude, "exclude"))
        sources = source_of("old", old, progress), None if new is None else source_of("new", new, progress)
        if any(isinstance(source, Statistics) for source in sources):
            options = replace(options, dtype=torch.float32, ridge=max(options.ridge, RIDGE[torch.float32]))
        work = Work(tuned, weights, *sources, options, forward, mask, statistics_device)
        work.find(as_patterns(include, "include"))
        if options.passes > 1:
            from ness.repairing.passes import in_passes

            done = in_passes(work, limit)
        else:
            done = work.in_one_go(limit)
        report = work.report(done, Source("probe", probe) if probe is not None else None)
        return work.finish(report, done, inplace)


Given = Source | Statistics | Kept


def source_of(what: str, given: Any, progress: Progress | None) -> Given:
    """Batches, a folder of statistics, or Grams by layer name."""
    if isinstance(given, Mapping) and given and all(isinstance(value, Gram) for value in given.values()):
        return Kept(what, given)
    return Statistics(what, given) if grams.is_folder(given) else Source(what, given, progress)


@dataclass(frozen=True)
class Options:
    """Checked numbers."""

    strength: float
    way: float
    passes: int
    at_most: float | None
    share: float
    new_under: float
    ridge: float
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        strength: Any,
        others: Any,
        passes: Any,
        probe: Any,
        at_most: Any,
        share: Any,
        new_under: Any,
        ridge: Any,
        dtype: Any,
    ) -> Options:
        """Refuse what cannot be worked with."""
        _number("strength", strength, 0, math.inf)
        _number("share", share, 0, 1)
        _number("new_under", new_under, 0, 1)
        if dtype not in RIDGE:
            raise NessError(f"repair(statistics_dtype={dtype}): expected torch.float64 or torch.float32")
        if ridge is not None:
            _number("ridge", ridge, 0, 1)
        if ridge is not None and ridge < 1e-14:
            raise NessError(f"repair(ridge={ridge!r}): expected at least 1e-14, what float64 can resolve")
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise NessError(f"repair(passes={passes!r}): expected a whole number, at least 1")
        if (probe is None) != (at_most is None):
            raise NessError(
                "repair: probe= and at_most= belong together: batches, and the change that is allowed on them"
            )
        if at_most is not None:
            _number("at_most", at_most, 0, math.inf)
            if strength != 1.0:
                raise NessError("repair: give strength=, or probe= and at_most= to have it chosen, not both")
            if passes > 1:
                raise NessError("repair: a budget on a probe is looked for in one go; leave passes=1")
        chosen = RIDGE[dtype] if ridge is None else float(ridge)
        return cls(float(strength), way_of(others), passes, at_most, float(share), float(new_under), chosen, dtype)


def _number(name: str, value: Any, low: float, high: float) -> None:
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not right or math.isinf(value):
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise NessError(f"repair({name}={value!r}): expected a number, at least {low:g}{upper}")


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
        device: torch.device | str | None,
    ) -> None:
        self.mask = mask
        self.tuned, self.weights, self.old, self.new = tuned, weights, old, new
        self.options, self.forward, self.device = options, forward, device
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
        groups = grams.groups_within(self.targets, limit, self.new is not None)
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
        self._warn_of_few_rows(rows, plans)
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
        plans = []
        for target in targets:
            own_old, own_new = old.pop(target.name), None if new is None else new.pop(target.name)
            plans.append(LayerPlan.of(target, self.weights, own_old, own_new, self.options.ridge, self.options.dtype))
            if self.old.progress is not None:
                self.old.progress("solve", len(plans), len(targets))
        return plans

    def grams_of(self, targets: Sequence[Target], source: Given) -> dict[str, Gram]:
        """Grams of these layers' inputs by name, under the weights that the shadow has now."""
        if not isinstance(source, Source):
            return source.grams(targets, self.weights)
        try:
            options = self.options
            return grams.observe(
                self.shadow.model, targets, source, self.forward, self.mask, options.dtype, self.device
            )
        except NessError as error:
            if str(error).startswith("repair("):
                raise
            raise NessError(f"repair({source.what}=...): {error}") from error

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

    def _warn_of_few_rows(self, rows: Sequence[RepairRow], plans: Sequence[LayerPlan]) -> None:
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
        if not self.rest.groups or not self.old.sample:
            return {}
        meter = Meter(self.shadow, self.old.sample[:1], self.forward, "old")
        moves = {}
        for shown, names in self.rest.groups.items():
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
    """Write values into the model's own tensors, all or none; returns what they were."""
    kept: dict[str, Tensor] = {}
    for name in values:
        tuned = weights.pairs[name].tuned
        copied = tuned.detach().clone()
        kept[name] = nn.Parameter(copied, requires_grad=False) if isinstance(tuned, nn.Parameter) else copied
    plan = [(weights.pairs[name].tuned, value.to(weights.pairs[name].tuned)) for name, value in values.items()]
    try:
        with torch.no_grad():
            for tensor, value in plan:
                tensor.copy_(value)
    except BaseException:
        with torch.no_grad():
            for name, value in kept.items():
                weights.pairs[name].tuned.copy_(value)
        raise
    return kept


class FrontOf:
    """Other strengths of a finished repair, from its Grams."""

    def __init__(self, work: Work, plans: Sequence[LayerPlan]) -> None:
        self.work, self.plans = work, plans
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        pairs = self.work.weights.pairs.values()
        return [tensor._version for pair in pairs for tensor in (pair.tuned, pair.base) if tensor is not None]

    def _check(self) -> None:
        if self._versions() != self.versions:
            raise NessError("the tuned model or its base was changed since the repair; repair again")

    def model(self, strength: float) -> nn.Module:
        """A copy of the tuned model, repaired at this strength."""
        _number("strength", strength, 0, math.inf)
        self._check()
        with ordinary_tensors():
            return Shadow(self.work.tuned, self.work.weights).own(self.work.all_values(self.plans, strength))

    def __call__(self, strengths: Sequence[float], interpolated: Sequence[float]) -> Front:
        """A row for each strength, and for each share of plain interpolation."""
        for strength in strengths:
            _number("strength", strength, 0, math.inf)
        for part in interpolated:
            _number("interpolated", part, 0, 1)
        self._check()
        work = self.work
        with ordinary_tensors():
            shadow = Shadow(work.tuned, work.weights)
            meters = [
                Meter(shadow, source.sample, work.forward, source.what)
                if source is not None and source.sample
                else None
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
