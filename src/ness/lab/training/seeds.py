"""The random numbers of one run: generators that belong to it: a seed gives the same run alone or in company."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from ness.errors import NessError

PURPOSES = ("weights", "order", "step", "method")


def checked(seeds: Sequence[int]) -> tuple[int, ...]:
    """Seeds of runs, each once, from 0 to what fits into 63 bits."""
    if not seeds:
        raise NessError("seeds is empty; expected at least one, e.g. 1 2 3")
    if len({*seeds}) < len(seeds):
        raise NessError(f"seeds is {list(seeds)}; the same seed twice is the same run")
    for seed in seeds:
        if not 0 <= seed < 2**63:
            raise NessError(f"seed {seed}: expected a whole number from 0 to 2**63 - 1")
    return tuple(seeds)


def derive(*entropy: int) -> int:
    """A 63-bit seed from a few integers: different integers give unrelated seeds.

    >>> derive(1, 0) == derive(1, 0), derive(1, 0) == derive(1, 1)
    (True, False)
    """
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True)
class Randomness:
    """One generator a purpose, all from the run's seed.

    `weights` (CPU) draws initial weights, `order` (CPU) the order of samples, `step` (on the device) what a training
    step needs: dropout masks, mix-up partners; `method` (on the device) whatever a method draws between steps;
    `host` (numpy) a few numbers per epoch, e.g. mix-up shares.
    """

    weights: Generator
    order: Generator
    step: Generator
    method: Generator
    host: np.random.Generator

    @classmethod
    def of(cls, seed: int, device: torch.device) -> "Randomness":
        """The generators of the run with this seed."""
        places = (torch.device("cpu"), torch.device("cpu"), device, device)
        weights, order, step, method = (
            Generator(place).manual_seed(derive(seed, number)) for number, place in enumerate(places)
        )
        return cls(weights, order, step, method, np.random.default_rng([seed, len(places)]))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Where every generator stands: uint8 tensors, and numpy's own as JSON."""
        tensors = {name: getattr(self, name).get_state() for name in PURPOSES}
        return tensors, dict(self.host.bit_generator.state)

    def load_state(self, tensors: dict[str, Tensor], host: dict[str, Any]) -> None:
        """Puts every generator where `state` found it."""
        for name in PURPOSES:
            getattr(self, name).set_state(tensors[name])
        self.host.bit_generator.state = host
