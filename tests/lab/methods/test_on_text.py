"""Every method of the laboratory on a small pretrained encoder: it runs unchanged, or is refused with the reason."""

import dataclasses
from functools import partial

import pytest
import torch

from ness import NessError
from ness.lab import registry
from ness.lab.benchmarks import text
from ness.lab.benchmarks.base import General, Split, Stream, Task
from ness.lab.networks.base import NetworkSpec
from ness.lab.networks.minilm import MiniLM, Sizes
from ness.lab.runs.jobs import resolve
from ness.lab.training.loop import Trainer

SIZES = Sizes(blocks=1, width=16, hidden=32, attention_heads=2, vocabulary=60, positions=8)


class Small(MiniLM):
    """The same network, its pretrained weights drawn."""

    def load_pretrained(self, data):
        draws = torch.Generator().manual_seed(0)
        state = {name: torch.randn(target.shape, generator=draws) / 4 for name, target in self._places().items()}
        state["embeddings.token_type_embeddings.weight"] = torch.zeros(2, SIZES.width)
        self.load_bert(state)


def sentences(count, seed, word=0):
    """Token ids of different lengths; of two kinds that a word tells apart."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 60, (count, 1, 1, 8), generator=draws).float()
    labels = torch.arange(count) % 2
    ids[:, 0, 0, 1] = 1 + 2 * word + labels
    for row, length in enumerate(torch.randint(3, 9, (count,), generator=draws).tolist()):
        ids[row, ..., length:] = 0
    return Split(ids, labels)


def stream(request):
    tasks = tuple(
        Task(f"task {t}", 2, sentences(64, 10 * t, t), sentences(16, 10 * t + 1, t), sentences(32, 10 * t + 2, t))
        for t in range(3)
    )
    general = General(*(sentences(30, 100 + n).images for n in range(3)))
    return Stream("text", tasks, {}, general)


def trainer(method, **changes):
    if method in ("lora", "osf"):
        pytest.importorskip("peft")
    bench = dataclasses.replace(text.BENCHMARK, load=stream)
    own = registry.all_methods()[method].settings()
    small = {"samples": 20, "trust_images": 20, "memory": 20, "replay": 8, "epochs": 1, "lr": 1e-3}
    known = {*small} & ({*vars(own)} | {"epochs", "lr"})
    changes |= {"mixing": "none"} if method == "dfgp" and "mixing" not in changes else {}
    job = resolve(method, bench, changes={name: small[name] for name in known} | changes)
    network = NetworkSpec("small", "for tests", partial(Small, sizes=SIZES))
    return Trainer(job.method, network, job.load(1, None), job.settings, 1)


@pytest.mark.filterwarnings("ignore::ness.NessWarning")
@pytest.mark.parametrize("method", sorted({*registry.all_methods()} - {"hat"}))
def test_a_method_runs_unchanged(method):
    one = trainer(method)
    one.run()
    assert len(one.matrix) == len(one.lessons)
    assert all(torch.isfinite(value).all() for value in one.context.model.state_dict().values())
    kept = one.general_ability()
    assert -1 <= kept["spearman"] <= 1
    assert 0 <= kept["overlap"] <= 1


def test_gates_without_wires_are_refused_with_the_reason():
    with pytest.raises(NessError, match="does not say where its hidden units are, so hat cannot gate them"):
        trainer("hat")


@pytest.mark.parametrize(("method", "changes"), [("finetune", {"mixup": 0.2}), ("dfgp", {"mixing": "adversarial"})])
def test_tokens_cannot_be_mixed(method, changes):
    with pytest.raises(NessError, match="reads tokens, which cannot be mixed"):
        trainer(method, **changes)


def test_plain_training_changes_more_than_training_in_the_null_space_at_one_rate():
    plain, kept = (trainer(method, epochs=3, lr=3e-3) for method in ("finetune", "ness"))
    plain.run()
    kept.run()
    assert kept.general_ability()["spearman"] > plain.general_ability()["spearman"]
