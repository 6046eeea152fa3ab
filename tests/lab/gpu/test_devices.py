"""`--device auto`, decided from what the GPUs say, without a GPU."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from ness.cli.main import main
from ness.lab import registry
from ness.lab.gpu import devices
from ness.lab.gpu.devices import GIB, GPU, MOST_LANES, NEED, choose, need_of


def gpu(free: float, total: float = 24, name: str = "GPU") -> GPU:
    return GPU(name, int(free * GIB), int(total * GIB))


def test_no_gpu_is_the_cpu() -> None:
    assert choose([], 2 * GIB, 5) == devices.Choice("cpu", None, "auto: cpu (no GPU found)")


def test_a_free_gpu_takes_as_many_lanes_as_there_are_runs() -> None:
    found = choose([gpu(138, 139, "NVIDIA H200")], 2 * GIB, 3)
    assert (found.device, found.lanes) == ("cuda:0", 3)
    assert found.why == "auto: cuda:0, NVIDIA H200, 138 of 139 GiB free, 3 lanes"
    assert choose([gpu(138)], 2 * GIB, 40).lanes == MOST_LANES


def test_a_small_gpu_takes_fewer_lanes_and_says_so() -> None:
    found = choose([gpu(5.5, 6)], 2 * GIB, 5)
    assert found.lanes == 2
    assert found.why == "auto: cuda:0, GPU, 5.5 of 6 GiB free, 2 lanes (5 would need 10 GiB)"
    assert choose([gpu(3, 6)], 2 * GIB, 5).why.endswith("3 of 6 GiB free, 1 lane (5 would need 10 GiB)")


def test_a_busy_gpu_is_left_alone_and_named() -> None:
    found = choose([gpu(1.2)], 2 * GIB, 5)
    assert (found.device, found.lanes) == ("cpu", None)
    assert found.why == "auto: cpu (cuda:0, GPU, 1.2 of 24 GiB free; one run may need 2)"


def test_of_several_cards_the_freest_is_taken() -> None:
    found = choose([gpu(4, name="A"), gpu(20, name="B"), gpu(7, name="C")], 2 * GIB, 5)
    assert found.device == "cuda:1"
    assert ", B, " in found.why


def test_lanes_that_were_asked_for_are_kept_to_as_far_as_memory_goes() -> None:
    assert choose([gpu(138)], 2 * GIB, 20, asked=12).lanes == 12
    assert choose([gpu(9)], 2 * GIB, 20, asked=12).lanes == 4


@given(st.lists(st.floats(0, 200), max_size=4), st.floats(0.5, 16), st.integers(1, 100), st.none() | st.integers(1, 50))
def test_what_is_chosen_fits(free: list[float], need: float, runs: int, asked: int | None) -> None:
    found = choose([gpu(each, 200) for each in free], int(need * GIB), runs, asked)
    if found.lanes is None:
        assert found.device == "cpu"
        assert all(int(each * GIB) < int(need * GIB) for each in free)
    else:
        index = int(found.device.removeprefix("cuda:"))
        assert found.lanes * int(need * GIB) <= int(free[index] * GIB) == int(max(free) * GIB)
    assert "\n" not in found.why


def test_every_network_of_ours_has_a_need() -> None:
    assert set(NEED) == set(registry.all_networks())
    assert need_of(["digits", "alexnet"]) == NEED["alexnet"]
    assert need_of(["somebody's"]) == devices.UNKNOWN_NEED


@pytest.mark.skipif(bool(devices.gpus()), reason="there is a GPU here")
def test_the_command_says_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.make_known(monkeypatch)
    command = ["run", "--benchmark", "tiny", "--method", "finetune", "--epochs", "1", "--out", str(tmp_path)]
    assert main([*command, "--device", "auto"]) == 0
    said = capsys.readouterr()
    assert "auto: cpu (no GPU found)\n" in said.err
    assert "auto" not in said.out
    assert main([*command, "--device", "cuda", "--again"]) == 2
    assert "ness: --device cuda: torch sees no GPU here" in capsys.readouterr().err
