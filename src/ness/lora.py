"""An update as a LoRA adapter: a folder that PEFT loads, written without importing it.

ΔW = A · R with the columns A (o, r) and the rows R (r, d) of the update becomes lora_B = A and lora_A = R at scale 1.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ness import distributed
from ness._files import write_together
from ness._version import __version__
from ness.distributed import gathered
from ness.errors import NessError, warn
from ness.layers import AttentionInput, AttentionOutput, ConvLayer, Layer, TransposedLinearLayer
from ness.layers.names import listed
from ness.storage.folder import serialised
from ness.updates.constraint import Factors

if TYPE_CHECKING:
    from ness.guard import NullSpace

CONFIG, WEIGHTS, ABOUT = "adapter_config.json", "adapter_model.safetensors", "ness.json"
PEFT_VERSION = "0.21.2"  # whose format this is
PREFIX = "base_model.model."
#: what a class's name ends with -> what PEFT calls its task
TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


@dataclass(frozen=True)
class Adapted:
    """One module of an adapter: its two factors as PEFT stores them."""

    lora_a: Tensor  # (r, in, *kernel)
    lora_b: Tensor  # (out, r, *ones)

    @property
    def rank(self) -> int:
        """r."""
        return self.lora_a.shape[0]


def truncated(factors: Factors, rank: int | None) -> Factors:
    """The best approximation of at most this rank, the factors balanced; None: all there is, in as few columns.

    >>> wide = Factors(torch.eye(3).unsqueeze(0), torch.diag(torch.tensor([3.0, 2.0, 0.0])).unsqueeze(0))
    >>> truncated(wide, 1).change().round(decimals=6).abs().sum()
    tensor(3., dtype=torch.float64)
    """
    left, right = factors.left.to(torch.float64), factors.right.to(torch.float64)
    most = min(left.shape[-2], right.shape[-1])
    if rank is None and factors.rank <= most:
        return factors
    outer, inner = torch.linalg.qr(left), torch.linalg.qr(right.mT)
    u, s, v = torch.linalg.svd(outer.R @ inner.R.mT, full_matrices=False)
    kept = min(most if rank is None else rank, s.shape[-1])
    root = s[..., :kept].sqrt()
    columns = outer.Q @ u[..., :kept] * root.unsqueeze(-2)
    return Factors(columns, root.unsqueeze(-1) * (inner.Q @ v.mT[..., :kept]).mT)


def export_lora(guard: NullSpace, folder: Path, rank: int | None) -> dict[str, float]:
    """See `NullSpace.export_lora`."""
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise NessError(f"export_lora(rank={rank!r}): expected a whole number above 0, or None for the whole update")
    whole = _factors(guard)
    cut = {name: truncated(factors, rank) for name, factors in whole.items()}
    extra = {
        name: 0.0 if rank is None or factors.rank == whole[name].rank else _drift(guard, name, whole[name], factors)
        for name, factors in cut.items()
    }
    names = {id(module): name for name, module in guard.model.named_modules(remove_duplicate=True)}
    adapted = _adapted(guard, cut, names)
    saved, others = _trained_elsewhere(guard)
    tensors: dict[str, Tensor] = {}
    for name, one in adapted.items():
        tensors |= {f"{PREFIX}{name}.lora_A.weight": one.lora_a, f"{PREFIX}{name}.lora_B.weight": one.lora_b}
    tensors |= {f"{PREFIX}{name}": value for name, value in others.items()}
    merged_before = max((p.merges for p in guard._protected.values()), default=0) - (not guard.constrained)
    about = _about(guard, extra, merged_before)
    content = {
        WEIGHTS: serialised(tensors, {"format": "pt"}, str(folder / WEIGHTS)),
        ABOUT: _json(about),
        CONFIG: _json(_config(guard, adapted, saved)),
    }
    if distributed.on_rank_zero():
        write_together(folder, content)
    if merged_before > 0:
        warn(
            f"export_lora: {merged_before} earlier task(s) were merged into this model, so the adapter's base is the "
            "model as it was before its own task, not the one it was loaded from; save that base beside the adapter"
        )
    return extra


def _factors(guard: NullSpace) -> dict[str, Factors]:
    """The update of every layer that has one: in training, or the last one merged."""
    if guard._phase == "open":
        raise NessError("export_lora: there is no update; call constrain(), train, and export before or after merge()")
    found: dict[str, Factors] = {}
    for name, state in guard._protected.items():
        constraint = state.constraint
        factors = state.factors if constraint is None else constraint.factors()
        if factors is not None:
            found[name] = factors
    if not found:
        raise NessError(
            "export_lora: no layer has an update: nothing was free, or the guard was loaded after a merge at full "
            "width, whose factors are not saved with it; export before you save, or train with constrain(rank=r)"
        )
    layers = guard._found.layers
    moved = [name for name, factors in found.items() if _moves_bias(layers[name], factors)]
    if moved:
        raise NessError(
            f"export_lora: the update moves the biases of {listed(moved)}, and an adapter has none; train with "
            "NullSpace(..., bias='freeze') or constrain(rank=r), or merge() and save the whole model"
        )
    return {name: factors.inputs(layers[name].fan_in) for name, factors in found.items()}


def _moves_bias(layer: Layer, factors: Factors) -> bool:
    if layer.bias is None or factors.right.shape[-1] == layer.fan_in:
        return False
    return bool((factors.left @ factors.right[..., layer.fan_in :]).any())


def _drift(guard: NullSpace, name: str, whole: Factors, cut: Factors) -> float:
    """RMS over all observed rows of what cutting an update changes in the layer's outputs."""
    state = guard._protected[name]
    gram, width = state.moments.gram, state.layer.fan_in
    error = (cut.change() - whole.change()).to(gram.device)
    square = ((error @ gram.matrix[:, :width, :width]) * error).sum().clamp(min=0)
    return float((square / max(1, gram.count)).sqrt())


