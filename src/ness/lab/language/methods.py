"""What people do when a fine-tune must not forget, each as a function from a pretrained model to an adapted one.

All of them train the same weights (the linear layers of the decoder's blocks) on the same batches with the same loop;
embeddings, norms and the head stay as they were.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import ness
from ness.errors import NessError
from ness.lab.language.train import autocast, batches, train
from ness.repairing.algebra import repaired_change


@dataclass(frozen=True)
class Setup:
    """What every method gets.

    Attributes:
        base: the pretrained model; never changed.
        new: blocks of the new domain to train on, (n, t).
        old: blocks of other text: for statistics, and for replay.
        batch: blocks per step.
        steps: optimizer steps.
        seed: of the order of batches and of every random start.
        at: called during training with a step's number and the model as it is then.
    """

    base: nn.Module
    new: Tensor
    old: Tensor
    batch: int
    steps: int
    seed: int
    at: Callable[[int, nn.Module], None] = lambda step, model: None

    def train(self, model: nn.Module, parameters: list[nn.Parameter], rate: float, data: Any = None) -> None:
        """The same loop for every method."""
        chosen = self.data() if data is None else data
        train(model, parameters, chosen, rate, self.steps, lambda step: self.at(step, model))

    def data(self) -> Any:
        """The batches of one run, the same for every method."""
        return batches(self.new, self.batch, self.steps, torch.Generator().manual_seed(self.seed))

    def fresh(self) -> nn.Module:
        """A copy of the base, with nothing to train."""
        model = copy.deepcopy(self.base)
        return model.requires_grad_(False)


@dataclass(frozen=True)
class Adapted:
    """A model after training, and how many numbers were trained."""

    model: nn.Module
    trained: int


Method = Callable[..., Adapted]


def block_linears(model: nn.Module) -> list[str]:
    """Names of the linear layers inside the decoder's blocks: all but the head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head]


def _weights(model: nn.Module) -> list[nn.Parameter]:
    found = [model.get_parameter(f"{name}.weight") for name in block_linears(model)]
    for weight in found:
        weight.requires_grad_()
    return found


def full(setup: Setup, rate: float) -> Adapted:
    """Plain fine-tuning of every linear layer."""
    model = setup.fresh()
    weights = _weights(model)
    setup.train(model, weights, rate)
    return Adapted(model, _count(weights))


def replay(setup: Setup, rate: float, share: float = 0.1) -> Adapted:
    """Plain fine-tuning with a share of old text in every batch, in place of new text: the usual advice."""
    model = setup.fresh()
    weights = _weights(model)
    draws = torch.Generator().manual_seed(setup.seed + 1)

    def mixed() -> Any:
        for batch in setup.data():
            old = torch.rand(len(batch), generator=draws) < share
            where = torch.randint(len(setup.old), (len(batch),), generator=draws)
            yield torch.where(old.to(batch.device)[:, None], setup.old[where.to(batch.device)], batch)

    setup.train(model, weights, rate, mixed())
    return Adapted(model, _count(weights))


def lora(setup: Setup, rate: float, rank: int = 16, start: str = "zero") -> Adapted:
    """PEFT's LoRA on every linear layer, merged; `start="corda"` keeps knowledge by CorDA's start (`kpm`)."""
    peft = _peft()
    model = setup.fresh()
    options: dict[str, Any] = {"r": rank, "lora_alpha": rank, "target_modules": block_linears(model)}
    torch.manual_seed(setup.seed)
    if start == "corda":
        from peft.tuners.lora.config import CordaConfig
        from peft.tuners.lora.corda import preprocess_corda

        config = peft.LoraConfig(init_lora_weights="corda", corda_config=CordaConfig(corda_method="kpm"), **options)

        def seen() -> None:
            with torch.no_grad():
                for part in torch.split(setup.old, 1):
                    model(input_ids=part)

        preprocess_corda(model, config, run_model=seen)
    else:
        config = peft.LoraConfig(**options)
    adapted = peft.get_peft_model(model, config)
    held = [weight for weight in adapted.parameters() if weight.requires_grad]
    setup.train(adapted, held, rate)
    return Adapted(adapted.merge_and_unload(), _count(held))


def osf(setup: Setup, rate: float) -> Adapted:
    """PEFT's OSF on every linear layer, at its own defaults: half of each weight's singular directions are trained."""
    peft = _peft()
    model = setup.fresh()
    adapted = peft.get_peft_model(model, peft.OSFConfig(target_modules=block_linears(model)))
    held = [weight for weight in adapted.parameters() if weight.requires_grad]
    setup.train(adapted, held, rate)
    return Adapted(adapted, _count(held))


