"""`GuardPlugin` in Avalanche's strategies, and in a stand-in that calls it as they do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness
from ness.integrations.avalanche import GuardPlugin

pytestmark = pytest.mark.filterwarnings("ignore:fewer rows:ness.NessWarning")


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def task(number: int) -> tuple[Tensor, Tensor]:
    """Inputs of three dimensions of their own, and two classes."""
    draws = torch.Generator().manual_seed(number)
    x = torch.zeros(64, 12)
    x[:, 3 * number : 3 * number + 3] = torch.randn(64, 3, generator=draws)
    return x, (x.sum(1) > 0).long() + 2 * (number % 2)


class GuardPluginOff:
    """Plain training."""

    def before_training_exp(self, strategy: Any) -> None:
        """Nothing."""

    after_training_exp = before_training_exp


def stand_in(model: nn.Module, optimizer: Any) -> Any:
    return SimpleNamespace(model=model, optimizer=optimizer, experience=None, eval_mb_size=16)


def train(strategy: Any, plugin: GuardPlugin | GuardPluginOff, number: int) -> None:
    x, y = task(number)
    strategy.experience = SimpleNamespace(dataset=torch.utils.data.TensorDataset(x, y, torch.zeros(64)))
    plugin.before_training_exp(strategy)
    for _ in range(30):
        strategy.optimizer.zero_grad()
        nn.functional.cross_entropy(strategy.model(x), y).backward()
        strategy.optimizer.step()
    plugin.after_training_exp(strategy)


def test_each_experience_is_learnt_within_what_the_earlier_leave_free() -> None:
    moved = {}
    for guarded in (False, True):
        model = layers()
        guard = ness.NullSpace(model, rule=ness.Energy(0.999), exclude="4")
        strategy = stand_in(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        plugin = GuardPlugin(guard, rank=2) if guarded else GuardPluginOff()
        x, before = task(0)[0], torch.empty(0)
        for number in range(3):
            train(strategy, plugin, number)
            before = before if number else model[:4](x).detach()
            if guarded:
                assert not guard.constrained
                assert guard.grams["0"].count == 64 * (number + 1)
        moved[guarded] = float((model[:4](x).detach() - before).norm() / before.norm())
    assert moved[True] < moved[False] / 4
    assert guard.certificate().holds
    assert {id(p) for p in strategy.optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def test_what_is_refused() -> None:
    model = layers()
    guard = ness.NullSpace(model, exclude="4")
    with pytest.raises(ness.NessError, match=r"expected options of guard\.constrain"):
        GuardPlugin(guard, ranks=3)
    with pytest.raises(ness.NessError, match=r"expected the ness\.NullSpace"):
        GuardPlugin(model)  # type: ignore[arg-type]
    guard.observe(task(0)[0])
    groups = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(ness.NessError, match="6 groups"):
        GuardPlugin(guard).before_training_exp(stand_in(model, torch.optim.SGD(groups, lr=0.1)))
    assert not guard.constrained
    with pytest.raises(ness.NessError, match="knows nothing of"):
        GuardPlugin(guard).before_training_exp(stand_in(layers(), None))
    guard.constrain()
    with pytest.raises(ness.NessError, match="constrained already"):
        GuardPlugin(guard).before_training_exp(stand_in(model, None))
    guard.discard()


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_real_strategies_keep_the_first_experience() -> None:
    pytest.importorskip("psutil")
    import torchvision_stand_in

    torchvision_stand_in.install()
    pytest.importorskip("avalanche.core", reason="the avalanche-lib package is not installed")
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils.classification_dataset import _make_taskaware_tensor_classification_dataset
    from avalanche.evaluation.metrics import accuracy_metrics
    from avalanche.training.plugins import EvaluationPlugin
    from avalanche.training.supervised import Naive

    moved = {}
    for guarded in (False, True):
        model = layers()
        sets = [_make_taskaware_tensor_classification_dataset(*task(n), task_labels=0) for n in range(3)]
        benchmark = benchmark_from_datasets(train=sets, test=sets)
        guard = ness.NullSpace(model, rule=ness.Energy(0.999), exclude="4")
        strategy = Naive(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            criterion=nn.CrossEntropyLoss(),
            train_mb_size=16,
            train_epochs=10,
            plugins=[GuardPlugin(guard, rank=2)] if guarded else [],
            evaluator=EvaluationPlugin(accuracy_metrics(stream=True), loggers=[]),
        )
        x = task(0)[0]
        for number, experience in enumerate(benchmark.train_stream):
            strategy.train(experience)
            if number == 0:
                before = model[:4](x).detach()
        moved[guarded] = float((model[:4](x).detach() - before).norm() / before.norm())
        strategy.eval(benchmark.test_stream)
        if guarded:
            assert not guard.constrained
            assert guard.certificate().holds
            assert guard.grams["0"].count == 3 * 64
    assert moved[True] < moved[False] / 4
