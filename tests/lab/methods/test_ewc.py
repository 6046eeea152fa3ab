"""EWC against figures by hand: the penalty, the Fisher with and without batch statistics, the scalings of λ."""

import pytest
import torch
from torch.nn import functional as F

import tiny
from ness import NessError
from ness.lab import registry
from ness.lab.methods import ewc
from ness.lab.methods.ewc import batch_fisher, merged, per_sample_fisher, quadratic, strength, vector
from ness.lab.networks.base import build
from ness.lab.training.loader import Batch


def after_task(task: int, **changes):
    one = tiny.trainer("ewc", **changes)
    while one.at < task:
        one.advance()
    return one


def test_e1_penalty_and_gradient() -> None:
    theta = torch.tensor([1.0, 5.0], dtype=torch.float64, requires_grad=True)
    zero, fisher = torch.zeros(2, dtype=torch.float64), torch.tensor([2.0, 0.0], dtype=torch.float64)
    found = quadratic(theta, zero, fisher, 3.0)
    found.backward()
    assert float(found.detach()) == 3.0
    assert theta.grad.tolist() == [6.0, 0.0]


@pytest.mark.parametrize("squares", [ewc.squares_apart, ewc.squares_together])
def test_e2_two_classes_at_zero(squares) -> None:
    linear = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.zeros_(linear.weight)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, images, task):
            return self.linear(images)

    model = Model()
    batch = Batch(torch.tensor([[2.0, -1.0]]), torch.tensor([0]), 0)
    (found,) = squares(model, batch, dict(model.named_parameters()))
    assert found["linear.weight"].tolist() == [[1.0, 0.25], [1.0, 0.25]]


def test_e3_merge() -> None:
    new, old = {"w": torch.tensor([4.0])}, {"w": torch.tensor([1.0]), "old head": torch.tensor([3.0])}
    found = merged(new, old, 2)
    assert found["w"].tolist() == [2.0]
    assert found["old head"].tolist() == [2.0]


def test_e4_no_pull_at_the_anchor_and_e5_none_on_a_head_before_its_task_ends() -> None:
    one = after_task(1)
    one.advance()
    method, model = one.method, one.context.model
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert "heads.1.weight" in named
    found = quadratic(*(vector(each, named) for each in (named, method.anchor, method.fisher)), method.weight)
    found.backward()
    assert float(found.detach()) == 0
    assert all(p.grad is None or not p.grad.any() for p in named.values())
    assert not method.fisher["heads.1.weight"].any()
    assert method.fisher["heads.0.weight"].any()
    tiny.to_the_end(one)


@pytest.mark.parametrize("norm", ["batch", "stored"])
def test_fisher_is_the_mean_of_squared_gradients_of_each_samples_loss(norm: str) -> None:
    one = after_task(1, norm=norm)
    model, samples = one.context.model.eval().double(), one.data["train"][0]
    named = {name: p for name, p in model.named_parameters() if not name.startswith("heads.1")}
    named = {name: p.requires_grad_() for name, p in named.items() if not name.startswith("heads.2")}
    batch = samples.take(torch.arange(20))
    batch = Batch(batch.images.double(), batch.labels, 0)
    expected = {name: torch.zeros_like(p) for name, p in named.items()}
    for number in range(20):
        losses = F.cross_entropy(model(batch.images, 0), batch.labels, reduction="none")
        for name, value in zip(named, torch.autograd.grad(losses[number], list(named.values())), strict=True):
            expected[name] += value.square() / 20
    found = per_sample_fisher(model, iter([batch]), named)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-9) for name in named)


@pytest.mark.parametrize("norm", ["batch", "stored"])
@pytest.mark.parametrize("network", ["alexnet", "resnet18-32"])
def test_fisher_on_the_papers_networks(network: str, norm: str) -> None:
    """One forward of the batch; each sample's squared gradient as a backward of its own gives it."""
    generator = torch.Generator().manual_seed(1)
    spec, cpu = registry.all_networks()[network], torch.device("cpu")
    model = build(spec, (3, 32, 32), [3], norm, weights=generator, dropout=generator, device=cpu).eval()
    batch = Batch(torch.randn(3, 3, 32, 32, generator=generator), torch.tensor([0, 1, 2]), 0)
    named = dict(model.named_parameters())
    found = per_sample_fisher(model, iter([batch]), named)
    losses = F.cross_entropy(model(batch.images, 0), batch.labels, reduction="none")
    each = [torch.autograd.grad(loss, list(named.values()), retain_graph=True) for loss in losses]
    for name, *values in zip(named, *each, strict=True):
        expected = torch.stack(values).square().mean(0)
        assert torch.allclose(found[name], expected, rtol=1e-2, atol=1e-4 * float(expected.max())), name


