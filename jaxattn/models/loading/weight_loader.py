"""Loading of a model's parameters from the blocks of a folder.

Each parameter is allocated once on the device and updated in place. A reader thread reads a block,
sends it to the device and waits for the transfer. The device thus holds the parameters and about
one block per reader. Decoding, transposes and splits run on the device, in programs that are
compiled while blocks are read.

The host's additional memory is at most `PART_BYTES` per reader: the reader's block, XLA's pinned
copy of it (rounded up by XLA's pool), and compilation. This limit does not depend on the model
(tests/models/test_loading_memory.py).
"""

import functools
import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array, Int

from jaxattn.models.checkpoint.native_format import CheckpointError
from jaxattn.models.loading import read_plan
from jaxattn.models.loading.read_plan import (
    ByteRange,
    PublishedWeight,
    ReadBlock,
    Shapes,
    plan_reads,
)
from jaxattn.models.weight_map.encodings import WeightEncoding
from jaxattn.models.weight_map.tensor_mapping import Key
from jaxattn.models.weight_map.transforms import WeightTransform

READERS = 8
PART_BYTES = 24 * 2**20  # of host memory per reader
MOST_COMPILERS = 4
# Autotuning would compile and run variants of each program, but these programs only copy.
UNTUNED = {"xla_gpu_autotune_level": 0}
# Dtypes that JAX lacks on some devices are sent as integers, which `WeightEncoding.decode` accepts.
SENT_AS = {"float8_e8m0fnu": "uint8"}

OnProgress = Callable[[int, int], None]


