"""`NullSpace`: observe what a model must not forget, constrain its updates, certify, merge."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ness import distributed, storage
from ness.certificate import Certificate
from ness.checks import check_constrain_options, check_guard_options
from ness.compare import Comparison, compare_outputs
from ness.discovery import discover, shape_of
from ness.errors import NessError, NessWarning
from ness.gram import Gram
from ness.install import freeze_norm, install, is_constrained, stored_statistics, unfreeze_norm, uninstall
from ness.moments import Moments
from ness.names import as_patterns
from ness.norms import affine_parameters, read_norms, uses_batch_statistics, write_norms
from ness.observe import Forward, Recorder, batches_of, call_model, nothing_seen, passes_of, watching
from ness.optimizers import refuse_other_optimizers
from ness.private import PrivatePart, capped, check_private
from ness.protected import Protected
from ness.rules import Nuclear, Rank, Rule, Selection
from ness.spectrum import Spectrum
from ness.tasks import Tasks
from ness.update import Form, Update

DEFAULT_RULE = Nuclear(1e-3)


def _ordinary_tensors() -> torch.inference_mode:
    """Tensors made inside can be written to later, also where the caller is in inference mode."""
    return torch.inference_mode(False)


class NullSpace:
    """Guards what a model knows: later training moves its layers' outputs on everything observed by a bounded amount.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> old = torch.randn(200, 8) @ torch.randn(8, 64)      # old inputs use 8 of 64 directions
    >>> guard = NullSpace(model, exclude=["2"])             # the head is yours
    >>> guard.observe(old)
    >>> guard.constrain()
    >>> optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-2)
    >>> before = model[0](old)
    >>> for _ in range(20):
    ...     loss = model(torch.randn(16, 64)).square().mean()
    ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
    >>> guard.certificate().holds, guard.certificate()["0"].rank
    (True, 56)
    >>> guard.merge()
    >>> torch.allclose(model[0](old), before, atol=1e-3)
    True

    Args:
        model: any module. Nothing about it changes before `constrain`.
        rule: which input directions are free; see `ness.rules`.
        include: constrain these layers only: names, prefixes that end at a dot, or patterns.
        exclude: leave these to the caller, trainable and unprotected (the new task's head, say).
        bias: "constrain" biases with their weights, or "freeze" them.
        norm: "freeze" affine parameters and statistics of norm layers, or keep a copy "per_task".
        private_basis: tasks use the same private directions, "shared", chosen once and grown where a task asks for
            more; or choose and keep their own, "per_task".
        statistics_device: where Grams live; by default on each layer's own device.
        statistics_dtype: `torch.float32` multiplies blocks in float32: faster on some cards, and Grams are right to
            1e-6 instead of 1e-10, so that no drift under a thousandth of a layer's outputs can be told from none.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rule: Rule = DEFAULT_RULE,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        bias: Literal["constrain", "freeze"] = "constrain",
        norm: Literal["freeze", "per_task"] = "freeze",
        private_basis: Literal["shared", "per_task"] = "shared",
        statistics_device: torch.device | str | None = None,
        statistics_dtype: torch.dtype = torch.float64,
    ) -> None:
        check_guard_options(model, rule, bias, norm, private_basis, statistics_dtype)
        self.model, self.rule = model, rule
        self.include, self.exclude = as_patterns(include, "include"), as_patterns(exclude, "exclude")
        self.bias, self.norm, self.private_basis = bias, norm, private_basis
        self.statistics_device = None if statistics_device is None else torch.device(statistics_device)
        self.statistics_dtype = statistics_dtype
        self._found = discover(model, self.include, self.exclude)
        self._shape = shape_of(model)
        self._protected: dict[str, Protected] = {}
        self._tasks = Tasks()
        self._phase: Literal["open", "constrained", "merged"] = "open"
        self._form: Form = "any"
        self._flags: list[tuple[nn.Parameter, bool]] = []  # requires_grad before `constrain`
        self._idle: dict[str, str] = {}  # layers that could not be constrained this time, and why
        self._watch_optimizers: torch.utils.hooks.RemovableHandle | None = None

    # -- what it holds ----------------------------------------------------------------------------------------------

    @property
    def constrained(self) -> bool:
        """Whether updates are in place right now."""
        return self._phase == "constrained"

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that are protected once observed."""
        return tuple(self._found.layers)

    @property
    def skipped(self) -> dict[str, str]:
        """Layers that stay frozen, each with the reason."""
        return {**self._found.skipped, **self._idle}

    @property
    def grams(self) -> dict[str, Gram]:
        """What each layer has seen: `ness.Gram` by layer name."""
        return {name: protected.gram for name, protected in self._protected.items()}

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks the guard knows, oldest first."""
        return list(self._tasks.names)

    def parameters(self) -> list[nn.Parameter]:
        """What to train: updates, a task's norms and private part, and what is trainable in excluded modules."""
        self._require_constrained("parameters()")
        return [p for p in self.model.parameters() if p.requires_grad]

    # -- observe ----------------------------------------------------------------------------------------------------

    def observe(self, batches: Any, forward: Forward | None = None, task: str | None = None) -> None:
        """Look at what must not change: one forward pass a batch, all layers at once, no sample kept.

        Args:
            batches: an iterable of batches, or one tensor. A batch is a tensor, (input, target), or a dict that the
                model is called with; any other form needs `forward`.
            forward: `forward(model, batch)`, how the model is run on one batch.
            task: names what the model knows now ("first" by default).

        NaN or Inf in a batch is an error: the statistics are then those of the batches before it. It comes at the end,
        or within 64 batches, since asking the device after each would make it wait.
        """
        with self._watching(task) as recorder:
            index = -1
            for index, batch in enumerate(batches_of(batches)):
                recorder.drop()
                call_model(self.model, batch, forward)
                recorder.end(f"batch {index}")
            if index < 0:
                nothing_seen("there was no batch")

    @contextmanager
    def observing(self, task: str | None = None) -> Iterator[None]:
        """Observe the forward passes that the caller runs inside the `with`."""
        with self._watching(task) as recorder, passes_of(self.model, recorder):
            yield

    @contextmanager
    def _watching(self, task: str | None) -> Iterator[Recorder]:
        if self.constrained or any(is_constrained(module) for module in self.model.modules()):
            raise NessError("observe: the model is constrained; call merge() or discard() first")
        self._refresh()
        self._tasks.name_observed(task)
        with _ordinary_tensors():
            for protected in self._protected.values():
                protected.settle()
        known = set(self._protected)
        recorder = Recorder(self._ledger, self.statistics_dtype)
        try:
            with watching(self.model, self._found.layers.values(), recorder.record):
                yield recorder
            recorder.check()
        except BaseException as error:
            try:
                recorder.check()
            except NessError as problem:
                error.add_note(str(problem))
            raise
        finally:
            unseen = [name for name, held in self._protected.items() if name not in known and held.gram.count == 0]
            for name in unseen:
                del self._protected[name]
            with _ordinary_tensors():
                for protected in self._protected.values():
                    protected.absorb()

    def _refresh(self) -> None:
        """Take the model apart anew where modules or parameters came or went since; a protected layer must be there.

        A head that is added later is excluded as its kind is, and a layer that is added later can be observed.
        """
        now = shape_of(self.model)
        if now == self._shape:
            return
        found = discover(self.model, self.include, self.exclude)
        for name, protected in self._protected.items():
            layer = found.layers.get(name)
            if layer is None or {*layer.modules} != {*protected.layer.modules}:
                raise NessError(
                    f"layer {name!r} is another one, or gone, since it was observed, and what was observed is of the "
                    "old one; put it back, or make a new guard and observe again"
                )
            found.layers[name] = protected.layer
        if self.norm == "per_task" and self._tasks.started and found.norms.keys() != self._found.norms.keys():
            raise NessError(
                "the model has other norms than when the first task began, and norm='per_task' keeps a copy of each "
                "for every task; make a new guard and observe again"
            )
        self._found, self._shape = found, now

    def _device(self, name: str) -> torch.device:
        if name in self._protected:
            return self._protected[name].anchor.device
        return self.statistics_device or self._found.layers[name].weight.device

    def _ledger(self, name: str) -> Moments:
        if name not in self._protected:
            self._protect([name])
        return self._protected[name].ledger()

    def _protect(self, names: Iterable[str]) -> None:
        """Open the books of layers that are seen for the first time, in the model's order on every rank."""
        new = {
            name: Protected(self._found.layers[name], self._device(name), self.rule.relative)
            for name in names
            if name not in self._protected
        }
        every = self._protected | new
        self._protected = {name: every[name] for name in self._found.layers if name in every}

    def _reduce(self) -> None:
        """Bring the statistics of all ranks together; a layer that only others saw is known here from now on."""
        waiting = any(protected.pending is not None for protected in self._protected.values())
        if not distributed.active() or not distributed.total(int(waiting)):
            return
        self._protect(name for name in self._found.layers if distributed.total(int(name in self._protected)))
        for protected in self._protected.values():
            protected.reduce()

    # -- constrain --------------------------------------------------------------------------------------------------

    def constrain(
        self,
        form: Form = "any",
        max_drift: float | None = None,
        task: str | None = None,
        private: int = 0,
    ) -> None:
        """Freeze the model and give each layer a trainable update in its free directions, zero at the start.

        A layer whose weight has `requires_grad=False` stays as it is. Training starts from the shared weights: where
        the task in use has a private part, that is taken out first. Until `merge` the model's `state_dict()` holds the
        weights without the updates: keep those with `save` or `state`, or as copies of `parameters()`.

        Args:
            form: "any" optimizer, or "sgd": cheaper, for `torch.optim.SGD` alone (momentum, decay and clipping by norm
                included; gradients that are changed entry by entry, as by `clip_grad_value_`, leave the free space).
            max_drift: keep every layer's RMS drift under this fraction of its own output's RMS, at every step.
            task: the name of the task that begins; needed with `norm="per_task"` and with `private`.
            private: k directions a layer (at most a third of its fan-in) in which the task learns for itself, among
                those that earlier inputs use most. They are never merged: `use` puts them in and takes them out, no
                other task sees them, and no bound counts them. The task keeps k numbers an output unit.
        """
        with _ordinary_tensors():
            for _ in self._constraining(form, max_drift, task, private, depth=3):
                pass

    def constraining(
        self,
        form: Form = "any",
        max_drift: float | None = None,
        task: str | None = None,
        private: int = 0,
    ) -> Iterator[str]:
        """`constrain` a layer at a time: yields the name of each layer once it is decomposed.

        For whoever shows progress, or has other work in between. Nothing happens before the first layer is asked for,
        and the model is untouched until the iterator ends; if it, or what was observed, has changed by then, it is
        refused. Under torch.distributed all layers come at the end.

        >>> guard = NullSpace(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
        >>> guard.observe([torch.eye(3)])
        >>> [layer for layer in guard.constraining()], guard.constrained
        (['0', '1'], True)
        """
        distributed.together(lambda: self._check_constrain(form, max_drift, task, private))
        return self._constraining(form, max_drift, task, private, depth=2)

    def _constraining(
        self, form: Form, max_drift: float | None, task: str | None, private: int, depth: int
    ) -> Iterator[str]:
        """`depth`: how many frames up a warning points, to the caller's own line."""
        distributed.together(lambda: self._check_constrain(form, max_drift, task, private))
        self._reduce()
        distributed.together(self._begin_task)
        spectra: dict[str, Spectrum] = {}
        if distributed.active():  # ranks agree on an error of any of them at the end, so none may stop before
            spectra = distributed.together(lambda: dict(self._spectra(private)))
            yield from spectra
        else:
            before = self._stamp()
            for name, spectrum in self._spectra(private):
                spectra[name] = spectrum
                yield name
            self._check_constrain(form, max_drift, task, private)
            if self._stamp() != before:
                raise NessError(
                    "constraining: the model's weights, or what was observed, changed between two layers, so the "
                    "directions found no longer fit; nothing was constrained. Begin again"
                )
        for doubt in self._doubts(spectra, private):
            warnings.warn(doubt, NessWarning, stacklevel=depth)
        selections = {
            name: self._protected[name].living(selection) for name, selection in self._selections(spectra).items()
        }
        constraints = {
            name: self._protected[name].prepare(spectra[name], selection, form, self.bias)
            for name, selection in selections.items()
        }
        self._wear({})
        for name, constraint in constraints.items():
            protected = self._protected[name]
            protected.constraint = constraint
            if max_drift is not None and constraint.update is not None:
                protected.limit_drift(spectra[name], selections[name], max_drift)
        if not self._updates() and self.rule != Rank(0):  # which asks for just that
            warnings.warn(
                "no direction is free in any layer: no layer will train. Loosen the rule", NessWarning, stacklevel=depth
            )
        self._form = form
        self._tasks.begin(task, read_norms(self._found.norms) if self.norm == "per_task" else {})
        self._enter()

    def _check_constrain(self, form: str, max_drift: float | None, task: str | None, private: int) -> None:
        check_constrain_options(form, max_drift)
        check_private(private, task, {name: layer.fan_in for name, layer in self._found.layers.items()})
        if self.constrained:
            raise NessError("constrain: already constrained; call merge() or discard() first")
        if any(is_constrained(module) for module in self.model.modules()):
            raise NessError("constrain: another guard holds this model; merge() or discard() that one first")
        self._refresh()
        if not self._protected and not distributed.active():
            raise NessError("constrain: nothing was observed yet; call observe(old_inputs) first")
        if self.norm == "per_task" and task is None:
            raise NessError("constrain: norm='per_task' needs the name of the task, constrain(task=NAME)")
        self._tasks.check_new(task)

    def _begin_task(self) -> None:
        """What was observed last is a task of its own from now on, in every layer."""
        if self.rule.relative:
            for protected in self._protected.values():
                protected.begin_task()

    def _stamp(self) -> dict[str, tuple[int, int]]:
        """What changes when rows are observed or a weight is written, by layer."""
        return {
            name: (held.gram.count, sum(p._version for p in (held.layer.weight, held.layer.bias) if p is not None))
            for name, held in self._protected.items()
        }

    def _spectra(self, private: int) -> Iterator[tuple[str, Spectrum]]:
        """Decompose every layer that saw something, beside its private directions; note those that did not."""
        self._idle = {name: "saw no input row: frozen" for name in self._found.layers if name not in self._protected}
        found = False
        for name, protected in self._protected.items():
            if protected.moments.gram.count == 0 or not bool(protected.group_energy().any()):
                self._idle[name] = "saw only zeros: frozen"
                continue
            found = True
            if not protected.layer.weight.requires_grad:
                self._idle[name] = "its weight has requires_grad=False: frozen, as it was"
                continue
            if protected.silent:
                self._idle[name] = (
                    "some task's outputs are all 0 or overflow, and no fraction of that is a change: frozen"
                )
                continue
            decompose = protected.spectrum if distributed.on_rank_zero() else protected.no_spectrum
            yield name, decompose(self.bias, capped(private, protected.layer.fan_in))
        if not found:
            raise NessError("constrain: no layer has seen an input; call observe(old_inputs) first")

    def _doubts(self, spectra: Mapping[str, Spectrum], private: int) -> Iterator[str]:
        """What a caller should know about the layers that are about to be constrained."""
        known = [(name, self._protected[name].moments.gram.count, self._found.layers[name]) for name in spectra]
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

    def _selections(self, spectra: Mapping[str, Spectrum]) -> dict[str, Selection]:
        """Rank 0's directions and choice on every rank: equal matrices have equal spectra, not equal eigenvectors."""
        if distributed.active():
            for spectrum in spectra.values():
                distributed.from_rank_zero_(spectrum.tensors())
        chosen = self.rule.select(spectra)
        if distributed.active():
            for selection in chosen.values():
                distributed.from_rank_zero_([selection.weights, selection.threshold])
        return chosen

    def _updates(self) -> list[Update]:
        constraints = [p.constraint for p in self._protected.values() if p.constraint is not None]
        return [constraint.update for constraint in constraints if constraint.update is not None]

    def _enter(self) -> None:
        """Freeze everything that is not excluded, put the updates in place."""
        self._flags = [(p, p.requires_grad) for p in self.model.parameters()]
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name not in self._found.excluded:
                parameter.requires_grad_(False)
                parameter.grad = None  # else an optimizer that was made before would move it once more
        if self.norm == "per_task":
            for parameter in affine_parameters(self._found.norms):
                parameter.requires_grad_(True)
        else:
            for module in self._found.norms.values():
                if stored_statistics(module):
                    freeze_norm(module)
        updates = self._updates()
        install(updates)
        if self._form == "sgd":
            self._watch_optimizers = refuse_other_optimizers(self)
        self._phase = "constrained"

    def _leave(self) -> None:
        """Ordinary modules again."""
        uninstall(self._updates())
        for module in self._found.norms.values():
            if is_constrained(module):
                unfreeze_norm(module)
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        if self._watch_optimizers is not None:
            self._watch_optimizers.remove()
            self._watch_optimizers = None
        self._flags = []

    # -- certify ----------------------------------------------------------------------------------------------------

    def certificate(self) -> Certificate:
        """What the model kept: per layer rank, bound, and the exact drift on everything ever observed."""
        if not self._protected and not distributed.active():
            raise NessError("certificate: nothing was observed yet; call observe(old_inputs) first")
        self._reduce()
        protected = self._protected.values()
        directions = [p.directions for p in protected if p.directions is not None]
        return Certificate(
            rows=tuple(p.certify() for p in protected),
            skipped=self.skipped,
            outside=tuple(name for name, module in self._found.norms.items() if uses_batch_statistics(module)),
            kept=self._tasks.kept(),
            shared_directions=sum(k.numel() for k in directions),
            protected_weights=sum(p.layer.groups * p.layer.outputs * p.layer.fan_in for p in protected),
            parameters=sum(p.numel() for p in {*self.model.parameters()} - {u.parameter for u in self._updates()}),
        )

    def compare(self, batches: Any, forward: Forward | None = None) -> Comparison:
        """Measure how far the model's outputs on these batches are from what they were when it was last observed.

        This is the end-to-end change, upstream drift included, of the protected layers, and of norms that a task under
        way trains for itself; excluded modules count as they are now. So ask before you observe the next task's data:
        afterwards the weights as they are then are what is compared with.
        """
        if not self._protected:
            raise NessError("compare: nothing was observed yet; call observe(old_inputs) first")
        return compare_outputs(self.model, batches, forward, self._as_observed)

    @contextmanager
    def _as_observed(self) -> Iterator[None]:
        """The model with the weights it had when last observed, the private part of the task in use among them."""
        updates = self._updates() if self.constrained else []
        uninstall(updates)
        now = {name: protected.layer.stored() for name, protected in self._protected.items()}
        parts = self._tasks.private_in_use()
        norms = read_norms(self._found.norms) if self.constrained and self.norm == "per_task" else None
        try:
            if norms is not None:
                write_norms(self._found.norms, self._tasks.norms_in_use())
            for name, protected in self._protected.items():
                protected.write(protected.with_private(protected.anchor, parts.get(name)))
            yield
        finally:
            for name, protected in self._protected.items():
                protected.write(now[name])
            if norms is not None:
                write_norms(self._found.norms, norms)
            install(updates)

    # -- end --------------------------------------------------------------------------------------------------------

    @_ordinary_tensors()
    def merge(self) -> None:
        """Add the updates to the weights: plain modules again, same classes, same state-dict keys and order.

        The finished task is in use. Its private part is in its model's weights, not in those that all tasks share.
        """
        if self._phase == "merged":
            return
        self._require_constrained("merge()")
        merged: dict[str, Tensor] = {}
        parts, own = {}, self.private_basis == "per_task"
        for name, protected in self._protected.items():
            if protected.constraint is not None and protected.constraint.update is not None:
                merged[name] = protected.running()
                part = protected.constraint.private_part(own)
                if part is not None:
                    parts[name] = part
                numbers = [merged[name]] if part is None else [merged[name], part.coefficients]
                if not all(bool(torch.isfinite(values).all()) for values in numbers):
                    raise NessError(
                        f"merge: the update of layer {name!r} holds NaN or Inf; training diverged. "
                        "The model is untouched: call discard(), lower the learning rate, and try again"
                    )
        self._leave()
        for name, protected in self._protected.items():
            protected.finish(merged.get(name), self.rule, keep_directions=not own)
        self._tasks.finish(read_norms(self._found.norms) if self.norm == "per_task" else {}, parts)
        self._wear(parts)
        self._phase = "merged"

    def discard(self) -> None:
        """Drop the updates: the model is what it was before `constrain`, its task's private part included.

        Excluded modules keep what they have learnt.
        """
        self._require_constrained("discard()")
        self._leave()
        for protected in self._protected.values():
            protected.constraint = None
        if self.norm == "per_task":
            write_norms(self._found.norms, self._tasks.norms_in_use())
        self._tasks.abandon()
        self._wear(self._tasks.private_in_use())
        self._phase = "open"

    # -- tasks ------------------------------------------------------------------------------------------------------

    def use(self, task: str | None) -> None:
        """Put a task's own norms and private part in place; None: the shared weights with the first task's norms.

        Exact however often: the weights of a task are the shared ones plus its private part, rounded once, from copies
        that no switch touches.
        """
        if self.constrained:
            raise NessError("use: the model is constrained; call merge() or discard() first")
        self._tasks.use(task)
        values = self._tasks.norms_in_use()
        if values:
            write_norms(self._found.norms, values)
        self._wear(self._tasks.private_in_use())

    def _wear(self, parts: Mapping[str, PrivatePart]) -> None:
        """Private parts into the weights, in place of those that are there."""
        for name, protected in self._protected.items():
            protected.wear(parts.get(name))

    def export(self, task: str, path: str | Path) -> None:
        """Write the plain state dict of one task's model to one safetensors file; the task in use stays in use.

        Its keys and their order are the model's own, so that a plain copy of the model loads it, without `ness`.
        Excluded modules (heads) are written as they are now.
        """
        from ness.export import state_dict_of

        def write() -> None:
            state = state_dict_of(self, task)
            if distributed.on_rank_zero():
                storage.write_state_dict(Path(path), state)

        distributed.together(write)

    # -- storage ----------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything the guard knows, bases and updates included: tensors, and a description that is plain JSON."""
        from ness.state import pack

        return pack(self)

    def load_state(self, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
        """Take over what `state` gave, for the same model; refused whole if anything does not fit."""
        from ness.state import unpack

        unpack(self, tensors, manifest)

    def save(self, folder: str | Path) -> None:
        """Write the guard to a folder: safetensors and a JSON manifest, all or nothing."""
        distributed.together(lambda: None)
        self._reduce()
        tensors, manifest = self.state()

        def write() -> None:
            if distributed.on_rank_zero():
                storage.save_folder(Path(folder), tensors, manifest)

        distributed.together(write)

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module) -> NullSpace:
        """Read a guard from a folder, for the model it was saved with."""
        from ness.state import rebuild

        tensors, manifest = storage.load_folder(Path(folder))
        return rebuild(model, tensors, manifest)

    def _require_constrained(self, what: str) -> None:
        if not self.constrained:
            raise NessError(f"{what}: the model is not constrained; call observe(old_inputs), then constrain()")

    def __deepcopy__(self, memo: dict[int, Any]) -> NullSpace:
        """A guard of a copy of the model, which refuses optimizers as this one does."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy({**self.__dict__, "_watch_optimizers": None}, memo))
        twin._shape = shape_of(twin.model) if not twin.constrained else ()
        if self._watch_optimizers is not None:
            twin._watch_optimizers = refuse_other_optimizers(twin)
        return twin

    def __repr__(self) -> str:
        return f"NullSpace({len(self.layers)} layers, rule={self.rule}, {self._phase}, tasks={self.tasks})"
