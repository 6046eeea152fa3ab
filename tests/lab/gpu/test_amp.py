"""`--fast`: every method trains in bfloat16, and what it leaves is another setting."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
from ness import NessError
from ness.cli.main import main
from ness.lab import registry
from ness.lab.benchmarks.base import Split, Task
from ness.lab.gpu import amp
from ness.lab.networks.base import build
from ness.lab.runs.environment import repeatable
from ness.lab.runs.jobs import resolve
from ness.lab.training.loader import on_device, together
from ness.report.records import from_result
from ness.report.table import rows

METHODS = sorted({*registry.all_methods()} - {"osf"})  # PEFT's hooks are in float32: refused
VARIANTS = {"": {}, "sam": {"optimizer": "sam"}, "stored": {"norm": "stored"}, "mix-up": {"mixup": 0.4}}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_in_bfloat16(method: str, variant: str) -> None:
    refused = registry.all_methods()[method].refuses
    changes = {
        name: value for name, value in VARIANTS[variant].items() if name not in refused and str(value) not in refused
    }
    one = tiny.trainer(method, fast=True, epochs=1, batch=28, **changes)  # two steps a task
    products: set[torch.dtype] = set()
    for module in one.context.model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, args, out: products.add(out.dtype))
    tiny.to_the_end(one)
    assert products == {torch.bfloat16, torch.float32}  # steps; evaluation and statistics
    state = one.context.model.state_dict()
    assert {value.dtype for value in state.values()} <= {torch.float32, torch.int64}
    assert all(bool(torch.isfinite(value).all()) for value in state.values() if value.is_floating_point())


def test_osf_is_refused_with_the_reason() -> None:
    with pytest.raises(NessError, match="leave out --fast"):
        tiny.trainer("osf", fast=True)


def test_fast_training_learns_what_exact_training_learns() -> None:
    exact, quick = (tiny.to_the_end(tiny.trainer("ness", fast=quick)) for quick in (False, True))
    assert not tiny.same(exact, quick)
    assert quick.matrix[0][0] == pytest.approx(exact.matrix[0][0], abs=20.0)
    certificate = quick.method.guard.certificate()  # type: ignore[attr-defined]
    assert certificate.holds
    assert {gram.matrix.dtype for gram in quick.method.guard.grams.values()} == {torch.float64}  # type: ignore[attr-defined]


def test_sams_second_pass_sees_the_moved_weights() -> None:
    one = tiny.trainer("finetune", fast=True, optimizer="sam", rho=50.0)
    one.advance()
    assert one.learning is not None
    losses: list[torch.Tensor] = []
    plain = one.method.loss
    one.method.loss = lambda batch: losses.append(plain(batch)) or losses[-1]  # type: ignore
    one.learning.step(one.open_epoch()[0])
    first, second = (float(loss.detach()) for loss in losses)
    assert abs(first - second) > 0.1 * first


def test_it_is_another_setting() -> None:
    exact, quick = (resolve("ness", "digits", fast=asked) for asked in (False, True))
    assert exact.digest != quick.digest
    assert exact.as_dict() == quick.as_dict()
    assert (exact.label, quick.label) == ("fixed", "fixed fast")


def result(method: str, quick: bool) -> dict[str, object]:
    job = resolve(method, "digits", fast=quick)
    return {
        "benchmark": "digits", "method": method, "setting": job.label, "digest": job.digest, "preset": "fixed",
        "seed": 1, "tasks": ["a", "b"], "accuracy": [[90.0, None], [80.0, 70.0]], "total_seconds": 1.0,
        "peak_memory": None, "version": "1", "fast": quick,
    }  # fmt: skip


def test_fast_and_exact_records_never_meet_in_a_mean() -> None:
    records = [from_result(result(method, quick), "x") for method in ("ness", "alone") for quick in (False, True)]
    table = rows(records)
    assert [(row.method, row.setting, row.seeds) for row in table] == [
        (method, setting, (1,)) for method in ("ness", "alone") for setting in ("fixed", "fixed fast")
    ]
    (exact, *_) = rows([from_result(result("ness", False), "x"), from_result(result("alone", True), "x")])
    assert exact.forward is None  # the ceiling was measured fast


def on_a_cpu_with(monkeypatch: pytest.MonkeyPatch, *, avx512_bf16: bool = False, amx: bool = False) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)


def test_where_it_brings_nothing_it_is_refused_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_cpu_with(monkeypatch)
    assert main(["run", "--method", "finetune", "--fast", "--out", str(tmp_path / "runs")]) == 1
    assert "this CPU has no instructions for it (expected avx512_bf16 or AMX)" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    amp.check(torch.device("cuda"))
    with pytest.raises(NessError, match="the device is meta"):
        amp.check(torch.device("meta"))


@pytest.mark.parametrize("has", ["avx512_bf16", "amx"])
def test_a_cpu_that_multiplies_in_bfloat16_takes_it(has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu_with(monkeypatch, **{has: True})
    amp.check(torch.device("cpu"))


@pytest.mark.parametrize("quick", [False, True])
def test_on_a_cpu_images_and_kernels_lie_channels_last_only_if_fast(quick: bool) -> None:
    one = tiny.trainer("finetune", fast=quick)
    assert {samples.channels_last for held in one.data.values() for samples in held} == {quick}
    colours = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    task = Task("colours", 2, colours, colours, colours, (0.5,), (0.5,))
    samples = on_device(colours, task, 0, torch.device("cpu"), quick)
    for each in (samples, together([samples, samples])):
        images = each.take(torch.arange(4)).images
        assert images.is_contiguous(memory_format=torch.channels_last) == quick
    generator = torch.Generator().manual_seed(1)
    made = {"weights": generator, "dropout": generator, "device": torch.device("cpu"), "channels_last": quick}
    network = build(registry.all_networks()["alexnet"], (3, 32, 32), [2], "batch", **made)
    weight = network.get_parameter("conv2.conv.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last) == quick


def test_on_a_cpu_a_seed_gives_the_same_bits_twice_and_resumed() -> None:
    one, two = (tiny.trainer("ness", fast=True, epochs=2) for _ in range(2))
    tiny.to_the_end(one)
    two.advance()
    two.advance()
    three = tiny.trainer("ness", fast=True, epochs=2)
    three.load_state(*two.state())
    assert tiny.same(one, tiny.to_the_end(three))


def test_kernels_are_chosen_by_trial_only_where_bits_do_not_matter() -> None:
    flags = torch.backends.cudnn
    before = flags.deterministic, flags.benchmark
    for wanted in (True, False):
        with repeatable(torch.device("cuda"), wanted):
            assert (flags.deterministic, flags.benchmark) == (wanted, not wanted)
        assert (flags.deterministic, flags.benchmark) == before


def test_a_record_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make_known(monkeypatch)
    command = ["run", "--benchmark", "tiny", "--method", "finetune", "--epochs", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    monkeypatch.setattr(amp, "check", lambda device: None)
    assert main([*command, "--fast"]) == 0
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/result.json"))]
    assert sorted((one["fast"], one["setting"]) for one in found) == [
        (False, "fixed epochs=1"),
        (True, "fixed epochs=1 fast"),
    ]
