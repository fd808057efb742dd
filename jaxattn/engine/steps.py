"""The executables of an engine: every step that serving can reach, compiled ahead of time.

    prefill of P x T tokens    a chunk of each of P prompts: the first, a later one (the cached
                               prefix is walked page by page up to the whole block table), the last
    decode of B x 1 tokens     the last token of each row, from the rows on the device
    decode of B x S tokens     of tokens that are given, for callers of `Engine.executables`
    mask of B rows             what grammars do not allow, out of the logits (grammar.py)
    sample of B rows: level    the rows' next tokens (advance.py)
    update of rows             rows that come, and pages (rows.py)
    history of P x T tokens    prompts of rows with penalties
    copy of states             to a checkpoint and back (prefix.py), where there are checkpoints

The first three are the model's own: (weights, state, batch) -> (logits, state), where `weights`
are the leaves of the packed parameters: to take a tree of modules apart costs the host more than
all the rest of a call. The others change rows: (rows, ...) -> rows, some with what they tell.

Lengths are data, so a row's length never asks for another executable; shapes are buckets.
"""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.arena import ArenaSpec
from jaxattn.engine import rows as device_rows
from jaxattn.engine.advance import advance, remember
from jaxattn.engine.batches import kept_places, packed_chunks, prefill_batch, prefill_width
from jaxattn.engine.grammar import masked, masks, words_of
from jaxattn.engine.rows import Places, Rows, decode_batch
from jaxattn.engine.sampling import Level
from jaxattn.memory.limits import Limits
from jaxattn.models.base import (
    CacheSize,
    DecodeBatch,
    DecodeState,
    Model,
    init_state,
    overlaid,
)
from jaxattn.parallel import own_part


class Step(abc.ABC):
    """One executable. `str` is its name.

    Attributes:
        donated: which argument is updated in place.
    """

    donated: int = 0

    @abc.abstractmethod
    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        """What is jitted; `tree` is the structure of the packed parameters."""

    @abc.abstractmethod
    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        """What it is called with, as shapes."""

    @abc.abstractmethod
    def given(self, model: Model, limits: Limits) -> Any:
        """Those of them that come with the call: neither weights, state nor rows."""

    @abc.abstractmethod
    def padding(self, model: Model, limits: Limits) -> Any:
        """What is given where there is no row: NumPy arrays of which nothing is written."""


@dataclasses.dataclass(frozen=True)
class EntryPoint(Step):
    """A step of the model: `kind` is "prefill" or "decode", of `rows` rows of `tokens` tokens."""

    kind: str
    rows: int
    tokens: int

    donated = 1

    def __str__(self) -> str:
        return f"{self.kind} of {self.rows} x {self.tokens} tokens"

    @property
    def reads_rows(self) -> bool:
        """Whether its batch is made of the rows on the device."""
        return self.kind == "decode" and self.tokens == 1

    def step(self, model: Model, limits: Limits) -> Callable:
        """(params, state, batch) -> (logits, state)."""
        if self.kind == "prefill":
            rows = sampled_rows(limits, self.rows) // limits.groups
            return partial(_prefill, model, limits.table_width, rows)
        return partial(_decode if self.reads_rows else _decode_given, model)

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        step = self.step(model, limits)

        def of_leaves(weights: Any, state: Any, batch: Any, **options: Any) -> Any:
            return step(jax.tree.unflatten(tree, weights), state, batch, **options)

        return of_leaves

    def batch_shapes(self, limits: Limits) -> Any:
        """Its batch, as shapes."""
        width = limits.table_width
        if self.kind == "prefill":
            return int32(self.rows, prefill_width(self.tokens, width))
        if self.reads_rows:
            return Places(row_shapes(limits), int32(self.rows))
        tokens, tables = int32(self.rows, self.tokens), int32(self.rows, width)
        return DecodeBatch(tokens, int32(self.rows), tables, int32(self.rows))

    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        state = jax.eval_shape(lambda: new_state(model, limits))
        return tuple(jax.tree.leaves(params)), state, self.batch_shapes(limits)

    def given(self, model: Model, limits: Limits) -> Any:
        return int32(self.rows) if self.reads_rows else self.batch_shapes(limits)

    def padding(self, model: Model, limits: Limits) -> Any:
        if self.kind == "prefill":
            return packed_chunks(self.rows, self.tokens, limits.table_width, ())
        none = np.full(self.rows, -1, np.int32)
        if self.reads_rows:
            return none
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.int32), self.batch_shapes(limits))
        return dataclasses.replace(zeros, state_indices=none)


