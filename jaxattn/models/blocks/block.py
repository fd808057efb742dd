"""A decoder's block: a mixer of tokens and a feed-forward, each with its norm.

A `Block` is a description, equal to every block that does the same; a list of blocks is a model
(`network/decoder_spec.py`). Its mixer says what the engine has to know: its cache, its scratch, the
values that all its layers share in a step, and the small weights that decoding reads from one
stack.
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
from jaxattn.core.numerics.four_bit_tiles import FourBitFormat
from jaxattn.core.numerics.fp8_block_scaling import BLOCK
from jaxattn.core.stacked_layer import StackedLayer
from jaxattn.kernels.hopper.fp8_operands import ROWS as FP8_COLUMNS
from jaxattn.models.caches.layer_cache import Arrays, LayerCache
from jaxattn.models.interface import DecodeBatch, PrefillBatch
from jaxattn.nn.four_bit_linear import FourBitLinears
from jaxattn.nn.linear import StackedWeight
from jaxattn.ops.linear.norm_linear import PendingNorm
from jaxattn.parallel import Dimension


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """What all blocks of a model have in common.

    Attributes:
        dtype: operands of the matrix products. The residual stream is float32.
        param_dtype: what the weights are stored in.
        norm_dtype: what weights of norms are stored in; None is `param_dtype`. Those that a
            checkpoint stores as w of 1 + w are exact in float32 alone.
        out_init_scale: of initial outputs, so that the sum over all branches stays of order 1.
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
    """A product's weight [inner, out].

    Attributes:
        together: so many of its columns lie side by side in a checkpoint too.
    """

    inner: int
    out: int
    together: tuple[int, ...] = ()

    @property
    def fits_fp8(self) -> bool:
        """Whether it may stay FP8: a kernel reads it, and blocks of scales stay whole."""
        columns = self.out >= 2 * FP8_COLUMNS and self.out % FP8_COLUMNS == 0
        whole = not any(width % BLOCK for width in self.together)
        return columns and self.inner % BLOCK == 0 and whole

    def fits_four_bits(self, form: FourBitFormat) -> bool:
        """Whether it may stay 4 bits: a kernel reads it, and what lies side by side is whole
        tiles."""
        whole = not any(width % FP8_COLUMNS for width in self.together)
        return self.out >= 2 * FP8_COLUMNS and form.fits(self.out, self.inner) and whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixer(abc.ABC):
    """What mixes the tokens of a row: attention, or a recurrence.

    Attributes:
        fp8: the names of those linears whose weights are FP8, see `jaxattn.nn.Fp8Linear`, or
            `FourBitLinears` of 4 bits.
        norms: whether the module's `decode` takes tokens as a `PendingNorm`.
        cache_name: the mixers of one cache are equal.
        cache_formats: what the cache may be made in (`with_cache_format`), beside its own.
        read_apart: parameters that decoding reads where they are, and not from `pack`'s rows.
    """

    fp8: tuple[str, ...] | FourBitLinears = ()

    norms: ClassVar[bool] = False
    cache_formats: ClassVar[tuple[str, ...]] = ()
    read_apart: ClassVar[tuple[str, ...]] = ()

    def matrices(self, stream: Stream) -> dict[str, Matrix]:
        """The linears that may be among `fp8`."""
        return {}

    def in_format(self, name: str) -> "Mixer":
        """The same layer with a cache in one of `cache_formats`."""
        raise NotImplementedError(f"{type(self).__name__} supports only its own cache format")

    def set_apart(self) -> "Mixer":
        """The same layer with a cache in its own format beside others'.

        Raises:
            ValueError: all layers of this kind share one format.
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
        """Decode op -> its kernel's name in a compiled step."""

    @abc.abstractmethod
    def build(self, stream: Stream, rngs: nnx.Rngs) -> nnx.Module:
        """The module with its parameters; `module(x)` is the whole sequence, for training."""

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
        layer: StackedLayer,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays]:
        """The output of a line of each row's prompt and the cache's arrays; `x` is normed. A mixer
        has this or `mixed`."""
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
        layer: StackedLayer,
        weights: Array | None,
        shared: Any,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena | None]:
        """The output of the prompts' lines and of the rows behind them, the cache's arrays and the
        arena; `x` [1, N, hidden] is normed.

        Here by `prefill` of one line for each row, as long as all lines, and by `decode`. A mixer
        with an own form projects all tokens at once, and pads no row.

        Args:
            lines: the prompts' layout.
            rows: with a token each, as `decode` takes them; None if there are none.
        """
        own, others = lines.split(x)
        chosen = implementation if implementation == "xla" else None
        y, arrays_after = self.prefill(
            module, lines.to_rows(own), arrays, prompts.in_one_line(), layer, chosen
        )
        y = lines.from_rows(y)
        if rows is None:
            return lines.join(y, None), arrays_after, arena
        assert arena is not None  # that of the step
        # All that the prompts read of the caches is read before the rows write to them: XLA copies
        # what a fusion reads later.
        y, arrays_after = lax.optimization_barrier((y, arrays_after))
        of_rows, arrays_after, arena = self.decode(
            module, others, {**arrays, **arrays_after}, arena, rows, layer, weights, shared,
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
        layer: StackedLayer,
        weights: Array | None,
        shared: Any,
        implementation: Implementation | None,
    ) -> tuple[Array, Arrays, Arena]:
        """The new tokens' output, the cache's arrays and the arena; `x` is normed, and no row is
        longer than `most_tokens`."""

    def shared(
        self, module: Any, arrays: Arrays, batch: DecodeBatch, implementation: Any
    ) -> dict[str, Any]:
        """What every layer of a decode step needs; inside the loop XLA would make it in each."""
        return {}

    def handed_on(
        self, arrays: Arrays, prompts: PrefillBatch | None, rows: DecodeBatch | None
    ) -> Arrays:
        """What layers hand on to those behind them in a step, as it is before the first one. They
        find it, and leave it, among the arrays of their cache."""
        return {}

    def handed_on_whole(self, rows: int, tokens: int) -> Array | None:
        """The same before the first layer over whole sequences; None where nothing is handed on."""
        return None

    def whole(
        self, module: Any, x: Array, packed: Mapping[str, Any], handed_on: Array | None
    ) -> tuple[Array, Array | None]:
        """(the output of whole sequences `x`, which is normed, and what is handed on behind the
        layer); `packed` are the module's keywords."""
        return module(x, **packed), handed_on

    def most_tokens(self, arrays: Arrays, batch: DecodeBatch) -> int | None:
        """Tokens that a row's block table has places for; None where a row may be of any length,
        or the layer looks after longer ones itself."""
        return None

    def pack(self, params: Any) -> Float[Array, "repeats W"] | None:
        """The small weights of one place in a pattern, a row for each repeat."""
        return None

    def beside(self, stream: Stream, params: Any) -> tuple[Array, Array] | None:
        """FP8 weights [repeats, N, K] and scales that a step reads in the launch of others, made of
        the parameters; `leave_beside` tells the module where they are."""
        return None

    def leave_beside(self, module: Any, weights: StackedWeight, scales: StackedWeight) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no weights besides its linears")

    def widened(self, stream: Stream, params: Any) -> dict[str, Array]:
        """Those matrices [repeats, in, out] that get columns of zeros, by their modules' names."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForward(abc.ABC):
    """What follows the mixer: `module(x)` of normed tokens.

    Attributes:
        fp8: the names of those linears whose weights are FP8, see `jaxattn.nn.Fp8Linear`, or
            `FourBitLinears` of 4 bits.
        norms: whether `step` takes tokens as a `PendingNorm`.
        stacked: parameters that a step reads out of the stack of all repeats, which are too many
            bytes to be sliced out of it.
    """

    fp8: tuple[str, ...] | FourBitLinears = ()

    norms: ClassVar[bool] = False

    def matrices(self, stream: Stream) -> dict[str, Matrix]:
        """The linears that may be among `fp8`."""
        return {}

    @property
    def stacked(self) -> tuple[str, ...]:
        return ()

    @property
    def summed_over(self) -> Dimension:
        """The GPUs whose parts of the output add up: "tensor", or "experts"."""
        return "tensor"

    @abc.abstractmethod
    def build(self, stream: Stream, rngs: nnx.Rngs) -> nnx.Module: ...

    def scratch(self, stream: Stream, tokens: int) -> ArenaSpec:
        """Of a decode step of so many tokens."""
        return ArenaSpec()

    def pack(self, stream: Stream, params: Mapping[str, Any]) -> dict[str, Array]:
        """Those parameters, [repeats, ...], that the steps read faster in another form, by their
        names: "router", "gate_proj.weight"."""
        return {}

    def share(self, tokens: int) -> Any:
        """What this GPU computes of a step of so many tokens, where several divide them; else None.

        A step has it before its loop over layers: in the loop the number of a GPU is a launch in
        each layer that no CUDA graph takes.
        """
        return None

    def step(
        self,
        module: Any,
        x: Array,
        valid: Array,
        stacks: Arrays,
        layer: StackedLayer,
        arena: Arena | None,
        implementation: Implementation | None,
        apart: bool = False,
        share: Any = None,
    ) -> tuple[Any, Arena | None]:
        """The output and the arena.

        Args:
            valid: whether a token is no padding, a truth value or a number.
            stacks: the parameters `stacked`, [repeats, ...] each.
            layer: the number of this layer in them.
            arena: None in prefill.
            apart: whether the output may be an `ExpertOutputs`, which the next norm sums up.
            share: of the step, see `share`.
        """
        return module(x), arena


@dataclasses.dataclass(frozen=True)
class Block:
    """One layer: norm, mixer, norm, feed-forward on a float32 residual stream.

    Attributes:
        norms_after: the norms are of what mixer and feed-forward give, and not of what they read
            (OLMo 2).
    """

    mixer: Mixer
    feed_forward: FeedForward
    norms_after: bool = False
