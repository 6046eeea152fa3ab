import pytest
import torch

from ness import NessError
from ness.lab.runs.environment import choose_device, cpu_threads, describe, peak_memory


def test_describes_without_names_of_hosts_or_folders() -> None:
    found = describe(torch.device("cpu"))
    assert set(found) == {"ness", "python", "torch", "platform", "device", "threads"}
    assert peak_memory(torch.device("cpu")) > 10_000_000


def test_devices_that_are_not_there() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda")
    with pytest.raises(NessError, match="no device is called 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(NessError, match=r"--device cuda: torch sees no GPU here.*or use --device cpu, or auto"):
            choose_device("cuda")


def test_a_gpu_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1").index == 1
    with pytest.raises(NessError, match="--device cuda:2: there are 2 GPUs, counted from cuda:0"):
        choose_device("cuda:2")


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    for wanted, size, inside in ((0, 100, 1), (0, 10**7, before), (2, 100, 2)):
        with cpu_threads(wanted, size):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == before
    with pytest.raises(NessError, match="expected 0 or more"), cpu_threads(-1, 100):
        pass