def _adapted(guard: NullSpace, factors: Mapping[str, Factors], names: Mapping[int, str]) -> dict[str, Adapted]:
    """Modules by name, tied ones each; attention's four layers are one module to PEFT."""
    adapted: dict[str, Adapted] = {}
    attentions: dict[str, dict[int, Factors]] = {}
    merged_alone: list[str] = []
    run_alone: list[str] = []
    for name, one in factors.items():
        layer = guard._found.layers[name]
        one = one.to(torch.promote_types(layer.weight.dtype, torch.float32))
        if isinstance(layer, AttentionInput | AttentionOutput):
            for host in layer.hosts:
                role = layer.role if isinstance(layer, AttentionInput) else 3
                attentions.setdefault(names[id(host)], {})[role] = one
            continue
        for module in layer.modules:
            if not names[id(module)]:
                raise NessError(
                    "export_lora: the model is a single layer, which PEFT cannot wrap; put it into a module"
                )
            adapted[names[id(module)]] = _of_module(layer, one)
        if isinstance(layer, ConvLayer):
            (run_alone if layer.groups > 1 else merged_alone).extend([name] * _odd(layer))
    adapted |= _of_attentions(guard, attentions)
    both = [name for name in run_alone if _bent(guard._found.layers[name])]
    if both:
        raise NessError(
            f"export_lora: PEFT can run no update of {listed(both)}: grouped convolutions with a dilation or a padding "
            "mode of their own; merge() and save the whole model"
        )
    if merged_alone or run_alone:
        texts = [f"{listed(merged_alone)} right only once it is merged (dilation, padding mode)"] * bool(merged_alone)
        texts += [f"{listed(run_alone)} right, and cannot merge it (groups)"] * bool(run_alone)
        warn(f"export_lora: PEFT runs the update of {'; of '.join(texts)}")
    return adapted


def _bent(layer: Layer) -> bool:
    """Whether PEFT's own convolution would read other inputs than the layer: it knows no dilation, no padding mode."""
    module = layer.module
    return isinstance(module, nn.modules.conv._ConvNd) and (
        any(size != 1 for size in module.dilation) or module.padding_mode != "zeros"
    )


def _odd(layer: Layer) -> bool:
    return layer.groups > 1 or _bent(layer)


def _of_module(layer: Layer, factors: Factors) -> Adapted:
    left, right = factors.left, factors.right
    if not isinstance(layer, ConvLayer):
        return Adapted(right[0].contiguous(), left[0].contiguous())
    groups, outputs, rank = left.shape
    channels, *kernel = layer.weight.shape[1:]
    whole = right.new_zeros(groups, rank, groups, channels, *kernel)  # PEFT's first convolution reads every group
    for group in range(groups):
        whole[group, :, group] = right[group].reshape(rank, channels, *kernel)
    return Adapted(
        whole.reshape(groups * rank, groups * channels, *kernel),
        left.reshape(groups * outputs, rank, *[1 for _ in kernel]).contiguous(),
    )


