"""A study on a tiny model: what it measures, what it writes, and what it refuses."""

import contextlib
import dataclasses
import json
import types

import pytest
import torch
from torch import nn

from ness import _sealed
from ness.errors import NessError
from ness.lab.language import methods, study
from ness.lab.language.measure import loss_and_change, predictions
from ness.lab.language.models import LanguageModel

VOCABULARY = 23


class Tiny(nn.Module):
    """Predicts the next token from the one before, through two linear layers in a block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.block = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return types.SimpleNamespace(logits=self.head(hidden + self.block(hidden)))


@pytest.fixture
def material():
    torch.manual_seed(0)
    model = Tiny().eval()
    language = LanguageModel("tiny", model, lambda text: [ord(letter) % VOCABULARY for letter in text], 1, 2)
    text = [torch.randint(VOCABULARY, (12, 10)) for _ in range(6)]
    new, old, own, *held = text
    return study.Material(
        language, new, old, own, {"new": held[0], "other": held[1]}, {"new": held[0], "other": held[2]}
    )


def plan(**changes):
    rows = (
        study.Row("full", "full", (0.05,), {}, wise=(0.5,)),
        study.Row("replay", "replay", (0.05,), {}),
        study.Row("NESS", "null-space", (0.05,), {"rule": "energy", "value": 0.5}, statistics="self"),
    )
    made = study.Plan("tiny", "tiny", "x", "y", ("other",), (1, 2), rows, batch=4, steps=3, seen=4)
    return dataclasses.replace(made, **changes)


def test_every_row_and_seed_becomes_one_record_and_is_not_measured_again(material, tmp_path):
    calls = []

    def given():
        calls.append(1)
        return material

    paths = study.run(plan(), "tiny", given, tmp_path)
    assert len(paths) == len(set(paths)) == 6
    before = [path.read_bytes() for path in paths]
    assert study.run(plan(), "tiny", given, tmp_path) == paths
    assert [path.read_bytes() for path in paths] == before
    assert len(calls) == 1
    record = json.loads(paths[0].read_text())
    assert record["row"]["name"] == "full"
    assert [point["after"] for point in record["points"]] == ["", "wise"]
    assert record["base"]["test"]["other"][1] == 0  # the base is not away from itself
    assert record["points"][0]["test"]["other"][1] > record["points"][1]["test"]["other"][1] > 0


def test_a_damaged_record_is_measured_again_and_said_and_every_flipped_bit_is_damage(material, tmp_path):
    rows = plan(rows=plan().rows[:1], seeds=(1,))
    (path,) = study.run(rows, "tiny", lambda: material, tmp_path)
    whole = path.read_bytes()
    content = bytearray(whole)
    for at in range(8 * len(content)):
        content[at // 8] ^= 1 << at % 8
        with contextlib.suppress(NessError):
            assert _sealed.unseal_json(bytes(content), "x") == _sealed.unseal_json(whole, "x"), at
        content[at // 8] ^= 1 << at % 8
    path.write_bytes(whole.replace(b'"seed": 1', b'"seed": 7'))
    said = []
    study.run(rows, "tiny", lambda: material, tmp_path, said.append)
    assert "damaged" in said[0]
    assert "measured again" in said[0]
    assert _sealed.read_json(path)["seed"] == 1


def test_what_is_no_file_in_the_place_of_a_record_is_refused(material, tmp_path):
    rows = plan(rows=plan().rows[:1], seeds=(1,))
    (tmp_path / "tiny" / "full-seed1.json").mkdir(parents=True)
    with pytest.raises(NessError, match="ordinary file"):
        study.run(rows, "tiny", lambda: material, tmp_path)


def test_a_method_leaves_the_base_as_it_was_and_trains_the_same_weights(material):
    base = material.language.model
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    setup = study.methods.Setup(base, material.new, material.old, 4, 3, seed=1)
    for method, options in (
        ("full", {}),
        ("replay", {}),
        ("null-space", {"rule": "energy", "value": 0.5}),
        ("weighed", {}),
    ):
        adapted = methods.METHODS[method](setup, 0.05, **options)
        assert all(torch.equal(weight, before[name]) for name, weight in base.state_dict().items())
        moved = {name for name, weight in adapted.model.state_dict().items() if not torch.equal(weight, before[name])}
        assert {name.split(".")[0] for name in moved} == {"block"}, method


def test_the_weighed_space_at_strength_0_is_all_of_it_and_a_large_strength_keeps_old_predictions(material):
    setup = methods.Setup(material.language.model, material.new, material.old, 4, 3, seed=1)
    plain = methods.METHODS["full"](setup, 0.05).model.state_dict()
    free = methods.METHODS["weighed"](setup, 0.05, strength=0.0).model.state_dict()
    assert plain.keys() == free.keys()
    for name, value in plain.items():
        torch.testing.assert_close(free[name], value, rtol=1e-3, atol=1e-4)
    base = predictions(material.language.model, material.old)
    change = [
        loss_and_change(methods.METHODS["weighed"](setup, 0.05, strength=s).model, base, material.old)[1]
        for s in (0.0, 10.0, 1e6)
    ]
    assert change[0] > change[1] > change[2]


def test_a_plans_curve_measures_the_model_on_its_way(material, tmp_path):
    paths = study.run(plan(curve=(1, 2), seeds=(1,)), "tiny", lambda: material, tmp_path)
    points = json.loads(paths[2].read_text())["points"]  # NESS, while its updates are in place
    assert [point["step"] for point in points] == [1, 2, 3]
    changes = [point["test"]["other"][1] for point in points]
    assert 0 < changes[0] < changes[2]
    shorter = study.run(plan(seeds=(1,)), "again", lambda: material, tmp_path)
    whole = json.loads(shorter[2].read_text())["points"][-1]
    assert whole["test"] == points[-1]["test"]  # looking changes nothing


def test_a_seed_decides_the_batches_for_every_method(material):
    setup = methods.Setup(material.language.model, material.new, material.old, 4, 7, seed=3)
    first, again = list(setup.data()), list(setup.data())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = list(dataclasses.replace(setup, seed=4).data())
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert [len(batch) for batch in first] == [4] * 7


def test_interpolation_runs_from_the_base_to_the_fine_tune(material):
    base = material.language.model
    tuned = Tiny()
    for share, expected in ((0.0, base), (1.0, tuned)):
        model = methods.interpolated(base, tuned, share)
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weight, expected.state_dict()[name])


def test_loss_and_change_against_their_definition(material):
    base, tuned = material.language.model, Tiny().eval()
    blocks = material.new[:3]
    logits = tuned(blocks).logits[:, :-1].log_softmax(-1)
    origin = base(blocks).logits[:, :-1].log_softmax(-1)
    loss, change = loss_and_change(tuned, predictions(base, blocks), blocks)
    targets = blocks[:, 1:, None]
    assert loss == pytest.approx(-logits.gather(-1, targets).mean().item(), rel=1e-5)
    expected = (origin.exp() * (origin - logits)).sum(-1).mean().item()
    assert change == pytest.approx(expected, rel=1e-5)
    assert loss_and_change(base, predictions(base, blocks), blocks)[1] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = [", "is not TOML"),
        ('title = "x"', "no \\[\\[row\\]\\]"),
        ('[[row]]\nname = "a"\nrate = 1', "row 1 has no method"),
        ('[[row]]\nname = "a"\nmethod = "ful"\nrate = 1', "no method is called 'ful'"),
        ('colour = 1\n[[row]]\nname = "a"\nmethod = "full"\nrate = 1', "unknown colour"),
        ('title = "x"\n[[row]]\nname = "a"\nmethod = "full"\nrate = 1', "has no domain"),
    ],
)
def test_a_plan_that_says_something_unknown_is_refused(tmp_path, text, reason):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(NessError, match=reason):
        study.read(tmp_path / "plan.toml")


def test_a_row_that_is_not_in_the_plan_is_named(tmp_path, material):
    with pytest.raises(NessError, match="no row is called fulll; there are full; replay; NESS"):
        study.run(plan(), "tiny", lambda: material, tmp_path, only=["fulll"])


@pytest.mark.parametrize("name", ["smollm2-email", "smollm2-french", "stories15m-reviews", "stories15m-general"])
def test_the_plans_of_the_repository_are_read(name, request):
    found = study.read(request.config.rootpath / "experiments" / f"language-{name}.toml")
    assert found.seeds == (1, 2, 3)
    names = {row.name for row in found.rows}
    assert {"full", "LoRA, rank 16", "OSF"} <= names or name == "stories15m-general"
