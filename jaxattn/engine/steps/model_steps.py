"""The steps that run the model: prefill with decoding rows, decode, and fused decode rounds.

Prefill returns (logits, state, hidden). `hidden` [N, hidden] is the head's input for each prompt
token, from which `ScoreStep` computes log-probabilities. It comes last, so that JAX does not give a
donated buffer of the same shape to it.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn.engine.sampling.sampler import SamplingMode
from jaxattn.engine.steps.device_batch import DeviceBatch, RowIndices, decode_batch
from jaxattn.engine.steps.engine_state import kept_checkpoints, new_state, recurrent, row_shapes
from jaxattn.engine.steps.prefill_batch import PromptLayout
from jaxattn.engine.steps.speculation import draft_head
from jaxattn.engine.steps.speculation.prompt_lookup import draft
from jaxattn.engine.steps.speculation.verification import DraftTokens, draft_batch, verify
from jaxattn.engine.steps.step_interface import EngineStep, int32, on_device
from jaxattn.engine.steps.token_selection import FinishCode, advance
from jaxattn.limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import DecodeBatch, Model
from jaxattn.parallel import local_shard

# The sampling modes that share an executable with decode. Each of them compiles the model once
# more. Other modes take longer than a second call, so that fusing them saves little.
FUSED = (SamplingMode.GREEDY, SamplingMode.DRAWS)


@dataclasses.dataclass(frozen=True)
class ModelStep(EngineStep):
    """A step of the model.

    Attributes:
        kind: "decode" for a step of `rows` rows with `tokens` tokens each, or "prefill" for a step
            of `tokens` prompt tokens, in which up to `rows` rows decode a token each.
    """

    kind: str
    rows: int
    tokens: int

    donated = 1

    def __str__(self) -> str:
        if self.kind == "prefill":
            beside = f" beside {self.rows} rows" if self.rows else ""
            return f"prefill of {self.tokens} tokens{beside}"
        return f"{self.kind} of {self.rows} x {self.tokens} tokens"

    @property
    def reads_rows(self) -> bool:
        """Whether the step builds its batch from the rows on the device."""
        return self.kind == "prefill" or self.tokens == 1

    @property
    def size(self) -> int:
        """The number of tokens; prompt tokens count per data group."""
        return self.rows + self.tokens if self.kind == "prefill" else self.rows * self.tokens

    def step(self, model: Model, limits: Limits) -> Callable:
        """Returns (params, state, batch) -> (logits, state); for prefill also hidden."""
        if self.kind == "prefill":
            layout = PromptLayout.of(limits, self.tokens)
            read = _prefill_pairs if limits.uses_draft_head else _prefill
            return partial(read, model, layout, self.rows > 0)
        if not self.reads_rows:
            return partial(_decode_given, model)
        return partial(_decode_pairs if limits.uses_draft_head else _decode, model)

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        step = self.step(model, limits)

        def of_leaves(weights: Any, state: Any, batch: Any, **options: Any) -> Any:
            return step(jax.tree.unflatten(tree, weights), state, batch, **options)

        return of_leaves

    def batch_shapes(self, limits: Limits) -> Any:
        """Returns the shapes of the step's batch."""
        width = limits.table_width
        if self.reads_rows:
            return RowIndices(row_shapes(limits), self.given_shape(limits))
        tokens, tables = int32(self.rows, self.tokens), int32(self.rows, width)
        return DecodeBatch(tokens, int32(self.rows), tables, int32(self.rows))

    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        state = jax.eval_shape(lambda: new_state(model, limits))
        return tuple(jax.tree.leaves(params)), state, self.batch_shapes(limits)

    def given_shape(self, limits: Limits) -> Any:
        """Returns the shape of the argument from the host, next to the rows on the device."""
        if self.kind == "prefill":
            return int32(*PromptLayout.of(limits, self.tokens).shape)
        return int32(self.rows)

    def given(self, model: Model, limits: Limits) -> Any:
        return self.given_shape(limits) if self.reads_rows else self.batch_shapes(limits)

    def padding(self, model: Model, limits: Limits) -> Any:
        if self.kind == "prefill":
            return PromptLayout.of(limits, self.tokens).pack()
        none = np.full(self.rows, -1, np.int32)
        if self.reads_rows:
            return none
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.int32), self.batch_shapes(limits))
        return dataclasses.replace(zeros, state_indices=none)

    def call(
        self, executable: Any, inputs: Any, weights: Any, state: DecodeState, rows: DeviceBatch
    ) -> tuple[DecodeState, DeviceBatch, Any]:
        batch = inputs
        if self.reads_rows:  # the host sends prompts with each call, but places stay on the device
            batch = RowIndices(rows, inputs if self.kind == "prefill" else on_device(inputs))
        told, state, *_ = executable(weights, state, batch)
        return state, rows, told


