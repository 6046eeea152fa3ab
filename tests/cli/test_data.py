"""`ness data`: exit codes, the table on standard output, the rest on standard error."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from lab.datasets import making
from lab.datasets.making import CIFAR100, MINI, MNIST
from lab.datasets.test_download import Behaviour, server  # noqa: F401
from ness.cli.data import main
from ness.lab.datasets.catalogue import CATALOGUE, Remote


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of two tiny sets and no data anywhere but below tmp_path."""
    monkeypatch.delenv("NESS_DATA", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache")
    monkeypatch.setattr("ness.lab.datasets.catalogue.CATALOGUE", {s.name: s for s in (CIFAR100, MNIST, MINI)})
    monkeypatch.setattr("ness.lab.datasets.catalogue.GROUPS", {"all": ("cifar100", "mnist", "mini-imagenet")})


@pytest.mark.parametrize("argv", [[], ["fetch"], ["get"], ["check"], ["get", "nothing"], ["list", "--colour"]])
def test_wrong_use_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err


@pytest.mark.parametrize("argv", [["--help"], ["list", "--help"], ["get", "--help"], ["check", "--help"]])
def test_help_has_an_example(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert "ness data get cifar100" in capsys.readouterr().out


def test_list_shows_name_size_place_and_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    making.put(tmp_path / "d", {"cifar100.npz": making.npz_file(making.arrays(CIFAR100))})
    assert main(["list", "--data", str(tmp_path / "d")]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["name", "size", "where", "state"]
    assert str(tmp_path / "d" / "cifar100.npz") in lines[1]
    assert lines[1].endswith("not verified: no published checksum for NAME.npz")
    assert lines[2].endswith("missing")
    assert not err


def test_check_reads_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = making.idx_files(making.arrays(MNIST), MNIST)
    monkeypatch.setattr("ness.lab.datasets.catalogue.CATALOGUE", {"mnist": making.verified(MNIST, files)})
    making.put(tmp_path / "mnist", files)
    assert main(["check", "mnist", "--data", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("verified")
    bad = tmp_path / "mnist" / "train-images-idx3-ubyte"
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    assert main(["check", "mnist", "--data", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[1].endswith("broken")
    assert "found MD5" in err
    assert main(["list", "mnist", "--data", str(tmp_path)]) == 0
    assert "broken" in capsys.readouterr().out


def test_an_npz_of_mnist_can_be_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = making.arrays(MNIST)
    known = making.verified(MNIST, making.idx_files(data, MNIST))
    monkeypatch.setattr("ness.lab.datasets.catalogue.CATALOGUE", {"mnist": known})
    making.put(tmp_path, {"mnist.npz": making.npz_file(data)})
    assert main(["check", "mnist", "--data", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith(" verified")
    making.put(tmp_path, {"mnist.npz": making.npz_file(making.arrays(MNIST, 1))})
    assert main(["list", "mnist", "--data", str(tmp_path)]) == 0
    assert "other contents" in capsys.readouterr().out
    making.put(tmp_path, {"mnist.npz": b"broken"})
    assert main(["list", "mnist", "--data", str(tmp_path)]) == 0
    assert "broken" in capsys.readouterr().out


def test_list_tells_repacked_archives_from_published_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = making.arrays(CIFAR100)
    raw = making.cifar_archive(data, CIFAR100)
    known = making.verified(CIFAR100, making.cifar_batches(data, CIFAR100))
    making.put(tmp_path, {"cifar-100-python.tar.gz": raw})
    for md5, state in ((hashlib.md5(raw).hexdigest(), " verified"), ("0" * 32, "`ness data check` looks inside")):
        file = replace(CIFAR100.files[0], md5=md5)
        monkeypatch.setattr("ness.lab.datasets.catalogue.CATALOGUE", {"cifar100": replace(known, files=(file,))})
        assert main(["list", "cifar100", "--data", str(tmp_path)]) == 0
        assert capsys.readouterr().out.splitlines()[1].endswith(state)
        assert main(["check", "cifar100", "--data", str(tmp_path)]) == 0
        assert capsys.readouterr().out.splitlines()[1].endswith(" verified")


def test_check_of_what_is_missing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cifar100", "--data", str(tmp_path)]) == 1
    assert "missing" in capsys.readouterr().out


def test_get_downloads_once(
    server: Behaviour,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = making.arrays(CIFAR100)
    raw = making.cifar_archive(data, CIFAR100)
    server.files["/a.tar.gz"] = raw
    file = Remote("cifar-100-python.tar.gz", (f"{server.url}/a.tar.gz",), len(raw), hashlib.md5(raw).hexdigest())
    known = making.verified(replace(CIFAR100, files=(file,)), making.cifar_batches(data, CIFAR100))
    monkeypatch.setattr("ness.lab.datasets.catalogue.CATALOGUE", {"cifar100": known})
    for _ in range(2):
        assert main(["get", "cifar100", "--data", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].endswith(" verified")
    assert err.count("bytes") == 1
    assert len(server.requests) == 1


def test_get_of_what_cannot_be_downloaded_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "mini-imagenet", "--data", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "ImageNet's terms" in err
    assert "missing" in out


def test_the_real_catalogue_is_complete() -> None:
    assert set(CATALOGUE) == {"cifar100", "cifar10", "mnist", "svhn", "fashion-mnist", "notmnist", "mini-imagenet"}
    for data_set in CATALOGUE.values():
        assert data_set.files or data_set.advice
        for file in data_set.files:
            assert file.size > 0
            assert file.md5 or data_set.name == "notmnist"
