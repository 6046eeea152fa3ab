"""Layer kinds: what a layer's input rows are, and how a matrix of shape (groups, o, d) becomes its weight.

A `Layer` is one place where input rows meet a weight. Most modules hold one; `nn.MultiheadAttention` holds four (q, k,
v and the output projection). A new kind is one class with `find`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ness.distributed import gathered
from ness.errors import NessError

Rows = Tensor  # (groups, n, d), or (groups, samples, …) whose entries are those of the rows, in their order
#: Takes the rows of one forward call and the outputs that belong to them.
Record = Callable[[Rows, Tensor], None]


class Layer(ABC):
    """One place where input rows meet a weight: its names, its sizes, its rows.

    `modules` are all modules that hold this very weight (more than one where weights are tied), `hosts` those whose
    forward calls show its rows, one beside each. `weight_part` and `bias_part` cut a stacked parameter along its first
    dimension, as the in-projection of attention needs.
    """

    kind: ClassVar[str] = ""
    kinds: ClassVar[list[type[Layer]]] = []

    name: str
    modules: list[nn.Module]
    weight_name = "weight"
    bias_name: str | None = "bias"
    weight_part: slice | None = None
    bias_part: slice | None = None
    batch_first: bool | None = None  # whether calls are (B, T, …), where the module itself says so; False: (T, B, …)
    groups: int = 1
    outputs: int  # o, output units per group
    fan_in: int  # d, inputs per group, the constant 1 of a bias not counted

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.kind:
            Layer.kinds.append(cls)

    @classmethod
    @abstractmethod
    def find(cls, name: str, module: nn.Module) -> list[Layer]:
        """The layers of this kind that `module` holds, or none."""

    @property
    def hosts(self) -> Sequence[nn.Module]:
        """The modules to watch: those that hold the weight, unless others run it for them."""
        return self.modules

    def join(self, other: Layer) -> None:
        """Take over the modules of a layer that has the same weight."""
        self.modules.extend(other.modules)

    @abstractmethod
    def watch(self, module: nn.Module, record: Record) -> RemovableHandle:
        """Call `record(rows, outputs)` once at every forward call of `module`, one of the hosts."""

    def by_position(self, outputs: Tensor) -> Tensor:
        """The outputs of one call with their units last, (*positions, units): a position for every row of a group."""
        return outputs

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The first module that holds the weight."""
        return self.modules[0]

    @property
    def weight(self) -> nn.Parameter:
        """The whole parameter as the model stores it."""
        return stored_parameter(self.module, self.weight_name)

    @property
    def bias(self) -> nn.Parameter | None:
        """The whole bias parameter, if there is one."""
        return None if self.bias_name is None else self.module._parameters.get(self.bias_name)

    @property
    def width(self) -> int:
        """Columns of the Gram: the fan-in, and one more for the constant of a bias."""
        return self.fan_in + (self.bias is not None)

    def stored(self) -> Tensor:
        """[W b] as the model stores it, (groups, o, width), a copy in the parameter's own dtype."""
        weight, bias = gathered(self.weight.detach()), self.bias
        return self.joint(weight, None if bias is None else gathered(bias.detach()))

    def differs(self, matrix: Tensor) -> Tensor:
        """Whether the model stores another [W b] than this one (groups, o, width): (), bool, without waiting for it."""
        weight = self.weight.detach() if self.weight_part is None else self.weight.detach()[self.weight_part]
        pairs = [(self.to_matrix(weight), matrix[..., : self.fan_in])]
        if self.bias is not None:
            bias = self.bias.detach() if self.bias_part is None else self.bias.detach()[self.bias_part]
            pairs.append((bias.reshape(self.groups, self.outputs), matrix[..., self.fan_in]))
        pairs = [(now.to(then.device), then) for now, then in pairs]
        if matrix.device.type == "cpu":  # nobody to wait for
            return torch.tensor(not all(now.dtype == then.dtype and torch.equal(now, then) for now, then in pairs))
        return torch.stack([(now != then).any() for now, then in pairs]).any()

    def joint(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[W b] (groups, o, width) of a parameter pair, both real."""
        if weight.is_complex():  # the model was converted since: half of every weight would be lost in a Gram's float64
            raise NessError(
                f"layer {self.name or '(model)'!r} is {weight.dtype}: expected the real weights it had when the guard "
                "was made; convert the model back"
            )
        matrix = self.to_matrix(weight if self.weight_part is None else weight[self.weight_part])
        if bias is None:
            return matrix.clone()
        part = bias if self.bias_part is None else bias[self.bias_part]
        return torch.cat([matrix, part.reshape(self.groups, self.outputs, 1)], dim=-1)

    def to_matrix(self, weight: Tensor) -> Tensor:
        """A weight in torch's layout as (groups, o, d)."""
        return weight.reshape(self.groups, self.outputs, self.fan_in)

    def to_weight(self, matrix: Tensor) -> Tensor:
        """(groups, o, d) in torch's layout of the weight."""
        shape = self.weight.shape
        return matrix.reshape(-1, *shape[1:])

    # -- forward ----------------------------------------------------------------------------------------------------

    #: The module's own forward with another weight, or None where the weight can only be read by the module itself.
    apply: Callable[[nn.Module, Tensor, Tensor, Tensor | None], Tensor] | None = None

    def through(self, module: nn.Module, x: Tensor, basis: Tensor, constant: Tensor | None) -> Tensor:
        """x B: inputs in the coordinates of a basis (groups, d, r), `constant` (groups, r) added."""
        raise NotImplementedError(f"{self.kind} has no factored form")

    def onto(self, hidden: Tensor, update: Tensor) -> Tensor:
        """h Aᵀ: from the coordinates of a basis to outputs, A (groups, o, r)."""
        raise NotImplementedError(f"{self.kind} has no factored form")


def stored_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter that a module stores under this name."""
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any], *names: str) -> Tensor:
    """The module's input tensor, given by position or by name."""
    value = args[0] if args else next(kwargs[name] for name in names if name in kwargs)
    assert isinstance(value, Tensor)
    return value


def stores(module: nn.Module, *names: str) -> bool:
    """Whether the module stores all these parameters itself (a parametrised weight is computed, not stored)."""
    return all(name in module._parameters for name in names)
