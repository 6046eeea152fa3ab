"""Old and new inputs as mean Grams: passes through a shadow of the model, under the weights they belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ness.errors import NessError, warn
from ness.layers import Layer
from ness.layers.names import listed
from ness.repairing.algebra import Reshaper
from ness.repairing.weights import Target
from ness.statistics.gram import Gram
from ness.statistics.moments import Moments
from ness.statistics.on_disk import zeros_on_disk
from ness.statistics.padding import Masking, MaskOf, check_mask_of, masks_of_batch
from ness.statistics.recorder import Forward, Recorder, batches_of, call_model
from ness.statistics.watch import Watch

#: Called with the stage, how many batches of it are done, and how many there are (None where that is not known).
Progress = Callable[[str, int, int | None], None]
#: Device (None: each layer's own) and folder (None: in memory) of Grams.
Place = tuple[torch.device | None, Path | None]

KEPT = 16  # bytes of a layer for each d²: the eigenvectors of C_o and Qᵀ C_n Q in float64, more than both Grams take
SOLVING = 72  # more while a layer is solved for: both Grams whole, and what the decomposition works in (measured)
SAMPLE_BATCHES = 8  # batches of each kind that are kept until the end, for the figures from end to end
SAMPLE_SIZE = 1024  # tokens, or samples, in them


class Source:
    """Batches of one kind, "old" or "new": counted, fingerprinted, and a few of them kept for the report."""

    def __init__(self, what: str, batches: Any, progress: Progress | None = None) -> None:
        self.what, self.batches, self.progress = what, batches, progress
        try:
            self.iterable = batches_of(batches)
        except NessError:
            raise NessError(
                f"repair({what}=...): found {type(batches).__name__}, expected batches: an iterable of tensors, of "
                "(input, target) or of dicts, or one tensor"
            ) from None
        self.sample: list[Any] = []
        self.passes = self.count = self.samples = self.digest = self._size = 0

    @property
    def once(self) -> bool:
        """Whether there is one pass only: an iterator is used up after it."""
        return isinstance(self.iterable, Iterator)

    def __iter__(self) -> Iterator[Any]:
        first, count, samples, digest = self.passes == 0, 0, 0, 0
        total = len(self.iterable) if isinstance(self.iterable, Sized) else self.count or None
        for batch in self.iterable:
            if first:
                self._keep(batch)
                more, number = _digest(batch)
                samples, digest = samples + more, (digest + number) % 2**128
            yield batch
            count += 1
            if self.progress is not None:
                self.progress(self.what, count, total)
        if not count:
            raise NessError(f"repair({self.what}=...): there was no batch; is a generator used up, or a loader empty?")
        if first:
            self.count, self.samples, self.digest = count, samples, digest
        elif count != self.count:
            raise NessError(
                f"repair({self.what}=...): the first pass had {self.count} batches and a later one {count}; memory= "
                "and passes= need the same batches in every pass"
            )
        self.passes += 1

    def _keep(self, batch: Any) -> None:
        size = _size(batch)
        if not self.sample or (len(self.sample) < SAMPLE_BATCHES and self._size + size <= SAMPLE_SIZE):
            self.sample.append(batch)
            self._size += size


class Rows:
    """Passes through a model whose layers' input rows go to a recorder, padding left out."""

    def __init__(self, model: nn.Module, forward: Forward | None, mask: MaskOf | None, watches: list[Watch]) -> None:
        self.model, self.forward, self.mask, self.watches = model, forward, mask, watches
        check_mask_of(mask)

    def watch(self, recorder: Recorder, layers: Sequence[Layer], batches: Iterable[Any]) -> None:
        """One pass for each batch."""
        masking = recorder.masking = Masking(self.model)
        watch = Watch(self.model, layers, recorder.record, masking)
        self.watches.append(watch)  # whoever catches an interrupt that passes over `finally` closes it
        try:
            watch.open()
            for index, batch in enumerate(batches):
                recorder.drop()
                masking.begin(masks_of_batch(batch, self.mask, self.model), fixed=self.mask is not None)
                with without_head(self.model, layers, batch):
                    call_model(self.model, batch, self.forward)
                recorder.end(f"batch {index}")
            recorder.check_rows()
        finally:
            watch.close()
        self.watches.remove(watch)
        recorder.check()


