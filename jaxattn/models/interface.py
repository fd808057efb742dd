"""The interface between a model and the engine: its caches, its scratch memory and its steps.

    prefill_hidden(params, state, batch) -> (hidden [L, T, hidden], state)
    head(params, hidden [N, hidden]) -> logits [N, vocab]
    decode(params, state, batch) -> (logits [B, vocab], state)
    mixed(params, state, prompts, rows, sources) -> (logits [b, vocab], state, hidden [L T, hidden])

The engine, the plan and the seal use only `Model` and `LayerCache`, and name no specific model or
kind of cache. docs/adding-a-model.md walks through a complete model.
"""

import abc
import dataclasses
import os
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
    """The next S tokens of each row, where S is 1 unless several tokens are known.

    Attributes:
        tokens: int32 [B, S].
        seq_lens: int32 [B], the lengths of the rows with the new tokens; 0 marks a padding row.
        block_tables: int32 [B, M], the pages of each row in order; entries past its length are
            never read.
        state_indices: int32 [B], the state slot of each row; -1 marks a padding row.
        write_indices: int32 [B, S], the slots that receive the states after each token. None writes
            the last state to the slot that was read.
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
        query_lens: int32 [B], the number of tokens in each row's piece; 0 marks a padding row.
        seq_lens: int32 [B], the row's length after the piece. A row whose `seq_lens` equals its
            `query_lens` is fresh: it starts from zero states, whatever its slot holds.
        block_tables: int32 [B, M].
        state_indices: int32 [B]; -1 marks a padding row.
        lines: int32 [L], the row of each line, ascending; B for a line without a row. A row's
            tokens continue from one of its lines to the next. None means that each row has one
            line, so that L is B.
    """

    tokens: Int[Array, "L T"]
    query_lens: Int[Array, "B"]
    seq_lens: Int[Array, "B"]
    block_tables: Int[Array, "B M"]
    state_indices: Int[Array, "B"]
    lines: Int[Array, "L"] | None = None

    @property
    def layout(self) -> PromptLines:
        """The positions of the rows' tokens in the lines."""
        lens = self.query_lens, self.seq_lens
        return PromptLines.of(self.lines, *lens, self.tokens.shape[1])

    def sampled(self, sources: Int[Array, "b"], *, beside_rows: bool) -> Int[Array, "b"]:
        """Returns, for each line of logits, the index of the token that it belongs to.

        The index counts all tokens of the prompts, followed by one token of each of b rows if
        `beside_rows`; see `Model.mixed`.
        """
        at = self.layout.last[jnp.maximum(sources, 0)]
        if not beside_rows:
            return at
        return jnp.where(sources >= 0, at, self.tokens.size + jnp.arange(len(sources)))

    def in_one_line(self) -> "PrefillBatch":
        """Returns the same batch with one line per row, as long as all lines together."""
        if self.lines is None:
            return self
        return dataclasses.replace(self, tokens=self.layout.to_rows(self.tokens), lines=None)


