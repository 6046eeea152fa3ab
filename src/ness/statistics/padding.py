"""Padding is no row: which rows of a layer are tokens, told by the masks of a pass and the shape of the layer's calls.

A mask has shape (B, T): samples and tokens. A layer follows it where its calls have shape (B, T, …), (T, B, …),
(B, H, T) or (B·T, …). One row per sample, as behind a pooler, are B rows and all of them count. Where shapes leave a
doubt all rows count, and the layer is listed with the reason: more is then protected than need be, never less.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ness.errors import NessError
from ness.layers import Layer, Rows

MaskOf = Callable[[Any], Any]

ENCODER, DECODER = "attention_mask", "decoder_attention_mask"
_IDS = {ENCODER: ("input_ids", "inputs_embeds"), DECODER: ("decoder_input_ids", "decoder_inputs_embeds")}
_STATES = ("encoder_hidden_states", "memory", "key_value_states")  # how decoders are given the encoder's output
_HELP = "pass observe(..., mask=function) that gives a (batch, tokens) mask, True or 1 where a token is real, or None"


@dataclass(frozen=True, eq=False)
class Mask:
    """One mask of a pass."""

    name: str
    shape: tuple[int, int]  # (B, T)
    real: Tensor | None  # (B, T), bool, on the CPU; None: nobody has said which of these tokens are padding

    @property
    def side(self) -> str:
        """Whose tokens: "encoder" or "decoder"."""
        return "decoder" if self.name == DECODER else "encoder"


def is_mapping(batch: Any) -> bool:
    """Whether a batch has keys, as dicts, a tokenizer's output and models' outputs have.

    >>> is_mapping({}), is_mapping(torch.zeros(2))
    (True, False)
    """
    return isinstance(batch, Mapping) or (
        not isinstance(batch, (Tensor, type))
        and callable(getattr(batch, "keys", None))
        and hasattr(batch, "__getitem__")
    )


def check_mask_of(mask: Any) -> None:
    """Refuse a `mask=` that cannot be asked."""
    if mask is not None and not callable(mask):
        raise NessError(
            f"observe(mask=...): found a {type(mask).__name__}, expected a function of the batch that gives its mask, "
            "such as lambda batch: batch[1]"
        )


def masks_of_batch(batch: Any, mask: MaskOf | None, model: nn.Module) -> list[Mask]:
    """The masks of one batch: what `mask` says, or else what its `attention_mask` does.

    Args:
        batch: as the caller gave it.
        mask: `mask(batch)`: (B, T), None for no padding, or a mapping with the keys of both sides.
        model: the observed model; an encoder-decoder has two sides.

    Raises:
        NessError: a mask that does not say which tokens are padding.
    """
    if mask is not None:
        return masks_of(mask(batch), model, "mask(batch)")
    if is_mapping(batch):
        return masks_of_mapping(batch, model)
    if isinstance(batch, (tuple, list)):
        for item in batch:
            if is_mapping(item) and ENCODER in item.keys():  # noqa: SIM118
                return masks_of_mapping(item, model)
    return []


def masks_of(value: Any, model: nn.Module, what: str = "masked(mask)") -> list[Mask]:
    """The masks that somebody says outright: a tensor (B, T), None, or a mapping with the keys of both sides."""
    if is_mapping(value):
        return masks_of_mapping(value, model)
    found = _mask(ENCODER, value, None, what)
    return [] if found is None else [found]


def masks_of_mapping(batch: Any, model: nn.Module) -> list[Mask]:
    """The masks under a batch's own keys; a decoder that was given none has unknown padding, where the encoder has."""
    keys = set(batch.keys())
    found: list[Mask] = []
    for name in (ENCODER, DECODER):
        ids = next((batch[key] for key in _IDS[name] if key in keys and isinstance(batch[key], Tensor)), None)
        mask = _mask(name, batch[name] if name in keys else None, ids, f"the batch's {name}")
        if mask is not None and ids is not None and batch_has(batch, keys, "past_key_values"):
            mask = _latest(mask, ids.shape[1])
        if mask is None and name == DECODER and found:
            mask = _unknown(batch, keys, ids, model)
        if mask is not None:
            found.append(mask)
    return found


def batch_has(batch: Any, keys: set[str], key: str) -> bool:
    """Whether a batch has something under a key."""
    return key in keys and batch[key] is not None


