import torch
from torch import Generator
from torch.nn import functional as F

from ness.lab.training.loader import Batch
from ness.lab.training.losses import cross_entropy, cross_entropy_of_many

LOGITS = torch.randn(4, 3, generator=Generator().manual_seed(0))
LABELS = torch.tensor([0, 2, 1, 1])


def test_mix_up_weighs_the_two_labels() -> None:
    partner, share = torch.tensor([1, 1, 0, 2]), torch.tensor(0.7)
    batch = Batch(LOGITS, LABELS, 0, partner=partner, share=share)
    expected = 0.7 * F.cross_entropy(LOGITS, LABELS) + 0.3 * F.cross_entropy(LOGITS, partner)
    assert torch.allclose(cross_entropy(LOGITS, batch), expected)
    assert torch.equal(cross_entropy(LOGITS, Batch(LOGITS, LABELS, 0)), F.cross_entropy(LOGITS, LABELS))


def test_each_sample_counts_under_its_own_head() -> None:
    narrow = torch.randn(4, 2, generator=Generator().manual_seed(1))  # a head of two classes only
    batch = Batch(LOGITS, LABELS, 0, tasks=torch.tensor([0, 0, 1, 1]))
    expected = (F.cross_entropy(LOGITS[:2], LABELS[:2]) + F.cross_entropy(narrow[2:], LABELS[2:])) / 2
    assert torch.allclose(cross_entropy_of_many([LOGITS, narrow], batch), expected)