class Model(abc.ABC):
    """A decoder as the engine sees it. Equal models share their compiled steps.

    A model must be hashable: a frozen dataclass of its configuration, such as `DecoderModel`.
    """

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """The number of token ids, which range from 0 to `vocab_size` - 1."""

    @property
    def parallel(self) -> Parallel:
        """The layout of the GPUs that share the model; this model is one GPU's share."""
        return ALONE

    @property
    def vocabulary(self) -> ShardedVocabulary:
        """The tokens for which one GPU's steps return logits."""
        return ShardedVocabulary(self.vocab_size)

    @property
    def logit_columns(self) -> int:
        """The number of logits of all GPUs together; those past the last token are -inf."""
        return self.vocabulary.columns * self.vocabulary.parts

    @property
    @abc.abstractmethod
    def max_position_embeddings(self) -> int:
        """The maximum length of a row in tokens. No allocation depends on it."""

    @property
    @abc.abstractmethod
    def caches(self) -> tuple[LayerCache, ...]:
        """The caches in which layers keep data of the rows."""

    @abc.abstractmethod
    def param_shapes(self) -> Any:
        """Returns the parameters as shapes and dtypes, before `pack`."""

    @property
    @abc.abstractmethod
    def hidden_shape(self) -> jax.ShapeDtypeStruct:
        """The shape [hidden] and dtype of one token in the result of `prefill_hidden`."""

    @abc.abstractmethod
    def prefill_hidden(
        self,
        params: Any,
        state: DecodeState,
        batch: PrefillBatch,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "L T hidden"], DecodeState]:
        """Processes a piece of each row's prompt.

        Returns:
            The head's input for each token (at padding, that of a zero stream), and the state.
        """

    @abc.abstractmethod
    def head(self, params: Any, hidden: Float[Array, "N hidden"]) -> Float[Array, "N vocab"]:
        """Returns float32 logits of tokens, from the result of `prefill_hidden`."""

    def prefill(
        self,
        params: Any,
        state: DecodeState,
        batch: PrefillBatch,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B vocab"], DecodeState]:
        """Processes a piece of each row's prompt.

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
        """Processes the next tokens of each row.

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
        """Processes pieces of prompts and the next token of other rows in one step.

        By default this runs `prefill_hidden` and `decode` one after the other.

        Args:
            prompts: Rows that are not among `rows`.
            rows: b rows with one token each, or None if the step has only prompts.
            sources: int32 [b], the row of `prompts` whose logits each line returns; -1 means the
                row with the same index in `rows`.

        Returns:
            Float32 logits of each line, those after the last token of its row; the state; and the
            head's input for each token of `prompts`.
        """
        # A kernel requested by name is for decoding: prefill's kernels reject some models.
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
        """Does the same as `decode`, but returns the logits of each new token, for drafts.

        Returns:
            Float32 logits of each token, the state, and the head's input for each token.

        Raises:
            TypeError: The model has no such step.
        """
        raise TypeError(f"{type(self).__name__} has no decode_each, which drafts need")

    # --- for a model with a draft head (`DraftHead`), which has the cache `DraftInputs`

    @property
    def has_draft_head(self) -> bool:
        """Whether the model guesses tokens itself, by the three methods below."""
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
        """Returns the head's input for the tokens of prompts, then rows; and the state."""
        raise TypeError(f"{type(self).__name__} has no draft head")

    def draft(
        self,
        params: Any,
        state: DecodeState,
        batch: DecodeBatch,
        hidden: Float[Array, "B S hidden"],
        last_indices: Int[Array, "B"],
        *,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "B vocab"], Float[Array, "B hidden"], DecodeState]:
        """Guesses the token after each row's token at `last_indices`.

        Args:
            batch: The tokens that follow those of `hidden`, at the positions of the latter.
            hidden: The head's input for cached tokens, or this method's second result for a guess.
            last_indices: int32 [B], below S.

        Returns:
            Float32 logits of the guess; the `hidden` for the next guess; and the state, in which
            the draft head has cached the tokens.
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
        """Returns the state after the draft head has cached the prompts' tokens.

        Args:
            prompts: The prompts, with each token replaced by the one that follows it.
            hidden: The head's input for each token.
        """
        raise TypeError(f"{type(self).__name__} has no draft head")

    def scratch(
        self, rows: int, *, max_pages: int, q_len: int = 1, page_size: int = PAGE_SIZE
    ) -> tuple[ArenaSpec, ...]:
        """Returns the scratch of each op of a decode step of `rows` rows."""
        return ()

    def with_cache_format(self, name: str, native_layers: int = 0) -> "Model":
        """Returns the same model with caches in a format of `CACHE_FORMATS`.

        Args:
            native_layers: Number of first and of last layers that keep their own cache format.

        Raises:
            ValueError: The model does not support the format; the message names those that it
                supports.
        """
        if name != "auto" or native_layers:
            raise ValueError(
                f"{type(self).__name__} supports only cache_format='auto' with native_layers=0; "
                f"got cache_format={name!r}, {native_layers=}"
            )
        return self

    def with_batch_invariance(self) -> "Model":
        """Returns the model with decode steps in which a row's bits do not depend on others."""
        return self

    def for_cpu(self) -> "Model":
        """Returns the same model with caches that a CPU can write in place: FP8 numbers as bits."""
        return self

    def without_peer_memory(self) -> "Model":
        """Returns the same model with kernels that do not access other GPUs' memory."""
        return self

    def pack(self, params: Any) -> Any:
        """Returns the parameters in the form that steps read fastest; called once, at load time."""
        return params

    def copies(self, params: Any) -> Any:
        """Returns the arrays, or shapes, that packed parameters have in addition to the parameters.

        These are second copies of small weights, and zeros that pad matrices of odd widths.
        """
        return ()

    # --- on several GPUs, for the model that `models.divided` returns

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
        """Distributes the whole model's parameters over a group, each GPU's share on its device."""
        raise TypeError(f"{type(self).__name__} supports only one GPU")

    def joined_param(self, path: Any, leaf: Array) -> Array:
        """Returns a whole model's parameter in the layout of an array over the group.

        That layout concatenates the GPUs' shares along each sharded axis.

        Args:
            path: Path of the parameter in a JAX tree.
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
        """The kernel name of each decode op in a compiled step."""
        return {}


def _tokens(hidden: Float[Array, "L T hidden"]) -> Float[Array, "N hidden"]:
    """Returns the tokens of all lines as one list."""
    return hidden.reshape(-1, hidden.shape[-1])


def overlaid(specs: Iterable[ArenaSpec]) -> ArenaSpec:
    """Returns the arena of ops that run one after another: the maximum of their specs."""
    return reduce(or_, specs, ArenaSpec())


def scratch_spec(
    model: Model, rows: int, *, max_pages: int, q_len: int = 1, page_size: int = PAGE_SIZE
) -> ArenaSpec:
    """Returns the scratch that one decode step needs for any number of layers: the ops' maximum."""
    return overlaid(model.scratch(rows, max_pages=max_pages, q_len=q_len, page_size=page_size))


