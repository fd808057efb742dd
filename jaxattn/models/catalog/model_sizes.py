"""Sizes of a model for a memory plan: groups of weights, caches and scratch.

`DecoderSizes` (decoder_sizes.py) derives them from a model that this package runs.
"""

import abc
import dataclasses
import math

from jaxattn.arena import ArenaSpec
from jaxattn.models.caches.layer_cache import LayerCache
from jaxattn.models.catalog.param_roles import Split


@dataclasses.dataclass(frozen=True)
class WeightGroup:
    """A group of `count` matrices of one shape.

    Attributes:
        kind: The line of the plan to which the group belongs.
        shape: Shape of one matrix.
        split: How several GPUs divide the matrices; see `param_roles.Split`.
        quantized: Whether the matrices are stored in the checkpoint's quantized format, if it has
            one.
        dtype_bytes: Bytes per element otherwise.
        scales: Whether these are scales of quantized numbers, which count as bytes but not as
            parameters.
        numbers: Number of parameters in one matrix, if that is not its number of elements.
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
    """The sizes that determine the bytes of a layer's activations; 0 for parts a model lacks.

    Attributes:
        qk_dim, v_dim: Dimensions of an attention head.
        latent: Number of elements that an MLA layer caches per token.
        low_rank: Rank of an MLA layer's queries.
        mlp_size: Number of columns of the dense feed-forwards.
        experts, top_k, expert_size: Sizes of the routed experts.
        state_heads, state_shape: Number of recurrent states and the shape [Dv, Dk] of each.
        key_heads: Number of key heads that these states share.
        conv_channels: Channels of the short convolution before the recurrence.
        widened: Elements of the largest FP8 matrix other than experts, which XLA converts to 16
            bits.
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
    """The sizes of a model, for a plan.

    Attributes:
        weights: Groups of the layers' weights, the embedding and the head.
        max_position_embeddings: Maximum length of a row in tokens.
        stored: Description of the weights' form in memory.
        unread: Description of the checkpoint's tensors that the loader skips; "" for none.
        block: Side of the square blocks that share a scale if `WeightGroup.quantized` is used, else
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
        """The sizes that determine the bytes of activations.

        Raises:
            ValueError: The model has a kind of layer for which there is no bound.
        """

    @property
    @abc.abstractmethod
    def num_heads(self) -> int:
        """The number of attention heads; 0 without attention."""

    @property
    def dtype(self) -> str:
        """The dtype of queries and other operands of matrix products."""
        return "bfloat16"

    @abc.abstractmethod
    def in_cache_format(self, name: str, native_layers: int = 0) -> "ModelSizes":
        """Returns the same model with caches in a format of `CACHE_FORMATS`.

        See `Model.with_cache_format`.
        """

    @abc.abstractmethod
    def caches(self, num_shards: int = 1, cache_dtype: str | None = None) -> tuple[LayerCache, ...]:
        """Returns one of `num_shards` GPUs' caches; `cache_dtype` None means the model's own."""

    @abc.abstractmethod
    def scratch(
        self, rows: int, *, q_len: int, max_pages: int, num_shards: int = 1, gathered: int = 1
    ) -> tuple[ArenaSpec, ...]:
        """Returns the scratch of each op of a decode step on one GPU.

        Args:
            num_shards: Number of GPUs that divide the mixers' heads.
            gathered: Number of GPUs whose tokens may choose this one's experts.
        """

    def copied_bytes(self, num_shards: int = 1) -> int:
        """Returns the bytes that packing adds to the weights, on one of `num_shards` GPUs."""
        return 0

    def stored_bytes(self, weights: WeightGroup) -> tuple[int, int]:
        """Returns (bytes of the elements, bytes of their scales) of one matrix."""
        size = math.prod(weights.shape)
        if not (self.block and weights.quantized):
            return size * weights.dtype_bytes, 0
        scales = math.prod(-(-side // self.block) for side in weights.shape)
        return size, 4 * scales

    def total_parameters(self) -> int:
        return sum(w.parameters for w in self.weights)

    def total_bytes(self) -> int:
        """Returns the bytes of all weights on one device."""
        return sum(sum(self.stored_bytes(w)) * w.count for w in self.weights)
