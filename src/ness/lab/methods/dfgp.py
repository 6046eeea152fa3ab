"""DFGP: GPM at flat minima, of the data (adversarial mix-up) and of the weights (SAM); without mix-up it is FGP.

The preset `reference` repeats the code: label weights exchanged, and one mean share for all samples of a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ness.errors import NessError
from ness.lab.gpu.fuse import on_gpu
from ness.lab.methods._projection.project import ADAM, sam_revision
from ness.lab.methods.base import Context, Method, MethodSpec, clear
from ness.lab.methods.gpm import COMMON, Gpm, GpmSettings, check, kept_at_most
from ness.lab.networks.norms import in_parts, takes_parts, without_update
from ness.lab.runs.settings import check_ranges, setting
from ness.lab.training import optimizers
from ness.lab.training.loader import Batch
from ness.lab.training.losses import cross_entropy


@dataclass(frozen=True)
class DfgpSettings(GpmSettings):
    """What DFGP adds; ρ of the weights' ascent is the training setting `rho`."""

    mixing: Literal["adversarial", "none"] = setting("adversarial", "none is FGP: no mix-up at all")
    mix_weight: float = setting(0.01, "w: weight of the loss on mixed images")
    mix_beta: float = setting(20.0, "a of Beta(a, a), one share λ a sample")
    mix_rho: float = setting(0.05, "length of the ascent on the shares λ")
    mix_labels: Literal["correct", "swapped"] = setting(
        "correct", "label weights follow the pixels, a sample each; or exchanged and averaged, as in the reference"
    )


@dataclass(frozen=True)
class Mixed:
    """Images (1-λ)·x + λ·x_π, with the labels of both and the shares."""

    images: Tensor
    labels: Tensor
    partner: Tensor
    share: Tensor  # λ (n,), detached: the loss is weighted by numbers, not by what is ascended


def beta_shares(count: int, a: float, generator: Generator) -> Tensor:
    """λ ~ Beta(a, a), (count,), from two gamma draws."""
    shape = torch.full((2, count), a, device=generator.device)
    first, second = torch._standard_gamma(shape, generator=generator)
    share: Tensor = first / (first + second)
    return share


def mixed(batch: Batch, partner: Tensor, share: Tensor) -> Mixed:
    """Every image with its partner: x̃ = (1-λ)·x + λ·x_π."""
    wide = share.view(-1, 1, 1, 1)
    images = (1 - wide) * batch.images + wide * batch.images[partner]
    return Mixed(images, batch.labels, batch.labels[partner], share.detach())


def mixed_loss(logits: Tensor, mix: Mixed, labels: Literal["correct", "swapped"]) -> Tensor:
    """Mean of (1-λ)·CE(y) + λ·CE(y_π), a sample each; swapped: mean(λ)·CE(y) + (1 - mean(λ))·CE(y_π)."""
    if labels == "swapped":
        share = mix.share.mean()
        return share * F.cross_entropy(logits, mix.labels) + (1 - share) * F.cross_entropy(logits, mix.partner)
    own, other = (F.cross_entropy(logits, each, reduction="none") for each in (mix.labels, mix.partner))
    return ((1 - mix.share) * own + mix.share * other).mean()


def ascended(share: Tensor, gradient: Tensor, rho: float) -> Tensor:
    """λ ← clip(λ + ρ·g/‖g‖₂, 0, 1): the shares that hurt most within ρ."""
    step: Tensor = rho * gradient / (torch.linalg.vector_norm(gradient) + 1e-16)
    return (share + step).clamp(0, 1)


