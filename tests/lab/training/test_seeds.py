import torch

from ness.lab.training.seeds import Randomness


def draw(random: Randomness) -> list[float]:
    names = ("weights", "order", "step", "method")
    return [float(torch.rand(1, generator=getattr(random, name))) for name in names] + [random.host.random()]


def test_purposes_and_seeds_are_apart_and_repeat() -> None:
    one, again, other = (draw(Randomness.of(seed, torch.device("cpu"))) for seed in (1, 1, 2))
    assert one == again
    assert len({*one, *other}) == 10


def test_state_out_and_in() -> None:
    random = Randomness.of(7, torch.device("cpu"))
    draw(random)
    tensors, host = random.state()
    following = draw(random)
    fresh = Randomness.of(1, torch.device("cpu"))
    fresh.load_state(tensors, host)
    assert draw(fresh) == following
