"""The interface of a model to the engine: its caches, its scratch and its steps.

    prefill_hidden(params, state, batch) -> (hidden [L, T, hidden], state)
    head(params, hidden [N, hidden]) -> logits [N, vocab]
    decode(params, state, batch) -> (logits [B, vocab], state)
    mixed(params, state, prompts, rows, sources) -> (logits [b, vocab], state, hidden [L T, hidden])

The engine, the plan and the seal go through `Model` and `LayerCache`. They name no model and no
kind of cache. docs/adding-a-model.md walks through a complete model.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxattn.arena import Arena, ArenaSpec
from jaxattn.core.cache.formats import PAGE_SIZE
from jaxattn.core.cache.prompt_packing import PromptLines
from jaxattn.core.dispatch import Implementation
from jaxattn.models.caches.layer_cache import CacheSize, DecodeState, LayerCache
from jaxattn.parallel import ALONE, DeviceGroup, Parallel, ShardedVocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """The next S tokens of each row, S = 1 unless several tokens are known.

    Attributes:
        tokens: int32 [B, S].
        seq_lens: int32 [B], the new tokens included; 0 is a padding row.
        block_tables: int32 [B, M], pages of the row in order; entries past its length are never
            read.
        state_indices: int32 [B], the row's state slot; -1 is a padding row.
        write_indices: int32 [B, S], the slots that take the states behind each of the tokens;
            None writes the last to the slot that was read.
    """

    tokens: Int[Array, "B S"]
    seq_lens: Int[Array, "B"]
    block_tables: Int[Array, "B M"]
    state_indices: Int[Array, "B"]
    write_indices: Int[Array, "B S"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """A piece of each row's prompt, left-aligned in lines of T tokens.

    Attributes:
        tokens: int32 [L, T].
        query_lens: int32 [B], tokens of the piece; 0 is a padding row.
        seq_lens: int32 [B], the row's length after the piece. A row whose `seq_lens` equals its
            `query_lens` is fresh: it starts from zero states, whatever its slot holds.
        block_tables: int32 [B, M].
        state_indices: int32 [B]; -1 is a padding row.
        lines: int32 [L], the row of each line, ascending; B is a line of no row. A row's tokens go
            on from one of its lines to the next. None: each row has one line, and L is B.
    """

    tokens: Int[Array, "L T"]
    query_lens: Int[Array, "B"]
    seq_lens: Int[Array, "B"]
    block_tables: Int[Array, "B M"]
    state_indices: Int[Array, "B"]
    lines: Int[Array, "L"] | None = None

    @property
    def layout(self) -> PromptLines:
        """Where the rows' tokens are."""
        lens = self.query_lens, self.seq_lens
        return PromptLines.of(self.lines, *lens, self.tokens.shape[1])

    def sampled(self, sources: Int[Array, "b"], *, beside_rows: bool) -> Int[Array, "b"]:
        """Of each line of logits, which token it is of: of all tokens, and b rows' tokens behind
        them if the step has those; see `Model.mixed`."""
        at = self.layout.last[jnp.maximum(sources, 0)]
        if not beside_rows:
            return at
        return jnp.where(sources >= 0, at, self.tokens.size + jnp.arange(len(sources)))

    def in_one_line(self) -> "PrefillBatch":
        """The same with one line for each row, as long as all lines together."""
        if self.lines is None:
            return self
        return dataclasses.replace(self, tokens=self.layout.to_rows(self.tokens), lines=None)


