"""`ness list methods`: what every method keeps, and how much of it on CIFAR-100's AlexNet, computed."""

import re

import pytest

from ness.cli.list import amount, benchmarks, methods, networks, plans_known, sizes_on
from ness.lab import registry


def test_sizes_are_those_of_the_papers_alexnet() -> None:
    sizes = sizes_on("cifar100")
    assert sizes.layers == ((64, 48), (128, 576), (256, 512), (2048, 1024), (2048, 2048))
    assert sizes.linear == (False, False, False, True, True)
    assert (sizes.tasks, sizes.parameters, sizes.image) == (10, 6_713_216, 3072)


def test_amounts_follow_from_the_sizes() -> None:
    sizes, known = sizes_on("cifar100"), registry.all_methods()
    squares = 48**2 + 576**2 + 512**2 + 1024**2 + 2048**2
    assert amount(known["gpm"], sizes) == f"≤ {4 * squares / 1e6:,.1f} MB"
    assert amount(known["owm"], sizes) == f"≤ {8 * squares / 1e6:,.1f} MB"
    convolutions = 64 * 48 + 128 * 576 + 256 * 512
    factors = 25 * (1024 + 2048) + 25 * 25 * (2048 + 2048)  # instead of 25 · (1024 + 2048) · 2048
    held = 4 * 9 * (25 * convolutions + factors) + 2 * 8 * (9 * 25) ** 2
    assert amount(known["ogd"], sizes) == f"≤ {held / 1e6:,.1f} MB"
    assert amount(known["finetune"], sizes) == "0"
    assert amount(known["joint"], sizes) == ""


def test_the_lists_fit_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for text in (methods(), benchmarks(), networks(), plans_known()):
        assert max(map(len, text.splitlines())) <= 80


def test_every_method_has_a_line_with_its_paper_and_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    lines = {line.split()[0]: line for line in methods().splitlines() if line}
    for name, spec in registry.all_methods().items():
        assert spec.keeps in lines[name]
        assert not spec.paper or f"{spec.paper} ({spec.year})" in lines[name]
    assert "some, kept" in lines["fsdgpm"]
    assert "by setting" in lines["ness"]


def test_networks_name_the_benchmarks_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert re.search(r"^alexnet +AlexNet variant of the GPM lineage, 32×32 +cifar100$", networks(), re.M)
    assert re.search(r"^resnet18-32 .* five-datasets, folder$", networks(), re.M)


def test_plans_name_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert re.search(r"^paper-cifar100 .* ness table --plan paper-cifar100$", plans_known(), re.M)
    assert re.search(r"^language-smollm2-email .* ness study language-smollm2-email$", plans_known(), re.M)
