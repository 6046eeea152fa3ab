"""`constrain`: decompose what was observed, choose, put the updates in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator

from ness import distributed
from ness.errors import NessError, warn
from ness.layers.names import listed
from ness.layers.norms import affine_parameters, read_norms
from ness.rules import Rank, Rule, Selection
from ness.statistics.gram import Gram
from ness.statistics.recorder import Forward
from ness.statistics.spectrum import Spectrum
from ness.updates.constraint import Constraint
from ness.updates.install import is_constrained
from ness.updates.layer_state import LayerState, Swap
from ness.updates.low_rank import LowRankUpdate
from ness.updates.prepare import free_directions, limit_drift, prepare
from ness.updates.private import capped, check_private
from ness.updates.update import Form
from ness.verbs.checks import check_constrain_options, refuse_sharded
from ness.verbs.decomposing import Progress, side_by_side, teller
from ness.verbs.observing import reduce, refuse_observed
from ness.verbs.transitions import enter, updates_in

if TYPE_CHECKING:
    from ness.guard import NullSpace


@dataclass(frozen=True)
class Options:
    """What `constrain` was called with."""

    form: Form = "any"
    max_drift: float | None = None
    task: str | None = None
    private: int = 0
    rank: int | None = None
    generator: Generator | None = None
    new: Any = None  # batches that a low-rank update starts from
    forward: Forward | None = None

    def bias(self, guard: NullSpace) -> str:
        """What biases do: an adapter has none, so beside an update of low rank they are frozen."""
        return guard.bias if self.rank is None else "freeze"


def constrain(guard: NullSpace, options: Options, progress: Progress | None) -> None:
    """See `NullSpace.constrain`."""
    distributed.together(lambda: check_constrain(guard, options))
    reduce(guard)
    states = distributed.together(lambda: _begun(guard))
    wanted, idle = _layers_to_constrain(guard, states)
    before = _stamp(guard)
    new = _new_grams(guard, options)
    spectra: dict[str, Spectrum] = {}
    if distributed.active():  # ranks agree on an error of any of them at the end, so none may stop before
        spectra = distributed.together(lambda: dict(_spectra(guard, wanted, options, None)))
        tell = teller(progress)
        for done, name in enumerate(spectra, start=1):
            tell(done, len(spectra), name, 0.0)
    else:
        spectra = dict(_spectra(guard, wanted, options, progress))
    if progress is not None and not distributed.active():
        check_constrain(guard, options)
    if _stamp(guard) != before:
        raise NessError(
            "constrain: the model's weights, or what was observed, changed while it was at work, so the directions "
            "found no longer fit; nothing was constrained. Begin again"
        )
    selections = {
        name: states[name].drop_dead_groups(selection) for name, selection in _selections(guard, spectra).items()
    }
    for doubt in [*_warnings(guard, spectra, options.private), *_capped(selections, options.rank)]:
        warn(doubt)
    about = options.form, options.bias(guard), options.rank, options.generator
    constraints = {
        name: prepare(states[name], spectra[name], selection, *about, new=new[name].matrix if new[name].count else None)
        for name, selection in selections.items()
    }
    _share_start(constraints)
    if options.max_drift is not None:
        for name, constraint in constraints.items():
            if constraint.update is not None:
                limit_drift(states[name], constraint.update, spectra[name], selections[name], options.max_drift)
    writes: list[Swap] = []
    for name, state in states.items():
        writes += state.apply_private(None)
        state.constraint, state.factors = constraints.get(name), None
    if not updates_in(states):
        for doubt in _nothing_free(guard, states, spectra):
            warn(doubt)
    tasks = guard._tasks.copy()
    tasks.begin(options.task, read_norms(guard._found.norms) if guard.norm == "per_task" else {})
    enter(guard, states, tasks, options.form, writes, {"_idle": idle})


def _new_grams(guard: NullSpace, options: Options) -> Mapping[str, Gram]:
    """What each layer reads of the new task's batches; nothing where none are given."""
    if options.new is None:
        return defaultdict(lambda: Gram.zeros(1, 1))
    kept = torch.float32
    scout = type(guard)(guard.model, include=guard.include, exclude=guard.exclude, statistics_dtype=kept)
    scout.statistics_device, scout._statistics_folder = guard.statistics_device, guard._statistics_folder
    scout.observe(options.new, options.forward)
    reduce(scout)
    return defaultdict(lambda: Gram.zeros(1, 1), scout.grams)


