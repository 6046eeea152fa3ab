"""FSDP2 and DDP over two gloo processes, with updates of low rank and of full width."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ness
from helpers import low_rank, named
from two_ranks import on_two_ranks

pytestmark = pytest.mark.filterwarnings("ignore::ness.NessWarning")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return named(trunk=nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16)), head=nn.Linear(16, 3))


def _data(rank: int) -> torch.Tensor:
    torch.manual_seed(10 + rank)
    return low_rank(60, 20, rank=3)


def _shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model.trunk[0], model.trunk[2], model.head):  # type: ignore[union-attr, index]
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)


def _train(run: Any, guard: ness.NullSpace, rank: int, saving: bool = False) -> None:
    optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-2, weight_decay=0.1)
    torch.manual_seed(100 + rank)  # different data on each rank
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=saving):
            loss = run(torch.randn(8, 20)).float().square().mean()
        loss.backward()
        optimizer.step()


def _sharded(rank: int, folder: Path, *, options: dict[str, Any], autocast: bool) -> dict[str, Any]:
    model = _model()
    guard = ness.NullSpace(model, rule=ness.Rank(11), exclude=["head"])
    guard.observe(_data(rank))
    guard.constrain(**options, **({"generator": torch.Generator().manual_seed(rank)} if "rank" in options else {}))
    _shard(model)
    names = {name: type(p).__name__ for name, p in model.named_parameters() if p.requires_grad}
    _train(model, guard, rank, autocast)
    certificate = guard.certificate()
    outputs = model(_data(0)).detach()
    state = {key: value.full_tensor() for key, value in model.state_dict().items() if hasattr(value, "full_tensor")}
    guard.save(folder / "guard")
    refused = {}
    for verb in ("merge", "discard"):
        with pytest.raises(ness.NessError) as found:
            getattr(guard, verb)()
        refused[verb] = str(found.value)
    if "rank" in options:
        guard.export_lora(folder / "adapter")
    dist.barrier()
    rows = certificate.to_dicts()
    saved = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {
        "names": names,
        "rows": rows,
        "holds": certificate.holds,
        "outputs": outputs,
        "state": state,
        "refused": refused,
        "saved": saved,
    }


@pytest.mark.parametrize(
    ("options", "autocast"),
    [({"rank": 3}, True), ({}, False)],
    ids=["rank", "full width"],
)
def test_constrain_before_fully_shard_trains_certifies_and_is_kept(
    options: dict[str, Any], autocast: bool, tmp_path: Path
) -> None:
    first, second = on_two_ranks(partial(_sharded, options=options, autocast=autocast))
    assert set(first["names"].values()) == {"DTensor"}
    assert "trunk.0.ness_weight" in first["names"]
    assert first["holds"]
    assert first["rows"] == second["rows"]
    assert torch.equal(first["outputs"], second["outputs"])
    assert "save(folder)" in first["refused"]["merge"]
    assert "sharded" in first["refused"]["discard"]
    for name, content in first["saved"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    plain = _model()
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    guard = ness.NullSpace.load(tmp_path / "guard", plain)
    assert guard.certificate().to_dicts() == first["rows"]
    plain.head.load_state_dict({key: first["state"][f"head.{key}"] for key in ("weight", "bias")})
    guard.merge()
    with torch.no_grad():
        assert torch.allclose(plain(_data(0)), first["outputs"], atol=1e-5)
    for key, value in plain.state_dict().items():
        assert torch.allclose(value, first["state"][key], atol=1e-6), key  # as it runs, under the plain keys
    assert not torch.allclose(before["trunk.0.weight"], plain.trunk[0].weight, atol=1e-4)  # type: ignore[union-attr, index]
    old = torch.cat([_data(0), _data(1)])
    drift = (old @ (plain.trunk[0].weight - before["trunk.0.weight"]).T).detach()  # type: ignore[union-attr, index]
    if "rank" in options:  # the bias stays, so this is all of it
        assert float(drift.norm(dim=-1).max()) < 1e-4


def _after(rank: int, folder: Path) -> list[str]:
    model = _model()
    guard = ness.NullSpace(model, rule=ness.Rank(11), exclude=["head"])
    guard.observe(_data(rank))
    _shard(model)
    texts = []
    for work in (lambda: guard.constrain(rank=3), lambda: guard.observe(_data(rank)), guard.constrain):
        with pytest.raises(ness.NessError) as found:
            work()
        texts.append(str(found.value))
    return [*texts, str(guard.constrained)]


def test_constrain_after_fully_shard_is_an_error_that_says_so() -> None:
    for texts in on_two_ranks(_after):
        assert "constrain first, then shard" in texts[0]
        assert "DTensor" in texts[0]
        assert "observe and constrain first" in texts[1]
        assert "constrain first, then shard" in texts[2]
        assert texts[3] == "False"


def _in_parallel(rank: int, folder: Path, *, options: dict[str, Any]) -> dict[str, Any]:
    model = _model()
    guard = ness.NullSpace(model, rule=ness.Rank(11), exclude=["head"])
    guard.observe(_data(rank))
    guard.export_statistics(folder / "statistics")
    torch.manual_seed(rank)  # B is drawn on rank 0 for all
    guard.constrain(**options)
    starts = [p.detach().clone() for p in guard.parameters()]
    _train(DistributedDataParallel(model), guard, rank)
    certificate = guard.certificate()
    guard.merge()
    other = ness.NullSpace(_model(), exclude=["head"])
    other.import_statistics(folder / "statistics")
    local = {name: gram.count for name, gram in other.grams.items()}
    other.constrain(rank=2)
    return {
        "starts": starts,
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "rows": certificate.to_dicts(),
        "holds": certificate.holds,
        "local": local,
        "counts": {name: gram.count for name, gram in other.grams.items()},
    }


@pytest.mark.parametrize("options", [{"rank": 3, "task": "new", "private": 2}], ids=["private"])
def test_low_rank_under_ddp_stays_in_step_and_imported_rows_count_once(options: dict[str, Any]) -> None:
    first, second = on_two_ranks(partial(_in_parallel, options=options))
    assert all(torch.equal(a, b) for a, b in zip(first["starts"], second["starts"], strict=True))
    for key, value in first["weights"].items():
        assert torch.equal(value, second["weights"][key]), key
    assert first["rows"] == second["rows"]
    assert first["holds"]
    assert sorted([first["local"]["trunk.0"], second["local"]["trunk.0"]]) == [0, 120]
    assert first["counts"] == second["counts"] == {"trunk.0": 120, "trunk.2": 120}
