"""Sharding of a parameter along one of its axes: the ranges that one GPU holds.

The columns q | k | v of a projection with 4 query and 2 key heads of D, over 2 GPUs:

    GPU 0    0 .. 2D    4D .. 5D    6D .. 7D
    GPU 1    2D .. 4D   5D .. 6D    7D .. 8D

A GPU's own columns are thus q | k | v again, with fewer heads. If there are fewer heads than GPUs,
each GPU holds the one that its other heads use.
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
    """The sharding of one axis of a parameter.

    Attributes:
        axis: The axis, counted from the last (-1), because stacks have additional leading axes.
        dimension: The dimension of the layout whose GPUs divide the axis.
        heads: The axis as runs of (count, width): `count` heads of `width` elements each.
        num_replicated: Number of runs at the end that every GPU holds completely.
    """

    axis: int
    dimension: Dimension
    heads: tuple[tuple[int, int], ...]
    num_replicated: int = 0

    def ranges(self, part: int, parts: int) -> list[tuple[int, int]]:
        """Returns one GPU's (begin, end) ranges in order; padding lies past the end."""
        found, before = [], 0
        for number, (count, width) in enumerate(self.heads):
            first, own = 0, count
            if number < len(self.heads) - self.num_replicated:
                first, own = own_heads(count, part, parts)
            found.append((before + first * width, before + (first + own) * width))
            before += count * width
        return found

    def spec(self, dims: int, parallel: Parallel) -> dict[int, tuple[str, ...]]:
        """Returns the mesh axes of the sharded dimension, for a parameter of `dims` dimensions."""
        return {dims + self.axis: parallel.axes(self.dimension)}


# The shardings of a parameter's axes; WHOLE if every GPU holds all of it.
type Cuts = tuple[AxisSharding, ...]
WHOLE: Cuts = ()


def own_heads(count: int, part: int, parts: int) -> tuple[int, int]:
    """Returns (first, count) of `count` heads on one of `parts` GPUs, rounded up."""
    if count >= parts:
        own = -(-count // parts)
        return part * own, own
    return part * count // parts, 1


def divides(count: int, parts: int) -> bool:
    """Returns whether GPUs can hold equally many heads each, or equally many can share one."""
    return count % parts == 0 or parts % count == 0


def partition_spec(cuts: Cuts, dims: int, parallel: Parallel) -> PartitionSpec:
    """Returns the PartitionSpec of a parameter of `dims` dimensions."""
    axes: dict[int, tuple[str, ...]] = {}
    for cut in cuts:
        axes |= cut.spec(dims, parallel)
    return PartitionSpec(*(axes.get(dim) or None for dim in range(dims)))


def own(x: Any, cuts: Cuts, parallel: Parallel, gpu: int) -> Any:
    """Returns GPU `gpu`'s share of a whole parameter, a NumPy or JAX array."""
    for cut in cuts:
        axis = x.ndim + cut.axis
        ranges = cut.ranges(parallel.part(cut.dimension, gpu), parallel.size(cut.dimension))
        x = _ranges_of(x, axis, tuple(ranges))
    return x


def joined(x: Any, cuts: Cuts, parallel: Parallel) -> Any:
    """Returns the shares of all GPUs, concatenated along each sharded axis."""
    for cut in cuts:
        parts = parallel.size(cut.dimension)
        ranges = [each for part in range(parts) for each in cut.ranges(part, parts)]
        merged = ranges[:1]
        for begin, end in ranges[1:]:
            if begin == merged[-1][1]:
                merged[-1] = merged[-1][0], end
            else:
                merged.append((begin, end))
        x = _ranges_of(x, x.ndim + cut.axis, tuple(merged))
    return x


def compute_local_shape(shape: tuple[int, ...], cuts: Cuts, parallel: Parallel) -> tuple[int, ...]:
    """Returns the shape of each GPU's share of a whole parameter; it is the same on every GPU."""
    sizes = list(shape)
    for cut in cuts:
        ranges = cut.ranges(0, parallel.size(cut.dimension))
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
    """Returns the sharding of a linear for its FP8 weight, [out, in], or for its block scales.

    Args:
        cut: The sharding of the weight [in, out].
        parts: Number of GPUs that hold one part each.
        name: Name of the linear, for the message.

    Raises:
        ShardingError: A part ends within a block of scales.
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
    """Returns the sharding of a linear for its 4-bit weight, tiles of [out, in].

    Raises:
        ShardingError: A part ends within a tile.
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
    """A mixer or a feed-forward as it is on one GPU.

    Attributes:
        layer: The layer with fewer heads or columns.
        cuts: The shardings of its parameters by name; for a linear or norm, by the module's name.
            Other parameters are whole.
    """

    layer: Layer
    cuts: Mapping[str, Cuts]


class ShardingError(ValueError):
    """A model does not support a layout; the message lists the supported ones."""


def refuse(unit: str, count: int, flag: str, num_parts: int, max_parts: int = 64) -> ShardingError:
    """Returns the error for heads or columns that this number of GPUs cannot divide."""
    possible = ", ".join(
        str(n) for n in range(1, max_parts + 1) if divides(count, n) and n <= count
    )
    return ShardingError(
        f"{flag}={num_parts} does not divide the {count} {unit}; possible values are {possible}"
    )


@functools.singledispatch
def shard_layer(layer: Any, stream: Any, parallel: Parallel) -> ShardedLayer[Any]:
    """Returns a mixer or a feed-forward as it is on one GPU, with the shardings of its parameters.

    Raises:
        ShardingError: The layer does not support the layout, or no rule for it exists.
    """
    raise ShardingError(
        f"there is no sharding rule for {type(layer).__name__}; register one with "
        "jaxattn.models.sharding.axis_sharding.shard_layer"
    )
