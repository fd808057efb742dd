"""Scratch memory of a decode step: stated before anything is allocated, held once, never grown.

Every op states its scratch as an `ArenaSpec`, a pure function of static shapes. Specs combine:
`a | b` for ops that run one after another (all layers, all kinds of layer; they overlay), `a + b`
for scratch that is live at the same time. `Arena.allocate(spec)` makes the buffers, and the step
carries them, donated, through its scan over layers, so their bytes do not depend on the depth:

    spec = mla.scratch(...) | gdn.scratch(...)      # bytes known without a device: spec.nbytes
    arena = Arena.allocate(spec)
    out, lse, arena = mla_decode(..., arena=arena)  # inside the jitted step

An arena has one flat buffer per dtype, a lane; an op's regions lie in it one after another. It is
not one buffer of bytes because a Mosaic GPU kernel cannot bitcast a global-memory ref (jax 0.11.2).
A lane's contents mean nothing between ops. What must survive (semaphores, counters) is persistent:
a buffer of its own, keyed by name, zeroed once, when the arena is allocated.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import DictKey, GetAttrKey
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

# Elements. Every region starts at a multiple of it and every lane's size is one, so that a lane can
# be reshaped to rows of any power of two up to it, with each region starting on a row.
ALIGNMENT = 1024

ShapeAndDtype = tuple[Sequence[int], DTypeLike]

_MAX_START = 2**31 - 1
_NO_GROWTH = "An arena does not grow: allocate it from a spec that includes this one (a | b)."


class ArenaError(ValueError):
    """The arena does not fit a request. Tracing a step raises this error, before anything runs."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A typed range of a lane, or (offset 0) a persistent buffer. Offset and size in elements."""

    shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + _round_up(self.size)

    @property
    def nbytes(self) -> int:
        return self.size * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class ArenaSpec:
    """The scratch that an op or a whole step needs. A spec is hashable, and needs no device.

    An arena has one flat buffer for each dtype, a lane, which holds the regions of that dtype.

    Create the spec of an op with `ArenaSpec.of`. Combine specs of ops that run one after another
    with `|` (the maximum of each lane), and specs that are live at the same time with `+` (the
    sum). `ArenaSpec()` is empty, and the identity of both operators:
    `functools.reduce(operator.or_, specs, ArenaSpec())` is the spec of a step. Both operators unite
    persistent buffers by name. A combined spec has bytes but no regions: read and write with the
    spec of the op.
    """

    op: str = "spec"
    lanes: tuple[tuple[str, int], ...] = ()  # (dtype, elements), sorted by dtype
    regions: tuple[tuple[str, Region], ...] = ()
    persistent: tuple[tuple[str, Region], ...] = ()  # sorted by name

    @classmethod
    def of(
        cls,
        op: str = "spec",
        /,
        *,
        persistent: Mapping[str, ShapeAndDtype] | None = None,
        **regions: ShapeAndDtype,
    ) -> Self:
        """The spec of one op: regions that are live together, each `name=(shape, dtype)`.

            ArenaSpec.of("mla_decode", out=((2048, 128, 512), jnp.bfloat16))

        Args:
            op: the op's public name, for messages.
            persistent: name -> (shape, dtype), zeroed once. All ops that use the arena share these
                names: put the op's name into them.
            **regions: laid out in this order in their dtype's lane, offsets and sizes rounded up to
                1024 elements.

        Raises:
            ArenaError: a shape is not of static, non-negative ints, a dtype is narrower than a
                byte, or a name is both a region and persistent.
        """
        sizes: dict[str, int] = {}
        placed = []
        for name, shape_and_dtype in regions.items():
            region = _region(op, name, shape_and_dtype)
            region = dataclasses.replace(region, offset=sizes.get(region.dtype, 0))
            placed.append((name, region))
            sizes[region.dtype] = region.end
        persistent_regions = {
            name: _region(op, name, value) for name, value in (persistent or {}).items()
        }
        if shared_names := sorted(persistent_regions.keys() & regions.keys()):
            raise ArenaError(
                f"{op}: {shared_names} name both regions and persistent buffers; rename one of each"
            )
        return cls(op, _items(sizes), tuple(placed), _items(persistent_regions))

    @property
    def sizes(self) -> dict[str, int]:
        """Dtype name -> elements of its lane."""
        return dict(self.lanes)

    @property
    def nbytes(self) -> int:
        """Bytes of an arena allocated from this spec, persistent buffers included."""
        lanes = sum(size * jnp.dtype(dtype).itemsize for dtype, size in self.lanes)
        return lanes + sum(region.nbytes for _, region in self.persistent)

    def region(self, name: str) -> Region:
        """The region, or the persistent buffer, with this name."""
        named = dict(self.regions) | dict(self.persistent)
        if name not in named:
            hint = "" if self.regions else " (a combined spec has none: use the op's own spec)"
            raise ArenaError(f"{self.op}: no region {name!r} in {sorted(named)}{hint}")
        return named[name]

    def __or__(self, other: "ArenaSpec") -> "ArenaSpec":
        return self._combine(other, max)

    def __add__(self, other: "ArenaSpec") -> "ArenaSpec":
        return self._combine(other, operator.add)

    def _combine(self, other: "ArenaSpec", elements: Any) -> "ArenaSpec":
        own_sizes, other_sizes = self.sizes, other.sizes
        lanes = {
            d: elements(own_sizes.get(d, 0), other_sizes.get(d, 0))
            for d in own_sizes.keys() | other_sizes.keys()
        }
        persistent = dict(self.persistent)
        for name, region in other.persistent:
            if persistent.setdefault(name, region) != region:
                raise ArenaError(
                    f"persistent {name!r} is {persistent[name]} in one spec and {region} in "
                    "another; rename one of them"
                )
        return ArenaSpec(lanes=_items(lanes), persistent=_items(persistent))


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Arena:
    """The scratch buffers: a pytree to donate and to carry. Methods that write return a new
    `Arena`.

    Thread the arena like any state, with one live arena at a time. Two models, or two batches in
    flight, need two arenas. Leaves have the names `arena['bfloat16']` and
    `arena.persistent['name']`.

    Attributes:
        lanes: The flat buffers, by dtype name.
        persistent: The persistent buffers, by name, each with its own shape.
        start: The first element that regions may use, by dtype name; 0 unless `after` moved it.
    """

    lanes: dict[str, Shaped[Array, " elements"]]
    persistent: dict[str, Array]
    start: tuple[tuple[str, int], ...] = ()

    @classmethod
    def allocate(cls, spec: ArenaSpec, *, device: Any = None) -> Self:
        """Zeroed buffers of exactly `spec.nbytes` bytes.

        `jax.eval_shape(lambda: Arena.allocate(spec))` returns the abstract arena, to lower a step
        without allocating anything.

        Args:
            device: a `jax.Device` or `Sharding`; None is the default device.

        Raises:
            TypeError: `spec` is not an ArenaSpec.
            ArenaError: JAX created other buffers than planned (64-bit dtypes with x64 disabled).
        """
        if not isinstance(spec, ArenaSpec):
            raise TypeError(
                f"Arena.allocate: spec must be an ArenaSpec, such as jaxattn.mla.scratch(...); got "
                f"{type(spec).__name__}"
            )
        lanes = {dtype: jnp.zeros(size, dtype, device=device) for dtype, size in spec.lanes}
        persistent = {
            name: jnp.zeros(region.shape, region.dtype, device=device)
            for name, region in spec.persistent
        }
        arena = cls(lanes, persistent)
        if arena.nbytes != spec.nbytes:
            got = ", ".join(f"{dtype} as {lane.dtype.name}" for dtype, lane in lanes.items())
            raise ArenaError(
                f"the spec needs {spec.nbytes:,} bytes, but JAX allocated {arena.nbytes:,}: {got}"
            )
        return arena

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.size * b.dtype.itemsize for b in jax.tree.leaves(self))

    def check(self, spec: ArenaSpec) -> None:
        """Raises ArenaError unless the arena has room for `spec`."""
        for dtype, num_required in spec.lanes:
            num_available = (
                self.lanes[dtype].size - self._start(dtype) if dtype in self.lanes else 0
            )
            if num_required > num_available or dtype not in self.lanes:
                first_misfit = ""
                for name, region in reversed(spec.regions):
                    if region.dtype == dtype and region.end > num_available:
                        first_misfit = f"region {name!r} {region} does not fit: "
                width = jnp.dtype(dtype).itemsize
                raise ArenaError(
                    f"{spec.op}: {first_misfit}the spec needs {num_required * width:,} bytes of "
                    f"{dtype} scratch, but the arena has {num_available * width:,}. {_NO_GROWTH}"
                )
        for name, region in spec.persistent:
            buffer = self.persistent.get(name)
            if buffer is None or (buffer.shape, buffer.dtype.name) != (region.shape, region.dtype):
                has = "none" if buffer is None else f"{_describe(buffer)} ({buffer.nbytes:,} bytes)"
                raise ArenaError(
                    f"{spec.op}: the spec needs persistent {name!r} {region} ({region.nbytes:,} "
                    f"bytes), but the arena has {has}. {_NO_GROWTH}"
                )

    def read(self, spec: ArenaSpec, name: str) -> Array:
        """The region's value, in its shape: a reshape if the region is the whole lane, else a
        slice.

        Raises:
            ArenaError: the arena is too small for `spec`, or `spec` has no such region.
        """
        region, start = self._find(spec, name)
        if name in dict(spec.persistent):
            return self.persistent[name]
        lane = self.lanes[region.dtype]
        if region.size != lane.size:
            lane = lax.slice(lane, (start,), (start + region.size,))
        return lane.reshape(region.shape)

    def write(self, spec: ArenaSpec, name: str, value: Array) -> Self:
        """The arena with the region set to `value`, of exactly the region's shape and dtype.

        Raises:
            ArenaError: as in `read`; the value's shape or dtype differs from the region's; or the
                region starts after 2^31 elements.
        """
        region, start = self._find(spec, name)
        if (value.shape, value.dtype.name) != (region.shape, region.dtype):
            raise ArenaError(
                f"{spec.op}: region {name!r} is {region}, but the value is {_describe(value)}; "
                "values are neither cast nor broadcast"
            )
        if name in dict(spec.persistent):
            return dataclasses.replace(self, persistent=self.persistent | {name: value})
        lane = self.lanes[region.dtype]
        if region.size == lane.size:
            return self._with(region.dtype, value.reshape(-1))
        if start > _MAX_START:
            raise ArenaError(
                f"{spec.op}: region {name!r} starts at element {start:,} of the {region.dtype} "
                "lane, past XLA's int32 start indices; write it through lane and with_lane"
            )
        # Without it XLA takes a kernel that last wrote the lane for the source of this update, and
        # refuses to compile the fusion that it makes of both (jaxlib 0.11.2, "DUS target").
        lane = lax.optimization_barrier(lane)
        lane = lax.dynamic_update_slice(lane, value.reshape(-1), (start,))
        return self._with(region.dtype, lane)

    def lane(
        self, spec: ArenaSpec, name: str, width: int
    ) -> tuple[Shaped[Array, "rows width"], int]:
        """The region's whole lane as rows of `width`, and the region's first row.

        Use this method for kernels: pass the whole lane to the kernel, aliased to an output, write
        from the first row on, and pass the output to `with_lane`. The method only reshapes, so XLA
        updates the lane in place in the carry of a scan.

        Raises:
            ArenaError: as in `read`; `width` does not divide the lane (powers of two up to 1024
                do); or the region is persistent, which has its own buffer (use `read` and `write`).
        """
        region, start = self._find(spec, name, in_lane=True)
        lane = self.lanes[region.dtype]
        if width < 1 or lane.size % width or start % width:
            raise ArenaError(
                f"{spec.op}: {width=} must divide the {lane.size:,} elements of the "
                f"{region.dtype} lane and the {start:,} before {name!r}; powers of two up to "
                f"{ALIGNMENT} do"
            )
        return lane.reshape(-1, width), start // width

    def with_lane(self, spec: ArenaSpec, name: str, buffer: Shaped[Array, "rows width"]) -> Self:
        """The arena with the region's whole lane replaced by the output of a kernel that wrote to
        `lane`.

        Raises:
            ArenaError: as in `read`; or the buffer has another dtype or number of elements than the
                lane.
        """
        region, _ = self._find(spec, name, in_lane=True)
        lane = self.lanes[region.dtype]
        if (buffer.dtype, buffer.size) != (lane.dtype, lane.size):
            raise ArenaError(
                f"{spec.op}: region {name!r} lies in a {region.dtype} lane of {lane.size:,} "
                f"elements, but the buffer is {_describe(buffer)}; pass the whole lane"
            )
        return self._with(region.dtype, buffer.reshape(-1))

    def after(self, spec: ArenaSpec) -> Self:
        """The same buffers, in which an op's regions begin after those of `spec`.

        Use this method for the second part of a `+`, whose op must not write to the first part:

            first, second = mla.scratch(...), gdn.scratch(...)   # allocated from first + second
            out, lse, arena = mla_decode(..., arena=arena)
            o, state, rest = gated_delta_rule_decode(..., arena=arena.after(first))
            arena = arena.join(rest)                             # first's regions are unchanged

        The two parts share buffers, so use them one after another as in this example. Never write
        to an older arena after you created a newer one, or XLA copies the lane. Both parts share
        persistent buffers.

        Raises:
            ArenaError: the arena is too small for `spec`.
        """
        self.check(spec)
        start = {dtype: self._start(dtype) + size for dtype, size in spec.lanes}
        return dataclasses.replace(self, start=_items(dict(self.start) | start))

    def join(self, rest: "Arena") -> Self:
        """Reverses `after`: the buffers of `rest`, with the start of this arena."""
        return dataclasses.replace(self, lanes=rest.lanes, persistent=rest.persistent)

    def poison(self) -> Self:
        """The arena with NaN in its lanes (integers: their maximum). Persistent buffers are
        unchanged.

        For tests: poisoning the arena between two ops of a step must not change a bit of the
        result.
        """
        return dataclasses.replace(self, lanes={d: _poisoned(b) for d, b in self.lanes.items()})

    def __repr__(self) -> str:
        return f"Arena(lanes={list(self.lanes)}, persistent={list(self.persistent)})"

    def tree_flatten_with_keys(self) -> tuple[Iterable[Any], Any]:
        lanes = [(DictKey(dtype), buffer) for dtype, buffer in self.lanes.items()]
        persistent = (GetAttrKey("persistent"), self.persistent)
        return [*lanes, persistent], (tuple(self.lanes), self.start)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Iterable[Any]) -> Self:
        dtypes, start = static
        *buffers, persistent = children
        return cls(dict(zip(dtypes, buffers, strict=True)), persistent, start)

    def _start(self, dtype: str) -> int:
        return dict(self.start).get(dtype, 0)

    def _find(self, spec: ArenaSpec, name: str, in_lane: bool = False) -> tuple[Region, int]:
        region = spec.region(name)
        self.check(spec)
        if in_lane and name in dict(spec.persistent):
            raise ArenaError(
                f"{spec.op}: {name!r} is persistent and not in a lane; use read and write"
            )
        return region, self._start(region.dtype) + region.offset

    def _with(self, dtype: str, buffer: Array) -> Self:
        return dataclasses.replace(self, lanes=self.lanes | {dtype: buffer})


