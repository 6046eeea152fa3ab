"""Hugging Face transformers: a guard in the Trainer, in one call, and old data that nobody has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.repairing.measuring import evaluating
from ness.statistics.recorder import device_of

if TYPE_CHECKING:
    from ness.integrations.trainer_callback import GuardCallback

__all__ = ["GuardCallback", "self_text"]


def __getattr__(name: str) -> Any:
    """The callback is of the Trainer's own class, so its module imports transformers: only when it is asked for."""
    if name == "GuardCallback":
        from ness.integrations.trainer_callback import GuardCallback

        return GuardCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def self_text(
    model: nn.Module,
    tokenizer: Any = None,
    tokens: int = 20_000,
    *,
    length: int = 256,
    batch_size: int = 16,
    temperature: float = 1.0,
    prompt: str | None = None,
    generator: torch.Generator | None = None,
) -> list[dict[str, Tensor]]:
    """Text that a language model writes itself, as batches: it stands in for old data that nobody has.

    Each text begins at the model's begin-of-text token (or at `prompt`) and is sampled token by token; it ends where
    the model ends it, and what comes after counts as padding.

        old = self_text(base, tokenizer, tokens=20_000, generator=torch.Generator().manual_seed(0))
        ness.repair(tuned, base, old=old, new=new_batches)

    Args:
        model: a causal language model of transformers: called with `input_ids`, gives `.logits`.
        tokenizer: says which tokens begin and end a text, and reads `prompt`; None: the model's own configuration does.
        tokens: how many tokens to write in all, at least.
        length: of one text, at most.
        batch_size: texts in a batch.
        temperature: of the sampling; 1 is the model's own distribution.
        prompt: what every text begins with; None: the begin-of-text token alone.
        generator: random numbers, on the CPU; the same ones give the same text.

    Returns:
        Batches {"input_ids", "attention_mask"} on the CPU, each (batch_size, at most length).

    Raises:
        NessError: the model gives no logits for a next token, or has no token that begins a text.
    """
    _check(tokens=tokens, length=length, batch_size=batch_size)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 < temperature < float("inf"):
        raise NessError(f"self_text(temperature={temperature!r}): expected a number above 0")
    if generator is not None and generator.device.type != "cpu":
        raise NessError(f"self_text(generator=...): found one on {generator.device}, expected one on the CPU")
    start, end = _start_of(model, tokenizer, prompt), _token(model, tokenizer, "eos_token_id")
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    length = min(length, longest) if isinstance(longest, int) else length
    if len(start) >= length:
        raise NessError(f"self_text: the prompt has {len(start)} tokens, expected fewer than length={length}")
    batches: list[dict[str, Tensor]] = []
    written = 0
    with evaluating(model):
        while written < tokens:
            rows = min(batch_size, max(1, -(-(tokens - written) // (length - len(start)))))
            batch = _write(model, start, end, rows, length, temperature, generator)
            batches.append(batch)
            written += int(batch["attention_mask"].sum()) - rows * len(start)
    return batches


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise NessError(f"self_text({name}={value!r}): expected a whole number, at least 1")


def _token(model: nn.Module, tokenizer: Any, name: str) -> int | None:
    """A special token's number, from the tokenizer or from the model's configuration."""
    for holder in (tokenizer, getattr(model, "generation_config", None), getattr(model, "config", None)):
        value = getattr(holder, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    return None


def _start_of(model: nn.Module, tokenizer: Any, prompt: str | None) -> list[int]:
    if prompt is not None:
        if tokenizer is None:
            raise NessError("self_text(prompt=...): needs the tokenizer to read it")
        found = [int(token) for token in tokenizer(prompt)["input_ids"]]
        if not found:
            raise NessError("self_text(prompt=...): the tokenizer makes no token of it")
        return found
    start = _token(model, tokenizer, "bos_token_id")
    start = _token(model, tokenizer, "eos_token_id") if start is None else start
    if start is None:
        raise NessError("self_text: neither tokenizer nor model say which token begins a text; give prompt=")
    return [start]


def _write(
    model: nn.Module,
    start: list[int],
    end: int | None,
    rows: int,
    length: int,
    temperature: float,
    generator: torch.Generator | None,
) -> dict[str, Tensor]:
    """One batch of texts."""
    device = device_of(model)
    text = torch.tensor([start] * rows)
    alive = torch.ones(rows, dtype=torch.bool)
    real = [torch.ones_like(text)]
    given, cache = text, None
    while text.shape[1] < length and bool(alive.any()):
        if cache is None:
            output = model(input_ids=text.to(device), use_cache=True)
        else:
            output = model(input_ids=given.to(device), past_key_values=cache, use_cache=True)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise NessError(
                f"self_text: {type(model).__name__} gives no logits for a next token, so it cannot write text; "
                "pass old data instead"
            )
        cache = getattr(output, "past_key_values", None)
        chances = (logits[:, -1].float() / temperature).softmax(-1).cpu()
        if not bool(torch.isfinite(chances).all()):
            raise NessError("self_text: the model gives NaN or Inf")
        given = torch.multinomial(chances, 1, generator=generator)
        text = torch.cat([text, given], dim=1)
        real.append(alive.long().unsqueeze(1))
        if end is not None:
            alive = alive & (given[:, 0] != end)
    return {"input_ids": text, "attention_mask": torch.cat(real, dim=1)}
