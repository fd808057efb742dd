"""The layout of a group of GPUs: the dimensions that divide the work, and each GPU's part.

GPUs are numbered with the data groups outermost. GPU i of `Parallel(data=2, tensor=4, context=2)`:

    i         0  1  2  3  4  5  6  7
    data      0  0  0  0  1  1  1  1      rows
    tensor    0  1  2  3  0  1  2  3      query heads, columns, vocabulary
    heads     0  0  1  1  0  0  1  1      key-value heads
    context   0  1  0  1  0  1  0  1      pages of a row

Each line follows from two strides, as (i % end) // begin. The mesh has an axis for each step from
one stride to the next, so every dimension is a tuple of mesh axes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxattn.core.validation.array_checks import is_integer

# "experts": all GPUs over which a token's experts are distributed. "columns": the GPUs among them
# that share whole experts, and have columns of each.
type Dimension = Literal[
    "all", "data", "tensor", "heads", "context", "expert", "columns", "experts"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """The layout of a model on `data` x `tensor` GPUs.

    Attributes:
        data: The number of data groups. Each group has its own rows, pages and states.
        tensor: The number of GPUs per group. They divide heads, columns and the vocabulary.
        context: The number of these GPUs over which a row's pages are distributed: page p is on GPU
            p mod `context`. With 1, each GPU has all pages.
        expert: The number of GPUs over which whole experts are distributed. If it divides `tensor`,
            these are GPUs of one group; else of all groups, whose tokens are then combined. With 1,
            each group has all experts, divided by columns.
        ordered: Whether sums over GPUs have a fixed order, which does not depend on a token's place
            in the step. `prepare` sets it for exact mode.

    Raises:
        TypeError, ValueError: A number is not a positive integer, or does not divide a number that
            it must divide; the message says which numbers are possible.
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    ordered: bool = False

    def __post_init__(self) -> None:
        for name, value in self._numbers.items():
            if not is_integer(value):
                raise TypeError(f"{name} must be an integer; got {value!r}")
            object.__setattr__(self, name, int(value))
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if self.tensor % self.context:
            raise ValueError(
                f"context={self.context} does not divide tensor={self.tensor}, whose GPUs hold "
                f"the pages; possible values are {_divisors(self.tensor)}"
            )
        if self.gpus % self.expert:
            raise ValueError(
                f"expert={self.expert} does not divide the {self.gpus} GPUs of data={self.data} x "
                f"tensor={self.tensor}; possible values are {_divisors(self.gpus)}"
            )
        strides = self.strides
        for smaller, larger in zip(strides, strides[1:], strict=False):
            if larger % smaller:
                raise ValueError(
                    f"{self.flags}: blocks of {smaller} and of {larger} neighboring GPUs do not "
                    "nest; use numbers that divide each other"
                )

    @property
    def _numbers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("data", "tensor", "context", "expert")}

    @property
    def gpus(self) -> int:
        return self.data * self.tensor

    @property
    def flags(self) -> str:
        """The layout as options of `jaxattn.serve` and `jaxattn.plan`; "" for one GPU."""
        given = self._numbers.items()
        return " ".join(f"--{name} {value}" for name, value in given if value > 1)

    @property
    def experts_meet(self) -> bool:
        """Whether the experts are distributed over the data groups, so that tokens are combined."""
        return bool(self.tensor % self.expert)

    def span(self, dimension: Dimension) -> tuple[int, int]:
        """Returns the strides (begin, end): GPU i has part (i % end) // begin of the dimension."""
        group = self.gpus if self.experts_meet else self.tensor
        match dimension:
            case "all":
                return 1, self.gpus
            case "data":
                return self.tensor, self.gpus
            case "tensor":
                return 1, self.tensor
            case "heads":
                return self.context, self.tensor
            case "context":
                return 1, self.context
            case "expert":
                return group // self.expert, group
            case "columns":
                return 1, group // self.expert
            case "experts":
                return 1, group

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides at which dimensions begin and end, from 1 to the number of GPUs."""
        names: tuple[Dimension, ...] = ("all", "tensor", "context", "expert")
        return tuple(sorted({stride for name in names for stride in self.span(name)}))

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The sizes of the mesh axes by name, the outermost first."""
        steps = zip(self.strides, self.strides[1:], strict=False)
        axes = {_axis(begin): end // begin for begin, end in steps}
        return dict(reversed(axes.items()))

    def axes(self, dimension: Dimension) -> tuple[str, ...]:
        """Returns the mesh axes of a dimension, the outermost first; () if it has one part."""
        begin, end = self.span(dimension)
        strides = [stride for stride in self.strides if begin <= stride < end]
        return tuple(_axis(stride) for stride in reversed(strides))

    def size(self, dimension: Dimension) -> int:
        """Returns the number of parts of a dimension."""
        begin, end = self.span(dimension)
        return end // begin

    def part(self, dimension: Dimension, gpu: int) -> int:
        """Returns the index of GPU `gpu`'s part of a dimension."""
        begin, end = self.span(dimension)
        return gpu % end // begin

    def check_devices(self, devices: Sequence[object]) -> None:
        """Raises ValueError, with both numbers, unless there is a device for each GPU."""
        if len(devices) != self.gpus:
            raise ValueError(
                f"data={self.data} x tensor={self.tensor} needs {self.gpus} GPUs, but "
                f"{len(devices)} devices were given"
            )
        kinds = sorted({str(getattr(device, "device_kind", "")) for device in devices})
        if len(kinds) > 1:
            raise ValueError(f"all GPUs of a group must be of one kind; got {' and '.join(kinds)}")


ALONE = Parallel()  # one GPU


def _axis(stride: int) -> str:
    return f"stride_{stride}"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
