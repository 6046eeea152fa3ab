"""Tiny random models of transformers, data for them, and Trainers, the same every time: as in a new process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ness

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")


def bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.1,
    )
    return transformers.BertForSequenceClassification(config)


def llama(tied: bool = True) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    import transformers

    sizes = {"vocab_size": 40, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))  # its head is tied to the embedding


def t5() -> nn.Module:
    import transformers

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit}
EXCLUDED = {"bert": ["classifier"], "vit": ["classifier"]}


def rows(name: str, count: int, low: int = 8, high: int = 40) -> list[dict[str, Tensor]]:
    """Samples of one task: tokens from `low` to `high`, or images of one brightness."""
    generator = torch.Generator().manual_seed(high)
    if name == "vit":
        images = torch.rand(count, 1, 8, 8, generator=generator) * high / 40
        return [{"pixel_values": image, "labels": (image.sum() * 10).long() % 3} for image in images]
    tokens = torch.randint(low, high, (count, 8), generator=generator)
    labels = tokens[:, 0] % 3 if name == "bert" else tokens
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def batch_of(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def old(name: str) -> list[dict[str, Tensor]]:
    return [batch_of(rows(name, 60, 0, 8))]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def constrained(name: str, rule: ness.Rule | None = None, **options: Any) -> tuple[nn.Module, ness.NullSpace]:
    model = made(name)
    guard = ness.NullSpace(model, rule=rule or ness.Rank(6), exclude=EXCLUDED.get(name, []))
    guard.observe(old(name))
    torch.manual_seed(1)
    guard.constrain(**options)
    return model, guard


def trainer(model: nn.Module, folder: Path, name: str, callbacks: Sequence[Any] = (), **options: Any) -> Any:
    import transformers

    kind = options.pop("kind", transformers.Trainer)
    more = {key: options.pop(key) for key in ("optimizers", "compute_metrics", "model_init") if key in options}
    settings = {
        "max_steps": 8,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **options,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **settings)
    data = {"train_dataset": rows(name, 48), "eval_dataset": rows(name, 8)}
    return kind(model=model, args=arguments, callbacks=list(callbacks), **data, **more)


def stored(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in (*model.named_parameters(), *model.named_buffers())}


def equal(one: Any, other: Any) -> bool:
    """Whether two nests of tensors and plain values are the same, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def outputs(model: nn.Module, name: str) -> Tensor:
    batch = {key: value for key, value in batch_of(rows(name, 6)).items() if key != "labels" or name == "t5"}
    with torch.no_grad():
        return model.eval()(**batch).logits


def main(name: str, folder: str, kill_at: int, resume: int, again: int) -> None:
    """A training run as a process of its own, killed (SIGKILL) within a step, or taken up where it was killed.

    Args:
        name: of the model.
        folder: the Trainer's output.
        kill_at: in which step; 0: never.
        resume: 1 goes on from the last checkpoint.
        again: 1 observes again, 0 takes up the guard that the run has saved.
    """
    import transformers

    from ness.integrations.transformers import GuardCallback

    class Kill(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step + 1 == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if resume and not again:
        model = made(name)
        guard = ness.NullSpace.load(Path(folder) / "_ness" / "guard", model)
    else:
        model, guard = constrained(name, rank=2)
    run = trainer(model, Path(folder), name, [Kill(), GuardCallback(guard)], save_total_limit=2)
    run.train(resume_from_checkpoint=bool(resume) or None)
    state = {"model": stored(model), "optimizer": run.optimizer.state_dict(), "log": guard.certificate().to_dicts()}
    torch.save(state, Path(folder) / "end.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