def init_state(model: Model, size: CacheSize, spec: ArenaSpec) -> DecodeState:
    """Returns zeroed caches and an arena; `jax.eval_shape` gives the bytes without a device."""
    return DecodeState(
        Arena.allocate(spec), {cache.name: cache.init(size) for cache in model.caches}
    )


def check_params(shapes: Any, params: Any) -> None:
    """Raises ValueError with all differences unless `params` have these shapes and dtypes."""
    expected = {name: (shape,) for name, shape in named_params(shapes).items()}
    if wrong := param_differences(expected, named_params(params)):
        raise ValueError("; ".join(wrong))


def named_params(params: Any) -> dict[str, Any]:
    """Maps names ("segments.0.norm.weight") to parameters of a tree, nnx state or nnx module."""
    tree = nnx.state(params) if isinstance(params, nnx.Module) else params
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def param_differences(
    expected: Mapping[str, tuple[jax.ShapeDtypeStruct, ...]], named: Mapping[str, Any]
) -> list[str]:
    """Describes how named parameters differ from the expected ones, each of several shapes."""
    problems = []
    for name, shapes in expected.items():
        leaf = named.get(name)
        actual = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if any(actual == (shape.shape, shape.dtype) for shape in shapes):
            continue
        is_ = "is missing" if name not in named else f"is {_described(leaf)}"
        wanted = " or ".join(dict.fromkeys(map(_described, shapes)))
        problems.append(f"parameter {name!r} {is_}; expected {wanted}")
    problems += [f"unexpected parameter {name!r}" for name in named if name not in expected]
    return problems


def _described(leaf: Any) -> str:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"


# XLA's option for the kinds of commands that CUDA graphs record. A compiler option replaces XLA's
# default list, so RECORDED is this list and loops.
GRAPHS = "xla_gpu_enable_command_buffer"
RECORDED = (
    "CONDITIONAL", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "FUSION",
    *(("COLLECTIVES_KERNEL",) if jax.__version_info__ >= (0, 12) else ()), "WHILE",
)  # fmt: skip


def compiler_options(backend: str, *, prefill: bool = False) -> dict[str, bool | int | str] | None:
    """Returns options for the `jax.jit` of a step, or None if there is nothing to set.

    XLA's Triton matmuls copy each layer's weights out of the stack before they read them, and its
    dot merger does so to join two products with one left operand. Rematerialization counts a
    donated state twice, as argument and as result. If the state fills the device, XLA would
    recompute parts of the step to save memory that is not a temp.

    Args:
        prefill: Whether the step reads prompts on one device. MLA's attention to a cached prefix is
            a `while` loop inside a `cond`, and XLA records a `cond` in a CUDA graph only if it
            records both branches. Otherwise the host reads both predicates in each layer. A list in
            `XLA_FLAGS` takes precedence.
    """
    if backend != "gpu":
        return None
    options: dict[str, bool | int | str] = {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_disable_hlo_passes": "rematerialization",
    }
    if prefill and GRAPHS not in os.environ.get("XLA_FLAGS", ""):
        options[GRAPHS] = ",".join(RECORDED)
    return options


def jit_step(
    step: Callable,
    *,
    implementation: Implementation | None = None,
    backend: str | None = None,
    prefill: bool = False,
    out_shardings: Any = None,
) -> Any:
    """Jits a step as (params, state, batch) -> (logits, state), with the state donated.

    Args:
        step: The `decode` or `prefill` method of a model.
        backend: "cpu" or "gpu", for the compiler options. None means JAX's default backend.
        prefill: Whether the step reads prompts on one device, for the compiler options.
        out_shardings: Shardings of the step's results over several devices. Without them XLA may
            assign a donated buffer to any output of the same size.
    """
    if implementation is not None:
        step = partial(step, implementation=implementation)
    return jax.jit(
        step,
        donate_argnums=1,
        compiler_options=compiler_options(backend or jax.default_backend(), prefill=prefill),
        out_shardings=out_shardings,
    )
