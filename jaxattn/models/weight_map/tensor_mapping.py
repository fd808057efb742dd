"""The mapping of a published checkpoint's tensors to a decoder's parameters.

Published linears are [out, in], the modules' weights are [in, out], and a decoder stacks its
layers. A `WeightMapping` defines, for one tensor, the parameter that it fills, the row of the
stack, and the transform. Transforms run on the device, on blocks of the tensor's leading rows.
"""

import dataclasses

from jaxattn.core.numerics.fp8_block_scaling import block_counts
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.models.weight_map.encodings import ScaleEncoding, WeightEncoding
from jaxattn.models.weight_map.transforms import (
    Flatten,
    Identity,
    SplitGroupColumns,
    SplitKeyHeads,
    SplitValueHeads,
    SqueezeConvTaps,
    Transpose,
    WeightTransform,
    WriteIndex,
    WriteRowsAt,
    WriteTiles,
)

type Key = tuple[str | int, ...]


IDENTITY = Identity()


@dataclasses.dataclass(frozen=True)
class WeightMapping:
    """A published tensor and the parameter that it fills.

    Attributes:
        name: Name of the tensor.
        shape: Published shape.
        key: Key of the parameter in the decoder's state.
        index: Its place in a stack: (), (repeat,) or (repeat, expert).
        stored: Required encoding. None means any supported one.
    """

    name: str
    shape: tuple[int, ...]
    key: Key
    index: tuple[int, ...] = ()
    transform: WeightTransform = Identity()
    stored: WeightEncoding | None = None


