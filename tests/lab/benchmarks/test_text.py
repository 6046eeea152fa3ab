"""Sentences to classify: JSON lines, drawn and cut, with what is wrong named by its line."""

import json
import lzma

import pytest
import torch

from ness.errors import NessError
from ness.lab.benchmarks import text
from ness.lab.benchmarks.base import Request
from ness.lab.benchmarks.validation import first_tasks


def row(number, task="mood", split="train", label=None):
    return {"task": task, "split": split, "label": label or "ab"[number % 2], "text": f"{task} {split} {number}"}


def rows():
    return [row(n, task, split) for task in ("mood", "topic") for split in ("train", "test") for n in range(30)]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a stream of these rows, with a tokenizer that gives every sentence a number."""
    known = {}

    def encode(sentences, length):
        ids = torch.zeros(len(sentences), 1, 1, length)
        for place, sentence in enumerate(sentences):
            ids[place, 0, 0, 0] = known.setdefault(sentence, len(known) + 1)
        return ids

    monkeypatch.setattr(text, "_tokenizer", lambda data: encode)
    monkeypatch.setattr(text.texts, "sentences", lambda name, data: [f"general {n}" for n in range(200)])

    def made(lines=None, seed=1, **options):
        path = tmp_path / "own.jsonl"
        path.write_text("\n".join(json.dumps(one) for one in lines or rows()) + "\n")
        given = {"file": str(path), "train": 20, "test": 10, "general": 40, "measured": 30, **options}
        return text.load_stream(Request(seed, None, text.Options(**given)))

    return made


def test_tasks_are_cut_as_asked_and_no_sentence_is_in_two_parts(load):
    stream = load()
    assert [task.name for task in stream.tasks] == ["mood", "topic"]
    for task in stream.tasks:
        assert (len(task.train), len(task.valid), len(task.test), task.classes) == (16, 4, 10, 2)
    every = [part.images[:, 0, 0, 0] for task in stream.tasks for part in (task.train, task.valid, task.test)]
    every += [part[:, 0, 0, 0] for part in (stream.general.known, stream.general.valid, stream.general.held_out)]
    assert len(torch.cat(every)) == len(torch.cat(every).unique())


def test_the_seed_draws_training_sentences_and_leaves_the_test_as_it_is(load):
    one, other = load(seed=1), load(seed=2)
    assert torch.equal(one.tasks[0].test.images, other.tasks[0].test.images)
    assert not torch.equal(one.tasks[0].train.images, other.tasks[0].train.images)


def test_settings_are_chosen_on_other_general_text_than_is_reported(load):
    stream = load()
    cut = first_tasks(stream, 2)
    assert torch.equal(cut.general.held_out, stream.general.valid)
    assert not torch.equal(cut.general.held_out, stream.general.held_out)


def test_tasks_in_an_order_of_ones_own_and_a_split_valid(load):
    lines = [*rows(), *(row(n, "mood", "valid") for n in range(5))]
    stream = load(lines, tasks=("topic", "mood"))
    assert [(task.name, len(task.train), len(task.valid)) for task in stream.tasks] == [
        ("topic", 16, 4),
        ("mood", 20, 5),
    ]


def test_a_file_packed_by_xz_is_the_same(tmp_path):
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.xz"
    plain.write_text("\n".join(json.dumps(one) for one in rows()))
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert text.read(plain) == text.read(packed)
    packed.write_bytes(packed.read_bytes()[:40])
    with pytest.raises(NessError, match="cannot be read"):
        text.read(packed)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: expected a JSON object"),
        ('{"task": "a", "split": "train", "label": 1}', "line 2: .*'text'"),
        ('{"task": "a", "split": "dev", "label": 1, "text": "x"}', "train, valid, test as split"),
        ('{"task": "a", "split": "test", "label": true, "text": "x"}', "a number or text as label"),
        ('{"task": "a", "split": "test", "label": 1, "text": ""}', "expected text as task and text"),
        ("[1]", "line 2: expected a JSON object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row(0)) + "\n" + line + "\n")
    with pytest.raises(NessError, match=reason):
        text.read(path)


def test_what_leaves_nothing_to_learn_is_refused(load, tmp_path):
    with pytest.raises(NessError, match="has no task music; there are mood, topic"):
        load(tasks=("music",))
    with pytest.raises(NessError, match="task 'mood' has 1 labels"):
        load([row(n, "mood", split, "a") for split in ("train", "test") for n in range(20)])
    with pytest.raises(NessError, match="0 to test"):
        load([row(n) for n in range(20)])
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(NessError, match="holds no line"):
        text.read(tmp_path / "none.jsonl")
    with pytest.raises(NessError, match="was not found"):
        text.load_stream(Request(1, tmp_path, text.Options(file="nowhere.jsonl")))


@pytest.mark.parametrize(
    "wrong", [{"length": 4}, {"train": -1}, {"valid_share": 1.0}, {"measured": 3}, {"tasks": ("a", "a")}]
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(NessError, match="text: found"):
        text.check_options(text.Options(**wrong))
