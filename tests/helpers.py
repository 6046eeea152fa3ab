"""Models, optimizers and measurements that several tests share."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import ness


class ResNetLike(nn.Module):
    """A convolution, norms, a grouped convolution, a shortcut and a head."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16, **norm)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, groups=4, bias=False)
        self.bn2 = nn.BatchNorm2d(16, **norm)
        self.shortcut = nn.Conv2d(3, 16, 1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return self.head((y + self.shortcut(x)).relu().mean((2, 3)))


class Transformer(nn.Module):
    """An encoder layer and a cross-attention, with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.cross = nn.MultiheadAttention(32, 4, kdim=16, vdim=24, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        y, _ = self.cross(h, x[..., :16], x[..., :24], need_weights=False)
        return self.head(y.mean(1))


class Twice(nn.Module):
    """One layer called twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).relu()))


class Conv1D(nn.Module):
    """A stand-in for transformers' Conv1D: a Linear with a transposed weight, found by its name."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class GPT2Like(nn.Module):
    """A GPT-2-like block: Conv1D projections, attention by hand, an embedding below and a head above."""

    def __init__(self, conv1d: type[nn.Module] = Conv1D) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.attend, self.project = conv1d(96, 32), conv1d(32, 32)
        self.up, self.down = conv1d(64, 32), conv1d(32, 64)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        q, k, v = self.attend(self.norm(h)).chunk(3, dim=-1)
        h = h + self.project(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head((h + self.down(self.up(h).relu())).mean(1))


def low_rank(*shape: int, rank: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random inputs that use only `rank` of their last dimension's directions."""
    return (torch.randn(*shape[:-1], rank, dtype=torch.float64) @ torch.randn(rank, shape[-1], dtype=torch.float64)).to(
        dtype
    )


#: name -> (model, old inputs, new inputs); every head is called "head"
ZOO: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "resnet": lambda: (ResNetLike(), smooth_images(64, 3, 8), torch.randn(32, 3, 8, 8)),
    "transformer": lambda: (Transformer(), low_rank(32, 6, 32), torch.randn(16, 6, 32)),
    "conv1d": lambda: (
        named(
            trunk=nn.Sequential(nn.Conv1d(4, 12, 5, padding=2), nn.ReLU(), nn.Conv1d(12, 12, 3, dilation=2)),
            pool=Mean(),
            head=nn.Linear(12, 4),
        ),
        low_rank(40, 4, 24, rank=3),
        torch.randn(16, 4, 24),
    ),
    "conv3d": lambda: (
        named(
            trunk=nn.Sequential(nn.Conv3d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv3d(6, 6, 2, stride=2)),
            pool=Mean(),
            head=nn.Linear(6, 4),
        ),
        low_rank(24, 2, 6, 6, 6, rank=2),
        torch.randn(8, 2, 6, 6, 6),
    ),
    "mlp": lambda: (
        named(trunk=nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64), nn.ReLU()), head=nn.Linear(64, 4)),
        low_rank(300, 64),
        torch.randn(32, 64),
    ),
    "twice": lambda: (Twice(), low_rank(300, 64), torch.randn(32, 64)),
    "gpt2": lambda: (GPT2Like(), torch.randint(0, 6, (60, 5)), torch.randint(6, 50, (16, 5))),
}


class Mean(nn.Module):
    """Mean over all positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(-1)


def named(**modules: nn.Module) -> nn.Module:
    """A sequence whose parts have names."""
    from collections import OrderedDict

    return nn.Sequential(OrderedDict(modules))


def smooth_images(count: int, channels: int, size: int) -> Tensor:
    """Random images whose patches are nearly rank-deficient, as real ones are."""
    coarse = torch.randn(count, channels, 2, 2)
    return nn.functional.interpolate(coarse, size=(size, size), mode="bilinear") + 1e-4 * torch.randn(
        count, channels, size, size
    )


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around AdamW: a wrapper such as users bring along."""

    def __init__(self, params: Any, rho: float = 0.05, **base: Any) -> None:
        super().__init__(params, {"rho": rho})
        self.base = torch.optim.AdamW(self.param_groups, **base)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            closure()
        held = [p.clone() for p in parameters]
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm() + 1e-12
        for p in parameters:
            if p.grad is not None:
                p.add_(p.grad * (0.05 / norm))
        with torch.enable_grad():
            closure()
        for p, before in zip(parameters, held, strict=True):
            p.copy_(before)
        self.base.step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=1e-2),
    "sam": lambda p: SAM(p, lr=0.02, weight_decay=1e-2),
}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    steps: int = 8,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """A few steps towards random targets, in train mode: an ordinary user's loop."""
    model.train()
    targets = torch.randn_like(model(inputs).detach())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
        after_step()
    model.eval()


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the state dict under the model's own keys: without what a constrained model has beside them."""
    state = model.state_dict()
    return {key: value.clone() for key, value in state.items() if not key.rpartition(".")[2].startswith("ness_")}


