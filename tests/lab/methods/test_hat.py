"""HAT against figures by hand: gates, masks, compensation; and that what a task learnt stays on every network."""

import pytest
import torch
from torch import Generator

import tiny
from ness import NessError
from ness.lab import registry
from ness.lab.methods import hat
from ness.lab.methods.base import Context, TaskData
from ness.lab.networks.base import build
from ness.lab.runs.jobs import resolve
from ness.lab.training.loader import Batch, Clock
from ness.lab.training.seeds import Randomness

CPU = torch.device("cpu")


def test_h1_a_connection_is_blocked_where_both_ends_are_claimed() -> None:
    found = hat.openness(torch.ones(2, 2, 3, 3), torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
    assert found.squeeze().tolist() == [[0.0, 1.0], [1.0, 1.0]]
    assert hat.openness(torch.ones(2, 1, 4, 4), torch.tensor([1.0, 0.25]), None).flatten().tolist() == [0.0, 0.75]


def test_h2_h3_compensation() -> None:
    e = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    factor = hat.compensation(e.detach(), 2.0, 400.0)
    torch.sigmoid(2.0 * e).sum().backward()
    assert float(factor) == pytest.approx(374.5218, abs=5e-5)
    assert float(e.grad * factor) == pytest.approx(78.6448, abs=5e-5)  # smax·σ'(e)
    assert float(hat.compensation(torch.zeros(1), 2.0, 400.0)) == 200.0
    assert torch.isfinite(hat.compensation(torch.tensor([6.0, -6.0]), 400.0, 400.0)).all()


def test_h4_the_price_of_free_units() -> None:
    assert float(hat.crowding(torch.ones(2), torch.tensor([1.0, 0.0]))) == 1
    gates = torch.tensor([0.2, 0.6, 0.7])
    assert float(hat.crowding(gates, torch.zeros(3))) == pytest.approx(0.5)  # at first: the mean gate
    assert float(hat.crowding(gates, torch.ones(3))) == 0  # nothing left to pay for


def test_h5_a_fully_claimed_first_layer_does_not_move_by_a_bit() -> None:
    one = tiny.trainer("hat")
    while one.at < 1:
        one.advance()
    method, model = one.method, one.context.model
    method.by_gate(method.claimed)["dropout"].fill_(1)
    method.masks = hat.masks(model, method.by_gate(method.claimed))
    kept = {name: value.clone() for name, value in model.named_parameters()}
    while one.at < 2:
        one.advance()
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], kept[name]) for name in ("conv.weight", "norm.weight", "norm.bias"))
    assert not torch.equal(now["fc.weight"], kept["fc.weight"])


def test_h6_a_channels_mask_covers_its_places_in_the_next_linear_layer() -> None:
    into = torch.zeros(256)
    into[3] = 1
    found = hat.openness(torch.ones(2, 1024), torch.ones(2), into)  # conv3 to fc1 of AlexNet: maps of 2×2
    assert torch.nonzero(found[0] == 0).flatten().tolist() == [12, 13, 14, 15]


def test_annealing_follows_the_samples_of_the_epoch() -> None:
    clocks = [Clock(*(torch.tensor(value) for value in (0.0, within, 0.0))) for within in (0.0, 0.5)]
    assert [float(hat.annealed(clock, 400.0)) for clock in clocks] == pytest.approx([1 / 400, 200.00125])
    assert hat.annealed(None, 400.0) == 400.0


def method_on(network: str, benchmark: str, shape: tuple[int, ...]) -> hat.Hat:
    random = Randomness.of(1, CPU)
    spec = registry.all_networks()[network]
    model = build(spec, shape, [3, 3], "batch", weights=random.weights, dropout=random.step, device=CPU)
    job = resolve("hat", benchmark)
    return hat.Hat(Context(model, job.settings, job.settings, 2, random, CPU))


@pytest.mark.parametrize(
    ("network", "benchmark", "shape"),
    [
        ("digits", "digits", (1, 8, 8)),
        ("alexnet", "cifar100", (3, 32, 32)),
        ("resnet18-32", "five-datasets", (3, 32, 32)),
    ],
)
def test_with_hard_gates_the_next_task_cannot_change_the_last(
    network: str, benchmark: str, shape: tuple[int, ...]
) -> None:
    """Every second unit is claimed for good; steps on the next task, with all its gates open, change nothing."""
    method, generator = method_on(network, benchmark, shape), Generator().manual_seed(0)
    lessons = [TaskData((task,), None) for task in (0, 1)]  # type: ignore[arg-type]
    method.before_task(lessons[0])
    with torch.no_grad():
        method.embeddings[0].copy_(torch.where(torch.arange(len(method.claimed)) % 2 == 0, 6.0, -6.0))
    method.after_task(lessons[0])
    assert all(set(value.tolist()) == {0.0, 1.0} for value in method.by_gate(method.claimed).values())
    images = torch.randn(6, *shape, generator=generator)
    model = method.model.eval()
    old = Batch(images, torch.zeros(6, dtype=torch.int64), 0)
    before, start = method.logits(old).detach(), {n: p.detach().clone() for n, p in model.named_parameters()}
    method.before_task(lessons[1])
    clock = Clock(*(torch.tensor(value) for value in (0.0, 0.5, 0.0)))
    with torch.no_grad():
        method.embeddings[1].fill_(0.01)
    optimizer = torch.optim.SGD(method.parameters(lessons[1]), lr=0.5)
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        new = Batch(torch.randn(6, *shape, generator=generator), torch.tensor([0, 1, 2] * 2), 1, clock=clock)
        method.gradients(new, [], sam=False)
        method.after_backward(new)
        optimizer.step()
        method.after_step(new)
    model.eval()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, start[name])}
    assert moved == {name for name in start if name != "heads.0.weight"}  # every layer has free connections that moved
    assert torch.allclose(method.logits(old), before, atol=1e-6)


def test_stored_statistics_are_a_tasks_own() -> None:
    one = tiny.to_the_end(tiny.trainer("hat", norm="stored"))
    running = [kept["norm.running_mean"] for kept in one.method.statistics]
    assert len(running) == 3
    one.method.use(0)
    assert torch.equal(one.context.model.norm.running_mean, running[0])
    assert not torch.equal(running[0], running[1])


def test_embeddings_stay_in_reach_and_old_ones_do_not_move() -> None:
    one = tiny.trainer("hat", lr=5.0, clip=1e9)
    one.advance()
    one.advance()
    assert float(one.method.embeddings[0].detach().abs().max()) <= 6
    two = tiny.trainer("hat")
    while two.at < 1:
        two.advance()
    kept = two.method.embeddings[0].detach().clone()
    tiny.to_the_end(two)
    assert torch.equal(two.method.embeddings[0], kept)


@pytest.mark.parametrize("changes", [{"optimizer": "adamw"}, {"weight_decay": 0.1}, {"smax": 0.5}])
def test_what_does_not_go(changes: dict) -> None:
    with pytest.raises(NessError, match=r"blocks|blocking|smax is"):
        tiny.job("hat", **changes)
