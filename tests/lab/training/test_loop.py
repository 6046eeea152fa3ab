"""The loop: what trains, that it repeats, that it can be cut anywhere and taken up bit for bit."""

import copy
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from ness import NessError
from ness.lab import registry
from ness.lab.gpu.capture import PlainRunner
from ness.lab.gpu.coroutines import Coroutine, pause, to_the_end
from ness.lab.gpu.scheduler import side_by_side
from ness.lab.methods.base import Method, MethodSpec
from ness.lab.networks.base import NetworkSpec
from ness.lab.runs import checkpoint
from ness.lab.training import loop
from ness.lab.training.task_statistics import own_norms, using

METHODS = sorted(registry.all_methods())
VARIANTS = {
    "sgdm": {},
    "sam": {"optimizer": "sam"},
    "adamw": {"optimizer": "adamw", "lr": 0.01},
    "cosine and mix-up": {"schedule": "cosine", "mixup": 0.4},
    "stored norms": {"norm": "stored"},
    "norms of each task": {"norm": "task"},
}


@pytest.mark.parametrize("method", METHODS)
def test_taken_up_at_every_point_it_ends_bit_equal(method: str, tmp_path: Path) -> None:
    whole = tiny.trainer(method)
    cuts = []
    while not whole.done:
        whole.advance()
        tensors, manifest = whole.state()
        cuts.append(checkpoint.write(_folder(tmp_path, len(cuts)), tensors, manifest))
    assert len(cuts) > 4
    for cut in cuts:
        torch.manual_seed(len(cuts))  # the global generator is nobody's business
        later = tiny.trainer(method)
        later.load_state(*checkpoint.read(cut))
        assert tiny.same(tiny.to_the_end(later), whole), f"cut at {cut}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["finetune", "ness"])
def test_taken_up_in_the_middle_of_a_task_with_every_optimizer(method: str, variant: str, tmp_path: Path) -> None:
    changes = VARIANTS[variant]
    whole = tiny.trainer(method, **changes)
    for _ in range(8):  # the second task, after an epoch or two
        whole.advance()
    assert whole.learning is not None
    assert (whole.at, whole.learning.epoch > 0) == (1, True)
    tensors, manifest = whole.state()
    cut = checkpoint.write(tmp_path, tensors, manifest)
    tiny.to_the_end(whole)
    later = tiny.trainer(method, **changes)
    later.load_state(*checkpoint.read(cut))
    assert tiny.same(tiny.to_the_end(later), whole)


def _folder(base: Path, number: int) -> Path:
    folder = base / str(number)
    folder.mkdir()
    return folder


@pytest.mark.parametrize("method", ["finetune", "joint", "ness"])
def test_a_seed_gives_the_same_alone_and_beside_others(method: str) -> None:
    alone = [tiny.to_the_end(tiny.trainer(method, seed, mixup=0.0)) for seed in (1, 2)]
    before = torch.random.get_rng_state()
    beside = [tiny.trainer(method, seed) for seed in (1, 2)]
    while not all(one.done for one in beside):
        for one in beside:
            if not one.done:
                one.advance()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(tiny.same(one, other) for one, other in zip(alone, beside, strict=True))
    assert not tiny.same(*alone)


def test_steps_of_two_runs_interleaved_within_an_epoch() -> None:
    """An epoch in two parts, and its steps by hand, as lanes use them."""
    alone = [tiny.to_the_end(tiny.trainer("finetune", seed, epochs=1)) for seed in (1, 2)]
    runners = [Stepwise(), Stepwise()]
    lanes = [
        tiny.trainer("finetune", seed, epochs=1, runner=runner) for seed, runner in zip((1, 2), runners, strict=True)
    ]
    for _ in range(3):
        for lane in lanes:
            assert lane.advance().kind == "task"
        epochs = [Coroutine(lane.advance) for lane in lanes]
        for epoch in epochs:
            next(epoch)  # it is on its way
        for lane, epoch in zip(lanes, epochs, strict=True):
            assert to_the_end(epoch).kind == "epoch"
            assert lane.advance().kind == "learnt"
    assert all(tiny.same(one, other) for one, other in zip(alone, lanes, strict=True))
    assert all(runner.epochs == 3 for runner in runners)


