from ness.lab import registry
from ness.lab.runs.jobs import resolve
from ness.report.paper import number_for, numbers
from ness.report.table import rows
from report.making import record


def test_every_number_has_a_benchmark_of_ours_and_is_found_by_its_own_settings() -> None:
    for one in numbers():
        assert one.benchmark in registry.all_benchmarks()
        settings = {key: 1e-4 if value is True else value for key, value in one.when.items()}
        assert number_for(one.method, one.benchmark, settings) is one
    assert len({(one.method, one.benchmark, str(one.when)) for one in numbers()}) == len(numbers()) == 49


def test_beside_ours_only_where_optimizer_and_decay_agree() -> None:
    settings = {"optimizer": "sgdm", "weight_decay": 0.0, "lr": 0.01}
    (row,) = rows([record("ness", benchmark="cifar100", settings=settings)])
    assert row.paper is not None
    assert row.paper.bwt == (-0.28, 0.22)
    assert rows([record("ness", benchmark="cifar100", settings={"optimizer": "adamw"})])[0].paper is None


def test_what_a_number_depends_on_are_settings_of_its_method() -> None:
    for one in numbers():
        assert set(one.when) <= set(resolve(one.method, one.benchmark).as_dict()), one


def test_the_best_row_of_dfgp_finds_its_number() -> None:
    settings = resolve("dfgp", "cifar100", changes={"mix_weight": 0.05}).as_dict()
    found = number_for("dfgp", "cifar100", settings)
    assert found is not None
    assert found.acc == (73.77, 0.33)
