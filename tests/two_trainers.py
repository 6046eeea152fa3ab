"""A Trainer on each of two ranks (torchrun, gloo): trained, resumed, and refused for a second task."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import ness
from ness.integrations.transformers import GuardCallback
from trainers import batch_of, constrained, rows, trainer


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo")
    model, guard = constrained("bert", rank=2)
    options = {"max_steps": 4, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    run = trainer(model, folder, "bert", [GuardCallback(guard)], **options)
    run.train()
    ends = [torch.zeros_like(flat(model)) for _ in range(2)]
    torch.distributed.all_gather(ends, flat(model))
    other, again = constrained("bert", rank=2)
    resumed = trainer(other, folder, "bert", [GuardCallback(again)], max_steps=4, save_steps=2)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    end = flat(other)
    again.observe([batch_of(rows("bert", 60, 8, 12))])
    again.constrain(rank=2)
    try:
        resumed.train()
        refused = ""
    except ness.NessError as error:
        refused = str(error)
    result = {
        "wrapped": type(run.model_wrapped).__name__,
        "merged": not guard.constrained,
        "equal": torch.equal(*ends),
        "resumed": torch.equal(end, ends[0]),
        "drifts": sum("eval_drift_largest" in entry for entry in run.state.log_history),
        "refused": refused,
    }
    if torch.distributed.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