def check_constrain(guard: NullSpace, options: Options) -> None:
    """Refuse what `constrain` cannot do with this guard and these options now."""
    task = options.task
    refuse_sharded(guard.model, "constrain", "constrain first, then shard: observe(), constrain(), fully_shard()")
    check_constrain_options(options.form, options.max_drift, options.rank, options.generator, options.new)
    check_private(options.private, task, {name: layer.fan_in for name, layer in guard._found.layers.items()})
    if guard.constrained:
        raise NessError("constrain: already constrained; call merge() or discard() first")
    if any(is_constrained(module) for module in guard.model.modules()):
        raise NessError(
            "constrain: another guard holds this model; merge() or discard() that one first, or if it is gone, "
            "ness.release(model)"
        )
    refuse_observed(guard.model, "constrain")
    guard._refresh()
    if not guard._protected and not distributed.active():
        raise NessError("constrain: nothing was observed yet; call observe(old_inputs) first")
    if guard.norm == "per_task" and task is None:
        raise NessError("constrain: norm='per_task' needs the name of the task, constrain(task=NAME)")
    guard._tasks.check_new(task)


def _begun(guard: NullSpace) -> dict[str, LayerState]:
    """The layers with what was observed last as a task of its own."""
    states = {name: protected.copy() for name, protected in guard._protected.items()}
    if guard.rule.relative:
        for state in states.values():
            state.begin_task()
    return states


def _stamp(guard: NullSpace) -> dict[str, tuple[int, int]]:
    """What changes when rows are observed or a weight is written, by layer."""
    return {
        name: (held.gram.count, sum(p._version for p in (held.layer.weight, held.layer.bias) if p is not None))
        for name, held in guard._protected.items()
    }


def _layers_to_constrain(
    guard: NullSpace, states: Mapping[str, LayerState]
) -> tuple[dict[str, LayerState], dict[str, str]]:
    """Layers that saw something and may move; and those that stay as they are this time, each with the reason."""
    wanted, found = {}, False
    idle = {name: "saw no input row: frozen" for name in guard._found.layers if name not in states}
    for name, state in states.items():
        if state.moments.gram.count == 0 or not bool(state.group_energy().any()):
            idle[name] = "saw only zeros: frozen"
            continue
        found = True
        if not state.layer.weight.requires_grad:
            idle[name] = "its weight has requires_grad=False: frozen, as it was"
        elif state.silent:
            idle[name] = "some task's outputs are all 0 or overflow, and no fraction of that is a change: frozen"
        else:
            wanted[name] = state
    if not found:
        raise NessError("constrain: no layer has seen an input; call observe(old_inputs) first")
    return wanted, idle


def _spectra(
    guard: NullSpace, wanted: Mapping[str, LayerState], options: Options, progress: Progress | None
) -> Iterator[tuple[str, Spectrum]]:
    """Decompose every layer beside its private directions; rank 0 alone does the work."""
    rule = guard.rule if options.max_drift is None else None  # a limit on drift is kept direction by direction

    def work_on(state: LayerState) -> Callable[[], Spectrum]:
        decompose = state.spectrum if distributed.on_rank_zero() else state.no_spectrum
        return lambda: decompose(options.bias(guard), capped(options.private, state.layer.fan_in), rule)

    first: dict[tuple[int, bool], str] = {}
    work, done = {}, dict[str, Spectrum]()
    for name, state in wanted.items():
        work[name] = work_on(state)
        if not distributed.active() and not options.private and state.relative is None:  # q, k and v share a Gram
            like = first.setdefault((id(state.moments.gram), state.layer.bias is None), name)
            if like != name:
                work[name] = partial(_of_layer, done, like, state.layer.outputs)
    on_cpu = {name: state.moments.gram.device.type == "cpu" for name, state in wanted.items()}
    alone = {name for name in wanted if not on_cpu[name] or isinstance(work[name], partial)}
    widths = {name: 0 if name in alone else state.layer.width for name, state in wanted.items()}
    for name, spectrum in side_by_side(work, widths, progress):
        done[name] = spectrum
        yield name, spectrum


