"""Sizes of a model for a memory plan: its weights in lines, its caches and its scratch.

`DecoderSizes` (decoder_sizes.py) takes them from a model that this package runs.
"""

import abc
import dataclasses
import math

from jaxattn.arena import ArenaSpec
from jaxattn.models.caches.layer_cache import LayerCache
from jaxattn.models.sharding.partition_rules import Split


@dataclasses.dataclass(frozen=True)
class WeightGroup:
    """`count` matrices of one shape.

    Attributes:
        kind: the line of the plan they belong to.
        shape: of one of them.
        split: how several GPUs divide them, see `partition_rules.Split`.
        quantized: stored in the checkpoint's quantized format, if it has one.
        dtype_bytes: otherwise.
        scales: of quantized numbers: they are bytes and no parameters.
        numbers: of one of them, where they are not its elements.
    """

    kind: str
    shape: tuple[int, ...]
    count: int = 1
    split: Split = "all"
    quantized: bool = True
    dtype_bytes: int = 2
    scales: bool = False
    numbers: int | None = None

    @property
    def parameters(self) -> int:
        each = math.prod(self.shape) if self.numbers is None else self.numbers
        return 0 if self.scales else each * self.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """What decides the bytes of a layer's activations. What a model does not have is 0.

    Attributes:
        qk_dim, v_dim: of an attention head.
        latent: numbers that an MLA layer caches for a token.
        low_rank: of its queries.
        mlp_size: columns of the dense feed-forwards.
        experts, top_k, expert_size: of the routed experts.
        state_heads, state_shape: of a recurrent state, [Dv, Dk] each.
        key_heads: that those share.
        conv_channels: of the short convolution before it.
        widened: numbers of the largest FP8 matrix beside experts, which XLA makes 16 bits of.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    qk_dim: int
    v_dim: int
    latent: int = 0
    low_rank: int = 0
    mlp_size: int = 0
    experts: int = 0
    top_k: int = 0
    expert_size: int = 0
    state_heads: int = 0
    key_heads: int = 0
    state_shape: tuple[int, int] = (0, 0)
    conv_channels: int = 0
    widened: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes(abc.ABC):
    """A model, for a plan.

    Attributes:
        weights: of the layers, embedding and head.
        max_position_embeddings: the longest row in tokens.
        stored: how the weights lie in memory, in words.
        unread: tensors of its checkpoint that the loader skips, in words; "" for none.
        block: side of the squares that share a scale, where `WeightGroup.quantized` decides; else
            0.
    """

    name: str
    weights: tuple[WeightGroup, ...]
    max_position_embeddings: int
    stored: str
    unread: str = ""
    block: int = 0

    @property
    @abc.abstractmethod
    def sizes(self) -> LayerSizes:
        """What decides the bytes of activations.

        Raises:
            ValueError: the model has a kind of layer for which there is no bound.
        """

    @property
    @abc.abstractmethod
    def num_heads(self) -> int:
        """Of attention; 0 without attention."""

    @property
    def dtype(self) -> str:
        """Of queries and other operands of the matrix products."""
        return "bfloat16"

    @abc.abstractmethod
    def in_cache_format(self, name: str, native_layers: int = 0) -> "ModelSizes":
        """The same model with caches in a format of `CACHE_FORMATS`; see
        `Model.with_cache_format`."""

    @abc.abstractmethod
    def caches(self, ways: int = 1, cache_dtype: str | None = None) -> tuple[LayerCache, ...]:
        """What one of `ways` GPUs keeps of its rows; `cache_dtype` None is the model's own."""

    @abc.abstractmethod
    def scratch(
        self, rows: int, *, q_len: int, max_pages: int, ways: int = 1, gathered: int = 1
    ) -> tuple[ArenaSpec, ...]:
        """The scratch of each op of a decode step, on one GPU.

        Args:
            ways: by how many its mixers' heads are divided.
            gathered: of how many GPUs the tokens may choose this one's experts.
        """

    def copied_bytes(self, ways: int = 1) -> int:
        """What an engine adds to the weights by packing them, on one of `ways` GPUs."""
        return 0

    def stored_bytes(self, weights: WeightGroup) -> tuple[int, int]:
        """(bytes of the numbers, bytes of their scales) of one matrix."""
        size = math.prod(weights.shape)
        if not (self.block and weights.quantized):
            return size * weights.dtype_bytes, 0
        scales = math.prod(-(-side // self.block) for side in weights.shape)
        return size, 4 * scales

    def total_parameters(self) -> int:
        return sum(w.parameters for w in self.weights)

    def total_bytes(self) -> int:
        """Of all weights, on one device."""
        return sum(sum(self.stored_bytes(w)) * w.count for w in self.weights)
