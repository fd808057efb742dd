"""Loading of parameters to a group of GPUs, each of which receives its own share.

The loader reads each block of a folder once, and sends it only to those GPUs that have a part of
it: a GPU with other experts does not receive it. The transformation of a block runs on each GPU,
which keeps its ranges. A GPU thus holds its parameters and a few blocks, and the host holds one
block per reader.
"""

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Int

from jaxattn.models.loading import read_plan
from jaxattn.models.loading.read_plan import PublishedWeight, ReadBlock, plan_reads
from jaxattn.models.loading.weight_loader import (
    READERS,
    HostBufferPool,
    OnProgress,
    open_files,
    read,
    wire_dtype,
)
from jaxattn.models.sharding.axis_sharding import Cuts, own
from jaxattn.models.sharding.decoder import ShardedDecoder
from jaxattn.models.weight_map.encodings import WeightEncoding
from jaxattn.models.weight_map.tensor_mapping import Key
from jaxattn.models.weight_map.transforms import WeightTransform
from jaxattn.parallel import DeviceGroup, Parallel


class ShardSlice(NamedTuple):
    """The part of a block that belongs to one GPU.

    Attributes:
        begin: Where the part begins in the transformed block.
        size: Size of the part.
        start: Where the part goes in the GPU's parameter.
    """

    begin: tuple[int, ...]
    size: tuple[int, ...]
    start: tuple[int, ...]


def load_sharded_weights(
    model: ShardedDecoder,
    weights: Sequence[PublishedWeight],
    scales: Mapping[Key, np.ndarray],
    group: DeviceGroup,
    *,
    readers: int = READERS,
    on_progress: OnProgress | None = None,
) -> nnx.State:
    """Returns the parameters over a group; `scales` are some of them.

    Raises:
        CheckpointError: A file cannot be read, or is shorter than its header states.
    """
    full_shapes = _shapes(model.whole)
    shapes = {key: shape for key, shape in _shapes(model).items() if key not in scales}
    filled = []
    for device in group.local_devices:
        with jax.default_device(device):
            zeros = jax.jit(lambda: {k: jnp.zeros(s.shape, s.dtype) for k, s in shapes.items()})()
        for key, scale in scales.items():
            cuts = model.cuts_of(key)
            share = own(scale, cuts, model.parallel, group.number(device))
            zeros[key] = jax.device_put(share, device)
        filled.append(zeros)
    blocks = plan_reads(weights, full_shapes, read_plan.BLOCK_BYTES)
    total, done = sum(_bytes(block) for block in blocks), 0
    for block, arrays in _read_ahead(blocks, readers):
        cuts, part = model.cuts_of(block.key), _part_shape(block, len(full_shapes[block.key].shape))
        for device, targets in zip(group.local_devices, filled, strict=True):
            gpu = group.number(device)
            pieces = shard_slices(block.start, part, cuts, model.parallel, gpu)
            if not pieces:
                continue
            sent = jax.device_put(arrays, device)
            for piece in pieces:
                targets[block.key] = _place(
                    targets.pop(block.key),
                    sent,
                    np.array(piece.begin, np.int32),
                    np.array(piece.start, np.int32),
                    size=piece.size,
                    stored=block.stored,
                    transform=block.transform,
                    stacked=block.stacked,
                )
        # Wait, so that only the blocks that are read ahead are pending on the host.
        jax.block_until_ready([targets[block.key] for targets in filled])
        done += _bytes(block)
        if on_progress:
            on_progress(done, total)
    flat = nnx.to_flat_state(model.param_shapes())
    states = [
        nnx.from_flat_state([(key, leaf.replace(targets[key])) for key, leaf in flat])
        for targets in filled
    ]
    return group.join([_like(model, state) for state in states], model.param_specs())