def test_both_ways_agree_where_samples_do_not_meet() -> None:
    one = after_task(1, norm="stored")
    model, batch = one.context.model.eval(), one.data["train"][0].take(torch.arange(20))
    named = {name: p.requires_grad_() for name, p in model.named_parameters() if not name.startswith("heads")}
    named["heads.0.weight"] = model.heads[0].weight.requires_grad_()
    totals = []
    for squares in (ewc.squares_apart, ewc.squares_together):
        parts = list(squares(model, batch, named))
        totals.append({name: sum(part[name] for part in parts) for name in named})
    assert all(torch.allclose(totals[0][name], totals[1][name], rtol=1e-3, atol=1e-7) for name in named)


def test_fisher_of_batches_is_the_hat_repositorys_and_leaves_statistics_alone() -> None:
    one = after_task(1, norm="stored", fisher="batch")
    model, samples = one.context.model.eval(), one.data["train"][0]
    named = {"conv.weight": model.conv.weight.requires_grad_()}
    found = batch_fisher(model, samples, named)
    expected = torch.zeros_like(model.conv.weight)
    for chunk in torch.arange(56).split(20):  # 20, 20, 16
        batch = samples.take(chunk)
        loss = F.cross_entropy(model(batch.images, 0), batch.labels)
        expected += 20 * torch.autograd.grad(loss, model.conv.weight)[0].square() / 56  # a short one counts as 20
    assert torch.allclose(found["conv.weight"], expected)
    before = model.norm.running_mean.clone()
    one.method._fisher(samples)
    assert torch.equal(model.norm.running_mean, before)


def test_scalings_are_converted_and_never_mixed() -> None:
    hat, batch = 5000.0, 64
    avalanche = hat / 2 * batch / 20
    assert strength(hat, "hat", batch) == strength(avalanche, "avalanche", batch) == strength(250.0, "ours", batch)
    literal = tiny.trainer("ewc", fisher="batch", convention="hat", penalty=hat).method
    assert literal.weight == hat  # on the HAT repository's own Fisher its λ is what it was
    assert tiny.trainer("ewc", convention="hat", penalty=hat).method.weight == 250.0


def test_the_fisher_is_taken_at_the_restored_best_weights(monkeypatch) -> None:
    one = tiny.trainer("ewc", epochs=4, lr=0.3, patience=4)
    taken = {}
    original = ewc.Ewc._fisher

    def watching(self, samples):
        taken.update({name: p.detach().clone() for name, p in self.model.named_parameters()})
        return original(self, samples)

    monkeypatch.setattr(ewc.Ewc, "_fisher", watching)
    one.advance()
    while not one.learning.over:
        one.advance()
    best = {name: value.clone() for name, value in one.learning.best.items()}
    one.advance()
    assert all(torch.equal(taken[name], best[name]) for name in best if name in taken)


def test_the_fisher_is_taken_over_so_many_samples_at_most() -> None:
    few, all_of_them = (after_task(1, fisher_samples=count).method for count in (20, 5000))
    assert not torch.equal(few.fisher["conv.weight"], all_of_them.fisher["conv.weight"])
    assert torch.equal(few.anchor["conv.weight"], all_of_them.anchor["conv.weight"])


@pytest.mark.parametrize(
    "changes", [{"penalty": -1.0}, {"clip": 0.0}, {"fisher_samples": 1}, {"fisher": "batch", "fisher_samples": 50}]
)
def test_what_does_not_go(changes: dict) -> None:
    with pytest.raises(NessError, match=r"penalty is -1|clip is 0|fisher_samples (is 1|was set)"):
        tiny.job("ewc", **changes)
