"""WSN against its published rule, restated here, and its promise: what a task learnt stays, bit for bit."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn
from torch.nn import functional as F

import tiny
from ness import NessError
from ness.lab import registry
from ness.lab.methods import wsn
from ness.lab.methods._masks import packed, smallest, unpacked, winners
from ness.lab.methods.base import Context, TaskData, sizes_of
from ness.lab.networks.base import build
from ness.lab.runs import checkpoint
from ness.lab.runs.jobs import resolve
from ness.lab.training.loader import Batch
from ness.lab.training.loop import Trainer
from ness.lab.training.optimizers import make
from ness.lab.training.seeds import Randomness
from ness.lab.training.task_statistics import using

CPU = torch.device("cpu")
SGD = {"lr": 0.05, "score_gain": 100.0}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd and decay": {"optimizer": "sgd", "weight_decay": 0.1, **SGD},
    "momentum": {"optimizer": "sgdm", **SGD},
    "momentum and decay": {"optimizer": "sgdm", "weight_decay": 0.1, **SGD},
    "sam and decay": {"optimizer": "sam", "weight_decay": 0.1, **SGD},
    "adam": {"optimizer": "adamw", "lr": 0.01},
    "adam and decay": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.5},
    "cosine, mix-up": {"schedule": "cosine", "mixup": 0.4, "drop_last": True, "weight_decay": 0.1},
}


def logits_of(one: Trainer, task: int) -> Tensor:
    """What the task's test images get now, as the trainer tests them."""
    one.method.use(task)
    one.context.model.eval()
    with using(one.context.model, one.statistics.get(task, {})), torch.no_grad():
        return one.method.logits(one.data["test"][task].take(torch.arange(len(one.data["test"][task]))))


