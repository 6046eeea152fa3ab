"""What guarding a model takes, from its shapes alone: memory, FLOPs and hours, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ness.errors import NessError
from ness.layers import Layer
from ness.layers.discovery import discover
from ness.layers.names import as_patterns
from ness.repairing.grams import KEPT, SOLVING
from ness.statistics.gram import strip_entries

FLOAT64, FLOAT32 = 8, 4
EIGEN = 9  # an eigen-decomposition of (d, d) with all vectors takes about 9 d³ FLOPs
REPAIR_D3 = EIGEN + 4 + 1 / 3  # d³ FLOPs of a repair, for each group: C_o decomposed, Qᵀ C_n Q, a Cholesky factor
REPAIR_OD2 = 20  # and o d²: the change turned, solved for, checked and measured
RATE = 4e10  # FLOPs a second so counted: 44 to 53 G were measured on one CPU core at d = 768 to 2048


@dataclass(frozen=True)
class CostRow:
    """All layers of one kind and shape. Bytes are of all of them together."""

    kind: str
    groups: int
    outputs: int  # o, of a group
    fan_in: int  # d, of a group
    layers: int
    statistics: int  # Grams, a little more than half of each, and the weights they were taken under
    bases: int  # what confines the updates, kept beside the model while training
    updates: int  # the trained parameters; gradients take as much again while a step runs
    optimizer: int  # two moments per parameter, as Adam keeps
    decomposition: float  # FLOPs of one layer's eigen-decomposition
    repair: int  # what `ness.repair` keeps of these layers in one go


@dataclass(frozen=True)
class Cost:
    """What guarding a model takes. `print` it for a table.

    >>> print(cost(nn.Sequential(nn.Linear(768, 3072), nn.ReLU(), nn.Linear(3072, 768)), rank=16))
    kind    shape       layers  statistics    bases  updates  optimizer
    linear  3072 × 768       1       12 MB  1.42 MB  0.25 MB    0.49 MB
    linear  768 × 3072       1     49.6 MB  22.7 MB  0.25 MB    0.49 MB
    total                    2     61.6 MB  24.1 MB  0.49 MB    0.98 MB
    <BLANKLINE>
    the model itself: 18.9 MB (4.72 M parameters, 4.72 M of them in guarded layers)
    bases as large as they can be: 60 % of each layer's directions free
    largest decomposition: d = 3072, 2.61e+11 FLOPs, 6.5 s at 40 GFLOP/s, 226 MB
    all decompositions: 2.65e+11 FLOPs, 6.6 s at 40 GFLOP/s
    observing: at least 1.95e+07 FLOPs a row, 9.44e+06 of them the forward pass
    repair: 840 MB in one go, with memory= 831 MB at least; 14 s to solve
    """

    rows: tuple[CostRow, ...]
    parameters: int  # of the model
    guarded: int  # of them in guarded layers
    model: int  # bytes of the model
    rank: int | None
    free: float | None
    rate: float  # FLOPs a second that hours are counted at
    decompositions: float  # FLOPs of all layers' eigen-decompositions
    largest: int  # d of the largest one
    forward_flops: float  # of the guarded layers, a row
    gram_flops: float  # of one symmetric product per layer, a row

    @property
    def statistics(self) -> int:
        """Bytes of all statistics."""
        return sum(row.statistics for row in self.rows)

    @property
    def bases(self) -> int:
        """Bytes of all bases."""
        return sum(row.bases for row in self.rows)

    @property
    def updates(self) -> int:
        """Bytes of all updates."""
        return sum(row.updates for row in self.rows)

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer's moments."""
        return sum(row.optimizer for row in self.rows)

    @property
    def largest_decomposition(self) -> float:
        """FLOPs of the largest layer's eigen-decomposition."""
        return max(row.decomposition for row in self.rows)

    @property
    def repair(self) -> int:
        """Bytes that `ness.repair` takes beside the two models in one go, while it solves for the largest layer."""
        return sum(row.repair for row in self.rows) + SOLVING * self._squares

    @property
    def repair_at_least(self) -> int:
        """The least that its `memory=` can be: the largest layer alone."""
        return (KEPT + SOLVING) * self._squares

    @property
    def repair_flops(self) -> float:
        """FLOPs of solving for all layers at one strength."""
        return sum(
            row.layers * row.groups * row.fan_in**2 * (REPAIR_D3 * row.fan_in + REPAIR_OD2 * row.outputs)
            for row in self.rows
        )

    @property
    def _squares(self) -> int:
        return max(row.repair // row.layers for row in self.rows) // KEPT

    @property
    def workspace(self) -> int:
        """Bytes that the largest decomposition needs: the Gram, its eigenvectors and as much to work in."""
        return 3 * FLOAT64 * self.largest**2

    def hours(self, flops: float | None = None, rate: float | None = None) -> float:
        """Hours for so many FLOPs, those of all decompositions by default, at `rate` FLOPs a second."""
        return (self.decompositions if flops is None else flops) / (self.rate if rate is None else rate) / 3600

    def observe_flops(self, rows: float) -> float:
        """FLOPs of observing so many rows (tokens): the forward pass and one symmetric product per layer, at least."""
        return rows * (self.forward_flops + self.gram_flops)

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries, for JSON or a data frame."""
        return [asdict(row) for row in self.rows]

    def __iter__(self) -> Iterator[CostRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        table = [["kind", "shape", "layers", "statistics", "bases", "updates", "optimizer"]]
        for row in self.rows:
            groups = f"{row.groups} × " if row.groups > 1 else ""
            shape = f"{groups}{row.outputs} × {row.fan_in}"
            sizes = (row.statistics, row.bases, row.updates, row.optimizer)
            table.append([row.kind, shape, str(row.layers), *map(size, sizes)])
        whole = (self.statistics, self.bases, self.updates, self.optimizer)
        table.append(["total", "", str(sum(row.layers for row in self.rows)), *map(size, whole)])
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        at = f"at {self.rate / 1e9:.3g} GFLOP/s"
        largest, every = self.largest_decomposition, self.decompositions
        return "\n".join(
            [
                *lines,
                "",
                f"the model itself: {size(self.model)} ({count(self.parameters)} parameters, "
                f"{count(self.guarded)} of them in guarded layers)",
                _assumption(self.rank, self.free),
                f"largest decomposition: d = {self.largest}, {largest:.2e} FLOPs, "
                f"{duration(self.hours(largest))} {at}, {size(self.workspace)}",
                f"all decompositions: {every:.2e} FLOPs, {duration(self.hours())} {at}",
                f"observing: at least {self.observe_flops(1):.2e} FLOPs a row, "
                f"{self.forward_flops:.2e} of them the forward pass",
                f"repair: {size(self.repair)} in one go, with memory= {size(self.repair_at_least)} at least; "
                f"{duration(self.hours(self.repair_flops))} to solve",
            ]
        )


def cost(
    model: nn.Module,
    rank: int | None = None,
    *,
    free: float | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    bias: str = "constrain",
    relative: bool = False,
    rate: float = RATE,
    shared: Sequence[Sequence[str]] = (),
    statistics_dtype: torch.dtype = torch.float64,
) -> Cost:
    """What guarding `model` will take: counted from shapes, so a model on the meta device is enough.

    >>> with torch.device("meta"):
    ...     big = nn.Sequential(nn.Linear(4096, 11008), nn.ReLU(), nn.Linear(11008, 4096))
    >>> takes = cost(big, rank=16)
    >>> f"{takes.updates / 1e6:.2f} MB trained, {takes.statistics / 1e9:.2f} GB of statistics"
    '1.93 MB trained, 0.95 GB of statistics'

    Args:
        model: any module, on any device.
        rank: of `constrain(rank=r)`; None: updates of full width.
        free: the share of each layer's directions that will be free, where it is known; None: what takes most.
        include: as of `NullSpace`.
        exclude: as of `NullSpace`.
        bias: as of `NullSpace`.
        relative: count what `Within` keeps: moments of the finished tasks beside those of all rows.
        rate: FLOPs a second in float64 that hours are counted at.
        shared: layers that read one tensor, by the last part of their names: `[("q_proj", "k_proj", "v_proj")]`. In
            each module that holds several of them they then count as one Gram and, but for `relative`, one
            decomposition. Shapes do not tell: by default every layer counts.
        statistics_dtype: as of `NullSpace`.

    Returns:
        Bytes, FLOPs and hours, per kind and shape of layer and in all; `print` it for a table.
    """
    if not isinstance(model, nn.Module):
        raise NessError(f"cost: found {type(model).__name__}, expected a torch.nn.Module")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise NessError(f"cost(rank={rank!r}): expected a whole number above 0, or None for full width")
    if free is not None and (isinstance(free, bool) or not isinstance(free, int | float) or not 0 <= free <= 1):
        raise NessError(f"cost(free={free!r}): expected a share from 0 to 1, or None")
    if bias not in ("constrain", "freeze"):
        raise NessError(f"cost(bias={bias!r}): expected 'constrain' or 'freeze'")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise NessError(f"cost(rate={rate!r}): expected FLOPs a second, above 0")
    bias = "freeze" if rank is not None else bias
    found = discover(model, as_patterns(include, "include"), as_patterns(exclude, "exclude"))
    alike: dict[tuple[str, int, int, int, bool, torch.dtype], list[Layer]] = {}
    for layer in found.layers.values():
        key = layer.kind, layer.groups, layer.outputs, layer.fan_in, layer.bias is not None, layer.weight.dtype
        alike.setdefault(key, []).append(layer)
    also = _also_read(found.layers, shared)
    rows = tuple(_row(layers, rank, free, bias, relative, also, statistics_dtype) for layers in alike.values())
    layers = list(found.layers.values())
    distinct = [layer for layer in layers if layer.name not in also]
    return Cost(
        rows=rows,
        parameters=sum(p.numel() for p in model.parameters()),
        guarded=sum(layer.groups * layer.outputs * layer.width for layer in layers),
        model=sum(p.numel() * p.element_size() for p in model.parameters()),
        rank=rank,
        free=free,
        rate=float(rate),
        decompositions=sum(_flops(layer, bias) for layer in (layers if relative else distinct)),
        largest=max(_decomposed(layer, bias) for layer in layers),
        forward_flops=float(sum(2 * layer.groups * layer.outputs * layer.fan_in for layer in layers)),
        gram_flops=float(sum(layer.groups * layer.width * (layer.width + 1) for layer in distinct)),
    )


def _also_read(layers: Mapping[str, Layer], shared: Sequence[Sequence[str]]) -> set[str]:
    """Layers that read what another one reads, which is the one that counts."""
    first: dict[tuple[str, int, int], str] = {}
    also: set[str] = set()
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        for number, names in enumerate(shared):
            if last in names and first.setdefault((parent, number, layer.width), name) != name:
                also.add(name)
    return also


def _flops(layer: Layer, bias: str) -> float:
    return float(EIGEN * layer.groups * _decomposed(layer, bias) ** 3)


def _decomposed(layer: Layer, bias: str) -> int:
    return layer.width if bias == "constrain" else layer.fan_in


def _row(
    layers: Sequence[Layer],
    rank: int | None,
    free: float | None,
    bias: str,
    relative: bool,
    also: Collection[str],
    dtype: torch.dtype,
) -> CostRow:
    layer, many = layers[0], len(layers)
    groups, outputs, width = layer.groups, layer.outputs, layer.width
    wide = max(FLOAT32, layer.weight.element_size())
    size_of = _decomposed(layer, bias)
    if rank is None:
        columns = size_of if free is None else round(free * size_of)
        basis, update = width * columns, outputs * columns
    else:
        columns = size_of if free is None else round(free * size_of)
        protected = size_of - columns
        thinner = protected if 3 * protected <= 2 * columns else columns  # P, or the free directions alone
        if free is None:
            thinner = math.ceil(0.6 * size_of)
        rank = min(rank, size_of if free is None else columns)
        basis, update = size_of * (thinner + 1) * (rank > 0), (outputs + size_of) * rank
    return CostRow(
        kind=layer.kind,
        groups=groups,
        outputs=outputs,
        fan_in=layer.fan_in,
        layers=many,
        statistics=sum(statistics_of(each, relative, dtype, own=each.name not in also) for each in layers),
        bases=many * groups * basis * wide,
        updates=many * groups * update * wide,
        optimizer=2 * many * groups * update * wide,
        decomposition=_flops(layer, bias),
        repair=many * KEPT * groups * width**2,
    )


def statistics_of(layer: Layer, relative: bool = False, dtype: torch.dtype = torch.float64, own: bool = True) -> int:
    """Bytes of one layer's statistics once it is observed: its Gram in strips, its sums in float64, and the anchor.

    Layers that read one tensor (q, k and v) share a Gram, which shapes do not tell: so this is the most. From the first
    merge on there is a cross moment (o, d) besides. A relative rule keeps a second Gram from the second task on, and
    while that one is observed a third.
    """
    groups, outputs, width = layer.groups, layer.outputs, layer.width
    moments = dtype.itemsize * groups * strip_entries(width) * own + FLOAT64 * (groups + 1)
    anchor = layer.weight.element_size() * groups * outputs * width
    return moments * (2 if relative else 1) + anchor


def _assumption(rank: int | None, free: float | None) -> str:
    if free is not None:
        return f"free directions: {free:.0%} of each layer's, as given"
    if rank is None:
        return "bases and updates as large as they can be: every direction free"
    return "bases as large as they can be: 60 % of each layer's directions free"


def size(count: float) -> str:
    """Bytes to read.

    >>> size(56_800_000_000), size(250_000)
    ('56.8 GB', '0.25 MB')
    """
    return (
        f"{count / 1e9:.3g} GB"
        if count >= 1e9
        else f"{count / 1e6:.3g} MB"
        if count >= 1e6
        else f"{count / 1e6:.2f} MB"
    )


def count(number: float) -> str:
    """A number of parameters to read.

    >>> count(6_738_415_616)
    '6.74 G'
    """
    return f"{number / 1e9:.3g} G" if number >= 1e9 else f"{number / 1e6:.3g} M"


def duration(hours: float) -> str:
    """Hours to read.

    >>> duration(2.5), duration(0.01), duration(60)
    ('2.5 h', '36 s', '60 h')
    """
    if hours >= 1:
        return f"{hours:.3g} h"
    return f"{hours * 60:.3g} min" if hours >= 1 / 30 else f"{hours * 3600:.2g} s"
