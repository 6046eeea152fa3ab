"""finetune, frozen, joint, alone: what each of them trains and keeps."""

import torch

import tiny


def backbone(one) -> dict[str, torch.Tensor]:
    return {n: v.clone() for n, v in one.context.model.state_dict().items() if not n.startswith("heads")}


def after_first_task(method: str, **changes):
    one = tiny.trainer(method, **changes)
    while one.at < 1:
        one.advance()
    return one


def test_frozen_moves_nothing_but_heads_after_the_first_task() -> None:
    one = after_first_task("frozen", norm="stored")
    start = tiny.trainer("frozen", norm="stored").context.model.state_dict()
    kept = backbone(one)
    assert any(not torch.equal(value, start[name]) for name, value in kept.items())
    tiny.to_the_end(one)
    assert all(torch.equal(value, one.context.model.state_dict()[name]) for name, value in kept.items())
    assert one.matrix[0][0] == one.matrix[2][0]  # so it forgets nothing


def test_finetune_moves_everything() -> None:
    one = after_first_task("finetune")
    kept = backbone(one)
    tiny.to_the_end(one)
    assert all(not torch.equal(value, one.context.model.state_dict()[name]) for name, value in kept.items())


def test_joint_learns_all_tasks_in_one_lesson() -> None:
    one = tiny.to_the_end(tiny.trainer("joint", epochs=8, norm="stored"))
    assert len(one.matrix) == 1
    assert None not in one.matrix[0]
    assert min(one.matrix[0]) > 60


def test_joint_with_batch_statistics_takes_one_task_a_batch() -> None:
    for norm, single in (("batch", True), ("stored", False)):
        one = tiny.trainer("joint", norm=norm)
        one.advance()
        tasks = one.learning.lesson.train.tasks
        assert all(len(set(tasks[step.index].tolist())) == 1 for step in one.open_epoch()) is single


def test_alone_is_the_same_as_each_task_first() -> None:
    one = tiny.to_the_end(tiny.trainer("alone"))
    matrix = one.matrix
    assert all(matrix[t][i] == matrix[i][i] for t in range(3) for i in range(t + 1))
    first = tiny.to_the_end(tiny.trainer("finetune"))
    assert matrix[0] == first.matrix[0]