def _mask(name: str, value: Any, ids: Tensor | None, what: str) -> Mask | None:
    """A checked mask: by its values and its shape it says which tokens are padding."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise NessError(f"{what} is a {type(value).__name__}, expected a tensor (batch, tokens); {_HELP}")
    if value.ndim == 3 and ids is not None and ids.ndim >= 3 and ids.shape[:3] == value.shape:
        value = value.flatten(0, 1)  # several choices per sample, which the model flattens
    if value.ndim != 2:
        raise NessError(
            f"{what} is {value.ndim}-D {tuple(value.shape)}: it says who attends to whom, not which tokens are "
            f"padding; expected (batch, tokens). Packed sequences have no padding: {_HELP}"
        )
    value = value.detach().cpu()
    if value.dtype.is_complex or (value.dtype != torch.bool and not bool((value >= 0).all())):
        raise NessError(
            f"{what} {tuple(value.shape)} holds negative values or NaN, as masks do that are added to scores; expected "
            f"1 where a token is real and 0 where it is padding; {_HELP}"
        )
    return Mask(name, (value.shape[0], value.shape[1]), value != 0)


def _latest(mask: Mask, tokens: int) -> Mask:
    """The part of a mask that is about the tokens of this call, where those before are in a cache."""
    assert mask.real is not None
    return mask if mask.shape[1] <= tokens else Mask(mask.name, (mask.shape[0], tokens), mask.real[:, -tokens:])


def _unknown(batch: Any, keys: set[str], ids: Tensor | None, model: nn.Module) -> Mask | None:
    """The decoder's tokens, where it has some that no mask is about."""
    if ids is None and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        ids = batch["labels"] if batch_has(batch, keys, "labels") and isinstance(batch["labels"], Tensor) else None
    return None if ids is None or ids.ndim < 2 else Mask(DECODER, (ids.shape[0], ids.shape[1]), None)


class Padding:
    """The masks of one forward pass, and what its layers have shown so far of how the model lays out its tokens."""

    def __init__(self, masks: Sequence[Mask], orders: set[str] | None = None) -> None:
        self.masks = list(masks)
        self.orders = set[str]() if orders is None else orders  # "batch" or "time" first, as seen in any pass
        self.states: set[int] = set()  # where encoders' outputs lie that a decoder was given
        self.grids = False  # whether a layer of this pass was called with samples and tokens apart
        self.assumed = set[str]()  # the order that such a call was taken to have, where there are as many of both
        self.needed = any(mask.real is None or not bool(mask.real.all()) for mask in self.masks)
        self._real: dict[tuple[int, str, tuple[int, ...]], Tensor] = {}
        self._index: dict[tuple[int, torch.device], tuple[Tensor, Tensor | None]] = {}

    def real_rows(self, layer: Layer, rows: Rows, lead: tuple[int, ...]) -> tuple[Tensor | None, str | None]:
        """Which rows of one call are tokens.

        Args:
            layer: the layer that was called.
            rows: its rows, in the order of `lead`.
            lead: the shape of the call without its units, (B, T) for (B, T, o).

        Returns:
            The index of the real rows, or None for all of them; and the reason, where the shape leaves a doubt.
        """
        if not self.needed:
            return None, None
        found = [
            (mask, self._laid_out(number, mask, order, lead))
            for number, mask in enumerate(self.masks)
            for order in self._orders_of(layer, mask, rows, lead)
        ]
        if not found:
            return None, self._no_tokens(lead)
        if not all(_equal(found[0][1], real) for _, real in found[1:]):
            names = {mask.name for mask, _ in found}
            if len(names) > 1:
                side = self._side(layer, rows)
                found = [(mask, real) for mask, real in found if side is None or mask.side == side] or found
            if not all(_equal(found[0][1], real) for _, real in found[1:]):
                return None, _ambiguous(found, lead)
        real = found[0][1]
        if real is None:
            return None, f"the batch has no {DECODER}, and its rows {lead} are the decoder's tokens"
        return self._indices(real, rows.device), None

    # -- shapes -----------------------------------------------------------------------------------------------------

    def _orders_of(self, layer: Layer, mask: Mask, rows: Rows, lead: tuple[int, ...]) -> list[str]:
        """The ways to lay a mask (B, T) over a call of this shape that cannot be ruled out."""
        samples, tokens = mask.shape
        grids = [
            order for order, shape in (("batch", (samples, tokens)), ("time", (tokens, samples))) if lead[:2] == shape
        ]
        if grids:
            self.grids = True
            if layer.batch_first is not None:
                grids = ["batch" if layer.batch_first else "time"]
            if len(grids) == 1:
                self.orders.update(grids if layer.batch_first is not None or samples != tokens else ())
                return grids
            self.assumed = {"time"} if self.orders == {"time"} else {"batch"}  # as the mask itself, unless we know
            return list(self.assumed)
        if lead[:1] == (samples * tokens,):
            known = {_order_of_storage(rows, mask)} - {None} or self.orders or self.assumed
            return [f"flat {order}" for order in (known if len(known) == 1 else ("batch", "time"))]
        if len(lead) == 3 and (lead[0], lead[2]) == (samples, tokens):
            return ["heads"]
        return []

    def _laid_out(self, number: int, mask: Mask, order: str, lead: tuple[int, ...]) -> Tensor | None:
        """A mask over the rows of a call (n,)."""
        if mask.real is None:
            return None
        key = number, order, lead
        if key not in self._real:
            real = mask.real.T if order.endswith("time") else mask.real
            real = real.unsqueeze(1) if order == "heads" else real.flatten() if order.startswith("flat") else real
            real = real.reshape(*real.shape, *[1] * (len(lead) - real.ndim)).expand(lead)
            self._real[key] = real.flatten()
        return self._real[key]

    def _indices(self, real: Tensor, device: torch.device) -> Tensor | None:
        key = id(real), device
        if key not in self._index:
            whole = bool(real.all())
            index = None if whole else real.nonzero().flatten().to(device, non_blocking=True)
            self._index[key] = real, index  # keeping it keeps its id its own
        return self._index[key][1]

    def _no_tokens(self, lead: tuple[int, ...]) -> str | None:
        """Why rows of this shape may count padding; None where they do not: a row per sample, or unpadded before."""
        rows = torch.Size(lead).numel()
        for mask in self.masks:
            unpadded = mask.real is not None and not self.grids and rows == int(mask.real.sum())
            if rows == mask.shape[0] or unpadded:
                return None
        shapes = " nor ".join(f"{mask.name} {mask.shape}" for mask in self.masks)
        return f"its rows {lead} are no tokens of {shapes}"

    # -- encoders and decoders --------------------------------------------------------------------------------------

    def _side(self, layer: Layer, rows: Rows) -> str | None:
        """Whose tokens a layer sees, where both sides have as many."""
        if rows.data_ptr() in self.states:
            return "encoder"
        side = next((part for part in layer.name.split(".") if part in ("encoder", "decoder")), None)
        return side if side == "encoder" or self.states else None  # else its rows may be the encoder's output


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))