@pytest.mark.parametrize("norm", ["batch", "stored", "task"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_logits_of_earlier_tasks_stay_bit_equal(optimizer: str, norm: str) -> None:
    """The promise: with momentum, decay, Adam and SAM, and whatever statistics BatchNorm uses."""
    one = tiny.trainer("wsn", epochs=2, norm=norm, **OPTIMIZERS[optimizer])
    kept: list[Tensor] = []
    while not one.done:
        before = one.at
        one.advance()
        if one.at > before:
            kept.append(logits_of(one, before))
            one.method.use(before)
    for task, logits in enumerate(kept):
        assert torch.equal(logits_of(one, task), logits)
    accuracies = [[row[task] for row in one.matrix[task:]] for task in range(3)]
    assert all(len(set(each)) == 1 for each in accuracies)  # BWT is 0, not about 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_of_earlier_masks_do_not_move_by_a_bit_and_others_do(optimizer: str) -> None:
    one = tiny.trainer("wsn", epochs=2, capacity=0.3, **OPTIMIZERS[optimizer])
    while one.at < 1:
        one.advance()
    method, model = one.method, one.context.model
    used = {name: ~free for name, free in method.free.items()}
    assert set(used) == {"conv.weight", "fc.weight", "fc.bias"}
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    while one.at < 2:
        one.advance()
    for name, mask in used.items():
        assert 0 < int(mask.sum()) < mask.numel()
        now = model.get_parameter(name)
        assert torch.equal(now[mask], before[name][mask])
        assert name.endswith("bias") or not torch.equal(now[~mask], before[name][~mask])
    still = {"norm.weight", "norm.bias", "heads.0.weight", "heads.2.weight"}
    assert all(torch.equal(model.get_parameter(name), before[name]) for name in still)
    assert set(model.norm.weight.tolist()) == {1.0}
    assert set(model.norm.bias.tolist()) == {0.0}


def restated(weights: dict[str, Tensor], scores: dict[str, Tensor], used: dict[str, Tensor], c: float) -> Any:
    """Kang et al.'s step: the effective weights, and the gradients of weights and scores for given dL/dW_eff."""
    masks = {}
    for name, score in scores.items():
        ordered = sorted(score.abs().flatten().tolist())
        threshold = ordered[round((1 - c) * (len(ordered) - 1))]  # the repository's percentile
        masks[name] = torch.tensor([float(abs(s) >= threshold) for s in score.flatten().tolist()]).double()
        masks[name] = masks[name].view_as(score)

    def gradients(outer: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        of_weights = {name: g * masks[name] * (1 - used[name]) for name, g in outer.items()}
        return of_weights, {name: g * weights[name] * scores[name].sign() for name, g in outer.items()}

    return {name: weights[name] * masks[name] for name in weights}, gradients, masks


@pytest.mark.parametrize("optimizer", ["sgdm", "adamw"])
def test_steps_are_those_of_the_published_rule(optimizer: str) -> None:
    """Two tasks in float64, a linear-ReLU network: forward, gradients and update written out."""
    random = Randomness.of(3, CPU)
    changes = {"optimizer": optimizer, "lr": 0.02, "capacity": 0.4}
    job = tiny.job("wsn", **changes)
    classes = [3, 3]
    spec = tiny.NETWORK
    model = build(spec, (1, 6, 6), classes, "batch", weights=random.weights, dropout=random.step, device=CPU).double()
    model.dropout.p = 0.0
    method = wsn.Wsn(Context(model, job.settings, job.settings, 2, random, CPU))
    mine = {name: weight.detach().clone() for name, weight in method.weights.items()}
    scores = {name: score.detach().clone() for name, score in method.scores.items()}
    used = {name: torch.zeros_like(weight) for name, weight in mine.items()}
    generator = Generator().manual_seed(5)
    for task in range(2):
        lesson = TaskData((task,), None)  # type: ignore[arg-type]
        method.before_task(lesson)
        trained = method.parameters(lesson)
        engine = make(job.settings, trained, torch.tensor(0.02, dtype=torch.float64))
        head = model.heads[task].weight.detach().clone()
        memory: dict[str, tuple[Tensor, Tensor]] = {}
        for step in range(1, 5):
            images = torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64)
            batch = Batch(images, torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]), task)
            model.train()
            engine.zero_grad()
            method.gradients(batch, trained, sam=False)
            method.after_backward(batch)
            engine.step()
            method.after_step(batch)
            effective, gradients, masks = restated(mine, scores, used, 0.4)
            leaves = {name: value.requires_grad_() for name, value in {**effective, "head": head.clone()}.items()}
            x = F.conv2d(images, leaves["conv.weight"], padding=1)
            x = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
            x = F.max_pool2d(x.relu(), 2).flatten(1)
            x = F.linear(x, leaves["fc.weight"], leaves["fc.bias"]).relu() @ leaves["head"].mT
            loss = -x.log_softmax(1)[torch.arange(8), batch.labels].mean()
            outer = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            of_head = outer.pop("head")
            of_weights, of_scores = gradients(outer)
            parts = ("w", mine, of_weights), ("s", scores, of_scores), ("h", {"": head}, {"": of_head})
            for kind, values, found in parts:
                for name, g in found.items():
                    zeros = torch.zeros_like(g), torch.zeros_like(g)
                    first, second = memory.get(f"{kind}{name}", zeros)
                    if optimizer == "sgdm":
                        first = 0.9 * first + g
                        values[name] = values[name] - 0.02 * first
                    else:
                        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
                        corrected = (second / (1 - 0.999**step)).sqrt() + 1e-8
                        values[name] = values[name] - 0.02 * (first / (1 - 0.9**step)) / corrected
                    memory[f"{kind}{name}"] = first, second
                    if kind == "h":
                        head = values[name]
            for name, weight in method.weights.items():
                torch.testing.assert_close(weight.detach(), mine[name], rtol=1e-6, atol=1e-9)
                torch.testing.assert_close(method.scores[name].detach(), scores[name], rtol=1e-6, atol=1e-9)
        method.after_task(lesson)
        _, _, masks = restated(mine, scores, used, 0.4)
        used = {name: torch.maximum(used[name], masks[name]) for name in used}
        for name, weight in method.weights.items():
            assert torch.equal(unpacked(method.masks[task][name], weight.shape).double(), masks[name])
            assert torch.equal(method.free[name].double(), 1 - used[name])


