"""`repair`: a fine-tune that has forgotten, mended in one call, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ness.layers.names import as_patterns
from ness.repairing.folders import Statistics, source_of
from ness.repairing.grams import Progress, Source
from ness.repairing.options import RIDGE, Options, parse_memory
from ness.repairing.report import Repair
from ness.repairing.weights import read_weights
from ness.repairing.work import Work, without_trace
from ness.statistics.padding import MaskOf
from ness.statistics.recorder import Forward
from ness.statistics.watch import Watch


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
    new_under: float = 0.0,
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
            of old inputs are taken under the base. Between the two, where tuning changed the features, statistics may
            be of neither (docs/repair.md).
        ridge: λ as a fraction of the mean diagonal of (C_n + C_o) / 2; by default 1e-6, with float32 statistics 1e-5.
        include: repair these layers only: names, prefixes that end at a dot, or patterns.
        exclude: keep these as tuned, without comparing them (a new head, say).
        forward: `forward(model, batch)`, how the model is run on one batch.
        mask: `mask(batch)` says which tokens are real, instead of `attention_mask`, as for `NullSpace.observe`.
        statistics_dtype: `torch.float32` multiplies blocks in float32: faster, and less exact.
        statistics_device: where Grams live; by default on each layer's own device. "disk:FOLDER" keeps them in
            files, and what is made of them.
        progress: called as `progress(stage, done, total)` while it works.

    Returns:
        A `Repair`: `.model`, `.rows`, `.others`, `.front(strengths)`, `.plot(path)`; prints as a table.

    Raises:
        NessError: something does not fit; the model is as it was.
    """
    options = Options.of(
        strength, others, passes, probe, at_most, share, new_under, ridge, statistics_dtype, statistics_device
    )
    limit = parse_memory(memory)

    def work_out(watches: list[Watch]) -> Repair:
        weights = read_weights(tuned, base, as_patterns(exclude, "exclude"))
        sources = source_of("old", old, progress), None if new is None else source_of("new", new, progress)
        given = options
        if any(isinstance(source, Statistics) for source in sources):
            given = replace(options, dtype=torch.float32, ridge=max(options.ridge, RIDGE[torch.float32]))
        work = Work(tuned, weights, *sources, given, forward, mask, watches)
        work.find(as_patterns(include, "include"))
        if options.passes > 1:
            from ness.repairing.passes import in_passes

            done = in_passes(work, limit)
        else:
            done = work.in_one_go(limit)
        report = work.report(done, Source("probe", probe) if probe is not None else None)
        return work.finish(report, done, inplace)

    return without_trace(work_out)