def _ambiguous(found: Iterable[tuple[Mask, Tensor | None]], lead: tuple[int, ...]) -> str:
    names = sorted({mask.name + ("" if mask.real is not None else " (missing)") for mask, _ in found})
    if len(names) > 1:
        return f"its rows {lead} may be tokens of {' or '.join(names)}"
    return f"its rows {lead} may be {names[0]}'s sample by sample or token by token"


def _order_of_storage(rows: Rows, mask: Mask) -> str | None:
    """The order of flattened tokens, where they are a view of a tensor that has samples and tokens apart."""
    base = None if rows.is_inference() else rows._base
    if base is None or not base.is_contiguous() or base.ndim < 3 or base.numel() != rows.numel():
        return None
    samples, tokens = mask.shape
    if samples == tokens:
        return None
    return {(samples, tokens): "batch", (tokens, samples): "time"}.get((base.shape[0], base.shape[1]))


# -- a session of passes --------------------------------------------------------------------------------------------


class Masking:
    """Which masks hold for the forward calls of one session: those said outright, or the call's own, or the batch's."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.now: Padding | None = None
        self.fixed = False  # said outright, with `mask=` or `masked`: no call's own argument overrides it
        self.orders: set[str] = set()

    def begin(self, masks: Sequence[Mask], fixed: bool) -> None:
        """These masks hold from now on."""
        self.now, self.fixed = Padding(masks, self.orders), fixed

    @contextmanager
    def holding(self, masks: Sequence[Mask]) -> Iterator[None]:
        """These masks hold inside, whatever calls say."""
        before = self.now, self.fixed
        self.begin(masks, fixed=True)
        try:
            yield
        finally:
            self.now, self.fixed = before

    def follow(self, handles: list[RemovableHandle]) -> None:
        """Follow this thread's calls of the model: their own `attention_mask`, and what decoders are given of encoders.

        Handles of the hooks are added to `handles` one by one.
        """
        stack: list[Padding | None] = []
        thread = threading.get_ident()

        def begins(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != thread:
                return
            stack.append(self.now)
            if self.fixed:
                return
            given = _arguments(module, args, kwargs)
            masks = masks_of_mapping(given, self.model) if given.get(ENCODER) is not None else []
            if masks:
                self.now = Padding(masks, self.orders)

        def ends(*_: Any) -> None:
            if threading.get_ident() == thread and stack:
                self.now = stack.pop()

        def given_states(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread and self.now is not None and self.now.needed:
                given = _arguments(module, args, kwargs)
                values = (given.get(name) for name in _STATES)
                self.now.states.update(value.data_ptr() for value in values if isinstance(value, Tensor))

        handles.append(self.model.register_forward_pre_hook(begins, with_kwargs=True))
        handles.append(self.model.register_forward_hook(ends, always_call=True))
        for module in self.model.modules():
            if set(_STATES) & _parameters_of(type(module).forward):
                handles.append(module.register_forward_pre_hook(given_states, with_kwargs=True))


@cache
def _parameters_of(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of a module kind's forward."""
    try:
        return frozenset(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward call by name, those in a `**kwargs` of its own included."""
    try:
        names = [
            name
            for name, one in inspect.signature(module.forward).parameters.items()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    return {**dict(zip(names, args, strict=False)), **kwargs}
