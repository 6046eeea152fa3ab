"""Checkpoints of the Hugging Face Trainer and of accelerate while a guard constrains the model."""

from __future__ import annotations

import copy
import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ness

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")
pytest.importorskip("accelerate", reason="the accelerate package is not installed")

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore:fewer rows:ness.NessWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FORMS: dict[str, dict[str, Any]] = {
    "any": {},
    "limited": {"max_drift": 0.05},
    "private": {"task": "new", "private": 2},
    "low rank": {"rank": 2},
}


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=3,
        hidden_dropout_prob=0.1,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 40, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))  # its head is tied to the embedding


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama}
EXCLUDED = {"bert": ["classifier"], "gpt2": [], "llama": ["lm_head"]}


def rows(count: int, low: int, high: int, name: str) -> list[dict[str, Tensor]]:
    tokens = torch.randint(low, high, (count, 8), generator=torch.Generator().manual_seed(high))
    labels = tokens[:, 0] % 3 if name == "bert" else tokens
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def constrained(name: str, **options: Any) -> tuple[nn.Module, ness.NullSpace]:
    """The same every time, as in a new process."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    guard = ness.NullSpace(model, rule=ness.Rank(6), exclude=EXCLUDED[name])
    guard.observe([{"input_ids": torch.stack([row["input_ids"] for row in rows(60, 0, 8, name)])}])
    torch.manual_seed(1)
    guard.constrain(**options)
    return model, guard


def trainer(model: nn.Module, folder: Path, name: str, **options: Any) -> Any:
    settings = {
        "max_steps": 8,
        "save_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **options,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **settings)
    data = {"train_dataset": rows(48, 8, 40, name), "eval_dataset": rows(8, 8, 40, name)}
    return transformers.Trainer(model=model, args=arguments, **data)


def stored(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in (*model.named_parameters(), *model.named_buffers())}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def logits(model: nn.Module, name: str) -> Tensor:
    tokens = torch.stack([row["input_ids"] for row in rows(6, 0, 40, name)])
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_a_trainer_resumes_bit_equal(name: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, guard = constrained(name, **FORMS[form])
    trainer(model, tmp_path, name).train()
    unbroken = stored(model)
    expected = logits(model, name)

    other, again = constrained(name, **FORMS[form])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ness.NessWarning)
        trainer(other, tmp_path / "again", name).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    said = [record.getMessage() for record in caplog.records if "keys in the checkpoint" in record.getMessage()]
    assert not any("ness_" in message for message in said)  # (a tied head always is)
    assert equal(stored(other), unbroken)
    assert torch.equal(logits(other, name), expected)
    assert again.certificate().to_dicts() == guard.certificate().to_dicts()
    guard.merge()
    again.merge()
    assert equal(stored(other), stored(model))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_the_form_for_sgd(optimizer: str, tmp_path: Path) -> None:
    model, _ = constrained("bert", form="sgd")
    options = {"optim": optimizer, "learning_rate": 0.05}
    if optimizer != "sgd":
        with pytest.raises(ness.NessError, match=r"exact for torch\.optim\.SGD alone"):
            trainer(model, tmp_path, "bert", **options).train()
        return
    trainer(model, tmp_path, "bert", **options).train()
    other, _ = constrained("bert", form="sgd")
    checkpoint = str(tmp_path / "checkpoint-4")
    trainer(other, tmp_path / "again", "bert", **options).train(resume_from_checkpoint=checkpoint)
    assert equal(stored(other), stored(model))


@pytest.mark.parametrize("name", MODELS)
def test_the_best_checkpoint_is_loaded_whole(name: str, tmp_path: Path) -> None:
    model, guard = constrained(name)
    known: dict[int, Tensor] = {}

    class Remember(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            mode = model.training
            known[state.global_step] = logits(model, name)
            model.train(mode)

    run = trainer(
        model,
        tmp_path,
        name,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="early",
        greater_is_better=True,
    )
    steps = itertools.count()
    run.compute_metrics = lambda _: {"early": -next(steps)}  # the first is the best
    run.add_callback(Remember())
    run.train()
    best = run.state.best_global_step
    assert best == 2
    assert not torch.equal(known[best], known[8])
    assert torch.equal(logits(model, name), known[best])
    assert guard.certificate().holds
    guard.merge()
    assert torch.allclose(logits(model, name), known[best], atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_a_model(name: str, form: str, tmp_path: Path) -> None:
    """`from_pretrained` of what was saved while constrained computes the same; it grows by the updates alone."""
    model, guard = constrained(name, **FORMS[form])
    trainer(model, tmp_path, name, max_steps=4).train()
    model.eval().save_pretrained(tmp_path / "constrained")
    model.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    for folder in ("checkpoint-4", "constrained", "shards"):
        plain = type(model).from_pretrained(tmp_path / folder)
        assert not any("ness" in key for key in plain.state_dict())
        assert torch.allclose(logits(plain, name), logits(model, name), atol=1e-5)
    updates = sum(p.nbytes for key, p in model.named_parameters() if ".ness_" in key)
    layers = len(guard.certificate().rows)
    guard.merge()
    model.save_pretrained(tmp_path / "merged")
    size = {at: (tmp_path / at / "model.safetensors").stat().st_size for at in ("constrained", "merged")}
    assert updates < size["constrained"] - size["merged"] < updates + 800 * layers  # with the file's own header
    assert torch.allclose(
        logits(type(model).from_pretrained(tmp_path / "merged"), name), logits(plain, name), atol=1e-4
    )


def test_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    model, guard = constrained("bert")
    trainer(model, tmp_path, "bert", max_steps=4).train()
    trained = stored(model)
    torch.manual_seed(8)
    foreign = bert()
    foreign.save_pretrained(tmp_path / "foreign")
    with pytest.raises(ness.NessError, match="knows nothing of the updates"):
        trainer(model, tmp_path / "again", "bert")._load_from_checkpoint(str(tmp_path / "foreign"))
    model.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    with pytest.raises(ness.NessError, match="load a checkpoint of several files as one state dict"):
        trainer(model, tmp_path / "again", "bert")._load_from_checkpoint(str(tmp_path / "shards"))
    assert equal(stored(model), trained)
    guard.discard()
    trainer(model, tmp_path / "again", "bert")._load_from_checkpoint(str(tmp_path / "foreign"))
    assert equal(stored(model), stored(foreign))


def test_a_trainer_that_is_used_again_warns(tmp_path: Path) -> None:
    model, guard = constrained("bert")
    run = trainer(model, tmp_path, "bert", max_steps=2, save_strategy="no")
    run.train()
    guard.merge()
    guard.observe([{"input_ids": torch.stack([row["input_ids"] for row in rows(60, 8, 12, "bert")])}])
    guard.constrain()
    with pytest.warns(
        ness.NessWarning, match=r"AdamW holds classifier\.weight.*none of the guard's updates.*new Trainer"
    ):
        run.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ness.NessWarning)
        trainer(model, tmp_path, "bert", max_steps=2, save_strategy="no").train()
    guard.merge()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_saves_and_loads(name: str, safe: bool, tmp_path: Path) -> None:
    from accelerate import Accelerator

    def steps(model: nn.Module, optimizer: Any, count: int, seed: int) -> None:
        torch.manual_seed(seed)
        model.train()
        for _ in range(count):
            batch = rows(8, 8, 40, name)
            optimizer.zero_grad()
            loss = model(**{key: torch.stack([row[key] for row in batch]) for key in batch[0]}).loss
            accelerator.backward(loss)
            optimizer.step()

    model, guard = constrained(name)
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(guard.parameters(), lr=1e-2))
    steps(wrapped, optimizer, 3, 5)
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    before, expected = stored(model), logits(model, name)
    steps(wrapped, optimizer, 3, 6)
    unbroken = stored(model)

    accelerator.load_state(str(tmp_path / "state"))
    assert equal(stored(model), before)
    assert torch.equal(logits(model, name), expected)
    steps(wrapped, optimizer, 3, 6)
    assert equal(stored(model), unbroken)

    other, again = constrained(name)
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(other, torch.optim.AdamW(again.parameters(), lr=1e-2))
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(logits(other, name), expected)
    steps(wrapped, optimizer, 3, 6)
    assert equal(stored(other), unbroken)
    plain = MODELS[name]()
    state = accelerator.get_state_dict(wrapped)
    plain.load_state_dict(copy.deepcopy(state), strict=False)
    assert torch.allclose(logits(plain, name), logits(other, name), atol=1e-5)


def test_the_real_conv1d_prints_its_rank() -> None:
    model, guard = constrained("gpt2")
    rank = guard.certificate()["transformer.h.0.mlp.c_fc"].rank
    assert str(model.transformer.h[0].mlp.c_fc) == f"ConstrainedConv1D(nf=64, nx=16, rank={rank})"
    guard.discard()
    assert str(model.transformer.h[0].mlp.c_fc) == "Conv1D(nf=64, nx=16)"
