"""`ness.cost`: bytes as they are really allocated, on the meta device too."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from helpers import low_rank, named
from ness.updates.low_rank import LowRankUpdate

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


class Llama(nn.Module):
    """Llama's shapes and nothing else."""

    def __init__(self, width: int, inner: int, layers: int, kv: int, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width, dtype=dtype)
        shapes = {
            "q": (width, width),
            "k": (width, kv),
            "v": (width, kv),
            "o": (width, width),
            "gate": (width, inner),
            "up": (width, inner),
            "down": (inner, width),
        }
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape, bias=False, dtype=dtype) for name, shape in shapes.items()})
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, dtype=dtype)
        self.lm_head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)


def held(value: Any, seen: set[int] | None = None) -> int:
    """Bytes of all tensors inside a dataclass or an object, each storage once."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() == 0:
            return 0
        seen.add(storage.data_ptr())
        return value.numel() * value.element_size()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(held(getattr(value, field.name), seen) for field in dataclasses.fields(value))
    if isinstance(value, ness.Gram):
        return held(value.kept, seen)
    return 0


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("rule", [ness.Rank(20), ness.Within(0.1)], ids=["hard", "within"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_those_that_are_really_allocated(rank: int | None, rule: ness.Rule, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = named(
        trunk=nn.Sequential(nn.Linear(40, 60, bias=False), nn.ReLU(), nn.Linear(60, 40, bias=False)),
        head=nn.Linear(40, 4),
    ).to(dtype)
    plain = copy.deepcopy(model)
    guard = ness.NullSpace(model, rule=rule, exclude=["head"])
    guard.observe(low_rank(200, 40, rank=30).to(dtype))
    guard.constrain(rank=rank)
    takes = ness.cost(plain, rank, exclude=["head"], relative=rule.relative)
    statistics = bases = updates = 0
    for state, row in zip(guard._protected.values(), takes, strict=True):
        assert (row.outputs, row.fan_in) == (state.layer.outputs, state.layer.fan_in)
        seen: set[int] = set()
        own = held(state.moments, seen) + held(state.anchor, seen)
        if state.relative is not None:
            own += held(state.relative.folded, seen)
        assert own == pytest.approx(row.statistics, rel=1e-3)
        assert state.constraint is not None
        update = state.constraint.update
        assert update is not None
        free = state.constraint.rank / row.fan_in
        exact = ness.cost(plain, rank, free=free, exclude=["head"], relative=rule.relative)
        (fits,) = (one for one in exact if one.fan_in == row.fan_in)
        trained = sum(p.numel() * p.element_size() for p in update.trained().values())
        assert trained == fits.updates
        kept = held(update.basis) + (held(update.free) if isinstance(update, LowRankUpdate) else 0)
        if not isinstance(rule, ness.Within) or rank is None:
            assert kept == fits.bases
        assert trained <= row.updates
        statistics, bases, updates = statistics + own, bases + kept, updates + trained
    assert statistics == pytest.approx(takes.statistics, rel=1e-3)
    optimizer = torch.optim.AdamW([p for p in guard.parameters() if p.ndim == 3])
    model(torch.randn(8, 40).to(dtype)).float().square().mean().backward()
    optimizer.step()
    moments = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if value.ndim
    )
    assert moments == 2 * updates


def test_a_7b_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Llama(4096, 11008, 32, 4096, 32000, torch.bfloat16)
    takes = ness.cost(model, rank=16, exclude=["lm_head"])
    assert takes.parameters == pytest.approx(6.74e9, rel=1e-2)
    grams = 8 * 32 * (6 * 4096**2 + 11008**2)  # whole
    anchor = 2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert grams == pytest.approx(56.8e9, rel=1e-3)
    assert takes.statistics == pytest.approx(grams * 17 / 32 + anchor, rel=1e-3)  # 16 strips, no cross moment yet
    assert takes.updates == 4 * 16 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))  # LoRA's factors, rank 16
    assert takes.optimizer == 2 * takes.updates
    assert takes.bases == pytest.approx(4 * 32 * 0.6 * (6 * 4096**2 + 11008**2), rel=1e-3)
    assert takes.largest == 11008
    assert takes.largest_decomposition == 9 * 11008**3
    assert takes.decompositions == pytest.approx(9 * 32 * (6 * 4096**3 + 11008**3))
    assert takes.hours() == pytest.approx(takes.decompositions / 4e10 / 3600)
    products = 2 * (4 * 4096**2 + 3 * 4096 * 11008) + 6 * 4096**2 + 11008**2
    assert takes.observe_flops(10) == pytest.approx(10 * 32 * products, rel=1e-3)
    assert sum(row.layers for row in takes) == 224
    wide = ness.cost(model, exclude=["lm_head"])
    assert wide.updates == 4 * 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    for text in (str(takes), str(wide)):
        assert max(len(line) for line in text.splitlines()) <= 80, text
        assert "statistics" in text
        assert "largest decomposition: d = 11008" in text


def test_it_prints_grouped_convolutions_and_attention_within_80_columns() -> None:
    model = named(
        conv=nn.Conv2d(512, 2048, 3, groups=32),
        attention=nn.MultiheadAttention(1024, 16),
        head=nn.Linear(1024, 4),
    )
    text = str(ness.cost(model, rank=8))
    assert "32 × 64 × 144" in text
    assert "attention-input" in text
    assert max(len(line) for line in text.splitlines()) <= 80, text
    assert ness.cost(model).to_dicts()[0]["kind"] == "conv"


def test_a_rank_above_the_free_directions_counts_as_what_is_free() -> None:
    model = named(fc=nn.Linear(100, 10, bias=False))
    assert ness.cost(model, rank=64, free=0.2).updates == 4 * 20 * 110
    assert ness.cost(model, rank=64, free=0).updates == ness.cost(model, rank=64, free=0).bases == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": 2.5}, "rank=2.5"),
        ({"free": 2}, "free=2"),
        ({"bias": "none"}, "bias='none'"),
        ({"rate": 0}, "rate=0"),
        ({"exclude": "nothing"}, "matches no module"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ness.NessError, match=match):
        ness.cost(nn.Sequential(nn.Linear(4, 4)), **options)
    with pytest.raises(ness.NessError, match=r"expected a torch\.nn\.Module"):
        ness.cost("model")  # type: ignore[arg-type]


@pytest.mark.transformers
def test_a_real_7b_config_on_the_meta_device() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig()).to(torch.bfloat16)
        like = Llama(4096, 11008, 32, 4096, 32000, torch.bfloat16)
    assert model.config.hidden_size == 4096
    real, made = ness.cost(model, rank=16), ness.cost(like, rank=16)
    assert real.parameters == pytest.approx(made.parameters, rel=1e-3)
    assert (real.statistics, real.bases, real.updates) == (made.statistics, made.bases, made.updates)


def block(width: int, hidden: int) -> nn.Module:
    """The linear layers of a Llama's block."""
    shapes = [*[(width, width)] * 4, *[(width, hidden)] * 2, (hidden, width)]
    return nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)


@pytest.mark.parametrize(("width", "hidden", "layers", "low", "high"), [
    (2048, 8192, 16, 28, 29), (4096, 11008, 32, 122, 123), (8192, 28672, 80, 1620, 1640),
])  # fmt: skip
def test_what_repair_needs_at_1b_7b_and_70b(width: int, hidden: int, layers: int, low: float, high: float) -> None:
    with torch.device("meta"):
        takes = ness.cost(nn.ModuleList(block(width, hidden) for _ in range(layers)))
    assert low < takes.repair / 1e9 < high
    assert takes.repair_at_least == 88 * hidden**2
    assert f"{takes.repair_at_least / 1e9:.3g} GB at least" in str(takes)
    assert takes.repair_flops > takes.decompositions
