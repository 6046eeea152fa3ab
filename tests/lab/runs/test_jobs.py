import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

import tiny
from ness import NessError
from ness.lab.benchmarks.base import Benchmark
from ness.lab.methods.base import Method, MethodSpec
from ness.lab.runs.jobs import SCHEMA, preset_values, resolve


@dataclass(frozen=True)
class Own:
    strength: float = 1.0


SPEC = MethodSpec(
    "mine",
    "for tests",
    Method,
    "nothing",
    settings=Own,
    presets={
        "fixed": {
            "*": {"strength": 2.0},
            "tiny": {"lr": 0.5, "lr_min": 0.1},
            "tiny/sam": {"lr": 0.7},
            "*/adamw": {"lr": 0.9},
        },
        "reference": {"*": {"strength": 3.0}, "tiny": {"lr": 0.6}},
    },
    refuses={"adamw": "its promise does not hold there", "cosine": "it needs early stops"},
)


def values(preset: str, optimizer: str | None = None) -> tuple[float, float, int]:
    found = preset_values(SPEC, tiny.BENCHMARK, preset, optimizer)
    return found["strength"], found["lr"], found["epochs"]


def test_the_particular_goes_before_the_general_and_presets_build_on_fixed() -> None:
    assert values("fixed") == (2.0, 0.5, 3)
    assert values("reference") == (3.0, 0.6, 3)
    assert values("paper") == (2.0, 0.5, 3)
    assert values("fixed", "sam") == (2.0, 0.7, 3)


def test_changes_by_hand_and_the_label() -> None:
    job = resolve(SPEC, tiny.BENCHMARK, "fixed", {"strength": 9.0, "optimizer": "sam"})
    assert (job.settings.strength, job.settings.lr) == (9.0, 0.7)
    assert job.label == "fixed optimizer=sam strength=9.0"


def test_the_digest_names_the_settings() -> None:
    base, same, other = (
        resolve(SPEC, tiny.BENCHMARK, changes=changes) for changes in ({}, {"strength": 2.0}, {"lr": 0.4})
    )
    assert base.digest == same.digest != other.digest
    assert resolve("finetune", tiny.BENCHMARK).digest != resolve("frozen", tiny.BENCHMARK).digest


def test_a_revised_rule_has_runs_of_its_own_and_the_first_keeps_its_name() -> None:
    first, also_first, second = (
        resolve(replace(SPEC, revision=revision), tiny.BENCHMARK) for revision in (None, lambda own: 1, lambda own: 2)
    )
    assert first.digest == also_first.digest != second.digest
    assert (first.revision, second.revision) == (1, 2)
    sam = replace(SPEC, revision=lambda own: 2 if own.optimizer == "sam" else 1)
    found = {name: resolve(sam, tiny.BENCHMARK, changes={"optimizer": name}) for name in ("sgd", "sam")}
    assert {name: job.revision for name, job in found.items()} == {"sgd": 1, "sam": 2}


def test_what_a_method_refuses_is_said_with_the_reason() -> None:
    with pytest.raises(NessError, match="mine does not go with adamw: its promise does not hold there"):
        resolve(SPEC, tiny.BENCHMARK, changes={"optimizer": "adamw"})
    with pytest.raises(NessError, match="mine does not go with cosine"):
        resolve(SPEC, tiny.BENCHMARK, changes={"schedule": "cosine"})
    with pytest.raises(NessError, match="joint does not go with mixup"):
        tiny.job("joint", mixup=0.2)


def test_a_preset_with_a_wrong_name_is_found() -> None:
    wrong = Benchmark("w", "t", "tiny", 3, tiny.load, settings={"fixed": {"epoch": 3}})
    with pytest.raises(
        NessError, match=r"preset fixed of finetune on w: no setting is called 'epoch'. Did you mean epochs\?"
    ):
        resolve("finetune", wrong)
    with pytest.raises(NessError, match=r"no preset is called 'fix'"):
        resolve("finetune", tiny.BENCHMARK, "fix")


def test_an_order_of_validation_that_decides_nothing_does_not_name_a_run() -> None:
    def digest(**changes: Any) -> str:
        return resolve("finetune", tiny.BENCHMARK, changes=changes).digest

    def before(**changes: Any) -> str:
        """As runs were named without the choice."""
        settings = resolve("finetune", tiny.BENCHMARK, changes=changes).as_dict()
        named = {name: value for name, value in settings.items() if name not in ("valid_order", "network")}
        text = json.dumps(["finetune", "tiny", SCHEMA, named], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    assert digest(valid_order="fixed") == before(valid_order="fixed") != digest()
    assert digest(schedule="cosine") == before(schedule="cosine")
    assert digest(norm="stored") == before(norm="stored")


def test_a_network_that_is_not_the_benchmarks_own_names_a_run_and_is_the_one_that_learns() -> None:
    own, narrow = (resolve("finetune", "cifar100", changes={"network": name}) for name in ("alexnet", "alexnet-eighth"))
    assert own.digest == resolve("finetune", "cifar100").digest != narrow.digest
    settings = {name: value for name, value in own.as_dict().items() if name != "network"}  # before there was a choice
    text = json.dumps(["finetune", "cifar100", SCHEMA, settings], sort_keys=True)
    assert own.digest == hashlib.sha256(text.encode()).hexdigest()[:10]
    assert (own.network, narrow.network) == ("alexnet", "alexnet-eighth")
    assert narrow.label == "fixed network=alexnet-eighth"
    with pytest.raises(NessError, match="no network is called 'alexnet-half'"):
        resolve("finetune", "cifar100", changes={"network": "alexnet-half"})
    assert resolve("finetune", "digits", changes={"network": "alexnet"}).digest != resolve("finetune", "digits").digest


@pytest.mark.parametrize(("name", "value"), [("norm", "stored"), ("schedule", "cosine")])
def test_an_order_of_validation_where_nothing_depends_on_it_is_refused(name: str, value: str) -> None:
    with pytest.raises(NessError, match=f"valid_order was set, but {name} is '{value}'"):
        resolve("finetune", tiny.BENCHMARK, changes={name: value, "valid_order": "drawn"})