def shard_slices(
    start: Sequence[int], shape: Sequence[int], cuts: Cuts, parallel: Parallel, gpu: int
) -> list[ShardSlice]:
    """Returns GPU `gpu`'s parts of a block that fills `shape` of a parameter from `start` on."""
    axes: list[list[tuple[int, int, int]]] = [
        [(0, size, first)] for first, size in zip(start, shape, strict=True)
    ]
    for each in cuts:
        axis = len(axes) + each.axis
        first, last, before = start[axis], start[axis] + shape[axis], 0
        found = []
        for begin, end in each.ranges(
            parallel.part(each.dimension, gpu), parallel.size(each.dimension)
        ):
            low, high = max(begin, first), min(end, last)
            if low < high:
                found.append((low - first, high - low, before + low - begin))
            before += end - begin
        axes[axis] = found
    return [ShardSlice(*zip(*places, strict=True)) for places in itertools.product(*axes)]


@functools.partial(
    jax.jit, static_argnames=("size", "stored", "transform", "stacked"), donate_argnums=0
)
def _place(
    target: Array,
    parts: tuple[Array, ...],
    begin: Int[Array, "dims"],
    start: Int[Array, "dims"],
    *,
    size: tuple[int, ...],
    stored: WeightEncoding,
    transform: WeightTransform,
    stacked: bool,
) -> Array:
    """Returns the GPU's parameter with a piece of a block in its place."""
    part = _transform_block(parts, target.ndim, stored, transform, stacked)
    piece = lax.dynamic_slice(part.astype(target.dtype), tuple(begin), size)
    if target.dtype.itemsize > 1:
        return lax.dynamic_update_slice(target, piece, tuple(start))
    # XLA on the CPU updates FP8 by converting the whole parameter, but updates bytes in place.
    bits, piece = (lax.bitcast_convert_type(each, jnp.uint8) for each in (target, piece))
    updated = lax.dynamic_update_slice(bits, piece, tuple(start))
    return lax.bitcast_convert_type(updated, target.dtype)


def _transform_block(
    parts: tuple[Array, ...],
    dims: int,
    stored: WeightEncoding,
    transform: WeightTransform,
    stacked: bool,
) -> Array:
    """Returns the transformed block, a part of a parameter of `dims` dimensions."""
    part = jax.vmap(transform.block)(stored.decode(parts))
    part = part if stacked else part[0]
    return part.reshape((1,) * (dims - part.ndim) + part.shape)


@functools.lru_cache(maxsize=4096)
def _shape_of(kind: Any, dims: int) -> tuple[int, ...]:
    stacked, stored, change, sizes = kind
    parts = tuple(jax.ShapeDtypeStruct(shape, wire_dtype(dtype)) for dtype, shape in sizes)
    changed = functools.partial(
        _transform_block, dims=dims, stored=stored, transform=change, stacked=stacked
    )
    return jax.eval_shape(changed, parts).shape


def _part_shape(block: ReadBlock, dims: int) -> tuple[int, ...]:
    return _shape_of(block.kind, dims)


def _read_ahead(
    blocks: Sequence[ReadBlock], readers: int
) -> Iterator[tuple[ReadBlock, tuple[np.ndarray, ...]]]:
    """Yields the blocks in order, on the host, and reads `readers` of them ahead."""
    with ExitStack() as stack:
        files, buffers = (
            open_files(blocks, stack),
            HostBufferPool(max(block.nbytes for block in blocks)),
        )
        pool = stack.enter_context(ThreadPoolExecutor(readers, "read"))
        stack.callback(pool.shutdown, cancel_futures=True)
        waiting = iter(blocks)
        first = itertools.islice(waiting, readers)
        ahead = deque((b, pool.submit(read, b, files, buffers)) for b in first)
        while ahead:
            block, arrays = ahead.popleft()
            yield block, arrays.result()
            if (following := next(waiting, None)) is not None:
                ahead.append((following, pool.submit(read, following, files, buffers)))


def _bytes(block: ReadBlock) -> int:
    return sum(piece.nbytes for piece in block.pieces)


def _shapes(model: Any) -> dict[Any, jax.ShapeDtypeStruct]:
    return {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for key, leaf in nnx.to_flat_state(model.param_shapes())
    }


def _like(model: ShardedDecoder, state: Any) -> Any:
    """Returns the state in the structure of the model's parameters."""
    return jax.tree.unflatten(jax.tree.structure(model.param_shapes()), jax.tree.leaves(state))
