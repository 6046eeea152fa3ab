"""On a GPU: a constrained step can be captured, lanes change nothing, fast is right (`make test-gpu`)."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ness
import tiny
from helpers import ZOO
from ness.lab import registry
from ness.lab.gpu.capture import CapturedRunner, PlainRunner
from ness.lab.gpu.scheduler import side_by_side
from ness.lab.networks import norms
from ness.lab.runs import checkpoint
from ness.lab.runs.environment import repeatable
from ness.lab.training.evaluate import evaluate
from ness.lab.training.loop import Trainer
from ness.statistics.gram import gram_of_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore::ness.NessWarning"),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with repeatable(CUDA):
        yield


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("form", ["any", "sgd"])
def test_a_constrained_step_is_captured_and_equal(name: str, form: str) -> None:
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model, old, new = (part.to(CUDA) for part in ZOO[name]())
        guard = ness.NullSpace(model, rule=ness.Nuclear(0.02), exclude=["head"])
        guard.observe(old)
        guard.constrain(form=form)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(guard.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        model.train()

        def step(model: nn.Module = model, new: torch.Tensor = new, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.zero_grad()
            model(new).square().mean().backward()
            optimizer.step()

        for _ in range(3):
            step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for _ in range(5):
                graph.replay()
        else:
            for _ in range(5):
                step()
        assert guard.certificate().holds
        guard.merge()
        results.append({key: value.cpu() for key, value in model.state_dict().items()})
    for key, value in results[0].items():
        assert torch.allclose(value, results[1][key], rtol=1e-4, atol=1e-6), key


ALIKE = [
    (method, changes)
    for method in ("finetune", "frozen", "ness", "ness-plus", "agem", "ewc", "hat")
    for changes in (
        {},
        {"optimizer": "sam"},
        {"schedule": "cosine", "mixup": 0.4, "norm": "task"},
        {"optimizer": "adamw", "lr": 0.01},
    )
    if "adamw" not in changes.values() or "adamw" not in registry.all_methods()[method].refuses
]


@pytest.mark.parametrize(("method", "changes"), ALIKE, ids=str)
def test_captured_epochs_are_plain_epochs(method: str, changes: dict[str, object]) -> None:
    losses = []
    for runner in (PlainRunner(), CapturedRunner()):
        with torch.cuda.stream(torch.cuda.Stream()):
            trainer = tiny.trainer(method, epochs=2, runner=runner, device=CUDA, **changes)
            found = []
            while not trainer.done:
                event = trainer.advance()
                if event.kind == "epoch":
                    found += [event.facts["loss"], event.facts["valid_loss"]]  # validation in an order drawn anew
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


BLOCKS = [(method, {}) for method in sorted(registry.all_methods())] + [
    ("ness", {"optimizer": "sam"}),  # without a bias: the update is a parameter itself
    ("ness-plus", {"schedule": "cosine", "mixup": 0.4}),
]


@pytest.mark.parametrize(("method", "changes"), BLOCKS, ids=str)
def test_captured_epochs_of_the_kernels_are_plain_epochs(method: str, changes: dict[str, object]) -> None:
    losses = []
    for runner in (PlainRunner(), CapturedRunner()):
        with torch.cuda.stream(torch.cuda.Stream()):
            one = tiny.trainer(method, epochs=2, runner=runner, device=CUDA, network=tiny.BLOCKS, **changes)
            found = []
            while not one.done:
                event = one.advance()
                if event.kind == "epoch":
                    found += [event.facts["loss"], event.facts["valid_loss"]]
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("optimizer", ["sgdm", "adamw"])
def test_a_captured_run_goes_on_from_a_file_bit_equal(optimizer: str, tmp_path: Path) -> None:
    def fresh() -> Trainer:
        changes = {"optimizer": optimizer, "lr": 0.01}
        return tiny.trainer("ness", epochs=3, runner=CapturedRunner(), device=CUDA, network=tiny.BLOCKS, **changes)

    with torch.cuda.stream(torch.cuda.Stream()):
        whole = fresh()
        while whole.at < 1 or whole.learning is None or whole.learning.epoch < 1:
            whole.advance()  # into the second task
        cut = checkpoint.write(tmp_path, *whole.state())
        later = fresh()
        later.load_state(*checkpoint.read(cut))
        assert tiny.same(tiny.to_the_end(later), tiny.to_the_end(whole))


def test_batches_in_one_pass_are_captured_and_judged_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = tiny.trainer("finetune", norm="batch", device=CUDA)
    samples = one.data["train"][0]
    order = torch.arange(250, device=CUDA) % len(samples)
    sizes: list[int] = []
    one.context.model.norm.register_forward_hook(lambda norm, inputs, y: sizes.append(len(y)))
    evaluate(one.method, samples, order)
    assert sizes == [192, 58]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together = evaluate(one.method, samples, order)
    graph.replay()
    monkeypatch.setattr(norms, "on_gpu", lambda network: False)
    alone = evaluate(one.method, samples, order)
    assert torch.allclose(torch.stack(together), torch.stack(alone), rtol=1e-5)


@pytest.mark.parametrize("method", ["finetune", "ness", "agem", "ewc", "hat"])
@pytest.mark.parametrize("changes", [{}, {"optimizer": "sam"}], ids=str)
def test_fast_steps_are_captured_and_near_the_exact_ones(method: str, changes: dict[str, object]) -> None:
    losses = []
    for quick, runner in ((False, PlainRunner()), (True, PlainRunner()), (True, CapturedRunner())):
        with torch.cuda.stream(torch.cuda.Stream()), repeatable(CUDA, not quick):
            trainer = tiny.trainer(method, epochs=2, runner=runner, device=CUDA, fast=quick, **changes)
            found = []
            while not trainer.done:
                event = trainer.advance()
                if event.kind == "epoch":
                    found.append(event.facts["loss"])
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=0.2)
    assert losses[2] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.parametrize(
    ("groups", "count", "width"), [(1, 64 * 841, 48), (1, 64 * 144, 576), (1, 64, 700), (3, 999, 20)]
)
def test_a_gram_on_the_gpu_is_that_of_the_cpu(groups: int, count: int, width: int) -> None:
    rows = torch.randn(groups, count, width, generator=torch.Generator().manual_seed(0))
    there, here = gram_of_rows(rows.to(CUDA)).cpu(), gram_of_rows(rows)
    assert torch.allclose(there, here, rtol=1e-11, atol=1e-9)
    assert torch.equal(there, gram_of_rows(rows.to(CUDA)).cpu())


def test_observing_does_not_wait_for_the_gpu() -> None:
    torch.manual_seed(0)
    model, old, _ = (part.to(CUDA) for part in ZOO["resnet"]())
    guard = ness.NullSpace(model, exclude=["head"])
    guard.observe(old)  # libraries make their plans
    on_cpu = ness.NullSpace(copy.deepcopy(model).cpu(), exclude=["head"])
    for _ in range(2):
        on_cpu.observe(old.cpu())
    try:
        with guard.observing():
            torch.cuda.set_sync_debug_mode("error")
            model(old)
            model(old)
            torch.cuda.set_sync_debug_mode("default")  # leaving asks the GPU, once
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, gram in guard.grams.items():
        assert gram.count == 3 * on_cpu.grams[name].count // 2
        expected = 1.5 * on_cpu.grams[name].matrix
        assert torch.allclose(gram.matrix.cpu(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))  # TF32


def test_nan_on_the_gpu_leaves_the_statistics_before_it() -> None:
    model, old, _ = (part.to(CUDA) for part in ZOO["resnet"]())
    bad = old.clone()
    bad.view(-1)[5] = torch.nan
    guard, reference = ness.NullSpace(model, exclude=["head"]), ness.NullSpace(model, exclude=["head"])
    with pytest.raises(ness.NessError, match=r"\(batch 1\)"):
        guard.observe([old, bad, old])
    reference.observe([old])
    for name, gram in guard.grams.items():
        assert gram.count == reference.grams[name].count
        assert torch.equal(gram.matrix, reference.grams[name].matrix)


def _lane(seed: int, method: str) -> Trainer:
    trainer = tiny.trainer(method, seed, epochs=3, runner=CapturedRunner(), device=CUDA)
    trainer.run()
    return trainer


@pytest.mark.parametrize("method", ["finetune", "ness", "ness-plus", "agem", "ewc", "hat"])
def test_a_seed_alone_among_lanes_and_in_another_order_is_bit_equal(method: str) -> None:
    alone = [side_by_side([lambda s=s: _lane(s, method)], CUDA, 1)[0] for s in range(5)]
    together = side_by_side([lambda s=s: _lane(s, method) for s in range(5)], CUDA, 5)
    turned = side_by_side([lambda s=s: _lane(s, method) for s in reversed(range(5))], CUDA, 3)[::-1]
    for one, two, three in zip(alone, together, turned, strict=True):
        assert tiny.same(one, two)
        assert tiny.same(one, three)


@pytest.mark.parametrize("method", ["finetune", "ness", "ness-plus", "agem", "ewc", "hat"])
def test_taken_up_on_the_gpu_it_ends_bit_equal(method: str, tmp_path: Path) -> None:
    whole = tiny.to_the_end(tiny.trainer(method, epochs=3, runner=CapturedRunner(), device=CUDA))
    cut = tiny.trainer(method, epochs=3, runner=CapturedRunner(), device=CUDA)
    units = 0
    while not cut.done:
        cut.advance()
        units += 1
        if units % 3 == 0:
            tensors, manifest = cut.state()
            tensors = {name: value.cpu().clone() for name, value in tensors.items()}
            cut = tiny.trainer(method, epochs=3, runner=CapturedRunner(), device=CUDA)
            cut.load_state(tensors, manifest)
    assert tiny.same(whole, cut)
