"""Sharding of a parameter along one of its axes: the ranges that one GPU has.

The columns q | k | v of a projection with 4 query and 2 key heads of D, over 2 GPUs:

    GPU 0    0 .. 2D    4D .. 5D    6D .. 7D
    GPU 1    2D .. 4D   5D .. 6D    7D .. 8D

So a GPU's own columns are again q | k | v, of fewer heads. Of heads that are fewer than GPUs, each
GPU has the one that its others belong to.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxattn.core.numerics.four_bit_tiles import ROWS, FourBitFormat
from jaxattn.core.numerics.fp8_block_scaling import BLOCK
from jaxattn.parallel import Dimension, Parallel


@dataclasses.dataclass(frozen=True)
class AxisSharding:
    """How one axis of a parameter is divided.

    Attributes:
        axis: counted from the last, -1: stacks have more axes in front.
        over: what the GPUs of a part are to each other.
        heads: the axis, as runs of (count, width): so many heads of so many numbers.
        whole: how many of the runs, the last ones, every GPU has all of.
    """

    axis: int
    over: Dimension
    heads: tuple[tuple[int, int], ...]
    whole: int = 0

    def ranges(self, part: int, parts: int) -> list[tuple[int, int]]:
        """(begin, end) of what one of `parts` GPUs has, in order. Padding lies past the end."""
        found, before = [], 0
        for number, (count, width) in enumerate(self.heads):
            first, own = 0, count
            if number < len(self.heads) - self.whole:
                first, own = own_heads(count, part, parts)
            found.append((before + first * width, before + (first + own) * width))
            before += count * width
        return found

    def spec(self, dims: int, parallel: Parallel) -> dict[int, tuple[str, ...]]:
        """The mesh axes of a dimension of a parameter of `dims`."""
        return {dims + self.axis: parallel.axes(self.over)}


# Of a parameter that every GPU has all of.
type Cuts = tuple[AxisSharding, ...]
WHOLE: Cuts = ()


def own_heads(count: int, part: int, parts: int) -> tuple[int, int]:
    """(first, how many) of `count` heads that one of `parts` GPUs has, rounded up."""
    if count >= parts:
        own = -(-count // parts)
        return part * own, own
    return part * count // parts, 1


def divides(count: int, parts: int) -> bool:
    """Whether heads go over so many GPUs: in equal numbers, or each to as many GPUs."""
    return count % parts == 0 or parts % count == 0


def partition_spec(cuts: Cuts, dims: int, parallel: Parallel) -> PartitionSpec:
    """The PartitionSpec of a parameter of `dims` dimensions."""
    axes: dict[int, tuple[str, ...]] = {}
    for cut in cuts:
        axes |= cut.spec(dims, parallel)
    return PartitionSpec(*(axes.get(dim) or None for dim in range(dims)))


def own(x: Any, cuts: Cuts, parallel: Parallel, gpu: int) -> Any:
    """What GPU number `gpu` has of a whole parameter, NumPy's or JAX's."""
    for cut in cuts:
        axis = x.ndim + cut.axis
        ranges = cut.ranges(parallel.part(cut.over, gpu), parallel.size(cut.over))
        x = _ranges_of(x, axis, tuple(ranges))
    return x


def joined(x: Any, cuts: Cuts, parallel: Parallel) -> Any:
    """What all GPUs have of a whole parameter, part after part along each axis that is cut."""
    for cut in cuts:
        parts = parallel.size(cut.over)
        ranges = [each for part in range(parts) for each in cut.ranges(part, parts)]
        merged = ranges[:1]
        for begin, end in ranges[1:]:
            if begin == merged[-1][1]:
                merged[-1] = merged[-1][0], end
            else:
                merged.append((begin, end))
        x = _ranges_of(x, x.ndim + cut.axis, tuple(merged))
    return x


def own_shape(shape: tuple[int, ...], cuts: Cuts, parallel: Parallel) -> tuple[int, ...]:
    """The shape of what each GPU has of a whole parameter; it is the same on every GPU."""
    sizes = list(shape)
    for cut in cuts:
        ranges = cut.ranges(0, parallel.size(cut.over))
        sizes[cut.axis] = sum(end - begin for begin, end in ranges)
    return tuple(sizes)


def _ranges_of(x: Any, axis: int, ranges: tuple[tuple[int, int], ...]) -> Any:
    numbers: Any = np if isinstance(x, np.ndarray) else jnp
    before, size = (slice(None),) * axis, x.shape[axis]
    pieces = [x[(*before, slice(begin, min(end, size)))] for begin, end in ranges]
    missing = sum(end - max(begin, size) for begin, end in ranges if end > size)
    if missing:
        shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
        pieces.append(numbers.zeros(shape, x.dtype))
    return pieces[0] if len(pieces) == 1 else numbers.concatenate(pieces, axis=axis)


def of_fp8(cut: AxisSharding, parts: int, name: str, scales: bool) -> AxisSharding:
    """The cut of a linear as its FP8 weight has it, [out, in], or the scales of its blocks.

    Args:
        cut: of the weight [in, out].
        parts: GPUs that have a part each.
        name: of the linear, for the message.

    Raises:
        ShardingError: a part ends within a block of scales.
    """
    axis = -3 - cut.axis
    if not scales:
        return dataclasses.replace(cut, axis=axis)
    blocks = []
    for count, width in cut.heads:
        each = own_heads(count, 0, parts)[1]
        whole, size = (parts, each * width) if count >= parts else (count, width)
        if size % BLOCK:
            raise ShardingError(
                f"{name} in FP8 over {parts} GPUs has parts of {size}, which do not divide into "
                f"blocks of {BLOCK} that share a scale; use fewer GPUs, or dense='bfloat16' "
                "(--dense bfloat16)"
            )
        blocks.append((whole, size // BLOCK))
    return dataclasses.replace(cut, axis=axis, heads=tuple(blocks))


def of_tiles(cut: AxisSharding, parts: int, name: str, form: FourBitFormat) -> AxisSharding:
    """The cut of a linear as its weight of 4 bits has it, tiles of [out, in].

    Raises:
        ShardingError: a part ends within a tile.
    """
    side = {-1: ROWS, -2: form.columns}[cut.axis]
    tiles = []
    for count, width in cut.heads:
        each = own_heads(count, 0, parts)[1]
        whole, size = (parts, each * width) if count >= parts else (count, width)
        if size % side:
            raise ShardingError(
                f"{name} in 4 bits over {parts} GPUs has parts of {size}, which do not divide "
                f"into tiles of {side}; use fewer GPUs, or dense='bfloat16' (--dense bfloat16)"
            )
        tiles.append((whole, size // side))
    return dataclasses.replace(cut, axis={-1: -3, -2: -2}[cut.axis], heads=tuple(tiles))


@dataclasses.dataclass(frozen=True)
class ShardedLayer[Layer]:
    """A mixer or a feed-forward as one GPU has it.

    Attributes:
        layer: with fewer heads or columns.
        cuts: of its parameters by name; those of a linear or norm under the name of the module.
            The others are whole.
    """

    layer: Layer
    cuts: Mapping[str, Cuts]


class ShardingError(ValueError):
    """A model has no such layout; the message says which it has."""


def refuse(what: str, count: int, flag: str, given: int, most: int = 64) -> ShardingError:
    """The error of heads or columns that so many GPUs cannot divide."""
    possible = ", ".join(str(n) for n in range(1, most + 1) if divides(count, n) and n <= count)
    return ShardingError(
        f"{flag}={given} does not divide the {count} {what}; possible values are {possible}"
    )


@functools.singledispatch
def divided_layer(layer: Any, stream: Any, parallel: Parallel) -> ShardedLayer[Any]:
    """A mixer or a feed-forward as one GPU has it, and how its parameters are cut.

    Raises:
        ShardingError: it has no such layout, or none is known.
    """
    raise ShardingError(
        f"there is no sharding rule for {type(layer).__name__}; register one with "
        "jaxattn.models.sharding.axis_sharding.divided_layer"
    )
