"""The plan of reads: divides a folder's tensors into blocks, which are read and placed at once.

A block holds whole weights that follow one another in a stack, as a layer's experts do. Otherwise
it holds consecutive rows of one large weight, or its columns if these come first in the tensors.
Blocks are in the order of the files, and no byte is in two blocks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jaxattn.models.checkpoint.safetensors_index import TensorEntry
from jaxattn.models.weight_map.encodings import WeightEncoding
from jaxattn.models.weight_map.tensor_mapping import Key, WeightMapping
from jaxattn.models.weight_map.transforms import WeightTransform

BLOCK_BYTES = 4 * 2**20
ALIGNMENT = 64  # of an array in a buffer

type Shapes = Mapping[Key, jax.ShapeDtypeStruct]


class SourceTensor(NamedTuple):
    """A tensor of a weight; each of its rows holds `rows` of the weight's rows, or columns."""

    tensor: TensorEntry
    rows: int


class PublishedWeight(NamedTuple):
    """A published weight: its destination, and the tensors that hold its numbers."""

    mapping: WeightMapping
    stored: WeightEncoding
    sources: tuple[SourceTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(source.tensor.nbytes for source in self.sources)


class ByteRange(NamedTuple):
    """Consecutive bytes of a file."""

    file: Path
    begin: int
    nbytes: int


class TensorSlice(NamedTuple):
    """An array of a block: the same source of each weight, one after another.

    Attributes:
        dtype, shape: Dtype and shape, [weights, rows, ...].
        spans: Its bytes, in order.
        offset: Offset of the array in a buffer of the block.
    """

    dtype: str
    shape: tuple[int, ...]
    spans: tuple[ByteRange, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)


class ReadBlock(NamedTuple):
    """A block of bytes that are read, sent and placed at once.

    Attributes:
        key: Key of the parameter.
        start: Where the block begins in the parameter.
        stacked: Whether the parameter is a stack, of which the block's weights are consecutive
            rows.
    """

    key: Key
    start: tuple[int, ...]
    stacked: bool
    stored: WeightEncoding
    transform: WeightTransform
    pieces: tuple[TensorSlice, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of a buffer that holds the pieces."""
        return self.pieces[-1].offset + self.pieces[-1].nbytes

    @property
    def kind(self) -> tuple[object, ...]:
        """A key; blocks with equal keys use the same program for parameters of one shape."""
        sizes = tuple((piece.dtype, piece.shape) for piece in self.pieces)
        return self.stacked, self.stored, self.transform, sizes


def plan_reads(
    weights: Sequence[PublishedWeight], shapes: Shapes, block_bytes: int = BLOCK_BYTES
) -> list[ReadBlock]:
    """Returns the blocks of all weights, in the order of the files.

    Args:
        shapes: Shapes of the weights' parameters.
        block_bytes: Maximum bytes of a block, which still holds all rows that belong together.
    """
    alike: dict[object, list[PublishedWeight]] = {}
    for weight in weights:
        place, first = weight.mapping, weight.sources[0].tensor
        dtypes = tuple(source.tensor.dtype for source in weight.sources)
        key = first.file, place.key, place.index[:-1], place.transform, weight.stored, dtypes
        alike.setdefault(key, []).append(weight)
    blocks: list[ReadBlock] = []
    for group in alike.values():
        for run in _runs(group, block_bytes):
            blocks += _blocks(run, len(shapes[run[0].mapping.key].shape), block_bytes)
    return sorted(blocks, key=lambda block: block.pieces[0].spans[0])


def _runs(group: list[PublishedWeight], block_bytes: int) -> Iterator[list[PublishedWeight]]:
    """Yields runs of weights that follow one another in their stack, at most a block's worth.

    Lengths are powers of two, because each length needs a compiled program of its own.
    """
    group = sorted(group, key=lambda weight: weight.mapping.index)
    most = max(block_bytes // max(group[0].nbytes, 1), 1)
    begin = 0
    while begin < len(group):
        end = begin + 1
        while end < min(begin + most, len(group)) and _follows(group[end - 1], group[end]):
            end += 1
        end = begin + 2 ** ((end - begin).bit_length() - 1)
        yield group[begin:end]
        begin = end


def _follows(previous: PublishedWeight, current: PublishedWeight) -> bool:
    index = previous.mapping.index
    return index != () and current.mapping.index[-1] == index[-1] + 1


def _blocks(run: list[PublishedWeight], dims: int, block_bytes: int) -> Iterator[ReadBlock]:
    """Yields one block of several weights, or the one or more blocks of a single weight."""
    place, stored = run[0].mapping, run[0].stored
    if stored.by_columns:
        rows, axis = place.shape[1], place.transform.columns_axis
        together = rows if axis is None else stored.rows_together
    else:
        rows = place.shape[0]
        together = math.lcm(place.transform.rows_together, stored.rows_together)
    row_bytes = max(-(-run[0].nbytes // rows), 1)
    step = rows
    if len(run) == 1:
        step = _rows_of_block(rows, max(block_bytes // (row_bytes * together), 1), together)
    for begin in range(0, rows, step):
        end, offset, pieces = min(begin + step, rows), 0, []
        for sources in zip(*(weight.sources for weight in run), strict=True):
            pieces.append(_piece(sources, begin, end, offset))
            offset += -(-pieces[-1].nbytes // ALIGNMENT) * ALIGNMENT
        start = (*place.index, *_start(run[0], begin, dims - len(place.index)))
        stacked = place.index != ()
        yield ReadBlock(place.key, start, stacked, stored, place.transform.anywhere, tuple(pieces))


def _start(weight: PublishedWeight, begin: int, dims: int) -> tuple[int, ...]:
    """Returns the destination of the block that begins at this row or column."""
    change, stored = weight.mapping.transform, weight.stored
    if not stored.by_columns:
        return change.start(begin, dims)
    start = list(change.start(0, dims))
    if begin:
        assert change.columns_axis is not None
        start[change.columns_axis] += begin // stored.column_step
    return tuple(start)


def _rows_of_block(rows: int, max_multiples: int, rows_multiple: int) -> int:
    """Returns the rows per block of a weight, at most `max_multiples` times `rows_multiple`.

    Blocks are equal if at most twice as many blocks allow it, because each length needs a compiled
    program of its own.
    """
    least = -(-rows // (max_multiples * rows_multiple))
    for blocks in range(least, 2 * least):
        if rows % (blocks * rows_multiple) == 0:
            return rows // blocks
    return max_multiples * rows_multiple


def _piece(sources: Sequence[SourceTensor], begin: int, end: int, offset: int) -> TensorSlice:
    tensor, each = sources[0]
    first, last = begin // each, -(-end // each)
    row_bytes = tensor.nbytes // tensor.shape[0]
    spans = tuple(
        ByteRange(t.file, t.begin + first * row_bytes, (last - first) * row_bytes)
        for t, _ in sources
    )
    return TensorSlice(tensor.dtype, (len(sources), last - first, *tensor.shape[1:]), spans, offset)