class Model(abc.ABC):
    """A decoder as the engine sees it. Two equal models share their executables.

    A model is hashable: a frozen dataclass of its configuration, as `DecoderModel` is.
    """

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Tokens are from 0 to `vocab_size` - 1."""

    @property
    def parallel(self) -> Parallel:
        """The layout of the GPUs of which this model is one's."""
        return ALONE

    @property
    def vocabulary(self) -> ShardedVocabulary:
        """The tokens that the steps of one GPU return logits of."""
        return ShardedVocabulary(self.vocab_size)

    @property
    def logit_columns(self) -> int:
        """Of the logits of all GPUs; what lies behind the last token is -inf."""
        return self.vocabulary.columns * self.vocabulary.parts

    @property
    @abc.abstractmethod
    def max_position_embeddings(self) -> int:
        """The longest row in tokens. Nothing is allocated by it."""

    @property
    @abc.abstractmethod
    def caches(self) -> tuple[LayerCache, ...]:
        """What the layers keep of the rows."""

    @abc.abstractmethod
    def param_shapes(self) -> Any:
        """The parameters as shapes and dtypes, before `pack`."""

    @property
    @abc.abstractmethod
    def hidden_shape(self) -> jax.ShapeDtypeStruct:
        """[hidden] and dtype of a token of `prefill_hidden`."""

    @abc.abstractmethod
    def prefill_hidden(
        self,
        params: Any,
        state: DecodeState,
        batch: PrefillBatch,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "L T hidden"], DecodeState]:
        """A piece of each row's prompt.

        Returns:
            What the head reads of each token (that of 0 at padding), and the state.
        """

    @abc.abstractmethod
    def head(self, params: Any, hidden: Float[Array, "N hidden"]) -> Float[Array, "N vocab"]:
        """Float32 logits of tokens, of what `prefill_hidden` gives."""

    def prefill(
        self,
        params: Any,
        state: DecodeState,
        batch: PrefillBatch,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B vocab"], DecodeState]:
        """A piece of each row's prompt.

        Returns:
            Float32 logits of each row's last valid token, and the state.
        """
        hidden, state = self.prefill_hidden(params, state, batch, implementation=implementation)
        return self.head(params, _tokens(hidden)[batch.layout.last]), state

    @abc.abstractmethod
    def decode(
        self,
        params: Any,
        state: DecodeState,
        batch: DecodeBatch,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B vocab"], DecodeState]:
        """The next tokens of each row.

        Returns:
            Float32 logits of each row's last token (0 for a padding row), and the state.
        """

    def mixed(
        self,
        params: Any,
        state: DecodeState,
        prompts: PrefillBatch,
        rows: DecodeBatch | None,
        sources: Int[Array, "b"],
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "b vocab"], DecodeState, Float[Array, "N hidden"]]:
        """Pieces of prompts, and the next token of other rows, in one step.

        A model that has no such step of its own runs its two others, one after the other.

        Args:
            prompts: rows, none of which is among `rows`.
            rows: b rows with one token each; None where the step has prompts alone.
            sources: int32 [b], which row of `prompts` has the logits of each line; -1 is the row of
                the same number in `rows`.

        Returns:
            Float32 logits of each line: those after the last token of its row; the state; and what
            the head reads of each token of `prompts`.
        """
        # What is named is for decoding: prefill's kernels refuse other models.
        chosen = implementation if implementation == "xla" else None
        lines, each = prompts.layout, prompts.in_one_line()
        found, state = self.prefill_hidden(params, state, each, implementation=chosen)
        hidden = _tokens(lines.from_rows(found))
        logits = self.head(params, hidden[lines.last[jnp.maximum(sources, 0)]])
        if rows is not None:
            others, state = self.decode(params, state, rows, implementation=implementation)
            logits = jnp.where((sources >= 0)[:, None], logits, others)
        return logits, state, hidden

    def decode_each(
        self,
        params: Any,
        state: DecodeState,
        batch: DecodeBatch,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B S vocab"], DecodeState, Float[Array, "B S hidden"]]:
        """As `decode`, with the logits of each of the new tokens, for drafts, and what the head
        read of them.

        Raises:
            TypeError: the model has no such step.
        """
        raise TypeError(f"{type(self).__name__} has no decode_each, which drafts need")

    # --- of a model with a draft head (`DraftHead`), which has the cache `DraftInputs`

    @property
    def has_draft_head(self) -> bool:
        """Whether the model guesses tokens itself, by the three functions below."""
        return False

    def mixed_hidden(
        self,
        params: Any,
        state: DecodeState,
        prompts: PrefillBatch,
        rows: DecodeBatch | None,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "N hidden"], DecodeState]:
        """What the head reads of each token of the prompts' lines, and of the rows behind them; and
        the state."""
        raise TypeError(f"{type(self).__name__} has no draft head")

    def draft(
        self,
        params: Any,
        state: DecodeState,
        batch: DecodeBatch,
        hidden: Float[Array, "B S hidden"],
        last: Int[Array, "B"],
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B vocab"], Float[Array, "B hidden"], DecodeState]:
        """Guesses the token behind each row's token at `last`.

        Args:
            batch: the tokens that follow those of `hidden`, at the places of these.
            hidden: what the head read of tokens that are cached, or what this gave of a guess.
            last: int32 [B], below S.

        Returns:
            Float32 logits of the guess; what the next guess reads in the place of `hidden`; and the
            state, in which the draft head has cached the tokens.
        """
        raise TypeError(f"{type(self).__name__} has no draft head")

    def draft_prompts(
        self,
        params: Any,
        state: DecodeState,
        prompts: PrefillBatch,
        hidden: Float[Array, "N hidden"],
        *,
        implementation: Implementation | None = None,
    ) -> DecodeState:
        """The state in which the draft head has cached the tokens of prompts.

        Args:
            prompts: with the token that follows each token in its place.
            hidden: what the head reads of each token.
        """
        raise TypeError(f"{type(self).__name__} has no draft head")

    def scratch(
        self, rows: int, *, max_pages: int, q_len: int = 1, page_size: int = PAGE_SIZE
    ) -> tuple[ArenaSpec, ...]:
        """The scratch of each op of a decode step of `rows` rows of up to `max_pages` pages."""
        return ()

    def with_cache_format(self, name: str, native_layers: int = 0) -> "Model":
        """The same model with caches in a format of `CACHE_FORMATS`.

        Args:
            native_layers: so many first and so many last layers keep the cache that they have.

        Raises:
            ValueError: it has no such format; those that it has are named.
        """
        if name != "auto" or native_layers:
            raise ValueError(
                f"{type(self).__name__} supports only cache_format='auto' with native_layers=0; "
                f"got cache_format={name!r}, {native_layers=}"
            )
        return self

    def with_batch_invariance(self) -> "Model":
        """The same model, whose decode steps give a row the same bits whatever rows are beside it.
        A model whose steps do so anyway is the same."""
        return self

    def for_cpu(self) -> "Model":
        """The same model, whose caches lie as a CPU writes them in place: FP8 numbers as bits."""
        return self

    def without_peer_memory(self) -> "Model":
        """The same model, whose kernels reach the memory of no other GPU."""
        return self

    def pack(self, params: Any) -> Any:
        """The parameters as the steps read them fastest. The engine calls it once, on loading."""
        return params

    def copies(self, params: Any) -> Any:
        """Arrays, or shapes, of what packed parameters have more numbers than the parameters: small
        weights a second time, and zeros beside matrices of odd widths."""
        return ()

    # --- on several GPUs, of the model that `models.divided` returns

    @property
    def whole(self) -> "Model":
        """The model that the GPUs divide; on one GPU, this one."""
        return self

    def packed_specs(self) -> Any:
        """The PartitionSpec of each packed parameter."""
        return jax.tree.map(
            lambda _: PartitionSpec(), jax.eval_shape(self.pack, self.param_shapes())
        )

    def param_specs(self) -> Any:
        """The PartitionSpec of each parameter, before `pack`."""
        return jax.tree.map(lambda _: PartitionSpec(), self.param_shapes())

    def place_params(self, params: Any, group: DeviceGroup) -> Any:
        """The whole model's parameters over a group, each GPU's share on its device."""
        raise TypeError(f"{type(self).__name__} supports only one GPU")

    def joined_param(self, path: Any, leaf: Array) -> Array:
        """A whole model's parameter as an array over the group has it: the GPUs' shares, one after
        another along each axis that is divided.

        Args:
            path: of the parameter, in a tree of JAX.
        """
        return leaf

    def state_specs(self) -> DecodeState:
        """The PartitionSpec of each array of a `DecodeState`."""
        arena: Any = PartitionSpec(self.parallel.axes("all"))
        one = CacheSize(pages=1, slots=1)
        caches: Any = {
            cache.name: {name: cache.spec(name, self.parallel) for name in cache.shapes(one)}
            for cache in self.caches
        }
        return DecodeState(arena, caches)

    @property
    def kernels(self) -> Mapping[str, str]:
        """Decode op -> its kernel's name in a compiled step."""
        return {}


def _tokens(hidden: Float[Array, "L T hidden"]) -> Float[Array, "N hidden"]:
    """The tokens of all lines as one list."""
    return hidden.reshape(-1, hidden.shape[-1])


def overlaid(specs: Iterable[ArenaSpec]) -> ArenaSpec:
    """The arena of ops that run one after another: the maximum, whatever runs first."""
    return reduce(or_, specs, ArenaSpec())


def scratch_spec(
    model: Model, rows: int, *, max_pages: int, q_len: int = 1, page_size: int = PAGE_SIZE
) -> ArenaSpec:
    """What one decode step needs, however many layers there are: the ops' scratch, overlaid."""
    return overlaid(model.scratch(rows, max_pages=max_pages, q_len=q_len, page_size=page_size))


def init_state(model: Model, size: CacheSize, spec: ArenaSpec) -> DecodeState:
    """Zeroed caches and an arena. Under `jax.eval_shape` it says the bytes without a device."""
    return DecodeState(
        Arena.allocate(spec), {cache.name: cache.init(size) for cache in model.caches}
    )


def check_params(shapes: Any, params: Any) -> None:
    """Raises ValueError, with all differences, unless `params` have these shapes and dtypes."""
    expected = {name: (shape,) for name, shape in named_params(shapes).items()}
    if wrong := param_differences(expected, named_params(params)):
        raise ValueError("; ".join(wrong))


def named_params(params: Any) -> dict[str, Any]:
    """Name -> parameter, of a tree, an nnx state or an nnx module; "segments.0.norm.weight"."""
    tree = nnx.state(params) if isinstance(params, nnx.Module) else params
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def param_differences(
    expected: Mapping[str, tuple[jax.ShapeDtypeStruct, ...]], found: Mapping[str, Any]
) -> list[str]:
    """How named parameters differ from those that are expected, each of one of several shapes."""
    wrong = []
    for name, shapes in expected.items():
        leaf = found.get(name)
        actual = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if any(actual == (shape.shape, shape.dtype) for shape in shapes):
            continue
        is_ = "is missing" if name not in found else f"is {_described(leaf)}"
        wanted = " or ".join(dict.fromkeys(map(_described, shapes)))
        wrong.append(f"parameter {name!r} {is_}; expected {wanted}")
    wrong += [f"unexpected parameter {name!r}" for name in found if name not in expected]
    return wrong


def _described(leaf: Any) -> str:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"


def compiler_options(backend: str) -> dict[str, bool | int | str] | None:
    """Options for a `jax.jit` around a step; None where there is nothing to set.

    XLA's Triton matmuls copy each layer's weights out of the stack before they read them, and its
    dot merger does so to join two products with one left side. Rematerialization counts a state
    that fills the device twice, as argument and as result, and computes parts of the step again to
    save what is no temp at all.
    """
    if backend != "gpu":
        return None
    return {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_disable_hlo_passes": "rematerialization",
    }


def jit_step(
    step: Callable,
    *,
    implementation: Implementation | None = None,
    backend: str | None = None,
    out_shardings: Any = None,
) -> Any:
    """A step jitted as (params, state, batch) -> (logits, state), the state donated.

    Args:
        step: a model's `decode` or `prefill`.
        backend: "cpu" or "gpu", for the compiler options; None is JAX's default backend.
        out_shardings: shardings of all that the step returns, over several devices. Without them
            XLA gives a donated buffer to any output of as many bytes.
    """
    if implementation is not None:
        step = partial(step, implementation=implementation)
    return jax.jit(
        step,
        donate_argnums=1,
        compiler_options=compiler_options(backend or jax.default_backend()),
        out_shardings=out_shardings,
    )
