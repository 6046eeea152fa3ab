"""CUBER against its definition: regimes, what is open, the pull, and what an old task has of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from ness import NessError
from ness.lab.methods.base import clear
from ness.lab.methods.cuber import cosine, regimes, union_without
from ness.lab.methods.trgp import Trgp
from ness.lab.runs import checkpoint
from ness.lab.runs.jobs import resolve


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def begun(task: int, **changes):
    """A run at the beginning of a task, counted from 0."""
    one = tiny.trainer("cuber", **{"trust": 0.3, **changes})
    while one.at < task:
        one.advance()
    one.advance()
    return one


def test_regimes_by_hand() -> None:
    """G = (3, 4): .6 of it in e1. Agreement is with the old gradient itself, not with its part in the subspace."""
    gradient, e1 = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0], [0.0]])
    olds = [torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]]), torch.tensor([[4.0, -3.0]]), torch.zeros(1, 2)]
    assert regimes(gradient, [e1] * 4, olds, 0.6, 0.0) == [3, 2, 3, 3]
    assert regimes(gradient, [e1] * 4, olds, 0.6, 0.1) == [3, 2, 2, 2]
    assert regimes(gradient, [e1] * 4, olds, 0.61, -1.0) == [1] * 4
    assert float(cosine(olds[3], gradient)) == 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(2, 9), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_what_an_open_subspace_shares_with_a_closed_one_is_closed(seed, width, sizes) -> None:
    bases = [torch.linalg.qr(normal(width, min(size, width), seed=seed + n))[0] for n, size in enumerate(sizes)]
    shared = torch.linalg.qr(torch.cat(bases, 1))[0][:, : min(width, sum(min(s, width) for s in sizes))]
    assert union_without(bases, shared, []) is shared
    for openly in ([0], list(range(len(bases)))):
        closed = union_without(bases, shared, openly)
        assert torch.allclose(closed.mT @ closed, torch.eye(closed.shape[1], dtype=torch.float64), atol=1e-9)
        for task, basis in enumerate(bases):
            if task not in openly:
                assert torch.allclose(closed @ (closed.mT @ basis), basis, atol=1e-9)
        rank = sum(basis.shape[1] for task, basis in enumerate(bases) if task not in openly)
        assert closed.shape[1] <= min(rank, width)
    assert union_without(bases, shared, list(range(len(bases)))).shape == (width, 0)


def test_the_regimes_of_a_run_are_those_of_its_gradients() -> None:
    """Every old task in every layer, and what follows: closed, lent, open."""
    one = begun(2)
    method = one.method
    assert {len(each) for each in method.regimes.values()} == {2}
    found = {regime for each in method.regimes.values() for regime in each}
    assert {2, 3} <= found
    for name, each in method.regimes.items():
        bases = [held[name] for held in method.task_bases]
        hurt = [task for task, regime in enumerate(each) if regime == 2]
        assert sorted(method.lenders[2].get(name, [])) == hurt
        closed = [bases[task] for task, regime in enumerate(each) if regime != 3]
        layer = method.layers[name]
        gradient = torch.randn(layer.outputs, layer.width, generator=torch.Generator().manual_seed(1))
        left = gradient if method.removals[name].nothing else method.removals[name](gradient)
        for basis in closed:
            assert (left @ basis).norm() < 1e-4
        if 3 in each:
            (task, *_) = (task for task, regime in enumerate(each) if regime == 3)
            assert (left @ bases[task]).norm() > 1e-2 or closed
    assert method.start.keys() == {name for name, each in method.regimes.items() if 3 in each}


def test_an_old_tasks_weights_move_where_it_is_open_and_nowhere_else() -> None:
    one = begun(1, agreement=-1.0)  # whatever has a sufficient projection is open
    assert all(each == [3] for each in one.method.regimes.values())
    held = {name: layer.stored()[0].clone() for name, layer in one.method.layers.items()}
    while one.at < 2:
        one.advance()
    moved = {name: layer.stored()[0] - held[name] for name, layer in one.method.layers.items()}
    assert all((step @ one.method.task_bases[0][name]).norm() > 1e-3 * step.norm() for name, step in moved.items())
    other = begun(1, agreement=1.0)  # nothing agrees so well
    assert all(each == [2] for each in other.method.regimes.values())
    held = {name: layer.stored()[0].clone() for name, layer in other.method.layers.items()}
    while other.at < 2:
        other.advance()
    for name, layer in other.method.layers.items():
        step = layer.stored()[0] - held[name]
        assert (step @ other.method.task_bases[0][name]).norm() <= 1e-5 * step.norm()


def test_where_nothing_is_open_it_is_trgp() -> None:
    """ε₂ = 1: the same memory, scales and steps, bit for bit, but for the gradient it keeps."""
    own = {"trust": 0.3, "optimizer": "sgd", "epochs": 2}
    mine, theirs = tiny.trainer("cuber", agreement=1.0, **own), tiny.trainer("trgp", **own)
    mine.method.gradient = lambda lesson, logits: (  # the last one drawn from its own images, as TRGP draws none
        Trgp.gradient(mine.method, lesson, logits)
        if mine.learning is None
        else {name: layer.stored()[0] for name, layer in mine.method.layers.items()}
    )
    assert tiny.same(tiny.to_the_end(mine), tiny.to_the_end(theirs))


def test_the_pull_and_its_gradient_by_hand() -> None:
    one = begun(1, agreement=-1.0, pull=0.7)
    method, layer = one.method, one.method.layers["fc"]
    assert method.penalty(one.learning.lesson).item() == 0
    with torch.no_grad():
        layer.weight.add_(0.1)
        layer.bias.add_(-0.2)
    step = torch.cat([torch.full((16, 36), 0.1), torch.full((16, 1), -0.2)], 1)
    basis = method.task_bases[0]["fc"]
    expected = 0.7 * float((step @ basis).square().sum())
    found = method.penalty(one.learning.lesson)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    clear(one.learning.trained)
    found.backward()
    gradient = torch.cat([layer.weight.grad, layer.bias.grad.unsqueeze(1)], 1)
    torch.testing.assert_close(gradient, 1.4 * step @ basis @ basis.mT, rtol=1e-4, atol=1e-6)
    batch = one.data["train"][1].take(torch.arange(8))
    method.model.eval()
    plain = torch.nn.functional.cross_entropy(method.logits(batch), batch.labels)
    assert method.loss(batch).item() == pytest.approx(plain.item() + expected, rel=1e-5)


def test_the_stronger_the_pull_the_less_open_subspaces_move() -> None:
    way = []
    for pull in (0.0, 0.3, 3.0):
        one = begun(1, agreement=-1.0, pull=pull, epochs=4)
        start = one.method.layers["fc"].stored()[0].clone()
        while one.at < 2:
            one.advance()
        way.append(float(((one.method.layers["fc"].stored()[0] - start) @ one.method.task_bases[0]["fc"]).norm()))
    assert way[0] > 1.1 * way[1] > 1.1 * 1.1 * way[2]


def test_a_task_keeps_the_gradient_it_ended_with_under_its_own_scales() -> None:
    one = begun(1, agreement=1.0, samples=56, trust_images=56)  # all images, so that no draw matters
    while one.at < 2:
        one.advance()
    method, samples = one.method, one.data["train"][1]
    assert method.scales[1]
    batch = samples.take(samples.stored_order())
    one.context.model.eval()
    loss = torch.nn.functional.cross_entropy(method.logits(batch), batch.labels)
    for name, layer in method.layers.items():
        found = torch.autograd.grad(loss, [p for p in (layer.weight, layer.bias) if p is not None], retain_graph=True)
        expected = layer.joint(found[0], found[1] if len(found) > 1 else None)[0]
        torch.testing.assert_close(method.task_gradients[1][name], expected, rtol=1e-3, atol=1e-5)
    assert len(method.task_gradients) == 2
    tiny.to_the_end(one)
    assert len(method.task_gradients) == 2  # nobody needs the last task's


@pytest.mark.parametrize("changes", [{}, {"agreement": -1.0, "norm": "stored"}, {"optimizer": "sam"}])
def test_taken_up_in_the_middle_of_a_later_task(changes, tmp_path) -> None:
    whole = begun(2, **changes)
    whole.advance()
    cut = checkpoint.write(tmp_path, *whole.state())
    later = tiny.trainer("cuber", trust=0.3, **changes)
    later.load_state(*checkpoint.read(cut))
    assert later.method.regimes == whole.method.regimes
    assert tiny.same(tiny.to_the_end(later), tiny.to_the_end(whole))


def test_every_setting_changes_the_run() -> None:
    base = {"epochs": 2, "trust": 0.3}
    fixed = tiny.to_the_end(tiny.trainer("cuber", **base))
    for change in ({"agreement": 0.9}, {"pull": 0.0}, {"trust": 0.9}, {"trust_images": 20}):
        assert not tiny.same(tiny.to_the_end(tiny.trainer("cuber", **{**base, **change})), fixed), change
    hurt = {**base, "agreement": 1.0}
    assert not tiny.same(
        tiny.to_the_end(tiny.trainer("cuber", **hurt)), tiny.to_the_end(tiny.trainer("cuber", reuse=1, **hurt))
    )


def test_the_record_says_what_was_open() -> None:
    one = tiny.to_the_end(tiny.trainer("cuber", epochs=1, trust=0.3, agreement=-1.0))
    assert [note["open"] for note in one.notes] == [{}, {"conv": [0], "fc": [0]}, {"conv": [0, 1], "fc": [0, 1]}]


def test_presets_and_bad_settings() -> None:
    for benchmark, lr, pull in (("cifar100", 0.01, 1.0), ("five-datasets", 0.1, 1.0), ("mini-imagenet", 0.1, 0.1)):
        for preset in ("fixed", "reference", "paper"):
            found = resolve("cuber", benchmark, preset).settings
            assert (found.optimizer, found.lr, found.pull, found.trust, found.agreement) == ("sgd", lr, pull, 0.5, 0)
    assert resolve("cuber", "mini-imagenet").settings.threshold + 0 == 0.985
    for changes, message in (
        ({"trust": 1.0}, "trust is 1, expected a share"),
        ({"agreement": 1.5}, "agreement is 1.5, expected a cosine"),
        ({"pull": -1.0}, "pull is -1, expected 0 or more"),
        ({"reuse": 0}, "reuse is 0, expected at least 1"),
        ({"trust_images": 1}, "trust_images is 1, expected at least 2"),
        ({"optimizer": "adamw"}, "cuber does not go with adamw"),
        ({"weight_decay": 1e-4}, "weight_decay is 0.0001, expected 0"),
    ):
        with pytest.raises(NessError, match=message):
            tiny.job("cuber", **changes)