def _of_attentions(guard: NullSpace, attentions: Mapping[str, Mapping[int, Factors]]) -> dict[str, Adapted]:
    """q, k and v stacked in one module, as PEFT has them."""
    adapted: dict[str, Adapted] = {}
    for name, parts in attentions.items():
        module = guard.model.get_submodule(name)
        assert isinstance(module, nn.MultiheadAttention)
        if not module._qkv_same_embed_dim:
            raise NessError(
                f"export_lora: attention {name!r} has keys or values of another width, which PEFT cannot adapt; "
                "exclude it from the guard, or merge() and save the whole model"
            )
        if 3 in parts and bool(parts[3].left.any()):
            raise NessError(
                f"export_lora: the out-projection of attention {name!r} was trained, and PEFT {PEFT_VERSION} adds an "
                "update of it twice; leave it out with NullSpace(..., include=[...]), or merge() and save the whole "
                "model"
            )
        width, rank = module.embed_dim, max(1, sum(parts[role].rank for role in range(3) if role in parts))
        like = next(iter(parts.values())).left
        lora_a, lora_b, at = like.new_zeros(rank, width), like.new_zeros(3 * width, rank), 0
        for role in range(3):
            if role in parts:
                one, end = parts[role], at + parts[role].rank
                lora_a[at:end], lora_b[role * width : (role + 1) * width, at:end] = one.right[0], one.left[0]
                at = end
        adapted[name] = Adapted(lora_a, lora_b)
        still = like.new_zeros(rank, width), like.new_zeros(width, rank)  # PEFT always adapts it too
        adapted[f"{name}.base_layer.out_proj"] = Adapted(*still)
    return adapted


def _trained_elsewhere(guard: NullSpace) -> tuple[list[str], dict[str, Tensor]]:
    """Excluded modules and a task's own norms: what was trained whole, which PEFT saves whole."""
    modules = dict(guard.model.named_modules())
    owners = [name for name in modules if name and name in guard._found.excluded and _trains(modules[name])]
    whole = [name for name in owners if not any(name.startswith(f"{other}.") for other in owners)]
    whole += list(guard._found.norms) if guard.norm == "per_task" else []
    inside = tuple(f"{name}." for name in whole)
    bare = [
        name
        for name, p in guard.model.named_parameters()
        if name in guard._found.excluded and p.requires_grad and not name.startswith(inside)
    ]
    if bare:
        raise NessError(
            f"export_lora: {listed(bare)} were trained beside the guard, and an adapter keeps whole modules alone; "
            "freeze them, or merge() and save the whole model"
        )
    state: dict[str, Tensor] = {}
    for name in whole:
        state |= modules[name].state_dict(prefix=f"{name}.")
    return whole, {key: gathered(value.detach()) for key, value in state.items()}


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _config(guard: NullSpace, adapted: Mapping[str, Adapted], saved: Sequence[str]) -> dict[str, Any]:
    """adapter_config.json."""
    targets = [name for name in adapted if ".base_layer." not in name]
    ranks = {name: adapted[name].rank for name in targets}
    common = Counter(ranks.values()).most_common(1)[0][0]
    # PEFT takes the first pattern that some name ends with, so longer names come first
    others = {name: ranks[name] for name in sorted(ranks, key=len, reverse=True) if ranks[name] != common}
    if any(_means(name, other) for name in others for other in targets if ranks[other] != ranks[name]):
        others = {name: ranks[name] for name in sorted(ranks, key=len, reverse=True)}
    transposed = [isinstance(layer, TransposedLinearLayer) for layer in guard._found.layers.values()]
    kind = type(guard.model).__name__.removeprefix("FSDP")
    return {
        "base_model_name_or_path": _base(guard.model),
        "bias": "none",
        "fan_in_fan_out": bool(transposed) and all(transposed),
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": common,
        "lora_dropout": 0.0,
        "modules_to_save": list(saved) or None,
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "r": common,
        "rank_pattern": others,
        "alpha_pattern": dict(others),
        "target_modules": _targets(guard.model, targets),
        "task_type": next((task for ending, task in TASK_TYPES.items() if kind.endswith(ending)), None),
        "use_dora": False,
        "use_rslora": False,
    }


def _means(pattern: str, name: str) -> bool:
    return pattern != name and re.fullmatch(rf"(.*\.)?({pattern})", name) is not None


def _targets(model: nn.Module, targets: Sequence[str]) -> list[str] | str:
    """Names; where PEFT would take one for another module's too, one pattern that means these alone."""
    wanted = set(targets)
    endings = tuple(f".{name}" for name in targets)
    if any(name not in wanted and name.endswith(endings) for name, _ in model.named_modules()):
        return "|".join(re.escape(name) for name in targets)
    return sorted(targets)


def _base(model: nn.Module) -> str | None:
    """The name that a transformers model was loaded under."""
    name = getattr(model, "name_or_path", None) or getattr(getattr(model, "config", None), "_name_or_path", None)
    return str(name) if name else None


def _about(guard: NullSpace, extra: Mapping[str, float], merged_before: int) -> dict[str, Any]:
    rows = guard.certificate().to_dicts()
    return {
        "format": "ness-lora",
        "ness": __version__,
        "base": {
            "name": _base(guard.model),
            "class": type(guard.model).__name__,
            "tasks_merged_before": merged_before,
        },
        "extra_drift": dict(extra),
        "certificate": [{key: _figure(row[key]) for key in _FIGURES} for row in rows],
    }


_FIGURES = ("name", "rank", "bound", "rms_bound", "rms_drift", "relative_drift")


def _figure(value: Any) -> Any:
    """JSON knows no infinity."""
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
