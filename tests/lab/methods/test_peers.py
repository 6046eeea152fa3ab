"""What the field uses, as methods: lora, osf, replay, wise."""

import pytest
import torch

import tiny
from ness import NessError
from ness.lab.benchmarks.base import General
from ness.lab.methods.base import TaskData
from ness.lab.training.loader import unlabelled


@pytest.mark.parametrize("method", ["lora", "osf"])
def test_an_adapter_changes_linear_layers_alone_and_leaves_a_plain_network(method):
    one = tiny.trainer(method, epochs=2)
    names = set(one.context.model.state_dict())
    while one.at < 1:
        one.advance()
    before = {name: value.clone() for name, value in one.context.model.state_dict().items()}
    one.advance()
    assert any("lora_" in name or "osf_" in name for name, _ in one.context.model.named_parameters())
    while one.at < 2:
        one.advance()
    after = one.context.model.state_dict()
    assert set(after) == names
    moved = {name for name in names if not torch.equal(after[name], before[name])}
    assert moved == {"fc.weight", "heads.1.weight"}


def test_lora_moves_a_weight_by_no_more_than_its_rank():
    one = tiny.trainer("lora", epochs=2, rank=2)
    while one.at < 1:
        one.advance()
    before = one.context.model.fc.weight.detach().clone()
    while one.at < 2:
        one.advance()
    change = one.context.model.fc.weight.detach() - before
    assert torch.linalg.matrix_rank(change, rtol=1e-4) == 2


@pytest.mark.parametrize("method", ["lora", "osf", "wise", "replay"])
def test_taken_up_in_the_middle_of_a_task(method):
    whole = tiny.trainer(method, epochs=2)
    for _ in range(6):
        whole.advance()
    assert (whole.at, whole.learning.epoch > 0) == (1, True)
    tensors, manifest = whole.state()
    tensors = {name: value.clone() for name, value in tensors.items()}
    later = tiny.trainer(method, epochs=2)
    later.load_state(tensors, manifest)
    assert tiny.same(tiny.to_the_end(later), tiny.to_the_end(whole))


def test_replay_puts_old_samples_beside_the_new_ones():
    one = tiny.trainer("replay", epochs=1, share=0.5)
    while one.at < 1:
        one.advance()
    kept = one.method.labels
    assert len(kept) == round(0.5 * len(one.data["train"][0]))
    seen = []
    features = one.context.model.features
    one.context.model.features = lambda images: (seen.append(len(images)), features(images))[1]
    batch = one.data["train"][1].take(torch.arange(8))
    one.method.loss(batch)
    assert seen == [12]


def test_wise_keeps_the_smallest_share_that_validation_allows():
    one = tiny.trainer("wise", epochs=2, give=100.0, shares=(0.0, 0.5))
    while one.at < 1:
        one.advance()
    before = {name: value.clone() for name, value in one.context.model.named_parameters()}
    while one.at < 2:
        one.advance()
    assert one.notes[1]["share"] == 0.0  # everything may be given up
    after = dict(one.context.model.named_parameters())
    assert torch.equal(after["fc.weight"], before["fc.weight"])
    assert not torch.equal(after["heads.1.weight"], before["heads.1.weight"])


def test_wise_chooses_on_the_tasks_validation_data():
    one = tiny.trainer("wise", epochs=3, give=0.0)
    while one.at < 2:
        one.advance()
    accuracy = one.method._accuracy(TaskData((1,), one.data["train"][1], (), one.data["valid"][1]))
    assert accuracy == pytest.approx(one.notes[1]["validation"])


@pytest.mark.parametrize("changes", [{"shares": (2.0,)}, {"give": -1.0}])
def test_wise_refuses_shares_that_are_none(changes):
    with pytest.raises(NessError, match="expected"):
        tiny.job("wise", **changes)


def pretrained(method, **changes):
    """A trainer of a stream that says what its network could do before."""
    work = tiny.job(method, **changes)
    stream = work.load(1, None)
    images = stream.tasks[2].train.images.float() / 255
    object.__setattr__(stream, "general", General(images[:10], images[10:22], images[22:34]))
    from ness.lab.training.loop import Trainer

    return Trainer(work.method, tiny.NETWORK, stream, work.settings, 1)


@pytest.mark.filterwarnings("ignore:.*fewer.*:ness.NessWarning")
@pytest.mark.parametrize("method", ["ness", "repair"])
def test_what_a_pretrained_network_could_do_is_kept_from_the_first_task_on(method):
    one = pretrained(method, epochs=2, norm="stored")
    general = unlabelled(one.stream.general.known, one.device)
    assert len(general) == 10
    held = one.method.guard.grams if method == "ness" else one.method.grams
    assert {gram.count for gram in held.values()} >= {10}
    one.advance()
    assert method == "repair" or one.method.guard.constrained
    while one.at < 2:
        one.advance()
    kept = one.general_ability()
    assert -1 <= kept["spearman"] <= 1
    assert 0 <= kept["overlap"] <= 1


def test_without_training_all_of_the_general_ability_is_left():
    assert pretrained("finetune").general_ability() == {"spearman": 1.0, "overlap": 1.0}
