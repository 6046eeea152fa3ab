"""The pretrained encoder at a small size: against transformers' BERT, and what padding does to it."""

import pytest
import torch

from ness.errors import NessError
from ness.lab.networks.base import initialise
from ness.lab.networks.minilm import MiniLM, Sizes

SIZES = Sizes(blocks=2, width=16, hidden=32, attention_heads=4, vocabulary=40, positions=12)


def small(seed=0):
    network = MiniLM((1, 1, 10), [2, 3], "stored", SIZES)
    initialise(network, torch.Generator().manual_seed(seed))
    network.load_bert(state_of_bert(seed))
    return network.eval()


def state_of_bert(seed):
    """Random weights under BERT's names."""
    draws = torch.Generator().manual_seed(seed)
    shapes = {name: target.shape for name, target in MiniLM((1, 1, 10), [2], "stored", SIZES)._places().items()}
    shapes["embeddings.token_type_embeddings.weight"] = torch.Size([2, SIZES.width])
    return {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}


def sentences():
    ids = torch.randint(1, 40, (5, 1, 1, 10), generator=torch.Generator().manual_seed(3)).float()
    for row, length in enumerate((10, 4, 7, 1, 3)):
        ids[row, ..., length:] = 0
    return ids


def test_a_sentence_has_the_same_features_alone_as_beside_longer_ones():
    network, ids = small(), sentences()
    together = network.features(ids)
    for row, one in enumerate(ids):
        torch.testing.assert_close(network.features(one[None])[0], together[row], rtol=1e-4, atol=1e-5)


def test_no_layer_ever_sees_padding():
    network, ids = small(), sentences()
    seen = []
    for module in network.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    network.features(ids)
    assert set(seen) == {int((ids != 0).sum())}


def test_only_linear_layers_and_heads_train_and_are_saved():
    network = small()
    names = {name for name, _ in network.named_parameters()}
    assert names == set(network.state_dict())
    assert all(name.startswith(("blocks.", "heads.")) for name in names)


def test_an_empty_sentence_has_features():
    assert torch.isfinite(small().features(torch.zeros(2, 1, 1, 10))).all()


def test_weights_of_another_size_are_refused():
    state = state_of_bert(0)
    state["encoder.layer.0.output.dense.weight"] = torch.zeros(3, 3)
    with pytest.raises(NessError, match=r"hold \(3, 3\) as 'encoder.layer.0.output.dense.weight', expected \(16, 32\)"):
        small().load_bert(state)


def test_images_are_refused():
    with pytest.raises(NessError, match="reads token ids"):
        MiniLM((3, 32, 32), [2], "stored")


@pytest.mark.transformers
def test_it_is_transformers_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=12, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    bert = transformers.BertModel(config).eval()
    network, ids = small(), sentences()
    network.load_bert(bert.state_dict())
    real = ids.flatten(1) != 0
    states = bert(input_ids=ids.flatten(1).long(), attention_mask=real.long()).last_hidden_state
    expected = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    torch.testing.assert_close(network.features(ids), expected, rtol=1e-4, atol=1e-5)
