"""The steps that sample the rows' next tokens, and that mask logits by grammars before."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.engine.sampling.grammar_bitmask import fill_bitmask, masked, words_of
from jaxattn.engine.sampling.sampler import SamplingMode
from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.engine.steps.engine_state import row_shapes
from jaxattn.engine.steps.step_interface import EngineStep, int32, on_device
from jaxattn.engine.steps.token_selection import advance
from jaxattn.limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import Model


@dataclasses.dataclass(frozen=True)
class SampleStep(EngineStep):
    """Samples `rows` rows in one sampling mode."""

    rows: int
    level: SamplingMode

    def __str__(self) -> str:
        return f"sample of {self.rows} rows: {self.level}"

    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        return partial(
            advance,
            level=self.level,
            keeps_history=limits.speculate > 0,
            replays=limits.reproducible,
        )

    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        return row_shapes(limits), *self.given(model, limits)

    def given(self, model: Model, limits: Limits) -> tuple[Any, ...]:
        logits = jax.ShapeDtypeStruct((self.rows, model.logit_columns), jnp.float32)
        return logits, int32(self.rows)

    def padding(self, model: Model, limits: Limits) -> Any:
        logits = np.zeros((self.rows, model.logit_columns), np.float32)
        return logits, np.full(self.rows, -1, np.int32)

    def call(
        self, executable: Any, inputs: Any, weights: Any, state: DecodeState, rows: DeviceBatch
    ) -> tuple[DecodeState, DeviceBatch, Any]:
        rows, told = executable(rows, *map(on_device, inputs))
        return state, rows, told


def sampled_levels(limits: Limits) -> tuple[SamplingMode, ...]:
    """Returns the modes that have a `SampleStep`. If fused steps sample most greedy rows, the few
    others use the next mode, which gives the same tokens."""
    return tuple(SamplingMode) if limits.round_steps == 1 else tuple(SamplingMode)[1:]


def sample_of(limits: Limits, rows: int, level: SamplingMode) -> SampleStep:
    """Returns the step that samples rows which need this mode."""
    return SampleStep(rows, max(level, sampled_levels(limits)[0]))


@dataclasses.dataclass(frozen=True)
class BitmaskStep(EngineStep):
    """Masks the logits of tokens that the grammars of `rows` rows do not allow."""

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
        return logits, fill_bitmask((), self.rows, model.vocab_size)

    def call(
        self, executable: Any, inputs: Any, weights: Any, state: DecodeState, rows: DeviceBatch
    ) -> tuple[DecodeState, DeviceBatch, Any]:
        logits, words = inputs
        return state, rows, executable(on_device(logits), words)