def test_gradients_by_hand() -> None:
    weight, scores = torch.tensor([2.0, -3.0, 5.0, 7.0]), torch.tensor([-4.0, 1.0, 3.0, -0.5])
    weight.requires_grad_()
    scores.requires_grad_()
    mask = winners(scores, 0.5)
    assert mask.tolist() == [True, False, True, False]
    moving = mask & torch.tensor([False, True, True, True])  # the first is another task's
    effective = wsn.Subnetwork.apply(weight, scores, mask, moving, 10.0)
    assert effective.tolist() == [2.0, 0.0, 5.0, 0.0]
    (effective * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert weight.grad.tolist() == [0.0, 0.0, 3.0, 0.0]
    assert scores.grad.tolist() == [-20.0, -60.0, 150.0, -280.0]  # 10 · g · w · sign(s), losers too


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-9, 9, width=16), min_size=1, max_size=40),
    share=st.floats(0, 1),
    kind=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_the_smallest_are_those_that_sorting_finds(values: list[float], share: float, kind: torch.dtype) -> None:
    found = torch.tensor(values, dtype=kind)
    rank = round(share * (len(values) - 1))
    assert smallest(found, rank).tolist() == [found.sort().values[rank].item()]


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 60), capacity=st.floats(0.001, 1), seed=st.integers(0, 9999))
def test_a_mask_has_its_share_and_costs_a_bit_a_weight(count: int, capacity: float, seed: int) -> None:
    scores = torch.randn(count, generator=Generator().manual_seed(seed))
    mask = winners(scores, capacity)
    assert int(mask.sum()) == count - round((1 - capacity) * (count - 1)) >= 1
    assert scores.abs()[mask].min() >= scores.abs()[~mask].max() if not mask.all() else True
    bits = packed(mask)
    assert (bits.dtype, bits.shape) == (torch.uint8, (math.ceil(count / 8),))
    assert torch.equal(unpacked(bits, mask.shape), mask)


def test_masks_keep_the_shape_of_convolutions_in_any_memory_format() -> None:
    mask = torch.rand(3, 4, 3, 3, generator=Generator().manual_seed(0)) > 0.5
    laid_out = mask.to(memory_format=torch.channels_last)
    assert torch.equal(packed(laid_out), packed(mask))
    assert torch.equal(unpacked(packed(laid_out), mask.shape), mask)


def test_what_is_kept_is_a_bit_a_weight_and_task_and_the_scores() -> None:
    one = tiny.to_the_end(tiny.trainer("wsn", epochs=1))
    tensors, _ = one.method.state()
    weights = one.method.weights.values()
    bits = sum(value.numel() for name, value in tensors.items() if name.startswith("mask"))
    assert bits == 3 * sum(math.ceil(weight.numel() / 8) for weight in weights)
    assert {value.dtype for name, value in tensors.items() if name.startswith("mask")} == {torch.uint8}
    held = sum(value.numel() * value.element_size() for value in tensors.values())
    assert held == bits + 4 * sum(weight.numel() for weight in weights)
    assert held <= wsn.kept_at_most(sizes_of(one.context.model, 3, (1, 6, 6)), one.context.own)


def test_the_record_says_what_is_in_use_and_what_is_reused() -> None:
    one = tiny.to_the_end(tiny.trainer("wsn", epochs=1, capacity=0.5))
    claimed = [note["claimed"] for note in one.notes]
    assert claimed[0] == pytest.approx(0.5, abs=0.01)
    assert claimed == sorted(claimed)
    assert one.notes[0]["reused"] == 0
    assert all(0 < note["reused"] <= 1 for note in one.notes[1:])
    whole = tiny.to_the_end(tiny.trainer("wsn", epochs=1, capacity=1.0))
    assert [note["claimed"] for note in whole.notes] == [1.0] * 3
    assert whole.notes[1]["reused"] == 1.0  # nothing is left to train but heads


def test_the_mask_is_that_of_the_scores_validation_chose() -> None:
    one = tiny.trainer("wsn", epochs=8, optimizer="sgdm", lr=0.3, score_gain=1000.0, patience=12)
    best, kept, last = math.inf, {}, {}
    one.advance()
    while one.at < 1:
        facts = one.advance()
        if facts.kind != "epoch":
            continue
        last = {name: winners(scores, 0.5) for name, scores in one.method.scores.items()}
        if facts.facts["valid_loss"] < best:
            best, kept = facts.facts["valid_loss"], last
    found = {name: unpacked(one.method.masks[0][name], mask.shape) for name, mask in kept.items()}
    assert all(torch.equal(found[name], mask) for name, mask in kept.items())
    assert any(not torch.equal(last[name], mask) for name, mask in kept.items())


