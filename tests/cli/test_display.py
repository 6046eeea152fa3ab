import io

from rich.console import Console
from rich.progress import Progress, TextColumn

import tiny
from ness.cli.display import Bar, Lines, time_left
from ness.lab.training.loop import Event

EPOCH = {"task": 1, "epoch": 2, "lr": 0.1, "loss": 0.5, "valid_loss": 0.4, "valid_accuracy": 93.25}
LEARNT = {"task": 1, "name": "two", "epochs": 3, "accuracy": [80.0, 90.0], "seconds": 1.25}


def test_plain_lines_one_a_task() -> None:
    out = io.StringIO()
    hear = Lines(out, 4).listener(tiny.job(), 7)
    for event in (Event("begun", {"tasks": 3, "lessons": 3}), Event("epoch", EPOCH), Event("learnt", LEARNT)):
        hear(event)
    assert (
        out.getvalue() == "[1/4] finetune on tiny, seed 7: task 2/3 two: 3 epochs, 1.2 s, 90.0 %, mean so far 85.0 %\n"
    )


def test_the_bar_shows_task_epoch_loss_accuracy_and_time_left() -> None:
    out = io.StringIO()
    columns = [TextColumn(text) for text in ("{task.description}", "{task.fields[now]}", "{task.fields[left]}")]
    with Progress(*columns, console=Console(file=out, force_terminal=True, width=200)) as progress:
        bar = Bar(progress, 1)
        hear = bar.listener(tiny.job(), 7)
        hear(Event("begun", {"tasks": 3, "lessons": 3}))
        hear(Event("epoch", EPOCH))
        (task,) = progress.tasks
        assert task.completed == (1 + 2 / 3) / 3
        assert task.fields["now"] == "task 2/3 epoch 2/3 loss 0.50 acc 93.2 %"
        assert "left" in task.fields["left"]
        hear(Event("learnt", LEARNT))
        bar.say("[a remark]")
    assert "[a remark]" in out.getvalue()


def test_every_run_that_goes_on_has_a_bar_of_its_own() -> None:
    with Progress(TextColumn("{task.description}"), console=Console(file=io.StringIO())) as progress:
        bar = Bar(progress, 2)
        one, other = bar.listener(tiny.job(), 7), bar.listener(tiny.job(), 8)  # as `run_all` does: before any run
        for hear in (one, other):
            hear(Event("begun", {"tasks": 2, "lessons": 2}))
            hear(Event("epoch", EPOCH))
        assert [task.description for task in progress.tasks] == ["[1/2] finetune seed 7", "[2/2] finetune seed 8"]
        one(Event("learnt", LEARNT))
        assert [task.description for task in progress.tasks] == ["[2/2] finetune seed 8"]


def test_time_left_is_unknown_at_the_start() -> None:
    assert time_left(10.0, 0.0, 1.0) == ""
