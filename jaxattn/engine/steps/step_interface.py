"""The interface of an engine's step before it is compiled."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import Model


class EngineStep(abc.ABC):
    """An executable of the engine. `str` gives its name.

    Attributes:
        donated: The index of the argument that is donated and updated in place.
    """

    donated: int = 0

    @abc.abstractmethod
    def function(self, model: Model, limits: Limits, tree: Any) -> Callable:
        """Returns the function to jit; `tree` is the structure of the packed parameters."""

    @abc.abstractmethod
    def arguments(self, model: Model, limits: Limits, params: Any) -> tuple[Any, ...]:
        """Returns the shapes of the function's arguments."""

    @abc.abstractmethod
    def given(self, model: Model, limits: Limits) -> Any:
        """Returns the shapes of the arguments other than the weights, the state and the rows."""

    @abc.abstractmethod
    def padding(self, model: Model, limits: Limits) -> Any:
        """Returns NumPy arrays for `given` without any row, with which the step writes nothing."""

    @abc.abstractmethod
    def call(
        self,
        executable: Any,
        inputs: Any,
        weights: tuple[jax.Array, ...],
        state: DecodeState,
        rows: DeviceBatch,
    ) -> tuple[DecodeState, DeviceBatch, Any]:
        """Calls the executable and returns (the state, the rows, the result)."""


def on_device(array: Any) -> jax.Array:
    """Returns the array on JAX's default device, unless it is already on devices."""
    return array if isinstance(array, jax.Array) else jax.device_put(array)


def int32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def sampled_rows(limits: Limits, rows: int) -> int:
    """Returns the smallest bucket that holds this number of rows."""
    return next(bucket for bucket in limits.batches if bucket >= rows)
