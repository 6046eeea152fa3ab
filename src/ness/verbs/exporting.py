"""What a guard hands on: one task's weights, an adapter, and what was observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ness import distributed
from ness.errors import NessError, warn
from ness.layers import Layer
from ness.layers.names import listed
from ness.statistics.gram import Gram
from ness.statistics.moments import GramSums, Moments
from ness.storage.folder import fingerprint, write_state_dict
from ness.storage.statistics import (
    DTYPES,
    LayerStatistics,
    fingerprints,
    read_layer,
    read_manifest,
    write_statistics,
)
from ness.updates import accounts
from ness.updates.install import is_constrained
from ness.updates.layer_state import LayerState
from ness.verbs.changes import whole
from ness.verbs.observing import protect, rebase, reduce, remembered

if TYPE_CHECKING:
    from ness.guard import NullSpace


class Exports:
    """The verbs of a guard that write for others, and read what others wrote."""

    def export(self, task: str, path: str | Path) -> None:
        """Write the plain state dict of one task's model to one safetensors file; the task in use stays in use.

        Its keys and their order are the model's own, so that a plain copy of the model loads it, without `ness`.
        Excluded modules (heads) are written as they are now.
        """
        from ness.export import state_dict_of

        def write() -> None:
            state = state_dict_of(cast("NullSpace", self), task)
            if distributed.on_rank_zero():
                write_state_dict(Path(path), state)

        distributed.together(write)

    def export_lora(self, folder: str | Path, rank: int | None = None) -> dict[str, float]:
        """Write the last task's update as a LoRA adapter that PEFT loads: a folder of two files, without importing it.

        While the task is trained, or after its `merge`. The adapter belongs to the weights as they were before the
        task. With a private part it holds that too. Excluded modules that were trained (heads), and a task's own norms,
        go along whole, as PEFT's `modules_to_save`. `ness.json` beside them says what the update can have moved.

        >>> import tempfile
        >>> from torch import nn
        >>> from ness import NullSpace, Rank
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        >>> guard = NullSpace(model, rule=Rank(6), exclude="1")
        >>> guard.observe(torch.randn(100, 8))
        >>> guard.constrain(rank=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     guard.export_lora(folder), sorted(path.name for path in Path(folder).iterdir())
        ({'0': 0.0}, ['adapter_config.json', 'adapter_model.safetensors', 'ness.json'])

        Args:
            folder: made if it is missing; an adapter that is there is replaced, all files or none.
            rank: cut every layer's update to this rank, by its singular values. None: all of it, which at full width
                is as wide as the free directions.

        Returns:
            By layer, the RMS over all observed rows of what the cut changes in the layer's outputs.

        Raises:
            NessError: there is no update, or it moves biases, which an adapter does not have.
        """
        from ness.lora import export_lora

        return distributed.together(lambda: export_lora(cast("NullSpace", self), Path(folder), rank))

    def export_statistics(self, folder: str | Path, source: str | None = None) -> None:
        """Write what was observed, so that others can protect it without the data: `import_statistics` reads it.

        Second moments alone, no sample: the upper triangle of each layer's Gram in float32, with its rows, its shape,
        the model's class, and fingerprints of the weights it was taken under. A folder is replaced whole or not at all.

        Args:
            folder: made if it is missing.
            source: where the data came from, in words, for whoever reads the folder.

        Raises:
            NessError: nothing was observed, or the folder could not be written; what was there is there still.

        >>> import tempfile
        >>> from torch import nn
        >>> from ness import NullSpace
        >>> model = nn.Sequential(nn.Linear(8, 4))
        >>> guard, other = NullSpace(model), NullSpace(model)
        >>> guard.observe(torch.randn(100, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     guard.export_statistics(folder, source="made up")
        ...     other.import_statistics(folder)
        >>> other.grams["0"]
        Gram(groups=1, d=9, count=100)
        """
        _export_statistics(cast("NullSpace", self), Path(folder), source)

    def import_statistics(self, folder: str | Path, task: str | None = None) -> None:
        """Protect what another guard has observed: rows that `export_statistics` wrote, added to those known.

        Names may differ by a prefix ("model.layers.0" and "layers.0"), and the model's dtype may be another. What was
        observed under other weights is protected too, with a warning: its drift counts from the weights as they are.
        As for `observe`, the model must not be constrained. Float32 resolves no σ below about 3e-4 of the largest.

        Args:
            folder: written by `export_statistics`.
            task: as for `observe`.

        Raises:
            NessError: the folder is missing, damaged, or of another architecture; the guard is then as it was.
        """
        _import_statistics(cast("NullSpace", self), Path(folder), task)


@whole
def _export_statistics(guard: NullSpace, folder: Path, source: str | None) -> None:
    if source is not None and not isinstance(source, str):
        raise NessError(f"export_statistics(source={source!r:.60}): expected words, or None")
    reduce(guard)

    def write() -> None:
        states = {name: state for name, state in guard._protected.items() if state.moments.gram.count}
        if not states:
            raise NessError("export_statistics: nothing was observed yet; call observe(old_inputs) first")
        if distributed.on_rank_zero():
            write_statistics(folder, _layers(states), _about(guard, states, source))

    distributed.together(write)


@whole
def _import_statistics(guard: NullSpace, folder: Path, task: str | None) -> None:
    _check_open(guard)
    guard._refresh()
    doubts, fields = distributed.together(lambda: _imported(guard, folder, task))
    guard.__dict__.update(fields)
    for doubt in doubts:
        warn(doubt)


def _check_open(guard: NullSpace) -> None:
    if guard.constrained or any(is_constrained(module) for module in guard.model.modules()):
        raise NessError("import_statistics: the model is constrained; call merge() or discard() first")
    if guard._observation is not None:
        raise NessError("import_statistics: this guard is observing; end that first")


def _shape(layer: Layer) -> dict[str, Any]:
    return {
        "kind": layer.kind,
        "groups": layer.groups,
        "outputs": layer.outputs,
        "fan_in": layer.fan_in,
        "bias": layer.bias is not None,
    }


def _layers(states: Mapping[str, LayerState]) -> Iterator[tuple[str, LayerStatistics]]:
    for name, state in states.items():
        moments = state.moments
        energy = float(moments.energy)
        about = moments.gram.count, moments.calls, energy, fingerprints(state.anchor)
        yield name, LayerStatistics(_shape(state.layer), *about, moments.gram.matrix)


def _about(guard: NullSpace, states: Mapping[str, LayerState], source: str | None) -> dict[str, Any]:
    kind = type(guard.model)
    return {
        "model": f"{kind.__module__}.{kind.__qualname__}",
        "source": source,
        "rows": max(state.moments.gram.count for state in states.values()),
        "tasks_merged": max(state.merges for state in states.values()),
        "torch": str(torch.__version__),
        "others": sorted({*guard._found.layers, *(name for name, _ in guard.model.named_modules())} - {*states, ""}),
    }


def _imported(guard: NullSpace, folder: Path, task: str | None) -> tuple[list[str], dict[str, Any]]:
    """The guard's new fields, and what should be said of them."""
    manifest = read_manifest(folder)
    entries = manifest["layers"]
    names = _matched(guard, manifest)
    tasks = guard._tasks.copy()
    tasks.name_observed(task)
    states = {name: state.copy() for name, state in guard._protected.items()}
    rebase(states.values())
    states = protect(guard, states, names.values())
    known: GramSums = {}
    read: dict[tuple[str, int], Gram] = {}  # by file: layers that share a Gram share it here too
    changed = []
    for saved, name in names.items():
        entry, state = entries[saved], states[name]
        if not _same_weights(entry["weights"], state):
            changed.append(name)
        layer = read_layer(folder, saved, entry)
        account, device = accounts.account(state), state.anchor.device
        if distributed.on_rank_zero():  # its rows are summed over ranks
            energy = torch.tensor(layer.energy, dtype=torch.float64, device=device)
            key = str(entry["file"]), layer.count
            if key not in read:
                read[key] = account.gram.like().plus(Gram(layer.gram.to(device), layer.count))
            account.add_(Moments(read[key], None, account.square.new_zeros(()), energy, layer.calls), known=known)
        accounts.take(state, account, known)
    doubts = []
    if changed:
        doubts.append(
            f"import_statistics: {listed(changed)} had other weights when these statistics were taken (the model: "
            f"{manifest.get('model')}); what they protect is kept, and drift counts from the weights as they are now"
        )
    missing = [name for name in guard._found.layers if name not in states]
    if missing:
        doubts.append(
            f"import_statistics: no statistics of {listed(missing)}, which stay frozen until they are observed"
        )
    rest = remembered(guard, states, tasks.in_use)
    return doubts, {"_protected": states, "_tasks": tasks, "_remainder": rest}


def _same_weights(saved: Mapping[str, str], state: LayerState) -> bool:
    dtype = str(state.anchor.dtype).removeprefix("torch.")
    return dtype in DTYPES and saved.get(dtype) == fingerprint(state.anchor)


def _matched(guard: NullSpace, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Saved layer -> the guard's, under the prefix at which most names agree; another architecture is refused."""
    saved, own = manifest["layers"], guard._found.layers
    best: dict[str, str] = {}
    for add, drop in _prefixes(saved, own):
        found = {name: add + name[len(drop) :] for name in saved if name.startswith(drop)}
        found = {name: other for name, other in found.items() if other in own}
        if len(found) > len(best):
            best = found
    kind, model = type(guard.model).__name__, manifest.get("model")
    if not best:
        raise NessError(
            f"import_statistics: these are of another architecture, {model}: no layer of this {kind} has a name "
            f"of theirs ({listed(sorted(saved))} there, {listed(sorted(own))} here)"
        )
    for name, other in best.items():
        found, expected = {key: saved[name].get(key) for key in _shape(own[other])}, _shape(own[other])
        if found != expected:
            raise NessError(
                f"import_statistics: these are of another architecture, {model}: its layer {name!r} is {found}, and "
                f"{other!r} of this {kind} is {expected}"
            )
    here = {name for name, _ in guard.model.named_modules()} | own.keys()
    add, drop = _prefix_of(best)
    theirs = [name for name in saved if name not in best and add + name.removeprefix(drop) not in here]
    known = {add + name.removeprefix(drop) for name in manifest.get("others", ())}
    mine = [name for name in own if name not in best.values() and name not in known]
    for what, odd, beside in (("it has", theirs, best), ("it lacks", mine, best.values())):
        roots = {name.partition(".")[0] for name in beside}
        inside = [name for name in odd if name.partition(".")[0] in roots]
        if inside:
            raise NessError(
                f"import_statistics: these are of another architecture, {model}: {what} {listed(inside)}, and this "
                f"{kind} differs"
            )
    return best


def _prefixes(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What may be put before a saved name, or taken from it, so that it is one of the guard's."""
    pairs = {("", "")}
    for name in saved:
        pairs |= {(other[: -len(name)], "") for other in own if other.endswith(f".{name}")}
    for other in own:
        pairs |= {("", name[: -len(other)]) for name in saved if name.endswith(f".{other}")}
    return sorted(pairs)


def _prefix_of(names: Mapping[str, str]) -> tuple[str, str]:
    saved, own = next(iter(names.items()))
    return own[: max(0, len(own) - len(saved))], saved[: max(0, len(saved) - len(own))]
