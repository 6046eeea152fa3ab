"""`GuardCallback` in TRL's SFTTrainer, packed sequences included; and accelerate alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ness

pytest.importorskip("transformers", reason="the transformers package is not installed")
from ness.integrations.transformers import GuardCallback
from trainers import constrained, equal, outputs, rows, stored

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:fewer rows:ness.NessWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


def sft(model: Any, folder: Path, callbacks: list[Any], **options: Any) -> Any:
    trl = pytest.importorskip("trl", reason="the trl package is not installed")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {f"w{number}": number for number in range(38)} | {"<pad>": 38, "<eos>": 39}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows("llama", 48)])
    settings = {
        "max_steps": 6,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "max_length": 16,
        "seed": 3,
        **options,
    }
    arguments = trl.SFTConfig(output_dir=str(folder), **settings)
    more = {"train_dataset": data, "eval_dataset": data.select(range(8)), "processing_class": tokenizer}
    return trl.SFTTrainer(model=model, args=arguments, callbacks=callbacks, **more)


@pytest.mark.parametrize("packing", [False, True])
def test_the_sft_trainer_resumes_bit_equal_and_ends_merged(packing: bool, tmp_path: Path) -> None:
    model, guard = constrained("llama", rank=2)
    before = outputs(model, "llama")
    options = {"packing": packing, "packing_strategy": "wrapped"} if packing else {}
    run = sft(model, tmp_path / "run", [GuardCallback(guard)], eval_strategy="steps", eval_steps=3, **options)
    run.train()
    assert not guard.constrained
    assert guard.certificate().holds
    assert any("eval_drift_largest" in entry for entry in run.state.log_history)
    assert not torch.equal(outputs(model, "llama"), before)
    assert guard.certificate().verdict in (tmp_path / "run" / "README.md").read_text()

    plain, other = constrained("llama", rank=2)
    other.discard()
    again = ness.NullSpace.load(tmp_path / "run" / "_ness" / "guard", plain)
    run = sft(plain, tmp_path / "on", [GuardCallback(again)], **options)
    run.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert equal(stored(plain), stored(model))


def test_an_adapter_beside_the_updates_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, guard = constrained("llama", rank=2)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    run = sft(adapted, tmp_path, [GuardCallback(guard)])
    with pytest.raises(ness.NessError, match="a PEFT adapter"):
        run.train()
