"""Hugging Face transformers: a guard in the Trainer, in one call, and text in place of the old data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ness.errors import NessError
from ness.guard import DEFAULT_RULE, NullSpace
from ness.integrations.folders import partner
from ness.repairing.measuring import evaluating
from ness.rules import Rule
from ness.statistics.recorder import device_of

if TYPE_CHECKING:
    from ness.integrations.trainer_callback import GuardCallback

__all__ = ["GuardCallback", "protect", "self_text"]


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
    """Text that a language model writes itself, as batches: it stands in for the old data.

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
    _check("self_text", tokens=tokens, length=length, batch_size=batch_size)
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


def _check(what: str, **numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise NessError(f"{what}({name}={value!r}): expected a whole number, at least 1")


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


def protect(
    model: nn.Module,
    data: Any,
    rank: int | None = 16,
    *,
    processing_class: Any = None,
    tokens: int | None = None,
    batch_size: int = 8,
    collate: Callable[[list[Any]], Any] | None = None,
    rule: Rule = DEFAULT_RULE,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    max_drift: float | None = None,
    task: str | None = None,
    generator: torch.Generator | None = None,
    statistics_dtype: torch.dtype = torch.float64,
    progress: Callable[[int, int | None, str], object] | None = None,
) -> NullSpace:
    """Observe what a model must not forget and constrain it, in one call; then train it as ever.

        guard = protect(model, old_texts, rank=16, processing_class=tokenizer, tokens=20_000)
        Trainer(model, args, train_dataset=new, callbacks=[GuardCallback(guard)]).train()

    Args:
        model: of transformers, or any module that is called with a batch.
        data: what must not change: texts; a dataset of samples (of the `datasets` package, of torch, or a list); or a
            DataLoader or list of batches. Labels are left out, but where a decoder reads them.
        rank: of each layer's update; None: as wide as the free directions.
        processing_class: the tokenizer, which reads texts and pads samples; padding is no row.
        tokens: stop after so many real ones; None: all of the data.
        batch_size: of a dataset's samples.
        collate: makes a batch of a list of samples; None: as the Trainer does.
        rule: which directions are free, as for `NullSpace`.
        include: layers to protect, as for `NullSpace`.
        exclude: what trains freely, as for `NullSpace`: a new head.
        max_drift: as for `constrain`.
        task: what begins to be learnt, as for `constrain`.
        generator: as for `constrain`.
        statistics_dtype: as for `NullSpace`.
        progress: as for `observe` and `constrain`.

    Returns:
        The guard, which constrains the model.

    Raises:
        NessError: there is no data, or it cannot be made into batches; model and data are as before.
    """
    _check("protect", batch_size=batch_size, **({} if tokens is None else {"tokens": tokens}))
    guard = NullSpace(model, rule=rule, include=include, exclude=exclude, statistics_dtype=statistics_dtype)
    batches = _batches(model, data, processing_class, batch_size, collate)
    guard.observe(_up_to(tokens, batches), progress=progress)
    guard.constrain(rank=rank, max_drift=max_drift, task=task, generator=generator, progress=progress)
    return guard


def _batches(
    model: nn.Module, data: Any, processing_class: Any, batch_size: int, collate: Callable[[list[Any]], Any] | None
) -> Iterator[Any]:
    """Batches that a model can be called with, of whatever data there is."""
    if isinstance(data, (str, bytes, Tensor, Mapping)) or not (
        isinstance(data, Iterable) or hasattr(data, "__getitem__")
    ):
        raise NessError(f"protect: found a {type(data).__name__}, expected texts, a dataset, or batches of samples")
    if isinstance(data, torch.utils.data.DataLoader):
        yield from (_with_decoder_mask(model, batch) for batch in data)
        return
    items = iter(data) if hasattr(data, "__iter__") else (data[index] for index in range(len(data)))
    waiting: list[Any] = []
    for item in items:
        if _is_batch(item):
            yield _with_decoder_mask(model, item)
            continue
        waiting.append(_sample(model, item, processing_class))
        if len(waiting) == batch_size:
            yield _collated(model, waiting, processing_class, collate)
            waiting = []
    if waiting:
        yield _collated(model, waiting, processing_class, collate)


def _is_batch(item: Any) -> bool:
    """Whether an item has a dimension of samples: token ids (n, t), pixels (n, c, h, w)."""
    if not isinstance(item, Mapping):
        return False
    least = {"input_ids": 2, "inputs_embeds": 3, "pixel_values": 4}
    found = [item[key].ndim >= ndim for key, ndim in least.items() if isinstance(item.get(key), Tensor)]
    return bool(found) and all(found)


def _sample(model: nn.Module, item: Any, processing_class: Any) -> Any:
    """One sample with what the model reads; a text is made into tokens."""
    if isinstance(item, str):
        if processing_class is None:
            raise NessError("protect: the data are texts; expected processing_class=tokenizer beside them")
        longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        return dict(processing_class(item, truncation=longest is not None, max_length=longest))
    if not isinstance(item, Mapping):
        return item
    reads = set(inspect.signature(model.forward).parameters)
    kept = {key: value for key, value in item.items() if key in reads and (key != "labels" or _reads_labels(model))}
    if not kept:
        raise NessError(
            f"protect: samples have {', '.join(map(repr, item)) or 'nothing'}, and {type(model).__name__} reads "
            f"{', '.join(list(reads)[:6])}, …; tokenize them first, or pass a DataLoader of batches"
        )
    return kept


def _reads_labels(model: nn.Module) -> bool:
    """Whether the model makes its decoder's input of the labels."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _collated(
    model: nn.Module, samples: list[Any], processing_class: Any, collate: Callable[[list[Any]], Any] | None
) -> Any:
    if collate is None:
        if not isinstance(samples[0], Mapping):
            collate = torch.utils.data.default_collate
        elif processing_class is not None and hasattr(processing_class, "pad"):
            kinds = partner("transformers")
            seq2seq = _reads_labels(model) and "labels" in samples[0]
            kind = kinds.DataCollatorForSeq2Seq if seq2seq else kinds.DataCollatorWithPadding
            collate = kind(processing_class)
        else:
            collate = partner("transformers").default_data_collator
    try:
        assert collate is not None
        batch = collate(samples)
    except (ValueError, RuntimeError, TypeError) as error:
        raise NessError(
            f"protect: {len(samples)} samples do not make a batch ({str(error).splitlines()[0]:.200}); where they are "
            "of different lengths pass processing_class=tokenizer, which pads them, or collate="
        ) from error
    return _with_decoder_mask(model, batch)


def _with_decoder_mask(model: nn.Module, batch: Any) -> Any:
    """An encoder-decoder that reads its labels shifted to the right: where these are -100 it reads padding."""
    if not isinstance(batch, Mapping) or not _reads_labels(model):
        return batch
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or "decoder_input_ids" in batch or "decoder_attention_mask" in batch:
        return batch
    real = labels.ne(-100).long()
    return {**batch, "decoder_attention_mask": torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], dim=1)}


def _up_to(tokens: int | None, batches: Iterator[Any]) -> Iterator[Any]:
    """Batches until so many tokens were in them."""
    seen = 0
    for batch in batches:
        yield batch
        if tokens is not None:
            seen += _tokens_in(batch)
            if seen >= tokens:
                return


def _tokens_in(batch: Any) -> int:
    if isinstance(batch, Mapping):
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor):
            return int(mask.sum())
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor):
            return ids.numel()
    raise NessError("protect(tokens=...): the batches have no input_ids to count; leave tokens out")