def load_weights(
    shapes: Shapes,
    weights: Sequence[PublishedWeight],
    *,
    readers: int = READERS,
    on_progress: OnProgress | None = None,
) -> dict[Key, Array]:
    """Loads the parameters to JAX's default device.

    Args:
        shapes: Shapes of the parameters, of which there is at least one.
        weights: All weights of these parameters.
        readers: Number of threads, each of which reads a block of `read_plan.BLOCK_BYTES`. For each
            thread the host holds at most `PART_BYTES` in total.
        on_progress: Callback with the bytes loaded and the total bytes.

    Raises:
        CheckpointError: A file cannot be read, or is shorter than its header states.
    """
    blocks = plan_reads(weights, shapes, read_plan.BLOCK_BYTES)
    arrays = jax.jit(lambda: {key: jnp.zeros(s.shape, s.dtype) for key, s in shapes.items()})()
    # Pass the device to the threads: `jax.default_device` applies only to the thread that sets it.
    where = next(iter(arrays.values())).sharding
    total, done = sum(map(_data_bytes, blocks)), 0
    with (
        _programs(blocks, shapes, where, compilers=readers // 2) as programs,
        closing(_stream_blocks(blocks, readers, where)) as sent,
    ):
        for block, parts in sent:
            place = programs[_program(block, shapes)].result()
            start = np.array(block.start, np.int32)
            arrays[block.key] = place(arrays.pop(block.key), parts, start)
            done += _data_bytes(block)
            if on_progress:
                on_progress(done, total)
    return arrays


def _data_bytes(block: ReadBlock) -> int:
    return sum(piece.nbytes for piece in block.pieces)


# --- placing


def _program(block: ReadBlock, shapes: Shapes) -> tuple[object, ...]:
    """Returns a key; blocks with equal keys are placed by one program."""
    target = shapes[block.key]
    return target.shape, target.dtype, *block.kind


@functools.partial(jax.jit, static_argnames=("stored", "transform", "stacked"), donate_argnums=0)
def _place(
    target: Array,
    parts: tuple[Array, ...],
    start: Int[Array, "dims"],
    *,
    stored: WeightEncoding,
    transform: WeightTransform,
    stacked: bool,
) -> Array:
    """Returns the parameter with a block in its place."""
    part = jax.vmap(transform.block)(stored.decode(parts)).astype(target.dtype)
    part = part if stacked else part[0]
    part = part.reshape((1,) * (target.ndim - part.ndim) + part.shape)
    if target.dtype.itemsize > 1:
        return lax.dynamic_update_slice(target, part, tuple(start))
    # XLA on the CPU updates FP8 by converting the whole parameter, but updates bytes in place.
    bits, part = (lax.bitcast_convert_type(each, jnp.uint8) for each in (target, part))
    updated = lax.dynamic_update_slice(bits, part, tuple(start))
    return lax.bitcast_convert_type(updated, target.dtype)


@contextmanager
def _programs(
    blocks: Sequence[ReadBlock], shapes: Shapes, sharding: Sharding, compilers: int
) -> Iterator[Mapping[object, Future[Callable[..., Array]]]]:
    """Provides the programs that place each kind of block, which threads compile in block order.

    Compilation takes host memory too, so few readers come with few `compilers`.
    """

    def compiled(block: ReadBlock) -> Callable[..., Array]:
        parts = tuple(argument(piece.shape, wire_dtype(piece.dtype)) for piece in block.pieces)
        target, start = shapes[block.key], argument((len(block.start),), jnp.dtype(jnp.int32))
        options = dict(stored=block.stored, transform=block.transform, stacked=block.stacked)
        target = argument(target.shape, target.dtype)
        return _place.lower(target, parts, start, **options).compile(compiler_options=UNTUNED)

    def argument(shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    first = {_program(block, shapes): block for block in reversed(blocks)}
    with ThreadPoolExecutor(min(max(compilers, 1), MOST_COMPILERS), "compile") as pool:
        try:
            yield {name: pool.submit(compiled, first[name]) for name in reversed(first)}
        finally:
            pool.shutdown(cancel_futures=True)


# --- reading


def _stream_blocks(
    blocks: Sequence[ReadBlock], readers: int, sharding: Sharding
) -> Generator[tuple[ReadBlock, tuple[Array, ...]], None, None]:
    """Yields the blocks in order, on the device, and reads `readers` of them ahead."""
    with ExitStack() as stack:
        files, buffers = (
            open_files(blocks, stack),
            HostBufferPool(max(block.nbytes for block in blocks)),
        )

        def send(block: ReadBlock) -> tuple[Array, ...]:
            return jax.block_until_ready(jax.device_put(read(block, files, buffers), sharding))

        pool = stack.enter_context(ThreadPoolExecutor(readers, "read"))
        stack.callback(pool.shutdown, cancel_futures=True)
        waiting = iter(blocks)
        ahead = deque((b, pool.submit(send, b)) for b in itertools.islice(waiting, readers))
        while ahead:
            block, parts = ahead.popleft()
            yield block, parts.result()
            if (following := next(waiting, None)) is not None:
                ahead.append((following, pool.submit(send, following)))


def open_files(blocks: Sequence[ReadBlock], stack: ExitStack) -> dict[Path, int]:
    """Opens each file and returns its descriptor; the stack closes them."""
    names = {span.file for block in blocks for piece in block.pieces for span in piece.spans}
    files = {}
    for name in sorted(names):
        try:
            files[name] = os.open(name, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"cannot read {name}: {error.strerror}") from error
        stack.callback(os.close, files[name])
    return files


class HostBufferPool:
    """Host memory for blocks; a buffer is reused when no array refers to it any more.

    On the CPU, JAX's array may be the buffer itself. The memory does not come from malloc, which
    retains some of what each thread frees.
    """

    def __init__(self, nbytes: int) -> None:
        """Creates a pool of buffers of `nbytes` bytes each."""
        self._nbytes = nbytes
        self._free: list[mmap.mmap] = []

    def new(self, nbytes: int) -> np.ndarray:
        """Returns the first bytes of a buffer, uninitialized."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = mmap.mmap(-1, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = np.frombuffer(memory, np.uint8, nbytes)
        weakref.finalize(buffer, self._free.append, memory)
        return buffer


def read(
    block: ReadBlock, files: Mapping[Path, int], buffers: HostBufferPool
) -> tuple[np.ndarray, ...]:
    """Reads a block's arrays, as views of one buffer."""
    arrays, buffer = [], buffers.new(block.nbytes)
    for piece in block.pieces:
        begin = piece.offset
        for span in piece.spans:
            _read_span(span, files[span.file], buffer[begin : begin + span.nbytes])
            begin += span.nbytes
        numbers = buffer[piece.offset : begin].view(wire_dtype(piece.dtype))
        arrays.append(numbers.reshape(piece.shape))
    return tuple(arrays)


def _read_span(span: ByteRange, file: int, buffer: np.ndarray) -> None:
    done = 0
    while done < span.nbytes:
        try:
            count = os.preadv(file, [buffer[done:]], span.begin + done)
        except OSError as error:
            raise CheckpointError(f"cannot read {span.file}: {error.strerror}") from error
        if not count:
            raise CheckpointError(f"{span.file} became shorter while it was read")
        done += count


def wire_dtype(dtype: str) -> np.dtype:
    """Returns the dtype in which numbers of this dtype are sent."""
    return jnp.dtype(SENT_AS.get(dtype, dtype))