@contextmanager
def without_head(model: nn.Module, layers: Sequence[Layer], batch: Any) -> Iterator[None]:
    """A language model without its logits, which no layer reads: the head of a small one is half of its FLOPs.

    Only where transformers' own `get_output_embeddings` names the head, no layer that is watched is in it, and the
    batch asks for no loss. `model` is a copy of ours, so an interrupt may pass over the end of this.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    watched = {id(module) for layer in layers for module in layer.modules}
    asks = not isinstance(batch, Mapping) or "labels" in batch
    if asks or not isinstance(head, nn.Linear) or id(head) in watched or "forward" in head.__dict__:
        yield
        return
    head.__dict__["forward"] = lambda hidden: hidden[..., :1]
    try:
        yield
    finally:
        head.__dict__.pop("forward", None)


def observe(
    rows: Rows,
    targets: Sequence[Target],
    batches: Iterable[Any],
    dtype: torch.dtype,
    place: Place,
) -> dict[str, Gram]:
    """Grams of the targets' inputs by target name, under the weights that the model has now.

    Layers that read one tensor share a Gram.
    """
    books = {target.layer.name: _books(target.layer, place, dtype) for target in targets}
    recorder = Recorder(books.__getitem__)
    rows.watch(recorder, [target.layer for target in targets], batches)
    if recorder.unmasked:
        names = list(recorder.unmasked)
        warn(f"repair: padding may count as rows in {listed(names)}: {recorder.unmasked[names[0]]}")
    return {target.name: books[target.layer.name].gram for target in targets}


def _books(layer: Layer, place: Place, dtype: torch.dtype) -> Moments:
    """A Gram of no rows."""
    device, folder = place
    return Moments.zeros(
        layer.groups,
        layer.outputs,
        layer.width,
        device or layer.weight.device,
        dtype=_kept_in(dtype),
        folder=folder,
    )


def _kept_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float32 else torch.float64


def reshaper_of(
    target: Target, old: Gram, new: Gram | None, ridge: float, dtype: torch.dtype
) -> tuple[Reshaper, Tensor]:
    """The layer's reshaper, and the scale (width,) of its columns: the constant 1 of a bias counts as large as inputs.

    Without a changed bias the inputs' own block of the Grams is used.
    """
    mean_old, mean_new = mean_gram(old), None if new is None else mean_gram(new).to(old.device)
    width, fan_in = target.width, target.layer.fan_in
    mean_old = mean_old[..., :width, :width]
    mean_new = None if mean_new is None else mean_new[..., :width, :width]
    scale = torch.ones(width, dtype=torch.float64, device=mean_old.device)
    if width > fan_in:
        every = [gram[..., :fan_in, :fan_in] for gram in (mean_old, mean_new) if gram is not None]
        size = torch.stack([gram.diagonal(dim1=-2, dim2=-1).mean() for gram in every]).mean().sqrt()
        scale[fan_in] = torch.where(size > 0, size, 1.0)
    pair = scale[:, None] * scale if width > fan_in else 1.0
    mean_new = None if mean_new is None else mean_new * pair
    return Reshaper.of(mean_new, mean_old * pair, ridge, target.name, dtype), scale


def on_disk(reshaper: Reshaper, folder: Path) -> Reshaper:
    """The same, with what is large in files that are gone with it."""
    large = reshaper.basis, reshaper.new
    basis, new = (zeros_on_disk(folder, tuple(one.shape), one.dtype).copy_(one) for one in large)
    return replace(reshaper, basis=basis, new=new)


def mean_gram(gram: Gram) -> Tensor:
    """C / n, 0 where there was no row."""
    return gram.matrix / max(1, gram.count)


def refuse_same_data(old: Any, new: Any) -> None:
    """Old and new inputs that are the same (each a `Source`, or a folder) leave nothing to tell apart."""
    same_folder = isinstance(old.batches, str) and old.batches == new.batches
    seen = bool(old.count) and (old.samples, old.digest) == (new.samples, new.digest)
    if old.batches is new.batches or same_folder or seen:
        raise NessError(
            "old and new are the same data, so what must stay and what must change cannot be told apart; pass as old "
            "what the model must not forget, and as new what it was tuned on (or no new at all)"
        )


def groups_within(targets: Sequence[Target], memory: float | None) -> list[list[Target]]:
    """The targets in order, as many at a time as have their Grams in `memory` bytes; one alone must fit."""
    if memory is None:
        return [list(targets)]
    groups: list[list[Target]] = []
    for target in targets:
        alone = bytes_of([target])
        if alone > memory:
            raise NessError(
                f"layer {target.name!r} alone needs {alone / 1e9:.3g} GB while it is repaired, and memory= allows "
                f"{memory / 1e9:.3g} GB; allow more, or exclude the layer"
            )
        if not groups or bytes_of([*groups[-1], target]) > memory:
            groups.append([])
        groups[-1].append(target)
    return groups


def bytes_of(targets: Sequence[Target]) -> int:
    """Bytes of some layers' statistics at their peak: what is kept of each, and the room to solve for the largest."""
    squares = [target.layer.groups * target.layer.width**2 for target in targets]
    return KEPT * sum(squares) + SOLVING * max(squares)


def _inputs(batch: Any) -> Tensor | None:
    """The first tensor of a batch: its inputs."""
    return next(_tensors(batch), None)


def _size(batch: Any) -> int:
    """Tokens of a batch of integers, else samples."""
    tensor = _inputs(batch)
    if tensor is None:
        return 1
    return tensor.numel() if not tensor.is_floating_point() else (len(tensor) if tensor.ndim else 1)


def _digest(batch: Any) -> tuple[int, int]:
    """How many samples, and a fingerprint of them that depends neither on their order nor on the batches."""
    tensor = _inputs(batch)
    if tensor is None or not tensor.numel():
        return 0, 0
    tensor = tensor.detach().cpu() if tensor.ndim else tensor.detach().cpu()[None]
    rows = tensor.contiguous().view(torch.uint8).reshape(len(tensor), -1).numpy()
    digests = (int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=16).digest(), "little") for row in rows)
    return len(rows), sum(digests) % 2**128


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def is_folder(batches: Any) -> bool:
    """Whether statistics are given as a folder."""
    return isinstance(batches, (str, Path))