@dataclasses.dataclass(frozen=True)
class Sample(Step):
    """Samples `rows` rows at a level."""

    rows: int
    level: Level

    def __str__(self) -> str:
        return f"sample of {self.rows} rows: {self.level}"

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        return partial(advance, level=self.level)

    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        return row_shapes(limits), *self.given(model, limits)

    def given(self, model: Model, limits: Limits) -> tuple[Any, ...]:
        logits = jax.ShapeDtypeStruct((self.rows, model.logit_columns), jnp.float32)
        return logits, int32(self.rows)

    def padding(self, model: Model, limits: Limits) -> Any:
        logits = np.zeros((self.rows, model.logit_columns), np.float32)
        return logits, np.full(self.rows, -1, np.int32)


@dataclasses.dataclass(frozen=True)
class Mask(Step):
    """Leaves out of the logits of `rows` rows what their grammars do not allow."""

    rows: int

    def __str__(self) -> str:
        return f"mask of {self.rows} rows"

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        return masked

    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        logits = jax.ShapeDtypeStruct((self.rows, model.logit_columns), jnp.float32)
        return logits, self.given(model, limits)

    def given(self, model: Model, limits: Limits) -> Any:
        return int32(self.rows, words_of(model.vocab_size))

    def padding(self, model: Model, limits: Limits) -> Any:
        logits = np.zeros((self.rows, model.logit_columns), np.float32)
        return logits, masks((), self.rows, model.vocab_size)


@dataclasses.dataclass(frozen=True)
class Update(Step):
    """Rows that come, and pages."""

    def __str__(self) -> str:
        return "update of rows"

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        return device_rows.update

    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        return row_shapes(limits), self.given(model, limits)

    def given(self, model: Model, limits: Limits) -> Any:
        return int32(device_rows.packed(limits.batch).size)

    def padding(self, model: Model, limits: Limits) -> Any:
        return np.full(device_rows.packed(limits.batch).size, limits.batch, np.int32)


@dataclasses.dataclass(frozen=True)
class Remember(Step):
    """The tokens of a prefill step, for the histories of its rows."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"history of {self.rows} x {self.tokens} tokens"

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        return partial(_remember, limits.table_width)

    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        return row_shapes(limits), self.given(model, limits)

    def given(self, model: Model, limits: Limits) -> Any:
        return int32(self.rows, prefill_width(self.tokens, limits.table_width))

    def padding(self, model: Model, limits: Limits) -> Any:
        return packed_chunks(self.rows, self.tokens, limits.table_width, ())


@dataclasses.dataclass(frozen=True)
class Copy(Step):
    """The states of one slot, to another: int32 [2], from and to."""

    def __str__(self) -> str:
        return "copy of states"

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        return partial(_copy, model)

    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        return jax.eval_shape(lambda: new_state(model, limits)), int32(2)

    def given(self, model: Model, limits: Limits) -> Any:
        return int32(2)

    def padding(self, model: Model, limits: Limits) -> Any:
        return np.zeros(2, np.int32)


def _prefill(
    model: Model, width: int, rows: int, params: Any, state: Any, batch: Any, **options: Any
) -> Any:
    """Logits of as many rows as are sampled together; those behind the prompts are 0."""
    own = _own_rows(model, prefill_batch(batch, width))
    logits, state = model.prefill(params, state, own, **options)
    return jnp.pad(logits, ((0, rows - len(logits)), (0, 0))), state


def _decode(model: Model, params: Any, state: Any, batch: Places, **options: Any) -> Any:
    return _decode_given(model, params, state, decode_batch(batch), **options)


def _decode_given(model: Model, params: Any, state: Any, batch: DecodeBatch, **options: Any) -> Any:
    return model.decode(params, state, _own_rows(model, batch), **options)


def _own_rows[Batch](model: Model, batch: Batch) -> Batch:
    """The rows of this device's data group; on one device, all."""
    return jax.tree.map(lambda x: own_part(x, model.parallel, "data"), batch)


