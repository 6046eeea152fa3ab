"""Padding is no row: observing padded batches is observing the unpadded sequences one by one."""

from __future__ import annotations

import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ness
from helpers import Conv1D, GPT2Like, named

Batch = dict[str, Tensor]


class Attention(nn.Module):
    """Attention by hand that heeds a (B, T) mask, so that what is at a real token does not hang on padding."""

    def __init__(self, width: int, other: int | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(width, width),
            nn.Linear(other or width, width),
            Conv1D(width, other or width),
        )

    def forward(self, x: Tensor, mask: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        scores = self.q(x) @ self.k(other).mT
        return x + scores.masked_fill(~mask[:, None, :], -torch.inf).softmax(-1) @ self.v(other)


class Encoder(nn.Module):
    """Attention, an MLP on flattened tokens, and a pooler of the last real token."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.attention = Attention(width)
        self.router, self.up = nn.Linear(width, 3), nn.Linear(width, width)
        self.pooler = nn.Linear(width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        h = self.attention(self.embed(input_ids), mask != 0)
        flat = h.reshape(-1, h.shape[-1])
        h = h + (self.up(flat).relu() * self.router(flat).sum(-1, keepdim=True)).view_as(h)
        last = (mask.long() * torch.arange(1, mask.shape[1] + 1)).argmax(1)
        return self.pooler(h[torch.arange(len(h)), last])


class TimeFirst(nn.Module):
    """torch's own attention with tokens first, then an MLP on flattened tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(30, 8), nn.MultiheadAttention(8, 2)
        self.flat, self.grid = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.embed(input_ids).transpose(0, 1)
        h = h + self.attention(h, h, h, key_padding_mask=attention_mask == 0, need_weights=False)[0]
        return self.grid(h + self.flat(h.reshape(-1, 8)).view_as(h))


class Seq2Seq(nn.Module):
    """An encoder and a decoder with cross-attention over the encoder's states."""

    def __init__(self, told: bool = True) -> None:
        super().__init__()
        self.embed, self.told = nn.Embedding(30, 8), told
        self.encoder = named_module(attention=Attention(8))
        self.decoder = Decoder() if told else DecoderOfUntoldArguments()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        decoder_input_ids: Tensor,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        states = self.encoder.attention(self.embed(input_ids), attention_mask != 0)
        own = torch.ones_like(decoder_input_ids) if decoder_attention_mask is None else decoder_attention_mask
        return self.decoder(self.embed(decoder_input_ids), own != 0, states, attention_mask != 0)


def named_module(**children: nn.Module) -> nn.Module:
    holder = nn.Module()
    for name, child in children.items():
        holder.add_module(name, child)
    return holder


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross, self.out = Attention(8), Attention(8), nn.Linear(8, 8)

    def forward(self, h: Tensor, own: Tensor, encoder_hidden_states: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.cross(self.own(h, own), mask, encoder_hidden_states))


class DecoderOfUntoldArguments(Decoder):
    def forward(self, h: Tensor, own: Tensor, what: Tensor, mask: Tensor) -> Tensor:
        return Decoder.forward(self, h, own, what, mask)


def padded(sequences: list[Tensor], left: bool = False, to: int = 0, dtype: torch.dtype = torch.long) -> Batch:
    """A batch of sequences, its mask, and padding that looks like any token."""
    most = max(to, *(len(sequence) for sequence in sequences))
    ids, mask = torch.randint(1, 30, (len(sequences), most)), torch.zeros(len(sequences), most)
    for number, sequence in enumerate(sequences):
        place = slice(most - len(sequence), most) if left else slice(0, len(sequence))
        ids[number, place], mask[number, place] = sequence, 1
    return {"input_ids": ids, "attention_mask": mask.to(dtype)}


def alone(sequences: list[Tensor]) -> list[Batch]:
    return [{"input_ids": one[None], "attention_mask": torch.ones(1, len(one), dtype=torch.long)} for one in sequences]


def drawn(lengths: list[int]) -> list[Tensor]:
    return [torch.randint(1, 30, (length,)) for length in lengths]


def guards(model: nn.Module, many: list[Any], few: list[Any], **how: Any) -> tuple[ness.NullSpace, ness.NullSpace]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, other = ness.NullSpace(model.double()), ness.NullSpace(model)
        one.observe(many, **how)
        other.observe(few)
    return one, other


def equal(one: ness.NullSpace, other: ness.NullSpace, but: tuple[str, ...] = ()) -> None:
    """The same counts, Grams, output energies and ranks."""
    assert set(one.grams) == set(other.grams)
    for name in set(one.grams) - set(but):
        mine, theirs = one.grams[name], other.grams[name]
        assert mine.count == theirs.count, name
        assert torch.allclose(mine.matrix, theirs.matrix, rtol=1e-9, atol=1e-9 * float(theirs.matrix.abs().max())), name
        energies = (float(each._protected[name].moments.energy) for each in (one, other))
        assert next(energies) == pytest.approx(next(energies), rel=1e-5)
    ranks = []
    for guard in (one, other):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            guard.constrain()
        ranks.append({row.name: row.rank for row in guard.certificate().rows if row.name not in but})
        guard.discard()
    assert ranks[0] == ranks[1]


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    left=st.booleans(),
    more=st.integers(0, 3),
    dtype=st.sampled_from([torch.long, torch.bool, torch.float32, torch.uint8]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_padding_is_no_row(lengths: list[int], left: bool, more: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    sequences = drawn(lengths)
    batch = padded(sequences, left, max(lengths) + more, dtype)
    guard, reference = guards(Encoder(), [batch], alone(sequences))
    assert guard.grams["attention.q"].count == sum(lengths)
    assert guard.grams["pooler"].count == len(lengths)
    equal(guard, reference)
    assert not guard.unmasked


@given(lengths=st.lists(st.integers(1, 5), min_size=2, max_size=5), left=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_tokens_first_and_flattened(lengths: list[int], left: bool, seed: int) -> None:
    torch.manual_seed(seed)
    sequences = drawn(lengths)
    batch = padded(sequences, left)
    if left:  # torch's attention gives NaN where nothing can be attended to: such rows are padding
        batch["input_ids"][batch["attention_mask"] == 0] = 0
    equal(*guards(TimeFirst(), [batch], alone(sequences)))


@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=2, max_size=5), seed=st.integers(0, 99)
)
@settings(max_examples=25, deadline=None)
def test_both_sides_of_an_encoder_decoder(lengths: list[tuple[int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    sources, targets = drawn([one for one, _ in lengths]), drawn([other for _, other in lengths])

    def both(source: Batch, target: Batch) -> Batch:
        return source | {f"decoder_{key}": value for key, value in target.items()}

    few = [both(*pair) for pair in zip(alone(sources), alone(targets), strict=True)]
    guard, reference = guards(Seq2Seq(), [both(padded(sources), padded(targets))], few)
    assert guard.grams["decoder.cross.k"].count == sum(map(len, sources))
    assert guard.grams["decoder.cross.q"].count == sum(map(len, targets))
    equal(guard, reference)


@pytest.mark.parametrize("keys", [dict, UserDict, "object"])
def test_any_object_with_keys(keys: Any) -> None:
    class Keyed:
        def __init__(self, held: Batch) -> None:
            self.held = held

        def keys(self) -> Any:
            return self.held.keys()

        def __getitem__(self, key: str) -> Tensor:
            return self.held[key]

    sequences = drawn([4, 2, 1])
    batch = (Keyed if keys == "object" else keys)(padded(sequences))
    equal(*guards(Encoder(), [batch], alone(sequences)))
    equal(*guards(Encoder(), batch, alone(sequences)))  # a bare one is one batch

    def forward(model: nn.Module, pair: Any) -> Any:
        return model(**pair[0])

    equal(*guards(Encoder(), [(batch, torch.zeros(3))], alone(sequences), forward=forward))


def test_a_mask_of_the_callers_own() -> None:
    model, sequences = GPT2Like(), drawn([5, 3, 2])  # causal: what is behind a token does not move it
    batch = padded(sequences)
    pair = batch["input_ids"], batch["attention_mask"]
    guard, reference = guards(model, [pair], [one[None] for one in sequences], mask=lambda batch: batch[1])
    equal(guard, reference, but=("head",))  # which is behind a mean over all tokens
    guard = ness.NullSpace(model)
    guard.observe([pair], mask=lambda _: None)
    assert guard.grams["up"].count == 15


def test_passes_of_the_caller_are_masked() -> None:
    model, sequences = GPT2Like(), drawn([5, 3, 2])
    batch = padded(sequences)
    guard, reference = ness.NullSpace(model.double()), ness.NullSpace(model)
    with guard.observing():
        with guard.masked(batch["attention_mask"]):
            model(batch["input_ids"])
        model(sequences[0][None])
    reference.observe([one[None] for one in [*sequences, sequences[0]]])
    equal(guard, reference, but=("head",))
    with pytest.raises(ness.NessError, match=r"masked: the guard is not observing; use it inside"), guard.masked(None):
        pass


def test_a_calls_own_mask_counts_while_observing() -> None:
    model, sequences = Encoder(), drawn([4, 2, 3])
    batch = padded(sequences)
    guard, reference = ness.NullSpace(model.double()), ness.NullSpace(model)
    with guard.observing():
        model(batch["input_ids"], batch["attention_mask"])
    reference.observe(alone(sequences))
    equal(guard, reference)
    with guard.observing(), guard.masked(None):
        model(**batch)
    assert guard.grams["up"].count == 9 + 12


def test_padding_may_hold_anything() -> None:
    model = named(layer=nn.Linear(6, 3))
    x, mask = torch.randn(2, 4, 6), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    x[mask == 0] = torch.nan
    guard, reference = ness.NullSpace(model), ness.NullSpace(model)
    guard.observe([(x, mask)], mask=lambda batch: batch[1])
    reference.observe(x[mask == 1])
    assert guard.grams["layer"].count == 5
    assert torch.allclose(guard.grams["layer"].matrix, reference.grams["layer"].matrix)


class Experts(nn.Module):
    """An expert that sees the tokens that were sent to it, and one that sees another sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.before, self.expert, self.vision = nn.Embedding(30, 8), *(nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.before(self.embed(input_ids))
        sent = h.reshape(-1, 8)[: h.numel() // 8 - 1]
        return self.expert(sent).sum() + self.vision(torch.ones(3, 7, 8)).sum() + h


def test_layers_whose_rows_are_no_tokens_are_listed() -> None:
    model, batch = Experts(), padded(drawn([4, 2, 3]))
    guard = ness.NullSpace(model)
    with pytest.warns(ness.NessWarning, match=r"padding may count as rows in expert, vision: its rows \(11,\)") as seen:
        guard.observe([batch, batch])
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert guard.unmasked == {
        "expert": "its rows (11,) are no tokens of attention_mask (3, 4)",
        "vision": "its rows (3, 7) are no tokens of attention_mask (3, 4)",
    }
    assert {name: gram.count for name, gram in guard.grams.items()} == {"before": 18, "expert": 22, "vision": 42}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each layer is named once
        guard.observe([batch])
    tensors, manifest = guard.state()
    again = ness.NullSpace(model)
    again.load_state(tensors, manifest)
    assert again.unmasked == guard.unmasked


def test_flattened_tokens_of_an_unknown_order_are_listed() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(30, 8), nn.Linear(8, 8)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, time: bool = False) -> Tensor:
            h = self.embed(input_ids)
            h = h.transpose(0, 1) if time else h
            return self.layer(h.reshape(-1, 8).clone())

    model, sequences = Flat(), drawn([4, 2, 3])
    guard = ness.NullSpace(model)
    with pytest.warns(ness.NessWarning, match="sample by sample or token by token"):
        guard.observe([padded(sequences)])
    assert guard.grams["layer"].count == 12
    whole = ness.NullSpace(model)
    whole.observe([padded(drawn([4, 4, 4]))])  # without padding no order makes a difference
    assert not whole.unmasked


@pytest.mark.parametrize("time", [False, True])
def test_flattened_tokens_that_are_a_view_tell_their_order(time: bool) -> None:
    model = named(layer=nn.Linear(8, 8))
    x, mask = torch.randn(3, 4, 8), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    laid = x.transpose(0, 1) if time else x
    guard, reference = ness.NullSpace(model), ness.NullSpace(model)
    guard.observe([(laid.contiguous().view(-1, 8), mask)], mask=lambda batch: batch[1])
    reference.observe(x[mask == 1])
    equal(guard, reference)


def test_sides_that_shapes_cannot_tell_apart_are_listed() -> None:
    model = Seq2Seq(told=False)
    source, target = padded(drawn([4, 2])), padded(drawn([1, 4]))
    guard = ness.NullSpace(model)
    with pytest.warns(ness.NessWarning, match="may be tokens of attention_mask or decoder_attention_mask"):
        guard.observe([source | {f"decoder_{key}": value for key, value in target.items()}])
    assert all(name.startswith("decoder") for name in guard.unmasked)
    assert guard.grams["encoder.attention.q"].count == 6


@pytest.mark.parametrize("lengths", [[1, 3], [1, 4]])
def test_a_decoder_without_a_mask_is_listed(lengths: list[int]) -> None:
    source, target = padded(drawn([4, 2])), padded(drawn(lengths))
    guard = ness.NullSpace(Seq2Seq())
    with pytest.warns(ness.NessWarning, match="no decoder_attention_mask|no tokens of"):
        guard.observe([source | {"decoder_input_ids": target["input_ids"]}])
    assert guard.grams["encoder.attention.q"].count == guard.grams["decoder.cross.k"].count == 6
    assert guard.grams["decoder.own.q"].count == 2 * lengths[1]
    assert "decoder.own.q" in guard.unmasked


def test_packed_sequences_are_tokens_all() -> None:
    model = Encoder()
    batch = {"input_ids": torch.randint(1, 30, (1, 9)), "attention_mask": torch.tensor([[1, 1, 1, 2, 2, 3, 3, 0, 0]])}
    guard = ness.NullSpace(model)
    guard.observe([batch])  # sequences numbered from 1
    assert guard.grams["attention.q"].count == 7


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 1, 4, 4), r"attention_mask is 4-D \(2, 1, 4, 4\): it says who attends to whom"),
        (torch.ones(2, 4, 4), r"attention_mask is 3-D \(2, 4, 4\)"),
        (torch.ones(4), r"attention_mask is 1-D \(4,\)"),
        (torch.tensor([[0.0, -1e9], [0.0, 0.0]]), "holds negative values or NaN, as masks do that are added to scores"),
        (torch.tensor([[1.0, torch.nan]]), "holds negative values or NaN"),
        ({"full_attention": torch.ones(2, 4)}, "attention_mask is a dict, expected a tensor"),
    ],
)
def test_masks_that_do_not_say_what_padding_is_are_refused(mask: Any, message: str) -> None:
    model = Encoder()
    guard = ness.NullSpace(model)
    guard.observe([padded(drawn([3]))])
    batch = {"input_ids": torch.randint(1, 30, (2, 4)), "attention_mask": mask}
    with pytest.raises(ness.NessError, match=message):
        guard.observe([batch])
    assert guard.grams["up"].count == 3
    if isinstance(mask, Tensor):
        with (
            pytest.raises(ness.NessError, match=message.replace("attention_mask", "mask|attention_mask")),
            guard.observing(),
        ):
            model(**batch)
    batch["attention_mask"] = torch.ones(2, 4)
    guard.observe([batch], mask=lambda _: torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]))  # the way out that is named
    assert guard.grams["up"].count == 6


def test_several_choices_a_sample_are_sequences() -> None:
    model, sequences = GPT2Like(), drawn([4, 2, 3, 1, 2, 4])
    flat = padded(sequences)
    batch = {key: value.view(2, 3, 4) for key, value in flat.items()}
    guard, reference = guards(
        model,
        [batch],
        [one[None] for one in sequences],
        forward=lambda model, batch: model(batch["input_ids"].flatten(0, 1)),
    )
    equal(guard, reference, but=("head",))


def test_nothing_but_padding_is_refused() -> None:
    guard = ness.NullSpace(named(layer=nn.Linear(6, 3)))
    with pytest.raises(ness.NessError, match="every token is padding, so nothing new is protected"):
        guard.observe([torch.randn(2, 4, 6)], mask=lambda _: torch.zeros(2, 4))
    assert not guard.grams


def test_a_mask_that_cannot_be_asked_is_refused() -> None:
    guard = ness.NullSpace(named(layer=nn.Linear(6, 3)))
    with pytest.raises(ness.NessError, match="found a Tensor, expected a function of the batch"):
        guard.observe([torch.randn(2, 4, 6)], mask=torch.ones(2, 4))  # type: ignore[arg-type]
    with pytest.raises(ness.NessError, match=r"mask\(batch\) is a list"):
        guard.observe([torch.randn(2, 4, 6)], mask=lambda _: [[1, 1, 1, 1]] * 2)


def test_a_broken_pass_leaves_no_mask_behind() -> None:
    model, sequences = Encoder(), drawn([4, 2])
    guard = ness.NullSpace(model)
    with guard.observing():
        with pytest.raises(IndexError):
            model(torch.full((2, 4), 99), padded(sequences)["attention_mask"])
        with pytest.raises(ness.NessError, match="4-D"):
            model(torch.ones(2, 4, dtype=torch.long), torch.ones(2, 1, 4, 4))
        model(torch.ones(2, 4, dtype=torch.long))
    assert guard.grams["up"].count == 8
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
