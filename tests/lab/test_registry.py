import sys
from importlib.metadata import EntryPoint

import pytest

import tiny
from ness import NessError
from ness.lab import methods, registry
from ness.lab.methods.base import Method, MethodSpec

SPEC = MethodSpec("mine", "for tests", Method, "nothing")


def test_every_file_is_found() -> None:
    assert {"finetune", "frozen", "joint", "ness", "alone"} <= set(registry.all_methods())
    assert "digits" in registry.all_benchmarks()
    assert {"alexnet", "resnet18-32", "resnet18-84", "digits"} <= set(registry.all_networks())


def test_every_benchmark_names_a_network_and_every_preset_resolves() -> None:
    from ness.lab.runs.jobs import resolve

    for benchmark in registry.all_benchmarks().values():
        assert benchmark.network in registry.all_networks()
        for method in registry.all_methods():
            for preset in ("fixed", "reference", "paper"):
                assert resolve(method, benchmark, preset).settings.epochs >= 1


def test_a_new_method_is_one_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "brandnew.py").write_text(
        "from ness.lab.methods.base import Method, MethodSpec\n"
        "METHOD = MethodSpec(name='brand-new', title='t', build=Method, keeps='nothing')\n"
    )
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    registry.all_methods.cache_clear()
    try:
        assert registry.find("method", "brand-new", registry.all_methods()).title == "t"
    finally:
        sys.modules.pop("ness.lab.methods.brandnew", None)
        registry.all_methods.cache_clear()


def test_an_entry_point_of_another_distribution(monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["tiny"], "SPEC", SPEC, raising=False)
    points = [EntryPoint("x", "tiny:SPEC", "ness.methods"), EntryPoint("y", "tiny:NOTHING", "ness.methods")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points[:1])
    assert [spec for _, spec in registry.outside("ness.methods")] == [SPEC]
    monkeypatch.setattr(registry, "entry_points", lambda group: points[1:])
    with pytest.raises(NessError, match=r"tiny:NOTHING.*cannot be loaded"):
        list(registry.outside("ness.methods"))


def test_twice_the_same_name_or_another_kind() -> None:
    with pytest.raises(NessError, match="'mine' is in here and in there"):
        registry.collect(MethodSpec, [("here", SPEC), ("there", SPEC)])
    with pytest.raises(NessError, match="there: found a Benchmark, expected a MethodSpec"):
        registry.collect(MethodSpec, [("there", tiny.BENCHMARK)])


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(NessError, match=r"no benchmark is called 'digit'.*Did you mean digits\?"):
        registry.find("benchmark", "digit", registry.all_benchmarks())