def _remember(width: int, rows: Rows, packed: Any) -> Rows:
    batch = prefill_batch(packed, width)
    return remember(rows, batch.tokens, kept_places(packed), batch.seq_lens, batch.query_lens)


def _copy(model: Model, state: DecodeState, slots: Any) -> DecodeState:
    for cache in model.caches:
        arrays = cache.copy_slots(state.caches[cache.name], slots[:1], slots[1:])
        state = state.replace(cache.name, arrays)
    return state


def recurrent(model: Model) -> bool:
    """Whether rows have states in slots, beside their pages."""
    one, two = (CacheSize(pages=1, slots=slots) for slots in (1, 2))
    return any(cache.shapes(one) != cache.shapes(two) for cache in model.caches)


def int32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def row_shapes(limits: Limits) -> Rows:
    """The rows of an engine, as shapes."""
    return device_rows.shapes(limits.batch, limits.table_width, limits.max_model_len)


def sampled_rows(limits: Limits, rows: int) -> int:
    """With how many rows so many are sampled: the smallest bucket that holds them."""
    return next(bucket for bucket in limits.batches if bucket >= rows)


def prompts_together(limits: Limits) -> tuple[int, ...]:
    """How many prompts a prefill step reads of, as many of each data group: few, or most."""
    most = min(limits.prefill_rows, limits.batch) // limits.groups * limits.groups
    return tuple(sorted({limits.groups, max(most, limits.groups)}))


def entry_points(limits: Limits) -> tuple[EntryPoint, ...]:
    """The model's steps that an engine of these limits can run, the largest of a kind last."""
    prefills = (
        EntryPoint("prefill", rows, chunk)
        for rows in prompts_together(limits)
        for chunk in limits.chunks
    )
    decodes = (
        EntryPoint("decode", rows, tokens)
        for tokens in sorted(limits.q_lens, reverse=True)
        for rows in limits.batches
    )
    return *prefills, *decodes


def all_steps(limits: Limits) -> tuple[Step, ...]:
    """Every step that an engine of these limits can run."""
    entries = entry_points(limits)
    histories = (Remember(e.rows, e.tokens) for e in entries if e.kind == "prefill")
    samples = (Sample(rows, level) for rows in limits.batches for level in Level)
    grammars = (Mask(rows) for rows in limits.batches)
    copies = (Copy(),) if limits.prefix_cache and limits.checkpoints else ()
    return *entries, *samples, *grammars, *histories, Update(), *copies


def op_specs(model: Model, limits: Limits, width: int) -> tuple[ArenaSpec, ...]:
    """The scratch of every op of every entry point; a small batch can ask for more than a large."""
    return tuple(
        spec
        for entry in entry_points(limits)
        if entry.kind == "decode"
        for spec in model.scratch(entry.rows // limits.groups, max_pages=width, q_len=entry.tokens)
    )


def arena_spec(model: Model, limits: Limits, width: int) -> ArenaSpec:
    """The arena that serves them all."""
    return overlaid(op_specs(model, limits, width))


def cache_size(limits: Limits) -> CacheSize:
    """What the caches of an engine are made for."""
    checkpoints = limits.checkpoints if limits.prefix_cache else 0
    return CacheSize(pages=limits.pages, slots=limits.rows_per_group, checkpoints=checkpoints)


def new_state(model: Model, limits: Limits) -> DecodeState:
    """The state of one device of an engine; under `jax.eval_shape`, its shapes."""
    return init_state(model, cache_size(limits), arena_spec(model, limits, limits.table_width))


def new_rows(limits: Limits) -> Rows:
    """Rows of which none has come yet."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), row_shapes(limits))