RULES: Mapping[str, Callable[[float], ness.Rule]] = {
    "within": ness.Within,
    "energy": ness.Energy,
    "soft": lambda value: ness.Soft(ness.Energy(value)),
}


def null_space(setup: Setup, rate: float, rule: str = "within", value: float = 0.1, rank: int = 0) -> Adapted:
    """The guard around every linear layer: full width (`rank=0`) or LoRA-sized."""
    model = setup.fresh()
    _weights(model)
    guard = ness.NullSpace(model, rule=RULES[rule](value))
    guard.observe(torch.split(setup.old, 8), forward=_forward)
    if rank:
        guard.constrain(rank=rank, generator=torch.Generator().manual_seed(setup.seed))
    else:
        guard.constrain()
    held = guard.parameters()
    setup.train(model, held, rate)
    guard.merge()
    return Adapted(model, _count(held))


def _forward(model: nn.Module, batch: Tensor) -> Any:
    """The decoder's blocks alone: the head is not trained, and its logits are most of a small model's work."""
    body = getattr(model, "model", model)
    with autocast(batch.device):
        out = body(input_ids=batch)
    return getattr(out, "last_hidden_state", out)


class _Weighed(nn.Module):
    """W = W_b + A M, with A trained from zero."""

    def __init__(self, start: Tensor, filter_: Tensor) -> None:
        super().__init__()
        self.start, self.filter = start, filter_  # plain tensors: neither is trained
        self.factor = nn.Parameter(torch.zeros_like(start))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight in use; the one that is stored is `start`, and stays."""
        return self.start + self.factor @ self.filter


def weighed(setup: Setup, rate: float, strength: float = 1.0, ridge: float = 1e-5) -> Adapted:
    """Trains A in W_b + A M, M = (C_n + λI)(C_n + s C_o + λI)⁻¹: the repair's filter, there from the first step.

    Directions that new rows need and old ones hardly use are free; the others are weighed by how much each uses them.
    Both Grams are taken under the base.
    """
    model = setup.fresh()
    weights = _weights(model)  # observed are layers that can be trained
    grams = []
    for blocks in (setup.new[: len(setup.old)], setup.old):
        guard = ness.NullSpace(model)
        guard.observe(torch.split(blocks, 8), forward=_forward)
        grams.append({name: gram.matrix / gram.count for name, gram in guard.grams.items()})
    new, old = grams
    for weight in weights:
        weight.requires_grad_(False)
    added = []
    for name in block_linears(model):
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        inputs = slice(None, layer.in_features)  # a bias is not trained
        one = torch.eye(layer.in_features, dtype=torch.float64, device=layer.weight.device)[None]
        found = repaired_change(one, new[name][:, inputs, inputs], old[name][:, inputs, inputs], strength, ridge, name)
        part = _Weighed(layer.weight.detach().clone(), found[0].to(layer.weight.dtype))
        register_parametrization(layer, "weight", part, unsafe=True)
        added.append(part.factor)
    setup.train(model, added, rate)
    for name in block_linears(model):
        remove_parametrizations(model.get_submodule(name), "weight", leave_parametrized=True)
    return Adapted(model, _count(added))


METHODS: Mapping[str, Method] = {
    "full": full,
    "replay": replay,
    "lora": lora,
    "osf": osf,
    "null-space": null_space,
    "weighed": weighed,
}


@torch.no_grad()
def interpolated(base: nn.Module, tuned: nn.Module, share: float) -> nn.Module:
    """Weights between two models (WiSE-FT): W = W_b + share·(W_t - W_b)."""
    model = copy.deepcopy(base)
    target = dict(tuned.named_parameters())
    for name, weight in model.named_parameters():
        weight.lerp_(target[name].to(weight.dtype), share)
    return model


def repairer(base: nn.Module, tuned: nn.Module, old: Tensor, new: Tensor | None) -> Callable[[float], nn.Module]:
    """A fine-tune mended by `ness.repair` in one go, at whatever strength; the Grams are taken once."""
    cut = None if new is None else torch.split(new, 8)
    found = ness.repair(
        tuned, base, old=torch.split(old, 8), new=cut, forward=_forward, new_under=1 / 3
    )  # as in results/
    return found.at


def _count(parameters: list[nn.Parameter]) -> int:
    return sum(weight.numel() for weight in parameters)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise NessError("this row needs PEFT: pip install 'ness-cl[text]'") from error
    return peft