def supported(model: nn.Module, exclude: str = "head") -> dict[str, nn.Module]:
    """Layers that are called through their forward, by name."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, kinds) or type(module).__name__ == "Conv1D")
        and not name.startswith(exclude)
        and "out_proj" not in name
    }


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Inputs of every supported layer, kept by the test alone (the library keeps none)."""
    seen: dict[str, list[Tensor]] = {name: [] for name in supported(model)}
    handles = [
        module.register_forward_hook(lambda _m, args, _o, name=name: seen[name].append(args[0].detach().clone()))
        for name, module in supported(model).items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def twin(module: nn.Module) -> nn.Module:
    """An ordinary float64 copy of a layer with the weights it really runs with."""
    plain = getattr(module, "_ness_base", type(module))
    values = {
        name: getattr(module, name).detach().double()
        for name in ("weight", "bias")
        if getattr(module, name) is not None
    }
    other = copy.copy(module)
    other.__class__ = plain
    other._parameters = {name: nn.Parameter(values[name]) if name in values else None for name in ("weight", "bias")}
    other._forward_hooks, other._forward_pre_hooks = type(module._forward_hooks)(), type(module._forward_hooks)()
    return other


def rows_out(module: nn.Module, inputs: Tensor) -> Tensor:
    """The layer's outputs as rows (n, o) in float64."""
    with torch.no_grad():
        y = twin(module)(inputs.double())
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return y.transpose(0, 1).flatten(1).T
    return y.reshape(-1, y.shape[-1])


class Witness:
    """Keeps what the guard does not: every observed input and the output it had, to measure the drift on the data."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in supported(model)}

    def observe(self, guard: ness.NullSpace, batches: list[Tensor]) -> None:
        with recording(self.model) as seen:
            guard.observe(batches)
        for name, inputs in seen.items():
            module = self.model.get_submodule(name)
            self.kept[name].extend((x, rows_out(module, x)) for x in inputs)

    def changes(self, name: str) -> Tensor:
        """How far each observed row's output has moved, (n, o)."""
        module = self.model.get_submodule(name)
        return torch.cat([rows_out(module, x) - y for x, y in self.kept[name]])

    def output_rms(self, name: str) -> float:
        outputs = torch.cat([y for _, y in self.kept[name]])
        return float(outputs.square().sum(-1).mean().sqrt())


def check_promise(guard: ness.NullSpace, witness: Witness, epsilon: float) -> None:
    """Bound, exact drift and `holds`, against the data itself. `epsilon` is the dtype's."""
    certificate = guard.certificate()
    assert certificate.holds, str(certificate)
    for row in certificate.rows:
        if row.name not in witness.kept:
            continue
        changes, size = witness.changes(row.name), witness.output_rms(row.name)
        norms = changes.norm(dim=-1)
        slack = 100 * epsilon * max(size, float(norms.max()), 1e-30)
        assert float(norms.max()) <= row.bound * (1 + 1e-6) + slack, row
        rms = float(norms.square().mean().sqrt())
        assert abs(rms - row.rms_drift) <= max(1e-5 * rms, 1e-7 * size, slack), (row, rms, size)
        assert rms <= row.rms_bound * (1 + 1e-6) + slack, row
        assert abs(row.relative_drift * size - row.rms_drift) <= 1e-5 * row.rms_drift + 1e-12, (row, size)


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A random layer of any kind, and the shape of one input."""
    bias = draw(st.booleans())
    kind = draw(st.sampled_from(["linear", "conv1d", "conv2d", "conv3d"]))
    if kind == "linear":
        width = draw(st.integers(2, 40))
        return nn.Linear(width, draw(st.integers(1, 24)), bias=bias), (width,)
    dims = int(kind[4])
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    padding_mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    stride = draw(st.integers(1, 2))
    padding = draw(st.sampled_from([0, 1, "same", "valid"]))
    module = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 4)),
        kernel_size=draw(st.integers(1, 3)),
        stride=1 if padding == "same" else stride,
        padding=padding,
        dilation=draw(st.integers(1, 2)),
        groups=groups,
        bias=bias,
        padding_mode=padding_mode,
    )
    return module, (module.in_channels, *[6] * dims)


def save_as_before(folder: Path, tensors: dict[str, Tensor], manifest: dict[str, Any], schema: int) -> None:
    """A guard's folder as it was written before manifests had a checksum (schema 1 and 2)."""
    for file in folder.glob("*"):
        file.unlink()
    manifest = {key: value for key, value in manifest.items() if key != "rest"}
    content = safetensors.torch.save({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, {})
    digest = hashlib.sha256(content).hexdigest()
    name = f"tensors-{digest[:16]}.safetensors"
    head = {"format": "ness-guard", "schema": schema, "ness": "0.1.0", "torch": str(torch.__version__)}
    head |= {"tensors": {"file": name, "bytes": len(content), "sha256": digest}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    (folder / "manifest.json").write_text(json.dumps(head | manifest, indent=1, sort_keys=True))
