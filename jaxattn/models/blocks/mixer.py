"""The interface of mixers, and the options that all blocks of a model share.

The mixer provides what the engine needs: its cache, its scratch, the values that all its layers
share in a step, and the small weights that decoding reads from one stack.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxattn.arena import Arena, ArenaSpec
from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.dispatch import Implementation
from jaxattn.core.layer_index import LayerIndex
from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.core.numerics.fp8_block_scaling import BLOCK
from jaxattn.kernels.hopper.fp8_conversion import ROWS as FP8_COLUMNS
from jaxattn.models.caches.layer_cache import Arrays, LayerCache
from jaxattn.models.interface import DecodeBatch, PrefillBatch
from jaxattn.nn.four_bit_linear import FourBitLinears
from jaxattn.nn.linear import StackedWeight
from jaxattn.ops.linear.norm_linear import PendingNorm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """The options that all blocks of a model share.

    Attributes:
        dtype: Dtype of the operands of matrix products. The residual stream is float32.
        param_dtype: Dtype in which the weights are stored.
        norm_dtype: Dtype in which norm weights are stored. None means `param_dtype`. Weights that a
            checkpoint stores as the w of 1 + w are exact only in float32.
        out_init_scale: Factor of the initial output projections, which keeps the sum over all
            branches of order 1.
    """

    hidden_size: int
    eps: float
    dtype: str
    param_dtype: str
    out_init_scale: float = 1.0
    norm_dtype: str | None = None

    @property
    def dtypes(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "out_init_scale": self.out_init_scale,
        }


class Matrix(NamedTuple):
    """The shape of a product's weight, [inner, out].

    Attributes:
        together: Widths of column ranges that are contiguous in a checkpoint too.
    """

    inner: int
    out: int
    together: tuple[int, ...] = ()

    @property
    def fits_fp8(self) -> bool:
        """Whether the matrix may stay FP8: a kernel supports it, and scale blocks stay whole."""
        columns = self.out >= 2 * FP8_COLUMNS and self.out % FP8_COLUMNS == 0
        whole = not any(width % BLOCK for width in self.together)
        return columns and self.inner % BLOCK == 0 and whole

    def fits_four_bits(self, form: FourBitFormat) -> bool:
        """Returns whether it may stay 4 bits: a kernel supports it and `together` are tiles."""
        whole = not any(width % FP8_COLUMNS for width in self.together)
        return self.out >= 2 * FP8_COLUMNS and form.fits(self.out, self.inner) and whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixer(abc.ABC):
    """The part of a layer that mixes the tokens of a row: attention, or a recurrence.

    Attributes:
        fp8: The names of the linears with FP8 weights (see `jaxattn.nn.Fp8Linear`), or
            `FourBitLinears` for 4 bits.
        norms: Whether the module's `decode` takes tokens as a `PendingNorm`.
        cache_name: Name of the layer's cache. Mixers with one cache are equal.
        cache_formats: Formats of the cache that `with_cache_format` may choose.
        unpacked_params: Names of parameters that decoding reads in place instead of from `pack`'s
            rows.
    """

    fp8: tuple[str, ...] | FourBitLinears = ()

    norms: ClassVar[bool] = False
    cache_formats: ClassVar[tuple[str, ...]] = ()
    unpacked_params: ClassVar[tuple[str, ...]] = ()

    def matrices(self, stream: Stream) -> dict[str, Matrix]:
        """Returns the linears that may be among `fp8`."""
        return {}

    def in_format(self, name: str) -> "Mixer":
        """Returns the same layer with a cache in one of `cache_formats`."""
        raise NotImplementedError(f"{type(self).__name__} supports only its own cache format")

    def with_separate_cache(self) -> "Mixer":
        """Returns the same layer with a separate cache in its own format.

        Raises:
            ValueError: All layers of this kind share one format.
        """
        raise ValueError(
            f"all layers of {type(self).__name__} share one cache format; use native_layers=0"
        )

    @property
    @abc.abstractmethod
    def cache_name(self) -> str: ...

    @property
    @abc.abstractmethod
    def kernels(self) -> Mapping[str, str]:
        """The kernel name of each decode op in a compiled step."""

    @abc.abstractmethod
    def build(self, stream: Stream, rngs: nnx.Rngs) -> nnx.Module:
        """Builds the module with its parameters; `module(x)` runs whole sequences, for training."""

    @abc.abstractmethod
    def cache(self, stream: Stream, layers: int) -> LayerCache: ...

    @abc.abstractmethod
    def scratch(
        self, stream: Stream, rows: int, *, q_len: int, max_pages: int, page_size: int
    ) -> ArenaSpec: ...

    def prefill(
        self,
        module: Any,
        x: Array,
        arrays: Arrays,
        batch: PrefillBatch,
        layer: LayerIndex,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays]:
        """Returns the output of a line of each row's prompt, and the cache's arrays; `x` is normed.

        A mixer implements either this or `mixed`.
        """
        raise NotImplementedError(f"{type(self).__name__} implements neither prefill nor mixed")

    def mixed(
        self,
        module: Any,
        x: Array,
        arrays: Arrays,
        arena: Arena | None,
        prompts: PrefillBatch,
        lines: PromptLines,
        rows: DecodeBatch | None,
        layer: LayerIndex,
        weights: Array | None,
        shared: Any,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena | None]:
        """Returns the output for the prompts' lines and then rows, the arrays, and the arena.

        `x` [1, N, hidden] is normed. By default this calls `prefill`, with one line per row as long
        as all lines, and `decode`. An implementation of its own projects all tokens at once, and
        pads no row.

        Args:
            lines: The layout of the prompts.
            rows: Rows with one token each, as for `decode`, or None.
        """
        own, row_x = lines.split(x)
        chosen = implementation if implementation == "xla" else None
        y, arrays_after = self.prefill(
            module, lines.to_rows(own), arrays, prompts.in_one_line(), layer, chosen
        )
        y = lines.from_rows(y)
        if rows is None:
            return lines.join(y, None), arrays_after, arena
        assert arena is not None  # the step's arena
        # Finish reading the caches for the prompts before the rows write to them: XLA copies what a
        # fusion reads later.
        y, arrays_after = lax.optimization_barrier((y, arrays_after))
        of_rows, arrays_after, arena = self.decode(
            module, row_x, {**arrays, **arrays_after}, arena, rows, layer, weights, shared,
            implementation,
        )  # fmt: skip
        return lines.join(y, of_rows), arrays_after, arena

    @abc.abstractmethod
    def decode(
        self,
        module: Any,
        x: Array | PendingNorm,
        arrays: Arrays,
        arena: Arena,
        batch: DecodeBatch,
        layer: LayerIndex,
        weights: Array | None,
        shared: Any,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena]:
        """Returns the new tokens' output, the cache's arrays and the arena.

        `x` is normed, and no row is longer than `most_tokens`.
        """

    def shared(
        self, module: Any, arrays: Arrays, batch: DecodeBatch, implementation: Any
    ) -> dict[str, Any]:
        """Returns what all layers of a decode step share; in the loop XLA would recompute it."""
        return {}

    def handed_on(
        self, arrays: Arrays, prompts: PrefillBatch | None, rows: DecodeBatch | None
    ) -> Arrays:
        """Returns the initial value of what layers pass on to later layers in a step.

        Layers read and write it among the arrays of their cache.
        """
        return {}

    def handed_on_whole(self, rows: int, tokens: int) -> Array | None:
        """Does the same for whole sequences; None if nothing is passed on."""
        return None

    def whole(
        self, module: Any, x: Array, packed: Mapping[str, Any], handed_on: Array | None
    ) -> tuple[Array, Array | None]:
        """Returns the output of whole sequences, and what the layer passes on.

        `x` is normed; `packed` are keyword arguments of the module.
        """
        return module(x, **packed), handed_on

    def most_tokens(self, arrays: Arrays, batch: DecodeBatch) -> int | None:
        """Returns the number of tokens that a row's block table holds, or None.

        None means that rows may have any length, or that the layer handles longer rows itself.
        """
        return None

    def pack(self, params: Any) -> Float[Array, "repeats W"] | None:
        """Returns the small weights of one place in a pattern, one row per repeat."""
        return None

    def beside(self, stream: Stream, params: Any) -> tuple[Array, Array] | None:
        """Returns extra FP8 weights [repeats, N, K] and their scales, or None.

        The weights are computed from the parameters, and a step reads them in the same launch as
        others. `attach_extra_weights` passes their place to the module.
        """
        return None

    def attach_extra_weights(
        self, module: Any, weights: StackedWeight, scales: StackedWeight
    ) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no weights besides its linears")

    def widened(self, stream: Stream, params: Any) -> dict[str, Array]:
        """Returns matrices [repeats, in, out] padded with zero columns, by their modules' names."""
        return {}
