"""Where the tensors of a published checkpoint go: places in a decoder's parameters.

Published linears are [out, in], the modules' weights [in, out], and a decoder stacks its layers. A
`Placed` says for one tensor which parameter it fills, which row of the stack, and what is done to
it on the way. That happens on the device, to blocks of the tensor's leading rows.
"""

import dataclasses

from jaxattn.core.numerics.fp8_block_scaling import block_counts
from jaxattn.models.network.decoder_spec import DecoderSpec
from jaxattn.models.weight_map.encodings import Scales, Stored
from jaxattn.models.weight_map.transforms import (
    AsItIs,
    Below,
    Change,
    Flat,
    GroupColumns,
    HeadKeys,
    HeadValues,
    Nth,
    Taps,
    Transposed,
)

type Key = tuple[str | int, ...]


AS_IT_IS = AsItIs()


@dataclasses.dataclass(frozen=True)
class Placed:
    """A published tensor and the parameter that it fills.

    Attributes:
        name: the tensor's.
        shape: as it is published.
        key: of the parameter in the decoder's state.
        index: where it lies in a stack: (), (repeat,) or (repeat, expert).
        stored: as what it has to be stored; None: as what it is.
    """

    name: str
    shape: tuple[int, ...]
    key: Key
    index: tuple[int, ...] = ()
    change: Change = AsItIs()
    stored: Stored | None = None


@dataclasses.dataclass(frozen=True)
class LayerPlace:
    """A layer's place in a decoder, and its names: `prefix` is published, "model.layers.7"."""

    prefix: str
    key: Key
    repeat: int

    def linear(self, name: str, out: int, inner: int, *path: str, first: int = 0) -> Placed:
        """A linear; of several side by side, the one whose columns begin at `first`."""
        return self._of(f"{name}.weight", (out, inner), (*path, "weight"), Transposed(first))

    def groups(
        self, name: str, groups: int, sizes: tuple[int, ...], inner: int, *path: str
    ) -> list[Placed]:
        """A linear whose rows are groups of parts: the first parts of all groups come first."""
        group, found, begin = sum(sizes), [], 0
        for size in sizes:
            change = GroupColumns(group, begin, size, groups * begin)
            shape = (groups * group, inner)
            found.append(self._of(f"{name}.weight", shape, (*path, "weight"), change))
            begin += size
        return found

    def matrix(self, name: str, out: int, inner: int, *path: str) -> Placed:
        """A linear whose parameter is a matrix and no module."""
        return self._of(f"{name}.weight", (out, inner), path, Transposed())

    def vector(self, name: str, size: int, *path: str, change: Change = AS_IT_IS) -> Placed:
        return self._of(f"{name}.weight", (size,), (*path, "weight"), change)

    def taps(self, name: str, channels: int, taps: int, *path: str, first: int = 0) -> Placed:
        """A depthwise convolution's; of several side by side, that of the channels from `first`."""
        return self._of(f"{name}.weight", (channels, 1, taps), path, Taps(first))

    def expert(
        self,
        name: str,
        expert: int,
        out: int,
        inner: int,
        *path: str,
        below: int = 0,
        stored: Stored | None = None,
    ) -> Placed:
        """A linear of one expert: of [E, rows, in] in the stack, the rows from `below` on."""
        index = (self.repeat, expert)
        key = (*self.key, *path)
        tensor = f"{self.prefix}.{name}.weight"
        return Placed(tensor, (out, inner), key, index, Below(below), stored)

    def expert_scale(
        self, name: str, expert: int, out: int, inner: int, *path: str, number: int | None = None
    ) -> Placed:
        """The scales of one expert's FP8 linear: of [E, n, rows, columns] in the stack the
        `number`-th, or all of [E, rows, columns]."""
        index = (self.repeat, expert)
        tensor = f"{self.prefix}.{name}.weight_scale_inv"
        change = AsItIs() if number is None else Nth(number)
        shape = block_counts(out, inner)
        return Placed(tensor, shape, (*self.key, *path), index, change, Scales())

    def shared(
        self, name: str, out: int, inner: int, change: Change, *path: str, stored: Stored | None
    ) -> Placed:
        """A linear of the shared experts, which are some of the stack's."""
        tensor, key = f"{self.prefix}.{name}.weight", (*self.key, *path)
        return Placed(tensor, (out, inner), key, (self.repeat,), change, stored)

    def shared_scale(self, name: str, out: int, inner: int, change: Change, *path: str) -> Placed:
        """The scales of such a linear in FP8."""
        tensor, key = f"{self.prefix}.{name}.weight_scale_inv", (*self.key, *path)
        return Placed(tensor, block_counts(out, inner), key, (self.repeat,), change, Scales())

    def plain(self, name: str, shape: tuple[int, ...], *path: str) -> Placed:
        """A tensor that goes as it is; `name` is the whole of its name."""
        return self._of(name, shape, path, AsItIs())

    def flat(self, name: str, shape: tuple[int, ...], *path: str) -> Placed:
        """A tensor [1, ...] that becomes a vector; `name` is the whole of its name."""
        return self._of(name, shape, path, Flat())

    def kv_b(self, name: str, heads: int, keys: int, values: int, rank: int) -> list[Placed]:
        shape = (heads * (keys + values), rank)
        return [
            self._of(f"{name}.weight", shape, ("mixer", "w_uk"), HeadKeys(keys, values)),
            self._of(f"{name}.weight", shape, ("mixer", "w_uv"), HeadValues(keys, values)),
        ]

    def _of(self, name: str, shape: tuple[int, ...], path: Key, change: Change) -> Placed:
        return Placed(f"{self.prefix}.{name}", shape, (*self.key, *path), (self.repeat,), change)


def layer_places(spec: DecoderSpec, prefix: str = "model.layers") -> list[LayerPlace]:
    """The place of each layer, in order."""
    found = {}
    for number, segment in enumerate(spec.segments):
        for repeat in range(segment.repeats):
            for place in range(len(segment.pattern)):
                layer = segment.first + repeat * len(segment.pattern) + place
                key = ("segments", number, "layers", place)
                found[layer] = LayerPlace(f"{prefix}.{layer}", key, repeat)
    return [found[layer] for layer in sorted(found)]


def ends(
    spec: DecoderSpec,
    prefix: str = "model",
    norm: Change = AS_IT_IS,
    embedding: str = "embed_tokens",
) -> list[Placed]:
    """Embedding, last norm and, unless it is tied, the head.

    Args:
        prefix: of the first two.
        norm: what is done to the norm's weight.
        embedding: its name behind the prefix.
    """
    vocab, hidden = spec.vocab_size, spec.stream.hidden_size
    found = [
        Placed(f"{prefix}.{embedding}.weight", (vocab, hidden), ("embedding",)),
        Placed(f"{prefix}.norm.weight", (hidden,), ("norm", "weight"), change=norm),
    ]
    if not spec.tie_embeddings:
        key = ("lm_head", "weight")
        found.append(Placed("lm_head.weight", (vocab, hidden), key, change=Transposed()))
    return found
