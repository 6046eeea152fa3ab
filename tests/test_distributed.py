"""Two gloo processes: same Grams, same basis, updates in step, an error on one raised on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ness
from helpers import low_rank, named
from two_ranks import Work, on_two_ranks


def _model() -> nn.Module:
    torch.manual_seed(0)
    return named(trunk=nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16)), head=nn.Linear(16, 3))


def _data(rank: int) -> torch.Tensor:
    torch.manual_seed(10 + rank)
    return low_rank(60, 20, rank=3)


def _train_in_step(rank: int, folder: Path) -> dict[str, Any]:
    model = _model()
    guard = ness.NullSpace(model, rule=ness.Nuclear(1e-2), exclude=["head"])
    guard.observe(_data(rank))
    local = guard.grams["trunk.0"].count
    guard.constrain()
    counts = {name: gram.count for name, gram in guard.grams.items()}
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(guard.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)  # different data on each rank
    for _ in range(5):
        optimizer.zero_grad()
        ddp(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    certificate = guard.certificate()
    guard.save(folder / "guard")
    basis = guard._protected["trunk.0"].constraint.update.basis.clone()  # type: ignore[union-attr]
    guard.merge()
    return {
        "local": local,
        "counts": counts,
        "gram": guard.grams["trunk.0"].matrix,
        "basis": basis,
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "rows": certificate.to_dicts(),
        "holds": certificate.holds,
        "files": sorted(path.suffix for path in (folder / "guard").iterdir()),
    }


def test_grams_bases_and_trained_updates_agree() -> None:
    first, second = on_two_ranks(_train_in_step)
    assert first["local"] == second["local"] == 60
    assert first["counts"] == second["counts"] == {"trunk.0": 120, "trunk.2": 120}
    alone = ness.NullSpace(_model(), rule=ness.Nuclear(1e-2), exclude=["head"])
    alone.observe([_data(0), _data(1)])
    assert torch.allclose(first["gram"], alone.grams["trunk.0"].matrix, rtol=1e-10)
    assert torch.equal(first["gram"], second["gram"])
    assert torch.equal(first["basis"], second["basis"])
    for key, value in first["weights"].items():
        assert torch.equal(value, second["weights"][key]), key
    assert not torch.equal(first["weights"]["trunk.0.weight"], _model().state_dict()["trunk.0.weight"])
    assert first["rows"] == second["rows"]
    assert first["holds"]
    assert first["files"] == [".json", ".safetensors"]


def _private_parts(rank: int, folder: Path) -> dict[str, Any]:
    model = _model()
    guard = ness.NullSpace(model, rule=ness.Rank(3), exclude=["head"])
    guard.observe(_data(rank))
    for task, private in (("a", 2), ("b", 4)):
        guard.constrain(task=task, private=private)
        torch.manual_seed(1)  # the same "training" on each rank
        for p in guard.parameters():
            torch.nn.init.normal_(p, std=0.1)
        guard.merge()
        guard.observe(_data(rank) * 3, task=task)
    guard.export("a", folder / "a.safetensors")
    states = {}
    for name in ("a", "b", None):
        guard.use(name)
        states[str(name)] = {key: value.clone() for key, value in model.state_dict().items()}
    return {"states": states, "rows": guard.certificate().to_dicts(), "kept": guard.certificate().kept}


def test_private_parts_agree() -> None:
    first, second = on_two_ranks(_private_parts)
    assert first["rows"] == second["rows"]
    assert first["kept"] == second["kept"] == {"a": 2 * 32, "b": 4 * 32}
    for task, state in first["states"].items():
        assert all(torch.equal(value, second["states"][task][key]) for key, value in state.items()), task
    assert not torch.equal(first["states"]["a"]["trunk.0.weight"], first["states"]["None"]["trunk.0.weight"])


def _over_two_tasks(rank: int, _: Path) -> list[float]:
    model = _model()
    guard = ness.NullSpace(model, rule=ness.Rank(9), exclude=["head"])
    for task in range(2):
        if task == 0 or rank == 0:  # the second task is seen by rank 0 alone
            guard.observe(_data(rank + 2 * task))
        guard.constrain()
        torch.manual_seed(task)
        for p in guard.parameters():
            torch.nn.init.normal_(p, std=0.1)
        guard.merge()
    return [row.rms_drift for row in guard.certificate().rows]


def test_drift_over_two_tasks_is_that_of_one_process() -> None:
    first, second = on_two_ranks(_over_two_tasks)
    assert first == second
    model = _model()
    guard = ness.NullSpace(model, rule=ness.Rank(9), exclude=["head"])
    for task, batches in enumerate([[_data(0), _data(1)], [_data(2)]]):
        guard.observe(batches)
        guard.constrain()
        torch.manual_seed(task)
        for p in guard.parameters():
            torch.nn.init.normal_(p, std=0.1)
        guard.merge()
    alone = [row.rms_drift for row in guard.certificate().rows]
    # eigenvectors of equal matrices may differ in sign, and A with them; what is compared is the size of the drift
    assert first == pytest.approx(alone, rel=0.5)
    assert min(first) > 0


def _within_a_budget(rank: int, _: Path) -> dict[str, Any]:
    model = _model()
    guard = ness.NullSpace(model, rule=ness.Within(0.05), exclude=["head"])
    grams = []
    for task in range(3):
        if task < 2 or rank == 0:  # the third task is seen by rank 0 alone
            guard.observe(_data(rank + 2 * task))
        guard.constrain()
        relative = guard._protected["trunk.0"].relative
        assert relative is not None
        grams.append(relative.gram.clone())
        torch.manual_seed(task)
        for p in guard.parameters():
            torch.nn.init.normal_(p, std=0.1)
        guard.merge()
    return {
        "first": grams[0],
        "gram": grams[-1],
        "rows": guard.certificate().to_dicts(),
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
    }


def test_a_budget_for_each_task_counts_the_rows_of_all_ranks() -> None:
    first, second = on_two_ranks(_within_a_budget)
    assert first["rows"] == second["rows"]
    assert torch.equal(first["gram"], second["gram"])
    for key, value in first["weights"].items():
        assert torch.equal(value, second["weights"][key]), key
    assert all(0 < row["task_drift"] <= 0.05 for row in first["rows"])
    single = ness.NullSpace(_model(), rule=ness.Within(0.05), exclude=["head"])
    single.observe([_data(0), _data(1)])
    single.constrain()
    one = single._protected["trunk.0"].relative
    assert one is not None
    assert torch.allclose(first["first"], one.gram, rtol=1e-9, atol=1e-12)


def _one_rank_is_constrained_already(rank: int, _: Path) -> None:
    guard = ness.NullSpace(_model(), exclude=["head"])
    guard.observe(_data(rank))
    guard.constrain()
    if rank == 0:
        guard.merge()
    guard.constrain()


def _nobody_observed(rank: int, _: Path) -> None:
    ness.NullSpace(_model(), exclude=["head"]).constrain()


def _rank_zero_cannot_write(rank: int, folder: Path) -> None:
    guard = ness.NullSpace(_model(), exclude=["head"])
    guard.observe(_data(rank))
    if rank == 0:
        (folder / "taken").write_text("a file")
    guard.save(folder / "taken")


@pytest.mark.parametrize(
    ("work", "here", "there"),
    [
        (_one_rank_is_constrained_already, "rank 1: constrain: already constrained", "already constrained"),
        (_nobody_observed, "no layer has seen an input", "no layer has seen an input"),
        (_rank_zero_cannot_write, "is a file", "rank 0: "),
    ],
    ids=["constrain", "observe", "save"],
)
def test_an_error_on_one_rank_is_raised_on_both(work: Work, here: str, there: str) -> None:
    first, second = on_two_ranks(work)
    assert here in first
    assert there in second


def _ddp_model(rank: int, _: Path) -> None:
    ness.NullSpace(DistributedDataParallel(_model()))


def test_a_wrapped_model_is_refused_by_name() -> None:
    first, second = on_two_ranks(_ddp_model)
    assert first == second
    assert "DistributedDataParallel; guard the plain model" in first
    assert "wrap it after constrain()" in first
