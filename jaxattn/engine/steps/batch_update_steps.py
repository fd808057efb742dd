"""The steps that update the rows on the device: new rows and pages, histories, and states."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxattn.engine.steps import device_batch as device_rows
from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.engine.steps.engine_state import new_state, row_shapes
from jaxattn.engine.steps.prefill_batch import PromptLayout, by_lines
from jaxattn.engine.steps.step_interface import EngineStep, int32
from jaxattn.engine.steps.token_selection import remember
from jaxattn.limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import Model


@dataclasses.dataclass(frozen=True)
class BatchUpdateStep(EngineStep):
    """Writes new rows and new pages into the rows on the device."""

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

    def call(
        self, executable: Any, inputs: Any, weights: Any, state: DecodeState, rows: DeviceBatch
    ) -> tuple[DecodeState, DeviceBatch, Any]:
        return state, executable(rows, inputs), ()


@dataclasses.dataclass(frozen=True)
class HistoryAppendStep(BatchUpdateStep):
    """Writes the tokens of a prefill step into the histories of their rows."""

    tokens: int

    def __str__(self) -> str:
        return f"history of {self.tokens} tokens"

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        return partial(_remember, PromptLayout.of(limits, self.tokens))

    def given(self, model: Model, limits: Limits) -> Any:
        return int32(*PromptLayout.of(limits, self.tokens).shape)

    def padding(self, model: Model, limits: Limits) -> Any:
        return PromptLayout.of(limits, self.tokens).pack()


@dataclasses.dataclass(frozen=True)
class StateCopyStep(EngineStep):
    """Copies the states of one slot to another: int32 [2], from and to."""

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

    def call(
        self, executable: Any, inputs: Any, weights: Any, state: DecodeState, rows: DeviceBatch
    ) -> tuple[DecodeState, DeviceBatch, Any]:
        return executable(state, inputs), rows, ()


def _remember(layout: PromptLayout, rows: DeviceBatch, packed: Any) -> DeviceBatch:
    return remember(rows, *by_lines(layout, packed))


def _copy(model: Model, state: DecodeState, slots: Any) -> DecodeState:
    for cache in model.caches:
        arrays = cache.copy_slots(state.caches[cache.name], slots[:1], slots[1:])
        state = state.replace(cache.name, arrays)
    return state
