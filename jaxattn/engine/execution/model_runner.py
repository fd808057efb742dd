"""The device's side of an engine: what its steps run on, and sending them without waiting."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxattn.engine.runtime.process_state import PROCESS_STATE
from jaxattn.engine.runtime.recompilation_guard import RecompilationGuard
from jaxattn.engine.sampling.sampler import SamplingMode
from jaxattn.engine.steps.batch_update_steps import (
    BatchUpdateStep,
    HistoryAppendStep,
    StateCopyStep,
)
from jaxattn.engine.steps.device_batch import DeviceBatch, RowIndices
from jaxattn.engine.steps.model_steps import FusedDecodeStep, ModelStep, round_of
from jaxattn.engine.steps.pooling_step import PoolingStep
from jaxattn.engine.steps.sample_step import BitmaskStep, sample_of
from jaxattn.engine.steps.score_step import FilteredScoreStep, GatherStep, ScoreControls, ScoreStep
from jaxattn.engine.steps.step_interface import sampled_rows
from jaxattn.memory.engine_limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.parallel import DeviceGroup


@dataclasses.dataclass(eq=False)
class ModelRunner:
    """Sends steps. All of them run in the order in which they are sent.

    Attributes:
        executables: name -> compiled step.
        weights: the leaves of the packed parameters.
        state: arena and caches, donated to each of the model's steps.
        rows: of the device, donated to each step that changes them.
        group: of devices that run the steps; None is JAX's default device.
        failed: the device ended a step with an error: what is in the buffers is unknown.
    """

    limits: Limits
    executables: Mapping[str, Any]
    weights: tuple[jax.Array, ...]
    state: DecodeState
    rows: DeviceBatch
    seal: RecompilationGuard
    group: DeviceGroup | None = None
    failed: bool = False

    def __post_init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._places: jax.Array | None = None
        self._placed: np.ndarray | None = None
        self._rounds: dict[tuple[int, SamplingMode, int, bool], FusedDecodeStep | None] = {}

    @property
    def lost(self) -> bool:
        """Whether the buffers have to be allocated again.

        An interrupt between a step's call and its return leaves donated ones behind.
        """
        leaves = jax.tree.leaves((self.state, self.rows))
        return self.failed or any(leaf.is_deleted() for leaf in leaves)

    def update(self, packed: np.ndarray) -> None:
        """Rows that come, and pages: of `BatchUpdate.drain`."""
        with self.seal.allowed():
            self.rows = self._step(BatchUpdateStep())(self.rows, packed)

    def copy(self, source: int, target: int) -> None:
        """Copies the states of one slot to another."""
        with self.seal.allowed():
            slots = np.array([source, target], np.int32)
            self.state = self._step(StateCopyStep())(self.state, slots)

    def prefill(
        self,
        entry: ModelStep,
        packed: np.ndarray,
        *,
        wanted: Sequence[np.ndarray] = (),
        pooled: Sequence[np.ndarray] = (),
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Reads chunks of prompts, of `PromptLayout.pack`, and decodes the rows beside them.

        Args:
            wanted: of `wanted_tokens`, whose log-probabilities are told.
            pooled: of `wanted_ranges`, whose sums are told.

        Returns:
            (the logits behind the chunks, what `ScoreStep` tells of each of `wanted` and then
            `PoolingStep` of each of `pooled`).
        """
        told = []
        with self.seal.allowed():
            batch: Any = RowIndices(self.rows, packed)  # type: ignore[arg-type]
            logits, self.state, hidden = self._step(entry)(self.weights, self.state, batch)
            for each in wanted:
                hidden, found = self._scored(entry.tokens, hidden, each)
                told.append(found)
            for each in pooled:
                pooling = self._step(PoolingStep.of(self.limits, entry.tokens))
                hidden, found = pooling(hidden, self.weights, each)
                told.append(found)
            for found in told:
                found.copy_to_host_async()
        return logits, told

    def _scored(
        self, tokens: int, hidden: jax.Array, wanted: np.ndarray
    ) -> tuple[jax.Array, jax.Array]:
        """(`hidden`, what is told of tokens behind a prefill step of so many)."""
        gather, step = GatherStep.of(self.limits, tokens), ScoreStep.of(self.limits)
        hidden, read = self._step(gather)(hidden, self.weights, wanted)
        if ScoreControls.filters(wanted):
            step = FilteredScoreStep.of(self.limits)
            wanted = step.wanted(wanted)
        _, told = self._step(step)(read, self.weights, wanted)
        return hidden, told

    def remember(self, tokens: int, packed: np.ndarray) -> None:
        """Writes tokens into the histories of their rows, without reading them.

        Args:
            tokens: of the prefill step whose layout `packed` has.
        """
        with self.seal.allowed():
            step = self._step(HistoryAppendStep(tokens))
            self.rows = step(self.rows, packed)

    def first(
        self, logits: jax.Array, places: np.ndarray, level: SamplingMode, words: np.ndarray | None
    ) -> jax.Array:
        """Samples the rows of a prefill step.

        Args:
            places: -1 for the logits of other rows.
            words: `fill_bitmask` of these rows, if one has a grammar.
        """
        with self.seal.allowed():
            return self._sample(self._masked(logits, words), places, level)

    def decode(
        self,
        places: np.ndarray,
        level: SamplingMode,
        words: Callable[[int], np.ndarray] | None = None,
        steps: int = 1,
        drafts: bool = True,
    ) -> jax.Array:
        """Decodes the rows at `places`, and samples them. What comes back is on its way.

        Args:
            words: makes the bitmasks of so many lines, while the device decodes.
            steps: decode steps, one after another: 1, or `limits.round_steps` at a level that
                such a round has.
            drafts: with drafts, where rows speculate.
        """
        if words is None and (step := self._round_of(len(places), level, steps, drafts)):
            return self._round(places, step)
        assert steps == 1, f"no round of {steps} steps of {len(places)} rows: {level.name}"
        bucket = sampled_rows(self.limits, len(places))
        entry = ModelStep("decode", bucket, 1)
        with self.seal.allowed():
            on_device = self._on_device(places, bucket)
            batch = RowIndices(self.rows, on_device)
            logits, self.state = self._step(entry)(self.weights, self.state, batch)
        found = None if words is None else words(bucket)
        with self.seal.allowed():
            return self._sample(self._masked(logits, found), on_device, level)

    def forget(self) -> None:
        """Lets go of what it holds beside state and rows."""
        self._places = self._placed = None

    def check(self) -> None:
        """Compares the buffers with those that were sealed."""
        self.seal.check((self.state, self.rows))

    def delete(self) -> None:
        """Gives the memory of state and rows back."""
        self.forget()
        for leaf in jax.tree.leaves((self.state, self.rows)):
            if not leaf.is_deleted():
                leaf.delete()

    def _round_of(
        self, rows: int, level: SamplingMode, steps: int, drafts: bool
    ) -> FusedDecodeStep | None:
        """The step that decodes and samples so many rows; None where those are two."""
        key = rows, level, steps, drafts
        if key not in self._rounds:
            bucket = sampled_rows(self.limits, rows)
            self._rounds[key] = round_of(self.limits, bucket, level, steps, drafts)
        return self._rounds[key]

    def _round(self, places: np.ndarray, step: FusedDecodeStep) -> jax.Array:
        executable = self._step(step)
        with self.seal.allowed():
            on_device, held = self._on_device(places, step.rows), (self.state, self.rows)
            (self.state, self.rows), told = executable(self.weights, held, on_device)
            told.copy_to_host_async()
        return told

    def _sample(self, logits: jax.Array, places: Any, level: SamplingMode) -> jax.Array:
        step = self._step(sample_of(self.limits, len(places), level))
        self.rows, told = step(self.rows, logits, places)
        told.copy_to_host_async()
        return told

    def _masked(self, logits: jax.Array, words: np.ndarray | None) -> jax.Array:
        if words is None:
            return logits
        found: jax.Array = self._step(BitmaskStep(len(words)))(logits, words)
        return found

    def _on_device(self, places: np.ndarray, bucket: int) -> jax.Array:
        """The places with padding; they stay on the device until rows come or go."""
        known = self._placed
        if places is not known and (known is None or not np.array_equal(places, known)):
            padded = np.full(bucket, -1, np.int32)
            padded[: len(places)] = places
            whole = PartitionSpec()
            on_all = self.group.put(padded, whole) if self.group else jax.device_put(padded)
            self._places, self._placed = on_all, places
        assert self._places is not None
        return self._places

    def _step(self, step: Any) -> Any:
        """The executable of a step; to make a name takes longer than to look one up."""
        name = self._names.get(step)
        if name is None:
            name = self._names[step] = str(step)
        executable = self.executables[name]
        return executable if self.group is None else functools.partial(in_turn, executable)


def in_turn(executable: Callable[..., Any], *arguments: Any) -> Any:
    """What a step over several devices gives. No other thread sends one before all have this one.

    Virtual devices of a CPU wait for one another for ever where several steps are under way: there
    a step ends before the next is sent.
    """
    with PROCESS_STATE.sending:
        result = executable(*arguments)
        return jax.block_until_ready(result) if jax.default_backend() == "cpu" else result
