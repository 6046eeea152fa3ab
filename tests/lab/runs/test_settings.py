import dataclasses
from dataclasses import dataclass

import pytest

from ness import NessError
from ness.lab.runs.settings import Training, check_contradictions, check_training, compose, overridden, part_of


@dataclass(frozen=True)
class Own:
    eps: float = 1e-3
    seed_of_split: int | None = None
    sizes: tuple[int, ...] = (1,)


def test_compose_is_flat_and_part_of_takes_it_apart() -> None:
    kind = compose("Both", Training, Own)
    both = kind(eps=0.5, lr=0.25)
    assert part_of(both, Own) == Own(0.5)
    assert part_of(both, Training) == Training(lr=0.25)
    assert dataclasses.fields(kind)[0].metadata["help"]


def test_a_name_in_two_parts_is_refused() -> None:
    @dataclass(frozen=True)
    class Clash:
        lr: float = 1.0

    with pytest.raises(NessError, match=r"'lr' is in both Training and Clash"):
        compose("Both", Training, Clash)
    assert dataclasses.fields(compose("Both", Training, Clash, shared=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"esp": 1.0}, r"no setting is called 'esp'. Did you mean eps\?"),
        ({"eps": "big"}, "eps is 'big', a str; expected float"),
        ({"epochs": 2.5}, "epochs is 2.5, a float; expected int"),
        ({"epochs": True}, "epochs is True"),
        ({"optimizer": "adam"}, r"expected one of sgd, sgdm, sam, adamw. Did you mean adamw\?"),
        ({"seed_of_split": "x"}, "seed_of_split is 'x'"),
        ({"sizes": (1, "x")}, "sizes is 'x'"),
    ],
)
def test_wrong_changes_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(NessError, match=message):
        overridden(compose("Both", Training, Own), {}, changes, "here")


def test_an_int_is_a_float_and_none_fits_an_optional() -> None:
    made = overridden(compose("Both", Training, Own), {}, {"lr": 1, "seed_of_split": None}, "here")
    assert made.lr == 1


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"batch": 1}, {"lr": 0.0}, {"momentum": 1.0}, {"lr_factor": 1.0}, {"lr_min": 1.0}]
)
def test_values_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(NessError, match=next(iter(wrong))):
        check_training(dataclasses.replace(Training(), **wrong))


def test_a_field_that_would_be_ignored_is_refused_only_when_set_by_hand() -> None:
    needs = {"rho": ("optimizer", ("sam",))}
    with pytest.raises(NessError, match="rho was set, but optimizer is 'sgdm'"):
        check_contradictions(Training(), ["rho"], needs)
    check_contradictions(Training(), ["lr"], needs)
    check_contradictions(Training(optimizer="sam"), ["rho"], needs)