@dataclasses.dataclass(frozen=True)
class FusedDecodeStep(EngineStep):
    """A decode step of one token, and the sampling of its `rows` rows in the same executable.

    Attributes:
        decode: The decode half of the step.
    """

    rows: int
    level: SamplingMode

    donated = 1

    def __str__(self) -> str:
        return f"round of {self.rows} rows: {self.level}"

    @property
    def decode(self) -> ModelStep:
        return ModelStep("decode", self.rows, 1)

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        return self.behind(self.decode.function(model, limits, tree), limits)

    def behind(self, decode: Callable, limits: Limits) -> Callable:
        """Returns (weights, (state, rows), places) -> ((state, rows), the result of `advance`)."""

        def both(weights: Any, carry: Any, row_indices: Any, **options: Any) -> Any:
            state, rows = carry
            logits, state = decode(weights, state, RowIndices(rows, row_indices), **options)
            # Without the barrier XLA may sample from logits that it has not rounded.
            logits = lax.optimization_barrier(logits)
            rows, told = advance(
                rows, logits, row_indices, level=self.level, keeps_history=remembers
            )
            return (state, rows), told

        remembers = limits.speculate > 0
        return both

    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        weights, state, batch = self.decode.arguments(model, limits, params)
        return weights, (state, batch.rows), batch.indices

    def given(self, model: Model, limits: Limits) -> Any:
        return int32(self.rows)

    def padding(self, model: Model, limits: Limits) -> Any:
        return np.full(self.rows, -1, np.int32)

    def call(
        self, executable: Any, inputs: Any, weights: Any, state: DecodeState, rows: DeviceBatch
    ) -> tuple[DecodeState, DeviceBatch, Any]:
        (state, rows), told = executable(weights, (state, rows), on_device(inputs))
        return state, rows, told


@dataclasses.dataclass(frozen=True)
class MultiStepDecode(FusedDecodeStep):
    """Several fused decode steps in one call. A row that ends is padding in the remaining steps.

    Attributes:
        steps: The number of steps.
    """

    steps: int

    def __str__(self) -> str:
        return f"{self.steps} rounds of {self.rows} rows: {self.level}"

    def behind(self, decode: Callable, limits: Limits) -> Callable:
        """Like `FusedDecodeStep.behind`, with the results of all steps: int32 [steps, b, 2]."""
        one = super().behind(decode, limits)

        def several(weights: Any, carry: Any, row_indices: Any, **options: Any) -> Any:
            def step(carry: Any, _: None) -> Any:
                return one(weights, carry, row_indices, **options)

            return lax.scan(step, carry, length=self.steps)

        return several


@dataclasses.dataclass(frozen=True)
class SpeculativeDecodeStep(FusedDecodeStep):
    """A decode step of `rows` rows with a draft of `drafts` tokens each, and its verification."""

    drafts: int

    def __str__(self) -> str:
        return f"draft of {self.rows} x {self.drafts} tokens: {self.level}"

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        checkpoints, slots = kept_checkpoints(limits), recurrent(model)
        guess = partial(draft_head.guess, model) if limits.uses_draft_head else _draft_by_lookup

        def drafted(weights: Any, carry: Any, row_indices: Any, **options: Any) -> Any:
            state, rows = carry
            params = jax.tree.unflatten(tree, weights)
            made, state = guess(
                params, state, rows, row_indices, self.drafts, checkpoints, **options
            )
            batch = draft_batch(rows, made, recurrent=slots)
            logits, state, hidden = model.decode_each(params, state, batch, **options)
            rows, told = verify(rows, lax.optimization_barrier(logits), made, self.level)
            if limits.uses_draft_head:
                counts = (told[:, :, 1] != FinishCode.IDLE).sum(1, dtype=jnp.int32)
                state = draft_head.keep(state, row_indices, hidden, counts)
            return (state, rows), told

        return drafted