def _region(op: str, name: str, shape_and_dtype: ShapeAndDtype) -> Region:
    if not isinstance(shape_and_dtype, tuple | list) or len(shape_and_dtype) != 2:
        raise ArenaError(f"{op}: region {name!r} must be (shape, dtype), got {shape_and_dtype!r}")
    shape, dtype = shape_and_dtype
    try:
        dims = tuple(operator.index(dim) for dim in shape)
    except TypeError as error:  # a traced dimension: a spec is a function of static shapes
        raise ArenaError(
            f"{op}: region {name!r}: shape {shape} must have static integers"
        ) from error
    if any(dim < 0 for dim in dims):
        raise ArenaError(f"{op}: region {name!r}: shape {dims} has a negative dimension")
    kind = jnp.dtype(dtype)
    # XLA packs these on some backends and not on others, so their bytes are not known beforehand.
    if re.match(r"(u?int|float)[1246](?!\d)", kind.name):
        raise ArenaError(f"{op}: region {name!r}: {kind.name} is narrower than a byte; use uint8")
    return Region(dims, kind.name)


def _poisoned(buffer: Array) -> Array:
    if jnp.issubdtype(buffer.dtype, jnp.inexact):
        return jnp.full_like(buffer, jnp.nan)
    return jnp.full_like(buffer, True if buffer.dtype == jnp.bool_ else jnp.iinfo(buffer.dtype).max)


def _round_up(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _items[V](mapping: Mapping[str, V]) -> tuple[tuple[str, V], ...]:
    return tuple(sorted(mapping.items(), key=lambda item: item[0]))


def _describe(array: Array) -> str:
    return f"{array.dtype.name}[{','.join(map(str, array.shape))}]"