class Dfgp(Gpm):
    """min_w max_{‖e‖≤ρ, λ} L(x; w+e) + w_mix·L(x̃_λ; w+e), its gradient projected as in GPM."""

    by_rows = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if self.own.mixing != "none" and not self.model.mixable:
            raise NessError(
                "dfgp mixes inputs, and this network reads tokens, which cannot be mixed; set mixing to none"
            )

    def gradients(self, batch: Batch, trained: Sequence[nn.Parameter], *, sam: bool) -> Tensor:
        """The gradient at the worst shares nearby and, with SAM, at the worst weights nearby too."""
        if self.own.mixing == "none":
            return super().gradients(batch, trained, sam=sam)
        random = self.context.random.step
        partner = torch.rand(len(batch.labels), generator=random, device=batch.labels.device).argsort()
        share = beta_shares(len(batch.labels), self.own.mix_beta, random).requires_grad_()
        beside = self.perturbed_beside(trained) if sam else ()
        with optimizers.taking_part(beside):
            loss = self._both(batch, partner, share)
            loss.backward()  # type: ignore[no-untyped-call]
            kept = optimizers.ascend([*trained, *beside], self.context.training.rho) if sam else []
        with optimizers.restoring(kept), without_update(self.model):
            assert share.grad is not None
            worst = ascended(share.detach(), share.grad, self.own.mix_rho)
            clear(trained)
            self._both(batch, partner, worst).backward()  # type: ignore[no-untyped-call]
        return loss

    def _both(self, batch: Batch, partner: Tensor, share: Tensor) -> Tensor:
        """CE(f(x), y) + w·CE(f(x̃), ỹ), where BatchNorm sees raw and mixed images apart."""
        mix = mixed(batch, partner, share)
        if self._in_one_pass(batch):
            with in_parts(self.model, 2):
                own, logits = self.model(torch.cat([batch.images, mix.images]), batch.task).chunk(2)
            raw = cross_entropy(own, batch)
        else:
            raw = self.loss(batch)
            with without_update(self.model):
                logits = self.model(mix.images, batch.task)
        weight: float = self.own.mix_weight
        return raw + weight * mixed_loss(logits, mix, self.own.mix_labels)

    def _in_one_pass(self, batch: Batch) -> bool:
        """Whether raw and mixed images share a pass: where kernels normalise both in the launches of one.

        Not where statistics are stored, which count raw images alone, nor under a loss or logits of a subclass's own.
        """
        plain = type(self).loss is Method.loss and type(self).logits is Method.logits
        return plain and self.context.training.norm != "stored" and on_gpu(batch.images) and takes_parts(self.model)


def check_dfgp(settings: Any) -> None:
    """Refuses mix-up settings out of range and what GPM refuses."""
    check_ranges(
        settings,
        ("mix_weight", settings.mix_weight > 0, "above 0; for none set mixing to none"),
        ("mix_beta", settings.mix_beta > 0, "above 0"),
        ("mix_rho", settings.mix_rho >= 0, "0 or more"),
    )
    check(settings)


# w of the best published row of each benchmark.
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fixed": {
        "*": {**COMMON["*"], "optimizer": "sam", "growth": 0.0},
        "digits": {**COMMON["digits"], "threshold": 0.97, "mix_weight": 0.05, "epochs": 8, "lr": 0.2},
        "cifar100": {**COMMON["cifar100"], "threshold": 0.95, "mix_weight": 0.05},
        "five-datasets": {**COMMON["five-datasets"], "threshold": 0.95, "mix_weight": 0.001, "mix_beta": 1.0},
        "mini-imagenet": {**COMMON["mini-imagenet"], "threshold": 0.97, "mix_weight": 0.01},
    },
    "reference": {
        "*": {"first_rule": "strict", "mix_labels": "swapped"},
        "five-datasets": {"epochs": 100},
    },
}

METHOD = MethodSpec(
    name="dfgp",
    title="GPM at flat minima: adversarial mix-up and SAM",
    build=Dfgp,
    keeps="an orthonormal basis per layer (d × r)",
    kept_at_most=kept_at_most,
    paper="Yang et al., Data Augmented Flatness-aware Gradient Projection",
    year=2023,
    settings=DfgpSettings,
    presets=PRESETS,
    refuses={"adamw": ADAM, "mixup": "it mixes images in its own way; set mix_weight and mix_beta"},
    only_with=dict.fromkeys(("mix_weight", "mix_beta", "mix_rho", "mix_labels"), ("mixing", ("adversarial",))),
    check=check_dfgp,
    revision=sam_revision,
)