def fused_levels(limits: Limits, steps: int = 1, drafts: bool = True) -> tuple[SamplingMode, ...]:
    """Returns the sampling modes that have a fused executable of `steps` decode steps.

    In exact mode there are none: XLA may round differently in each executable, and a row's bits
    must not depend on how other rows sample.

    Args:
        steps: The number of decode steps per call.
        drafts: Whether to return the modes of steps with drafts, in an engine that speculates.
    """
    if limits.reproducible:
        return ()
    if limits.speculate and drafts:
        return *FUSED, SamplingMode.CONTROLS
    # If most calls run several steps, one executable is enough for the single steps.
    return FUSED if steps == limits.round_steps else (SamplingMode.DRAWS,)


def round_of(
    limits: Limits, rows: int, level: SamplingMode, steps: int = 1, drafts: bool = True
) -> FusedDecodeStep | None:
    """Returns the fused step for rows that need this mode; None if decode and sampling are two.

    Args:
        drafts: Whether the step uses drafts, in an engine that speculates.
    """
    found = [fused for fused in fused_levels(limits, steps, drafts) if fused >= level]
    if not found:
        return None
    if limits.speculate and drafts:
        return SpeculativeDecodeStep(rows, found[0], limits.speculate)
    return FusedDecodeStep(rows, found[0]) if steps == 1 else MultiStepDecode(rows, found[0], steps)


def rounds(limits: Limits, rows: int) -> tuple[FusedDecodeStep, ...]:
    """Returns every fused step of this number of rows."""
    found = {
        round_of(limits, rows, level, steps, drafts): None
        for drafts in ((True, False) if limits.uses_draft_head else (True,))
        for steps in (1, limits.round_steps)
        for level in fused_levels(limits, steps, drafts)
    }
    return tuple(step for step in found if step is not None)


def _prefill(
    model: Model,
    layout: PromptLayout,
    mixes: bool,
    params: Any,
    state: Any,
    batch: RowIndices,
    **options: Any,
) -> Any:
    """Computes the logits of all rows: those that decode, and those of prompts."""
    own = layout.unpack(local_shard(batch.indices, model.parallel, "data")[0])
    rows = decode_batch(RowIndices(batch.rows, own.decoding)) if mixes else None
    return model.mixed(params, state, own.prompts, rows, own.sources, **options)


def _prefill_pairs(
    model: Model,
    layout: PromptLayout,
    mixes: bool,
    params: Any,
    state: Any,
    batch: RowIndices,
    **options: Any,
) -> Any:
    """Like `_prefill`; the draft head reads the same tokens."""
    unpacked = layout.unpack(batch.indices[0])
    rows = None
    if mixes:
        rows = decode_batch(RowIndices(batch.rows, unpacked.decoding))
        state = draft_head.read_pairs(
            model, params, state, batch.rows, unpacked.decoding, **options
        )
    hidden, state = model.mixed_hidden(params, state, unpacked.prompts, rows, **options)
    of_prompts = hidden[: unpacked.prompts.tokens.size]
    state = draft_head.read_prompts(
        model, params, state, unpacked.prompts, unpacked.next_tokens, of_prompts, **options
    )
    sampled = hidden[unpacked.prompts.sampled(unpacked.sources, beside_rows=mixes)]
    state = draft_head.keep(state, unpacked.row_indices, sampled)
    return model.head(params, sampled), state, of_prompts


def _decode(model: Model, params: Any, state: Any, batch: RowIndices, **options: Any) -> Any:
    return _decode_given(model, params, state, decode_batch(batch), **options)


def _decode_pairs(model: Model, params: Any, state: Any, batch: RowIndices, **options: Any) -> Any:
    """Like `_decode`; the state keeps the draft head's next input."""
    logits, state, hidden = model.decode_each(params, state, decode_batch(batch), **options)
    return logits[:, -1], draft_head.keep(state, batch.indices, hidden[:, -1])


def _decode_given(model: Model, params: Any, state: Any, batch: DecodeBatch, **options: Any) -> Any:
    return model.decode(params, state, _own_rows(model, batch), **options)


def _draft_by_lookup(
    params: Any, state: Any, rows: DeviceBatch, places: Any, *sizes: int, **options: Any
) -> tuple[DraftTokens, Any]:
    """Drafts by prompt lookup, which needs no model."""
    return draft(rows, places, *sizes), state


def _own_rows[Batch](model: Model, batch: Batch) -> Batch:
    """Returns the rows of this device's data group; all rows on one device."""
    return jax.tree.map(lambda x: local_shard(x, model.parallel, "data"), batch)