@dataclasses.dataclass(frozen=True)
class LayerMapping:
    """A layer's place in a decoder, and the published prefix of its names, "model.layers.7"."""

    prefix: str
    key: Key
    repeat: int

    def linear(self, name: str, out: int, inner: int, *path: str, first: int = 0) -> WeightMapping:
        """Maps a linear; among several side by side, the one whose columns begin at `first`."""
        return self._of(f"{name}.weight", (out, inner), (*path, "weight"), Transpose(first))

    def groups(
        self, name: str, groups: int, sizes: tuple[int, ...], inner: int, *path: str
    ) -> list[WeightMapping]:
        """Maps a linear whose rows are groups of parts; the groups' first parts come first."""
        group, found, begin = sum(sizes), [], 0
        for size in sizes:
            change = SplitGroupColumns(group, begin, size, groups * begin)
            shape = (groups * group, inner)
            found.append(self._of(f"{name}.weight", shape, (*path, "weight"), change))
            begin += size
        return found

    def matrix(self, name: str, out: int, inner: int, *path: str) -> WeightMapping:
        """Maps a linear whose parameter is a matrix instead of a module."""
        return self._of(f"{name}.weight", (out, inner), path, Transpose())

    def vector(
        self, name: str, size: int, *path: str, transform: WeightTransform = IDENTITY
    ) -> WeightMapping:
        return self._of(f"{name}.weight", (size,), (*path, "weight"), transform)

    def taps(
        self, name: str, channels: int, taps: int, *path: str, first: int = 0
    ) -> WeightMapping:
        """Maps depthwise taps; among several side by side, those of the channels from `first`."""
        return self._of(f"{name}.weight", (channels, 1, taps), path, SqueezeConvTaps(first))

    def expert(
        self,
        name: str,
        expert: int,
        out: int,
        inner: int,
        *path: str,
        first_row: int = 0,
        stored: WeightEncoding | None = None,
    ) -> WeightMapping:
        """Maps an expert's linear to the rows from `first_row` on of the stack [E, rows, in]."""
        index = (self.repeat, expert)
        key = (*self.key, *path)
        tensor = f"{self.prefix}.{name}.weight"
        return WeightMapping(tensor, (out, inner), key, index, WriteRowsAt(first_row), stored)

    def expert_tiles(
        self,
        name: str,
        expert: int,
        out: int,
        inner: int,
        *path: str,
        number: int | None = None,
        stored: WeightEncoding,
    ) -> WeightMapping:
        """Maps one expert's linear in 4-bit tiles to the `number`-th of [E, n, ...], or to all."""
        index, key = (self.repeat, expert), (*self.key, *path)
        tensor = f"{self.prefix}.{name}.weight"
        return WeightMapping(tensor, (out, inner), key, index, WriteTiles(number), stored)

    def expert_scale(
        self, name: str, expert: int, out: int, inner: int, *path: str, number: int | None = None
    ) -> WeightMapping:
        """Maps the scales of one expert's FP8 linear.

        The scales' place is the `number`-th of [E, n, rows, columns] in the stack, or all of [E,
        rows, columns].
        """
        index = (self.repeat, expert)
        tensor = f"{self.prefix}.{name}.weight_scale_inv"
        change = Identity() if number is None else WriteIndex(number)
        shape = block_counts(out, inner)
        return WeightMapping(tensor, shape, (*self.key, *path), index, change, ScaleEncoding())

    def shared(
        self,
        name: str,
        out: int,
        inner: int,
        transform: WeightTransform,
        *path: str,
        stored: WeightEncoding | None,
    ) -> WeightMapping:
        """Maps a linear of the shared experts, which are part of the stack."""
        tensor, key = f"{self.prefix}.{name}.weight", (*self.key, *path)
        return WeightMapping(tensor, (out, inner), key, (self.repeat,), transform, stored)

    def shared_scale(
        self, name: str, out: int, inner: int, transform: WeightTransform, *path: str
    ) -> WeightMapping:
        """Maps the scales of such a linear in FP8."""
        tensor, key = f"{self.prefix}.{name}.weight_scale_inv", (*self.key, *path)
        return WeightMapping(
            tensor, block_counts(out, inner), key, (self.repeat,), transform, ScaleEncoding()
        )

    def plain(
        self, name: str, shape: tuple[int, ...], *path: str, transform: WeightTransform = IDENTITY
    ) -> WeightMapping:
        """Maps a tensor with the full name `name`, unchanged unless `transform` is given."""
        return self._of(name, shape, path, transform)

    def flat(self, name: str, shape: tuple[int, ...], *path: str) -> WeightMapping:
        """Maps a tensor [1, ...] with the full name `name` to a vector."""
        return self._of(name, shape, path, Flatten())

    def kv_b(self, name: str, heads: int, keys: int, values: int, rank: int) -> list[WeightMapping]:
        shape = (heads * (keys + values), rank)
        return [
            self._of(f"{name}.weight", shape, ("mixer", "w_uk"), SplitKeyHeads(keys, values)),
            self._of(f"{name}.weight", shape, ("mixer", "w_uv"), SplitValueHeads(keys, values)),
        ]

    def _of(
        self, name: str, shape: tuple[int, ...], path: Key, transform: WeightTransform
    ) -> WeightMapping:
        return WeightMapping(
            f"{self.prefix}.{name}", shape, (*self.key, *path), (self.repeat,), transform
        )


def layer_places(spec: DecoderSpec) -> list[LayerMapping]:
    """Returns the place of each layer, in order."""
    found = {}
    for number, segment in enumerate(spec.segments):
        for repeat in range(segment.repeats):
            for place in range(len(segment.pattern)):
                layer = segment.first + repeat * len(segment.pattern) + place
                key = ("segments", number, "layers", place)
                found[layer] = LayerMapping(f"model.layers.{layer}", key, repeat)
    return [found[layer] for layer in sorted(found)]


def ends(
    spec: DecoderSpec, norm: WeightTransform = IDENTITY, embedding: str = "embed_tokens"
) -> list[WeightMapping]:
    """Maps embedding, last norm and, unless it is tied, the head.

    Args:
        norm: Transform of the norm's weight.
        embedding: Name of the embedding.
    """
    vocab, hidden = spec.vocab_size, spec.stream.hidden_size
    found = [
        WeightMapping(f"model.{embedding}.weight", (vocab, hidden), ("embedding",)),
        WeightMapping("model.norm.weight", (hidden,), ("norm", "weight"), transform=norm),
    ]
    if not spec.tie_embeddings:
        key = ("lm_head", "weight")
        found.append(WeightMapping("lm_head.weight", (vocab, hidden), key, transform=Transpose()))
    return found
