import pytest
import torch
from torch import Generator, nn

from ness.lab.runs.settings import Training
from ness.lab.training import optimizers


def parameters() -> list[nn.Parameter]:
    generator = Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(4, 3, generator=generator)), nn.Parameter(torch.randn(5, generator=generator))]


@pytest.mark.parametrize("name", ["sgd", "sgdm", "sam", "adamw"])
def test_same_steps_as_torch_with_a_plain_rate(name: str) -> None:
    training = Training(optimizer=name, lr=0.1, weight_decay=0.01)
    mine, theirs = parameters(), parameters()
    lr = torch.tensor(0.1)
    one = optimizers.make(training, mine, lr)
    momentum = 0.9 if name == "sgdm" else 0.0
    two: torch.optim.Optimizer = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=0.01)
    if name == "adamw":
        two = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.01)
    generator = Generator().manual_seed(1)
    for step in range(5):
        if step == 3:  # a decay: whoever owns the tensor changes the rate
            lr.fill_(0.05)
            two.param_groups[0]["lr"] = 0.05
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        one.step()
        two.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", ["sgdm", "adamw"])
def test_state_out_and_in(name: str) -> None:
    training = Training(optimizer=name, lr=0.1)
    gradients = [[torch.ones(4, 3), torch.ones(5)], [torch.ones(4, 3) * 2, -torch.ones(5)]]

    def step(optimizer: torch.optim.Optimizer, held: list[nn.Parameter], number: int) -> None:
        for parameter, gradient in zip(held, gradients[number], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()

    one = parameters()
    first = optimizers.make(training, one, torch.tensor(0.1))
    step(first, one, 0)
    two = [nn.Parameter(parameter.detach().clone()) for parameter in one]
    second = optimizers.make(training, two, torch.tensor(0.1))
    memory = optimizers.state_of(first, one)
    optimizers.load_state(second, two, {name: value.clone() for name, value in memory.items()})
    step(first, one, 1)
    step(second, two, 1)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_sam_moves_by_rho_along_the_whole_gradient_and_back_exactly() -> None:
    held = parameters()
    before = [parameter.detach().clone() for parameter in held]
    places = [parameter.data_ptr() for parameter in held]
    held[0].grad, held[1].grad = torch.full((4, 3), 2.0), None  # no gradient: not moved
    kept = optimizers.ascend(held, rho=0.05)
    moved = held[0].detach() - before[0]
    assert abs(float(moved.norm()) - 0.05) < 1e-6
    assert torch.equal(held[1], before[1])
    optimizers.restore(kept)
    assert all(torch.equal(parameter, value) for parameter, value in zip(held, before, strict=True))
    assert [parameter.data_ptr() for parameter in held] == places  # where a captured step finds them


def test_sam_norm_is_over_all_gradients_together() -> None:
    assert float(optimizers.sam_scale([torch.tensor([3.0]), torch.tensor([4.0])], 0.5)) == pytest.approx(0.1)