@pytest.mark.parametrize("changes", [{"norm": "stored"}, OPTIMIZERS["adam and decay"], OPTIMIZERS["sam and decay"]])
def test_taken_up_in_the_middle_of_a_later_task(changes: dict[str, Any], tmp_path: Any) -> None:
    whole = tiny.trainer("wsn", **changes)
    while whole.at < 1 or whole.learning is None or whole.learning.epoch < 1:
        whole.advance()
    cut = checkpoint.write(tmp_path, *whole.state())
    later = tiny.trainer("wsn", **changes)
    later.load_state(*checkpoint.read(cut))
    assert tiny.same(tiny.to_the_end(later), tiny.to_the_end(whole))
    mine, theirs = later.method.state()[0], whole.method.state()[0]
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("network", "benchmark", "shape"),
    [
        ("digits", "digits", (1, 8, 8)),
        ("alexnet", "cifar100", (3, 32, 32)),
        ("resnet18-32", "five-datasets", (3, 32, 32)),
    ],
)
def test_on_the_papers_networks_every_layer_is_masked_and_the_next_task_changes_nothing(
    network: str, benchmark: str, shape: tuple[int, ...]
) -> None:
    random = Randomness.of(1, CPU)
    spec = registry.all_networks()[network]
    model = build(spec, shape, [3, 3], "batch", weights=random.weights, dropout=random.step, device=CPU)
    job = resolve("wsn", benchmark)
    method = wsn.Wsn(Context(model, job.settings, job.settings, 2, random, CPU))
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d) and not n.startswith("heads")}
    assert {name.rpartition(".")[0] for name in method.weights} == layers
    generator = Generator().manual_seed(0)
    old = Batch(torch.randn(6, *shape, generator=generator), torch.tensor([0, 1, 2] * 2), 0)
    found: list[Tensor] = []
    weights: list[dict[str, Tensor]] = []
    for task in (0, 1):
        lesson = TaskData((task,), None)  # type: ignore[arg-type]
        method.before_task(lesson)
        trained = method.parameters(lesson)
        engine = make(job.settings, trained, torch.tensor(0.01))
        for _ in range(2):
            model.train()
            engine.zero_grad()
            new = Batch(torch.randn(6, *shape, generator=generator), old.labels, task)
            method.gradients(new, trained, sam=False)
            engine.step()
            method.after_step(new)
        method.after_task(lesson)
        model.eval()
        found.append(method.logits(old).detach())
        weights.append({name: weight.detach().clone() for name, weight in method.weights.items()})
    assert torch.equal(found[1], found[0])
    moved = {name for name, weight in weights[1].items() if not torch.equal(weight, weights[0][name])}
    assert moved >= {name for name in method.weights if name.endswith("weight")}


def test_learns_two_turns_of_real_digits_and_forgets_nothing() -> None:
    job = resolve("wsn", "digits", changes={"epochs": 6})
    one = Trainer(job.method, registry.all_networks()["digits"], job.load(1, None), job.settings, 1)
    while one.at < 2:
        one.advance()
    assert one.matrix[1][0] == one.matrix[0][0]
    assert min(one.matrix[0][0], one.matrix[1][1]) > 85


def test_presets_and_bad_settings() -> None:
    for benchmark, least, most in (("cifar100", 1e-6, 200), ("five-datasets", 1e-5, 100), ("mini-imagenet", 1e-5, 100)):
        found = resolve("wsn", benchmark, "reference").settings
        assert (found.optimizer, found.lr, found.lr_min, found.epochs) == ("adamw", 1e-3, least, most)
        assert (found.patience, found.lr_factor, found.weight_decay, found.batch) == (6, 2.0, 0.0, 64)
        assert (found.capacity, found.score_gain) == (0.5, 1.0)
        for preset in ("fixed", "paper"):
            own = resolve("wsn", benchmark, preset).settings
            assert (own.optimizer, own.lr, own.lr_min) == ("adamw", 1e-3, least)
    for changes, message in (
        ({"capacity": 0.0}, "capacity is 0, expected a share above 0"),
        ({"capacity": 1.5}, "capacity is 1.5, expected"),
        ({"score_gain": 0.0}, "score_gain is 0, expected"),
    ):
        with pytest.raises(NessError, match=message):
            tiny.job("wsn", **changes)
