"""The interface of an engine's step before it is compiled."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.engine.steps.device_batch import DeviceBatch
from jaxattn.memory.engine_limits import Limits
from jaxattn.models.caches.layer_cache import DecodeState
from jaxattn.models.interface import Model


class EngineStep(abc.ABC):
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

    @abc.abstractmethod
    def call(
        self,
        executable: Any,
        given: Any,
        weights: tuple[jax.Array, ...],
        state: DecodeState,
        rows: DeviceBatch,
    ) -> tuple[DecodeState, DeviceBatch, Any]:
        """(the state, the rows, what it tells) after a call of the executable."""


def on_device(array: Any) -> jax.Array:
    """The array on JAX's default device, unless it is on devices already."""
    return array if isinstance(array, jax.Array) else jax.device_put(array)


def int32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def sampled_rows(limits: Limits, rows: int) -> int:
    """With how many rows so many are sampled: the smallest bucket that holds them."""
    return next(bucket for bucket in limits.batches if bucket >= rows)
