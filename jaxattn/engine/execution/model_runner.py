"""The device side of an engine: the buffers of its steps, and calls that do not wait for them."""

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
from jaxattn.engine.steps.sampling_steps import BitmaskStep, sample_of
from jaxattn.engine.steps.score_step import FilteredScoreStep, GatherStep, ScoreControls, ScoreStep
from jaxattn.engine.steps.step_interface import sampled_rows
from jaxattn.limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.parallel import DeviceGroup


@dataclasses.dataclass(eq=False)
class ModelRunner:
    """Sends steps to the device, which runs them in the order in which they are sent.

    Attributes:
        executables: A mapping from names to compiled steps.
        weights: The leaves of the packed parameters.
        state: The arena and the caches, donated to each step of the model.
        rows: The rows on the device, donated to each step that changes them.
        group: The devices that run the steps; None means JAX's default device.
        failed: Whether a step ended with an error, so that the buffers' contents are unknown.
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
        self._device_row_indices: jax.Array | None = None
        self._host_row_indices: np.ndarray | None = None
        self._rounds: dict[tuple[int, SamplingMode, int, bool], FusedDecodeStep | None] = {}

    @property
    def lost(self) -> bool:
        """Whether the buffers must be allocated again.

        An interrupt between a step's call and its return leaves donated buffers behind.
        """
        leaves = jax.tree.leaves((self.state, self.rows))
        return self.failed or any(leaf.is_deleted() for leaf in leaves)

    def update(self, packed: np.ndarray) -> None:
        """Sends new rows and pages, as packed by `BatchUpdate.drain`."""
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
        score_targets: Sequence[np.ndarray] = (),
        pooled: Sequence[np.ndarray] = (),
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Reads chunks of prompts, as packed by `PromptLayout.pack`, and decodes the other rows.

        Args:
            score_targets: The tokens to score, from `wanted_tokens`.
            pooled: The ranges of tokens to sum, from `wanted_ranges`.

        Returns:
            (the logits after the chunks, the results of `ScoreStep` for each of `score_targets` and
            then of `PoolingStep` for each of `pooled`).
        """
        results = []
        with self.seal.allowed():
            batch: Any = RowIndices(self.rows, packed)  # type: ignore[arg-type]
            logits, self.state, hidden = self._step(entry)(self.weights, self.state, batch)
            for each in score_targets:
                hidden, found = self._scored(entry.tokens, hidden, each)
                results.append(found)
            for each in pooled:
                pooling = self._step(PoolingStep.of(self.limits, entry.tokens))
                hidden, found = pooling(hidden, self.weights, each)
                results.append(found)
            for found in results:
                found.copy_to_host_async()
        return logits, results

    def _scored(
        self, tokens: int, hidden: jax.Array, targets: np.ndarray
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (`hidden`, the scores) for a prefill step of `tokens` tokens."""
        gather, step = GatherStep.of(self.limits, tokens), ScoreStep.of(self.limits)
        hidden, read = self._step(gather)(hidden, self.weights, targets)
        if ScoreControls.filters(targets):
            step = FilteredScoreStep.of(self.limits)
            targets = step.wanted(targets)
        _, told = self._step(step)(read, self.weights, targets)
        return hidden, told

    def remember(self, tokens: int, packed: np.ndarray) -> None:
        """Writes tokens into the histories of their rows, without running the model.

        Args:
            tokens: The size of the prefill step whose layout `packed` has.
        """
        with self.seal.allowed():
            step = self._step(HistoryAppendStep(tokens))
            self.rows = step(self.rows, packed)

    def first(
        self,
        logits: jax.Array,
        row_indices: np.ndarray,
        level: SamplingMode,
        bitmask: np.ndarray | None,
    ) -> jax.Array:
        """Samples the rows of a prefill step.

        Args:
            row_indices: The row of each line of logits; -1 for lines that are not sampled.
            bitmask: The result of `fill_bitmask` for these rows, if one has a grammar.
        """
        with self.seal.allowed():
            return self._sample(self._masked(logits, bitmask), row_indices, level)

    def decode(
        self,
        row_indices: np.ndarray,
        level: SamplingMode,
        make_bitmask: Callable[[int], np.ndarray] | None = None,
        steps: int = 1,
        drafts: bool = True,
    ) -> jax.Array:
        """Decodes and samples the rows at `row_indices`. The result's copy to the host has started.

        Args:
            make_bitmask: A function that returns the bitmasks of a number of lines. It runs while
                the device decodes.
            steps: The number of consecutive decode steps: 1, or `limits.round_steps` with a
                sampling mode that fused steps support.
            drafts: Whether to use drafts, in an engine that speculates.
        """
        if make_bitmask is None and (
            step := self._round_of(len(row_indices), level, steps, drafts)
        ):
            return self._round(row_indices, step)
        assert steps == 1, f"no round of {steps} steps of {len(row_indices)} rows: {level.name}"
        bucket = sampled_rows(self.limits, len(row_indices))
        entry = ModelStep("decode", bucket, 1)
        with self.seal.allowed():
            on_device = self._on_device(row_indices, bucket)
            batch = RowIndices(self.rows, on_device)
            logits, self.state = self._step(entry)(self.weights, self.state, batch)
        found = None if make_bitmask is None else make_bitmask(bucket)
        with self.seal.allowed():
            return self._sample(self._masked(logits, found), on_device, level)

    def forget(self) -> None:
        """Drops the references to arrays other than the state and the rows."""
        self._device_row_indices = self._host_row_indices = None

    def check(self) -> None:
        """Compares the buffers with the sealed ones."""
        self.seal.check((self.state, self.rows))

    def delete(self) -> None:
        """Frees the memory of the state and the rows."""
        self.forget()
        for leaf in jax.tree.leaves((self.state, self.rows)):
            if not leaf.is_deleted():
                leaf.delete()

    def _round_of(
        self, rows: int, level: SamplingMode, steps: int, drafts: bool
    ) -> FusedDecodeStep | None:
        """The step that decodes and samples `rows` rows; None if that takes two steps."""
        key = rows, level, steps, drafts
        if key not in self._rounds:
            bucket = sampled_rows(self.limits, rows)
            self._rounds[key] = round_of(self.limits, bucket, level, steps, drafts)
        return self._rounds[key]

    def _round(self, row_indices: np.ndarray, step: FusedDecodeStep) -> jax.Array:
        executable = self._step(step)
        with self.seal.allowed():
            on_device, held = self._on_device(row_indices, step.rows), (self.state, self.rows)
            (self.state, self.rows), told = executable(self.weights, held, on_device)
            told.copy_to_host_async()
        return told

    def _sample(self, logits: jax.Array, row_indices: Any, level: SamplingMode) -> jax.Array:
        step = self._step(sample_of(self.limits, len(row_indices), level))
        self.rows, told = step(self.rows, logits, row_indices)
        told.copy_to_host_async()
        return told

    def _masked(self, logits: jax.Array, bitmask: np.ndarray | None) -> jax.Array:
        if bitmask is None:
            return logits
        found: jax.Array = self._step(BitmaskStep(len(bitmask)))(logits, bitmask)
        return found

    def _on_device(self, row_indices: np.ndarray, bucket: int) -> jax.Array:
        """Returns the padded places, which stay on the device until the rows change."""
        known = self._host_row_indices
        if row_indices is not known and (known is None or not np.array_equal(row_indices, known)):
            padded = np.full(bucket, -1, np.int32)
            padded[: len(row_indices)] = row_indices
            whole = PartitionSpec()
            on_all = self.group.put(padded, whole) if self.group else jax.device_put(padded)
            self._device_row_indices, self._host_row_indices = on_all, row_indices
        assert self._device_row_indices is not None
        return self._device_row_indices

    def _step(self, step: Any) -> Any:
        """The executable of a step. Caching its name is faster than building it each time."""
        name = self._names.get(step)
        if name is None:
            name = self._names[step] = str(step)
        executable = self.executables[name]
        return executable if self.group is None else functools.partial(call_serialized, executable)


def call_serialized(executable: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a step over several devices while no other thread can send one.

    Virtual devices of a CPU deadlock if several steps run at once, so on a CPU the step ends before
    the next one is sent.
    """
    with PROCESS_STATE.sending:
        result = executable(*arguments)
        return jax.block_until_ready(result) if jax.default_backend() == "cpu" else result
