"""`NullSpace`: observe what a model must not forget, constrain its updates, certify, merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ness import distributed
from ness.certificate import Certificate
from ness.comparison import Comparison
from ness.errors import NessError, warn
from ness.layers.discovery import discover, refuse_complex, shape_of
from ness.layers.names import as_patterns
from ness.layers.norms import uses_batch_statistics
from ness.rules import Nuclear, Rule
from ness.statistics.gram import Gram
from ness.statistics.recorder import Forward
from ness.storage.folder import load_folder, save_folder
from ness.tasks import Tasks
from ness.updates.layer_state import LayerState
from ness.updates.optimizers import OptimizerWatch
from ness.updates.update import Form
from ness.verbs import comparing, transitions
from ness.verbs.changes import Change, whole
from ness.verbs.checks import check_guard_options, place_of_statistics
from ness.verbs.constraining import Options, constrain
from ness.verbs.decomposing import Progress
from ness.verbs.exporting import Exports
from ness.verbs.observing import Observes, observed, reduce
from ness.verbs.release import Hold, adopt
from ness.verbs.remainder import Remainder, unprotected
from ness.verbs.transitions import updates_of

DEFAULT_RULE = Nuclear(1e-3)


class NullSpace(Observes, Exports):
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
        statistics_device: where Grams live; by default on each layer's own device. "disk:FOLDER" keeps them in files
            there, which are gone with the guard: `save` keeps what was observed.
        statistics_dtype: `torch.float32` takes and keeps Grams in float32: half the memory, faster, and right to 1e-6
            instead of 1e-10, so that no drift under a thousandth of a layer's outputs can be told from none.
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
        self.statistics_device, self._statistics_folder = place_of_statistics(statistics_device)
        self.statistics_dtype = statistics_dtype
        self._found = discover(model, self.include, self.exclude)
        self._shape = shape_of(model)
        self._protected: dict[str, LayerState] = {}
        self._remainder = Remainder()  # everything else, as it was when last observed
        self._tasks = Tasks()
        self._phase: Literal["open", "constrained", "merged"] = "open"
        self._form: Form = "any"
        self._flags: list[tuple[nn.Parameter, bool]] = []  # requires_grad before `constrain`
        self._idle: dict[str, str] = {}  # layers that could not be constrained this time, and why
        self._unmasked: dict[str, str] = {}  # layers whose rows may count padding, and why
        self._watch_optimizers: OptimizerWatch | None = None
        self._unfinished: Change | None = None  # a change under way, or one that was broken off
        self._observation: observed | None = None  # under way
        self._hold: Hold | None = None  # while constrained

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
    def unprotected(self) -> dict[str, int]:
        """Names and sizes of all that is trainable now and that no bound covers: {parameter: how many numbers}.

        Excluded modules, and whatever else has `requires_grad`: embeddings, norms (also those that a task trains for
        itself: `use` puts the others back), layers that saw no row yet, parameters that were unfrozen after observing.
        Before the first `observe` that is everything. `compare` measures what it does.
        """
        protected = () if self.constrained else [p.layer for p in self._protected.values() if p.gram.count]
        return unprotected(self.model, protected)

    @property
    def grams(self) -> dict[str, Gram]:
        """What each layer has seen: `ness.Gram` by layer name."""
        return {name: protected.gram for name, protected in self._protected.items()}

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks the guard knows, oldest first."""
        return list(self._tasks.names)

    @whole
    def parameters(self) -> list[nn.Parameter]:
        """What to train: updates, a task's norms and private part, and what is trainable in excluded modules."""
        self._require_constrained("parameters()")
        found = [p for p in self.model.parameters() if p.requires_grad]
        if not found:
            warn(
                "parameters(): there is nothing to train: no layer has a free direction, and no excluded module is "
                "trainable. Call discard(), loosen the rule, and constrain again"
            )
        return found

    def _refresh(self) -> None:
        """Take the model apart anew where modules or parameters came or went since; a protected layer must be there.

        A head that is added later is excluded as its kind is, and a layer that is added later can be observed.
        """
        refuse_complex(self._found.layers)  # the model may have been converted since
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

    # -- constrain --------------------------------------------------------------------------------------------------

    @whole
    def constrain(
        self,
        form: Form = "any",
        max_drift: float | None = None,
        task: str | None = None,
        private: int = 0,
        rank: int | None = None,
        generator: torch.Generator | None = None,
        progress: Progress | None = None,
        new: Any = None,
        forward: Forward | None = None,
    ) -> None:
        """Freeze the model and give each layer a trainable update in its free directions, zero at the start.

        A layer whose weight has `requires_grad=False` stays as it is. Training starts from the shared weights: where
        the task in use has a private part, that is taken out first. Until `merge` the model's `state_dict()` holds the
        weights as they run, and the updates under `ness_*` keys: a plain model loads the first with `strict=False`,
        this one takes the second back bit for bit.

        Args:
            form: "any" optimizer, or "sgd": cheaper, for `torch.optim.SGD` alone (momentum, decay and clipping by norm
                included; gradients that are changed entry by entry, as by `clip_grad_value_`, leave the free space).
            max_drift: keep every layer's RMS drift under this fraction of its own output's RMS, at every step.
            task: the name of the task that begins; needed with `norm="per_task"` and with `private`.
            private: k directions per layer (at most a third of its fan-in) in which the task learns for itself, among
                those that earlier inputs use most. They are never merged: `use` puts them in and takes them out, no
                other task sees them, and no bound counts them. The task keeps k numbers per output unit.
            rank: train ΔW = A B M at this rank, as small as a LoRA adapter: A (o, r) from zero and B (r, d) are
                trained, M confines them to the free directions, under any optimizer. Biases stay as they are. A layer
                with fewer free directions gets as many ranks as it has, with a warning. None: as wide as the free
                space. `export_lora` writes it as a PEFT folder.
            generator: draws the start of B; torch's own by default.
            progress: `progress(done, total, name)` is called after each layer that is decomposed, which takes long; a
                function with a parameter `seconds_left` gets that too, from the time so far and d³ of each layer. The
                model is untouched until the last. Under torch.distributed all calls come at the end.
            new: some batches of the new task, as for `observe`. B then starts along the free directions that they use
                most, instead of at random; it takes a Gram per layer in float32 for as long as `constrain` runs.
            forward: as for `observe`, for those batches.

        Raises:
            NessError: nothing was observed, the options do not fit, or the model is constrained already. Then, and
                after any other error or Ctrl-C, model and guard are as before.

        >>> from ness.rules import Rank
        >>> guard = NullSpace(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), rule=Rank(6), exclude="1")
        >>> guard.observe(torch.randn(100, 8))
        >>> guard.constrain(rank=2)
        >>> {name: tuple(p.shape) for name, p in guard.model.named_parameters() if name.startswith("0.ness")}
        {'0.ness_weight': (1, 4, 2), '0.ness_weight_down': (1, 2, 8)}
        """
        constrain(self, Options(form, max_drift, task, private, rank, generator, new, forward), progress)

    # -- certify ----------------------------------------------------------------------------------------------------

    @whole
    def certificate(self) -> Certificate:
        """What the model kept: per layer rank, bound, and the exact drift on everything ever observed."""
        if not self._protected and not distributed.active():
            raise NessError("certificate: nothing was observed yet; call observe(old_inputs) first")
        reduce(self)
        protected = self._protected.values()
        directions = [p.directions for p in protected if p.directions is not None]
        return Certificate(
            rows=tuple(p.certify() for p in protected),
            skipped=self.skipped,
            outside=tuple(name for name, module in self._found.norms.items() if uses_batch_statistics(module)),
            kept=self._tasks.kept(),
            shared_directions=sum(k.numel() for k in directions),
            protected_weights=sum(p.layer.groups * p.layer.outputs * p.layer.fan_in for p in protected),
            parameters=sum(p.numel() for p in {*self.model.parameters()} - {u.parameter for u in updates_of(self)}),
            unprotected=self.unprotected,
        )

    @whole
    def compare(self, batches: Any, forward: Forward | None = None) -> Comparison:
        """Measure how far the model's outputs on these batches are from what they were when it was last observed.

        This is the end-to-end change of the whole model: protected layers and all that comes on top, excluded modules,
        embeddings, norms, bare parameters and buffers. What a task keeps for itself is that of the task in use. Modules
        that were added since count as they are now; a warning and `not_counted` name them. Ask before you observe the
        next task's data: afterwards the model as it is then is what is compared with.

        Args:
            batches: as for `observe`.
            forward: as for `observe`.

        Returns:
            The change over all samples; the model is left exactly as it was.
        """
        return comparing.compare(self, batches, forward)

    # -- end --------------------------------------------------------------------------------------------------------

    @whole
    def merge(self) -> None:
        """Add the updates to the weights: plain modules again, same classes, same state-dict keys and order.

        The finished task is in use. Its private part is in its model's weights, not in those that all tasks share.
        """
        transitions.merge(self)

    @whole
    def discard(self) -> None:
        """Drop the updates: the model is what it was before `constrain`, its task's private part included.

        Excluded modules keep what they have learnt.
        """
        transitions.discard(self)

    # -- tasks ------------------------------------------------------------------------------------------------------

    @whole
    def use(self, task: str | None) -> None:
        """Put a task's own norms and private part in place; None: the shared weights with the first task's norms.

        Exact however often: the weights of a task are the shared ones plus its private part, rounded once, from copies
        that no switch touches.
        """
        transitions.use(self, task)

    # -- storage ----------------------------------------------------------------------------------------------------

    @whole
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything the guard knows, bases and updates included: tensors, and a description that is plain JSON."""
        from ness.storage.state import pack

        return pack(self)

    @whole
    def load_state(self, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
        """Take over what `state` gave, for the same model; refused whole if anything does not fit."""
        from ness.storage.state import unpack

        unpack(self, tensors, manifest)

    @whole
    def save(self, folder: str | Path) -> None:
        """Write the guard to a folder: safetensors and a JSON manifest, all or nothing."""
        distributed.together(lambda: None)
        reduce(self)
        tensors, manifest = self.state()

        def write() -> None:
            if distributed.on_rank_zero():
                save_folder(Path(folder), tensors, manifest)

        distributed.together(write)

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module) -> NullSpace:
        """Read a guard from a folder, for the model it was saved with.

        Or for one that is that model but for a prefix of its names: a guard of a body (`BertModel`) loads for the
        classifier around it, whose other modules are then excluded: nothing of them was observed, they train, and
        `unprotected` lists them. Or for a copy in another dtype: what rounding has moved counts as drift.
        """
        from ness.storage.state import rebuild

        tensors, manifest = load_folder(Path(folder))
        return rebuild(model, tensors, manifest)

    def _require_constrained(self, what: str) -> None:
        if not self.constrained:
            raise NessError(f"{what}: the model is not constrained; call observe(old_inputs), then constrain()")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(("_watch_optimizers", "_unfinished", "_observation", "_hold"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or what was pickled: the guard of another model, whose optimizers it watches as this one does."""
        self.__dict__.update(state)
        self._shape = shape_of(self.model) if not self.constrained else ()
        if self.constrained:
            self._watch_optimizers = OptimizerWatch(self.model, updates_of(self), self._form).start()
            self._hold = adopt(self, self._watch_optimizers)

    def __repr__(self) -> str:
        return f"NullSpace({len(self.layers)} layers, rule={self.rule}, {self._phase}, tasks={self.tasks})"