@pytest.mark.parametrize("changes", [{}, {"statistics": "recomputed"}], ids=str)
def test_runs_that_take_turns_at_every_pause_end_as_if_alone(changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [tiny.to_the_end(tiny.trainer("ness", seed, epochs=1, **changes)) for seed in (1, 2)]
    monkeypatch.setattr("ness.lab.methods.ness.BATCHES_A_CALL", 1)
    lanes = [tiny.trainer("ness", seed, epochs=1, **changes) for seed in (1, 2)]
    pauses: Counter[str] = Counter()

    def whole(one):
        while not one.done:
            work = Coroutine(one.advance)
            seen = 0
            while True:
                try:
                    next(work)
                except StopIteration as end:
                    pauses[end.value.kind] += seen
                    break
                seen += 1
                assert torch.is_grad_enabled()  # nothing of the process's own is held open
                pause()

    side_by_side([partial(whole, one) for one in lanes], torch.device("cpu"), 2)
    assert all(tiny.same(one, other) for one, other in zip(alone, lanes, strict=True))
    # two lanes; 4 batches a task: after tasks 1 and 2, or of task 1 before task 2 and of both before task 3
    before, after = (12, 0) if changes else (0, 8)
    decomposed = 2 * len(lanes[0].method.guard.layers)  # before tasks 2 and 3
    to_and_fro = 3  # each task: from epochs to what is between tasks, or back
    assert pauses == {
        "task": 2 * (2 * to_and_fro + before + decomposed),
        "epoch": 2 * 3,
        "learnt": 2 * (to_and_fro + after + 1 + 2 + 3),
    }


class Stepwise(PlainRunner):
    """Plain steps, counted."""

    epochs = 0

    def steps(self, learning, inputs):
        self.epochs += 1
        return super().steps(learning, inputs)


class NoHost(TorchDispatchMode):
    """Fails on whatever would make the host wait for the device, or copies from the host: neither can be captured."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        assert name not in (
            "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal",
            "aten::masked_select",
        ), f"{func} inside a step reads a tensor on the host"  # fmt: skip
        assert name != "aten::lift_fresh", "a tensor of the host's numbers is made inside a step"
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            assert all(each is None or each.dtype != torch.bool for each in args[1]), "how many are true, the host asks"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "wrong", [lambda x: float(x.sum()), lambda x: x + torch.tensor([1.0, 2.0]), lambda x: x[x > 1]]
)
def test_what_cannot_be_captured_is_noticed(wrong) -> None:
    with pytest.raises(AssertionError), NoHost():
        wrong(torch.ones(2))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_needs_nothing_of_the_host(method: str, variant: str) -> None:
    refused = registry.all_methods()[method].refuses
    changes = {
        name: value for name, value in VARIANTS[variant].items() if name not in refused and str(value) not in refused
    }
    one = tiny.trainer(method, epochs=1, **changes)
    while one.at < len(one.lessons) - 1:
        one.advance()
    one.advance()
    assert one.learning is not None
    for inputs in one.open_epoch():
        with NoHost():
            one.learning.step(inputs)


def test_other_heads_get_neither_gradient_nor_decay() -> None:
    one = tiny.trainer("finetune", weight_decay=0.1)
    start = [head.weight.detach().clone() for head in one.context.model.heads]
    for _ in range(3):
        one.advance()
    assert not torch.equal(one.context.model.heads[0].weight, start[0])
    for head, value in list(zip(one.context.model.heads, start, strict=True))[1:]:
        assert torch.equal(head.weight, value)
        assert head.weight.grad is None


def test_the_best_validation_weights_are_put_back() -> None:
    one = tiny.trainer("finetune", epochs=12, lr=0.3, patience=12)
    kept, best = {}, float("inf")
    one.advance()
    while one.learning is not None and not one.learning.over:
        facts = one.advance().facts
        if facts["valid_loss"] < best:
            best = facts["valid_loss"]
            kept = {name: value.clone() for name, value in one.context.model.state_dict().items()}
    last = {name: value.clone() for name, value in one.context.model.state_dict().items()}
    one.advance()
    found = one.context.model.state_dict()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert any(not torch.equal(found[name], last[name]) for name in last)  # the last epoch was not the best


def test_cosine_keeps_the_last_weights_and_runs_all_epochs() -> None:
    one = tiny.trainer("finetune", epochs=6, lr=0.3, schedule="cosine")
    for _ in range(7):
        one.advance()
    last = {name: value.clone() for name, value in one.context.model.state_dict().items()}
    one.advance()
    assert one.epochs == [6]
    assert all(torch.equal(value, last[name]) for name, value in one.context.model.state_dict().items())


def test_sam_in_the_first_task_only_is_another_run_and_plain_sgd_afterwards() -> None:
    every, first = (tiny.trainer("finetune", optimizer="sam", sam_tasks=tasks) for tasks in ("all", "first"))
    for one in (every, first):
        while one.at < 1:
            one.advance()
    assert tiny.same(every, first)  # alike until the first task is learnt
    every.advance()
    first.advance()
    assert every.learning is not None
    assert first.learning is not None
    assert (every.learning.step.sam, first.learning.step.sam) == (True, False)


def test_a_diverged_run_says_so() -> None:
    one = tiny.trainer("finetune", lr=1e25)
    with pytest.raises(NessError, match="diverged: lower --lr"):
        tiny.to_the_end(one)


def test_old_data_is_handed_only_to_methods_that_say_they_need_it() -> None:
    seen: list[int] = []

    class Curious(Method):
        def before_task(self, lesson):
            seen.append(len(lesson.earlier))

    for needs in (None, lambda own: True):
        tiny.to_the_end(
            tiny.trainer(MethodSpec("curious", "for tests", Curious, "nothing", needs_old_data=needs), epochs=1)
        )
    assert seen == [0, 0, 0, 0, 1, 2]


def test_a_method_hooks_in_where_the_contract_says() -> None:
    calls: list[str] = []

    class Loud(Method):
        def before_task(self, lesson):
            calls.append("before")

        def loss(self, batch):
            calls.append("loss")
            assert batch.clock is not None
            return super().loss(batch)

        def after_backward(self, batch):
            assert self.model.heads[batch.task].weight.grad is not None
            calls.append("backward")

        def after_step(self, batch):
            calls.append("step")

        def after_task(self, lesson):
            calls.append("after")
            return {"said": lesson.task}

        def use(self, task):
            calls.append(f"use {task}")

    one = tiny.to_the_end(tiny.trainer(MethodSpec("loud", "for tests", Loud, "nothing"), epochs=1, batch=28))
    first = ["before", *["loss", "backward", "step"] * 2, "after", "use 0", "use 0"]
    assert calls[: len(first)] == first
    assert calls[-5:] == ["after", "use 0", "use 1", "use 2", "use 2"]
    assert one.notes == [{"said": 0}, {"said": 1}, {"said": 2}]


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        ({}, True),
        ({"valid_order": "fixed"}, False),
        ({"norm": "stored"}, False),
        ({"norm": "task"}, True),
        ({"schedule": "cosine"}, False),
    ],
    ids=str,
)
def test_validation_is_drawn_anew_where_its_batches_decide(changes: dict[str, Any], drawn: bool) -> None:
    one = tiny.trainer("finetune", **changes)
    orders = []
    while one.at == 0:
        event = one.advance()
        if event.kind == "epoch":
            orders.append(tuple(one.orders["valid"][0].tolist()))
    assert len(orders) == 3
    assert len(set(orders)) == (3 if drawn else 1)
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(20))}
    other = tiny.trainer("finetune", seed=9)
    assert torch.equal(one.orders["test"][0], other.orders["test"][0])  # what is reported is always of one order


def test_all_tasks_at_once_draw_all_their_validations() -> None:
    one = tiny.trainer("joint")
    one.advance()
    before = [order.clone() for order in one.orders["valid"]]
    one.advance()
    assert all(not torch.equal(new, old) for new, old in zip(one.orders["valid"], before, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_taken_up_in_the_first_task_a_gradient_is_the_same_in_every_bit(method: str) -> None:
    whole = tiny.trainer(method)
    whole.advance()
    tensors, manifest = whole.state()
    later = tiny.trainer(method)
    later.load_state({name: value.clone() for name, value in tensors.items()}, copy.deepcopy(manifest))
    found = []
    for one in (whole, later):
        learning = one._current()
        for inputs in one.open_epoch():
            learning.step(inputs)
            found.append([None if p.grad is None else p.grad.clone() for p in learning.trained])
    half = len(found) // 2
    for mine, other in zip(found[:half], found[half:], strict=True):
        assert all(a is b or torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_with_norms_of_each_task_accuracy_depends_on_no_batch(method: str) -> None:
    """A test image alone is judged as among others, under the statistics of its own task."""
    one = tiny.to_the_end(tiny.trainer(method, norm="task", epochs=1))
    for task, samples in enumerate(one.data["test"]):
        one.method.use(task)
        with using(one.context.model, one.statistics[task]), torch.no_grad():
            one.context.model.eval()
            together = one.method.logits(samples.take(torch.arange(len(samples))))
            alone = torch.cat([one.method.logits(samples.take(torch.tensor([i]))) for i in range(len(samples))])
        torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)
        right = 100 * float((together.argmax(1) == samples.labels).double().mean())
        assert one.matrix[-1][task] == pytest.approx(right)


def test_norms_of_each_task_train_as_those_of_the_batch() -> None:
    """They differ in what is tested, not in what is learnt; and a task's statistics stay those it ended with."""
    batch, own = (tiny.trainer("gpm", norm=norm) for norm in ("batch", "task"))
    while own.at < 2:
        own.advance()
    first = {name: (mean.clone(), var.clone()) for name, (mean, var) in own.statistics[0].items()}
    tiny.to_the_end(batch)
    tiny.to_the_end(own)
    weights = batch.context.model.state_dict(), own.context.model.state_dict()
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert sorted(own.statistics) == [0, 1, 2]
    for name, pair in first.items():
        assert all(torch.equal(now, then) for now, then in zip(own.statistics[0][name], pair, strict=True))
        assert not torch.equal(own.statistics[1][name][0], pair[0])
    assert not any(norm.measured for norm in own_norms(own.context.model).values())


def test_norms_of_each_task_need_norms_that_can_be_lent_statistics() -> None:
    class Foreign(tiny.TinyNet):
        def __init__(self, *made: Any) -> None:
            super().__init__(*made)
            self.norm = nn.BatchNorm2d(4, track_running_stats=False)

    network = NetworkSpec("foreign", "for tests", Foreign)
    assert tiny.to_the_end(tiny.trainer("finetune", network=network, epochs=1)).done  # but other policies do not
    with pytest.raises(NessError, match=r"norm2d; found BatchNorm2d in Foreign.*--norm batch"):
        tiny.trainer("finetune", network=network, norm="task")


def test_a_task_of_one_image_more_than_a_pass_can_be_measured(monkeypatch) -> None:
    monkeypatch.setattr(loop, "LARGE_BATCH", 55)  # 56 images: a batch of one has no variance
    one = tiny.trainer("finetune", norm="task", epochs=1)
    sizes = []
    monkeypatch.setattr(one.method, "logits", lambda batch: sizes.append(len(batch.images)))
    one._measured(0)
    assert sizes == [28, 28]