def _of_layer(done: Mapping[str, Spectrum], like: str, outputs: int) -> Spectrum:
    """The spectrum of another layer that reads the same inputs, for a layer of so many outputs."""
    return replace(done[like], outputs=outputs)


def _warnings(guard: NullSpace, spectra: Mapping[str, Spectrum], private: int) -> Iterator[str]:
    """What a caller should know about the layers that are about to be constrained."""
    known = [(name, guard._protected[name].moments.gram.count, guard._found.layers[name]) for name in spectra]
    thin = [f"{name!r} ({rows} rows, fan-in {layer.fan_in})" for name, rows, layer in known if rows < layer.fan_in]
    if thin:
        yield (
            f"fewer rows than inputs in {', '.join(thin)}: directions that no row happened to use count as free, "
            "though old data of the same kind may use them. Observe more"
        )
    half = [name for name, _, layer in known if private and layer.weight.dtype.itemsize < 4]
    if half:
        yield (
            f"private parts of half-precision weights ({', '.join(half)}): each use() rounds W + B Kᵀ to half "
            "precision anew. They are promised for float32 weights"
        )


def _capped(selections: Mapping[str, Selection], rank: int | None) -> Iterator[str]:
    """Which layers have fewer free directions than the rank that was asked for."""
    free = {name: free_directions(selection) for name, selection in selections.items()}
    fewer = [f"{name!r} ({count})" for name, count in free.items() if rank is not None and 0 < count < rank]
    if fewer:
        yield (
            f"constrain(rank={rank}): fewer directions are free in {listed(fewer)}; their updates have as many ranks "
            "as there are free directions. Loosen the rule, or ask for a lower rank"
        )


def _nothing_free(guard: NullSpace, states: Mapping[str, LayerState], spectra: Mapping[str, Spectrum]) -> Iterator[str]:
    """Why no layer will train, and the strictest rule under which one would; `Rank(0)` may be meant so."""
    if guard.rule == Rank(0) and _others_train(guard):
        return
    if not spectra:
        yield "no layer will train: each is frozen, and `skipped` says why"
        return

    def frees(rule: Rule) -> bool:
        return any(states[name].drop_dead_groups(chosen).rank for name, chosen in rule.select(spectra).items())

    looser = guard.rule.looser(frees)
    advice = "Loosen the rule" if looser is None else f"The strictest of its kind that frees one is {looser!r}"
    yield f"no direction is free in any layer under {guard.rule!r}: no layer will train. {advice}"


def _others_train(guard: NullSpace) -> bool:
    """Whether anything will train but updates: excluded modules, norms of the task's own."""
    if guard.norm == "per_task" and affine_parameters(guard._found.norms):
        return True
    named = guard.model.named_parameters(remove_duplicate=False)
    return any(parameter.requires_grad for name, parameter in named if name in guard._found.excluded)


def _share_start(constraints: Mapping[str, Constraint]) -> None:
    """Rank 0's start of low-rank updates on every rank: each would draw its own."""
    if distributed.active():
        updates = [constraint.update for constraint in constraints.values()]
        distributed.from_rank_zero_([update.down.data for update in updates if isinstance(update, LowRankUpdate)])


def _shared(spectrum: Spectrum) -> Spectrum:
    """Rank 0's spectrum on every rank, which may be of a dominant part alone."""
    columns = torch.tensor(spectrum.directions.shape[-1])
    distributed.from_rank_zero_([columns])
    if int(columns) < spectrum.sigma.shape[-1]:
        rest = spectrum.noise.clone() if spectrum.rest is None else spectrum.rest
        room = spectrum.directions[..., : int(columns)].contiguous()
        spectrum = replace(spectrum, directions=room, rest=rest)
    distributed.from_rank_zero_(spectrum.tensors())
    return spectrum


def _selections(guard: NullSpace, spectra: dict[str, Spectrum]) -> dict[str, Selection]:
    """Rank 0's directions and choice on every rank: equal matrices have equal spectra, not equal eigenvectors."""
    if distributed.active():
        for name, spectrum in spectra.items():
            spectra[name] = _shared(spectrum)
    chosen = guard.rule.select(spectra)
    if distributed.active():
        for selection in chosen.values():
            distributed.from_rank_zero_([selection.weights, selection.threshold])
    return chosen
